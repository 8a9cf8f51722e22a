"""Where a loss is evaluated, as plans, programs and runs name it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator

Sign = Literal[-1, 0, 1]

Difference = Literal["central", "forward", "residual"]
"""Which two losses a projected gradient is made of: ``l(θ + εz) - l(θ - εz)``, ``l(θ + εz) - l(θ)``, or that at ``θ + εz`` less
what it was in the step before, at the weights, the perturbation and the batch of then."""

_SIGNS: dict[str, Sign] = {"+": 1, "-": -1}
_PERTURBATION = re.compile(r"q(\d+)([+-])", re.ASCII)


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """The weights ``θ + sign·ε·z``, with the perturbation ``z`` of one perturbation.

    >>> str(EvalPoint(0, 1)), str(EvalPoint(2, -1)), str(BASE)
    ('q0+', 'q2-', 'base')
    """

    perturbation: int = 0
    sign: Sign = 0  # 1 or -1; 0 for the unperturbed weights, `BASE`

    @property
    def is_perturbed(self) -> bool:
        """Whether a perturbation takes part in it."""
        return self.sign != 0

    def __str__(self) -> str:
        """Return the name that programs and messages have for it."""
        return f"q{self.perturbation}{'+' if self.sign > 0 else '-'}" if self.sign else "base"


BASE = EvalPoint()
"""The unperturbed weights."""


@cache
def parse_eval_point(text: str) -> EvalPoint:
    """Return the point that is written as `text`; the empty text is the base, too.

    Raises ValueError if it is none.
    """
    if text in ("", "base"):
        return BASE
    if match := _PERTURBATION.fullmatch(text):
        return EvalPoint(int(match[1]), _SIGNS[match[2]])
    raise ValueError(f"{text!r} is not an evaluation point, such as q0+, q0-, q1+ or base")


@lru_cache(maxsize=64)
def eval_points_of_step(num_perturbations: int, difference: Difference) -> tuple[EvalPoint, ...]:
    """Return the points of one step, in the order in which a segment visits them."""
    if difference == "central":
        return tuple(
            EvalPoint(perturbation, sign) for perturbation in range(num_perturbations) for sign in (1, -1)
        )
    base = (BASE,) if difference == "forward" else ()
    return (*base, *(EvalPoint(perturbation, 1) for perturbation in range(num_perturbations)))


def eval_points_of_perturbation(perturbation: int, difference: Difference) -> tuple[EvalPoint, ...]:
    """Return the points of a step whose losses make the projected gradient of `perturbation`, the one at ``+ε`` first."""
    others: dict[Difference, tuple[EvalPoint, ...]] = {
        "central": (EvalPoint(perturbation, -1),),
        "forward": (BASE,),
        "residual": (),
    }
    return (EvalPoint(perturbation, 1), *others[difference])


def from_text(parse: Callable[[str], object]) -> PlainValidator:
    """Return the validator of what files hold as text; anything else there is refused."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} in place of text")  # noqa: TRY004 - pydantic collects these
        return parse(value)

    return PlainValidator(read)


WrittenEvalPoint = Annotated[EvalPoint, from_text(parse_eval_point), PlainSerializer(str, return_type=str)]
"""A point that files hold as text."""
