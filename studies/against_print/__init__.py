"""Predictions held against the published cells of ZO2 and DistZO2, beside three baselines."""
