"""Unit of the course: ranks."""
