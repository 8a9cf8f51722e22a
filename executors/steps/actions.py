"""What each operation does: instructions resolved into actions, by operation and operands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

import torch
from torch import Tensor, nn

from costmodel.model_spec import EMBED, HEAD
from executors.models.halves import Handed
from executors.models.model import Batch, CutModel
from executors.randomness.drawing import Drawing
from executors.ranks.exchanges import Exchange, Exchanges
from executors.steps.arithmetic import gathered, projected_gradient
from executors.steps.buffers import BufferStore, Placed, bind, needs_rows
from executors.steps.frames import Hyperparameters, LoadedBatch, MicroBatch, StepFrame
from executors.steps.micro_batches import accumulated, micro_batches
from executors.steps.operands import Action, Unfit, one, place_of
from executors.steps.stages import Pipeline, Stages
from executors.steps.streams import Backend
from executors.steps.sweeping import Sweeping
from executors.threads import DrawThreads
from topology.errors import ProgramError
from zosim.instructions import Access, Instruction, Part
from zosim.operations import Allocate, Cast, Forward, Free, Perturb, Scalar
from zosim.program import Program


class Actions:
    """Makes actions out of one program's instructions, and holds what they share.

    Parameters
    ----------
    program : Program
    cut : CutModel
    store : BufferStore
    hyperparameters : Hyperparameters
    backend : Backend
    num_draw_threads : int
    num_micro_batches : int
    exchange : Ranks or None
        The other ranks, where the program takes any.
    elsewhere : torch.dtype or None
        Format of losses, where only other ranks compute them.
    """

    def __init__(
        self,
        program: Program,
        cut: CutModel,
        store: BufferStore,
        hyperparameters: Hyperparameters,
        backend: Backend,
        *,
        num_draw_threads: int,
        num_micro_batches: int = 1,
        exchange: Ranks | None = None,
        elsewhere: torch.dtype | None = None,
    ) -> None:
        self.program = program
        self.cut = cut
        self.store = store
        self.hyperparameters = hyperparameters
        self.backend = backend
        trainable = [t.num_elements for t in cut.tensors if t.trainable]
        self._threads = DrawThreads(num_draw_threads)
        self._drawing = Drawing(
            store, backend.device, trainable, self._rows, hyperparameters.epsilon, self._threads
        )
        self._sweeping = Sweeping(program, store, hyperparameters)
        self._bound: dict[str, Placed] = {}
        self.loaded = LoadedBatch()
        self._exchanges = Exchanges(program, store, exchange, backend.device, lambda: self.loaded, elsewhere)
        self.stages = Stages(program, cut, store, exchange, backend, lambda: self.loaded, num_micro_batches)
        self._num_micro_batches = num_micro_batches
        self._gathers = any(needs_rows(instruction.op) for _, instruction in program.instructions())
        self._perturbations = _perturbations_behind(program)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    @property
    def num_queries(self) -> int:
        """Directions per step."""
        return self._sweeping.num_queries

    def _rows(self) -> Tensor:
        assert self.loaded.rows is not None
        return self.loaded.rows

    def of(self, part: Part, instruction: Instruction) -> Action:
        """Return what does `instruction`.

        Raises
        ------
        ProgramError
            If its operands do not fit its operation.
        """
        makers: dict[str, Callable[[Instruction], Action]] = {
            "load": self._load,
            "copy": self._copy,
            "cast": self._cast,
            "allocate": self._allocate,
            "free": self._free,
            "draw": self._drawing.of,
            "perturb": self._sweeping.perturb,
            "update": self._sweeping.update,
            "forward": self._forward,
            "scalar": self._scalar,
            "collective": self._exchanges.collective,
            "encode": self.stages.encode,
            "decode": self.stages.decode,
            "send": self.stages.send,
            "recv": self.stages.recv,
        }
        try:
            return makers[instruction.op.kind](instruction)
        except Unfit as unfit:
            raise ProgramError(
                f"program {self.program.name}: {part}/{instruction.id} {unfit}",
                hint="correct its operands, or lower the plan again",
            ) from None

    def bind(self, places: Sequence[Placed]) -> None:
        """Let parameters be what lies at these places, where they are not already."""
        for placed in places:
            if self._bound.get(placed.part.name) is not placed:
                bind([placed])
                self._bound[placed.part.name] = placed

    def _unbind(self, places: Sequence[Placed]) -> None:
        for placed in places:
            if self._bound.get(placed.part.name) is placed:
                del self._bound[placed.part.name]
                for tensor in placed.part.tensors:
                    tensor.parameter.data = placed.flat.new_empty(0)

    def _load(self, instruction: Instruction) -> Action:
        one(instruction.writes, "write of a batch")

        def load(frame: StepFrame) -> None:
            if frame.replayed:  # no row is read, but drawing none still walks the generator past the table
                none = torch.empty(0, dtype=torch.long, device=self.backend.device)
                self.loaded = LoadedBatch(rows=none)
                return
            assert frame.batch is not None
            rows = positions = None
            if self._gathers:
                rows, positions = torch.unique(frame.batch["input_ids"], return_inverse=True)
            parts = micro_batches(frame.batch, positions, self._num_micro_batches)
            self.loaded = LoadedBatch(
                tuple(self._on_device(part) for part in parts),
                None if rows is None else self._to_device(rows),
            )

        return load

    def _on_device(self, part: MicroBatch) -> MicroBatch:
        return MicroBatch(
            {name: self._to_device(tensor) for name, tensor in part.tensors.items()},
            part.num_labels,
            None if part.positions is None else self._to_device(part.positions),
        )

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.backend.device, non_blocking=True)

    def _copy(self, instruction: Instruction) -> Action:
        pairs = self._pairs(instruction)
        for source, target in pairs:
            if source.size_bytes != target.size_bytes:
                raise Unfit(f"copies {source.size_bytes} bytes to {target.size_bytes}")

        def copy(_frame: StepFrame) -> None:
            for source, target in pairs:
                self.backend.copy(self.store.raw(target), self.store.raw(source))

        return copy

    def _cast(self, instruction: Instruction) -> Action:
        pairs = self._pairs(instruction)

        def cast(_frame: StepFrame) -> None:
            for source, target in pairs:
                views = zip(self.store.placed(target).views, self.store.placed(source).views, strict=True)
                for to, of in views:
                    to.copy_(of)

        return cast

    def _pairs(self, instruction: Instruction) -> list[tuple[Access, Access]]:
        reads, writes = instruction.reads, instruction.writes
        if len(reads) != len(writes) or not reads:
            raise Unfit(f"moves {len(reads)} contents into {len(writes)} places")
        for source, target in zip(reads, writes, strict=True):
            if not self.store.is_weights(source) or source.what != target.what:
                raise Unfit(
                    f"moves {source.what} into {target.what}; only parameters are moved, under their name"
                )
        return list(zip(reads, writes, strict=True))

    def _allocate(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Allocate)
        return lambda _frame: self.store.allocate(op.buffer)

    def _free(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Free)

        def free(_frame: StepFrame) -> None:
            self._unbind(self.store.free(op.buffer))
            self.backend.release()

        return free

    # -- forwards ----------------------------------------------------------------------------------------------

    def _forward(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Forward)
        if op.segment not in self.cut.segments:
            raise Unfit(f"runs {op.segment}, which is not a segment of the model")
        weights = [a for a in instruction.reads if self.store.is_weights(a) and a.what not in op.gather]
        inputs = [a for a in instruction.reads if a.what.endswith(":out")]
        output = place_of(one(instruction.writes, "write of what it makes"))
        tables = self._gathered_tables(instruction, op)
        run = self._segment(op)
        source = place_of(one(inputs, "read of a hidden state")) if op.segment != EMBED else None
        values = self.store.values

        def forward(frame: StepFrame) -> None:
            if frame.replayed:
                return
            self.bind([self.store.placed(access) for access in weights])
            hidden = None if source is None else values.pop(source)
            made = []
            for part in self.loaded.parts:
                with ExitStack() as stack:
                    for table in tables:
                        table.enter(stack, part)
                    # Popped, so that no hidden state outlives its use.
                    made.append(run(part, None if hidden is None else hidden.pop(0)))
            values[output] = made
            if op.segment == HEAD:
                counts = [part.num_labels for part in self.loaded.parts]
                frame.losses[op.point] = accumulated([_tensor(loss) for loss in made], counts)

        return forward

    def _segment(self, op: Forward) -> Callable[[MicroBatch, Handed | None], Handed]:
        """Return what makes a segment's output from a micro-batch and what the segment before it handed on."""
        if op.segment == EMBED:
            return lambda part, _handed: self.cut.embed(self._borrowed(part), part.cache)
        if op.segment == HEAD:
            return lambda part, handed: self.cut.head(_tensor(handed), self._borrowed(part))

        def between(part: MicroBatch, handed: Handed | None) -> Handed:
            if not part.cache.calls:  # another stage embeds
                self.cut.embed(self._borrowed(part), part.cache)
            assert handed is not None
            return self.cut.between(op.segment, handed, part.cache)

        return between

    def _borrowed(self, part: MicroBatch) -> Batch:
        return {name: self.backend.borrow(tensor) for name, tensor in part.tensors.items()}

    def _gathered_tables(self, instruction: Instruction, op: Forward) -> list[_GatheredTable]:
        return [self._gathered_table(instruction, op, group) for group in op.gather]

    def _gathered_table(self, instruction: Instruction, op: Forward, group: str) -> _GatheredTable:
        table = one([a for a in instruction.reads if a.what == group], f"read of {group}")
        whole = f"z:{group}"
        rows = {a.point: a for a in instruction.reads if a.what == whole or a.what.startswith(f"{whole}:")}
        path = self._perturbations.get((instruction.id, group))
        if path is None:
            raise Unfit(f"gathers {group} at {op.point!r}, where no later perturbation of the program leads")
        missing = {f"q{query}" for query, _ in path} - set(rows)
        if missing:
            raise Unfit(f"gathers {group} at {op.point!r} without the rows of {', '.join(sorted(missing))}")
        return _GatheredTable(self, table, [(rows[f"q{query}"], scales) for query, scales in path])

    def _scalar(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Scalar)
        if op.function != "projected_gradient":
            return self._exchanges.scalar(instruction)
        points = [access.point for access in instruction.reads]
        plus, other = f"q{op.query}+", [point for point in points if point != f"q{op.query}+"]
        if plus not in points or len(other) != 1 or other[0] not in ("", f"q{op.query}-"):
            raise Unfit(f"makes a projected gradient of losses at {points}")
        epsilon = self.hyperparameters.epsilon

        def scalar(frame: StepFrame) -> None:
            if frame.replayed:
                return
            losses = frame.losses
            central = other[0] != ""
            frame.gradients[op.query] = projected_gradient(
                losses[plus], losses[other[0]], epsilon, central=central
            )

        return scalar


@dataclass(frozen=True)
class _GatheredTable:
    """A token table read through rows that are perturbed as the table itself will be, later in the step."""

    owner: Actions
    table: Access
    path: list[tuple[Access, tuple[int, ...]]]

    def enter(self, stack: ExitStack, part: MicroBatch) -> None:
        """Put the rows in the table's place for as long as `stack` lasts."""
        actions = self.owner
        batch = actions.loaded
        assert batch.rows is not None
        assert part.positions is not None
        placed, wanted = actions.store.placed(self.table), actions.backend.borrow(batch.rows)
        rows = placed.views[0].index_select(0, wanted)
        for direction, scales in self.path:
            z = self._rows_of(direction, wanted)
            rows = gathered(rows, z, scales, actions.hyperparameters.epsilon)
        parameter: nn.Parameter = placed.part.tensors[0].parameter
        positions = actions.backend.borrow(part.positions)
        actions.bind([placed])
        stack.enter_context(actions.cut.gathered_rows(parameter, rows, positions))

    def _rows_of(self, direction: Access, wanted: Tensor) -> Tensor:
        """Return rows of a direction: those that were drawn, or out of the whole where it is kept."""
        store = self.owner.store
        if direction.what == f"z:{self.table.what}":
            return store.placed(direction).views[0].index_select(0, wanted)
        drawn: Tensor = self.owner.backend.borrow(store.values[place_of(direction)])
        return drawn


def _tensor(handed: Handed | None) -> Tensor:
    assert isinstance(handed, Tensor)
    return handed


class Ranks(Exchange, Pipeline, Protocol):
    """What actions need of the other ranks."""


_Path = list[tuple[int, tuple[int, ...]]]


def _perturbations_behind(program: Program) -> dict[tuple[str, str], _Path]:
    """Return the perturbations that a group goes through between a forward that gathers it and that forward's point.

    By instruction and group; by query in turn.
    """
    found: dict[tuple[str, str], _Path] = {}
    ahead: dict[str, list[_Ahead]] = {}
    for instruction in program.step:
        op = instruction.op
        if isinstance(op, Forward):
            for group in op.gather:
                ahead.setdefault(group, []).append(_Ahead(instruction.id, op.point))
        elif isinstance(op, Perturb | Cast):
            for read, left in product(instruction.reads, instruction.writes):
                if read.what != left.what or left.what not in ahead:
                    continue
                step = [(op.query, op.scale)] if isinstance(op, Perturb) else []
                for entry in ahead[left.what]:
                    steps = entry.been[place_of(left)] = [*entry.been.get(place_of(read), []), *step]
                    if step and entry.point == left.point:
                        found[entry.forward, left.what] = _by_query(steps)
                if step:
                    ahead[left.what] = [entry for entry in ahead[left.what] if entry.point != left.point]
    return found


@dataclass(frozen=True)
class _Ahead:
    """A forward that gathers a group at a point, and what its weights have been through since, place by place."""

    forward: str
    point: str
    been: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)


def _by_query(steps: Sequence[tuple[int, int]]) -> _Path:
    path: _Path = []
    for query, scale in steps:
        if path and path[-1][0] == query:
            path[-1] = (query, (*path[-1][1], scale))
        else:
            path.append((query, (scale,)))
    return path
