"""What ranks exchange in a program: shares of parameters, and losses that become those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from costmodel.devices.collectives import COLLECTIVES
from executors.steps.arithmetic import projected_gradient
from executors.steps.frames import StepFrame
from executors.steps.micro_batches import accumulated
from executors.steps.ops.context import Context, Ranks
from executors.steps.ops.operands import Action, Unfit
from topology.errors import ProgramError, RunError
from zosim.eval_points import BASE, EvalPoint
from zosim.program.contents import Loss
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Collective, Scalar

Exchange = Callable[[str, Tensor, Tensor, str], None]
"""Given a group, what is to be filled, this rank's own, and the name of the instruction: a method of :class:`Ranks`."""

_ELSEWHERE = -1.0
"""Stands for what a loss is the mean over, of one that another rank forwards."""


class Exchanges:
    """Makes actions out of a program's collectives, and of the scalars around them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._program = context.program
        self._store = context.store

    def collective(self, instruction: Instruction) -> Action:
        """Return what exchanges the operands of `instruction`.

        Raises ProgramError if there is nobody to exchange with, or the operands do not fit.
        """
        op = instruction.op
        assert isinstance(op, Collective)
        ranks = self._context.ranks
        if ranks is None:
            raise ProgramError(
                f"program {self._program.name}: {instruction.id} takes {self._program.process_groups[op.process_group]} ranks",
                hint="run it as a rank of a run with all ranks",
            )
        pairs = list(zip(instruction.reads, instruction.writes, strict=True))
        if all(self._store.is_weights(access) for pair in pairs for access in pair):
            return self._gather_shares(ranks, instruction, op.process_group, pairs)
        if len(pairs) != 1:
            raise ProgramError(f"program {self._program.name}: {instruction.id} gathers more than losses")
        return self._exchange_losses(ranks, instruction, op)

    def _gather_shares(
        self, ranks: Ranks, instruction: Instruction, group: str, pairs: Sequence[tuple[Access, Access]]
    ) -> Action:
        for own, whole in pairs:
            if own.share != group or (own.buffer, own.offset_bytes) != (whole.buffer, whole.offset_bytes):
                raise ProgramError(
                    f"program {self._program.name}: {instruction.id} gathers {own.describe()} into "
                    f"{whole.describe()} of {whole.buffer}",
                    hint="shares must be gathered in place, among the ranks that hold them",
                )

        def gather(_frame: StepFrame) -> None:
            for own, whole in pairs:
                ranks.all_gather(group, self._store.raw(whole), self._store.raw(own), instruction.id)

        return gather

    def _exchange_losses(self, ranks: Ranks, instruction: Instruction, op: Collective) -> Action:
        run: Exchange = getattr(ranks, op.function)
        # What gathers brings every member's losses side by side, a sum has one row.
        num_shares = self._program.process_groups[op.process_group] if COLLECTIVES[op.function].gathers else 1

        def exchange(frame: StepFrame) -> None:
            if frame.replayed:
                return
            assert frame.packed is not None
            frame.gathered = frame.packed.new_zeros((num_shares, *frame.packed.shape))
            run(op.process_group, frame.gathered.view(-1), frame.packed.view(-1), instruction.id)

        return exchange

    def scalar(self, instruction: Instruction) -> Action:
        """Return what packs this rank's losses, makes one loss of all ranks' at each point, or a projected gradient of two."""
        op = instruction.op
        assert isinstance(op, Scalar)
        makers = {
            "pack_losses": self._pack,
            "mean_loss": self._mean,
            "projected_gradient": self._projected_gradient,
        }
        return makers[op.function](instruction)

    def _projected_gradient(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Scalar)
        eval_points = _eval_points_of(instruction.reads)
        plus, minus = EvalPoint(op.perturbation, 1), EvalPoint(op.perturbation, -1)
        if set(eval_points) not in ({plus, minus}, {plus, BASE}, {plus}) or len(eval_points) != 2:
            names = ", ".join(map(str, eval_points)) or "no point"
            raise Unfit(f"makes a projected gradient of losses at {names}")
        other = minus if minus in eval_points else BASE
        epsilon, backend = self._context.hyperparameters.epsilon, self._context.backend
        if set(eval_points) == {plus}:
            return self._residual(op.perturbation, plus, epsilon)

        def scalar(frame: StepFrame) -> None:
            if frame.replayed:
                return
            losses, read = frame.losses, frame.losses_read
            gradient = projected_gradient(losses[plus], losses[other], epsilon, central=other == minus)
            # One reading: each is a copy to the host.
            scalars = [gradient, losses[plus], losses[other]]
            if len({scalar.dtype for scalar in scalars}) > 1:
                scalars = [scalar.double() for scalar in scalars]
            frame.gradients[op.perturbation], read[plus], read[other] = backend.read(torch.stack(scalars))

        return scalar

    def _residual(self, perturbation: int, eval_point: EvalPoint, epsilon: float) -> Action:
        """Return what makes a projected gradient of a loss and that of the step before; in the first step it is 0."""

        def scalar(frame: StepFrame) -> None:
            if frame.replayed:
                return
            # Read at once, and the host waits: the loss is logged, and a resumed run begins with it.
            loss = frame.losses_read[eval_point] = frame.losses[eval_point].double().item()
            # The first step has no step before: measured against itself, its gradient is 0.
            before = float(frame.losses_before.setdefault(eval_point, loss))
            frame.gradients[perturbation] = (loss - before) / epsilon

        return scalar

    def _eval_points(self) -> list[EvalPoint]:
        """Return the evaluation points of all ranks, in the order in which their losses lie side by side."""
        for instruction in self._program.step:
            if isinstance(instruction.op, Scalar) and instruction.op.function == "mean_loss":
                return _eval_points_of(instruction.writes)
        raise ProgramError(f"program {self._program.name} packs losses but does not average them")

    def _pack(self, instruction: Instruction) -> Action:
        indices = {eval_point: index for index, eval_point in enumerate(self._eval_points())}
        own = _eval_points_of(instruction.reads)

        def pack(frame: StepFrame) -> None:
            if frame.replayed:
                return
            num_averaged = sum(micro_batch.num_averaged for micro_batch in self._context.loaded.micro_batches)
            # Numbers of the host: by gloo a rank that is gone can be named. The host waits for its own losses here.
            # A point that another rank forwards is marked, so that nobody takes its 0 for a loss.
            # In float64, which holds a loss of any format exactly.
            packed = torch.tensor([[0.0, _ELSEWHERE]], dtype=torch.float64).repeat(len(indices), 1)
            losses = (
                torch.stack([frame.losses[eval_point].double() for eval_point in own]).cpu() if own else ()
            )
            for eval_point, loss in zip(own, losses, strict=True):
                packed[indices[eval_point], 0], packed[indices[eval_point], 1] = loss, num_averaged
            frame.packed = packed

        return pack

    def _mean(self, instruction: Instruction) -> Action:
        eval_points = _eval_points_of(instruction.writes)

        def mean(frame: StepFrame) -> None:
            if frame.replayed:
                return
            assert frame.gathered is not None
            # A rank without the head has no loss of its own to take the format from.
            dtype = self._context.remote_loss_dtype or next(iter(frame.losses.values())).dtype
            for index, eval_point in enumerate(eval_points):
                mean_loss = _mean_of(frame.gathered[:, index], dtype, self._context.backend.device)
                if mean_loss is None:
                    message = f"no rank computed {eval_point} in step {frame.step}"
                    raise RunError(message, hint="run every rank on the program of its own role")
                frame.losses[eval_point] = mean_loss

        return mean


def _eval_points_of(losses: Sequence[Access]) -> list[EvalPoint]:
    return [access.what.eval_point for access in losses if isinstance(access.what, Loss)]


def _mean_of(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the mean over all labels (or texts) of the ranks' losses of one point; None if there are none.

    - `rows`: by rank, a loss and the number that it is the mean over, negative where another rank forwards the point.
    - `dtype`: format that ranks compute losses in. The only loss of a point keeps it, so that the projected gradient is that of a
      rank alone to the last bit.
    """
    counts = [int(number) for number in rows[:, 1].tolist()]
    holders = [rank for rank, number in enumerate(counts) if number >= 0]
    if not holders:
        return None
    if len(holders) == 1:
        return rows[holders[0], 0].to(device, dtype, non_blocking=True)
    losses = [rows[rank, 0].to(device, non_blocking=True) for rank in holders]
    return accumulated(losses, [counts[rank] for rank in holders])
