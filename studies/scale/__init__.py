"""How long predicting takes: a thousand GPUs event by event, folded, in closed form, and in plain simpy."""
