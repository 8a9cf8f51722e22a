"""What zosim itself promises: estimators, randomness, schedules, stages, costs, and compositions of several papers."""
