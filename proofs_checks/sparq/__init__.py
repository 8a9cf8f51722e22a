"""SparQ's statements."""
