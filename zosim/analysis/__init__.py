"""What came out of a simulation or a run: memory, the critical path, prediction against measurement."""
