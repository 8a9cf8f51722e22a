"""The order in which the ``mezo`` generator visits parameters, which need not be that in which they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.model_spec import ParameterGroup
from zosim.plans import Plan


def walk_order(plan: Plan) -> list[ParameterGroup]:
    """Return the trainable groups in the order in which the ``mezo`` generator visits them."""
    groups = [group for group in plan.model.groups if group.num_trainable]
    if plan.directions.order == "registration":
        return groups
    return sorted(groups, key=lambda group: plan.model.segments.index(group.segments[0]))


def drawn_late(plan: Plan, segments: Sequence[str]) -> list[ParameterGroup]:
    """Return the groups that a rank with these segments draws when the generator has passed them.

    They are those behind which the walk goes on to a group that an earlier segment needs.
    """
    if plan.schedule.traversal == "sweep":
        return []
    turns = {
        group.name: min(segments.index(segment) for segment in group.segments if segment in segments)
        for group in walk_order(plan)
        if set(group.segments) & set(segments)
    }
    own = [group for group in walk_order(plan) if group.name in turns]
    return [
        group
        for place, group in enumerate(own)
        if any(turns[behind.name] < turns[group.name] for behind in own[place + 1 :])
    ]
