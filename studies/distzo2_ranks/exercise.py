"""The exercise: what a block takes on several GPUs. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable

from studies.distzo2_ranks.cases import TRANSFERS, Board, block_seconds, board
from studies.exercises import Grade, plain

Seconds = Callable[[Board, str], float]
"""From a board and how ranks share the host's copies to the seconds that one more block adds to a step."""

FUNCTION = "seconds_per_block"
"""Name of the function in a solution's file."""

_BOARDS = (
    (1, 3.0, 1.0, False),
    (2, 3.0, 4.0, False),
    (2, 3.0, 0.25, False),
    (2, 0.6, 4.0, True),
    (4, 2.0, 8.0, True),
    (4, 5.0, 0.5, False),
    (4, 0.1, 8.0, False),
)
"""GPUs, upload over compute, peers' bandwidth over the host's, one root: each with another bottleneck."""

_TOLERANCE = 0.02
"""Shares are aligned and a batch crosses the same lanes: less than a hundredth of a block."""


def check(seconds_per_block: Seconds) -> Grade:
    """Return whether `seconds_per_block` agrees with the simulator on several boards, and if not, what to look at."""
    count = 0
    for words in _BOARDS:
        num_gpus, upload, peers, one_root = words
        made = board(num_gpus, upload, peers, one_root=one_root)
        for transfers in TRANSFERS if num_gpus > 1 else TRANSFERS[:1]:
            complaint = _complaint(plain(seconds_per_block(made, transfers)), made, transfers)
            if complaint:
                root = "behind one root" if one_root else "with lanes of their own"
                return Grade(False, f"{num_gpus} GPUs {root}, {transfers} copies: {complaint}")
            count += 1
    return Grade(True, f"{count} boards agree with the simulator within {_TOLERANCE:.0%}")


def _complaint(answer: object, made: Board, transfers: str) -> str:
    """Return what is wrong with an answer, or nothing."""
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return "return seconds, a number"
    expected = block_seconds(made, transfers)
    if _near(answer, expected):
        return ""
    whole = made.block_bytes / made.host_bytes_per_s
    n = made.num_gpus
    exchange = (n - 1) * made.block_bytes / n / made.peer_bytes_per_s
    if transfers == "sliced" and _near(answer, max(whole / n + exchange, made.compute_s)):
        return f"{answer:.3g} s is upload and exchange one after the other, as equation 3 has it; different blocks' do overlap"
    if made.one_root and _near(answer, max(made.compute_s, whole)):
        return (
            f"{answer:.3g} s, where the simulator takes {expected:.3g}: how many GPUs use the root at once?"
        )
    if answer <= made.compute_s < expected:
        return f"{answer:.3g} s, where the simulator takes {expected:.3g}: something on the way is busy for longer"
    return (
        f"{answer:.3g} s, where the simulator takes {expected:.3g}: for upload, exchange, compute and offload, how long is "
        "each busy with one block? The busiest sets the pace"
    )


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _TOLERANCE * wanted
