"""A model as a server holds it: frozen, with adapters that come and go; scoring, generating, and steps made of these alone."""
