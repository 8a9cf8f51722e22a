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
    """Numbers that a program leaves open."""

    epsilon: float  # smoothing radius ``ε``
    weight_decay: float = 0.0  # ``wd``


@dataclass
class MicroBatch:
    """Sequences that are forwarded together."""

    tensors: Batch
    num_averaged: int  # what its loss is the mean over: labels, or texts of a reward
    positions: Tensor | None = None  # place of each token among the loaded rows, in the micro-batch's shape
    cache: StepCache = field(default_factory=StepCache)  # what its blocks are called with


@dataclass
class LoadedBatch:
    """A batch where the forwards read it."""

    micro_batches: tuple[MicroBatch, ...] = ()  # one, unless losses are accumulated
    # rows, rows_on_host: ascending distinct tokens of all micro-batches, where the program gathers rows; the same on the
    # host.
    rows: Tensor | None = None
    rows_on_host: Tensor | None = None


@dataclass
class StepFrame:
    """The numbers of one step."""

    step: int
    seeds: tuple[int, ...] = ()  # one per perturbation
    learning_rate: float = 0.0
    batch: Batch | None = None
    # The steps that share factors of their perturbations with this one, where there are factors.
    interval: LazyInterval | None = None
    previous: StepFrame | None = None  # the step before; None for the first, and for the first after a flush
    # losses, losses_read: by evaluation point: where the forward left them, and as numbers, read with a projected
    # gradient.
    losses: dict[EvalPoint, Tensor] = field(default_factory=dict)
    losses_read: dict[EvalPoint, float | DeviceScalar] = field(default_factory=dict)
    # By evaluation point, what was read in the step before.
    losses_before: dict[EvalPoint, float | DeviceScalar] = field(default_factory=dict)
    # Projected gradient by perturbation, a number of the host or one that may still be on its way there.
    gradients: dict[int, float | DeviceScalar] = field(default_factory=dict)
    replayed: bool = False  # whether the gradients are known beforehand, so that nothing is forwarded
    # packed, gathered: losses with what each is the mean over, this rank's and all ranks'.
    packed: Tensor | None = None
    gathered: Tensor | None = None

    def at(self, offset: int) -> StepFrame | None:
        """Return the frame `offset` (0 or -1) steps from this one, if there is one."""
        return self if offset == 0 else self.previous
