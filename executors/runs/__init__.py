"""A run from its settings to its files: the host loop, the log, resuming, replaying, evaluating."""
