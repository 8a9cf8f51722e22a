"""The tables of ZO2 made again: published, predicted, error and verdict per cell, with an audit."""
