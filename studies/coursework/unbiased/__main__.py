"""Lesson of the unit: how does one round without bias."""

# %% [markdown]
# # How does one round without bias?
#
# A weight of few bits is a whole multiple of a step. An update of a tenth of a step is lost if the sum is rounded to the
# nearest: the weight never moves. Rounded at random, the weight goes up by a whole step in one update of ten. On average
# it moves as it should. Answer `questions.md` first.

# %%
import matplotlib.pyplot as plt
import numpy as np

from studies.coursework.notebook import Described

generator = np.random.default_rng(0)
num_updates, share = 400, 0.03
nearest, at_random = np.zeros(num_updates + 1), np.zeros((5, num_updates + 1))
for number in range(num_updates):
    nearest[number + 1] = np.round(nearest[number] + share)
    at_random[:, number + 1] = np.floor(at_random[:, number] + share + generator.random(5))
print(
    f"after {num_updates} updates of {share} steps: nearest {nearest[-1]:g}, at random {at_random[:, -1].mean():.1f} on average"
)

# %% [markdown]
# ## Probability, mean, variance
#
# A value lies between two grid values, a share p of the step above the lower. It goes up with probability p.
#
# - Its mean is the value itself: there is no bias.
# - Its variance is p(1 - p) steps². It is largest in the middle, and 0 on the grid.
# - Each element needs a random number of its own. With a shared one every mean is right, and sums jump.

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(at_random.T, color="C0", alpha=0.5, label=["at random", *"____"])
axes.plot(nearest, "C1", label="nearest")
axes.plot(share * np.arange(num_updates + 1), "k--", label="without rounding")
axes.set(xlabel="update", ylabel="weight in steps")
axes.legend()
Described(
    figure,
    "The weight rounded to the nearest stays at 0. "
    "Five weights rounded at random climb around the straight line without rounding.",
)

# %% [markdown]
# ## Exercise
#
# Write `rounded` in `solution.py`, and grade it:
#
#     zosim study check unbiased answers.json solution.py --figure curve.svg
#
# `curve.svg` has the mean of many roundings by value. More on what few bits do to a step: `zosim study quzo`.
