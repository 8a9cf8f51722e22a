"""What rounding leaves of weights and of updates."""
