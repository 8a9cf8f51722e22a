"""``zosim report``: plans and runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zosim.console import stderr
from zosim.options import Hardware, Profile, Threads, with_settings
from zosim.plans import Plan
from zosim.report import Reportable


def write_report(
    *sources: Reportable | Plan | str | Path,
    output: str | Path,
    hardware: Hardware = None,
    profile: Profile = None,
    threads: Threads = None,
) -> Path:
    """Write plans, runs and other results as one HTML file that needs no network, and return its path.

    Parameters
    ----------
    *sources : Decision, PlannedRun, Plan, path, or another result
        Plans, their files, and directories of runs; later ones are held against the first. Of a decision the page shows
        the other candidates, what would change it, and whether first order is the better choice. Another result is what
        :func:`zosim.compare`, :func:`zosim.buy` or :func:`zosim.whatif` returns.
    output : path
        HTML file to write.
    hardware, profile, threads
        As for :func:`zosim.simulate`.

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
    from zosim.planning.predict import PlannedRun

    reported, results = [], []
    for source in sources:
        if isinstance(source, Reportable) and not isinstance(source, Decision | PlannedRun):
            results.append(source)
            reported += [Reported(name, planned) for name, planned in source.runs.items()]
        else:
            reported.append(Reported.of(source, hardware=hardware, profile=profile, threads=threads))
    decision = next((source for source in sources if isinstance(source, Decision)), None)
    return page_of(reported, decision, results).save(output)


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
