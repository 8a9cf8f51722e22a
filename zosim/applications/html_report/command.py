"""``zosim report``: plans and runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zosim.console import stderr
from zosim.options import Hardware, Profile, Threads, with_settings
from zosim.plans import Plan
from zosim.report import Report

if TYPE_CHECKING:
    from zosim.planning.planner import Decision
    from zosim.planning.predict import PlannedRun


def write_report(
    *sources: Decision | PlannedRun | Plan | str | Path,
    output: str | Path,
    hardware: Hardware = None,
    profile: Profile = None,
    threads: Threads = None,
    sections: Sequence[Report] = (),
) -> Path:
    """Write plans and runs as one HTML file that needs no network, and return its path.

    Parameters
    ----------
    *sources : Decision, PlannedRun, Plan or path
        Plans, their files, and directories of runs; later ones are held against the first.
    output : path
        HTML file to write.
    hardware, profile, threads
        As for :func:`zosim.simulate`.
    sections : sequence of Report
        What else there is to say of a decision, such as the comparison with first-order recipes.

    Raises
    ------
    ZosimError
        If a source is neither a plan nor a run, is damaged, or the file cannot be written.

    Examples
    --------
    >>> import zosim
    >>> decision = zosim.plan("opt-125m", "t4-1x", batch=1, seq=64, dtype="float16")
    >>> zosim.write_report(decision, output="report.html")  # doctest: +SKIP
    """
    from zosim.applications.html_report.compose import Reported, page_of
    from zosim.planning.planner import Decision

    reported = [
        Reported.of(source, hardware=hardware, profile=profile, threads=threads) for source in sources
    ]
    decision = next((source for source in sources if isinstance(source, Decision)), None)
    return page_of(reported, decision, sections).save(output)


@with_settings(None, like=write_report)
def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Plan files and directories of runs, to compare with the first.", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="HTML file to write.", rich_help_panel="Output"),
    ] = Path("report.html"),
    **where: Any,
) -> None:
    """Write plans and runs as one HTML page: the answer, timelines, memory, links, and curves.

    The page is one file, works without a network, and shows tables and pictures where scripts are off.
    """
    written = write_report(*sources, output=output, **where)
    stderr.print(f"wrote {written}: {written.stat().st_size / 1e6:.2f} MB", soft_wrap=True)
