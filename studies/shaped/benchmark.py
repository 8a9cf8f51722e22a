"""``python -m studies.shaped.benchmark``: predicted against measured on shaped links, with a report."""

from __future__ import annotations

import datetime
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from costmodel.rates.profile import Profile, load_profile
from costmodel.scoring import Score
from studies.kept_results import MORE_TO_DO, Content, KeptResults, OutOfTimeError
from studies.prediction.report import describe_machine, versions
from studies.shaped.cases import NETWORKS, RATES, TWO, HostLayout
from studies.shaped.links import LinkFigures
from studies.shaped.network import FRAME_EFFICIENCY, ShapedNetwork, rate_bits_per_s
from studies.shaped.predicting import ShapedRow, predict
from studies.shaped.ranks import run_ranks
from studies.shaped.worker import CaseSteps, NetworkSteps
from studies.timed_cases import Groups, case_columns, describe_slowdown, grouped, scored, step_tables
from topology import detect
from topology.errors import RunError, ZosimError
from topology.reading import read_json_object
from zosim.analysis.scoreboard import rows_table, score_table
from zosim.report import Bullets, Code, Element, Report, Table

GOAL = (0.10, 0.20)
"""Median and 90th percentile of the absolute relative errors of the step time."""

_DISTURBED = 0.2
"""Cores; the kernel's own work for the network is a part of it."""


@dataclass(frozen=True)
class LinkRow:
    """What a network was measured to be."""

    rate: str
    layout: str
    latency_s: float
    figures: LinkFigures


@dataclass(frozen=True)
class ShapedBenchmark:
    """Everything that a report says."""

    date: str
    commit: str
    machine: str
    message_s: float
    slowdown: float
    """While calibrating."""
    links: tuple[LinkRow, ...]
    rows: tuple[ShapedRow, ...]

    def write(self, folder: Path) -> Path:
        """Write the report and the JSON next to it, and return the report's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.date}-shaped-links.md"
        path.write_text(self.to_markdown(), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    def to_markdown(self) -> str:
        """Return the report."""
        return Report(
            f"Predicted against measured over slow links, on {self.machine}",
            *self._head(),
            self._figures(),
            self._links(),
            self._misses(),
            self._cases(),
        ).to_markdown()

    def _head(self) -> Iterator[Element]:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield f"{self.date}, commit `{self.commit}`. {listed}."
        yield Code("python -m studies.shaped.benchmark")
        yield f"""Hosts are network namespaces of one machine, joined by shaped veth pairs (docs/how-to/shape-links.md says how). A rank computes with
one thread. The profile is `zosim calibrate --threads 1`, run on two hosts at once. Links of the topology have the declared
rate without headers of frames ({FRAME_EFFICIENCY:.1%} is payload). Their latency is that of a small message, minus that of one within a host by the profile.

The simulated hosts share the machine's cores, as the real ones do. They have as many cores as ranks were measured to get at once, minus
what carrying bytes takes of them. These figures (the
table of links) are measured before the cases, with other messages and other work. Models have random weights.
Measured step times are medians on rank 0."""

    def _figures(self) -> Report:
        lists = grouped(self.rows, _GROUPS)
        met = Score.of(row.step for row in self.rows).meets(GOAL)
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.rows)
        return Report(
            "Figures",
            *step_tables(lists, GOAL),
            score_table(
                scored(lists, lambda row: row.on_measured_link),
                "cases",
                title="Step time, with the link as measured",
            ),
            f"Goal, at most {GOAL[0]:.0%} in the median and {GOAL[1]:.0%} at the 90th percentile: {'met' if met else '**missed**'}.",
            f"In {disturbed} of the {len(self.rows)} cases other processes used more than {_DISTURBED} of a processor: read "
            "those rows as disturbed, and the figures with them.",
            describe_slowdown(f"{self.slowdown:.2f}", self.rows),
        )

    def _links(self) -> Report:
        columns: dict[str, Callable[[LinkRow], str]] = {
            "rate": lambda link: link.rate,
            "hosts x ranks": lambda link: link.layout,
            "small message (µs)": lambda link: f"{link.figures.message_s * 1e6:.0f}",
            "latency in the topology (µs)": lambda link: f"{link.latency_s * 1e6:.0f}",
            "payload as declared (MB/s)": lambda link: (
                f"{rate_bits_per_s(link.rate) / 8 * FRAME_EFFICIENCY / 1e6:.1f}"
            ),
            "large all_gather (MB/s)": lambda link: f"{link.figures.bandwidth_bytes_per_s / 1e6:.1f}",
            "work lost to a MB (ms of a core)": lambda link: f"{link.figures.core_s_per_byte * 1e9:.2f}",
            "a gather's wait (ms)": lambda link: f"{link.figures.busy_latency_s * 1e3:.2f}",
            "cores' worth of work": lambda link: f"{link.figures.num_cores:.2f}",
        }
        text = (
            f"A small message within a host takes {self.message_s * 1e6:.0f} µs by the profile. The bandwidth is what each "
            "rank sent in a large `all_gather`, over the seconds: what the table above that has the link as measured "
            "puts in place of the declared rate. Ranks compute and exchange every 0.1 s, with and without gathers of 256 KiB. That shows "
            "what computing loses to the bytes. The wait is what such a gather takes beyond its bytes. "
            "The last column is the work that ranks do at once, in cores, if they exchange as often and send nothing."
        )
        return Report("Links", text, Table.of(self.links, columns, numeric=list(columns)[2:]))

    def _misses(self) -> Report:
        missed = [row for row in self.rows if abs(row.step.error or 0.0) > GOAL[1]]
        causes = {
            row.name: ", ".join(
                f"{name} {predicted * 1e3:.1f} for {measured * 1e3:.1f}"
                for name, predicted, measured in row.labels[:3]
            )
            for row in missed
        }
        return Report(
            "Misses",
            f"{len(missed)} of {len(self.rows)} cases are off by more than {GOAL[1]:.0%}.",
            Bullets(
                f"{row.rate}, {row.name}: {row.step.error:+.0%}. Busy ms of rank 0, predicted for measured: {causes[row.name]}."
                for row in sorted(missed, key=lambda row: -abs(row.step.error or 0.0))
            ),
        )

    def _cases(self) -> Report:
        columns: dict[str, Callable[[ShapedRow], str]] = {
            "rate": lambda row: row.rate,
            "hosts x ranks": lambda row: row.layout,
            "fastest (ms)": lambda row: f"{row.fastest_s * 1e3:.1f}",
            "steps": lambda row: f"{row.num_steps}",
            "others (cores)": lambda row: f"{row.foreign_cores:.2f}",
            "with the link as measured": lambda row: f"{row.on_measured_link.error:+.1%}",
            **case_columns(),
        }
        return Report("Cases, worst first", rows_table(self.rows, columns, row_of=lambda row: row.step))


def _is_of(strategy: str) -> Callable[[ShapedRow], bool]:
    """Return whether a row shares a step out by this strategy, its transfers not sliced."""
    return lambda row: row.strategy.split(",")[0] == strategy and "sliced" not in row.strategy


_GROUPS: Groups[ShapedRow] = {
    "all": lambda _row: True,
    "1 Gbit/s": lambda row: row.rate == "1gbit",
    "100 Mbit/s": lambda row: row.rate == "100mbit",
    **{strategy: _is_of(strategy) for strategy in ("ddp", "pertp", "2d", "stages")},
    "sliced": lambda row: "sliced" in row.strategy,
    "two ranks, a core each": lambda row: row.layout in ("2x1", "2x1s"),
    "four ranks on two cores": lambda row: row.layout not in ("2x1", "2x1s"),
    "undisturbed": lambda row: not row.is_disturbed,
}


OUT = Path("docs/benchmarks")
_PART_TIMEOUT_S = 300.0


def main(
    folder: Annotated[
        Path,
        typer.Option(
            help="Keep what is done here, and go on from it. Remove a file, and its part is done again."
        ),
    ] = Path("build/shaped"),
    stop_after_s: Annotated[
        float, typer.Option(min=1, help="Begin nothing new after so long; run it again to go on.")
    ] = 1e9,
    cases: Annotated[str, typer.Option(help="Run those alone whose names have all of these words.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the report and its JSON.")] = OUT,
    budget: Annotated[float, typer.Option(min=1, help="Seconds to calibrate for.")] = 20.0,
) -> None:
    """Calibrate, measure the cases of every network, predict them, and report.

    In steps: with --stop-after-s it reports what there is, and ends with exit status 75 while there is more to do.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # As in __main__: a network is not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kept_results = KeptResults(folder, stop_after_s, say=lambda text: print(text, file=sys.stderr))
    networks: dict[tuple[str, HostLayout], Content] = {}
    is_done = False
    try:
        with suppress(OutOfTimeError):
            calibration = kept_results.of("calibration", lambda: calibrate_hosts(folder, budget))
            for rate, layout in product(RATES, NETWORKS):
                run = partial(measure, rate, layout, folder, cases)
                networks[rate, layout] = kept_results.of(f"{rate}-{layout.name}", run)
            is_done = True
        if networks:
            print(_report(calibration, networks, ", ".join(sorted(kept_results.commits)), out))
    except ZosimError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        raise typer.Exit(2) from None
    if not is_done:
        print("there is more to do: run the same command again", file=sys.stderr)
        raise typer.Exit(MORE_TO_DO)


def calibrate_hosts(folder: Path, budget_s: float) -> Content:
    """Calibrate two hosts at the same time, with one thread each, as they work, and return the first one's profile."""
    words = [
        sys.executable,
        "-m",
        "zosim",
        "calibrate",
        "--threads",
        "1",
        "--budget",
        f"{budget_s:g}",
        "--no-save",
    ]
    processes = [
        subprocess.Popen([*words, "-o", str(folder / f"profile{host}.json")], stdout=subprocess.DEVNULL)
        for host in range(TWO.num_hosts)
    ]
    ends = [process.wait() for process in processes]
    if any(ends):
        raise RunError(
            "the calibration failed; its output is above", hint="try `zosim calibrate --threads 1`"
        )
    return {"profile": load_profile(folder / "profile0.json").model_dump(mode="json")}


def measure(rate: str, layout: HostLayout, folder: Path, cases: str = "") -> Content:
    """Run the cases of a network whose names have some words, and return what was measured."""
    result = folder / f"{rate}-{layout.name}.measured"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "studies.shaped.worker", rate, layout.name, str(result.resolve()), cases]
    with ShapedNetwork(layout.num_hosts, rate_bits_per_s(rate)) as network:
        status = run_ranks(network, command, ranks_per_host=layout.ranks_per_host, timeout_s=_PART_TIMEOUT_S)
    if status or not result.exists():
        raise RunError(
            f"the ranks of {rate} {layout.name} exited with status {status}", hint="their output is above"
        )
    return read_json_object(result, "measured network", RunError)


def _report(
    calibration: Content, networks: Mapping[tuple[str, HostLayout], Content], commits: str, out: Path
) -> Path:
    profile = Profile.model_validate(calibration["profile"])
    machine = detect()
    message_s = profile.values()["message_s"]
    rows: list[ShapedRow] = []
    links: list[LinkRow] = []
    for (rate, layout), content in networks.items():
        steps = steps_of(content, f"{rate}-{layout.name}")
        latency_s = max(0.0, steps.link.message_s - message_s)
        links.append(LinkRow(rate, layout.name, latency_s, steps.link))
        rows += predict(rate, layout, steps, latency_s, machine, profile)
    if not rows:
        raise RunError(
            "--cases matches no case of any network", hint="--cases takes words from the names of cases"
        )
    benchmark = ShapedBenchmark(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=commits,
        machine=describe_machine(machine.device_spec(machine.of_type("cpu")[0].id).name),
        message_s=message_s,
        slowdown=profile.values().get("slowdown", 1.0),
        links=tuple(links),
        rows=tuple(rows),
    )
    return benchmark.write(out)


def steps_of(content: Content, name: str) -> NetworkSteps:
    """Return what was measured of a network.

    Raises RunError if it was measured by a release that measured something else.
    """
    try:
        link = LinkFigures(**content["link"])
        cases = tuple(CaseSteps(**{**item, "step_s": tuple(item["step_s"])}) for item in content["cases"])
    except TypeError as error:
        raise RunError(
            f"{name} does not hold the figures that this release measures",
            hint=f"delete {name}.json to measure it again",
        ) from error
    return NetworkSteps(link, cases)


if __name__ == "__main__":
    typer.run(main)
