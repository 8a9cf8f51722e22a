"""What an earlier process left of a run, read by rank 0 and sent to the others.

The others need not see the directory: they get the header, the log and what else is small as bytes. All then replay the
same steps from the same base, and so each has the weights to go on with.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executors.ranks.communicator import Communicator
from executors.ranks.rank_info import launch_directory
from executors.runs.adapters import PREFIX_NAME
from executors.runs.checkpoint import Checkpoint, newest_checkpoint
from executors.runs.history import DIGESTS_NAME, History, read_history
from executors.runs.run_files import METRICS_NAME, evaluations_of
from executors.runs.runlog import HEADER_NAME, STEPS_NAME
from topology.errors import RunError


class EarlierRun:
    """What there is of a run before this process.

    Parameters
    ----------
    out : Path
        Directory of the run.
    resume : bool
        Whether to go on with what it holds.
    communicator : Communicator or None

    Attributes
    ----------
    history : History or None
        None where there is nothing to go on with.
    directory : Path
        Where this rank finds the small files: the run's own directory, or a copy.

    Raises
    ------
    RunError
        On all ranks, if the directory holds what cannot be gone on with.
    """

    def __init__(self, out: Path, *, resume: bool, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self.directory = out
        if communicator is None:
            self.history = read_history(out) if is_begun(out, resume=resume) else None
            return
        files: dict[str, str] | None = communicator.on_rank_0(
            lambda: _files(out) if is_begun(out, resume=resume) else None, "reading the log"
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
        """Return how many steps of a run were verified: on all ranks, and before anything that was written since.

        Of a run without verifications all count as such.
        """
        if not history.periods:
            return history.num_steps
        header, ends = history.header, [max(history.digests, default=0)]
        ends += [row["num_steps"] for row in evaluations_of(self.directory, history.num_steps)]
        ends += [0 if checkpoint is None else checkpoint.num_steps, *_verified_before(header)]
        return min(max(ends), history.num_steps)


NUM_VERIFIED = "num_verified"
"""What an entry of a header's ``resumed`` calls the steps that were verified by then."""


def _verified_before(header: Mapping[str, Any]) -> list[int]:
    """Return the verified steps that earlier processes recorded in the header."""
    entries = [entry for entry in header.get("resumed", []) if isinstance(entry, dict)]
    ends = [entry.get(NUM_VERIFIED) for entry in entries] + [header.get("finished", {}).get("num_steps")]
    return [end for end in ends if type(end) is int]


def is_begun(out: Path, *, resume: bool) -> bool:
    """Whether an earlier process left something to go on with, which is then wanted."""
    if not (out / HEADER_NAME).exists():
        if (out / STEPS_NAME).exists():
            raise RunError(f"{out} has a log but no {HEADER_NAME}, so it is not known what run it is of")
        if (out / "config.json").exists():
            raise RunError(
                f"{out} holds a model, which that of the run would replace", hint="give another --out"
            )
        return False
    if not resume:
        raise RunError(
            f"{out} holds a run already",
            hint="go on with it (--resume), give another --out, or remove that directory",
        )
    # Killed before the first step, nothing is lost by beginning again.
    return (out / STEPS_NAME).exists()


def _files(out: Path) -> dict[str, str]:
    """Return the small files of a run, in letters."""
    read_history(out)  # what is damaged is refused here, on all ranks
    paths = [out / name for name in (HEADER_NAME, STEPS_NAME, DIGESTS_NAME, METRICS_NAME)]
    paths += [path for path in sorted((out / PREFIX_NAME).rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(out)): base64.b64encode(path.read_bytes()).decode()
        for path in paths
        if path.is_file()
    }
