"""Models as the executor needs them: loaded safely, split into segments, with or without adapters."""
