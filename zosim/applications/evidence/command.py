"""``zosim evidence``: a run as one file, made and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zosim import api
from zosim.applications.evidence.file import Evidence, EvidenceError, check, evidence_of, run_header
from zosim.console import emit, stderr
from zosim.options import Hardware, Json, ProfileFile, Threads
from zosim.plans import Plan
from zosim.report import Report, Table

app = typer.Typer(
    help="Save a run as one file that others can check, or check such a file.", no_args_is_help=True
)


@app.command()
def make(
    run: Annotated[
        Path, typer.Argument(help="Directory of a run, from `zosim run --out`.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the evidence to.")],
    hardware: Hardware = None,
    profile: ProfileFile = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Save a run with its plan, machine, profile and prediction, without names, paths, weights or data."""
    api.refuse_irregular_run(run, EvidenceError)
    ran = run / "program.json"
    plan = Plan.load(run / "plan.json")
    used = threads or int(run_header(run)["num_threads"])
    planned = api.simulate(
        plan, hardware, profile=profile, threads=used, program=ran if ran.exists() else None
    )
    evidence = evidence_of(run, planned)
    evidence.save(output)
    stderr.print(f"wrote {output}", soft_wrap=True)
    comparison = evidence.comparison()
    data = {"prediction": evidence.prediction, "measurement": evidence.measurement}
    emit(data, json=as_json, text=comparison.summary_table())


@app.command(name="check")
def check_file(
    file: Annotated[
        Path, typer.Argument(help="Evidence file, from `zosim evidence make`.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Repeat the prediction of an evidence file, and compare; exit with 1 if they differ."""
    evidence = Evidence.load(file)
    findings = check(evidence)
    rows = [
        (f.what, f"{f.declared}", f"{f.found}", "holds" if f.holds else "DOES NOT HOLD") for f in findings
    ]
    comparison = evidence.comparison()
    inside = evidence.row.is_inside
    verdict = f"the measured step lies {'inside' if inside else 'outside'} of the predicted interval"
    data = {
        "holds": all(finding.holds for finding in findings),
        "findings": list(findings),
        "versions": evidence.versions,
        "step_error": comparison.step_error,
        "measured_inside_interval": inside,
    }
    shown = Table(("statement", "in the file", "made again", ""), rows)
    emit(data, json=as_json, text=Report("", shown, comparison.view(), verdict))
    if not data["holds"]:
        made_by = evidence.versions.get("zosim", "another version")
        stderr.print(f"made by zosim {made_by}; another version may predict differently")
        raise typer.Exit(1)
