"""Results in a notebook: tables and pictures, pandas frames, and the tutorial."""

from __future__ import annotations

import io
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import zosim
from executors.report import RunSummary
from studies.coursework.notebook import notebook, text
from topology.errors import ZosimError
from zosim import console
from zosim.analysis.compare import compare

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "first-notebook.py"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def decision():
    return zosim.plan("opt-125m", "rtx4090-2x", batch=4, seq=64, dtype="float16", device="gpu0")


@pytest.fixture(scope="module")
def comparison(decision):
    planned = decision.chosen.planned
    measured = replace(planned.simulated(num_steps=4).expanded(), source="measured")
    return compare(planned.timeline, measured, planned.program)


def run_in(folder):
    rows = [
        {"step": step, "perturbation": 0, "loss_plus": 3.0 - step, "loss_minus": 2.9} for step in range(3)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    zeros = ("step_time_s", "tokens_per_s", "device_bytes", "host_bytes", "peak_rss_bytes")
    nothing = ("messages", "lost_updates", "evaluation", "best_evaluation")
    summary = {"num_steps": 3, "first_loss": 3.0, "last_loss": 1.0, "out": str(folder)}
    return RunSummary(summary | dict.fromkeys(zeros, 1) | dict.fromkeys(nothing))


def test_results_show_a_table_and_a_small_picture(decision, comparison, tmp_path):
    for shown in (decision, decision.chosen.planned, decision.prediction, comparison, run_in(tmp_path)):
        html = shown._repr_html_()
        assert "<table>" in html
        assert html.count("<svg") == 1
        assert len(html) < 200_000


def test_results_write_a_page(decision, comparison, tmp_path):
    for name, shown in (("Predicted and measured", comparison), ("opt-125m", decision.chosen.planned)):
        page = shown.report(tmp_path / "page.html").read_text()
        assert f"<h1>{name}</h1>" in page


def test_names_of_others_are_escaped(decision, comparison, tmp_path):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    model = decision.plan.model.model_copy(update={"name": HOSTILE})
    planned = replace(decision.chosen.planned, plan=decision.plan.model_copy(update={"model": model}))
    line = replace(comparison.labels[0], name=HOSTILE)
    for shown in (planned, replace(comparison, labels=(line,)), run_in(folder)):
        html = shown._repr_html_()
        assert "onerror" in html
        assert "<img" not in html


def test_results_are_rows_of_a_frame(decision, comparison, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    first = decision.to_pandas()[0]
    assert (first["outcome"], first["step_time_s"]) == ("chosen", decision.chosen.seconds)
    by_label = {row["label"]: row["seconds"] for row in decision.prediction.to_pandas()}
    assert by_label == dict(decision.prediction.seconds_by_label)
    assert decision.chosen.planned.to_pandas()[0].keys() >= {"label", "start_s", "end_s"}
    assert {row["of"] for row in comparison.to_pandas()} == {"label", "instruction"}
    assert [row["loss_plus"] for row in run_in(tmp_path).to_pandas()] == [3.0, 2.0, 1.0]


def test_a_frame_without_pandas_is_refused_with_a_hint(decision, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ZosimError, match="needs pandas") as refused:
        decision.to_pandas()
    assert "-m pip install pandas" in refused.value.hint


def test_a_users_mistake_is_a_few_lines_in_a_notebook():
    with pytest.raises(ZosimError) as refused:
        exec(compile("zosim.plan('opt-14b', 'rtx4090-2x')", "cell", "exec"))
    error = refused.value
    assert error.__traceback__ is not None
    # A kernel's traceback begins in the cell.
    *where, message = error.with_traceback(error.__traceback__.tb_next)._render_traceback_()
    assert where == ['  File "cell", line 1, in <module>']
    assert message == f"ModelError: {error}"


def test_planning_that_takes_long_shows_how_far_it_is(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(console, "stderr", console.PlainConsole(file=written, force_terminal=True))
    monkeypatch.setattr(
        console, "monotonic", itertools.count(0, 2).__next__
    )  # each look at the clock is later
    zosim.plan("opt-125m", "rtx4090-2x", batch=4, seq=64, dtype="float16", device="gpu0")
    assert "planning" in written.getvalue()


def test_the_tutorials_page_and_notebook_are_made_of_its_script():
    script = TUTORIAL.read_text()
    made_of = "run: python -m studies.coursework.notebook docs/tutorials/first-notebook.py"
    assert TUTORIAL.with_suffix(".md").read_text() == text(script), made_of
    assert TUTORIAL.with_suffix(".ipynb").read_text() == notebook(script), made_of


@pytest.mark.slow
def test_the_tutorial_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = []
    scope = {"__name__": "__main__"}
    for cell in json.loads(notebook(TUTORIAL.read_text()))["cells"]:
        if cell["cell_type"] == "code":
            *before, last = "".join(cell["source"]).rstrip().split("\n")
            exec("\n".join(before), scope)
            shown.append(eval(last, scope))
    # All but the path of the report show themselves.
    assert all("<svg" in each._repr_html_() for each in shown[:-1])
    assert shown[-1].is_file()
