"""Predicted against measured on this machine, for cases that the calibration has not seen."""
