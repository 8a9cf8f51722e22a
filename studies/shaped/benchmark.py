"""``python -m studies.shaped.benchmark``: predicted against measured on shaped links, with a report."""

from __future__ import annotations

import datetime
import logging
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from costmodel.rates.profile import load_profile
from studies.checkout import commit
from studies.prediction.report import machine_words
from studies.shaped.cases import NETWORKS, RATES, TWO, HostLayout
from studies.shaped.links import LinkFigures
from studies.shaped.network import ShapedNetwork, rate_bits_per_s
from studies.shaped.predicting import ShapedRow, predict
from studies.shaped.ranks import run_ranks
from studies.shaped.report import LinkRow, ShapedBenchmark
from studies.shaped.worker import CaseSteps, NetworkSteps
from topology import detect
from topology.errors import RunError, ZosimError
from topology.reading import read_json_object

OUT = Path("docs/benchmarks")
_CALIBRATION = "calibration"
_REPORT = "report"
_PARTS = (_CALIBRATION, *(f"{rate}-{layout.name}" for rate, layout in product(RATES, NETWORKS)), _REPORT)
_PART_TIMEOUT_S = 300.0


def main(
    folder: Annotated[Path, typer.Option(help="Where the parts are kept.")] = Path("build/shaped"),
    part: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Do this alone, several times for several: {', '.join(_PARTS)}.", show_default=False
        ),
    ] = None,
    cases: Annotated[str, typer.Option(help="Run those alone whose names have all of these words.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the report and its JSON.")] = OUT,
    budget: Annotated[float, typer.Option(min=1, help="Seconds to calibrate for.")] = 20.0,
) -> None:
    """Calibrate, measure the cases of every network, predict them, and report."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # As in __main__: a network is not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in part or _PARTS:
            print(name, file=sys.stderr)
            _do(name, folder, out, budget, cases)
    except ZosimError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        raise typer.Exit(2) from None


def _do(name: str, folder: Path, out: Path, budget_s: float, cases: str) -> None:
    if name not in _PARTS:
        raise RunError(f"there is no part {name!r}", hint=f"parts: {', '.join(_PARTS)}")
    if name == _CALIBRATION:
        calibrate_hosts(folder, budget_s)
    elif name == _REPORT:
        print(_report(folder, out))
    else:
        rate, _, layout = name.rpartition("-")
        measure(rate, next(item for item in NETWORKS if item.name == layout), folder, cases)


def calibrate_hosts(folder: Path, budget_s: float) -> None:
    """Calibrate two hosts at the same time, with one thread each, as they work; the first one's profile is kept."""
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
        raise RunError("the calibration failed", hint="try `zosim calibrate --threads 1`")


def measure(rate: str, layout: HostLayout, folder: Path, cases: str = "") -> None:
    """Run the cases of a network whose names have some words, and keep what was measured in `folder`."""
    result = folder / f"{rate}-{layout.name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "studies.shaped.worker", rate, layout.name, str(result.resolve()), cases]
    with ShapedNetwork(layout.num_hosts, rate_bits_per_s(rate)) as network:
        status = run_ranks(network, command, ranks_per_host=layout.ranks_per_host, timeout_s=_PART_TIMEOUT_S)
    if status or not result.exists():
        raise RunError(f"the ranks of {rate} {layout.name} ended with {status}", hint="their words are above")


def _report(folder: Path, out: Path) -> Path:
    profile = load_profile(folder / "profile0.json")
    machine = detect()
    message_s = profile.values()["message_s"]
    rows: list[ShapedRow] = []
    links: list[LinkRow] = []
    for rate in RATES:
        for layout in NETWORKS:
            steps = read_steps(folder, rate, layout)
            if steps is None:
                continue
            latency_s = max(0.0, steps.link.message_s - message_s)
            links.append(LinkRow(rate, layout.name, latency_s, steps.link))
            rows += predict(rate, layout, steps, latency_s, machine, profile)
    if not rows:
        raise RunError(f"no network in {folder} was measured", hint=f"--part {_PARTS[1]} measures one")
    benchmark = ShapedBenchmark(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=commit(),
        machine=machine_words(machine.device_spec(machine.of_kind("cpu")[0].id).name),
        message_s=message_s,
        pace=profile.values().get("pace", 1.0),
        links=tuple(links),
        rows=tuple(rows),
    )
    return benchmark.write(out)


def read_steps(folder: Path, rate: str, layout: HostLayout) -> NetworkSteps | None:
    """Return what was measured of a network, None if nothing was."""
    path = folder / f"{rate}-{layout.name}.json"
    if not path.exists():
        return None
    data = read_json_object(path, "measured network", RunError)
    try:
        link = LinkFigures(**data["link"])
        cases = tuple(CaseSteps(**{**item, "step_s": tuple(item["step_s"])}) for item in data["cases"])
    except TypeError as error:
        raise RunError(
            f"{path} has other figures than this release measures",
            hint=f"--part {path.stem} measures it again",
        ) from error
    return NetworkSteps(link, cases)


if __name__ == "__main__":
    typer.run(main)
