"""What if a link or a device were slower, or lost: the old plan there, and the one that the planner would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from costmodel.models.configs import read_model_spec
from costmodel.models.groups import joined_halves
from costmodel.models.model_spec import ModelSpec
from topology.changes import changed
from topology.errors import ModelError, PlanError
from topology.graph import Topology
from topology.units import format_bytes, format_seconds
from zosim import api
from zosim.analysis.critical_path import Bottleneck
from zosim.config import PlanConfig, merge
from zosim.hardware.profiles import Profiles
from zosim.options import config_of, takes_earlier_names
from zosim.planning.bounds import Bounds
from zosim.planning.derivatives import Derivative, NextLimit, derivatives, limits, next_limit
from zosim.planning.explain import ALIKE
from zosim.planning.planner import Decision
from zosim.planning.predict import PlannedRun
from zosim.planning.request import Hardware, Request
from zosim.planning.resolve import resolve
from zosim.planning.split_options import SplitModel, SplitOptions
from zosim.planning.views import prediction_data, side_by_side
from zosim.plans import Plan
from zosim.plans.setting import fields_of
from zosim.report import Bullets, Report, Reportable, Table, frame

Scope = Literal["type", "each", "none"]
"""Figures to derive by: of all links and devices of one type together, of each of them, or none."""


@dataclass(frozen=True, repr=False)
class WhatIf(Reportable):
    """A plan on a changed machine."""

    heading = "What the change costs"

    changes: tuple[str, ...]
    before: PlannedRun  # the plan on the machine as it was
    after: PlannedRun | None  # the same plan on the changed one; None where it cannot run
    obstacle: str
    replanned: Decision | None  # what the planner chooses there; None where nothing runs
    planning_error: str
    # Of the plan where it runs, on the changed machine if it does there.
    derivatives: tuple[Derivative, ...]

    @property
    def examined(self) -> PlannedRun:
        """The run that derivatives and limits are of."""
        return self.after or self.before

    @cached_property
    def limits(self) -> tuple[Bottleneck, ...]:
        """Parts of its critical path, the bottleneck first."""
        return limits(self.examined)

    @cached_property
    def next_limit(self) -> NextLimit | None:
        """The bottleneck after that one."""
        return next_limit(self.examined, self.derivatives)

    def __repr__(self) -> str:
        times = [format_seconds(run.step_time_s) for run in self.runs.values()]
        return f"WhatIf({', '.join(self.changes) or 'nothing changed'}: {' -> '.join(times)} a step)"

    @property
    def runs(self) -> dict[str, PlannedRun]:
        """Predictions by what they are of, as far as they run."""
        runs = {"as it was": self.before}
        if self.changes and self.after is not None:
            runs["changed"] = self.after
        if self.changes and self.replanned is not None:
            runs["planned anew"] = self.replanned.chosen.planned
        return runs

    def view(self) -> Report:
        """Return the predictions side by side, what they differ in, and what the step depends on."""
        return Report("", side_by_side(self.runs), Bullets(self._sentences()), self._derivatives_table())

    def _sentences(self) -> list[str]:
        """Return in words what the change costs, and what limits the step."""
        before_s, lines = self.before.step_time_s, []
        if self.changes and self.after is None:
            lines.append(f"the plan cannot run there: {self.obstacle}")
        elif self.changes and self.after is not None:
            lines.append(f"the plan takes {_change(self.after.step_time_s, before_s)} there")
        if self.replanned is not None and self.changes:
            new = self.replanned.chosen
            than = f"{_change(new.seconds, before_s)} than before"
            if self.after is not None:
                than += f", {_change(new.seconds, self.after.step_time_s)} than the old plan there"
            is_same = self.after is not None and new.plan.axes == self.after.plan.axes
            lines.append(
                "the planner would choose the same plan"
                if is_same
                else f"the planner would choose {new.describe()}: {than}"
            )
        elif self.planning_error:
            lines.append(f"no other plan runs there: {self.planning_error}")
        parts = [f"{limit.description} {limit.share:.0%}" for limit in self.limits[:3]]
        lines.append(f"its critical path: {', '.join(parts)}")
        following = self.next_limit
        if following is not None:
            better = "smaller" if following.first.type == "latency" else "larger"
            lines.append(
                f"it depends most on the {following.first.name}, until that is {following.factor:.2g} times {better}; "
                f"then on the {following.then.name}, at {format_seconds(following.step_time_s)} a step"
            )
        return lines

    def _derivatives_table(self) -> Table:
        shown = [item for item in self.derivatives if item.matters or item.device_bytes or item.host_bytes]
        rows = [
            (
                item.lever.name,
                item.lever.now,
                f"{item.elasticity:+.2f} %",
                f"{item.step_time_s:.3g} s per {item.lever.unit}",
                *(_per_percent(item, size) for size in (item.device_bytes, item.host_bytes)),
            )
            for item in shown
        ]
        columns = ("figure", "now", "step with 1 % more", "derivative", "device memory", "host memory")
        return Table(columns, rows, title="what the step depends on", numeric=columns[2:])

    def to_pandas(self) -> Any:
        """Return as a pandas frame how the step and the memory depend on each figure."""
        return frame(self.to_data()["derivatives"])

    def to_data(self) -> dict[str, Any]:
        """Return the same in the terms of JSON."""
        following = self.next_limit
        return {
            "changes": list(self.changes),
            "before": prediction_data(self.before.prediction),
            "after": None if self.after is None else prediction_data(self.after.prediction),
            "obstacle": self.obstacle,
            "replanned": None
            if self.replanned is None
            else {
                "plan": self.replanned.plan.model_dump(mode="json"),
                "prediction": prediction_data(self.replanned.prediction),
            },
            "planning_error": self.planning_error,
            "limits": [asdict(limit) for limit in self.limits],
            "next_limit": None
            if following is None
            else {
                "first": following.first.name,
                "then": following.then.name,
                "factor": following.factor,
                "step_time_s": following.step_time_s,
            },
            "derivatives": [
                {
                    "figure": item.lever.name,
                    "type": item.lever.type,
                    "value": item.lever.value,
                    "unit": item.lever.unit,
                    "elasticity": item.elasticity,
                    "step_time_s": item.step_time_s,
                    "device_bytes": item.device_bytes,
                    "host_bytes": item.host_bytes,
                }
                for item in self.derivatives
            ],
        }


def _change(seconds: float, than_s: float) -> str:
    ratio = seconds / than_s - 1
    if abs(ratio) < ALIKE:
        return "as long"
    return f"{abs(ratio):.1%} {'longer' if ratio > 0 else 'less'}"


def _per_percent(item: Derivative, size: float) -> str:
    change = size * item.lever.value / 100
    return f"{'+' if change > 0 else ''}{format_bytes(change)}" if change else "-"


LIMITS = ("max_device_memory", "max_host_memory")
"""Options of a plan that its file does not hold."""


@takes_earlier_names(PlanConfig, LIMITS)
def whatif(
    plan: Plan | Decision | str | Path,
    *,
    changes: Sequence[str] = (),
    drop: Sequence[str] = (),
    hardware: str | None = None,
    profile: str | Path | None = None,
    threads: int | None = None,
    derive: Scope = "type",
    **limits: Any,
) -> WhatIf:
    """Predict a plan on a changed machine, plan anew for it, and show on which figures the step depends.

    Parameters
    ----------
    plan : Plan, Decision or path
        Plan, or a file of `zosim plan -o`.
    changes : sequence of str
        Changed figures, such as ``"gpu2.speed=0.5"``, ``"pcie.bandwidth=0.5x"`` or ``"nvlink.latency=10us"`` (:func:`topology.changes.changed`).
    drop : sequence of str
        Nodes and links that are lost, such as ``"gpu3"``.
    hardware, profile : str or path, optional
        As for :func:`zosim.simulate`.
    threads : int, optional
        Number of threads, as for :func:`zosim.simulate`.
    derive : {"type", "each", "none"}
        Figures to derive by: of links and devices of one type together, of each, or none.
    **limits
        ``max_device_memory`` and ``max_host_memory``, as for :func:`zosim.plan`.

    Raises
    ------
    ZosimError
        If the plan or a change is none, or the machine has not what is to change.

    Notes
    -----
    The new plan computes the same: all that the planner does not choose is as in the old one. It has at most as many ranks.

    Examples
    --------
    >>> whatif("plan.json", changes=["pcie.bandwidth=0.5x"], drop=["gpu3"])  # doctest: +SKIP
    """
    before = api.simulate(plan, hardware, profile=profile, threads=threads)
    topology = changed(before.topology, changes, drop)
    search = config_of(PlanConfig, limits, only=LIMITS)
    after, obstacle = _there(before, topology, search)
    replanned, planning_error = None, ""
    if changes or drop:
        try:
            replanned = _planned_anew(before, topology, search)
        except PlanError as error:
            planning_error = error.message
    examined = after or before
    by_figure = () if derive == "none" else derivatives(examined, each=derive == "each")
    words = (*changes, *(f"without {name}" for name in drop))
    return WhatIf(words, before, after, obstacle, replanned, planning_error, by_figure)


def _there(before: PlannedRun, topology: Topology, search: PlanConfig) -> tuple[PlannedRun | None, str]:
    """Return a plan on a changed machine, or why it cannot run."""
    lost = [
        name for name in before.plan.placement.devices if name not in {node.id for node in topology.nodes}
    ]
    if lost:
        return None, f"it runs on {', '.join(dict.fromkeys(lost))}"
    after = before.on(topology)
    request = Request.of(
        merge(PlanConfig.of(before.plan), search), _hardware(before, topology), SplitOptions()
    )
    missing = Bounds(request).of(before.plan).missing
    return (None, f"it {missing}") if missing else (after, "")


def _planned_anew(before: PlannedRun, topology: Topology, search: PlanConfig) -> Decision:
    """Return the planner's choice of all that it chooses, with the rest as in the plan."""
    decisions: list[Decision] = []
    plan = before.plan
    fixed: dict[str, Any] = {
        name: type(axis).model_construct(
            **{
                key: getattr(axis, key)
                for key, field in fields_of(type(axis)).items()
                # Densities are of the plan's own split points.
                if not field.setting.planned and key != "densities"
            }
        )
        for name, axis in plan.axes.items()
        if name not in ("mesh", "placement")
    }
    # Not a copy, which would take along what was computed of the split model.
    whole = {"param_groups": joined_halves(plan.model.param_groups), "split_blocks": ()}
    model = ModelSpec(**{**dict(plan.model), **whole})
    config = PlanConfig(model=model, batch=plan.batch, seq=plan.seq).model_copy(update=fixed)
    split_options = SplitOptions.of(config.split, _split_model(model))
    resolve(merge(config, search), _hardware(before, topology), split_options, on_decision=decisions.append)
    return decisions[0]


def _split_model(model: ModelSpec) -> SplitModel | None:
    """Return what splits a model inside blocks; None where a plan does not say enough of it: then it is split between them."""
    try:
        is_known = read_model_spec(model.name) == model
    except ModelError:
        return None
    return (lambda blocks: read_model_spec(model.name, split_blocks=blocks)) if is_known else None


def _hardware(before: PlannedRun, topology: Topology) -> Hardware:
    """Return the changed machine for at most as many ranks as the plan has, from its first device on."""
    placement = before.plan.placement
    device_type = before.topology.node(placement.devices[0]).type
    there = [node.id for node in topology.of_type(device_type)]
    if not there:
        raise PlanError(f"no {device_type} is left of {placement.topology}", hint="drop fewer")
    first = next((device for device in placement.devices if device in there), there[0])
    profiles = (before.profiles or Profiles(before.topology)).on(topology)
    max_ranks = placement.world_size if device_type == "cpu" else min(placement.world_size, len(there))
    return Hardware(topology, placement.topology, first, profiles.of(first), profiles, max_ranks)
