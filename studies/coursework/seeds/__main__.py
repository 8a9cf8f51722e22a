"""Lesson of the unit: why do seeds suffice."""

# %% [markdown]
# # Why do seeds suffice?
#
# A step is a function of the weights and of four numbers: seed, projected gradient, learning rate, ε. The seed gives z.
# The projected gradient holds all that the batch and the forwards had to say. So the base weights and a log of three
# numbers a step determine the weights after every step. Answer `questions.md` first.
#
# The page of the study has the details: `zosim study why_seeds_suffice`.

# %%
import matplotlib.pyplot as plt

from studies.coursework.notebook import Described
from studies.why_seeds_suffice.training import train

run = train(12)
rows = [(row.seed, row.projected_gradient, row.learning_rate) for row in run.log]
num_bytes = sum(tensor.nbytes for tensor in run.tuned.values())
print(f"weights: {num_bytes:,} bytes; log: {24 * len(rows)} bytes for {len(rows)} steps")

# %% [markdown]
# The scalars of this run are all that the batches left behind. A second machine that has the base weights needs nothing else.

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(range(len(rows)), [g for _, g, _ in rows])
axes.set(xlabel="step", ylabel="projected gradient")
Described(
    figure,
    "A bar for each of 12 steps. "
    "Projected gradients have both signs, and the largest is over ten times the smallest.",
)

# %% [markdown]
# ## Every bit
#
# A run perturbs the weights, perturbs them back twice as far, and restores them. In floating point (a + b) - 2b + b is
# not always a. So the run leaves its rounding in the weights. A replay repeats it, pass by pass:
#
# | pass | adds |
# | --- | --- |
# | plus | (1 · z) · ε |
# | minus | (-2 · z) · ε |
# | restore | (1 · z) · ε |
# | update | -η · (g · z) |
#
# A replay makes no forward. It takes four passes over the parameters, where training takes two forwards as well.
#
# ## Exercise
#
# Write `rebuild` in `solution.py`, and grade it:
#
#     zosim study check seeds answers.json solution.py --figure curve.svg
#
# `curve.svg` has the distance of the weights from where they began, as you rebuild them and as the run had them.
