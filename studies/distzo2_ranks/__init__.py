"""Contention, slices and parallel perturbations: what several ranks gain, with one exercise."""
