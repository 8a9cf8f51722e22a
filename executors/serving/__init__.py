"""A frozen model behind a server: adapters that come and go, scores and text, and zeroth-order steps made of these alone."""
