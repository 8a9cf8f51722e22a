"""Closed forms, as functions of their parameters, for checks and for whoever asks ``zosim check --oracle NAME``."""

from proofs_checks.oracles.registry import Oracle, evaluate, oracle_named, oracles

__all__ = ["Oracle", "evaluate", "oracle_named", "oracles"]
