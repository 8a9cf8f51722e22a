"""Reads a run's files back, and refuses them where they contradict each other.

Every number of the log is checked against what determines it: seeds against the run's seed, learning rates against
the schedule, projected gradients against the losses. A digit that changed on disk is found by its line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executors.runs.jsonlines import DAMAGED_LINE, Line, read_lines
from executors.runs.learning_rate import LearningRate
from executors.runs.records import StepRecord, seed_of
from executors.runs.runlog import STEPS_NAME, read_header
from executors.steps.arithmetic import projected_gradient
from topology.errors import RunError
from zosim.plans import Plan

DIGESTS_NAME = "digests.jsonl"

_LOSS_FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class History:
    """The complete steps of a run."""

    directory: Path
    header: Mapping[str, Any]
    records: tuple[StepRecord, ...]  # by step, from 0
    # Length of the log up to the last complete step; what follows was being written when the run died.
    num_bytes: int
    digests: Mapping[int, str]  # hash of the parameters by the number of steps behind them

    @property
    def num_steps(self) -> int:
        """Complete steps."""
        return len(self.records)

    @property
    def plan(self) -> Plan:
        """The plan that the run began with."""
        return Plan.model_validate(self.header["plan"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """Options of ``zosim run``; empty for a log that another loop wrote."""
        return dict(self.header.get("run", {}))

    @property
    def periods(self) -> tuple[int, ...]:
        """Steps between digests, between checkpoints and between evaluations; weights are verified before each of them."""
        run = self.settings
        if not run:
            return ()
        every = run["digest_every"], run["checkpoint_every"], (run.get("evaluation") or {}).get("every", 0)
        return tuple(period for period in every if period)

    def digest(self, num_steps: int) -> str:
        """Return a hash over the first steps, which tells this run's checkpoints from another's."""
        digest = hashlib.blake2b(self.header["base_digest"].encode(), digest_size=16)
        for record in self.records[:num_steps]:
            numbers = (record.step, record.seeds, record.projected_gradients, record.learning_rate)
            digest.update(f"{numbers!r}\n".encode())
        return digest.hexdigest()


def read_history(directory: str | Path) -> History:
    """Return the history of a run.

    Raises RunError if a file is missing, damaged, truncated or another run's; the message says which and why.
    """
    directory = Path(directory)
    header = read_header(directory)
    path = directory / STEPS_NAME
    # Before the log: a run that goes on meanwhile writes a digest when the log has its steps, and not the other way round.
    digests = _digests(directory / DIGESTS_NAME)
    perturbations = header["plan"]["estimator"]["num_perturbations"]
    steps = _steps_of(path, read_lines(path), perturbations)
    check = _RowCheck(path, header)
    records = tuple(check.record(number, lines) for number, lines in enumerate(steps))
    num_bytes = steps[-1][-1].end if steps else 0
    history = History(directory, header, records, num_bytes, digests)
    _refuse_truncated(history, path)
    return history


def _steps_of(path: Path, lines: Sequence[Line], perturbations: int) -> list[list[Line]]:
    """Return the lines of each complete step; a last step without all its perturbations was still being written."""
    whole = len(lines) // perturbations * perturbations
    steps = [list(lines[begin : begin + perturbations]) for begin in range(0, whole, perturbations)]
    for position, line in enumerate(lines):
        step, perturbation = divmod(position, perturbations)
        numbers = (line.row.get("step"), line.row.get("perturbation"))
        # By type, too: 1.0 and True equal 1.
        if numbers != (step, perturbation) or not all(type(number) is int for number in numbers):
            raise RunError(
                f"{path} line {line.number} is of step {numbers[0]!r}, perturbation {numbers[1]!r}, where step {step}, "
                f"perturbation {perturbation} belongs",
                hint="lines are missing or belong to another run; restore the file from a copy",
            )
    return steps


_SHORTEST_STEP_S = 1e-9
"""Shorter than any; rates of tokens are finite above it."""

_OTHER_LOSS = {"central": "loss_minus", "forward": "loss_base", "residual": "loss_before"}
"""What the loss is called that is taken off that at ``+ε``, by the plan's difference."""


class _RowCheck:
    """Checks every row of the log against what determines it."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._seed = header["seed"]
        self._epsilon = header["epsilon"]
        run = header.get("run")
        # A loop of one's own may choose seeds and rates as it likes.
        self._learning_rate = LearningRate(**run["learning_rate"]) if run else None
        self._other = _OTHER_LOSS[header["plan"]["estimator"].get("difference", "central")]
        self._losses_before: dict[int, float] = {}

    def record(self, step: int, lines: Sequence[Line]) -> StepRecord:
        """Return a step's record."""
        for line in lines:
            self._check(step, line)
        return StepRecord.of_rows([line.row for line in lines])

    def _check(self, step: int, line: Line) -> None:
        row = line.row
        names = ("loss_plus", self._other, "projected_grad", "learning_rate", "seconds")
        floats = [row.get(name) for name in names]
        whole = type(row.get("seed")) is int
        if not whole or not all(isinstance(x, int | float) and math.isfinite(x) for x in floats):
            raise RunError(
                f"{self._path} line {line.number} is damaged: a number is missing or not finite",
                hint=DAMAGED_LINE,
            )
        if row["seconds"] < _SHORTEST_STEP_S:
            raise RunError(
                f"{self._path} line {line.number} is damaged: a step has seconds={row['seconds']!r}",
                hint=DAMAGED_LINE,
            )
        if self._learning_rate is not None:
            self._refuse_unless(
                line, "seed", seed_of(self._seed, step, row["perturbation"]), "the run's seed"
            )
            self._refuse_unless(line, "learning_rate", self._learning_rate.at(step), "the schedule")
        losses = row["loss_plus"], row[self._other]
        if self._other == "loss_before":
            before = self._losses_before.get(row["perturbation"], row["loss_plus"])
            self._refuse_unless(line, "loss_before", before, "the step before")
            self._losses_before[row["perturbation"]] = row["loss_plus"]
        # The log does not say in which format the run had its losses: the gradient has to follow in one that holds both.
        possible = {
            gradient
            for dtype in _LOSS_FORMATS
            if all(_is_of(loss, dtype) for loss in losses)
            for gradient in _gradients(*losses, self._epsilon, dtype, central=self._other == "loss_minus")
        }
        if row["projected_grad"] not in possible:
            raise RunError(
                f"{self._path} line {line.number} is damaged: projected_grad={row['projected_grad']!r} does not "
                f"follow from the losses {losses}",
                hint=DAMAGED_LINE,
            )

    def _refuse_unless(self, line: Line, name: str, wanted: float, source: str) -> None:
        if line.row[name] != wanted:
            raise RunError(
                f"{self._path} line {line.number} is damaged or belongs to another run: {name}={line.row[name]!r}, "
                f"but {source} gives {wanted!r}",
                hint=DAMAGED_LINE,
            )


def _is_of(loss: float, dtype: torch.dtype) -> bool:
    """Whether a loss is representable in this format. With one digit changed, it hardly ever is."""
    return torch.tensor(loss, dtype=torch.float64).to(dtype).item() == loss


def _gradients(
    plus: float, other: float, epsilon: float, dtype: torch.dtype, *, central: bool
) -> Iterator[float]:
    """Yield the projected gradients of two losses on either device: torch divides on a CPU, and multiplies by the reciprocal on CUDA."""
    first, second = (torch.tensor(loss, dtype=torch.float64).to(dtype) for loss in (plus, other))
    yield projected_gradient(first, second, epsilon, central=central).item()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    reciprocal = 1 / torch.tensor(2 * epsilon if central else epsilon, dtype=wide)
    yield ((first - second).to(wide) * reciprocal).to(dtype).item()


def _digests(path: Path) -> dict[int, str]:
    digests: dict[int, str] = {}
    for line in read_lines(path):
        step, digest = line.row.get("num_steps"), line.row.get("digest")
        if type(step) is not int or not isinstance(digest, str):
            raise RunError(f"{path} line {line.number} is damaged: it has no digest", hint=DAMAGED_LINE)
        # A run that goes on may take a digest again, but not another one.
        if digests.setdefault(step, digest) != digest:
            raise RunError(f"{path} line {line.number} contradicts an earlier digest of step {step}")
    return digests


def _refuse_truncated(history: History, path: Path) -> None:
    """Refuse a log that is shorter than the digests or the header say."""
    reached = max(history.digests, default=0)
    if reached > history.num_steps:
        raise RunError(
            f"{path} is truncated: it ends after step {history.num_steps - 1}, but there is a digest "
            f"after {reached} steps",
            hint=f"restore the file from a copy, or remove {DIGESTS_NAME} to continue from its end",
        )
    finished = history.header.get("finished")
    if finished and finished["num_steps"] > history.num_steps:
        raise RunError(
            f"{path} is truncated: the run ended after {finished['num_steps']} steps, but the log has "
            f"{history.num_steps}",
            hint="restore the file from a copy",
        )
