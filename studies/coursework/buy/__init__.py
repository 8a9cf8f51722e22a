"""Unit of the course: buy."""
