"""Solution of the unit on memory."""

from __future__ import annotations


def right(blocks, method, num_staging_buffers):
    sizes, saved, working = zip(*blocks, strict=True)
    if method == "adam":
        return (2 + 2 + 4 + 4 + 4) * sum(sizes) + sum(saved) + max(working)
    if method == "in_place":
        return 2 * sum(sizes) + max(working)
    return 2 * (sizes[0] + sizes[-1] + num_staging_buffers * max(sizes[1:-1])) + max(working)


def without(method, change):
    """A solution that is wrong for one method only."""
    return lambda blocks, m, buffers: right(blocks, m, buffers) + (change(blocks) if m == method else 0)


WRONG = [
    (without("adam", lambda blocks: -2 * sum(b[0] for b in blocks)), "gradients are missing"),
    (without("adam", lambda blocks: -sum(b[1] for b in blocks)), "saved activations of all blocks"),
    (without("in_place", lambda blocks: 2 * sum(b[0] for b in blocks)), "z needs no memory"),
    (without("in_place", lambda blocks: sum(b[1] for b in blocks)), "no backward pass follows"),
    (lambda blocks, m, buffers: right(blocks, m, 1), "every staging buffer has a block"),
    (
        lambda blocks, m, buffers: right(blocks, "in_place" if m == "offloaded" else m, buffers),
        "are on the host",
    ),
    (lambda blocks, m, buffers: 8 * right(blocks, m, buffers), "bits or bytes"),
    (lambda blocks, m, buffers: "2 GB", "a number"),
]


def answers(billions, blocks, width, batch, seq, gpu_gb):
    one_sequence_gb = 34 * seq * width / 1e9
    return {
        "adam": 16 * billions,
        "zeroth_order": 2 * billions,
        "saved": blocks * batch * one_sequence_gb,
        "live": batch * one_sequence_gb,
        "sequences": (gpu_gb - 2 * billions) / one_sequence_gb,
    }


MISSES = [
    ("adam", lambda n, right: 14 * n["billions"], "gradients are missing"),
    ("adam", lambda n, right: right * 1e9 / 2**30, "KiB, MiB and GiB"),
    ("zeroth_order", lambda n, right: 4 * n["billions"], "no second copy"),
    ("live", lambda n, right: n["blocks"] * right, "freed when the next"),
    ("sequences", lambda n, right: right / n["blocks"], "one block's activations"),
]
