"""What a report is of: plans, and runs with what their directories hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from topology.errors import TimelineError
from topology.reading import parse_json, read_text
from zosim import api
from zosim.analysis.compare import Comparison, slowest_rank
from zosim.planning.planner import Decision
from zosim.planning.predict import PlannedRun
from zosim.plans import Plan
from zosim.timeline import Timeline

MAX_LOG_BYTES = 2**30


@dataclass(frozen=True)
class Reported:
    """A plan, or a run of one."""

    name: str
    planned: PlannedRun
    directory: Path | None = None

    @classmethod
    def of(cls, source: Decision | PlannedRun | Plan | str | Path, **where: Any) -> Reported:
        """Return a plan, or that of a file, or a run from its directory; `where` as for :func:`zosim.simulate`.

        Raises
        ------
        ZosimError
            If it is neither, or damaged.
        """
        if isinstance(source, Decision):
            source = source.chosen.planned
        if isinstance(source, PlannedRun):
            return cls(source.plan.model.name, source)
        if isinstance(source, Plan):
            return cls(source.model.name, api.simulate(source, **where))
        path = Path(source)
        if path.is_dir():
            api.refuse_irregular_run(path, TimelineError)
            return cls(path.name or str(path), api.planned_run_of(path, **where), path)
        return cls(path.stem, api.simulate(path, **where))

    @cached_property
    def measured(self) -> Timeline | None:
        """The run's timeline."""
        return None if self.directory is None else Timeline.load(self.directory / "timeline.json")

    @cached_property
    def rank(self) -> int:
        """The rank that ends its steps last."""
        return self.planned.prediction.slowest_rank if self.measured is None else slowest_rank(self.measured)

    @cached_property
    def comparison(self) -> Comparison | None:
        """The run against its prediction."""
        return None if self.measured is None else api.compared(self.planned, self.measured, self.rank)

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """Rows of the run's log: losses and projected gradients of each perturbation."""
        return [] if self.directory is None else list(log_rows(self.directory / "steps.jsonl"))

    @cached_property
    def metrics(self) -> list[Mapping[str, Any]]:
        """Rows of the run's evaluations."""
        return [] if self.directory is None else list(log_rows(self.directory / "metrics.jsonl"))


def log_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a file of JSON lines, such as a run's log, without a last line that has no end."""
    if not path.exists():
        return
    lines = read_text(path, "log", TimelineError, max_bytes=MAX_LOG_BYTES).split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        row = parse_json(line, f"{path} line {number} is damaged", TimelineError)
        if not isinstance(row, dict):
            message = f"{path} line {number} is no JSON object: {json.dumps(row)[:80]}"
            raise TimelineError(message, hint="restore the file from a copy")
        yield row
