"""``python -m studies.shaped.benchmark``: predicted against measured on shaped links, with a report."""

from __future__ import annotations

import datetime
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from costmodel.rates.profile import Profile, load_profile
from studies.kept_results import MORE_TO_DO, Content, KeptResults, OutOfTimeError
from studies.prediction.report import describe_machine
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

    Raises
    ------
    RunError
        If it was measured by a release that measured something else.
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
