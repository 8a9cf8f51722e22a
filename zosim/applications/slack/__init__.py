"""Zeroth-order steps in what a serving machine has left: background steps as jobs of low priority beside live requests."""
