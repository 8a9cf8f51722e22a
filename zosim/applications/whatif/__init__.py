"""A plan on a machine that is not as it was: what it costs there, what to plan instead, and on which figures it depends."""
