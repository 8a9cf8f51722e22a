"""Lesson of the unit: what does a zeroth-order step estimate."""

# %% [markdown]
# # What does a zeroth-order step estimate?
#
# A step forwards a batch at θ + εz and at θ - εz. The two losses give one number, the projected gradient:
#
#     g = (L(θ + εz) - L(θ - εz)) / 2ε  ≈  z·∇L
#
# The step then moves along z by g. So it estimates the gradient by `g·z`. This unit asks how good that estimate is.
# Answer `questions.md` with a pencil before you read on.

# %%
import matplotlib.pyplot as plt
import numpy as np

from studies.coursework.notebook import Described

dim = 50
weights = np.linspace(1, 3, dim)
theta = np.ones(dim)
gradient = weights * theta
z = np.random.default_rng(0).standard_normal((4000, dim))
estimates = (z @ gradient)[:, None] * z
print(
    f"|mean of g z - gradient| / |gradient| = {np.linalg.norm(estimates.mean(0) - gradient) / np.linalg.norm(gradient):.2f}"
)
print(f"mean |g z|^2 / |gradient|^2 = {np.mean((estimates**2).sum(1)) / (gradient @ gradient):.1f}")

# %% [markdown]
# ## Right on average, and noisy
#
# z has independent normal elements, so the mean of z·zᵀ is the identity. The mean of `g·z` is therefore the gradient.
# The mean of |g·z|² is d + 2 times |∇L|²: d from the d elements, and 2 because the fourth moment of a normal is 3.
# One estimate of a model with a billion parameters points almost anywhere. It still goes downhill on average.
#
# The mean of P estimates has a P-th of the variance, (d + 1)/P.

# %%
counts = [1, 4, 16, 64, 256, 1024]
errors = [np.linalg.norm(estimates[:count].mean(0) - gradient) / np.linalg.norm(gradient) for count in counts]
figure, axes = plt.subplots(figsize=(6, 3))
axes.loglog(counts, errors, "o", label="measured")
axes.loglog(counts, [((dim + 1) / count) ** 0.5 for count in counts], label="square root of (d + 1)/P")
axes.set(xlabel="perturbations P", ylabel="error over |gradient|")
axes.legend()
Described(
    figure,
    "The error falls as one over the square root of P. Measured points lie near the formula's line.",
)

# %% [markdown]
# ## Why two signs
#
# A forward difference, (L(θ + εz) - L(θ))/ε, has an error of ½ε zᵀHz. The central one cancels it. On a quadratic loss
# it is exact at any ε. It costs two forwards for each perturbation.
#
# ## Exercise
#
# Write `estimate` in `solution.py`, and grade it:
#
#     zosim study check estimates answers.json solution.py --figure curve.svg
#
# `curve.svg` has the error of your estimate over P, beside the reference's.
