"""The communication volumes that SparQ prints, and what they are consistent with."""
