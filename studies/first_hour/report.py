"""What the hour found, as a page."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from costmodel.scoring import Row, Score, relative_error
from studies.first_hour.setting import Content
from zosim.report import Bullets, Code, Element, Report, Table

_GIB = 2**30
_WITHIN = 1.15
"""A step where computing bounds it, over two forwards: the goal."""


def write(
    contents: Mapping[str, Content], folder: Path, command: str, *, name: str = "", todo: Sequence[str] = ()
) -> Path:
    """Write the page and a JSON file of the same name, and return the page's path."""
    device = contents.get("device", {}).get("device", "device")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or datetime.datetime.now(datetime.UTC).date().isoformat()}-{slug}-first-hour.md"
    path.write_text(report(contents, command, todo).to_markdown(), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return path


def report(contents: Mapping[str, Content], command: str, todo: Sequence[str] = ()) -> Report:
    """Return the page.

    - `contents`: what was found, by part.
    - `command`: what made it.
    - `todo`: titles of all parts in their order, if some may not be done yet.
    """
    device = contents.get("device", {})
    steps = {name[5:]: content for name, content in contents.items() if name.startswith("step-")}
    versions = ", ".join(f"{name} {device.get(name, '?')}" for name in ("torch", "cuda", "transformers"))
    parts: list[Element] = [
        f"{versions}, described by {device.get('hardware', '?')}. Made by",
        Code(command),
        Report("What failed", Bullets(_failures(contents) or ["Nothing."])),
        Report("What worked", Bullets(_successes(contents) or ["Nothing yet."])),
        Report("How far predictions were off", Bullets(_errors(steps) or ["No step has been timed yet."])),
    ]
    if len(todo) > len(contents):
        parts.append(Report("Not done yet", Bullets(list(todo[len(contents) :]))))
    if "figures" in device:
        parts.append(Report("The device", _figures(device["figures"])))
    if steps:
        parts += [
            Report("Time of a step", _time_note(), _times(steps, contents)),
            Report("Peak memory", _memory(steps)),
        ]
    for name, title in (
        ("paths", "Paths"),
        ("graphs", "Graphs"),
        ("products", "quantized products"),
        ("questions", "What only a device can answer"),
        ("parity", "Parity"),
    ):
        if rows := contents.get(name, {}).get("rows"):
            cells = [(row["case"], "yes" if row["is_right"] else "NO", row["details"]) for row in rows]
            parts.append(Report(title, Table(("case", "as it should be", ""), cells)))
    calibration = contents.get("calibration", {})
    if "median_error" in calibration:
        reported = f"{calibration['num_measurements']} measurements, explained with a median error of {calibration['median_error']:.1%}."
        parts.append(Report("Calibration", reported, _figures(calibration["figures"])))
    took = [(name, f"{content['seconds']:.0f}") for name, content in contents.items() if "seconds" in content]
    parts.append(Report("What each part took", Table(("part", "s"), took, numeric=("s",))))
    return Report(f"First hour on {device.get('device', 'a device')}", *parts)


def _figures(rows: Sequence[Mapping[str, str]]) -> Table:
    return Table.of(
        rows,
        {"of the device": lambda row: row["of the device"], "measured": lambda row: row["measured"]},
        numeric=("measured",),
    )


def _successes(contents: Mapping[str, Content]) -> list[str]:
    """Return parts that found nothing wrong, and in parts with something wrong how much was right."""
    successes = []
    for name, content in contents.items():
        rows = [row for row in content.get("rows", ()) if isinstance(row, dict)]
        is_whole = "error" not in content and content.get("is_right", True)
        if rows and (num := sum(row["is_right"] for row in rows)):
            successes.append(f"{name}: {num} of {len(rows)} cases")
        elif is_whole and "left_out" not in content:
            successes.append(name)
    return successes


def _errors(steps: Mapping[str, Content]) -> list[str]:
    """Return, for each kind of figures, by how much predicted steps differ from measured ones."""
    lines = []
    for key in _PROFILES:
        rows = [row for row in _rows(steps, key) if row.error is not None]
        if rows:
            score, worst = Score.of(rows), max(rows, key=lambda row: abs(row.error or 0.0))
            lines.append(
                f"{key}: {score.median:.1%} in the median of {score.num_rows}, at most {worst.error:+.1%} ({worst.case})"
            )
    return lines


_PROFILES = ("data sheet", "calibrated")


def _rows(steps: Mapping[str, Content], key: str) -> list[Row]:
    """Return the steps that were timed, as they are predicted by one kind of figures."""
    return [
        Row(name, "step_s", content["step_s"], content["predicted_s"].get(key))
        for name, content in steps.items()
        if "step_s" in content
    ]


def _failures(contents: Mapping[str, Content]) -> list[str]:
    failures = []
    for name, content in contents.items():
        if "error" in content:
            during = f" (during {content['under_way']})" if "under_way" in content else ""
            failures.append(f"{name}{during}: {content['error']}")
        elif content.get("is_right") is False:
            wrong = [
                row["case"]
                for row in content.get("rows", ())
                if isinstance(row, dict) and not row["is_right"]
            ]
            failures.append(f"{name}: {', '.join(wrong) or content.get('output') or content.get('rows')}")
        elif "left_out" in content:
            failures.append(f"{name} was left out: {content['left_out']}")
    return failures


def _time_note() -> str:
    return (
        "Medians. *Least* is two forwards of the same model on the device, or, of an offloaded one, the larger of "
        "computing and copying one way, as the trace has them; *hidden* is the part of the copies during which "
        f"something was computed. Goals: {_WITHIN} of the least; predicted within 25 % from the data sheet, 8 % calibrated."
    )


def _times(steps: Mapping[str, Content], contents: Mapping[str, Content]) -> Table:
    rows = []
    for name, content in steps.items():
        if "step_s" not in content:
            continue
        step_s = content["step_s"]
        least_s = content["two_forwards_s"] or max(content["computing_s"], content["one_way_s"])
        zo2_s = contents.get(f"zo2-{name}", {}).get("step_s")
        reported = (_rows({name: content}, key)[0].error for key in _PROFILES)
        errors = ["-" if error is None else f"{error:+.1%}" for error in reported]
        hidden = "-" if content["hidden"] is None else f"{content['hidden']:.0%}"
        rows.append(
            (name, f"{step_s * 1e3:.1f}", *errors, f"{step_s / least_s:.3f}", hidden, f"{zo2_s / step_s:.2f}" if zo2_s else "-")
        )  # fmt: skip
    columns = (
        "case",
        "step (ms)",
        "data sheet",
        "calibrated",
        "of the least",
        "hidden",
        "zo2's step, of ours",
    )
    return Table(columns, rows, numeric=columns[1:])


def _memory(steps: Mapping[str, Content]) -> Table:
    rows = []
    for name, content in steps.items():
        if "step_s" not in content:
            continue
        sizes = [
            (content[f"{space}_bytes"], content[f"predicted_{space}_bytes"]) for space in ("device", "host")
        ]
        cells = [
            (f"{measured / _GIB:.3f}", f"{relative_error(predicted, measured):+.1%}" if measured else "-")
            for measured, predicted in sizes
        ]
        rows.append((name, *cells[0], f"{content['allocator_bytes'] / _GIB:.3f}", *cells[1]))
    columns = ("case", "device (GiB)", "predicted", "allocator beside (GiB)", "host (GiB)", "predicted ")
    return Table(columns, rows, numeric=columns[1:])
