"""Lesson of the unit: what does offloading cost."""

# %% [markdown]
# # What does offloading cost?
#
# Blocks wait on the host. Each is uploaded, used by two forwards, updated and offloaded again. One after the other that
# would be slow. But the upload of a block, the forwards of the one before and the offload of the one before that use
# different hardware. They run at the same time, if there are staging buffers for them. Answer `questions.md` first.

# %%
import matplotlib.pyplot as plt

import zosim
from studies.coursework.notebook import Described

for buffers in (1, 2, 3):
    made = zosim.plan(
        model="opt-13b",
        hardware="rtx4090-2x",
        device="gpu0",
        dtype="float16",
        seq=512,
        residency="offloaded",
        staging_buffers=buffers,
    )
    print(f"{buffers} staging buffers: {made.prediction.step_time_s:.2f} s a step")

# %% [markdown]
# ## Fill, steady state, drain
#
# With enough buffers, a step of n blocks takes
#
#     upload + compute + offload + (n - 1) · max(upload, compute, offload)
#
# The first three terms fill and drain the pipeline. The busiest stream sets the rest. A larger batch makes compute
# longer and leaves copies as they are. From some batch on, offloading costs nothing.

# %%
batches = (1, 2, 4, 8, 16, 32)
copy_s, compute_s, num_blocks = 0.026, 0.004, 40
overlapped = [2 * copy_s + b * compute_s + (num_blocks - 1) * max(copy_s, b * compute_s) for b in batches]
serial = [num_blocks * (2 * copy_s + b * compute_s) for b in batches]
resident = [num_blocks * b * compute_s for b in batches]
figure, axes = plt.subplots(figsize=(6, 3))
for label, seconds in (("one buffer", serial), ("overlapped", overlapped), ("resident", resident)):
    axes.loglog(batches, seconds, "o-", label=label)
axes.set(xlabel="batch", ylabel="seconds a step")
axes.legend()
Described(
    figure,
    "One buffer is the slowest. "
    "The overlapped curve is flat up to batch 4, and meets the resident curve from batch 8 on.",
)

# %% [markdown]
# ## Exercise
#
# Write `finish_times` in `solution.py`, and grade it:
#
#     zosim study check overlap answers.json solution.py --figure curve.svg
#
# `curve.svg` has the time at which each block has left the device: your trace beside the reference's.
