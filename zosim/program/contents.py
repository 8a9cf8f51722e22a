"""What the bytes of a buffer hold.

Every operand of an instruction names its contents by one of these types. Files and messages have them as text, the name
before the ``@``, the point or the perturbation behind it; both forms are made here and nowhere else:

>>> (
...     str(ParamGroupWeights("block.3", EvalPoint(0, 1))),
...     str(Perturbation("block.3", perturbation=0)),
...     str(Hidden("block.3", BASE)),
... )
('block.3@q0+', 'z:block.3@q0', 'block.3:out')
>>> parse_contents("z:block.3@q0*eps")
Perturbation(param_group='block.3', perturbation=0, is_scaled=True, rounding=0)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from pydantic import PlainSerializer

from zosim.eval_points import BASE, EvalPoint, from_text, parse_eval_point


@dataclass(frozen=True, slots=True)
class ParamGroupWeights:
    """The trainable parameters of a group."""

    param_group: str
    eval_point: EvalPoint = BASE  # where they have been perturbed to
    # The last perturbation of a step whose update they have, where those of later perturbations are still missing.
    updated_to: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.param_group}@u{self.updated_to}"
            if self.updated_to is not None
            else _at(self.param_group, self.eval_point)
        )


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """The parameters of a group that are not trained."""

    param_group: str

    def __str__(self) -> str:
        return f"{self.param_group}:frozen"


@dataclass(frozen=True, slots=True)
class Perturbation:
    """The perturbation ``z`` of one index for the trainable parameters of a group."""

    param_group: str
    perturbation: int
    is_scaled: bool = False  # whether it is kept as `z·ε`, rounded: good for perturbations alone
    rounding: int = 0  # which of two independent roundings to few bits it is

    def __str__(self) -> str:
        rounding = f"#{self.rounding}" if self.rounding else ""
        return f"z:{self.param_group}@q{self.perturbation}{'*eps' if self.is_scaled else rounding}"


@dataclass(frozen=True, slots=True)
class PerturbationRows:
    """The rows of a perturbation that the batch names, where the group is a table of tokens."""

    param_group: str
    perturbation: int

    def __str__(self) -> str:
        return f"z:{self.param_group}:rows@q{self.perturbation}"


@dataclass(frozen=True, slots=True)
class PerturbationFactors:
    """The factors whose products the matrices of a perturbation are."""

    param_group: str
    perturbation: int

    def __str__(self) -> str:
        return f"z:{self.param_group}:factors@q{self.perturbation}"


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of the sequential generator before it draws a group, or after.

    That before a group is kept, with states on the way through the group, to draw the group again; that after it is where the
    sequence goes on.
    """

    param_group: str
    perturbation: int
    is_after: bool = False

    def __str__(self) -> str:
        return f"rng:{self.param_group}{'+' if self.is_after else ''}@q{self.perturbation}"


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a segment leaves for the next."""

    segment: str
    eval_point: EvalPoint

    def __str__(self) -> str:
        return _at(f"{self.segment}:out", self.eval_point)


@dataclass(frozen=True, slots=True)
class Message:
    """What a segment leaves, encoded, as it crosses a boundary; boundaries are numbered from 0, in the order of split points."""

    boundary: int
    eval_point: EvalPoint

    def __str__(self) -> str:
        return _at(f"boundary.{self.boundary}:message", self.eval_point)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss at a point."""

    eval_point: EvalPoint
    # Whether it is that of one rank's sequences, with the number of labels that it is the mean over.
    is_own: bool = False

    def __str__(self) -> str:
        return _at("loss:own" if self.is_own else "loss", self.eval_point)


@dataclass(frozen=True, slots=True)
class ProjectedGradient:
    """The projected gradient of one perturbation."""

    perturbation: int

    def __str__(self) -> str:
        return f"g@q{self.perturbation}"


@dataclass(frozen=True, slots=True)
class Named:
    """Contents that nothing looks into: reads only have to find them under the name that they were written by."""

    name: str  # with a colon, or one of `BATCH`, `PACKED_LOSSES`, `UNSET` and `FREED`
    at: str = ""  # which of several

    def __str__(self) -> str:
        return f"{self.name}@{self.at}" if self.at else self.name


BATCH = Named("batch")
"""The batch of a step."""

PACKED_LOSSES = Named("losses")
"""One rank's losses at all points side by side, those that others forward left empty."""

GATHERED_LOSSES = Named("losses:gathered")
"""The same of all ranks, in rank order."""

UPDATE_SUM = "update:sum"
"""Name of what the quantized values of a group change by, added up over the perturbations so far of a step."""

UNSET = Named("unset")
"""Memory that has just been allocated."""

FREED = Named("freed")
"""Memory that has been given back."""

Contents = (
    ParamGroupWeights
    | FrozenWeights
    | Perturbation
    | PerturbationRows
    | PerturbationFactors
    | GeneratorState
    | Hidden
    | Message
    | Loss
    | ProjectedGradient
    | Named
)


def parameters_of(what: Contents) -> ParamGroupWeights | FrozenWeights | None:
    """Return the parameters that `what` is, or is a perturbation of, as they are at the base; None for other contents."""
    if isinstance(what, ParamGroupWeights | Perturbation):
        return ParamGroupWeights(what.param_group)
    return what if isinstance(what, FrozenWeights) else None


def name_and_state(what: Contents) -> tuple[str, str]:
    """Return the text of `what` in two: what it is, and at which point, of which perturbation or in which state."""
    name, _, state = str(what).partition("@")
    return name, state


def is_scaled(what: Contents) -> bool:
    """Whether contents are a perturbation that is kept as ``z·ε``."""
    return isinstance(what, Perturbation) and what.is_scaled


def _at(name: str, eval_point: EvalPoint) -> str:
    return name if eval_point is BASE or eval_point == BASE else f"{name}@{eval_point}"


_PLAIN = {contents.name: contents for contents in (BATCH, PACKED_LOSSES, UNSET, FREED)}

_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Contents]], ...] = tuple(
    (re.compile(form, re.ASCII), make)
    for form, make in (
        (r"z:(.+):rows@q(\d+)", lambda m: PerturbationRows(m[1], int(m[2]))),
        (r"z:(.+):factors@q(\d+)", lambda m: PerturbationFactors(m[1], int(m[2]))),
        (
            r"z:(.+)@q(\d+)(\*eps)?(?:#(\d+))?",
            lambda m: Perturbation(m[1], int(m[2]), m[3] is not None, int(m[4] or 0)),
        ),
        (
            r"rng:(.+?)(\+)?@q(\d+)",
            lambda m: GeneratorState(m[1], int(m[3]), m[2] is not None),
        ),
        (r"loss(:own)?(?:@(.*))?", lambda m: Loss(parse_eval_point(m[2] or ""), m[1] is not None)),
        (r"g@q(\d+)", lambda m: ProjectedGradient(int(m[1]))),
        (r"boundary\.(\d+):message(?:@(.*))?", lambda m: Message(int(m[1]), parse_eval_point(m[2] or ""))),
        (r"(.+):out(?:@(.*))?", lambda m: Hidden(m[1], parse_eval_point(m[2] or ""))),
        (r"([^:@]+):frozen", lambda m: FrozenWeights(m[1])),
        (r"(?!(?:z|rng|loss):)([^@]*:[^@]*)(?:@(.*))?", lambda m: Named(m[1], m[2] or "")),
        (r"([^@:]+)@u(\d+)", lambda m: ParamGroupWeights(m[1], BASE, int(m[2]))),
        (r"([^@:]+)(?:@(.*))?", lambda m: ParamGroupWeights(m[1], parse_eval_point(m[2] or ""))),
    )
)


@cache
def parse_contents(text: str) -> Contents:
    """Return the contents that are written as `text`.

    Raises ValueError if nothing is written so.
    """
    if text in _PLAIN:
        return _PLAIN[text]
    for form, make in _FORMS:
        if match := form.fullmatch(text):
            return make(match)
    raise ValueError(f"{text!r} names no contents, as block.3@q0+, z:block.3@q0 and block.3:out do")


WrittenContents = Annotated[Contents, from_text(parse_contents), PlainSerializer(str, return_type=str)]
"""Contents that files hold as text."""
