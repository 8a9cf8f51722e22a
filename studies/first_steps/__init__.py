"""Plan, simulate, run and compare: the four commands, once each, on a model that is made on the spot."""
