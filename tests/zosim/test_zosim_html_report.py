"""A report: one file without a network, safe with hostile names, right in its numbers, and alive in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zosim
from tests.support.browser import CHROMIUM, Browser, browser
from topology.clusters import cluster
from topology.documents import dump, load_preset
from topology.errors import ZosimError
from zosim.applications.html_report.columns import timeline_columns
from zosim.applications.html_report.compose import Reported, page_of
from zosim.applications.html_report.page import Illustration, ReportPage
from zosim.planning.planner import Decision
from zosim.simulators.lockstep import simulate_many
from zosim.timeline import Timeline

HOSTILE = '</script><img src=x onerror=alert(1)><!-- "quoted" & `ticks` [link](http://example.org)'


@pytest.fixture(scope="module")
def decision() -> Decision:
    return zosim.plan("opt-125m", "rtx4090-2x", batch=4, seq=64, dtype="float16", ranks=2)


@pytest.fixture(scope="module")
def html(decision: Decision, tmp_path_factory: pytest.TempPathFactory) -> str:
    return zosim.write_report(decision, output=tmp_path_factory.mktemp("report") / "r.html").read_text()


class Elements(HTMLParser):
    """Names of all elements, and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs


def elements(html: str) -> Elements:
    found = Elements()
    found.feed(html)
    return found


def block(html: str) -> dict[str, Any]:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert text is not None
    data: dict[str, Any] = json.loads(text[1])
    return data


def column(text: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def test_a_page_names_the_hash_of_each_script_and_style_and_nothing_else(html: str) -> None:
    policy = dict(re.findall(r"(\S+-src) ([^;\"]+)", html.split('content="', 1)[1].split('">', 1)[0]))
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert policy["default-src"] == "'none'"
    for source, texts in (
        ("script-src", scripts),
        ("style-src", re.findall(r"<style>(.*?)</style>", html, re.DOTALL)),
    ):
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert texts
        assert policy[source].split() == [f"'sha256-{each}'" for each in hashes]
    found = elements(html)
    assert not {name for name, _ in found.attributes} & {"src", "href", "style", "onerror", "onclick"}


def test_every_chart_has_a_picture_and_its_numbers(decision: Decision) -> None:
    page = page_of([Reported.of(decision)], decision)
    figures = [part for part in page.elements if isinstance(part, Illustration)]
    assert {figure.root for figure in figures} >= {"timeline", "memory-0"}
    assert all(figure.svg.startswith("<svg") and figure.numbers is not None for figure in figures)
    assert decision.chosen.describe() in page.to_html()


def test_columns_hold_the_spans_of_a_timeline(decision: Decision) -> None:
    planned = decision.chosen.planned
    timeline = planned.timeline
    data = timeline_columns(timeline, planned, "predicted")
    starts = data["begin_s"] + data["tick_s"] * np.cumsum(column(data["start_gaps"], "<u4").astype(float))
    durations = data["tick_s"] * column(data["durations"], "<u4")
    shift_s = timeline.begin_s - data["begin_s"]
    assert np.allclose(starts + shift_s, [span.start_s for span in timeline.spans], atol=1e-9, rtol=0)
    assert np.allclose(durations, [span.duration_s for span in timeline.spans], atol=1e-9, rtol=0)
    table, rows = data["instruction_table"], data["row_names"]
    for span, number, row in zip(
        timeline.spans, column(data["instructions"], "<u4"), column(data["rows"], "<u2"), strict=True
    ):
        assert (table[number]["id"], table[number]["label"]) == (span.instruction, span.label)
        assert rows[row] == f"rank {span.rank} {span.stream}"
    names = {known["id"] for known in table}
    assert all(name in names for known in table for name, distance in known["after"] if not distance)


def hostile_page(decision: Decision) -> ReportPage:
    """Return a report in which the model, the machine and all devices have a hostile name."""
    planned = decision.chosen.planned
    model = planned.plan.model.model_copy(update={"name": HOSTILE})
    placement = planned.plan.placement.model_copy(update={"topology": HOSTILE})
    plan = planned.plan.model_copy(update={"model": model, "placement": placement})
    topology = planned.topology.model_copy(update={"name": HOSTILE})
    return page_of([Reported(HOSTILE, replace(planned, plan=plan, topology=topology))])


def test_hostile_names_stay_text(decision: Decision, html: str) -> None:
    hostile = hostile_page(decision).to_html()
    assert "onerror" in hostile  # shown
    assert set(elements(hostile).names) <= {*elements(html).names, "code"}  # what stands between backticks
    assert not {name for name, _ in elements(hostile).attributes} & {"src", "href", "onerror"}


def test_uplot_is_the_published_file() -> None:
    folder = Path(zosim.__file__).parent / "applications/html_report/data"
    hashes = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for name, expected in hashes.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text()


def logged(
    folder: Path, rows: list[dict[str, Any]], end: str = "\n", finished: int | None = None
) -> Reported:
    (folder / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    (folder / "run.json").write_text(json.dumps({"finished": finished and {"num_steps": finished}}))
    return Reported("run", None, folder)  # type: ignore[arg-type]


ROWS = [{"step": at, "perturbation": p, "loss_plus": 1.5} for at in range(3) for p in range(2)]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:1] + ROWS[2:],
        [*ROWS[:4], *ROWS[2:]],
        ROWS[::-1],
        [*ROWS, {"step": 3}],
        [{**ROWS[0], "loss_plus": "1"}],
    ],
)
def test_a_log_that_contradicts_itself_is_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ZosimError, match=r"steps\.jsonl line \d is damaged"):
        _ = logged(tmp_path, rows).steps


def test_an_evaluation_without_its_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"accuracy": 0.5}\n')
    with pytest.raises(ZosimError, match=r"metrics\.jsonl line 1 is damaged"):
        _ = logged(tmp_path, ROWS).metrics


def test_a_log_that_lacks_its_end_is_told(tmp_path: Path) -> None:
    assert logged(tmp_path, ROWS, finished=3).missing is None
    assert logged(tmp_path, ROWS).missing is None
    assert (
        logged(tmp_path, ROWS, finished=4).missing == "the log has 3 steps, and the run says that it made 4"
    )
    assert "no end" in (logged(tmp_path, ROWS, end='\n{"step": 3').missing or "")
    (tmp_path / "steps.jsonl").unlink()
    assert "no losses" in (Reported("run", None, tmp_path).missing or "")  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written_is_named(decision: Decision, tmp_path: Path) -> None:
    with pytest.raises(ZosimError, match=r"missing/r\.html"):
        zosim.write_report(decision, output=tmp_path / "missing/r.html")


def many_spans(timeline: Timeline, num_spans: int) -> Timeline:
    """Return a timeline of so many spans: its step again and again, each span of another duration."""
    step = list(timeline.periodic_spans(timeline.ranks[0]))
    rng = np.random.default_rng(0)
    spans = [
        replace(
            span.shifted(number * timeline.step_time_s),
            step=number,
            end_s=span.end_s + number * timeline.step_time_s - span.duration_s * rng.uniform(0, 0.5),
        )
        for number in range(num_spans // len(step) + 1)
        for span in step
    ]
    return replace(timeline, spans=tuple(spans[:num_spans]), num_steps=spans[-1].step + 1, repeat=None)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium, which is not installed")
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.mark.slow
def test_a_hundred_thousand_spans_are_small_and_quick_to_draw(
    chromium: Browser, decision: Decision, tmp_path: Path
) -> None:
    planned = decision.chosen.planned
    timeline = many_spans(planned.timeline, 100_000)
    page = ReportPage(
        "many",
        [],
        [Illustration("timeline", "Timeline", "")],
        [timeline_columns(timeline, planned, "measured")],
    )
    file = page.save(tmp_path / "many.html")
    assert file.stat().st_size < 3e6
    chromium.open(file)
    chromium.evaluate("timeline.view(timeline.first, timeline.last); timeline.paint()")
    # All of it in view: some thousand bars at most, since what is narrower than a pixel is one bar.
    assert 500 < chromium.evaluate("timeline.painted") < 3 * 1280 * len(planned.timeline.ranks) * 6
    chromium.evaluate("timeline.zoom(1e-4); timeline.paint()")
    assert 1 <= chromium.evaluate("timeline.painted") < 200
    assert chromium.console == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_reader_zooms_hovers_searches_and_follows_what_was_waited_for(
    chromium: Browser, decision: Decision, tmp_path: Path, scheme: str
) -> None:
    chromium.open(zosim.write_report(decision, output=tmp_path / "r.html"), scheme=scheme)
    chromium.evaluate("timeline.canvas.scrollIntoView()")
    box = chromium.evaluate(
        "[timeline.canvas.getBoundingClientRect().x, timeline.canvas.getBoundingClientRect().y]"
    )
    wide = chromium.evaluate("timeline.high - timeline.low")
    span = "(() => { const row = timeline.rows[0], i = Math.floor(row.start.length / 2); return [timeline.x((row.start[i] + row.end[i]) / 2), row.timeline.instruction_table[row.instruction[i]].id, i]; })()"
    chromium.evaluate(
        "{ const r = timeline.rows[0], i = Math.floor(r.start.length / 2); timeline.view(r.start[i] - 1e-6, r.end[i] + 1e-6); }"
    )
    assert chromium.evaluate("timeline.high - timeline.low") < wide
    x, name, index = chromium.evaluate(span)
    chromium.mouse("mouseMoved", box[0] + x, box[1] + chromium.evaluate("timeline.tops[0]") + 5)
    assert name in chromium.evaluate("timeline.tip.textContent")
    chromium.click(box[0] + x, box[1] + chromium.evaluate("timeline.tops[0]") + 5)
    details = chromium.evaluate("timeline.details.textContent")
    assert name in details
    assert "waited for" in details
    chromium.evaluate("timeline.details.querySelector('button').click()")
    assert chromium.evaluate("timeline.chosen.index") != index or chromium.evaluate(
        "timeline.rows.indexOf(timeline.chosen.row)"
    )
    chromium.evaluate("timeline.search.value = 'update'; timeline.search.dispatchEvent(new Event('input'))")
    found = chromium.evaluate("timeline.found.length")
    assert found == chromium.evaluate(
        "timeline.rows.reduce((n, row) => n + [...row.instruction].filter((i) => { const k = row.timeline.instruction_table[i]; return `${k.id} ${k.label} ${k.segment}`.toLowerCase().includes('update'); }).length, 0)"
    )
    assert found
    # Memory follows the timeline's axis.
    assert chromium.evaluate("Math.abs(timeline.memory[0].scales.x.min - timeline.low) < 1e-9")
    chromium.evaluate("timeline.canvas.focus()")
    chromium.key("0", "0")
    assert chromium.evaluate("timeline.low === timeline.first && timeline.high === timeline.last")
    assert chromium.console == []
    assert {url.split(":")[0] for url in chromium.requests} <= {"file", "about"}


@pytest.mark.slow
def test_a_page_reads_on_a_phone_and_without_scripts(
    chromium: Browser, decision: Decision, tmp_path: Path
) -> None:
    file = hostile_page(decision).save(tmp_path / "r.html")
    chromium.open(file, width=400)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 400
    assert chromium.evaluate("document.querySelector('.picture').offsetHeight") == 0
    chromium.print_media()
    assert chromium.evaluate(
        "[...document.querySelectorAll('details')].every((numbers) => numbers.offsetHeight > 2 * numbers.firstChild.offsetHeight)"
    )
    chromium.open(file, scripts=False)
    chromium.photograph(tmp_path / "plain.png")
    assert chromium.evaluate("document.querySelectorAll('canvas').length") == 0
    assert chromium.evaluate("document.querySelector('.picture svg').getBoundingClientRect().height") > 50
    assert chromium.console == []


@pytest.mark.slow
def test_a_report_of_64_ranks_opens_and_is_driven(chromium: Browser, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(dump(cluster(load_preset("dgx-h100"), 8)))
    found = zosim.plan("opt-125m", str(hosts), batch=64, seq=64, dtype="float16", mesh="data=64")
    planned = found.chosen.planned
    run = tmp_path / "run"
    run.mkdir()
    measured = replace(simulate_many(planned.world, num_steps=4).expanded(), source="measured")
    (run / "timeline.json").write_text(measured.to_json())
    file = page_of([Reported("many ranks", planned, run)]).save(tmp_path / "r.html")
    assert file.stat().st_size < 3e6
    chromium.open(file)
    assert chromium.evaluate("timeline.rows.length") > 64
    last = "timeline.rows[timeline.rows.length - 1]"
    middle = f"({last}.start[1] + {last}.end[1]) / 2"
    chromium.evaluate(f"timeline.view({last}.start[1], {last}.end[1]); timeline.canvas.scrollIntoView(false)")
    box = chromium.evaluate(
        "(() => { const b = timeline.canvas.getBoundingClientRect(); return [b.x, b.bottom]; })()"
    )
    x = box[0] + chromium.evaluate(f"timeline.x({middle})")
    chromium.evaluate("timeline.paint()")
    assert chromium.evaluate("timeline.painted") > 64
    tips = []
    for up in range(4, 60, 4):
        chromium.mouse("mouseMoved", x, box[1] - up)
        tips.append(chromium.evaluate("timeline.tip.textContent"))
    assert any(tips), "no row of the last ranks answers"
    assert chromium.console == []
