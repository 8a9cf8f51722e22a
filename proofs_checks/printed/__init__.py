"""What papers say of the figures that they print: the cells, expressions over them, and claims that are such rows."""
