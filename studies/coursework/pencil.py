"""Predictions made with a pencil: numbers that differ from student to student, and hints that name a mistake."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from typing import Any

from studies.coursework import Unit
from topology.units import QuantityError, parse_quantity, unit_scale


@dataclass(frozen=True)
class PencilQuestion:
    """One number to predict."""

    key: str
    text: str
    unit: str  # empty for a number without one
    answer: float  # not zero
    mistakes: tuple[tuple[float, str], ...] = ()  # what a usual mistake gives, and the hint that names it


@dataclass(frozen=True)
class Mark:
    """What one answer, or the exercise, is worth; the names are those of Gradescope's results."""

    name: str
    score: float
    max_score: float
    output: str


TOLERANCE = 0.01
"""Relative: three digits are enough, and GB is told from GiB."""

_MOST_TRIES = 1000
_UNITS = (
    (2.0, "twice the right number: what is counted twice?"),
    (0.5, "half the right number: two signs, two directions, or two bytes for each number?"),
    (-1.0, "the sign is the other way"),
    (8.0, "8 times the right number: bits or bytes?"),
    (1 / 8, "an eighth of the right number: bits or bytes?"),
    *((10.0 ** (3 * k), "off by a power of 1,000: look at the prefixes of the units") for k in (-3, -2, -1, 1, 2, 3)),
)  # fmt: skip
"""Mistakes that any question may meet: a factor, and its hint."""
_KIB = "off by a power of 1.024: kB, MB and GB are powers of 1,000; KiB, MiB and GiB of 1,024"
_OF_BYTES = tuple((1.024**k, _KIB) for k in (-3, -2, -1, 1, 2, 3))
_BYTES = re.compile(r"\b[kMG]?B\b|bytes?\b")


def numbers_of(unit: Unit, student: str) -> Mapping[str, Any]:
    """Return the numbers that a student is given: such that no mistake comes near to the answer or to another mistake."""
    exercise, source = exercise_of(unit), random.Random(f"{unit.name}/{student}")
    for _ in range(_MOST_TRIES):
        drawn: Mapping[str, Any] = exercise.numbers(source)
        if all(_is_clear(question) for question in exercise.questions(**drawn)):
            return drawn
    raise AssertionError(f"every draw of {unit.name} has a mistake that gives the right answer")


def _is_clear(question: PencilQuestion) -> bool:
    listed = [(question.answer, "right"), *question.mistakes]
    # Twice the tolerance, since both may be rounded; mistakes of the same hint may be near to each other.
    return all(_distance(a, b) > 2.1 * TOLERANCE for (a, x), (b, y) in combinations(listed, 2) if x != y)


def questions_of(unit: Unit, student: str) -> list[PencilQuestion]:
    """Return a student's questions."""
    questions: list[PencilQuestion] = exercise_of(unit).questions(**numbers_of(unit, student))
    return questions


def exercise_of(unit: Unit) -> Any:
    """Return the module of a unit's exercise."""
    return import_module(f"studies.coursework.{unit.name}.exercise")


def mark(question: PencilQuestion, given: object) -> Mark:
    """Return the mark of an answer: a point, half of one for a mistake that is recognised, or none."""
    if given is None:
        return Mark(question.key, 0, 1, "not answered")
    given = _number(given, question.unit)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        return Mark(question.key, 0, 1, f"answer with a number{question.unit and f', in {question.unit}'}")
    if _distance(given, question.answer) <= TOLERANCE:
        return Mark(question.key, 1, 1, "right")
    factors = _UNITS + (_OF_BYTES if _BYTES.search(f"{question.unit} {question.text}") else ())
    of_units = tuple((factor * question.answer, hint) for factor, hint in factors)
    whole = (math.floor(question.answer), math.ceil(question.answer)) if not question.unit else ()
    rounded = tuple((value, "do not round to a whole number: give three digits") for value in whole if value)
    for mistakes in (question.mistakes, rounded, of_units):
        value, hint = min(mistakes, key=lambda mistake: _distance(given, mistake[0]), default=(math.inf, ""))
        if _distance(given, value) <= TOLERANCE:
            return Mark(question.key, 0.5, 1, hint)
    size = "small" if abs(given) < abs(question.answer) else "large"
    return Mark(
        question.key,
        0,
        1,
        f"{given:g}{question.unit and f' {question.unit}'} is too {size}: write the formula down with its units",
    )


def _number(given: object, unit: str) -> object:
    """Return an answer as a number in the unit of its question, where it is a text such as ``"0.5 s"`` or ``"1,957"``."""
    if not isinstance(given, str):
        return given
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", given.strip())
    wanted = "B" if unit == "bytes" else unit
    for dimension in ("bytes", "time", "ratio"):
        with suppress(QuantityError):
            return parse_quantity(text, dimension) / unit_scale(wanted, dimension)
    with suppress(ValueError):
        return float(text.removesuffix(unit))
    return given


def _distance(given: float, wanted: float) -> float:
    return abs(given - wanted) / abs(wanted) if wanted else (0.0 if given == wanted else math.inf)
