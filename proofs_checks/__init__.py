"""The claims of the papers, checked against the shipped code, each with planted faults that its check catches."""
