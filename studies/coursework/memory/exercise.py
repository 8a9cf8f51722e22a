"""What a step keeps in memory: predictions, and a function for three methods. Start from ``stub.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from studies.coursework.pencil import PencilQuestion
from studies.exercises import Grade, plain

Peak = Callable[[Sequence[tuple[int, int, int]], str, int], float]

FUNCTION = "peak_bytes"
CURVE = ("Peak memory of an offloaded step in MB", "blocks")
_SEGMENT = 34
"""Bytes of activations that a block of a transformer keeps for each token and each number of its width, in 16 bits."""


def numbers(r: random.Random) -> dict[str, float]:
    """Return a student's numbers."""
    return {
        "billions": r.randint(12, 80) / 10,
        "blocks": r.randint(24, 40),
        "width": 256 * r.randint(8, 16),
        "batch": r.randint(3, 16),
        "seq": r.choice((256, 512, 1024)),
        "gpu_gb": r.choice((24, 40, 80)),
    }


def questions(
    billions: float, blocks: int, width: int, batch: int, seq: int, gpu_gb: float
) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    block_gb = _SEGMENT * batch * seq * width / 1e9
    fits = (gpu_gb - 2 * billions) / block_gb * batch
    model = f"{billions} billion parameters"
    tokens = f"{blocks} blocks of width {width}, {batch} sequences of {seq} tokens, {_SEGMENT} bytes a token and number of width in each block"
    return [
        PencilQuestion(
            "adam",
            f"{model}: weights and gradients in 16 bits; 32-bit copies of the weights and both moments of Adam",
            "GB",
            16 * billions,
            (
                (14 * billions, "the gradients are missing"),
                (
                    12 * billions,
                    "the copies of the weights in 32 bits are missing, or the 16-bit weights and gradients are",
                ),
                (8 * billions, "Adam keeps two moments and a copy of the weights, each in 4 bytes"),
            ),
        ),
        PencilQuestion(
            "zeroth_order",
            f"{model}: a zeroth-order step in place, weights in 16 bits, without activations",
            "GB",
            2 * billions,
            (
                (
                    4 * billions,
                    "z is made again from its seed, and weights are perturbed in place: no second copy",
                ),
                (
                    6 * billions,
                    "two evaluation points do not need weights of their own: they come one after the other",
                ),
            ),
        ),
        PencilQuestion(
            "saved",
            f"{tokens}: activations that a backward pass needs",
            "GB",
            blocks * block_gb,
            (
                (block_gb, "that is one block; the backward pass needs those of all blocks"),
                ((blocks - 1) * block_gb, "one block too few"),
                ((blocks + 1) * block_gb, "one block too many"),
            ),
        ),
        PencilQuestion(
            "live",
            f"{tokens}: activations that a forward without a backward pass keeps at once, about",
            "GB",
            block_gb,
            (
                (
                    blocks * block_gb,
                    "nothing goes back: a block's activations are freed when the next has begun",
                ),
                (2 * block_gb, "the two evaluation points come one after the other"),
            ),
        ),
        PencilQuestion(
            "sequences",
            f"{model}, {tokens}: how many sequences of a zeroth-order step fit in {gpu_gb} GB (a fraction will do)?",
            "",
            fits,
            (
                (gpu_gb / block_gb * batch, "the weights take their share of the memory first"),
                (fits / batch, "that counts batches, not sequences"),
                (fits / blocks, "one block's activations live at a time"),
            ),
        ),
    ]


def _reference(blocks: Sequence[tuple[int, int, int]], method: str, num_staging_buffers: int) -> float:
    params = sum(num for num, _, _ in blocks)
    working = max(each for _, _, each in blocks)
    if method == "adam":
        return 16 * params + sum(saved for _, saved, _ in blocks) + working
    if method == "in_place":
        return 2 * params + working
    largest = max(num for num, _, _ in blocks[1:-1])
    return 2 * (blocks[0][0] + blocks[-1][0] + num_staging_buffers * largest) + working


_BLOCKS = [(1000, 10, 40), *[(500 + 20 * i, 300, 90) for i in range(6)], (900, 20, 700)]


def check(peak_bytes: Peak) -> Grade:
    """Return whether `peak_bytes` is right for three methods, and if not, what to look at."""
    cases = (("adam", 1), ("in_place", 1), ("offloaded", 2), ("offloaded", 3))
    for done, (method, num_buffers) in enumerate(cases):
        complaint = _complaint(plain(peak_bytes(list(_BLOCKS), method, num_buffers)), method, num_buffers)
        if complaint:
            return Grade(False, f"{method}, {num_buffers} staging buffers: {complaint}", done / len(cases))
    return Grade(True, f"{len(cases)} steps keep what you say")


def _complaint(answer: object, method: str, num_buffers: int) -> str:
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return "return bytes, a number"
    wanted = _reference(_BLOCKS, method, num_buffers)
    params, saved = sum(num for num, _, _ in _BLOCKS), sum(each for _, each, _ in _BLOCKS)
    working, all_working = max(each for _, _, each in _BLOCKS), sum(each for _, _, each in _BLOCKS)
    resident, offloaded = 2 * (_BLOCKS[0][0] + _BLOCKS[-1][0]), [num for num, _, _ in _BLOCKS[1:-1]]
    usual = [
        (wanted, ""),
        (
            wanted - working + all_working,
            "a block's working memory is used again by the next: take the largest",
        ),
        (wanted - working, "the working memory of the largest block is missing"),
        (wanted / 2, "half: two bytes a parameter"),
        (wanted * 8, "bits or bytes?"),
    ]
    if method == "adam":
        usual += [
            (wanted - 2 * params, "the gradients are missing"),
            (wanted - 4 * params, "the copy of the weights in 32 bits is missing"),
            (wanted - saved, "a backward pass needs the saved activations of all blocks"),
        ]
    if method == "in_place":
        usual += [
            (wanted + 2 * params, "z needs no memory: it is made again from its seed"),
            (wanted + saved, "nothing is saved where no backward pass follows"),
        ]
    if method == "offloaded":
        usual += [
            (
                2 * params + working,
                "blocks between the first and the last are on the host: the device has staging buffers",
            ),
            (resident + 2 * max(offloaded) + working, "every staging buffer has a block in it"),
            (wanted - resident, "the first and the last stay on the device"),
            (
                resident + 2 * num_buffers * sum(offloaded) / len(offloaded) + working,
                "a buffer holds any block: the largest",
            ),
        ]
    for value, advice in usual:
        if abs(answer - value) < 0.5:
            return advice
    return f"{answer:g} bytes is too {'little' if answer < wanted else 'much'}: list what is alive at the worst moment"


def curve(peak_bytes: Peak) -> list[tuple[float, float, float]]:
    """Return the peak of an offloaded step by the number of blocks, in MB, and that of the reference."""
    rows = []
    for num_blocks in (2, 8, 24, 48):
        blocks = [
            (50_000_000, 0, 10_000_000),
            *[(20_000_000, 0, 10_000_000)] * num_blocks,
            (1_000_000, 0, 40_000_000),
        ]
        own, reference = (each(blocks, "offloaded", 3) / 1e6 for each in (peak_bytes, _reference))
        rows.append((float(num_blocks), own, reference))
    return rows
