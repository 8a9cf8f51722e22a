"""``zosim calibrate``. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from executors.report import calibration_view, facts_table
from topology.errors import ProfileError
from topology.limits import MAX_THREADS
from zosim.console import emit, progress, stderr
from zosim.documents import check_writable
from zosim.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.rates.calibration import FitReport
    from costmodel.rates.profile import Profile
    from executors.calibration.device_facts import DeviceFacts
    from zosim.applications.validation.learning import Lesson

EXIT_DISTURBED = 3
"""Exit status of a calibration that was disturbed too much to be kept."""


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write the profile to, as well.", show_default=False),
    ] = None,
    budget: Annotated[float, typer.Option(help="Time to measure for, in seconds.", min=0.1)] = 20.0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Number of CPU threads.", show_default="all cores"),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to calibrate, such as cpu or cuda:0.")] = "cpu",
    save: Annotated[
        bool, typer.Option(help="Save the profile for later predictions of this machine.")
    ] = True,
    keep_disturbed: Annotated[
        bool,
        typer.Option(
            "--keep-disturbed",
            help="Save the profile even if other processes disturbed it, marked as such. It never replaces an "
            "undisturbed one.",
        ),
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Fit published rows instead, for `zosim predict`: a CSV file, or shipped for all built-in "
            "rows.",
            show_default=False,
        ),
    ] = None,
    evidence: Annotated[
        list[Path] | None,
        typer.Option(
            help="Fit a profile to runs instead: a file from `zosim evidence make`, repeated for more; or to "
            "kernels and copies of one device: a CSV file of rows as of `zosim validate`, next to its "
            "topology files.",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Machine whose rows of the --evidence CSV file to use.", show_default="all machines"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure the speed of this machine, for later predictions.

    Exit status 3: other processes disturbed the measurements too much; the profile is not saved.
    """
    if evidence and rows is not None:
        raise ProfileError("--rows and --evidence exclude each other", hint="leave one of them out")
    is_table = evidence is not None and any(path.suffix.lower() == ".csv" for path in evidence)
    if hardware is not None and not is_table:
        raise ProfileError(
            "--hardware needs --evidence FILE.csv", hint="it selects the rows of one machine in that file"
        )
    check_writable(output)
    if evidence and is_table:
        if len(evidence) > 1:
            raise ProfileError("only one CSV file of rows can be given", hint="name one --evidence FILE.csv")
        from zosim.applications.validation.learning import learned_from_rows

        learnt, report, lessons = learned_from_rows(evidence[0], hardware)
        _show_fit(learnt, report, lessons, output=output, kept=None, as_json=as_json)
        return
    if evidence:
        from zosim.applications.evidence.learning import learned

        _show_fit(*learned(evidence), (), output=output, kept=None, as_json=as_json)
        return
    if rows is not None:
        from zosim.registry import CALIBRATIONS, load, registered

        load(registered(CALIBRATIONS)["rows"])(rows, output, as_json=as_json)
        return
    from executors.calibration.calibrating import calibrated
    from executors.runs.overrides import default_threads
    from executors.runs.planning import host_node
    from zosim.hardware.profiles import save_host_profile

    topology, node = host_node(device)
    num_threads = threads or default_threads()
    with progress() as bar:
        task = bar.add_task("measuring", total=100)
        profile, fit = calibrated(
            topology,
            node,
            device=device,
            num_threads=num_threads,
            budget_s=budget,
            on_share=lambda share: bar.update(task, completed=round(100 * share)),
        )
    facts = None
    if device != "cpu":
        from executors.calibration.device_facts import device_facts, with_facts

        facts = device_facts(device)
        profile = with_facts(profile, facts)
    kept = save_host_profile(profile, keep_disturbed=keep_disturbed) if save else None
    _show_fit(profile, fit, (), output=output, kept=kept, as_json=as_json, facts=facts)
    if save and kept is None:
        _report_not_kept(profile, keep_disturbed=keep_disturbed)
        raise typer.Exit(EXIT_DISTURBED)


def _report_not_kept(profile: Profile, *, keep_disturbed: bool) -> None:
    """Print why a disturbed profile is not kept, and what can be done about it."""
    from zosim.hardware.profiles import host_profile_path, undisturbed_host_profile

    path = host_profile_path(profile.device_name, profile.num_threads)
    reason, force = "", ", or keep this one with --keep-disturbed"
    if undisturbed_host_profile(profile.device_name, profile.num_threads) is not None:
        reason, force = f"; {path}, which nothing disturbed, stays", ""
        if keep_disturbed:
            force = ", or write this one elsewhere with -o FILE, for --profile FILE"
    stderr.print(
        f"not saved: other processes disturbed {profile.disturbed_share:.0%} of the calibration{reason}",
        f"hint: end other processes and calibrate again{force}",
        sep="\n",
        markup=False,
        soft_wrap=True,
    )


def _show_fit(
    profile: Profile,
    fit: FitReport,
    lessons: Sequence[Lesson],
    *,
    output: Path | None,
    kept: Path | None,
    as_json: bool,
    facts: DeviceFacts | None = None,
) -> None:
    """Write a fitted profile where it was asked for, and print it."""
    if output is not None:
        profile.save(output)
    for path in (kept, output):
        if path is not None:
            stderr.print(f"wrote {path}", markup=False, soft_wrap=True)
    data = {
        "profile": profile,
        "fit": fit,
        "median_error": fit.median_error,
        "num_measurements": len(fit.residuals),
        "lessons": lessons,
        "device": facts,
    }
    view = calibration_view(profile, fit, lessons)
    emit(data, json=as_json, text=Report("", view, *([facts_table(facts)] if facts else [])))
