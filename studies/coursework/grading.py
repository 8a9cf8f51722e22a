"""A student's answers and solution of a unit, marked; the numbers belong to the student, so answers cannot be passed on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.coursework import Unit
from studies.coursework.pencil import Mark, exercise_of, mark, questions_of
from studies.exercises import grade
from topology.errors import ZosimError
from topology.reading import parse_json, read_text

_CODE_POINTS = 4.0


@dataclass(frozen=True)
class Result:
    """The marks of a student."""

    student: str
    score: float
    max_score: float
    tests: tuple[Mark, ...]
    curve: tuple[tuple[float, float, float], ...] = ()  # position, the student's value and the reference's

    @property
    def passed(self) -> bool:
        """Whether every point was made."""
        return self.score == self.max_score


def answers_text(unit: Unit, student: str, *, solved: bool = False) -> str:
    """Return the text of an ``answers.json`` to fill in, or with the right answers."""
    answers = {each.key: each.answer if solved else None for each in questions_of(unit, student)}
    return json.dumps({"unit": unit.name, "student": student, "answers": answers}, indent=2) + "\n"


def check(unit: Unit, files: Iterable[Path], student: str | None = None) -> Result:
    """Return the marks of a student's ``answers.json`` and ``solution.py``; what is not there has no points.

    `student`: who hands them in, where the grader knows it.

    Raises ZosimError if the answers cannot be read or belong to somebody else, or the solution uses what it may not.
    """
    by_suffix = {file.suffix: file for file in files}
    name, answers = _answers(unit, by_suffix.get(".json"), student)
    tests = [mark(question, answers.get(question.key)) for question in questions_of(unit, name)]
    curve: tuple[tuple[float, float, float], ...] = ()
    if ".py" in by_suffix:
        verdict = grade(f"coursework.{unit.name}", by_suffix[".py"], stub=unit.stub)
        credit = 1.0 if verdict.passed else verdict.credit
        tests.append(Mark("solution", round(_CODE_POINTS * credit, 2), _CODE_POINTS, verdict.message))
        curve = verdict.curve
    else:
        tests.append(Mark("solution", 0, _CODE_POINTS, "not handed in"))
    return Result(
        name, sum(test.score for test in tests), sum(test.max_score for test in tests), tuple(tests), curve
    )


def _answers(unit: Unit, file: Path | None, student: str | None) -> tuple[str, dict[str, Any]]:
    if file is None:
        return student or "anybody", {}
    hint = f"write it with `zosim study pack {unit.name} --for student --student NAME`, and fill in numbers"
    if not file.is_file():
        raise ZosimError(f"there are no answers {str(file)!r}", hint=hint)
    try:
        read = parse_json(
            read_text(file, "answers", ZosimError), f"{file} holds no answers", ZosimError, hint=hint
        )
        of_unit, name, answers = read["unit"], read["student"], dict(read["answers"])
    except (ValueError, KeyError, TypeError) as error:
        raise ZosimError(f"{file} has no unit, student and answers: {error}", hint=hint) from error
    if of_unit != unit.name:
        raise ZosimError(f"{file} answers the unit {of_unit!r}, not {unit.name!r}", hint=hint)
    if student is not None and name != student:
        raise ZosimError(
            f"{file} has the numbers of {str(name)!r}, and {student!r} hands it in",
            hint="each student's numbers differ",
        )
    return str(name), answers


def draw(unit: Unit, curve: tuple[tuple[float, float, float], ...], path: Path) -> None:
    """Write a student's curve beside the reference's as an SVG file.

    Raises ZosimError if the file cannot be written.
    """
    from zosim.analysis.pictures import Chart, chart_svg

    title, across = exercise_of(unit).CURVE
    chart = Chart("curve", title, across, "", "", ("yours", "reference"), tuple(zip(*curve, strict=True)))
    try:
        path.write_text(chart_svg(chart), encoding="utf-8")
    except OSError as error:
        message = f"cannot write {str(path)!r}: {error.strerror}"
        raise ZosimError(message, hint="name a file in a directory that you may write to") from error
