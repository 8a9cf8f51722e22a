"""Statements of the paper that takes zeroth-order fine-tuning for an inference workload."""
