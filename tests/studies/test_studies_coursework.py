"""The course: predictions with a pencil, hints that name a mistake, solutions, packing and grading."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from studies.cli import app
from studies.coursework import UNITS
from studies.coursework.grading import check
from studies.coursework.notebook import cells, notebook
from studies.coursework.pencil import PencilQuestion, exercise_of, mark, numbers_of, questions_of
from studies.exercises import grade
from topology.errors import ZosimError

ROOT = Path(__file__).parents[2]
NAMES = [unit.name for unit in UNITS]
UNIT = {unit.name: unit for unit in UNITS}
SOLVED = {name: import_module(f"tests.support.solved.coursework.{name}") for name in NAMES}
OWN = [name for name in NAMES if UNIT[name].stub.startswith("coursework/")]


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_have_every_point_whoever_the_student_is(name):
    for student in map(str, range(40)):
        numbers = numbers_of(UNIT[name], student)
        answers = SOLVED[name].answers(**numbers)
        questions = questions_of(UNIT[name], student)
        assert answers.keys() == {question.key for question in questions}
        for question in questions:
            # Three digits are what a pencil gives.
            assert mark(question, float(f"{answers[question.key]:.3g}")).score == 1, (numbers, question)


@pytest.mark.parametrize("name", NAMES)
def test_a_usual_mistake_is_named_whoever_the_student_is(name):
    assert len(SOLVED[name].MISSES) >= 3
    for student in map(str, range(40)):
        numbers, questions = numbers_of(UNIT[name], student), questions_of(UNIT[name], student)
        for key, miss, advice in SOLVED[name].MISSES:
            question = next(each for each in questions if each.key == key)
            marked = mark(question, miss(numbers, question.answer))
            assert (marked.score, advice in marked.output) == (0.5, True), (numbers, key, marked.output)
        for question in questions:
            for value, advice in question.mistakes:
                assert mark(question, value).score < 1, (numbers, question.key, advice)


@pytest.mark.parametrize("given", [None, "3 GB", True, float("nan"), 1e40])
def test_what_is_no_number_or_far_off_has_no_point(given):
    assert mark(questions_of(UNIT["memory"], "ada")[0], given).score == 0


@pytest.mark.parametrize("name", OWN)
def test_the_reference_solution_passes_and_its_curve_is_the_references(name):
    exercise, solved = exercise_of(UNIT[name]), SOLVED[name]
    verdict = exercise.check(solved.right)
    assert verdict.passed, verdict.message
    for _, own, reference in exercise.curve(solved.right):
        assert own == pytest.approx(reference, rel=1e-6)


def test_arrays_tuples_and_numbers_of_numpy_are_answers_too():
    overlap, memory = SOLVED["overlap"].right, SOLVED["memory"].right
    for kind in (tuple, np.array):
        assert exercise_of(UNIT["overlap"]).check(lambda *given, kind=kind: kind(overlap(*given))).passed
    assert exercise_of(UNIT["memory"]).check(lambda *given: np.int64(memory(*given))).passed


@pytest.mark.parametrize(
    ("key", "miss", "advice"),
    [
        (
            "overlapped",
            lambda n: 42 * n["block_mb"] / n["link_gb_per_s"] + n["compute_ms"],
            "one block too many",
        ),
        (
            "overlapped",
            lambda n: 40 * n["block_mb"] / n["link_gb_per_s"] + n["compute_ms"],
            "to fill and to drain",
        ),
        ("batch", lambda n: 2, "do not round"),
    ],
)
def test_a_block_more_or_less_and_a_rounded_ratio_are_not_called_a_mistake_of_units(key, miss, advice):
    numbers = {"block_mb": 300, "link_gb_per_s": 20, "compute_ms": 8, "blocks": 40}
    question = next(each for each in exercise_of(UNIT["overlap"]).questions(**numbers) if each.key == key)
    assert advice in mark(question, miss(numbers)).output


@pytest.mark.parametrize("given", [21.25, "21.25", "21.25 ms", "0.02125 s", "21250us", "21,250 us"])
def test_an_answer_may_say_its_unit(given):
    assert mark(PencilQuestion("upload", "a copy", "ms", 21.25), given).score == 1


def test_arrays_of_the_other_library_are_as_good():
    torch = pytest.importorskip("torch")
    step, rounded = SOLVED["ranks"].right, SOLVED["unbiased"].right
    assert exercise_of(UNIT["ranks"]).check(lambda *given: torch.as_tensor(step(*given))).passed
    assert exercise_of(UNIT["unbiased"]).check(lambda *given: rounded(*given).numpy()).passed


def test_a_wrong_factor_is_named():
    step = SOLVED["ranks"].right
    verdict = exercise_of(UNIT["ranks"]).check(lambda theta, *rest: theta + 3 * (step(theta, *rest) - theta))
    assert "3 times the step" in verdict.message


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_right_solution_passes_confined_and_has_the_references_curve(name, tmp_path):
    unit, solution = UNIT[name], tmp_path / "solution.py"
    text = (ROOT / "tests" / "support" / "solved" / f"{unit.stub}.py").read_text()
    solution.write_text(f"{text}\n\n{exercise_of(unit).FUNCTION} = right\n")
    verdict = grade(f"coursework.{name}", solution, stub=unit.stub)
    assert verdict.passed, verdict.message
    assert len(verdict.curve) >= 4
    # Roundings at random are within 0.05 of their mean, and a diagnosis within a tenth.
    for _, own, reference in verdict.curve:
        assert own == pytest.approx(reference, rel=0.1, abs=0.05)


@pytest.mark.parametrize("name", OWN)
def test_a_wrong_solution_is_refused_with_advice(name, monkeypatch):
    monkeypatch.setattr("studies.coursework.ranks.exercise._WAIT_S", 0.5)
    for wrong, advice in SOLVED[name].WRONG:
        verdict = exercise_of(UNIT[name]).check(wrong)
        assert not verdict.passed
        assert advice in verdict.message, verdict.message


@pytest.mark.slow
def test_a_student_works_through_a_unit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.unpack_archive(invoke("pack", "overlap", "--student", "ada").stdout.strip(), tmp_path)
    own = tmp_path / "overlap"
    assert {file.name for file in own.iterdir()} == {
        "README.txt", "questions.md", "answers.json", "lesson.py", "lesson.ipynb", "stub.py"
    }  # fmt: skip
    blank = json.loads(invoke("check", "overlap", own / "answers.json", own / "stub.py", "--json").stdout)
    assert blank["score"] == 0
    answers = json.loads((own / "answers.json").read_text())
    answers["answers"] = SOLVED["overlap"].answers(**numbers_of(UNIT["overlap"], "ada"))
    (own / "answers.json").write_text(json.dumps(answers))
    shutil.copy(SOLVED["overlap"].__file__, own / "solution.py")
    with (own / "solution.py").open("a") as file:
        file.write("\n\nfinish_times = right\n")
    result = invoke("check", "overlap", own / "answers.json", own / "solution.py", "--figure", "curve.svg")
    assert result.exit_code == 0, result.output
    assert "8 of 8" in result.stdout
    assert Path("curve.svg").read_text().count("<polyline") == 2

    # A friend hands in ada's answers.
    shutil.copytree(own, tmp_path / "class" / "eve")
    shutil.copytree(own, tmp_path / "class" / "ada")
    rows = {row["student"]: row for row in json.loads(invoke("check", "overlap", "class", "--json").stdout)}
    assert (rows["ada"]["score"], rows["eve"]["score"]) == (8, 0)
    assert "has the numbers of 'ada'" in rows["eve"]["seen"]


@pytest.mark.parametrize("name", NAMES)
def test_each_of_fifty_students_has_numbers_and_mostly_answers_of_their_own(name):
    students = [f"s{number}" for number in range(50)]
    assert len({repr(numbers_of(UNIT[name], student)) for student in students}) == 50
    for question in zip(*(questions_of(UNIT[name], student) for student in students), strict=True):
        assert len({f"{own.answer:.3g}" for own in question}) > 12, question[0].key


def test_an_instructor_gets_the_solution_and_the_answers_of_the_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("pack", "memory", "--for", "instructor", "--student", "ada", "--student", "bo")
    with zipfile.ZipFile("memory-instructor.zip") as packed:
        packed.extractall()
    key = json.loads(Path("memory/answers/bo/answers.json").read_text())
    assert key["answers"] == pytest.approx(SOLVED["memory"].answers(**numbers_of(UNIT["memory"], "bo")))
    graded = invoke("check", "memory", "memory/answers/bo/answers.json", "memory/solution.py", "--json")
    assert graded.exit_code == 0, graded.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_an_untouched_stub_and_blank_answers_have_no_point(name):
    result = invoke("check", name, ROOT / "studies" / UNIT[name].stub / "stub.py", "--json")
    assert json.loads(result.stdout)["score"] == 0


def test_otters_tests_mark_the_files_beside_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("pack", "memory", "--for", "instructor")
    shutil.unpack_archive("memory-instructor.zip", tmp_path)
    monkeypatch.setitem(sys.modules, "otter", ModuleType("otter"))
    decorators = ModuleType("otter.test_files")
    decorators.test_case = lambda points: lambda case: case
    monkeypatch.setitem(sys.modules, "otter.test_files", decorators)
    right = SOLVED["memory"].answers(**numbers_of(UNIT["memory"], "ada"))
    given = right | {"adam": -right["adam"], "live": 1e9}
    Path("answers.json").write_text(json.dumps({"unit": "memory", "student": "ada", "answers": given}))
    seen = {}
    for part in ("saved", "adam", "live", "solution"):
        test = runpy.run_path(f"memory/tests/{part}.py")
        seen[part] = []
        for case in (test["test_at_least_half"], test["test_the_whole"]):
            try:
                case()
                seen[part].append("")
            except AssertionError as error:
                seen[part].append(str(error))
    assert seen["saved"] == ["", ""]
    assert seen["adam"] == ["", "the sign is the other way"]
    assert "too large" in seen["live"][0]
    assert seen["solution"] == ["not handed in", "not handed in"]


@pytest.mark.slow
@pytest.mark.skipif(not util.find_spec("otter"), reason="otter-grader is not installed")
def test_otter_checks_a_unit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("pack", "memory", "--for", "instructor")
    shutil.unpack_archive("memory-instructor.zip", tmp_path)
    with Path("memory/solution.py").open("a") as file:
        file.write("\n\npeak_bytes = right\n")
    command = [sys.executable, "-m", "otter", "check", "solution.py", "-t", "tests", "-q", "solution"]
    done = subprocess.run(command, cwd=tmp_path / "memory", capture_output=True, text=True, check=True)
    assert "All tests passed" in done.stdout + done.stderr


@pytest.mark.slow
def test_two_processes_take_the_same_steps_over_gloo(tmp_path):
    solution = tmp_path / "solution.py"
    solution.write_text("from tests.support.solved.coursework.ranks import right as step\n")
    command = [sys.executable, "-m", "studies.coursework.ranks.gloo", str(solution)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    reports = sorted(line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("rank"))
    assert len(reports) == 2
    assert reports[0] == reports[1]
    assert "16 bytes a step" in reports[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_lesson_ends_its_cell_in_words(name):
    drawn = [source for _, source in cells(UNIT[name].lesson) if "plt.subplots" in source]
    assert drawn
    assert all("\nDescribed(" in source and source.endswith(")") for source in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_lesson_runs_as_a_notebook(name, monkeypatch, capsys):
    import matplotlib as mpl

    mpl.use("Agg")
    scope = {"__name__": "__main__"}
    for cell in json.loads(notebook(UNIT[name].lesson))["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("\nDescribed(", "\nshown = Described(")
            exec(compile(source, name, "exec"), scope)
    assert capsys.readouterr().out
    assert scope["axes"].has_data()
    html = scope["shown"]._repr_html_()
    assert re.match(r'<img alt="[^"]{50,}" src="data:image/png;base64,', html)
    assert html.count("<td>") >= 10
    assert "nan" not in html.partition("<details>")[2]
    assert not mpl.pyplot.get_fignums()  # Jupyter would draw it a second time
    mpl.pyplot.close("all")


def test_the_index_lists_the_units_in_order():
    page = (ROOT / "studies" / "coursework" / "page.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (\d+) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert [row for row in rows if row[0] in NAMES] == [
        (unit.name, unit.question, str(unit.minutes), ", ".join(unit.needs), unit.able) for unit in UNITS
    ]
    assert all(
        len((ROOT / "studies" / unit.stub / "stub.py").read_text().splitlines()) < 40 for unit in UNITS
    )


@pytest.mark.parametrize("text", ["[" * 2_000 + "]" * 2_000, '{"unit": NaN}', "[1]", ""])
def test_answers_that_nobody_can_read_are_refused_in_words(tmp_path, text):
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises(ZosimError, match=r"answers\.json (holds no answers|has no unit)"):
        check(UNITS[0], [tmp_path / "answers.json"])


@pytest.mark.slow
def test_a_solution_that_replaces_what_the_grader_compares_with_fails(tmp_path):
    solution = tmp_path / "solution.py"
    solution.write_text(
        "import numpy as np\ndef step(theta, *rest):\n    np.allclose = lambda *a, **k: True\n    return theta\n"
    )
    verdict = grade("coursework.ranks", solution, stub="coursework/ranks")
    assert "replaces numpy.allclose" in verdict.message
