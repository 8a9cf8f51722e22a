"""Numbers that a device makes: kernels read them there at once, the host when it needs them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_Steps = tuple[tuple[Literal["*", "/"], float], ...]
"""What a number is multiplied and divided by, one after the other."""


class DeviceScalar:
    """A number on a device, which may still be on its way to the host; ``float`` waits for it.

    Its products and quotients with numbers of the host are others, rounded in float64 as the host's are.

    `index`: which of its numbers.
    """

    __slots__ = ("_index", "_reading", "_steps")

    def __init__(self, reading: ScalarReading, index: int, steps: _Steps = ()) -> None:
        self._reading, self._index, self._steps = reading, index, steps

    def __mul__(self, factor: float) -> DeviceScalar:
        return (
            self if factor == 1 else DeviceScalar(self._reading, self._index, (*self._steps, ("*", factor)))
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> DeviceScalar:
        return (
            self if divisor == 1 else DeviceScalar(self._reading, self._index, (*self._steps, ("/", divisor)))
        )

    def __float__(self) -> float:
        number = self._reading.numbers()[self._index]
        for kind, other in self._steps:
            number = number * other if kind == "*" else number / other
        return number

    def factor(self, dtype: torch.dtype) -> Tensor:
        """Return the number on its device, to multiply tensors of format `dtype` as a number of the host would.

        Returns
        -------
        torch.Tensor
            Of one element along one axis, in the format that a kernel computes in: it widens a narrow tensor, multiplies, and
            rounds once. One without axes would be rounded to `dtype` first.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._reading.factor(self._index, self._steps, wide)


class ScalarReading:
    """Numbers of a device that are copied to the host while the device goes on.

    `numbers`: one-dimensional. Its copy is issued to the current stream.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._there = numbers
        self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._here.copy_(numbers, non_blocking=True)
        self._copied = torch.Event(numbers.device)
        self._copied.record(torch.accelerator.current_stream(numbers.device))
        self._numbers: list[float] | None = None
        self._factors: dict[tuple[int, _Steps, torch.dtype], Tensor] = {}

    def scalars(self) -> list[DeviceScalar]:
        """Return the numbers, one by one."""
        return [DeviceScalar(self, index) for index in range(len(self._there))]

    def numbers(self) -> list[float]:
        """Return the numbers of the host, once they are there."""
        if self._numbers is None:
            if not self._copied.query():
                self._copied.synchronize()
            self._numbers = self._here.double().tolist()
        return self._numbers

    def factor(self, index: int, steps: _Steps, dtype: torch.dtype) -> Tensor:
        """Return one of the numbers on its device, multiplied and divided in float64, in a format."""
        key = index, steps, dtype
        if key not in self._factors:
            # It was made on one stream, and may be used on another.
            self._there.record_stream(torch.accelerator.current_stream(self._there.device))
            number = self._there[index : index + 1]
            for kind, other in steps:
                wide = number.double()
                # By a tensor: of a number of the host, a device may multiply by the reciprocal, and lose a bit.
                number = wide * other if kind == "*" else wide / torch.full_like(wide, other)
            self._factors[key] = number.to(dtype)
        return self._factors[key]
