"""Lesson of the unit: what do two ranks exchange."""

# %% [markdown]
# # What do two ranks exchange?
#
# In first-order training each rank has a gradient, as large as the model. All ranks sum them, in every step. In
# zeroth-order training each rank can make z itself, from the seed. What a rank does not know is a loss. So ranks exchange
# losses, a few bytes. Answer `questions.md` first.

# %%
import matplotlib.pyplot as plt
import numpy as np

from studies.coursework.notebook import Described
from studies.coursework.ranks.exercise import examples_of, loss, reference

whole = examples_of(40)
theta, seen = np.zeros(6), []
for number in range(60):
    seen.append(loss(theta, whole))
    theta = reference(theta, whole, (number,))
print(f"one rank: loss {seen[0]:.1f} at first, {seen[-1]:.1f} after {len(seen)} steps")

# %% [markdown]
# ## Two axes
#
# - **By examples** (`data`): each rank scores every seed on its own examples. A loss is a mean over these. Where ranks have
#   unequal numbers of examples, the mean of means is wrong: weigh each by its number.
# - **By perturbations** (`perturb`): each rank scores a share of the seeds on the same examples. Forwards are shared out.
#   Sampling and updates are not: each rank updates along all perturbations.

# %%
forward_ms, update_ms, ranks = 50, 6, np.arange(1, 17)
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(
    ranks, (2 * forward_ms + update_ms) / (2 * forward_ms / ranks + update_ms), "o-", label="by perturbations"
)
axes.plot(ranks, ranks, "--", label="number of ranks")
axes.set(xlabel="ranks", ylabel="times as fast")
axes.legend()
Described(
    figure,
    "The curve bends below the straight line of the number of ranks. 16 ranks are less than 9 times as fast.",
)

# %% [markdown]
# ## Exercise
#
# Write `step` in `solution.py`, and grade it. The grader runs two ranks as threads:
#
#     zosim study check ranks answers.json solution.py --figure curve.svg
#
# Then run it as two processes that exchange over gloo. Both must report the same loss:
#
#     python -m studies.coursework.ranks.gloo solution.py
