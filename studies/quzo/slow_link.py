"""``python -m studies.quzo.slow_link``: blocks in 8 and 4 bits against 16 and 32 over a slow link, predicted and measured.

Two hosts on this machine, joined by a link that is slow in earnest (:mod:`studies.shaped`, as root). Each keeps half of
every block and gets the other half from its neighbour, whenever the block is used: what a block takes on a bus, it takes here on the link.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from costmodel.rates.profile import load_profile
from studies.shaped.benchmark import calibrate_hosts, measure, read_steps
from studies.shaped.cases import TWO
from studies.shaped.predicting import ShapedRow, predict
from topology import detect
from topology.errors import ZosimError

CASES = "ddp, sliced,"


def main(
    rate: Annotated[str, typer.Option(help="Of the link.")] = "25mbit",
    folder: Annotated[Path, typer.Option(help="Where profile and steps are kept.")] = Path("build/shaped"),
    cases: Annotated[str, typer.Option(help="Words that the names of cases have.")] = CASES,
    budget: Annotated[float, typer.Option(min=1, help="Seconds to calibrate for.")] = 20.0,
) -> None:
    """Calibrate if that has not been done, measure the cases, and print them beside what was predicted."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a network is not left behind
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "profile0.json").exists():
            calibrate_hosts(folder, budget)
        measure(rate, TWO, folder, cases)
        for row in rows(rate, folder):
            print(line(row))
    except ZosimError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        raise typer.Exit(2) from None


def rows(rate: str, folder: Path) -> list[ShapedRow]:
    """Return the cases that were measured over a link of this rate, beside their predictions."""
    steps, profile = read_steps(folder, rate, TWO), load_profile(folder / "profile0.json")
    assert steps is not None
    latency_s = max(0.0, steps.link.message_s - profile.values()["message_s"])
    return predict(rate, TWO, steps, latency_s, detect(), profile)


def line(row: ShapedRow) -> str:
    """Return a case in a line: milliseconds, and predicted over measured."""
    return (
        f"{row.name.removeprefix('ddp, sliced, '):46} predicted {1e3 * row.predicted_s:6.0f}, measured {1e3 * row.measured_s:6.0f} "
        f"({row.error:+.0%}), other processes took {row.foreign_cores:.1f} cores"
    )


if __name__ == "__main__":
    typer.run(main)
