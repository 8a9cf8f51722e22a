"""Expressions over printed figures: arithmetic, a few functions, and comparisons that are judged row by row.

An expression is Python's grammar without its names: figures, ``+ - * /``, comparisons and the functions of :data:`FORMS`. It is
walked node by node and never evaluated by Python. A figure stands for all numbers that round to it, so ``==`` asks whether one number rounds to
both sides, ``!=`` whether none does; ``<`` and ``<=`` compare figures as they are printed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from proofs_checks.exact import ROUNDING, is_true
from proofs_checks.outcomes import Outcome
from proofs_checks.printed.cells import PrintedError
from topology.validation import did_you_mean

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Figures:
    """Numbers of some rows, or one alone."""

    # array of shape (3, rows) or (3,): as printed, and the least and the most that they are before cells are rounded.
    numbers: Numbers
    rows: tuple[str, ...] = ()  # empty where it is one number

    @classmethod
    def exact(cls, value: float) -> Self:
        """Return a number that nobody rounded."""
        return cls(np.full(3, float(value)))

    @classmethod
    def rounded(cls, texts: str | Sequence[str], rows: tuple[str, ...] = ()) -> Self:
        """Return figures as they are written, each to its last place. Raises PrintedError if one is no number."""
        value, half = np.array([_number(text) for text in ([texts] if isinstance(texts, str) else texts)]).T
        numbers = np.stack([value, value - half, value + half])
        return cls(numbers[:, 0] if isinstance(texts, str) else numbers, rows)

    @property
    def columns(self) -> Numbers:
        """The numbers with an axis of rows, of one where it is a number alone."""
        return self.numbers if self.rows else self.numbers[:, None]

    def of(self, rows: Sequence[str]) -> Self:
        """Return the figures of these rows, one row's as a number alone."""
        at = [self.rows.index(row) for row in rows]
        if len(at) == 1:
            return replace(self, numbers=self.numbers[:, at[0]], rows=())
        return replace(self, numbers=self.numbers[:, at], rows=tuple(rows))


def _number(text: str) -> tuple[float, float]:
    """Return a written number, and half of its last place."""
    try:
        number = Decimal(text)
        half = Decimal((0, (5,), int(number.as_tuple().exponent) - 1))
    except (InvalidOperation, ValueError):
        raise PrintedError(f"{text!r} is not a number") from None
    return float(number), float(half)


def judged(expression: str, columns: Mapping[str, Figures]) -> dict[str, Outcome]:
    """Return whether a comparison is so, row by row; by the row and the comparison in words.

    Raises PrintedError if it is none, or names what is not there.

    >>> ours = Figures.rounded(["84.5", "92.3"], ("OPT-125M", "OPT-1.3B"))
    >>> theirs = Figures.rounded(["87.5", "91.7"], ("OPT-125M", "OPT-1.3B"))
    >>> {
    ...     row: outcome.passed
    ...     for row, outcome in judged("ours > theirs", {"ours": ours, "theirs": theirs}).items()
    ... }
    {'OPT-125M: ours > theirs': False, 'OPT-1.3B: ours > theirs': True}
    >>> [
    ...     outcome.passed
    ...     for outcome in judged(
    ...         "(theirs - ours)['OPT-125M'] == 3.0", {"ours": ours, "theirs": theirs}
    ...     ).values()
    ... ]
    [True]
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        raise PrintedError(f"`{expression}` is not an expression") from None
    reader = _Reader(expression.strip(), columns)
    if not (found := reader.truths(tree)):
        raise reader.wrong("it must compare something")
    return {f"{row}: {expression}" if row else expression: outcome for row, outcome in found.items()}


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_REDUCTIONS: Mapping[str, Callable[..., Numbers]] = {
    "min": np.min,
    "max": np.max,
    "mean": np.mean,
    "sum": np.sum,
}
FORMS = {
    "min(x), max(x), mean(x), sum(x)": "of all rows; of several columns, row by row",
    "count(x > y)": "in how many rows that is so",
    "abs(x)": "without the sign",
    "cut(x, 2)": "cut off after two places",
    "least(x), most(x)": "the least and the most that it was before its cells were rounded",
    "falling(x)": "each row below the one before",
    "whole(x)": "a whole number rounds to it",
    'x["row"], but(x, "row")': "of these rows, of all but these; * stands for any text",
}
"""What an expression may use besides columns, numbers, + - * / and comparisons."""


@dataclass(frozen=True)
class _Reader:
    """An expression and its columns: :meth:`figures` and :meth:`truths` walk its nodes."""

    expression: str
    columns: Mapping[str, Figures]

    def figures(self, node: ast.expr) -> Figures:
        """Return the value of an arithmetic expression."""
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return Figures.exact(number)
            case ast.Name(id=name) if name in self.columns:
                return self.columns[name]
            case ast.Name(id=name):
                raise self.wrong(f"unknown column {name!r}", did_you_mean(name, list(self.columns)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.figures(operand)
                return replace(value, numbers=-value.numbers[[0, 2, 1]])
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                return self.combined(_ARITHMETIC[type(op)], self.figures(node.left), self.figures(node.right))
            case ast.Subscript(value=value, slice=slice_):
                return (of := self.figures(value)).of(self.chosen(of.rows, slice_))
            case ast.Call(func=ast.Name(id=name), args=[first, *more], keywords=[]):
                return self.called(name, first, more)
        raise self.wrong(f"`{ast.unparse(node)}` is not a number")

    def called(self, name: str, first: ast.expr, more: list[ast.expr]) -> Figures:
        match name, more:
            case (("min" | "max" | "mean" | "sum"), []):
                value = self.figures(first)
                if not value.rows:
                    raise self.wrong(f"`{ast.unparse(first)}` has no rows")
                return Figures(_REDUCTIONS[name](value.numbers, axis=1))
            case (("min" | "max" | "mean" | "sum"), _):
                parts = [self.figures(each) for each in (first, *more)]
                self.rows(*parts)
                together = np.stack(np.broadcast_arrays(*(part.columns for part in parts)))
                return self.made(_REDUCTIONS[name](together, axis=0), *parts)
            case "count", []:
                return Figures.exact(sum(outcome.passed for outcome in self.truths(first).values()))
            case "abs", []:
                value = self.figures(first)
                ends = np.sort(np.abs(value.numbers[1:]), axis=0)
                ends[0] = np.where(np.prod(np.sign(value.numbers[1:]), axis=0) < 0, 0.0, ends[0])
                return replace(value, numbers=np.stack([np.abs(value.numbers[0]), *ends]))
            case "cut", [ast.Constant(value=int() as places)]:
                value = self.figures(first)
                return replace(value, numbers=np.floor(value.numbers * 10**places + ROUNDING) / 10**places)
            case (("least" | "most"), []):
                value = self.figures(first)
                return replace(value, numbers=value.numbers[[1, 1, 1] if name == "least" else [2, 2, 2]])
            case "but", [_, *_]:
                value = self.figures(first)
                return value.of(self.others(value.rows, more))
        raise self.wrong(f"`{name}` does not take {1 + len(more)} argument{'s' if more else ''}")

    def combined(self, act: Callable[[Any, Any], Any], left: Figures, right: Figures) -> Figures:
        (first, *one), (second, *other) = left.columns, right.columns
        if act is operator.truediv and np.any((other[0] <= 0) & (other[1] >= 0)):
            raise self.wrong("the divisor may be 0")
        self.rows(left, right)
        ends = [act(a, b) for a in one for b in other]
        numbers = np.stack([act(first, second), np.minimum.reduce(ends), np.maximum.reduce(ends)])
        return self.made(numbers, left, right)

    def made(self, numbers: Numbers, *of: Figures) -> Figures:
        """Return what was made of figures that have their rows in common."""
        rows = self.rows(*of)
        return Figures(numbers if rows else numbers[:, 0], rows)

    def truths(self, node: ast.expr) -> dict[str, Outcome]:
        """Return whether a comparison is so, by row; under an empty name where it is of single numbers."""
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                found: dict[str, Outcome] = {}
                for first, op, second in zip((left, *others), ops, others, strict=False):
                    if type(op) not in _COMPARISONS:
                        raise self.wrong(f"`{ast.unparse(node)}` uses an unknown comparison")
                    for row, outcome in self.compared(first, _COMPARISONS[type(op)], second):
                        found[row] = outcome if row not in found else _both(found[row], outcome)
                return found
            case ast.Subscript(value=value, slice=slice_):
                found = self.truths(value)
                return {row: found[row] for row in self.chosen(tuple(found), slice_)}
            case ast.Call(func=ast.Name(id="but"), args=[value, *rows]) if rows:
                found = self.truths(value)
                return {row: found[row] for row in self.others(tuple(found), rows)}
            case ast.Call(func=ast.Name(id="falling"), args=[value]):
                x = self.figures(value)
                pairs = zip(x.rows[1:], x.columns[0, :-1], x.columns[0, 1:], strict=True)
                return {row: is_true(b < a, what=f"{b:.6g} after {a:.6g}") for row, a, b in pairs}
            case ast.Call(func=ast.Name(id="whole"), args=[value]):
                x = self.figures(value)
                ends = zip(x.rows or ("",), *x.columns[1:], strict=True)
                return {
                    row: is_true(np.ceil(low) <= np.floor(high), what=f"whole between {low:.6g} and {high:.6g}")
                    for row, low, high in ends
                }  # fmt: skip
        raise self.wrong(f"`{ast.unparse(node)}` is not a comparison")

    def compared(self, left: ast.expr, sign: str, right: ast.expr) -> list[tuple[str, Outcome]]:
        sides = [self.side(each, sign) for each in (left, right)]
        rows = self.rows(*sides) or ("",)
        parts = [np.broadcast_to(side.columns, (3, len(rows))) for side in sides]
        name = f"{ast.unparse(left)} {sign} {ast.unparse(right)}"
        return [
            (row, _compared(name, sign, *map(float, (*one, *other))))
            for row, one, other in zip(rows, parts[0].T, parts[1].T, strict=True)
        ]

    def side(self, node: ast.expr, sign: str) -> Figures:
        """Return a side of a comparison; a number that is compared for agreement is a figure with a last place."""
        number = node.operand if isinstance(node, ast.UnaryOp) else node
        if isinstance(number, ast.Constant) and sign in ("==", "!="):
            return Figures.rounded(ast.get_source_segment(self.expression, node) or "")
        return self.figures(node)

    def rows(self, *figures: Figures) -> tuple[str, ...]:
        """Return the rows that figures have in common."""
        found = {each.rows for each in figures if each.rows}
        if len(found) > 1:
            raise self.wrong("its columns have different rows")
        return found.pop() if found else ()

    def chosen(self, rows: tuple[str, ...], node: ast.expr) -> list[str]:
        """Return the rows that a subscript names, in their order."""
        patterns = node.elts if isinstance(node, ast.Tuple) else [node]
        wanted: set[str] = set()
        for each in patterns:
            if not (isinstance(each, ast.Constant) and isinstance(each.value, str)):
                raise self.wrong(f"`{ast.unparse(each)}` must be the name of a row in quotes")
            pattern = ".*".join(map(re.escape, each.value.split("*")))
            found = {row for row in rows if re.fullmatch(pattern, row)}
            if not found:
                known = did_you_mean(each.value, [row for row in rows if row])
                raise self.wrong(f"unknown row {each.value!r}", known)
            wanted |= found
        return [row for row in rows if row in wanted]

    def others(self, rows: tuple[str, ...], nodes: list[ast.expr]) -> list[str]:
        """Return the rows that are not named."""
        left_out = self.chosen(rows, ast.Tuple(elts=nodes))
        if len(left_out) == len(rows):
            raise self.wrong("it excludes every row")
        return [row for row in rows if row not in left_out]

    def wrong(self, what: str, hint: str | None = f"expressions may use {', '.join(FORMS)}") -> PrintedError:
        return PrintedError(f"`{self.expression}`: {what}", hint=hint)


def _both(first: Outcome, second: Outcome) -> Outcome:
    """Return whether two comparisons of one row are so."""
    worse = second if first.passed else first
    return replace(worse, details=(*first.details, *second.details), bounds=(*first.bounds, *second.bounds))


def _compared(
    name: str, sign: str, left: float, low: float, high: float, right: float, least: float, most: float
) -> Outcome:
    """Return whether a comparison of two figures is so. A bound says how near the figure comes to it."""
    slack = ROUNDING * max(abs(left), abs(right))
    outcome = is_true(
        {
            "<": left < right - slack,
            ">": left > right + slack,
            "<=": left <= right + slack,
            ">=": left >= right - slack,
            "==": (agree := _agree(low, high, least, most)),
            "!=": not agree,
        }[sign],
        what=f"{left:.6g} {sign} {right:.6g}",
    )
    if sign not in ("<=", ">="):
        return outcome
    measured, bound = (left, right) if sign == "<=" else (right, left)
    return replace(outcome, bounds=((name, max(measured, 0.0) / bound),)) if bound > 0 else outcome


def _agree(low: float, high: float, least: float, most: float) -> bool:
    """Return whether one number rounds to both: their ranges overlap, and do not only touch; two exact numbers are equal."""
    slack = ROUNDING * max(abs(high), abs(most))
    exact = high - low <= slack and most - least <= slack
    return abs(low - least) <= slack if exact else low < most - slack and least < high - slack
