"""Whether the replicas of a run still hold the same parameters.

Where ranks share one copy per host, the copy cannot differ from itself: what a rank computed wrongly is either lost with
its slot, or is spread to all when it was in that rank's own share. So every rank adds up the bits of each block as it
leaves the slot, in every step, and these sums are compared along with those of what each rank keeps for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from executors.steps.buffers import BufferStore
from executors.steps.frames import StepFrame
from executors.steps.ops.operands import Action
from topology.errors import RunError
from zosim.contents import Contents, GroupWeights
from zosim.instructions import Instruction
from zosim.operations import Copy
from zosim.program import Program

_FACTOR = 6364136223846793005
"""Odd, so that the sum of an earlier step never drops out of the number that it went into."""


class ReplicaWatch:
    """Sums over the bits of every parameter group, as this rank computed it.

    Parameters
    ----------
    program : Program
    store : BufferStore
    device : torch.device

    Notes
    -----
    The sum is that of the bits as 64-bit integers, modulo 2^64: any difference in one bit changes it. It takes one pass
    over a block and step.
    """

    def __init__(self, program: Program, store: BufferStore, device: torch.device) -> None:
        self._store = store
        finals = [access for access in program.final if store.is_weights(access)]
        self._at_rest = [access for access in finals if not access.share]
        leaving = [access.what for access in finals if access.share and isinstance(access.what, GroupWeights)]
        self._sums: dict[Contents, Tensor] = {
            what: torch.zeros((), dtype=torch.int64, device=device) for what in leaving
        }

    @property
    def names(self) -> list[str]:
        """Names of what is summed, in the order of :meth:`sums`."""
        return [*map(str, self._sums), *(str(access.what) for access in self._at_rest)]

    def watched(self, instruction: Instruction, action: Action) -> Action:
        """Return `action`, with the block added up first if it leaves its slot for a copy that ranks share."""
        if not isinstance(instruction.op, Copy):
            return action
        pairs = zip(instruction.reads, instruction.writes, strict=True)
        leaving = [read for read, write in pairs if write.share and write.what in self._sums and read.share]
        leaving = [read for read in leaving if instruction.label == "offload"]
        if not leaving:
            return action

        def offload(frame: StepFrame) -> None:
            for read in leaving:
                self._sums[read.what].mul_(_FACTOR).add_(bit_sum(self._store.whole(read)))
            action(frame)

        return offload

    def sums(self) -> Tensor:
        """Return the sums so far, and those of what lies at rest; only after a flush."""
        rest = [bit_sum(self._store.whole(access)).cpu() for access in self._at_rest]
        return torch.stack([*(found.cpu() for found in self._sums.values()), *rest])


def bit_sum(raw: Tensor) -> Tensor:
    """Return the sum of some bytes' bits as 64-bit integers."""
    return raw.view(torch.int64).sum()


def refuse_unlike_sums(told: Sequence[Mapping[str, int]], num_steps: int) -> None:
    """Raise if ranks that hold the same parameter groups differ.

    Parameters
    ----------
    told : sequence of mapping of str to int
        What each rank has in sum of what it holds, by name.
    num_steps : int

    Raises
    ------
    RunError
    """
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for sums in told for name in sums):
        holders = tuple(rank for rank, sums in enumerate(told) if name in sums)
        names_of.setdefault(holders, []).append(name)
    for holders, names in names_of.items():
        rows = [tuple(told[rank][name] for name in names) for rank in holders]
        refuse_disagreement(rows, names, num_steps, holders)


def refuse_disagreement(
    found: Sequence[tuple[int, ...]], names: Sequence[str], num_steps: int, ranks: Sequence[int] = ()
) -> None:
    """Raise if replicas differ, naming ranks and parameter groups.

    Parameters
    ----------
    found : sequence of tuple of int
        What each rank has in sum, one number for each name.
    names : sequence of str
    num_steps : int
    ranks : sequence of int
        Numbers of the ranks; empty if they are all.

    Raises
    ------
    RunError
        If any two differ.
    """
    ((common, count), *_) = Counter(found).most_common()
    if count == len(found):
        return
    ranks = ranks or range(len(found))
    others = [rank for rank, row in enumerate(found) if row != common]
    groups = [name for i, name in enumerate(names) if any(found[r][i] != common[i] for r in others)]
    where = f" in {', '.join(groups)}" if groups else ""
    if 2 * count == len(found):  # nobody is outvoted
        others = list(range(len(found))) if len(found) == 2 else others
        said = f"{_ranks([ranks[i] for i in others])} differ{where}"
    else:
        said = f"{_ranks([ranks[i] for i in others])} differ{'s' if len(others) == 1 else ''} from the other {count}{where}"
    raise RunError(
        f"after {num_steps} steps replicas differ: {said}",
        hint="a bit changed in memory, or ranks drew or rounded otherwise: run every rank on one torch build and thread "
        "count; `--resume` rebuilds the weights from the log",
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
