"""Unit of the course: unbiased."""
