"""The tables of DistZO2 made again: published, predicted, error and verdict per cell, with an audit."""
