"""DistZO2's statements."""
