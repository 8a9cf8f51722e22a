"""What bits at a split save: predictions about messages, and the exercise of the page on stages."""

from __future__ import annotations

import random

from studies.coursework.pencil import PencilQuestion
from studies.where_to_split import exercise as shared

FUNCTION, check = shared.FUNCTION, shared.check
CURVE = ("Kilobytes that cross the split point in a step", "bits of an activation")


def numbers(r: random.Random) -> dict[str, int]:
    """Return a student's numbers."""
    return {
        "hidden": 256 * r.randint(4, 16),
        "batch": r.randint(3, 12),
        "seq": r.choice((128, 256, 512)),
        "bits": r.choice((2, 3, 4)),
        "perturbations": r.randint(3, 9),
        "mbit_per_s": 50 * r.randint(2, 20),
    }


def questions(
    hidden: int, batch: int, seq: int, bits: int, perturbations: int, mbit_per_s: int
) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    tokens = batch * seq
    plain = tokens * hidden * 2 / 1e6
    activation = tokens * 4 * hidden * bits / 8 / 1e6
    inside, points = activation + plain, 2 * perturbations
    case = f"{batch} sequences of {seq} tokens, width {hidden}"
    half = f"{case}, split inside a block: an MLP activation four times as wide in {bits} bits, beside the residual stream in 16"
    return [
        PencilQuestion(
            "between",
            f"{case}, split between blocks, 16 bits a number: one forward sends",
            "MB",
            plain,
            (
                (plain / seq, "every token has an activation, not only the last"),
                (plain / batch, "that is one sequence"),
                (points * plain, "one forward is asked for, not a step"),
            ),
        ),
        PencilQuestion(
            "inside",
            f"{half}: one forward sends",
            "MB",
            inside,
            (
                (
                    activation,
                    "the residual stream is forgotten: the block still has to add its product to it",
                ),
                (activation / 4 + plain, "the activation of the MLP is four times as wide"),
                (8 * activation + plain, "bits or bytes? The activation has bits, the residual stream bytes"),
                (inside - plain + plain * bits / 16, "the residual stream stays in 16 bits"),
            ),
        ),
        PencilQuestion(
            "step",
            f"{half}; {perturbations} perturbations by central differences: a step sends",
            "MB",
            points * inside,
            (
                (inside, "that is one forward; how many does a step take?"),
                ((perturbations + 1) * inside, "forward differences share a point; central ones do not"),
                (points * activation, "the residual stream is forgotten"),
            ),
        ),
        PencilQuestion(
            "seconds",
            f"the same step over {mbit_per_s} Mbit/s",
            "s",
            points * inside * 8 / mbit_per_s,
            (
                (points * inside / mbit_per_s, "the link's rate is in bits"),
                (inside * 8 / mbit_per_s, "that is one forward"),
            ),
        ),
    ]


def curve(bytes_forward: shared.Bytes) -> list[tuple[float, float, float]]:
    """Return the bytes of a step by the bits of an activation, and what the program sends, in kB."""
    from studies.where_to_split.cases import BoundaryCase, forward_bytes

    cases = [BoundaryCase(64, 256, 4, 32, True, bits, 32, 1, "central") for bits in (1, 2, 4, 8)]
    return [
        (float(case.activation_bits), bytes_forward(case) / 1e3, forward_bytes(case) / 1e3) for case in cases
    ]
