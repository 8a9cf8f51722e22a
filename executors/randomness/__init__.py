"""Random perturbations: the disciplines of their numbers, their families, and the ways to draw them."""
