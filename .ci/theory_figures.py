"""Draw the figures of docs/theory as SVG: ``python .ci/theory_figures.py`` writes them to docs/theory/figures.

Every curve is a closed form of ``proofs_checks/oracles`` or a schedule that is stepped through here; nothing is random, so that the same
version of matplotlib writes the same bytes.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proofs_checks.oracles import evaluate

_FIGURES = Path(__file__).resolve().parents[1] / "docs" / "theory" / "figures"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "docs/theory",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
_INK, _BLUE, _ORANGE, _GREEN = "#333333", "#1f6fb4", "#d9730d", "#2e8b57"


def _pair(*, sharey: bool = False) -> tuple[Figure, tuple[Axes, Axes]]:
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.7), sharey=sharey)
    return figure, (left, right)


def smoothing() -> Figure:
    """Return ``|t|`` and its smoothed versions, and the bias of an estimate against the radius for three losses."""
    figure, (left, right) = _pair()
    places = np.linspace(-2, 2, 161)
    for radius, colour in ((0.0, _INK), (0.3, _BLUE), (1.0, _ORANGE)):
        values = [
            evaluate("smoothed_loss", {"loss": "absolute", "t": t, "width": radius})["value"] for t in places
        ]
        left.plot(places, values, color=colour, label=f"radius {radius:g}" if radius else "the loss |t|")
    left.set(xlabel="t", ylabel="smoothed loss")
    left.legend()
    radii = np.geomspace(0.01, 1, 41)
    for loss, colour in (("quartic", _BLUE), ("exponential", _ORANGE), ("sine", _GREEN)):
        biases = [abs(evaluate("estimate_bias", {"loss": loss, "t": 1.0, "width": w})) for w in radii]
        right.loglog(radii, biases, color=colour, label=loss)
    right.loglog(radii, radii**2 / 50, color=_INK, linestyle=":", label="slope 2")
    right.set(xlabel="radius", ylabel="bias at t = 1")
    right.legend()
    return figure


def straight_through() -> Figure:
    """Return what is left of a derivative behind rounding to the nearest: by radius at three places, and by place at three radii."""
    figure, (left, right) = _pair(sharey=True)
    radii = np.linspace(0.05, 1, 96)
    for place, colour, name in (
        (0.0, _BLUE, "on a grid value"),
        (0.25, _GREEN, "a quarter step off"),
        (0.5, _ORANGE, "on a border"),
    ):
        left.plot(
            radii,
            [evaluate("straight_through", {"radius_in_steps": r, "value_in_steps": place}) for r in radii],
            color=colour,
            label=name,
        )
    left.axvline(0.5, color=_INK, linestyle=":", linewidth=0.8)
    left.set(xlabel="radius in steps", ylabel="share of the derivative", ylim=(0, 3.4))
    left.legend()
    places = np.linspace(-1, 1, 201)
    for radius, colour in ((0.15, _ORANGE), (0.3, _GREEN), (0.5, _BLUE)):
        right.plot(
            places,
            [evaluate("straight_through", {"radius_in_steps": radius, "value_in_steps": x}) for x in places],
            color=colour,
            label=f"radius {radius:g}",
        )
    right.set(xlabel="place in steps")
    right.legend(loc="upper center", ncols=3, fontsize=8, columnspacing=1)
    return figure


def stochastic_rounding() -> Figure:
    """Return mean and squared error of a number rounded to 3 bits, at random and to the nearest."""
    figure, (left, right) = _pair()
    numbers = np.linspace(-4.2, 4.2, 673)
    for rounding, colour in (("stochastic", _BLUE), ("nearest", _ORANGE)):
        moments = [
            evaluate("rounding_moments", {"value": x, "bits": 3, "scale": 1.0, "rounding": rounding})
            for x in numbers
        ]
        name = "at random" if rounding == "stochastic" else "to the nearest"
        left.plot(numbers, [m["mean"] for m in moments], color=colour, label=name)
        right.plot(numbers, [m["mean_squared_error"] for m in moments], color=colour, label=name)
    left.plot(numbers, numbers, color=_INK, linestyle=":", linewidth=0.8, label="the number")
    left.set(xlabel="number, in grid values", ylabel="mean")
    right.set(xlabel="number, in grid values", ylabel="mean squared error", ylim=(0, 0.6))
    left.legend()
    right.legend(loc="upper center", ncol=2)
    return figure


def rounded_perturbations() -> Figure:
    """Return the factor that both estimates leave of a gradient, against the range of 4-bit and 2-bit grids."""
    figure, axes = _pair(sharey=True)
    for axis, bits, best in zip(axes, (4, 2), (2.27, 1.02), strict=True):
        ranges = np.linspace(0.5, 5, 181)
        for kind, colour, name in (("q-rge1", _ORANGE, "Q-RGE1"), ("q-rge2", _BLUE, "Q-RGE2")):
            factors = [
                evaluate(
                    "quantized_estimate_factor",
                    {"kind": kind, "bits": bits, "scale": (2 ** (bits - 1) - 1) / reach},
                )
                for reach in ranges
            ]
            axis.plot(ranges, factors, color=colour, label=name)
        axis.axhline(1.0, color=_INK, linestyle=":", linewidth=0.8)
        axis.axvline(best, color=_INK, linestyle="--", linewidth=0.8, label="least squared error")
        axis.set(xlabel=f"range in deviations, {bits} bits", ylim=(0, 2))
    axes[0].set_ylabel("factor of the gradient")
    axes[0].legend(loc="lower right")
    return figure


def _algorithm_2(
    num_blocks: int, upload: float, compute: float, offload: float
) -> list[tuple[str, int, float, float]]:
    """Return kind, block, beginning and end of the tasks that ZO2's algorithm 2 launches."""
    takes = {"upload": upload, "forward": compute, "offload": offload}
    free, tasks, ends = dict.fromkeys(takes, 0.0), [], {}

    def launch(kind: str, block: int, host: float) -> None:
        begin = max(host, free[kind])
        ends[kind, block] = free[kind] = begin + takes[kind]
        tasks.append((kind, block, begin, free[kind]))

    launch("upload", 1, 0.0)
    for i in range(1, num_blocks + 1):
        host = max(ends["upload", i], ends.get(("forward", i - 1), 0.0))
        if i > 1:
            launch("offload", i - 1, host)
        launch("forward", i, host)
        if i < num_blocks:
            launch("upload", i + 1, host)
    launch("offload", num_blocks, ends["forward", num_blocks])
    return tasks


def offload_pipeline() -> Figure:
    """Return the tasks of algorithm 2 on three streams, and how many blocks are on the device, for fast and for slow offloads."""
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 3.6), sharex="col", height_ratios=(2, 1.1))
    colours = {"upload": _BLUE, "forward": _GREEN, "offload": _ORANGE}
    for (streams, counts), offload, title in zip(
        axes.T, (1.0, 3.0), ("offloads as fast", "offloads three times as slow"), strict=True
    ):
        tasks = _algorithm_2(6, 1.0, 1.0, offload)
        for kind, block, begin, end in tasks:
            row = list(colours).index(kind)
            streams.barh(row, end - begin, left=begin, height=0.8, color=colours[kind], edgecolor="white")
            streams.text((begin + end) / 2, row, str(block), ha="center", va="center", color="white")
        streams.set(
            yticks=range(3),
            yticklabels=list(colours) if offload == 1.0 else [],
            ylim=(2.6, -0.6),
            title=title,
        )
        arrivals = sorted(begin for kind, _, begin, _ in tasks if kind == "upload")
        departures = sorted(end for kind, _, _, end in tasks if kind == "offload")
        times = sorted({0.0, *arrivals, *departures})
        held = [sum(t <= x for t in arrivals) - sum(t <= x for t in departures) for x in times]
        counts.step(times, held, where="post", color=_INK)
        counts.set(xlabel="seconds", ylim=(0, 6.4), yticks=(0, 3, 6))
        counts.axhline(3, color=_INK, linestyle=":", linewidth=0.8)
        counts.set_ylabel("blocks held" if offload == 1.0 else "")
    return figure


FIGURES = (smoothing, straight_through, stochastic_rounding, rounded_perturbations, offload_pipeline)

if __name__ == "__main__":
    with mpl.rc_context(_STYLE):
        for draw in FIGURES:
            figure = draw()
            written = io.StringIO()
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
            shorter = re.sub(r"(\d\.\d\d)\d+", r"\1", written.getvalue())  # hundredths of a point
            lines = (line.rstrip() for line in shorter.splitlines())
            (_FIGURES / f"{draw.__name__}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")
