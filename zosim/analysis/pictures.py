"""SVG pictures for notebooks, and for reports without JavaScript and on paper: bars of a timeline, lines, a scatter, a machine's links with their load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from topology.drawing import COLORS, NODE_HEIGHT, arrange
from topology.graph import Topology
from topology.printable import one_line
from topology.routes import link_resource_id
from topology.units import format_bytes, format_seconds
from zosim.program.instructions import Stream
from zosim.report import Report
from zosim.timeline import Timeline

# Okabe and Ito's palette, which people with colour vision deficiencies can tell apart, and greys for what takes little time.
COLOURS: Final = MappingProxyType(
    {
        "forward": "#0072b2",
        "upload": "#e69f00",
        "offload": "#d55e00",
        "gather": "#cc79a7",
        "sample": "#999999",
        "perturb": "#56b4e9",
        "restore": "#a6d8f5",
        "update": "#009e73",
    }
)
OTHER_COLOURS: Final = ("#f0e442", "#4d4d4d", "#b3b3b3", "#7f5539", "#cccccc")
_LINE_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999", "#7f5539", "#f0e442", "#4d4d4d",
)  # fmt: skip


_WIDTH, _LEFT, _ROW = 960.0, 130.0, 16.0
_MOST_ROWS = 64
# Bars that would be thinner are one with the next of their label.
_THINNEST = 0.5
_PIXELS_A_UNIT = 62.0
_MOST_NODES = 200
_STREAMS = list(Stream)


@dataclass(frozen=True)
class Chart:
    """Lines, or stacked areas, over a common axis.

    - `names`, `colours`: Of each line.
    """

    root: str  # id of the page's element that it stands in
    title: str
    across_name: str
    # across, unit: units of the axes: `s`, `bytes` or empty.
    across: str
    unit: str
    names: tuple[str, ...]
    # Positions on the axis, then the values of each line; None where a line has none.
    columns: tuple[tuple[Any, ...], ...]
    stacked: bool = False

    @property
    def colours(self) -> tuple[str, ...]:
        """A colour for each line."""
        return tuple(_LINE_COLOURS[number % len(_LINE_COLOURS)] for number in range(len(self.names)))

    def to_data(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it."""
        return asdict(self) | {"colours": self.colours}

    def written(self, value: float) -> str:
        """Return a value with its unit."""
        return _written(value, self.unit)

    def written_across(self, value: float) -> str:
        """Return a position on the axis with its unit."""
        return _written(value, self.across)


def _written(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "s":
        return f"-{format_seconds(-value)}" if value < 0 else format_seconds(value)
    return f"{value:.6g}"


def colour_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each label: its own, or one of a few that have no name."""
    unknown = [label for label in labels if label not in COLOURS]
    return {**COLOURS, **{label: OTHER_COLOURS[at % len(OTHER_COLOURS)] for at, label in enumerate(unknown)}}


def timeline_svg(timelines: Mapping[str, Timeline]) -> str:
    """Return a periodic step of each timeline: a row for each stream of each rank, the same seconds to a width for all."""
    lengths = {name: _periodic_interval(each) for name, each in timelines.items()}
    longest_s = max(end_s - begin_s for begin_s, end_s in lengths.values()) or 1.0
    scale = (_WIDTH - _LEFT) / longest_s
    marks: list[str] = []
    y = 4.0
    for name, timeline in timelines.items():
        marks.append(_text(0, y + 11, name))
        y += _ROW
        begin_s, end_s = lengths[name]
        shown = [span for span in timeline.spans if span.end_s > begin_s and span.start_s < end_s]
        colours = colour_of(sorted({span.label for span in shown}))
        rows = sorted(
            {(span.rank, span.stream) for span in shown}, key=lambda row: (row[0], _STREAMS.index(row[1]))
        )
        for rank, stream in rows[:_MOST_ROWS]:
            marks.append(_text(0, y + 11, f"{rank} {stream}"))
            before: tuple[float, str] | None = None
            for span in shown:
                if (span.rank, span.stream) != (rank, stream):
                    continue
                x = _LEFT + (max(span.start_s, begin_s) - begin_s) * scale
                width = (min(span.end_s, end_s) - max(span.start_s, begin_s)) * scale
                if width < _THINNEST and before is not None and x < before[0] and span.label == before[1]:
                    continue
                before = x + _THINNEST, span.label
                title = escape(f"{span.instruction}: {format_seconds(span.duration_s)}")
                marks.append(
                    f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(width, _THINNEST):.1f}" height="{_ROW - 3:.0f}" '
                    f'fill="{colours[span.label]}"><title>{title}</title></rect>'
                )
            y += _ROW
        y += 6
    labels = sorted({span.label for timeline in timelines.values() for span in timeline.spans})
    colours = colour_of(labels)
    for number, label in enumerate(labels):
        x, line = _LEFT + 130 * (number % 6), y + 16 * (number // 6)
        marks.append(f'<rect x="{x:.0f}" y="{line:.0f}" width="10" height="10" fill="{colours[label]}"/>')
        marks.append(_text(x + 14, line + 9, label))
    y += 16 * (1 + (len(labels) - 1) // 6)
    about = f"one periodic step, {format_seconds(longest_s)} from left to right"
    return _svg(_WIDTH, y + 8, marks, f"timeline: {about}")


def chart_svg(chart: Chart) -> str:
    """Return a chart of lines; of areas the upper edges of their sums."""
    height, right = 200.0, _WIDTH - 10
    xs = chart.columns[0]
    columns = [list(column) for column in chart.columns[1:]]
    if chart.stacked:
        for below, above in pairwise(columns):
            above[:] = [low + high for low, high in zip(below, above, strict=True)]
    values = [value for column in columns for value in column if value is not None]
    low, high = min([*values, *([0.0] if chart.stacked else [])]), max(values)
    x_scale = (right - _LEFT) / ((xs[-1] - xs[0]) or 1.0)
    y_scale = (height - 30) / ((high - low) or 1.0)
    marks = [
        _text(0, 14, chart.written(high)),
        _text(0, height - 18, chart.written(low)),
        _text(_LEFT, height, chart.written_across(xs[0])),
        _text(right - 80, height, chart.written_across(xs[-1])),
    ]
    for column, name, colour in zip(columns, chart.names, chart.colours, strict=True):
        points = " ".join(
            f"{_LEFT + (x - xs[0]) * x_scale:.1f},{height - 20 - (value - low) * y_scale:.1f}"
            for x, value in zip(xs, column, strict=True)
            if value is not None
        )
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"><title>{escape(name)}</title></polyline>'
        )
    for number, (name, colour) in enumerate(zip(chart.names, chart.colours, strict=True)):
        x, y = _LEFT + 160 * (number % 5), height + 12 + 16 * (number // 5)
        marks.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" fill="{colour}"/>')
        marks.append(_text(x + 14, y + 9, name))
    return _svg(_WIDTH, height + 16 * (2 + (len(chart.names) - 1) // 5), marks, chart.title)


def bars_svg(rows: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return seconds by label as horizontal bars, one of each name for a label."""
    longest_s = max((value for values in rows.values() for value in values), default=0.0) or 1.0
    marks, y = [], 4.0
    for label, values in rows.items():
        marks.append(_text(0, y + 11, label))
        for name, value, colour in zip(names, values, _LINE_COLOURS, strict=False):
            width = (_WIDTH - _LEFT) * 0.7 * value / longest_s
            marks.append(
                f'<rect x="{_LEFT:.0f}" y="{y:.0f}" width="{width:.1f}" height="{_ROW - 3:.0f}" fill="{colour}"/>'
            )
            marks.append(_text(_LEFT + width + 6, y + 11, f"{name} {format_seconds(value)}"))
            y += _ROW
    return _svg(_WIDTH, y + 4, marks, f"seconds by label: {' and '.join(names)}")


def with_picture(report: Report, svg: str) -> str:
    """Return a report with a picture under it as HTML that a notebook shows, in its colours."""
    style = "font: 12px sans-serif; fill: currentColor; overflow-x: auto"
    return f'{report.to_html()}<div style="{style}">{svg}</div>'


def scatter_svg(points: Sequence[tuple[str, float, float, bool]], across: str, up: str) -> str:
    """Return named points (name, bytes, seconds, whether it is chosen) with logarithmic axes; names are titles of the marks."""
    from math import log10

    height, bottom = 260.0, 230.0
    xs, ys = [log10(x) for _, x, _, _ in points], [log10(y) for _, _, y, _ in points]
    x_scale = (_WIDTH - _LEFT - 30) / ((max(xs) - min(xs)) or 1.0)
    y_scale = (bottom - 20) / ((max(ys) - min(ys)) or 1.0)
    sizes, times = [size for _, size, _, _ in points], [seconds for _, _, seconds, _ in points]
    marks = [
        _text(0, 10, f"{up} {format_seconds(max(times))}"),
        _text(0, bottom, format_seconds(min(times))),
        _text(_LEFT, height - 4, format_bytes(round(min(sizes)))),
        _text(_WIDTH / 2, height - 4, across),
        _text(_WIDTH - 90, height - 4, format_bytes(round(max(sizes)))),
    ]
    for (name, _, _, is_chosen), x, y in zip(points, xs, ys, strict=True):
        colour, radius = ("#d55e00", 6) if is_chosen else ("#0072b2", 3.5)
        at_x, at_y = _LEFT + (x - min(xs)) * x_scale, bottom - (y - min(ys)) * y_scale
        if is_chosen:
            marks.append(_text(at_x + 10, at_y + 4, "chosen"))
        marks.append(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius}" '
            f'fill="{colour}" fill-opacity="0.75"><title>{escape(one_line(name))}</title></circle>'
        )
    return _svg(_WIDTH, height, marks, f"{up} against {across}, logarithmic")


def topology_svg(topology: Topology, busy: Mapping[str, float]) -> str:
    """Return the machine with each link as wide and as red as it is busy; empty for one of more than 200 nodes.

    `busy`: share of a step's time for which each resource is busy, by its id.
    """
    if len(topology.nodes) > _MOST_NODES:
        return ""
    layout = arrange(topology)
    xs, ys = zip(*layout.positions.values(), strict=True)
    left, top = min(xs) - 1.2, max(ys) + 0.8

    def at(x: float, y: float) -> tuple[float, float]:
        return (x - left) * _PIXELS_A_UNIT, (top - y) * _PIXELS_A_UNIT

    marks = []
    for x, y, width, height in layout.boxes.values():
        x0, y0 = at(x, y + height)
        marks.append(
            f'<rect x="{x0:.0f}" y="{y0:.0f}" width="{width * _PIXELS_A_UNIT:.0f}" height="{height * _PIXELS_A_UNIT:.0f}" rx="8" '
            'class="host"/>'
        )
    for link in topology.links:
        ends = [layout.positions.get(end) for end in (link.source, link.target)]
        if None in ends:
            continue
        (x0, y0), (x1, y1) = (at(*end) for end in ends if end is not None)
        shares = {start: busy.get(link_resource_id(link, start), 0.0) for start in (link.source, link.target)}
        most = max(shares.values())
        title = "; ".join(f"from {one_line(start)} {share:.0%} busy" for start, share in shares.items())
        shade = (
            f'stroke="#d55e00" stroke-opacity="{0.35 + 0.65 * min(most, 1):.2f}"' if most else 'class="idle"'
        )
        # Links between GPUs of a row are arcs below it.
        depth = 0.0 if abs(y0 - y1) > 1 else 30 + 0.1 * abs(x1 - x0)
        marks.append(
            f'<path d="M{x0:.0f},{y0:.0f} Q{(x0 + x1) / 2:.0f},{(y0 + y1) / 2 + 2 * depth:.0f} {x1:.0f},{y1:.0f}" fill="none" '
            f'stroke-width="{1 + 7 * min(most, 1):.1f}" {shade}><title>{escape(title)}</title></path>'
        )
    for node in topology.nodes:
        if node.id not in layout.positions:
            continue
        x, y = at(*layout.positions[node.id])
        width, height = layout.widths[node.id] * _PIXELS_A_UNIT, NODE_HEIGHT * _PIXELS_A_UNIT
        name = one_line(node.id.rsplit("/", maxsplit=1)[-1])[:14]
        marks.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" '
            f'fill="{COLORS[node.type]}" stroke="#444444"/>'
            f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" class="node">{escape(name)}</text>'
        )
    low = min([min(ys), *(box[1] for box in layout.boxes.values())])
    right = max([max(xs) + 1.2, *(box[0] + box[2] for box in layout.boxes.values())])
    return _svg(*at(right, low - 0.6), marks, f"{one_line(topology.name)}: how busy each link is")


def _periodic_interval(timeline: Timeline) -> tuple[float, float]:
    step = timeline.periodic_steps[0]
    return timeline.step_end_s(step - 1) if step else timeline.begin_s, timeline.step_end_s(step)


def _svg(width: float, height: float, marks: Iterable[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">'
        f"<title>{escape(title)}</title>{''.join(marks)}</svg>"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(one_line(text))}</text>'
