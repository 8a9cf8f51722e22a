"""Runs that are killed, and resumed."""
