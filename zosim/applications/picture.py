"""Pictures: a timeline with a row for each stream of each rank and a bar for each instruction; a Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from topology.errors import TimelineError
from topology.units import format_seconds
from zosim.analysis.pictures import COLOURS, OTHER_COLOURS
from zosim.program.instructions import Stream
from zosim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zosim.planning.planner import Candidate

FORMATS: Final = (".svg", ".png", ".pdf")
MOST_ROWS: Final = 64
# A name is written where it fits: in inches of a bar for each of its letters.
_INCHES_A_LETTER = 0.06
_WIDTH_INCHES, _ROW_INCHES = 10.0, 0.38
# What takes less of the picture than this has a bar, and no entry in the legend.
_LEAST_IN_LEGEND = 1e-3


def draw_timeline(timeline: Timeline, path: str | Path) -> Path:
    """Draw a periodic step of a timeline into an SVG, PNG or PDF file, and return its path.

    Raises TimelineError if the file's ending is no known format, it cannot be written, no step is listed, or more than 64 streams would
    have a row.
    """
    file = _drawable(path)
    title = f"{timeline.program}: {format_seconds(timeline.step_time_s)} a step, {timeline.source}"
    step = timeline.periodic_steps[0]
    begin_s = timeline.step_end_s(step - 1) if step else timeline.begin_s
    end_s = timeline.step_end_s(step)
    shown = [
        span for span in timeline.spans if span.end_s > begin_s and span.start_s < end_s and span.duration_s
    ]
    order = {label: number for number, label in enumerate(timeline.seconds_by_label(timeline.ranks[0]))}
    streams = list(Stream)
    rows = sorted(
        {(span.rank, span.stream) for span in shown}, key=lambda row: (row[0], streams.index(row[1]))
    )
    if len(rows) > MOST_ROWS:
        message = f"a picture of {len(rows)} streams has too many rows"
        raise TimelineError(
            message, hint=f"at most {MOST_ROWS} rows fit; --trace writes any number for Perfetto"
        )
    labels = sorted({span.label for span in shown}, key=lambda label: order.get(label, len(order)))
    spare = iter(OTHER_COLOURS * len(labels))
    colours = {label: COLOURS.get(label) or next(spare) for label in labels}

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    picture = Figure(figsize=(_WIDTH_INCHES, 1.3 + _ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    inches_per_s = 0.85 * _WIDTH_INCHES / (end_s - begin_s)
    for span in shown:
        start_s, until_s = max(span.start_s, begin_s), min(span.end_s, end_s)
        row = rows.index((span.rank, span.stream))
        axes.barh(
            row,
            until_s - start_s,
            left=start_s - begin_s,
            height=0.8,
            color=colours[span.label],
            edgecolor="white",
            linewidth=0.4 if (until_s - start_s) * inches_per_s > 2 * _INCHES_A_LETTER else 0.0,
        )
        name = span.segment.removeprefix("block.")
        if name and (until_s - start_s) * inches_per_s > _INCHES_A_LETTER * (len(name) + 1):
            middle_s = (start_s + until_s) / 2 - begin_s
            axes.text(middle_s, row, name, ha="center", va="center", fontsize=6, color="white")
    several = len(timeline.ranks) > 1
    names = [f"rank {rank} {stream}" if several else str(stream) for rank, stream in rows]
    axes.set(yticks=range(len(rows)), yticklabels=names, xlim=(0, end_s - begin_s), xlabel="seconds")
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    least_s = _LEAST_IN_LEGEND * (end_s - begin_s)
    seconds = {label: sum(span.duration_s for span in shown if span.label == label) for label in labels}
    handles = [Patch(color=colours[label], label=label) for label in labels if seconds[label] > least_s]
    picture.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False)
    return _saved(picture, file)


def draw_front(front: Sequence[Candidate], path: str | Path) -> Path:
    """Draw a Pareto front into an SVG, PNG or PDF file, and return its path: step time over device memory, host memory as area.

    Raises TimelineError if the file's ending is no known format, or it cannot be written.
    """
    file = _drawable(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(_WIDTH_INCHES, 5), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    most = max(candidate.footprints.fullest.size_bytes for candidate in front) or 1
    by_devices: dict[int, list[Candidate]] = {}
    for candidate in front:
        by_devices.setdefault(candidate.plan.placement.world_size, []).append(candidate)
    for (count, listed), colour in zip(sorted(by_devices.items()), cycle(COLOURS.values())):
        axes.scatter(
            [candidate.footprints.largest.device_bytes / 2**30 for candidate in listed],
            [candidate.seconds for candidate in listed],
            s=[20 + 180 * candidate.footprints.fullest.size_bytes / most for candidate in listed],
            color=colour,
            label=f"{count} device{'s' if count > 1 else ''}",
            alpha=0.8,
        )
    axes.set(xlabel="GiB of the fullest device", ylabel="seconds a step", yscale="log")
    axes.set_title("Pareto front; areas are host memory", loc="left")
    axes.legend(frameon=False)
    return _saved(picture, file)


def _drawable(path: str | Path) -> Path:
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        message = f"cannot draw to {str(path)!r}: unknown format {file.suffix!r}"
        raise TimelineError(message, hint=f"use a name that ends with one of {', '.join(FORMATS)}")
    return file


def _saved(picture: Figure, file: Path) -> Path:
    import matplotlib as mpl

    try:
        # Text stays text, and the same picture has the same bytes.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zosim"}):
            picture.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise TimelineError(f"cannot write {str(file)!r}: {error.strerror}") from error
    return file
