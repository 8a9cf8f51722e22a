"""Rates of a device: its profile, how it is measured, and at what pace it runs today."""
