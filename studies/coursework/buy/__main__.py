"""Lesson of the unit: what do 500 USD buy."""

# %% [markdown]
# # What do 500 USD buy?
#
# A machine has a price for each hour, and a step has a predicted time. Money for each step is time times price. The
# fastest machine is often not the cheapest. And a prediction has an interval: what is sure is at its slow end. Answer
# `questions.md` first. `zosim buy --budget '500 USD'` does the same with a table of prices.

# %%
import matplotlib.pyplot as plt

import zosim
from studies.coursework.notebook import Described

usd_per_hour = {"rtx4090-2x": 0.8, "dgx-h100": 3.0}
steps: dict[str, tuple[float, float, float]] = {}
for name, price in usd_per_hour.items():
    made = zosim.plan(
        model="opt-1.3b", hardware=name, device="gpu0", dtype="float16", seq=256, batch=16
    ).prediction
    steps[name] = made.low_s, made.step_time_s, made.high_s
    low, middle, high = (500 / price * 3600 / seconds for seconds in reversed(steps[name]))
    print(f"{name}: {middle:,.0f} steps for 500 USD, between {low:,.0f} and {high:,.0f}")

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for row, (name, (low, middle, high)) in enumerate(steps.items()):
    usd = [1000 * seconds / 3600 * usd_per_hour[name] for seconds in (low, middle, high)]
    axes.plot([usd[0], usd[2]], [row, row], label=f"{name}, interval")
    axes.plot(usd[1], row, "o", label=f"{name}, prediction")
axes.set(
    xlabel="USD for 1,000 steps",
    ylabel="machine",
    yticks=range(len(steps)),
    yticklabels=list(steps),
    xscale="log",
)
Described(
    figure,
    "For each machine a line from the fast to the slow end of its interval, and a dot at the prediction. "
    "The two intervals overlap.",
)

# %% [markdown]
# ## Read a prediction critically
#
# - An interval of data sheets is wide. `zosim calibrate` narrows it on a machine that you have.
# - Intervals that overlap decide nothing. Ask how wrong a prediction may be before the answer turns.
# - A step is a sum of causes. If one constant is wrong, the rows that have most of it are off by most.
#
# The page of the study shows how to find it: `zosim study reading_predictions`.
#
# ## Exercise
#
# Write `diagnose` in `solution.py`: which constant is wrong, and by which factor? Grade it:
#
#     zosim study check buy answers.json solution.py --figure curve.svg
#
# `curve.svg` has the factor that you find by the true one.
