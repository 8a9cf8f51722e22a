"""Copy this file to solution.py, write the function, and try it: ``zosim study check memory answers.json solution.py``."""

from __future__ import annotations

from collections.abc import Sequence


def peak_bytes(blocks: Sequence[tuple[int, int, int]], method: str, num_staging_buffers: int) -> float:
    """Return the peak memory of a device in a step, in bytes.

    - `blocks`: embedding, blocks and head: parameters, bytes of activations that a backward pass needs, and bytes in use while it
      runs.
    - `method`: ``"adam"``: weights and gradients in 2 bytes, a copy of the weights and two moments in 4, and saved activations.
      ``"in_place"``: zeroth order, weights in 2 bytes. ``"offloaded"``: the same, with all but the first and the last on the
      host.
    - `num_staging_buffers`: of the device, for offloaded blocks; each holds any of them.
    """
    raise NotImplementedError("write it")
