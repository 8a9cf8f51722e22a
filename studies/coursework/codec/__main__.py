"""Lesson of the unit: what do bits at a split save."""

# %% [markdown]
# # What do bits at a split save?
#
# Two machines hold a part of the blocks each. Every forward sends activations across the split point. A codec sends them
# in fewer bits. Between blocks the residual stream crosses. Inside a block, behind the first linear of the MLP, the
# activation crosses, which is four times as wide. The residual stream crosses beside it: the second linear's product is
# added to it. Answer `questions.md` first. The page of the study has more: `zosim study where_to_split`.

# %%
import matplotlib.pyplot as plt

from studies.coursework.notebook import Described
from studies.where_to_split.cases import BoundaryCase, forward_bytes, slopes

plain = BoundaryCase(64, 256, 4, 32, False, 32, 32, 1, "central")
print(f"between blocks, 32 bits: {forward_bytes(plain) / 1e3:.0f} kB a step")
inside = {
    bits: forward_bytes(BoundaryCase(64, 256, 4, 32, True, bits, 32, 1, "central")) for bits in (1, 2, 4, 8)
}
for bits, num_bytes in inside.items():
    print(f"inside a block, {bits} bits: {num_bytes / 1e3:.0f} kB a step")

# %% [markdown]
# ## What rounding does to a projected gradient
#
# g is a difference of two losses whose activations are 2ε apart. If a codec rounds both to the same value, g is 0. If a
# threshold lies between them, g is a whole grid step over 2ε. Rounding at random has the right mean, and more variance.

# %%
radii = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
figure, axes = plt.subplots(figsize=(6, 3))
for where in (0.0, 0.25, 0.5):
    means = [slopes(radius, where, stochastic=False, num_samples=20_000)[0] for radius in radii]
    axes.plot(radii, means, "o-", label=f"{where} steps from a grid value")
axes.set(xlabel="smoothing radius in grid steps", ylabel="mean estimate of a gradient of 1")
axes.legend()
Described(
    figure,
    "From half a grid step on, all three means are near 1. "
    "At smaller radii, the mean of a value on the grid falls to 0, and that of one at a threshold rises to 4.",
)

# %% [markdown]
# ## Exercise
#
# Write `bytes_forward` in `solution.py`, and grade it:
#
#     zosim study check codec answers.json solution.py --figure curve.svg
#
# `curve.svg` has the bytes of a step by the bits of an activation, yours beside those of zosim's program.
