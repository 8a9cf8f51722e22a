"""Reading a proof against code: what a statement takes, what its lines use, and a case that runs."""
