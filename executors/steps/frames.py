"""The numbers and tensors of one step, as the host loop hands them to the actions."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from executors.device_scalars import DeviceScalar
from executors.models.model import Batch
from executors.models.recording_blocks import StepCache
from executors.randomness.low_rank import LazyInterval
from zosim.eval_points import EvalPoint


@dataclass(frozen=True)
class Hyperparameters:
    """Numbers that a program leaves open.

    Attributes
    ----------
    epsilon : float
        Smoothing radius ``ε``.
    weight_decay : float
        ``wd``.
    """

    epsilon: float
    weight_decay: float = 0.0


@dataclass
class MicroBatch:
    """Sequences that are forwarded together.

    Attributes
    ----------
    tensors : mapping
    num_averaged : int
        What its loss is the mean over: labels, or texts of a reward.
    positions : torch.Tensor or None
        Place of each token among the loaded rows, in the micro-batch's shape.
    cache : StepCache
        What its blocks are called with.
    """

    tensors: Batch
    num_averaged: int
    positions: Tensor | None = None
    cache: StepCache = field(default_factory=StepCache)


@dataclass
class LoadedBatch:
    """A batch where the forwards read it.

    Attributes
    ----------
    micro_batches : tuple of MicroBatch
        One, unless losses are accumulated.
    rows, rows_on_host : torch.Tensor or None
        Ascending distinct tokens of all micro-batches, where the program gathers rows; the same on the host.
    """

    micro_batches: tuple[MicroBatch, ...] = ()
    rows: Tensor | None = None
    rows_on_host: Tensor | None = None


@dataclass
class StepFrame:
    """The numbers of one step.

    Attributes
    ----------
    step : int
    seeds : tuple of int
        One per perturbation.
    learning_rate : float
    batch : mapping
    interval : LazyInterval or None
        The steps that share factors of their perturbations with this one, where there are factors.
    previous : StepFrame or None
        The step before; None for the first, and for the first after a flush.
    losses, losses_read : dict
        By evaluation point: where the forward left them, and as numbers, read with a projected gradient.
    losses_before : dict
        By evaluation point, what was read in the step before.
    gradients : dict
        Projected gradient by perturbation, a number of the host or one that may still be on its way there.
    replayed : bool
        Whether the gradients are known beforehand, so that nothing is forwarded.
    packed, gathered : torch.Tensor or None
        Losses with what each is the mean over, this rank's and all ranks'.
    """

    step: int
    seeds: tuple[int, ...] = ()
    learning_rate: float = 0.0
    batch: Batch | None = None
    interval: LazyInterval | None = None
    previous: StepFrame | None = None
    losses: dict[EvalPoint, Tensor] = field(default_factory=dict)
    losses_read: dict[EvalPoint, float | DeviceScalar] = field(default_factory=dict)
    losses_before: dict[EvalPoint, float | DeviceScalar] = field(default_factory=dict)
    gradients: dict[int, float | DeviceScalar] = field(default_factory=dict)
    replayed: bool = False
    packed: Tensor | None = None
    gathered: Tensor | None = None

    def at(self, offset: int) -> StepFrame | None:
        """Return the frame `offset` (0 or -1) steps from this one, if there is one."""
        return self if offset == 0 else self.previous
