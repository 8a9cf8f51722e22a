"""Unit of the course: seeds."""
