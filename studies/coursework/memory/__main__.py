"""Lesson of the unit: what does a step keep in memory."""

# %% [markdown]
# # What does a step keep in memory?
#
# A first-order step keeps weights, gradients, the state of the optimizer, and the activations of every block until the
# backward pass has used them. A zeroth-order step keeps weights, and the activations of the block that runs. List what
# is alive at the worst moment, with its bytes, before you read on: `questions.md` has your numbers.

# %%
import matplotlib.pyplot as plt

import zosim
from studies.coursework.notebook import Described

sizes = ("opt-1.3b", "opt-6.7b", "opt-13b")
billions = (1.3, 6.7, 13.0)
peaks: dict[str, list[float]] = {"mezo": [], "zo2": []}
for size in sizes:
    for method, found in peaks.items():
        made = zosim.plan(
            model=size,
            hardware="dgx-h100",
            device="gpu0",
            dtype="float16",
            seq=512,
            batch=4,
            method=method,
            keep_perturbations=False,
        )
        found.append(made.prediction.footprints.largest.device_bytes / 1e9)
for method, found in peaks.items():
    print(method, ", ".join(f"{peak:.1f} GB" for peak in found))

# %% [markdown]
# ## Bytes for each parameter
#
# | what | first order, Adam | zeroth order |
# | --- | ---: | ---: |
# | weights in 16 bits | 2 | 2 |
# | gradients in 16 bits | 2 | none |
# | copy of the weights in 32 bits | 4 | none |
# | two moments in 32 bits | 8 | none |
# | z | none | none: it is made again from its seed |
#
# zosim predicts the points of the next figure from plans. The lines are bytes for each parameter alone.

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for method, found in peaks.items():
    axes.plot(billions, found, "o", label=f"zosim, {method}")
axes.plot(billions, [16 * each for each in billions], label="16 bytes: Adam")
axes.plot(billions, [2 * each for each in billions], label="2 bytes: in place")
axes.set(xlabel="billion parameters", ylabel="GB")
axes.legend()
Described(
    figure,
    "Adam's line is the steepest. "
    "The points of mezo lie a few GB above the line of 2 bytes, and those of zo2 grow slowest.",
)

# %% [markdown]
# ## Blocks on the host
#
# A zeroth-order step uses one block at a time. So the blocks can wait in host memory, and pass through a few staging
# buffers on the device. Memory then no longer grows with the number of blocks. Embedding and head stay on the device.
#
# ## Exercise
#
# Write `peak_bytes` in `solution.py`, and grade it:
#
#     zosim study check memory answers.json solution.py --figure curve.svg
#
# `curve.svg` has the peak of an offloaded step by the number of blocks, yours beside the reference's.
