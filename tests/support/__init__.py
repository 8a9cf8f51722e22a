"""What tests of several files need: models, plans, programs, runs, references, and functions that ranks run."""
