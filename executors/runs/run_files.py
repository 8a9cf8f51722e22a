"""The files of one run, as they grow with it. Rank 0 writes them; the others' steps leave nothing on a disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from executors.files import RUN_FOLDERS
from executors.runs.history import DIGESTS_NAME
from executors.runs.jsonlines import JsonLines, Line, read_lines
from executors.runs.records import StepRecord
from executors.runs.reporter import Reporter
from executors.runs.runlog import RunLog
from topology.errors import RunError

METRICS_NAME = "metrics.jsonl"
BEST_NAME = "best"


class RunFiles:
    """The files of a run beside its log, open; used as a context manager.

    Parameters
    ----------
    log : RunLog
        Of the run, which closes it.
    reporter : Reporter
        Tells people what is written.
    records : sequence of StepRecord
        Steps that the log has already.
    num_tokens : callable
        Returns the tokens of a step's batch.
    goes_on : bool
        Whether an earlier process began them.
    """

    def __init__(
        self,
        log: RunLog,
        reporter: Reporter,
        records: Sequence[StepRecord],
        *,
        num_tokens: Callable[[int], int],
        goes_on: bool,
    ) -> None:
        self._log = log
        self._reporter = reporter
        self._records = records
        self._num_tokens = num_tokens
        self._goes_on = goes_on
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._reporter)
        self._metrics = self._stack.enter_context(self._opened_metrics())
        self._digests = self._stack.enter_context(self._opened_digests())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step(self, record: StepRecord) -> None:
        """Write a step: first to the log, and to the disk."""
        self._log.append(record.rows())
        self.step_again(record)

    def step_again(self, record: StepRecord) -> None:
        """Tell a step that the log has."""
        num_tokens = self._num_tokens(record.step)
        self._metrics.append([_metrics_row(record, num_tokens)])
        self._reporter.step(record, num_tokens)

    def refuse(self, num_steps: int) -> None:
        """Keep the first `num_steps` steps of the log."""
        self._log.cut(num_steps)

    def digest(self, num_steps: int, digest: str) -> None:
        """Write the hash of the parameters after `num_steps` steps, unless it is there."""
        if num_steps not in self._digested:
            self._digests.append([{"num_steps": num_steps, "digest": digest}])
            self._digested.add(num_steps)

    def evaluation(self, num_steps: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation."""
        self._metrics.append([metrics])
        self._reporter.evaluation(
            num_steps, {k: v for k, v in metrics.items() if k not in ("num_steps", "split")}
        )

    @contextmanager
    def _opened_metrics(self) -> Iterator[JsonLines]:
        """Open the metrics behind the steps that the log has, and complete them."""
        path = self._log.directory / METRICS_NAME
        lines = _lines_behind(path, len(self._records)) if self._goes_on else []
        kept = {line.row["num_steps"] for line in lines if line.row["split"] == "train"}
        with JsonLines(path, keep_bytes=lines[-1].end if lines else 0, durable=False) as file:
            lost = (record for record in self._records if record.step + 1 not in kept)
            file.append(_metrics_row(record, self._num_tokens(record.step)) for record in lost)
            yield file

    @contextmanager
    def _opened_digests(self) -> Iterator[JsonLines]:
        path = self._log.directory / DIGESTS_NAME
        lines = read_lines(path) if self._goes_on else []
        self._digested = {line.row["num_steps"] for line in lines}
        with JsonLines(path, keep_bytes=lines[-1].end if lines else 0) as file:
            yield file


class NoFiles:
    """What a rank that writes nothing has in their place."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        """Do nothing."""

    def step_again(self, record: StepRecord) -> None:
        """Do nothing."""

    def refuse(self, num_steps: int) -> None:
        """Do nothing."""

    def digest(self, num_steps: int, digest: str) -> None:
        """Do nothing."""

    def evaluation(self, num_steps: int, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""


def evaluations_of(directory: Path, num_steps: int) -> list[dict[str, Any]]:
    """Return the evaluations that a run recorded up to so many steps."""
    lines = _lines_behind(directory / METRICS_NAME, num_steps)
    return [line.row for line in lines if line.row["split"] == "eval"]


def _lines_behind(path: Path, num_steps: int) -> list[Line]:
    lines = read_lines(path)
    for line in lines:
        if type(line.row.get("num_steps")) is not int or line.row.get("split") not in ("train", "eval"):
            raise RunError(
                f"{path} line {line.number} is damaged: it does not say after which step it was written, or of what",
                hint="restore the file from a copy, or remove it: training goes on without",
            )
    return list(itertools.takewhile(lambda line: line.row["num_steps"] <= num_steps, lines))


def remove_partial(out: Path) -> None:
    """Remove what a process that was killed had begun to write."""
    for folder in (out, *(out / name for name in RUN_FOLDERS)):
        for partial in folder.glob(".*.partial") if folder == out else folder.rglob(".*.partial"):
            partial.unlink(missing_ok=True)


def _metrics_row(record: StepRecord, num_tokens: int) -> dict[str, Any]:
    return {
        "num_steps": record.step + 1,
        "split": "train",
        "loss": record.loss,
        "projected_grad": record.projected_gradients[0],
        "learning_rate": record.learning_rate,
        "seconds": record.seconds,
        "tokens_per_s": num_tokens / record.seconds,
    }
