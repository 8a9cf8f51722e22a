"""How long a step takes where nothing is shared, without playing its events."""
