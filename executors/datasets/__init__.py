"""What a run reads and minimises: examples, prompts, batches, objectives."""
