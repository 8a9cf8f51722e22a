"""What checks run: shipped code in small, and the literal loops that it is held against."""
