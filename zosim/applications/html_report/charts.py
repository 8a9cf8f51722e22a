"""What a report's line charts show: memory over time by what it is for, and the curves of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from zosim.analysis.pictures import Chart
from zosim.applications.html_report.columns import aligned_at_s
from zosim.program.instructions import Space
from zosim.timeline import Timeline

MOST_POINTS = 2_000
"""Of more points each mean (of a curve) or largest total (of memory) of several is shown."""


def memory_chart(timeline: Timeline, space: Space, rank: int, root: str, name: str) -> Chart | None:
    """Return the memory of a rank in a space over time, stacked by what it is for; None where there is none."""
    curve = timeline.memory_curve(space, rank)
    if not curve:
        return None
    # A last point, so that the last level reaches to the end of the run.
    curve = [*curve, (max(timeline.end_s, curve[-1][0]), curve[-1][1])]
    every = -(-len(curve) // MOST_POINTS)
    chosen = [
        max(curve[begin : begin + every], key=lambda point: sum(point[1].values()))
        for begin in range(0, len(curve), every)
    ]
    roles = sorted(
        {role for _, sizes in chosen for role, size in sizes.items() if size},
        key=lambda role: -max(sizes.get(role, 0) for _, sizes in chosen),
    )
    if not roles:
        return None
    shift_s = aligned_at_s(timeline)
    times_s = tuple(time_s - shift_s for time_s, _ in chosen)
    values = [tuple(sizes.get(role, 0) for _, sizes in chosen) for role in roles]
    title = f"{space.value.capitalize()} memory of rank {rank}, {name}"
    return Chart(root, title, "time", "s", "bytes", tuple(roles), (times_s, *values), stacked=True)


def curve_chart(root: str, title: str, columns: Mapping[str, Sequence[tuple[int, float]]]) -> Chart:
    """Return lines over the steps of a run, each a sequence of (step, value); means where there are too many."""
    thinned = {name: dict(_thinned(points)) for name, points in columns.items()}
    steps = sorted({step for line in thinned.values() for step in line})
    values = [tuple(line.get(step) for step in steps) for line in thinned.values()]
    return Chart(root, title, "step", "", "", tuple(thinned), (tuple(steps), *values))


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    every = -(-len(points) // MOST_POINTS)
    chunks = [points[begin : begin + every] for begin in range(0, len(points), every)]
    return [(chunk[0][0], fmean(value for _, value in chunk)) for chunk in chunks]
