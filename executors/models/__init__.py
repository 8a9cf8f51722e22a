"""Models as the executor needs them: loaded safely, cut into segments, with or without adapters."""
