"""SparQ's Fig. 3 with numbers: one step of split training by backpropagation, and of zeroth-order methods.

Two A100s of two hosts, the network between them made as fast as named links are; per step, the same batch, the same split point
inside a block (activation and residual stream cross), half precision. What a step is worth in training is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from costmodel.devices.datasheet import datasheet_profile
from costmodel.models.configs import read_model_spec
from studies.plots import picture
from topology import load_preset
from topology.graph import Topology
from topology.units import format_bytes, format_seconds
from zosim.analysis.counts import StepCounts, step_counts
from zosim.applications.first_order.programs import PRESETS
from zosim.applications.first_order.report import baseline_run
from zosim.planning.predict import PlannedRun
from zosim.plans import Estimator, Mesh, Perturbations, Placement, Plan, Schedule, Split, Weights
from zosim.report import Bullets, Table
from zosim.timeline import Span

PRESET = "a100-80gb-3x4"
DEVICES = ("node0/gpu0", "node1/gpu0")
SPLIT_POINT = "block.11.mlp"
BATCH, SEQ, NUM_PERTURBATIONS, NUM_MICROBATCHES = 32, 64, 5, 4
NETWORK = "network"
PLOTTED = "1 Gbit/s"

LINKS: dict[str, float] = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "200 Gbit/s": 25e9}
"""Bytes/s of the network, each way."""


HEAD = f"""One step of OPT-1.3B, {BATCH} sequences of {SEQ} tokens, half precision, P = {NUM_PERTURBATIONS}, on two A100s of two hosts whose network is as fast
as named; data-sheet figures. All are split at `{SPLIT_POINT}`, and the residual stream crosses too. First-order steps pass in
{NUM_MICROBATCHES} microbatches, one forward and one backward in turn. OPT ties its head to its token table, which both stages then hold. `sums` are its gradients. Fig. 3 and the other first-order rows
omit them, as if there were two tables.
Zeroth-order stages hold it alike without sending anything. What a step teaches is not compared: a first-order step follows the gradient in every
perturbation, a zeroth-order one in P."""


@dataclass(frozen=True)
class PlottedMethod:
    """A method of Fig. 3."""

    name: str
    first_order: str = ""  # settings of a first-order step; empty for a zeroth-order one
    # Whether a first-order step sums the gradients of the token table, which both stages hold.
    is_tied: bool = False
    codec: str = "none"
    difference: str = "forward"
    num_perturbations: int = NUM_PERTURBATIONS


METHODS = (
    PlottedMethod("FO-SGD, table tied", "sgd", is_tied=True),
    PlottedMethod("FO-SGD", "sgd"),
    PlottedMethod("AQ-SGD, 4 and 8 bits", "aq-sgd"),
    PlottedMethod("ZO-SGD, 2P", difference="central"),
    PlottedMethod("ZO-SGD, P + 1"),
    PlottedMethod("SparQ, 4 bits, P + 1", codec="q4:dense"),
    PlottedMethod("SparQ, 4 bits, P = 1", codec="q4:dense", num_perturbations=1),
)


@dataclass(frozen=True)
class MethodStep:
    """A method's predicted step over one link."""

    link: str
    method: PlottedMethod
    planned: PlannedRun

    @property
    def counts(self) -> StepCounts:
        """What it sends."""
        return step_counts(self.planned.programs)

    @property
    def memory_bytes(self) -> int:
        """Device memory of both ranks."""
        return sum(taken.device_bytes for taken in self.planned.footprints.ranks)


@cache
def networked(bandwidth_bytes_per_s: float) -> Topology:
    """Return the preset with a network of that bandwidth."""
    topology = load_preset(PRESET)

    def scaled(value: float, now: float) -> float:
        return value * bandwidth_bytes_per_s / now

    links = []
    for link in topology.links:
        figure = link.type.bandwidth
        if link.type.technology == NETWORK and figure is not None:
            changed = figure.model_copy(update={"value": scaled(figure.value, link.bandwidth_bytes_per_s)})
            kind = link.type.model_copy(update={"bandwidth": changed})
            links.append(link.model_copy(update={"type": kind}))
        else:
            links.append(link)
    return Topology.model_validate(topology.model_copy(update={"links": tuple(links)}).model_dump())


def plan_of(method: PlottedMethod) -> Plan:
    """Return the plan whose step, or whose first-order baseline's, is predicted."""
    return Plan(
        model=read_model_spec("opt-1.3b", split_blocks=(11,)),
        placement=Placement(topology=PRESET, devices=DEVICES, hosts=("node0", "node1")),
        batch=BATCH,
        seq=SEQ,
        mesh=Mesh(stage=2),
        split=Split(split_points=(SPLIT_POINT,), codec=method.codec, residual_codec=method.codec),
        estimator=Estimator.model_validate(
            {"difference": method.difference, "num_perturbations": method.num_perturbations}
        ),
        perturbations=Perturbations.model_validate({"rng": "counter"}),
        weights=Weights.model_validate({"dtype": "float16"}),
        schedule=Schedule(traversal="full"),
    )


def steps() -> Iterator[MethodStep]:
    """Yield every method over every link."""
    for link, bandwidth in LINKS.items():
        topology = networked(bandwidth)
        profile = datasheet_profile(topology, DEVICES[0])
        for method in METHODS:
            planned = PlannedRun(plan_of(method), topology, profile)
            if method.first_order:
                settings = PRESETS[method.first_order].model_copy(
                    update={
                        "num_microbatches": NUM_MICROBATCHES,
                        "schedule": "1f1b",
                        "sums_ends": method.is_tied,
                    }
                )
                planned = baseline_run(planned, settings)
            yield MethodStep(link, method, planned)


def table(steps: list[MethodStep]) -> Table:
    """Return the steps as a table."""
    columns: dict[str, Callable[[MethodStep], str]] = {
        "link": lambda step: step.link,
        "method": lambda step: step.method.name,
        "step": lambda step: format_seconds(step.planned.prediction.step_time_s),
        "between": lambda step: (
            f"{format_seconds(step.planned.prediction.low_s)} and {format_seconds(step.planned.prediction.high_s)}"
        ),
        "forward": lambda step: _messages(step.counts.num_activations, step.counts.activation_bytes),
        "back": lambda step: _messages(step.counts.num_gradients, step.counts.gradient_bytes),
        "sums": lambda step: format_bytes(step.counts.reduced_bytes),
        "scalars": lambda step: f"{step.counts.num_scalars}",
        "both devices": lambda step: format_bytes(step.memory_bytes),
        "limited by": lambda step: step.planned.prediction.bottleneck.description,
    }
    return Table.of(steps, columns, numeric=("step", "forward", "back", "sums", "scalars", "both devices"))


def compared(steps: list[MethodStep]) -> Bullets:
    """Return how many times as long SparQ's steps take as first-order ones, link by link."""
    lines = []
    for link in dict.fromkeys(step.link for step in steps):
        seconds = {step.method.name: step.planned.step_time_s for step in steps if step.link == link}
        description = [
            f"{ours}: {seconds[ours] / seconds['FO-SGD']:.2f} times FO-SGD's, "
            f"{seconds[ours] / seconds['AQ-SGD, 4 and 8 bits']:.2f} times AQ-SGD's"
            for ours in ("SparQ, 4 bits, P + 1", "SparQ, 4 bits, P = 1")
        ]
        lines.append(f"{link}: a step takes, with {'; '.join(description)}.")
    return Bullets(lines)


def _messages(count: int, size_bytes: int) -> str:
    return f"{count} x {format_bytes(size_bytes // count)}" if count else ""


def draw(steps: list[MethodStep], out: Path) -> Path:
    """Draw one periodic step of every method over one link, and return the picture's path."""
    from matplotlib.patches import Rectangle

    mine = [step for step in steps if step.link == PLOTTED]
    path = out / "timelines.png"
    with picture(
        path, len(mine), dpi=110, layout="constrained", figsize=(9, 1.6 * len(mine)), sharex=True
    ) as (figure, axes):
        shown: dict[str, str] = {}
        for axis, step in zip(axes, mine, strict=True):
            rows = _rows(step)
            for number, (_, spans) in enumerate(rows):
                for label in dict.fromkeys(span[0] for span in spans):
                    colour = shown.setdefault(label, f"C{len(shown) % 10}")
                    bars = [(begin_s, duration_s) for name, begin_s, duration_s in spans if name == label]
                    axis.broken_barh(bars, (number - 0.4, 0.8), color=colour, linewidth=0)
            axis.set(yticks=range(len(rows)), yticklabels=[name for name, _ in rows], title=step.method.name)
            axis.invert_yaxis()
        axes[-1].set_xlabel(f"seconds of one step, {PLOTTED}")
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in shown.values()]
        figure.legend(handles, list(shown), loc="outside right upper")
    return path


def _rows(step: MethodStep) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Return, for each rank and stream that is busy, spans of its last listed periodic step."""
    timeline = step.planned.timeline
    number = timeline.periodic_steps[-1]
    mine = [span for span in timeline.spans if span.phase == "step" and span.step == number]
    begin_s = min(span.start_s for span in mine)

    def shown(spans: list[Span]) -> list[tuple[str, float, float]]:
        return [(span.label, span.start_s - begin_s, span.duration_s) for span in spans]

    rows: dict[tuple[int, str], list[Span]] = {}
    for span in mine:
        if span.stream in ("compute", "link"):
            rows.setdefault((span.rank, span.stream), []).append(span)
    return [(f"M{rank + 1} {stream}", shown(spans)) for (rank, stream), spans in sorted(rows.items())]
