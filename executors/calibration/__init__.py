"""What a machine does per second: measured, fitted, and held against whole steps."""
