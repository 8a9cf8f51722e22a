"""ZO2's statements."""
