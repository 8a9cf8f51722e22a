"""QuZO's statements."""
