"""Weights as codes of few bits: grids and roundings, codes in memory, and products with them."""
