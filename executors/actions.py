"""What each operation does: instructions resolved into actions, by operation and operands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from costmodel.model_spec import EMBED, HEAD
from executors.arithmetic import Sweeper, gathered, projected_gradient
from executors.buffers import BufferStore, Placed, bind, decay_runs, keeps_rows
from executors.directions import direction_named
from executors.frames import Hyperparameters, LoadedBatch, MicroBatch, StepFrame
from executors.micro_batches import accumulated, micro_batches
from executors.model import Batch, CutModel
from executors.rng import CounterDraws, CounterKey, draw_rows, walk_past
from executors.streams import Backend
from topology.errors import ProgramError
from zosim.program import (
    Access,
    Allocate,
    Draw,
    Forward,
    Free,
    Instruction,
    Part,
    Perturb,
    Program,
    Scalar,
    Update,
)

Action = Callable[[StepFrame], None]


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
    ) -> None:
        self.program = program
        self.cut = cut
        self.store = store
        self.hyperparameters = hyperparameters
        self.backend = backend
        self.num_queries = 1 + max((i.op.query for i in program.step if isinstance(i.op, Scalar)), default=-1)
        trainable = [t.num_elements for t in cut.tensors if t.trainable]
        self._counter = CounterDraws(trainable, backend.device, num_threads=num_draw_threads)
        self._sweeper = Sweeper(num_threads=torch.get_num_threads())
        self._bound: dict[str, Placed] = {}
        self.loaded = LoadedBatch()
        self._num_micro_batches = num_micro_batches
        self._gathers = any(keeps_rows(instruction.op) for _, instruction in program.instructions())
        self._perturbations = _perturbations(program)

    def close(self) -> None:
        """End the threads."""
        self._counter.close()
        self._sweeper.close()

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
            "draw": self._draw,
            "perturb": self._perturb,
            "update": self._update,
            "forward": self._forward,
            "scalar": self._scalar,
        }
        try:
            return makers[instruction.op.kind](instruction)
        except _Unfit as unfit:
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
        _one(instruction.writes, "write of a batch")

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
                raise _Unfit(f"copies {source.size_bytes} bytes to {target.size_bytes}")

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
            raise _Unfit(f"moves {len(reads)} contents into {len(writes)} places")
        for source, target in zip(reads, writes, strict=True):
            if not self.store.is_weights(source) or source.what != target.what:
                raise _Unfit(
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

    # -- directions --------------------------------------------------------------------------------------------

    def _draw(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Draw)
        fill = self._fill(op, instruction)
        if op.generator == "counter":
            return lambda frame: None if frame.at(op.step) is None else fill(frame, None)
        source = [_key(access) for access in instruction.reads if access.what.startswith(_RNG)]
        before = [_key(access) for access in instruction.writes if access.what == f"{_RNG}{op.group}"]
        after = [_key(access) for access in instruction.writes if access.what == f"{_RNG}{op.group}+"]
        generator = Generator(device=self.backend.device)
        values = self.store.values

        def draw(frame: StepFrame) -> None:
            seeded = frame.at(op.step)
            if seeded is None:
                return
            if source:
                generator.set_state(values[source[0]])
            else:
                generator.manual_seed(seeded.seeds[op.query])
            for key in before:
                values[key] = generator.get_state()
            fill(frame, generator)
            for key in after:
                values[key] = generator.get_state()

        return draw

    def _fill(self, op: Draw, instruction: Instruction) -> Callable[[StepFrame, Generator | None], None]:
        """Return what makes the numbers: all of a group, some rows of a table, or none that are kept."""
        part = self.store.parts[op.group]
        direction = direction_named(op.distribution)
        if op.keep == "none":
            like = torch.empty(0, dtype=part.tensors[0].parameter.dtype, device=self.backend.device)
            numels = [tensor.num_elements for tensor in part.tensors]

            def walk(_frame: StepFrame, generator: Generator | None) -> None:
                if generator is not None:
                    walk_past(numels, like, direction, generator)

            return walk
        wanted = [access for access in instruction.writes if not access.what.startswith(_RNG)]
        target = _one(wanted, "write of a direction")
        if op.keep == "rows":
            return self._fill_rows(op, target)
        indices = [tensor.index for tensor in part.tensors]
        if self.store.part(target) is not part:
            raise _Unfit(f"draws {op.group} into {target.what}")

        def fill(frame: StepFrame, generator: Generator | None) -> None:
            views = self.store.placed(target).views
            if generator is not None:
                for view in views:
                    direction.fill(view, generator)
                return
            key = _counter_key(frame, op)
            for index, view in zip(indices, views, strict=True):
                self._counter.fill(view.view(-1), index, 0, key, direction)

        return fill

    def _fill_rows(self, op: Draw, target: Access) -> Callable[[StepFrame, Generator | None], None]:
        part = self.store.parts[op.group]
        if len(part.tensors) != 1 or len(part.tensors[0].shape) != 2:
            raise _Unfit(f"keeps rows of {op.group}, which is not one table")
        table, direction = part.tensors[0], direction_named(op.distribution)
        num_rows, width = table.shape
        dtype = table.parameter.dtype

        def fill(frame: StepFrame, generator: Generator | None) -> None:
            rows = self.loaded.rows
            assert rows is not None
            kept = torch.empty((rows.numel(), width), dtype=dtype, device=self.backend.device)
            if generator is not None:
                draw_rows(kept, rows, num_rows, direction, generator)
            else:
                self._counter.fill_rows(kept, rows, table.index, _counter_key(frame, op), direction)
            self.store.values[_key(target)] = kept

        return fill

    # -- sweeps ------------------------------------------------------------------------------------------------

    def _perturb(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Perturb)
        weights, direction = self._operands(instruction, op.group)
        epsilon = self.hyperparameters.epsilon

        def perturb(_frame: StepFrame) -> None:
            theta, z = self.store.placed(weights), self.store.placed(direction)
            self._sweeper.perturb(theta.flat, z.flat, op.scale, epsilon)

        return perturb

    def _update(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Update)
        weights, direction = self._operands(instruction, op.group)
        weight_decay = self.hyperparameters.weight_decay

        def update(frame: StepFrame) -> None:
            source = frame.at(op.step)
            if source is None:
                return
            theta, z = self.store.placed(weights), self.store.placed(direction)
            for begin, end, decays in decay_runs(theta):
                self._sweeper.update(
                    theta.flat[begin:end],
                    z.flat[begin:end],
                    gradient=source.gradients[op.query] / self.num_queries,
                    learning_rate=source.learning_rate,
                    # Several directions are one step, which decays once.
                    weight_decay=weight_decay if decays and op.query == 0 else None,
                )

        return update

    def _operands(self, instruction: Instruction, group: str) -> tuple[Access, Access]:
        """Return the accesses to a group's trainable parameters, which change in place, and to its direction."""
        part = self.store.parts[group]
        weights = _one([a for a in instruction.writes if a.what == group], f"write of {group}")
        direction = _one([a for a in instruction.reads if a.what == f"z:{group}"], f"read of z:{group}")
        read = _one([a for a in instruction.reads if a.what == group], f"read of {group}")
        if (read.buffer, read.offset_bytes) != (weights.buffer, weights.offset_bytes):
            raise _Unfit(f"changes {group} out of place")
        dtypes = {self.program.buffer(access.buffer).dtype for access in (weights, direction)}
        if len(dtypes) != 1 or not part.tensors:
            raise _Unfit(f"mixes formats: {', '.join(sorted(dtypes))}")
        return weights, direction

    # -- forwards ----------------------------------------------------------------------------------------------

    def _forward(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Forward)
        if op.segment not in self.cut.segments:
            raise _Unfit(f"runs {op.segment}, which is not a segment of the model")
        weights = [a for a in instruction.reads if self.store.is_weights(a) and a.what not in op.gather]
        inputs = [a for a in instruction.reads if a.what.endswith(":out")]
        output = _key(_one(instruction.writes, "write of what it makes"))
        tables = self._gathered_tables(instruction, op)
        run = self._segment(op)
        source = _key(_one(inputs, "read of a hidden state")) if op.segment != EMBED else None
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
                frame.losses[op.point] = accumulated(made, counts)

        return forward

    def _segment(self, op: Forward) -> Callable[[MicroBatch, Tensor | None], Tensor]:
        """Return what makes a segment's output from a micro-batch and its hidden state."""
        if op.segment == EMBED:
            return lambda part, _hidden: self.cut.embed(self._borrowed(part), part.cache)
        if op.segment == HEAD:
            return lambda part, hidden: self.cut.head(_given(hidden), self._borrowed(part))
        index = int(op.segment.rpartition(".")[2])
        return lambda part, hidden: self.cut.block(index, _given(hidden), part.cache)

    def _borrowed(self, part: MicroBatch) -> Batch:
        return {name: self.backend.borrow(tensor) for name, tensor in part.tensors.items()}

    def _gathered_tables(self, instruction: Instruction, op: Forward) -> list[_GatheredTable]:
        return [self._gathered_table(instruction, op, group) for group in op.gather]

    def _gathered_table(self, instruction: Instruction, op: Forward, group: str) -> _GatheredTable:
        table = _one([a for a in instruction.reads if a.what == group], f"read of {group}")
        rows = {a.point: a for a in instruction.reads if a.what.startswith(f"z:{group}:")}
        if op.point not in self._perturbations[group]:
            raise _Unfit(f"gathers {group} at {op.point!r}, where no perturbation of the program leads")
        path = self._perturbations[group][op.point]
        missing = {f"q{query}" for query, _ in path} - set(rows)
        if missing:
            raise _Unfit(f"gathers {group} at {op.point!r} without the rows of {', '.join(sorted(missing))}")
        keyed = [(_key(rows[f"q{query}"]), scales) for query, scales in path]
        return _GatheredTable(self, table, keyed)

    def _scalar(self, instruction: Instruction) -> Action:
        op = instruction.op
        assert isinstance(op, Scalar)
        points = [access.point for access in instruction.reads]
        plus, other = f"q{op.query}+", [point for point in points if point != f"q{op.query}+"]
        if plus not in points or len(other) != 1 or other[0] not in ("", f"q{op.query}-"):
            raise _Unfit(f"makes a projected gradient of losses at {points}")
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
    path: list[tuple[tuple[str, int], tuple[int, ...]]]

    def enter(self, stack: ExitStack, part: MicroBatch) -> None:
        """Put the rows in the table's place for as long as `stack` lasts."""
        actions = self.owner
        batch = actions.loaded
        assert batch.rows is not None
        assert part.positions is not None
        placed = actions.store.placed(self.table)
        rows = placed.views[0].index_select(0, actions.backend.borrow(batch.rows))
        for key, scales in self.path:
            z = actions.backend.borrow(actions.store.values[key])
            rows = gathered(rows, z, scales, actions.hyperparameters.epsilon)
        parameter: nn.Parameter = placed.part.tensors[0].parameter
        positions = actions.backend.borrow(part.positions)
        actions.bind([placed])
        stack.enter_context(actions.cut.gathered_rows(parameter, rows, positions))


class _Unfit(Exception):  # noqa: N818 - half a sentence that the caller completes
    """Says why an instruction's operands do not fit its operation."""


def _given(hidden: Tensor | None) -> Tensor:
    assert hidden is not None
    return hidden


_RNG = "rng:"
_Path = list[tuple[int, tuple[int, ...]]]


def _perturbations(program: Program) -> dict[str, dict[str, _Path]]:
    """Return, for each group and point, the perturbations that lead there, by query in turn."""
    found: dict[str, dict[str, _Path]] = {}
    walked: dict[str, list[tuple[int, int]]] = {}
    for instruction in program.step:
        op = instruction.op
        if isinstance(op, Perturb):
            steps = walked.setdefault(op.group, [])
            steps.append((op.query, op.scale))
            point = next((a.point for a in instruction.writes if a.what == op.group), "")
            found.setdefault(op.group, {}).setdefault(point, _by_query(steps))
    return found


def _by_query(steps: Sequence[tuple[int, int]]) -> _Path:
    path: _Path = []
    for query, scale in steps:
        if path and path[-1][0] == query:
            path[-1] = (query, (*path[-1][1], scale))
        else:
            path.append((query, (scale,)))
    return path


def _counter_key(frame: StepFrame, op: Draw) -> CounterKey:
    source = frame.at(op.step)
    assert source is not None
    return CounterKey.of(source.seeds[op.query], source.step, op.query)


def _key(access: Access) -> tuple[str, int]:
    return access.buffer, access.offset_bytes


def _one(accesses: Sequence[Access], what: str) -> Access:
    if len(accesses) != 1:
        raise _Unfit(f"needs exactly one {what}, but has {len(accesses)}")
    return accesses[0]
