"""A run as one file that somebody else can check, and that a calibration can learn from."""
