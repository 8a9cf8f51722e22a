"""Unit of the course: memory."""
