"""``zosim study``: what it lists and shows, and how it tries a solution."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from studies.cli import STUDIES, app

STUDIES_FOLDER = Path(__file__).parents[2] / "studies"


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow
def test_the_command_tries_a_file(tmp_path):
    solution = tmp_path / "mine.py"
    solution.write_text("def rebuild(base, log, epsilon):\n    return base\n")
    result = invoke("check", "why-seeds-suffice", str(solution))
    assert result.exit_code == 1
    assert result.stdout.startswith("not yet: a run of 1 steps: nothing has changed")


@pytest.mark.slow
def test_the_command_tries_a_folder_of_files(tmp_path):
    (tmp_path / "ada.py").write_text("def bytes_forward(case):\n    return 1\n")
    (tmp_path / "eve.py").write_text("import os\n")
    rows = json.loads(invoke("check", "where_to_split", str(tmp_path), "--json").stdout)
    assert [(row["solution"], row["passed"]) for row in rows] == [("ada", False), ("eve", False)]
    assert "the module os" in rows[1]["message"]


def test_a_student_gets_no_solution_and_an_instructor_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for reader in ("student", "instructor"):
        file = invoke("pack", "quzo", "--for", reader).stdout.strip()
        with zipfile.ZipFile(tmp_path / file) as packed:
            names[reader] = set(packed.namelist())
    assert names["student"] == {"quzo/README.txt", "quzo/page.md", "quzo/stub.py"}
    assert names["instructor"] - names["student"] == {"quzo/solution.py"}


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("first_step",), "first_steps"),
        (("check", "memory", __file__), "a solution imports at most"),
        (("check", "memory", "no_such_answers.json"), "zosim study pack memory"),
        (("pack", "quzo", "--student", "ada"), "leave --student out"),
        (("pack", "memory", "--student", "../ada"), "use letters"),
        (("check", "first_steps", "mine.py"), "why_seeds_suffice"),
        (("check", "why_seeds_suffice", "no_such_file.py"), "stub.py"),
        (("check", "why_seeds_suffice", __file__), "a solution imports at most"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_hint(arguments, advice):
    result = invoke(*arguments)
    assert advice in result.exception.hint


def test_every_study_is_a_module_that_runs_and_those_with_a_page_show_it():
    listed = json.loads(invoke("--list", "--json").stdout)
    assert [item["name"] for item in listed] == [item.name for item in STUDIES]
    for item in STUDIES:
        own = STUDIES_FOLDER / ("coursework" if item.unit else "") / item.name
        assert (own / "__main__.py").is_file() or own.with_suffix(".py").is_file()
        shown = invoke(item.name).stdout
        assert shown.startswith("# ") if item.page or item.unit else item.script in shown
