"""``zosim whatif``: a plan on a machine that is not as it was."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zosim.applications.whatif.answer import LIMITS, Scope
from zosim.applications.whatif.answer import whatif as answer_for
from zosim.config import PlanConfig
from zosim.console import emit, stderr
from zosim.options import Hardware, Json, PlanFile, ProfileFile, ReportFile, Threads, with_settings


@with_settings(PlanConfig, only=LIMITS)
def whatif(
    plan_file: PlanFile,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Figure to change, as TARGET.QUANTITY=VALUE; repeat for more. A target is a node, link, device "
            "or type of these; a quantity is speed, compute, bandwidth, latency or memory; a value is a factor "
            "such as 0.5x, or a figure such as 8GB/s.",
            rich_help_panel="Hardware",
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            help="Node or link to remove, such as gpu3; repeat for more.", rich_help_panel="Hardware"
        ),
    ] = None,
    derive: Annotated[
        Scope,
        typer.Option(
            help="Figures to derive the step time by: all links and devices of one type together (type), "
            "every one of them (each), or none.",
            rich_help_panel="Output",
        ),
    ] = "type",
    hardware: Hardware = None,
    profile: ProfileFile = None,
    threads: Threads = None,
    report: ReportFile = None,
    as_json: Json = False,
    **limits: Any,
) -> None:
    """Predict a plan on a changed machine, plan anew for it, and show what the step depends on.

    Without a change, only the latter, of the plan as it is.
    """
    answer = answer_for(
        plan_file,
        changes=changes or (),
        drop=drop or (),
        hardware=hardware,
        profile=profile,
        threads=threads,
        derive=derive,
        **limits,
    )
    if report is not None:
        stderr.print(f"wrote {answer.report(report)}", soft_wrap=True)
    emit(answer.to_data() if as_json else None, json=as_json, text=answer.view())
