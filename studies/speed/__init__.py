"""How fast a step is: held against the reference loop, and against the two forwards that no step can do without."""
