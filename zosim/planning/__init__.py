"""Which plan to use: the request, every plan that it admits, bounds, the choice, and the reasons."""
