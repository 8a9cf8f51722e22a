"""What is known of the bytes of a buffer, where instructions touch any ranges of it.

>>> writers = Ranges(["nobody"], list.copy)
>>> writers.put(0, 8, ["upload"])
>>> writers.put(4, 6, ["update"])
>>> writers.over(3, 6)
[['upload'], ['update']]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Ranges(Generic[Value]):
    """Every byte has a value; neighbouring bytes that got theirs together share one.

    - `value`: what all bytes have at first.
    - `copy`: makes the value of one part of a range that is cut in two; the other part keeps the value itself.

    Ranges are found by bisection, so a buffer of ``n`` ranges costs ``n log n`` altogether where every access touches a few of
    them.
    """

    def __init__(self, value: Value, copy: Callable[[Value], Value]) -> None:
        self._copy = copy
        self._starts = [0]
        self._values = [value]

    def over(self, begin: int, end: int) -> list[Value]:
        """Return the values of the ranges that share a byte with this one."""
        return self._values[bisect_right(self._starts, begin) - 1 : bisect_left(self._starts, end)]

    def within(self, begin: int, end: int) -> list[Value]:
        """Return the values of exactly these bytes; a range that reaches out of them is cut."""
        return self._values[self._index_at(begin) : self._index_at(end)] if begin < end else []

    def put(self, begin: int, end: int, value: Value) -> None:
        """Give bytes one value."""
        if begin < end:
            first, last = self._index_at(begin), self._index_at(end)
            self._starts[first:last] = [begin]
            self._values[first:last] = [value]

    def _index_at(self, at: int) -> int:
        """Return the number of the range that begins at a byte."""
        number = bisect_left(self._starts, at)
        if number == len(self._starts) or self._starts[number] != at:
            self._starts.insert(number, at)
            self._values.insert(number, self._copy(self._values[number - 1]))
        return number
