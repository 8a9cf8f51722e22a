"""The page itself: reports as HTML, charts between them, one JSON block for the script, and a policy that forbids the network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from topology.errors import ZosimError
from topology.printable import one_line
from zosim.analysis.pictures import Chart
from zosim.report import Report

_DATA = files("zosim.applications.html_report") / "data"
_ALIGNED = ' style="text-align:right"', ' class="number"'
_LEFT = ' style="text-align:left"', ""


@dataclass(frozen=True)
class Illustration:
    """A chart with its picture and its numbers."""

    root: str  # id of the element that the script draws in; empty for a picture alone
    title: str
    svg: str
    numbers: Report | None = None  # tables of the same numbers, folded away


@dataclass
class ReportPage:
    """What a page shows, in order."""

    title: str
    answer: list[str] = field(default_factory=list)
    elements: list[Report | Illustration] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    # memory, curves: of which memory shares the timeline's axis.
    memory: list[Chart] = field(default_factory=list)
    curves: list[Chart] = field(default_factory=list)
    step_s: float = 1.0  # the longest step: a few are in view at first

    def to_html(self) -> str:
        """Return the page as one file."""
        style = _shipped("uPlot.min.css") + _shipped("page.css")
        scripts = [_shipped("uPlot.iife.min.js"), _shipped("page.js")]
        policy = "; ".join(
            (
                "default-src 'none'",
                f"script-src {' '.join(map(_hash, scripts))}",
                f"style-src {_hash(style)}",
                "base-uri 'none'",
                "form-action 'none'",
            )
        )
        data = {
            "step_s": self.step_s,
            "timelines": self.timelines,
            "memory": [chart.to_data() for chart in self.memory],
            "curves": [chart.to_data() for chart in self.curves],
        }
        # A name that ends the block, or begins a comment, would be markup.
        block = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        title = escape(one_line(self.title))
        sentences = "".join(f"<p>{escape(one_line(sentence))}</p>" for sentence in self.answer)
        answer = f'<section class="answer">{sentences}</section>' if sentences else ""
        body = "\n".join(self._elements())
        return (
            "<!DOCTYPE html>\n"
            '<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
            f"<title>{title}</title><style>{style}</style></head>\n"
            f"<body><main><h1>{title}</h1>{answer}\n{body}\n</main>\n"
            f'<script type="application/json" id="data">{block}</script>\n'
            + "".join(f"<script>{script}</script>\n" for script in scripts)
            + "</body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page and return its path.

        Raises ZosimError if the file cannot be written.
        """
        file = Path(path)
        try:
            file.write_text(self.to_html(), encoding="utf-8")
        except OSError as error:
            message = f"cannot write the report {str(file)!r}: {error.strerror}"
            raise ZosimError(message, hint="name a file in a directory that exists") from error
        return file

    def _elements(self) -> Iterable[str]:
        for element in self.elements:
            if isinstance(element, Report):
                yield f"<section>{report_html(element)}</section>"
                continue
            title = escape(one_line(element.title))
            numbers = (
                ""
                if element.numbers is None
                else f'<details><summary aria-label="{title} in numbers">the same in numbers</summary>{report_html(element.numbers)}</details>'
            )
            root = f' id="{element.root}"' if element.root else ""
            kept = "" if element.root else " stays"
            yield (
                f"<section><h2>{title}</h2><figure{root}></figure>"
                f'<div class="picture{kept}">{element.svg}</div>{numbers}</section>'
            )


def report_html(report: Report) -> str:
    """Return a report as HTML without styles of its own, which the policy would refuse; headed one level below the page."""
    html = report.to_html().replace(*_ALIGNED).replace(*_LEFT)
    for level in (5, 4, 3, 2, 1):
        html = html.replace(f"<h{level}>", f"<h{level + 1}>").replace(f"</h{level}>", f"</h{level + 1}>")
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def _shipped(name: str) -> str:
    return (_DATA / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
