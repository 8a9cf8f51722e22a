"""How many updates end in nothing, because the format that a weight is kept in is too coarse for them.

An update of size 1e-6 on a weight of size 0.02 is less than half of the distance between neighbouring float16 numbers: the
sum rounds back to where it was. This is counted where it happens, on a sample of elements, while a run trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodel.formats import FORMATS
from executors.device_scalars import DeviceScalar
from executors.formats import TORCH_DTYPES
from executors.steps.buffers import BufferStore, PlacedSection
from executors.steps.frames import StepFrame
from executors.steps.ops.operands import of_group, only
from zosim.program import Program
from zosim.program.contents import ParamGroupWeights
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Update

SAMPLED_ELEMENTS = 8192
"""Elements looked at per update of a group, on average: a share is then known to a percent after one step."""

Action = Callable[[StepFrame], None]


@dataclass(frozen=True)
class UpdateLoss:
    """Updates of single weights that were computed, and left no trace."""

    # storage, transfer: formats that weights are updated in, and that offloaded ones are kept in.
    storage: str
    transfer: str
    num_sampled: int  # updates of single elements that were looked at
    lost_in_storage: float  # share that did not change the weight at all
    lost_in_transfer: float  # share that did change it, but not once it was rounded to the transfer format

    @property
    def lost(self) -> float:
        """Share that was lost in either way."""
        return self.lost_in_storage + self.lost_in_transfer


class UpdateWatch:
    """Counts lost updates of one program on one device.

    Looks at the parameter groups that are kept in the narrowest format. Every update instruction counts: with several
    perturbations a step updates a weight several times. Updates by a projected gradient or a learning rate of 0 do not
    count. An offloaded weight has just been uploaded, so what it is compared with is a number of the transfer
    format; the drift of the restore comes on top and is not counted.
    """

    def __init__(self, program: Program, store: BufferStore, device: torch.device) -> None:
        self._program = program
        self._store = store
        self._num_sampled = 0
        # Of updates by numbers that the host does not know yet.
        self._num_sampled_there = torch.zeros(1, dtype=torch.int64, device=device)
        # Unchanged in the format of updates, and changed there alone.
        self._lost = torch.zeros(2, dtype=torch.int64, device=device)
        self._spans: dict[Access, list[tuple[int, int]]] = {}
        formats = {
            access.what.param_group: program.buffer(access.buffer).dtype
            for access in program.initial
            if isinstance(access.what, ParamGroupWeights)
            and not any(tensor.layer for tensor in store.trainable(access.what.param_group).tensors)
        }
        # None where all groups hold quantized values, of which others keep count.
        self._kept_in = min(formats.values(), key=lambda name: FORMATS[name].bits, default="")
        self._updated_in = self._kept_in
        groups = [store.trainable(group) for group, kept_in in formats.items() if kept_in == self._kept_in]
        self._groups = {section.what.param_group for section in groups}
        num_elements = sum(tensor.num_elements for section in groups for tensor in section.tensors)
        # An odd stride does not stay in one column of a matrix.
        self._stride = (num_elements // (SAMPLED_ELEMENTS * max(1, len(groups)))) | 1

    def watched(self, instruction: Instruction, action: Action) -> Action:
        """Return `action`, its lost updates counted if it is an update."""
        op = instruction.op
        if not isinstance(op, Update) or op.param_group not in self._groups:
            return action
        access = only(of_group(op.param_group, ParamGroupWeights, instruction.writes), "write of weights")
        self._updated_in = self._program.buffer(access.buffer).dtype

        def update(frame: StepFrame) -> None:
            source = frame.at(op.step)
            gradient = (
                0.0 if source is None or not source.learning_rate else source.gradients[op.perturbation]
            )
            # Nothing was to change, so nothing is lost.
            if gradient == 0:
                action(frame)
                return
            before = self._sample(access)
            action(frame)
            self._count(before, self._sample(access), gradient)

        return update

    def _sample(self, access: Access) -> Tensor:
        """Return copies of some elements of a group, evenly spread."""
        flat = self._store.placed(access).flat
        spans = self._spans.get(access)
        if spans is None:
            spans = self._spans[access] = _without_gaps(self._store.placed(access))
        return torch.cat([flat[begin : end : self._stride] for begin, end in spans])

    def _count(self, before: Tensor, after: Tensor, gradient: float | DeviceScalar) -> None:
        is_counted: Tensor | int = 1
        if isinstance(gradient, DeviceScalar):
            # Asked on the device: reading the gradient would make the host wait in every step.
            is_counted = gradient.factor(torch.float64) != 0
            self._num_sampled_there += is_counted * after.numel()
        else:
            self._num_sampled += after.numel()
        is_lost = after == before
        self._lost[:1] += is_lost.sum() * is_counted
        if self._kept_in != self._updated_in:
            kept_in = TORCH_DTYPES[self._kept_in]
            is_lost = (after != before) & (after.to(kept_in) == before.to(kept_in))
            self._lost[1:] += is_lost.sum() * is_counted

    def result(self) -> UpdateLoss | None:
        """Return what was counted so far; None where no update was."""
        num = self._num_sampled + int(self._num_sampled_there)
        if not num:
            return None
        unchanged, rounded_away = self._lost.tolist()
        return UpdateLoss(self._updated_in, self._kept_in, num, unchanged / num, rounded_away / num)


def _without_gaps(placed: PlacedSection) -> list[tuple[int, int]]:
    """Return where tensors that lie behind one another begin and end."""
    runs: list[tuple[int, int]] = []
    for view in placed.views:
        begin = int(view.storage_offset() - placed.flat.storage_offset())
        end = begin + view.numel()
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs
