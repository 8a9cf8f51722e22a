"""Many configurations planned: a file of them, a database of what came out, as many processes and machines as there are."""
