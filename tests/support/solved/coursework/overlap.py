"""Solution of the unit on offloading."""

from __future__ import annotations

from itertools import accumulate


def right(blocks, num_staging_buffers):
    up = compute = down = 0.0
    ends = []
    for number, (upload_s, compute_s, offload_s) in enumerate(blocks):
        freed = ends[number - num_staging_buffers] if number >= num_staging_buffers else 0.0
        up = max(up, freed) + upload_s
        compute = max(compute, up) + compute_s
        down = max(down, compute) + offload_s
        ends.append(down)
    return ends


def without_streams(blocks, num_staging_buffers):
    return [sum(b[0] for b in blocks[: n + 1]) + block[1] + block[2] for n, block in enumerate(blocks)]


WRONG = [
    (lambda blocks, buffers: list(accumulate(map(sum, blocks))), "overlap is forgotten"),
    (lambda blocks, buffers: right(blocks, len(blocks)), "frees a staging buffer"),
    (lambda blocks, buffers: right(blocks, buffers + 1), "one staging buffer too many"),
    (without_streams, "one block at a time"),
    (lambda blocks, buffers: right([(0, c, 0) for _, c, _ in blocks], buffers), "copies are missing"),
    (lambda blocks, buffers: [1.0] * len(blocks), "wait for"),
    (lambda blocks, buffers: right(blocks, buffers)[-1], "a list"),
]


def answers(block_mb, link_gb_per_s, compute_ms, blocks):
    copy_ms = block_mb * 1e6 / (link_gb_per_s * 1e9) * 1e3
    return {
        "upload": copy_ms,
        "one_buffer": blocks * (copy_ms + compute_ms + copy_ms),
        "overlapped": copy_ms + compute_ms + copy_ms + (blocks - 1) * max(copy_ms, compute_ms),
        "batch": copy_ms / compute_ms,
    }


def serial(n, right):
    return n["blocks"] * (2 * n["block_mb"] / n["link_gb_per_s"] + n["compute_ms"])


MISSES = [
    ("upload", lambda n, right: right / 1000, "prefixes"),
    ("upload", lambda n, right: 8 * right, "bits or bytes"),
    ("overlapped", serial, "overlap is forgotten"),
    ("overlapped", lambda n, right: n["blocks"] * n["block_mb"] / n["link_gb_per_s"], "fill and to drain"),
    ("batch", lambda n, right: 1 / right, "upside down"),
]
