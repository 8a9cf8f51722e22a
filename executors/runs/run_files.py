"""The files of one run: reading what an earlier process left, and appending to them. Only rank 0 touches the directory."""

from __future__ import annotations

import base64
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from executors.files import RUN_FOLDERS
from executors.ranks.communicator import Communicator
from executors.ranks.rank_info import launch_directory
from executors.runs.adapters import PREFIX_NAME
from executors.runs.checkpoint import Checkpoint, newest_checkpoint
from executors.runs.history import DIGESTS_NAME, History, read_history
from executors.runs.jsonlines import JsonLines, Line, read_lines
from executors.runs.records import StepRecord
from executors.runs.reporter import Reporter
from executors.runs.runlog import HEADER_NAME, STEPS_NAME, RunLog
from topology.errors import RunError

METRICS_NAME = "metrics.jsonl"
BEST_NAME = "best"

NUM_VERIFIED = "num_verified"
"""What an entry of a header's ``resumed`` calls the steps that were verified by then."""


class RunFiles:
    """The open files of a run beside its log; used as a context manager.

    - `records`: steps that the log has already.
    - `goes_on`: whether an earlier process began them.
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

    def __enter__(self) -> Self:
        metrics, digests = self._log.directory / METRICS_NAME, self._log.directory / DIGESTS_NAME
        with ExitStack() as opened:
            opened.enter_context(self._reporter)
            lines = _lines_behind(metrics, len(self._records)) if self._goes_on else []
            self._metrics = opened.enter_context(
                JsonLines(metrics, keep_bytes=lines[-1].end if lines else 0, durable=False)
            )
            # Metrics reach the disk when the system likes: a power cut can lose rows of steps that the log has.
            kept = {line.row["num_steps"] for line in lines if line.row["split"] == "train"}
            lost = (record for record in self._records if record.step + 1 not in kept)
            self._metrics.append(_metrics_row(record, self._num_tokens(record.step)) for record in lost)
            lines = read_lines(digests) if self._goes_on else []
            self._digested = {line.row["num_steps"] for line in lines}
            self._digests = opened.enter_context(JsonLines(digests, keep_bytes=lines[-1].end if lines else 0))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def step(self, record: StepRecord) -> None:
        """Write a step to the log, which reaches the disk, then to the metrics, and print it."""
        # The log first: a step that it has gets its metrics later, even after a crash.
        self._log.append(record.rows())
        self.step_again(record)

    def step_again(self, record: StepRecord) -> None:
        """Write the metrics of a step that the log has, and print it."""
        num_tokens = self._num_tokens(record.step)
        self._metrics.append([_metrics_row(record, num_tokens)])
        self._reporter.step(record, num_tokens)

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


def evaluations_of(directory: Path, num_steps: int) -> list[dict[str, Any]]:
    """Return the evaluations that a run recorded in its first `num_steps` steps."""
    lines = _lines_behind(directory / METRICS_NAME, num_steps)
    return [line.row for line in lines if line.row["split"] == "eval"]


def _lines_behind(path: Path, num_steps: int) -> list[Line]:
    lines = read_lines(path)
    for line in lines:
        if type(line.row.get("num_steps")) is not int or line.row.get("split") not in ("train", "eval"):
            raise RunError(
                f"{path} line {line.number} is damaged: it does not say after which step it was written, or of what",
                hint="restore the file from a copy, or remove it: training continues without it",
            )
    return list(itertools.takewhile(lambda line: line.row["num_steps"] <= num_steps, lines))


def remove_partial(out: Path) -> None:
    """Remove files that a killed process had begun to write."""
    for folder in (out, *(out / name for name in RUN_FOLDERS)):
        for partial in folder.glob(".*.partial") if folder == out else folder.rglob(".*.partial"):
            # Nobody has read it: files get their names once they are whole.
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


class EarlierRun:
    """What an earlier process left of a run, read by rank 0 and sent to the others.

    The others need not see the directory: they get the header, the log and what else is small as bytes. All then replay
    the same steps from the same base, and so each has the weights to go on with.

    - `history`: None where there is nothing to go on with.
    - `directory`: Where this rank finds the small files: the run's own directory, or a copy.

    Raises RunError: on all ranks, if the directory holds what cannot be gone on with.
    """

    def __init__(self, out: Path, *, resume: bool, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self.directory = out
        if communicator is None:
            self.history = read_history(out) if is_begun(out, resume=resume) else None
            return
        files: dict[str, str] | None = communicator.on_rank_0(
            lambda: _small_files(out) if is_begun(out, resume=resume) else None, "reading the log"
        )
        if files is not None and not communicator.is_first:
            self._copy = tempfile.TemporaryDirectory(dir=launch_directory())
            self.directory = Path(self._copy.name)
            for name, content in files.items():
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(content))
        self.history = None if files is None else replace(read_history(self.directory), directory=out)

    def checkpoint(
        self, history: History, model: nn.Module, refused: Callable[[str], None]
    ) -> Checkpoint | None:
        """Return the checkpoint to start from; None unless all ranks see the same."""
        newest = newest_checkpoint(history, model, refused)
        if self._communicator is None:
            return newest
        steps = torch.tensor(-1 if newest is None else newest.num_steps)
        seen = self._communicator.all_gather_host(steps, "choosing a checkpoint").tolist()
        if len(set(seen)) > 1:
            refused("not all ranks see the same checkpoint: all replay from the base weights")
            return None
        return newest

    def num_verified(self, history: History, checkpoint: Checkpoint | None) -> int:
        """Return how many steps of a run were verified on all ranks, before digests, checkpoints or evaluations were written.

        Of a run without verifications all count as such.
        """
        if not history.periods:
            return history.num_steps
        header, ends = history.header, [max(history.digests, default=0)]
        ends += [row["num_steps"] for row in evaluations_of(self.directory, history.num_steps)]
        ends.append(0 if checkpoint is None else checkpoint.num_steps)
        # And what earlier processes noted; a loop of one's own may have put anything into the header.
        noted = [entry.get(NUM_VERIFIED) for entry in header.get("resumed", []) if isinstance(entry, dict)]
        noted.append(header.get("finished", {}).get("num_steps"))
        ends += [end for end in noted if type(end) is int]
        return min(max(ends), history.num_steps)


def is_begun(out: Path, *, resume: bool) -> bool:
    """Whether an earlier process left steps to resume from; raise if there are any without ``--resume``."""
    if not (out / HEADER_NAME).exists():
        if (out / STEPS_NAME).exists():
            raise RunError(f"{out} has a log, but {HEADER_NAME} is missing, so its run is unknown")
        if (out / "config.json").exists():
            raise RunError(f"{out} holds a model, which the run would replace", hint="give another --out")
        return False
    if not resume:
        raise RunError(
            f"{out} already holds a run",
            hint="resume it (--resume), give another --out, or remove that directory",
        )
    # Killed before the first step, nothing is lost by beginning again.
    return (out / STEPS_NAME).exists()


def _small_files(out: Path) -> dict[str, str]:
    """Return the small files of a run by name, encoded as base64."""
    read_history(out)  # what is damaged is refused here, on all ranks
    paths = [out / name for name in (HEADER_NAME, STEPS_NAME, DIGESTS_NAME, METRICS_NAME)]
    paths += [path for path in sorted((out / PREFIX_NAME).rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(out)): base64.b64encode(path.read_bytes()).decode()
        for path in paths
        if path.is_file()
    }
