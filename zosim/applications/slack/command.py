"""``zosim slack``: how many steps fit between live requests, and what they do to the latencies of these."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from topology.errors import TrafficError
from zosim import api
from zosim.applications.slack.serving import (
    POLICIES,
    Policy,
    Served,
    Server,
    Times,
    closed_mean_s,
    closed_steps_per_hour,
    poisson,
    recorded,
    serve,
)
from zosim.console import emit, stderr
from zosim.options import Json, ProfileFile
from zosim.plans import Plan
from zosim.report import Report, Table


def slack(
    request_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Time that each request adds to a batch, in milliseconds.", show_default=False
        ),
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan file whose predicted step is the unit of background work; it can yield between the "
            "model's segments."
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="Time of a background step in milliseconds, instead of --plan.", show_default=False
        ),
    ] = None,
    segments: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of segments of a background step, between which it can yield.",
            show_default="the plan's segments, or 1",
        ),
    ] = None,
    batch_ms: Annotated[
        float, typer.Option(min=0, help="Fixed time of each batch of requests, in milliseconds.")
    ] = 0.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of requests in a batch.")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean number of requests per second, at random times.", show_default=False),
    ] = None,
    burst: Annotated[
        float, typer.Option(min=1, help="Mean number of requests that arrive at the same time.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of arrivals instead of --rate, with a column timestamp.", show_default=False
        ),
    ] = None,
    duration: Annotated[float, typer.Option(help="Duration of the random arrivals, in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random arrivals.")] = 0,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs that take requests in turn.")] = 1,
    p99_ms: Annotated[
        float | None,
        typer.Option(help="Limit on the 99th percentile of latency, in milliseconds.", show_default=False),
    ] = None,
    profile: ProfileFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG file to draw the latencies of all policies to.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the training steps that fit between live requests, and the delay that they cause."""
    if p99_ms is not None and not p99_ms > 0:
        raise TrafficError(
            f"--p99-ms {p99_ms:g} must be above 0",
            hint="give a latency in milliseconds",
        )
    server = _server(plan, step_ms, segments, batch_ms, request_ms, max_batch, profile)
    arrivals = _arrivals(rate, burst, trace, duration, seed)
    # Machines that take turns are alike: one of them, with every n-th request, stands for all.
    own = arrivals[::gpus]
    outcomes = [serve(server, own, policy) for policy in POLICIES]
    own_rate = rate / gpus if rate is not None and burst == 1 and gpus == 1 else None
    data = {
        "step_s": server.step_s,
        "segments": server.num_segments,
        "requests": len(arrivals),
        "load": len(own) * server.service_s(1) / outcomes[0].duration_s if max_batch == 1 else None,
        "policies": [_data(outcome, server, own_rate, gpus, p99_ms) for outcome in outcomes],
    }
    if plot is not None:
        _draw(plot, outcomes, p99_ms)
        stderr.print(f"wrote {plot}", soft_wrap=True)
    emit(data, json=as_json, text=_view(data, p99_ms))


def _server(
    plan_file: Path | None,
    step_ms: float | None,
    segments: int | None,
    batch_ms: float,
    request_ms: float,
    max_batch: int,
    profile: Path | None,
) -> Server:
    if (plan_file is None) == (step_ms is None):
        raise TrafficError(
            "give exactly one of --plan and --step-ms",
            hint="--plan predicts the time of a background step, --step-ms states it",
        )
    segments_of_plan = 1
    seconds = 0.0 if step_ms is None else step_ms / 1e3
    if plan_file is not None:
        plan = Plan.load(plan_file)
        seconds = api.simulate(plan, profile=profile).prediction.step_time_s
        segments_of_plan = len(plan.model.segments)
    return Server(batch_ms / 1e3, request_ms / 1e3, max_batch, seconds, segments or segments_of_plan)


def _arrivals(rate: float | None, burst: float, trace: Path | None, duration: float, seed: int) -> Times:
    if (rate is None) == (trace is None):
        raise TrafficError(
            "give exactly one of --rate and --trace",
            hint="--rate samples arrivals at random, --trace reads them",
        )
    if trace is not None:
        return recorded(trace)
    assert rate is not None
    return poisson(rate, duration, seed, burst=burst)


def _data(
    outcome: Served, server: Server, rate: float | None, gpus: int, p99_ms: float | None
) -> dict[str, Any]:
    p99_s = outcome.quantile_s(0.99)
    return {
        "policy": outcome.policy,
        "steps_per_hour": gpus * outcome.steps_per_hour,
        "closed_steps_per_hour": None
        if rate is None
        else closed_steps_per_hour(server, rate, outcome.policy),
        "mean_s": outcome.mean_s,
        "closed_mean_s": None if rate is None else closed_mean_s(server, rate, outcome.policy),
        "p50_s": outcome.quantile_s(0.5),
        "p99_s": p99_s,
        "cancelled": gpus * outcome.num_cancelled,
        "within_objective": None if p99_ms is None else p99_s * 1e3 <= p99_ms,
    }


_WORDS: dict[Policy, str] = {
    "none": "no background steps",
    "whole": "background steps to their end",
    "segments": "segment by segment",
    "cancel": "cancelled by requests",
}


def _view(data: dict[str, Any], p99_ms: float | None) -> Report:
    rows = []
    for row in data["policies"]:
        within = {None: "", True: "yes", False: "no"}[row["within_objective"]]
        rows.append(
            (
                _WORDS[row["policy"]],
                f"{row['steps_per_hour']:,.0f}",
                _number(row["closed_steps_per_hour"], 1, ",.0f"),
                f"{row['mean_s'] * 1e3:.2f}",
                _number(row["closed_mean_s"], 1e3, ".2f"),
                f"{row['p50_s'] * 1e3:.2f}",
                f"{row['p99_s'] * 1e3:.2f}",
                *((within,) if p99_ms is not None else ()),
            )
        )
    heads: tuple[str, ...] = ("policy", "steps/h", "formula", "mean ms", "formula", "p50 ms", "p99 ms")
    if p99_ms is not None:
        heads = (*heads, f"p99 <= {p99_ms:g} ms")
    heading = f"a background step of {data['step_s'] * 1e3:.4g} ms in {data['segments']} segments alongside {data['requests']:,} requests"
    return Report("", Table((heading, *heads[1:]), rows))


def _number(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else format(factor * value, form)


def _draw(path: Path, outcomes: list[Served], p99_ms: float | None) -> None:
    try:
        import matplotlib as mpl
    except ImportError:
        raise TrafficError(
            "--plot needs matplotlib", hint="pip install matplotlib, or leave --plot out"
        ) from None
    import numpy as np

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for outcome in outcomes:
        latencies = np.sort(outcome.latencies_s) * 1e3
        label = f"{_WORDS[outcome.policy]}: {outcome.steps_per_hour:,.0f} steps/h"
        axes.plot(latencies, 1 - np.arange(len(latencies)) / len(latencies), label=label)
    if p99_ms is not None:
        axes.axvline(p99_ms, color="grey", linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("latency (ms)")
    axes.set_ylabel("share of requests above it")
    axes.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # a format that matplotlib does not have
        raise TrafficError(f"cannot write --plot {path}: {error}", hint="such as slack.svg") from None
    finally:
        plt.close(figure)
