"""Machines that other tools have already described."""
