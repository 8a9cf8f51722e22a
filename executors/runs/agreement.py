"""Checks that all ranks of a run did the same steps, and that the weights hold what was written.

Between two comparisons each rank notes what it put into every step, and what its checksums found. A comparison brings
these together, so that all ranks come to the same conclusion and end with the same words.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from executors.steps.checksums import Disturbance
from topology.errors import RunError

_MOST_STEPS = 1000
"""Steps whose inputs are kept one by one for the next comparison; of all others one hash is."""


class Disagreement(RunError):  # noqa: N818 - reads as the statement it makes
    """Raised when the weights of some rank do not follow from the run's steps."""

    num_agreed_steps: int = 0  # steps that the latest comparison without a difference had behind it


class StepInputs:
    """Inputs of one rank's steps since the last comparison.

    Batches are those of all ranks, so that every rank has the same.
    """

    def __init__(self) -> None:
        self._history = hashlib.blake2b(digest_size=16)
        self._latest: deque[dict[str, str]] = deque(maxlen=_MOST_STEPS)

    def note(self, step: int, batch: Mapping[str, Tensor], **numbers: object) -> None:
        """Note a step's batch and other inputs by name, as texts, since NaN does not equal itself."""
        tokens = hashlib.blake2b(digest_size=8)
        for name, tensor in batch.items():
            tokens.update(f"{name} {tuple(tensor.shape)}".encode())
            tokens.update(tensor.cpu().contiguous().numpy().tobytes())
        texts = {name.replace("_", " "): repr(number) for name, number in numbers.items()}
        row = {"step": str(step), "batch": tokens.hexdigest(), **texts}
        self._history.update(json.dumps(row).encode())
        self._latest.append(row)

    @property
    def history(self) -> str:
        """Hash of everything noted so far."""
        return self._history.hexdigest()

    @property
    def latest(self) -> list[dict[str, str]]:
        """Inputs of the latest steps."""
        return list(self._latest)


@dataclass(frozen=True)
class RankReport:
    """What one rank reports in a comparison."""

    sums: Mapping[str, int]  # checksum of what it holds or wrote, by name
    # Weights that it did not find as it had left them, the earliest first.
    disturbances: Sequence[Disturbance] = ()
    history: str = ""
    inputs: Sequence[Mapping[str, str]] = field(default=(), repr=False)  # see :class:`StepInputs`


def refuse_disagreement(
    reports: Sequence[RankReport],
    num_agreed_steps: int,
    num_steps: int,
    members: Callable[[str], Sequence[int]] | None = None,
) -> None:
    """Raise if ranks did different steps, or hold weights that no step wrote.

    - `num_agreed_steps`, `num_steps`: steps behind the comparison before, and behind this one.
    - `members`: returns the ranks of a group; needed where ranks share weights out.

    Raises
    ------
    Disagreement
    """
    differences = _other_inputs(reports)
    if not differences:
        differences = "; ".join(filter(None, (_other_sums(reports), _disturbed(reports, members))))
    if not differences:
        return
    error = Disagreement(
        f"after {num_steps} steps, and not yet after {num_agreed_steps}, {differences}",
        hint="a bit changed in memory, a program wrote to a wrong place, or ranks had different files, "
        "torch builds or thread counts: give every rank the same",
    )
    error.num_agreed_steps = num_agreed_steps
    raise error


def _other_inputs(reports: Sequence[RankReport]) -> str:
    """Describe which ranks had other inputs, in the first step where any had; empty if none had."""
    for rows in zip(*(report.inputs for report in reports), strict=False):
        odd = odd_ranks([tuple(row.items()) for row in rows])
        if odd:
            names = [name for name in rows[0] if len({row.get(name) for row in rows}) > 1]
            return f"ranks did other steps: {odd} in the {', '.join(names)} of step {rows[0]['step']}"
    odd = odd_ranks([report.history for report in reports])
    return f"ranks did other steps: {odd}" if odd else ""


def _other_sums(reports: Sequence[RankReport]) -> str:
    """Describe which ranks differ in parameters that several ranks hold; empty if none does."""
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for report in reports for name in report.sums):
        holders = tuple(rank for rank, report in enumerate(reports) if name in report.sums)
        names_of.setdefault(holders, []).append(name)
    differences = []
    for holders, names in names_of.items():
        rows = [tuple(reports[rank].sums[name] for name in names) for rank in holders]
        odd = odd_ranks(rows, holders)
        if odd:
            others = [name for i, name in enumerate(names) if len({row[i] for row in rows}) > 1]
            differences.append(f"{odd} in {', '.join(others)}")
    return f"replicas differ: {'; '.join(differences)}" if differences else ""


def _disturbed(reports: Sequence[RankReport], members: Callable[[str], Sequence[int]] | None) -> str:
    """Describe the earliest weights that changed without an instruction that wrote them; empty if there are none."""
    disturbed = [(report.disturbances[0], rank) for rank, report in enumerate(reports) if report.disturbances]
    if not disturbed:
        return ""
    first, _ = min(disturbed)
    same = (first.step, first.what, first.share, first.position)
    ranks = [r for d, r in disturbed if (d.step, d.what, d.share, d.position) == same]
    owner = f" (the share of rank {members(first.share)[first.position]})" if first.share and members else ""
    who = "this process" if len(reports) == 1 else _ranks(ranks)
    return f"{who} found other bits in {first.what}{owner} than were left there, in step {first.step}, {first.where}"


def odd_ranks(rows: Sequence[Hashable], ranks: Sequence[int] = ()) -> str:
    """Describe which ranks differ from the majority; empty if none does (`ranks`: their numbers; empty if they are all)."""
    # Nobody knows who is right: what most have is taken for it.
    ((common, count), *_) = Counter(rows).most_common()
    if count == len(rows):
        return ""
    ranks = ranks or range(len(rows))
    others = [rank for rank, row in zip(ranks, rows, strict=True) if row != common]
    if 2 * count == len(rows):  # nobody is outvoted
        return f"{_ranks(list(ranks) if len(rows) == 2 else others)} differ"
    return f"{_ranks(others)} differ{'s' if len(others) == 1 else ''} from the other {count}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
