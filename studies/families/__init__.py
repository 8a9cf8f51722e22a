"""What can be done with each family of language models that transformers knows, tried on a tiny model of each."""
