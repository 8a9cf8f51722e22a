"""The machine of every rank: its devices and rates, the links and rings that join ranks, what an instruction asks of each."""
