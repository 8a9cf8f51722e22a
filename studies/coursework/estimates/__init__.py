"""Unit of the course: estimates."""
