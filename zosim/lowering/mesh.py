"""The mesh axis: losses, of which each rank knows some, become those of the whole batch, and projected gradients.

Two ranks that share the batch out. Each knows two losses of its own half, at the two signs of one perturbation; after the exchange
both know those of the whole batch, and make the same projected gradient of them:

>>> from costmodel import read_model_spec
>>> from zosim.lowering import lower
>>> from zosim.plans import Mesh, Placement, Plan
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0", "cpu0"))
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=2, seq=16, mesh=Mesh(data=2), placement=placement)
>>> for item in lower(plan).step:
...     if item.label in ("scalar", "exchange"):
...         print(
...             item.id,
...             "reads",
...             *map(str, (a.what for a in item.reads)),
...             "leaves",
...             *(a.what for a in item.writes),
...         )
losses/pack reads loss:own@q0+ loss:own@q0- leaves losses
losses/all_gather reads losses leaves losses:gathered
losses/mean reads losses:gathered leaves loss@q0+ loss@q0-
projected_gradient[q0] reads loss@q0+ loss@q0- leaves g@q0
"""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.models.model_spec import HEAD
from costmodel.work import Work
from zosim.eval_points import EvalPoint, eval_points_of_perturbation
from zosim.lowering.rank import AxisWriter, Listing, Rank
from zosim.program.contents import GATHERED_LOSSES, PACKED_LOSSES, Loss, ProjectedGradient
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Collective, Scalar

_SCALAR_BYTES = 8
# A loss and the number of labels that it is the mean over.
_LOSS_BYTES = 16

_LOSSES = "losses"
_OWN_LOSSES = "losses.own"
_BEFORE = "losses.before"
_GRADIENTS = "projected_gradients"


class Losses(AxisWriter):
    """Writes the exchange of losses and the gradients that come of them."""

    def __init__(self, rank: Rank, listing: Listing) -> None:
        super().__init__(rank, listing)
        self._numbers = {eval_point: number for number, eval_point in enumerate(rank.plan.eval_points)}

    @property
    def _is_alone(self) -> bool:
        return self._plan.placement.world_size == 1

    def left_by_head(self, eval_point: EvalPoint) -> Access:
        """Return where the head leaves its loss: at once in its place, or among those to be exchanged."""
        return self._loss(eval_point) if self._is_alone else self._own_loss(eval_point)

    def _loss(self, eval_point: EvalPoint) -> Access:
        offset = _SCALAR_BYTES * self._numbers[eval_point]
        return Access(_LOSSES, Loss(eval_point), 0, _SCALAR_BYTES, offset)

    def _own_loss(self, eval_point: EvalPoint) -> Access:
        """Return the access to this rank's loss at `eval_point`, with the labels that it is the mean over."""
        offset = _LOSS_BYTES * self._rank.number_of_own[eval_point]
        return Access(_OWN_LOSSES, Loss(eval_point, is_own=True), 0, _LOSS_BYTES, offset)

    def _packed(self) -> Access:
        return Access("losses.packed", PACKED_LOSSES, 0, _LOSS_BYTES * len(self._plan.eval_points))

    def _gathered(self) -> Access:
        size = self._packed().size_bytes * self._plan.placement.world_size
        return Access("losses.gathered", GATHERED_LOSSES, 0, size)

    def gradient(self, perturbation: int, step: int) -> Access:
        """Return the access to the projected gradient of `perturbation`."""
        return Access(
            _GRADIENTS, ProjectedGradient(perturbation), step, _SCALAR_BYTES, _SCALAR_BYTES * perturbation
        )

    def initial(self) -> Iterator[Access]:
        """Yield where losses of a step before the first would lie."""
        if self._keeps_losses:
            for perturbation in range(self._plan.estimator.num_perturbations):
                yield self._before(perturbation, -1)

    @property
    def _keeps_losses(self) -> bool:
        """Whether a projected gradient is made with a loss of the step before."""
        return self._plan.estimator.difference == "residual"

    def _before(self, perturbation: int, step: int) -> Access:
        """Return the access to the loss of `perturbation` as it is kept from one step to the next."""
        return Access(
            _BEFORE, Loss(EvalPoint(perturbation, 1)), step, _SCALAR_BYTES, _SCALAR_BYTES * perturbation
        )

    def buffers(self) -> Iterator[Buffer]:
        """Yield those of losses and of projected gradients."""
        sizes = {_LOSSES: _SCALAR_BYTES * len(self._plan.eval_points)}
        if not self._is_alone:
            sizes[_OWN_LOSSES] = _LOSS_BYTES * len(self._rank.own_eval_points)
            sizes |= {access.buffer: access.size_bytes for access in (self._packed(), self._gathered())}
        for name, size in sizes.items():
            yield Buffer(name, Space.DEVICE, size, "scalars", "float64")
        size = _SCALAR_BYTES * self._plan.estimator.num_perturbations
        for name in (_GRADIENTS, _BEFORE) if self._keeps_losses else (_GRADIENTS,):
            yield Buffer(name, Space.HOST, size, "scalars", "float64")

    def exchange_losses(self) -> None:
        """Write how losses of a part of the batch, at some of the points, become those of all."""
        if self._is_alone:
            return
        rank, packed, gathered = self._rank, self._packed(), self._gathered()
        scalar, link = Work(num_kernels=1), Work(link_bytes=gathered.size_bytes - packed.size_bytes)
        # Every rank sends as many places, those of losses that it does not have empty: messages of one length.
        own = tuple(self._own_loss(eval_point) for eval_point in rank.own_eval_points if rank.is_last_stage)
        losses = tuple(map(self._loss, self._plan.eval_points))
        pack, gather, mean = (
            Scalar("pack_losses"),
            Collective("all_gather", "world"),
            Scalar("mean_loss"),
        )
        emit = self._emit
        emit("losses/pack", pack, Stream.COMPUTE, "scalar", HEAD, own, (packed,), scalar)
        emit("losses/all_gather", gather, Stream.LINK, "exchange", HEAD, (packed,), (gathered,), link)
        # Every rank averages the same rows in the same order: projected gradients are equal to the last bit.
        emit("losses/mean", mean, Stream.COMPUTE, "scalar", HEAD, (gathered,), losses, scalar)

    def projected_gradient(self, perturbation: int) -> None:
        """Write how two losses become the projected gradient of `perturbation`; one of them may be of the step before."""
        # A residual difference has one point, and the loss of the step before in place of the other.
        eval_points = eval_points_of_perturbation(perturbation, self._plan.estimator.difference)
        name, op = f"projected_gradient[q{perturbation}]", Scalar("projected_gradient", perturbation)
        kept = [self._before(perturbation, step) for step in (-1, 0) if self._keeps_losses]
        reads, left = (*map(self._loss, eval_points), *kept[:1]), (self.gradient(perturbation, 0), *kept[1:])
        self._emit(name, op, Stream.COMPUTE, "scalar", HEAD, reads, left, Work(num_kernels=3))
