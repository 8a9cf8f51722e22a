"""Zeroth-order steps in what a serving machine has left: probes as jobs of low priority beside live requests."""
