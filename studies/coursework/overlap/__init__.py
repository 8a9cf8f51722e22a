"""Unit of the course: overlap."""
