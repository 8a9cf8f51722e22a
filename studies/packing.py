"""An exercise or a unit of the course as a zip: what a student gets, or what an instructor gets besides."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from studies.coursework import Unit
from topology.errors import ZosimError

Reader = Literal["student", "instructor"]

_ROOT = Path(__file__).parent
# Solutions are in a clone alone, and not in what a student installs.
_SOLUTIONS = _ROOT.parent / "tests" / "support" / "solved"
# Fixed, so that the same exercise has the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
_NAME = re.compile(r"\w[\w.@-]*")
_STUDENT = """Exercise {name}

1. Read page.md; `zosim study {name}` shows it, too.
2. Copy stub.py to solution.py and fill it in.
3. zosim study check {name} solution.py
{rules}"""
_UNIT_STUDENT = """Unit {name}: {question} About {minutes} minutes, after {needs}.

1. Take a pencil. Answer questions.md, and write the numbers in answers.json. The numbers are yours alone.
2. Work through lesson.ipynb, or lesson.py, the same as a script.
3. Copy stub.py to solution.py and fill it in.
4. zosim study check {name} answers.json solution.py --figure curve.svg
{rules}"""
_RULES = """
A solution imports what stub.py imports, numpy, torch and a few modules of Python. It needs no file, process or network.
It runs on a laptop without a GPU.
"""
_INSTRUCTOR = """
For the instructor

solution.py has a right solution, `right`, which gets all points, and usual mistakes, WRONG, each with a part of the hint that it gets.
To grade a class, put the submissions in a folder, {submissions}:

    zosim study check {name} submissions --json > grades.json

Each runs in a process of its own, one after the other, with limits of time and memory, and without sockets and files.
This is no prison: grade code of people whom you do not trust in a container.
"""
_OTTER_README = """
With otter-grader: `otter check solution.py -t tests` beside a student's answers.json, or `otter generate -t tests` for an autograder,
which takes a zip of answers.json and solution.py: `otter run -a autograder.zip ada.zip`. It does not know who hands in whose numbers.
"""
# Half of the points are for a part that is half right, as otter knows cases that hold and cases that do not.
_OTTER_TEST = '''"""A part of the unit {unit}, for otter-grader."""

from pathlib import Path

from otter.test_files import test_case

OK_FORMAT = False
name = "{part}"
points = {points:g}


def _marked():
    from studies.coursework import UNITS
    from studies.coursework.grading import check

    unit = next(unit for unit in UNITS if unit.name == "{unit}")
    return next(part for part in check(unit, filter(Path.is_file, [Path("{file}")])).tests if part.name == name)


@test_case(points={half:g})
def test_at_least_half():
    part = _marked()
    assert part.score >= part.max_score / 2, part.output


@test_case(points={half:g})
def test_the_whole():
    part = _marked()
    assert part.score == part.max_score, part.output
'''


def pack(
    study: str, unit: Unit | None, reader: Reader, students: Sequence[str], folder: Path
) -> Iterator[Path]:
    """Write an exercise into a folder, a zip for each student or one for the instructor, and yield their paths.

    Raises ZosimError if a name cannot be that of a folder, the solution is wanted and not there, or a file cannot be
    written.
    """
    for name in students:
        if not _NAME.fullmatch(name):
            raise ZosimError(
                f"{name!r} cannot be the name of a folder", hint="use letters, digits, '.', '-', '_' and '@'"
            )
    stub = (_ROOT / (unit.stub if unit else study) / "stub.py").read_text(encoding="utf-8")
    if unit is None:
        page = (_ROOT / study / "page.md").read_text(encoding="utf-8")
        files = {"README.txt": _STUDENT.format(name=study, rules=_RULES), "page.md": page, "stub.py": stub}
    else:
        from studies.coursework.grading import answers_text
        from studies.coursework.notebook import notebook

        readme = _UNIT_STUDENT.format(
            name=unit.name,
            question=unit.question,
            minutes=unit.minutes,
            needs=", ".join(unit.needs),
            rules=_RULES,
        )
        files = {"README.txt": readme, "lesson.py": unit.lesson, "lesson.ipynb": notebook(unit.lesson)} | {
            "stub.py": stub
        }
    if reader == "instructor":
        solution = _SOLUTIONS / f"{unit.stub if unit else study}.py"
        if not solution.is_file():
            raise ZosimError(
                f"the solution of {study} is not installed", hint="pack for instructors in a clone of zosim"
            )
        submissions = "a folder for each student" if unit else "a file for each student"
        files["README.txt"] += _INSTRUCTOR.format(name=study, submissions=submissions)
        function = import_module(f"studies.{f'coursework.{study}' if unit else study}.exercise").FUNCTION
        files["solution.py"] = f"{solution.read_text(encoding='utf-8')}\n\n{function} = right\n"
        keys = (
            {f"answers/{name}/answers.json": answers_text(unit, name, solved=True) for name in students}
            if unit
            else {}
        )
        if unit:
            files["README.txt"] += _OTTER_README
        tests = dict(_otter_tests(unit)) if unit else {}
        yield _write(folder / f"{study}-instructor.zip", study, files | keys | tests)
    elif unit is None:
        yield _write(folder / f"{study}-student.zip", study, files)
    else:
        for name in students or ["anybody"]:
            yield _write(folder / f"{study}-{name}.zip", study, files | _own_files(unit, name))


def _otter_tests(unit: Unit) -> Iterator[tuple[str, str]]:
    from studies.coursework.grading import check

    for part in check(unit, []).tests:
        file = "solution.py" if part.name == "solution" else "answers.json"
        test = _OTTER_TEST.format(
            unit=unit.name, part=part.name, points=part.max_score, half=part.max_score / 2, file=file
        )
        yield f"tests/{part.name}.py", test


def _own_files(unit: Unit, student: str) -> dict[str, str]:
    from studies.coursework.grading import answers_text
    from studies.coursework.pencil import TOLERANCE, questions_of

    lines = [
        f"- `{each.key}`{each.unit and f', in {each.unit}'}: {each.text}{'' if each.text.endswith('?') else '.'}"
        for each in questions_of(unit, student)
    ]
    questions = "\n".join(lines)
    heading = (
        f"# {unit.question.capitalize()}\n\nNumbers of {student}. Answers may be off by {TOLERANCE:.0%}."
    )
    return {"questions.md": f"{heading}\n\n{questions}\n", "answers.json": answers_text(unit, student)}


def _write(path: Path, top: str, files: dict[str, str]) -> Path:
    try:
        with zipfile.ZipFile(path, "w") as packed:
            for name, text in files.items():
                packed.writestr(zipfile.ZipInfo(f"{top}/{name}", _DATE), text, zipfile.ZIP_DEFLATED)
    except OSError as error:
        message = f"cannot write {str(path)!r}: {error.strerror}"
        raise ZosimError(message, hint="change to a directory that you may write to") from error
    return path
