"""A sweep: every configuration of a file planned once, and what came of it kept."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from topology.errors import PlanError
from topology.units import format_bytes, format_count, format_seconds
from zosim import api
from zosim.applications.sweep.configurations import (
    Configuration,
    canonical,
    code_version,
    configurations,
    key_of,
    plan_settings,
)
from zosim.applications.sweep.results import Outcome, ResultRow, Results, write_csv
from zosim.applications.sweep.workers import Evaluate, SweepTask, outcomes
from zosim.applications.validation.rows import RowsError
from zosim.documents import check_writable
from zosim.report import Report, Table

_MOST_SHOWN = 5
_MOST_SHARDS = 10**6
_NUM_FASTEST = 10
_COMMIT_EVERY_S = 0.5
"""A process that is killed loses at most what this time brought."""


def planned_figures(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the plan that `zosim plan` chooses for a configuration."""
    decision = api.plan(**plan_settings(settings))
    prediction = decision.prediction
    return {
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.low_s,
        "step_time_high_s": prediction.high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "device_bytes": prediction.footprints.largest.device_bytes,
        "host_bytes": prediction.footprints.fullest.size_bytes,
        "num_ranks": decision.plan.placement.world_size,
        "bottleneck": prediction.bottleneck.description,
        "placement": decision.chosen.describe(),
    }


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is."""

    # num_done, num_total: configurations of the shard.
    num_done: int
    num_total: int
    per_s: float  # those that ended per second since it was started

    @property
    def left_s(self) -> float:
        """Seconds that are left at this rate."""
        return (self.num_total - self.num_done) / self.per_s if self.per_s else float("inf")

    def __str__(self) -> str:
        left = f"{format_seconds(self.left_s, 2)} left" if self.per_s else "time left unknown"
        return f"{self.num_done:,} of {self.num_total:,} configurations, {self.per_s:.3g}/s, {left}"


@dataclass(frozen=True)
class SweepOutcome:
    """What came of a sweep."""

    file: Path
    output: Path
    num_total: int
    num_new: int
    num_failed: int
    errors: tuple[tuple[str, int], ...]
    fastest: tuple[ResultRow, ...]

    def to_data(self) -> dict[str, Any]:
        """Return the same in the terms of JSON."""
        return {
            "file": str(self.file),
            "output": str(self.output),
            "configurations": self.num_total,
            "evaluated": self.num_new,
            "failed": self.num_failed,
            "errors": dict(self.errors),
            "fastest": [{**row.inputs, **_figures(row.outcome), "key": row.key} for row in self.fastest],
        }

    def view(self) -> Report:
        """Return the counts, and the fastest."""
        failed = ", ".join(f"{count} {name}" for name, count in self.errors)
        counts = (
            f"{self.num_total:,} configurations: {self.num_new:,} evaluated now, {self.num_failed:,} failed"
        )
        return Report("", counts + (f" ({failed})" if failed else ""), _fastest_table(self.fastest))


def _fastest_table(rows: Sequence[ResultRow]) -> Table:
    """Return the rows, with a column for each input in which they differ."""
    names = dict.fromkeys(name for row in rows for name in row.inputs)
    common = {name for name in names if len({row.inputs.get(name) for row in rows}) == 1}
    varied = [name for name in names if name not in common]
    columns = ("placement", "step", "tokens/s", "device", "host")
    title = ", ".join(f"{name} {rows[0].inputs[name]}" for name in names if name in common)
    return Table(
        (*varied, *columns),
        [(*(str(row.inputs.get(name, "")) for name in varied), *_cells(row)) for row in rows],
        title="most tokens per second" + (f": {title}" if title else ""),
        numeric=columns[1:],
    )


def _figures(outcome: Outcome) -> Mapping[str, Any]:
    return {} if isinstance(outcome, str) else outcome


def _cells(row: ResultRow) -> tuple[str, ...]:
    figures = _figures(row.outcome)
    return (
        figures["placement"],
        format_seconds(figures["step_time_s"]),
        format_count(figures["tokens_per_s"]),
        format_bytes(figures["device_bytes"]),
        format_bytes(figures["host_bytes"]),
    )


def sweep(
    file: str | Path,
    output: str | Path | None = None,
    *,
    workers: int | None = None,
    shard: str = "1/1",
    merge: Sequence[str | Path] = (),
    table: str | Path | None = None,
    executor: Executor | None = None,
    evaluate: Evaluate = planned_figures,
    on_progress: Callable[[SweepProgress], object] = lambda _: None,
) -> SweepOutcome:
    """Plan every configuration of a file, and keep the results in a database; what is there already is not done again.

    Parameters
    ----------
    file : path
        A CSV file with a configuration a row, whose columns are options of `zosim plan` by name; or YAML or JSON, where each
        option has a value or a list of values, and all products are configurations.
    output : path, optional
        The SQLite file; by default that of `file` with the suffix ``.sqlite``.
    workers : int, optional
        Number of processes, or of tasks that `executor` works on at once; by default the number of cores.
    shard : str
        ``"2/8"``: the second of eight parts, which other machines may do at the same time, each with an output of its own.
    merge : sequence of path
        Outputs of other shards, added before anything is evaluated.
    table : path, optional
        CSV file to write all results of `output` to.
    executor : concurrent.futures.Executor, optional
        What evaluates, such as ``dask.distributed.Client().get_executor()``; by default processes of this machine.
    evaluate : callable
        From the settings of a configuration to its figures; a function that workers can import.
    on_progress : callable
        Called with a :class:`SweepProgress` as configurations end.

    Raises
    ------
    ZosimError
        If the file has a row that is no configuration, the database is something else or in use, or results clash.

    Examples
    --------
    >>> sweep("configurations.csv", table="results.csv")  # doctest: +SKIP
    """
    file = Path(file)
    output = file.with_suffix(".sqlite") if output is None else Path(output)
    for written in (output, None if table is None else Path(table)):
        check_writable(written)
    if output.resolve() == file.resolve():
        raise RowsError(f"--output {output} is the file of configurations", hint="choose another name")
    num_workers = (os.cpu_count() or 1) if workers is None else workers
    if num_workers < 1:
        raise PlanError(f"--workers {workers} must be at least 1")
    space = _Space(file, f"{code_version()} {evaluate.__module__}.{evaluate.__qualname__}", *_shard(shard))
    keys = space.checked_keys()
    with Results(output) as results:
        for other in merge:
            results.merge(Path(other))
        results.forget_died()
        pending = {key for key in keys if key not in results}
        num_known, num_new = len(keys) - len(pending), 0
        begin_s = committed_s = time.monotonic()
        for ended in outcomes(space.tasks(pending), evaluate, num_workers, executor):
            for task, outcome in ended:
                results.add(task.key, task.settings, outcome)
            num_new += len(ended)
            now_s = time.monotonic()
            if now_s - committed_s > _COMMIT_EVERY_S:
                results.commit()
                committed_s = now_s
            on_progress(SweepProgress(num_known + num_new, len(keys), num_new / max(now_s - begin_s, 1e-9)))
        results.commit()
        if table is not None:
            write_csv(Path(table), lambda: (row for row in results.rows() if row.key in keys))
        errors, fastest = _summary(row for row in results.rows() if row.key in keys)
    return SweepOutcome(
        file, output, len(keys), num_new, errors.total(), tuple(errors.most_common()), tuple(fastest)
    )


@dataclass(frozen=True)
class _Space:
    """The configurations of one shard."""

    file: Path
    version: str
    shard: int
    num_shards: int

    def _key(self, configuration: Configuration) -> str | None:
        """Return a configuration's key; None if another shard has it. Equal configurations are in one shard."""
        key = key_of(canonical(configuration), self.version)
        return key if int(key[:15], 16) % self.num_shards == self.shard else None

    def checked_keys(self) -> set[str]:
        """Return the keys of the shard.

        Raises RowsError if rows of the file, of any shard, are no configurations; the message has the first of them.
        """
        keys, wrong = set(), []
        for configuration in configurations(self.file):
            try:
                key = self._key(configuration)
            except RowsError as error:
                wrong.append(error)
                if len(wrong) == _MOST_SHOWN:
                    break
                continue
            if key is not None:
                keys.add(key)
        if wrong:
            hints = dict.fromkeys(error.hint for error in wrong if error.hint)
            raise RowsError("\n  ".join(error.message for error in wrong), hint="; ".join(hints) or None)
        return keys

    def tasks(self, pending: set[str]) -> Iterator[SweepTask]:
        """Yield what is pending, in the order of the file; the first of equal configurations stands for all."""
        for configuration in configurations(self.file):
            key = self._key(configuration)
            if key in pending:
                pending.remove(key)
                yield SweepTask(key, configuration.settings)


def _shard(shard: str) -> tuple[int, int]:
    """Return the number of a shard, from 0, and how many there are."""
    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= _MOST_SHARDS):
        raise PlanError(
            f"--shard {shard} must be i/N with i from 1 to N, and N at most {_MOST_SHARDS}",
            hint="such as 2/8",
        )
    return int(number) - 1, int(count)


def _summary(rows: Iterator[ResultRow]) -> tuple[Counter[str], list[ResultRow]]:
    """Return how often errors of each kind came, and the rows of most tokens per second."""
    errors: Counter[str] = Counter()

    def successes() -> Iterator[ResultRow]:
        for row in rows:
            if isinstance(row.outcome, str):
                errors[row.outcome.partition(":")[0]] += 1
            elif "tokens_per_s" in row.outcome:
                yield row

    fastest = nlargest(_NUM_FASTEST, successes(), key=lambda row: _figures(row.outcome)["tokens_per_s"])
    return errors, fastest
