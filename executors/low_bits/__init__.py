"""Quantized weights of few bits: grids and roundings, quantized values in memory, and products with them."""
