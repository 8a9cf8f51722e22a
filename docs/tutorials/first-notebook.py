"""Source of first-notebook.md and first-notebook.ipynb: ``python -m studies.coursework.notebook docs/tutorials/first-notebook.py``."""

# %% [markdown]
# # Your first notebook
#
# You will plan, simulate, train and compare in a notebook, where results appear as tables and pictures.
# You need zosim with torch ([install](../how-to/install.md)), and Jupyter or another editor of notebooks. This folder has the lesson as
# `first-notebook.ipynb` and `first-notebook.py`, too.
#
# ## 1. Plan
#
# The last line of a cell is shown: the candidates, the prediction, the reasons, and all plans that fit as a picture.

# %%
import zosim

decision = zosim.plan("opt-1.3b", "rtx4090-2x", batch=8, seq=256, dtype="float16", max_device_memory="2.5GiB")
decision

# %% [markdown]
# With pandas installed, `decision.to_pandas()` returns a row for each candidate.
#
# ## 2. Simulate
#
# A simulated plan shows the timeline of one step, with a row for each stream, for the rank that ends last.

# %%
simulated = zosim.simulate(decision)
simulated

# %% [markdown]
# The prediction lists the busy seconds of each label.

# %%
simulated.prediction

# %% [markdown]
# ## 3. Train
#
# A small model comes with zosim. Training prints a line for each step, and draws the losses at the end.

# %%
from executors.models.pretrain import Recipe, pretrained_model

small = pretrained_model(Recipe())
run = zosim.run(model=small.model, data=small.train, batch=8, steps=8, threads=1, out="runs/notebook")
run

# %% [markdown]
# ## 4. Compare
#
# The run and its prediction, label by label. The largest contribution to the error comes first.

# %%
comparison = zosim.compare("runs/notebook")
comparison

# %% [markdown]
# ## 5. Keep it
#
# A report is one file for a browser, with the same pictures and more.

# %%
zosim.write_report("runs/notebook", output="notebook.html")
