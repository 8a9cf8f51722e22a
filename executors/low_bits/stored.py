"""Storage of a parameter as an object: its perturbed view, update, memory, and tensors in files.

Five methods are all that the rest of the executor uses. :meth:`Stored.at` and :meth:`Stored.update` take all parameters of a group that are
stored alike: on an accelerator the launch of a kernel takes longer than its work on one of them. A pass over a group of numbers along a
perturbation of numbers needs neither: there the group is one flat tensor (:mod:`executors.steps.arithmetic`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from costmodel.formats.roundings import RoundedPerturbation
from executors.device_scalars import DeviceScalar
from executors.low_bits.packed import QValues

Uniforms = Callable[[int, int], Tensor]
"""Takes the first element of a weight and the one after the last; returns a float32 uniform number in [0, 1) for each."""


class BoundParameter(Protocol):
    """A parameter of a model, whatever it holds: :class:`executors.models.parameters.NamedTensor`."""

    @property
    def parameter(self) -> nn.Parameter:
        """What the model's code reads."""

    @property
    def layer(self) -> Any:
        """The layer that takes other weights than numbers; None where there is none."""

    @property
    def index(self) -> int:
        """Position among all trainable parameters."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it."""


class View(Protocol):
    """What a forward sees of a parameter."""

    def bind(self, bound: BoundParameter) -> None:
        """Let the model compute with this."""


class Along(NamedTuple):
    """A parameter as it is stored, and the perturbation that it is to go along."""

    bound: BoundParameter
    held: Any
    perturbation: QValues


RowStep = tuple[Tensor, tuple[int, ...]]
"""Rows of a perturbation, and the multiples of a step's ``ε`` by which they are added one after the other."""


class ChosenRows(NamedTuple):
    """Ascending numbers of some rows, where they are used and on the host."""

    there: Tensor
    on_host: Tensor


@dataclass
class UpdateCounts:
    """Counts of updated elements of quantized weights."""

    num: int = 0  # elements with a nonzero update
    unchanged: int = 0  # of these, elements that rounding left as they were
    saturated: int = 0  # of these, elements clamped at the end of the grid

    def __post_init__(self) -> None:
        self._there: Tensor | None = None

    def add(self, num: Tensor, unchanged: Tensor, saturated: Tensor) -> None:
        """Add counts; on an accelerator the sums stay there until :meth:`read`."""
        counts = torch.stack((num, unchanged, saturated))
        # To read them here would let the host wait for the device in every update.
        if counts.device.type == "cpu":
            self._take(counts)
        else:
            self._there = counts if self._there is None else self._there + counts

    def read(self) -> UpdateCounts:
        """Return the counts, with the device's sums added."""
        if self._there is not None:
            self._take(self._there)
            self._there = None
        return self

    def _take(self, counts: Tensor) -> None:
        num, unchanged, saturated = counts.tolist()
        self.num += num
        self.unchanged += unchanged
        self.saturated += saturated


@dataclass(frozen=True)
class PerturbationStep:
    """A scaled perturbation that leads to an evaluation point."""

    scale: float  # ``s·ε``, or ``ε`` where a path says each ``s``
    rounding: RoundedPerturbation | None  # how the perturbation was rounded; None where it is numbers
    # copies, copy: as :func:`executors.steps.arithmetic.gathered_several` and
    # :func:`executors.steps.arithmetic.gathered`.
    copies: Callable[[Sequence[Tensor], Sequence[Tensor], float], list[Tensor]]
    copy: Callable[[Tensor, Tensor, tuple[int, ...], float], Tensor]
    # Takes a parameter's index, and returns the rows in which the perturbation is not 0; None for all.
    rows: Callable[[int], ChosenRows | None] = lambda _: None

    @property
    def number_scale(self) -> float:
        """What the perturbation is multiplied by where it is added to numbers; rows that are not 0 are none of theirs."""
        return self.scale if self.rounding is None else self.scale / self.rounding.scale


@dataclass
class UpdateStep:
    """A step along a rounded perturbation."""

    gradient: float | DeviceScalar  # what the perturbation is multiplied by before the learning rate
    rate: float  # the learning rate
    # decay, rounded_decay: of numbers; and of what is rounded to a grid, which decays when it is rounded.
    decay: float
    rounded_decay: float
    rounding: RoundedPerturbation
    rows: Callable[[int], ChosenRows | None]  # as of :class:`PerturbationStep`
    # Takes a first and a last element and a parameter's index, and returns a float32 number in [0, 1) for each between.
    uniforms: Callable[..., Tensor]
    counted: UpdateCounts  # is added to
    add: Callable[..., None]  # as :meth:`executors.steps.arithmetic.ParamPass.update_several`
    # Where several steps are rounded together, what those before add up to, by parameter; then what they do with this
    # one.
    sums: list[Tensor] | None = None
    is_rounded: bool = True  # whether what is summed is rounded now


class Stored(ABC):
    """A parameter as it is stored at one place."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it lies."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Return it on a device, numbers in a format; itself where it is so."""

    @abstractmethod
    def bind(self, bound: BoundParameter) -> None:
        """Let the model compute with it where it lies."""

    # -- the five methods ----------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def at(cls, along: Sequence[Along], step: PerturbationStep) -> Sequence[View]:
        """Return what forwards see of several parameters at the point that a rounded perturbation leads to; they stay as they are."""

    @classmethod
    @abstractmethod
    def update(cls, along: Sequence[Along], step: UpdateStep) -> None:
        """Change several parameters by a step along a rounded perturbation."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(chunk.nbytes for chunk in self.dump().values())

    @abstractmethod
    def dump(self) -> Mapping[str, Tensor]:
        """Return the tensors that it is, by what files add to its name: nothing to that of the first."""

    @abstractmethod
    def load(self, other: Stored, name: str) -> None:
        """Take over another one's values, however these are stored; `name` is for errors."""


@dataclass(frozen=True, eq=False)
class DenseTensor(Stored):
    """Numbers."""

    values: Tensor

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.values.device

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Return them on a device in a format."""
        moved = self.values.to(device, dtype)
        return self if moved is self.values else type(self)(moved)

    def bind(self, bound: BoundParameter) -> None:
        """Let the parameter's data be these numbers."""
        if bound.layer is not None:
            bound.layer.quantized, bound.layer.side_path = None, None
        bound.parameter.data = self.values

    @classmethod
    def at(cls, along: Sequence[Along], step: PerturbationStep) -> Sequence[View]:
        """Return perturbed copies."""
        thetas, zs = [one.held.values for one in along], [one.perturbation[:] for one in along]
        return [cls(own) for own in step.copies(thetas, zs, step.number_scale)]

    def rows_at(self, rows: Tensor, path: Iterable[RowStep], step: PerturbationStep) -> Tensor:
        """Return some rows of a token table at a point: after several steps where it is itself on its way there."""
        chosen = self.values.index_select(0, rows)
        for along, scales in path:
            chosen = step.copy(chosen, along, scales, step.number_scale)
        return chosen

    @classmethod
    def update(cls, along: Sequence[Along], step: UpdateStep) -> None:
        """Add to them where they lie."""
        step.add(
            [one.held.values.view(-1) for one in along],
            [one.perturbation.view(-1) for one in along],
            gradients=[step.gradient / step.rounding.scale] * len(along),
            learning_rate=step.rate,
            weight_decay=step.decay,
            decaying=[one.bound.decays for one in along],
        )

    def dump(self) -> Mapping[str, Tensor]:
        """Return the numbers, under the parameter's own name."""
        return {"": self.values}

    def load(self, other: Stored, name: str) -> None:
        """Copy numbers, in this one's format."""
        assert isinstance(other, DenseTensor), f"{name} would have to be made of what are no numbers"
        self.values.copy_(other.values)


def nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaNs, or the lowest whole numbers, in a shape that takes no memory."""
    value = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
