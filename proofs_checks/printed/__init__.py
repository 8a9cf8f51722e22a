"""What papers say of the tables that they print."""
