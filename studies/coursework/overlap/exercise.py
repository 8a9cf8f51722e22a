"""What offloading costs: predictions, and the times of a step's blocks. Start from ``stub.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from studies.coursework.pencil import PencilQuestion
from studies.exercises import Grade, plain

Times = Callable[[Sequence[tuple[float, float, float]], int], object]

FUNCTION = "finish_times"
CURVE = ("Seconds at which each block has left the device again", "block")


_FILL = (
    "the pipeline has to fill and to drain, too: the first block takes its whole time, each other one copy"
)
_PACE = "the copies take longer than the forwards: they set the pace"


def numbers(r: random.Random) -> dict[str, float]:
    """Return a student's numbers; copies take longer than the forwards."""
    return {
        "block_mb": 10 * r.randint(30, 60),
        "link_gb_per_s": r.randint(12, 24),
        "compute_ms": r.randint(6, 11),
        "blocks": r.randint(24, 40),
    }


def questions(block_mb: float, link_gb_per_s: float, compute_ms: float, blocks: int) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    copy_ms = block_mb / link_gb_per_s
    busiest = max(copy_ms, compute_ms)
    serial = blocks * (2 * copy_ms + compute_ms)
    overlapped = 2 * copy_ms + compute_ms + (blocks - 1) * busiest
    link = f"blocks of {block_mb} MB over a link of {link_gb_per_s} GB/s each way at once"
    step = f"{blocks} {link}, {compute_ms} ms of compute a block"
    return [
        PencilQuestion(
            "upload",
            f"{link}: upload of a block",
            "ms",
            copy_ms,
            (
                (2 * copy_ms, "that is both ways; upload and offload use the link at the same time"),
                (link_gb_per_s / block_mb, "upside down: bytes over bytes a second"),
            ),
        ),
        PencilQuestion(
            "one_buffer",
            f"{step}, one staging buffer: the step",
            "ms",
            serial,
            (
                (overlapped, "one buffer is in use from upload to offload: nothing overlaps"),
                (blocks * (copy_ms + compute_ms), "the offload is missing"),
                (2 * copy_ms + compute_ms, "that is one block"),
            ),
        ),
        PencilQuestion(
            "overlapped",
            f"{step}, staging buffers as many as wanted: the step",
            "ms",
            overlapped,
            (
                (serial, "the overlap is forgotten: different blocks upload, compute and offload at once"),
                (blocks * busiest, _FILL),
                (overlapped - busiest, _FILL),
                (
                    overlapped + busiest,
                    "one block too many: filling and draining is one block's time already",
                ),
                (blocks * compute_ms, _PACE),
                (2 * copy_ms + blocks * compute_ms, _PACE),
                (blocks * (copy_ms + compute_ms), "the overlap is forgotten, and so is the offload"),
            ),
        ),
        PencilQuestion(
            "batch",
            f"{step}: how many times the batch makes compute as long as a copy (compute grows with the batch)?",
            "",
            copy_ms / compute_ms,
            (
                (compute_ms / copy_ms, "upside down: compute has to grow to the copy's time"),
                (2 * copy_ms / compute_ms, "the link carries both ways at once: one copy's time"),
            ),
        ),
    ]


def _reference(blocks: Sequence[tuple[float, float, float]], num_buffers: int) -> list[float]:
    up = compute = down = 0.0
    ends: list[float] = []
    for number, (upload_s, compute_s, offload_s) in enumerate(blocks):
        free = ends[number - num_buffers] if number >= num_buffers else 0.0
        up = max(up, free) + upload_s
        compute = max(up, compute) + compute_s
        down = max(compute, down) + offload_s
        ends.append(down)
    return ends


_EVEN = [(2.0, 1.0, 2.0)] * 5
_UNEVEN = [
    (1.0, 3.0, 1.0),
    (4.0, 1.0, 4.0),
    (1.0, 5.0, 0.5),
    (2.0, 0.5, 6.0),
    (1.0, 1.0, 1.0),
    (3.0, 2.0, 1.0),
]
_CASES = ((_EVEN, 9), (_UNEVEN, 9), (_UNEVEN, 1), (_UNEVEN, 2), (_UNEVEN, 3))


def check(finish_times: Times) -> Grade:
    """Return whether `finish_times` follows blocks through the staging buffers, and if not, what to look at."""
    for done, (blocks, num_buffers) in enumerate(_CASES):
        complaint = _complaint(plain(finish_times(list(blocks), num_buffers)), blocks, num_buffers)
        if complaint:
            return Grade(
                False, f"{len(blocks)} blocks, {num_buffers} staging buffers: {complaint}", done / len(_CASES)
            )
    return Grade(True, f"{len(_CASES)} steps end when you say")


def _complaint(answer: object, blocks: list[tuple[float, float, float]], num_buffers: int) -> str:
    if not (
        isinstance(answer, list)
        and len(answer) == len(blocks)
        and all(isinstance(t, int | float) for t in answer)
    ):
        return "return a list with the seconds at which each block's offload ends"
    total = 0.0
    serial = [total := total + sum(block) for block in blocks]
    compute_only = [(0.0, compute_s, 0.0) for _, compute_s, _ in blocks]
    independent = [
        sum(up for up, _, _ in blocks[: n + 1]) + block[1] + block[2] for n, block in enumerate(blocks)
    ]
    for wrong, advice in (
        (_reference(blocks, num_buffers), ""),
        (serial, "the overlap is forgotten: streams of upload, compute and offload run beside each other"),
        (
            _reference(blocks, len(blocks)),
            "an upload waits until the offload of an earlier block frees a staging buffer",
        ),
        (
            _reference(blocks, num_buffers + 1),
            "one staging buffer too many: block i takes that of block i - num_staging_buffers",
        ),
        (_reference(blocks, max(num_buffers - 1, 1)), "one staging buffer too few"),
        (_reference(compute_only, num_buffers), "the copies are missing"),
        (
            [1000 * time for time in _reference(blocks, num_buffers)],
            "seconds are asked, as those of the blocks are",
        ),
        (
            independent,
            "a stream does one block at a time: compute and offload wait for the block before, too",
        ),
    ):
        if all(abs(given - time) < 1e-9 for given, time in zip(answer, wrong, strict=True)):
            return advice
    first = next(n for n, time in enumerate(_reference(blocks, num_buffers)) if abs(answer[n] - time) >= 1e-9)
    return f"block {first} ends at {answer[first]:g} s: what did its upload, its compute and its offload wait for?"


def curve(finish_times: Times) -> list[tuple[float, float, float]]:
    """Return when each block has left again, with two staging buffers, and the reference."""
    own = plain(finish_times(list(_UNEVEN), 2))
    assert isinstance(own, list)
    pairs = zip(own, _reference(_UNEVEN, 2), strict=True)
    return [(float(block), float(mine), reference) for block, (mine, reference) in enumerate(pairs)]
