"""Unit of the course: codec."""
