"""LoZO as a training loop and as one batch of scoring: how long a step takes, and how far the roundings differ."""
