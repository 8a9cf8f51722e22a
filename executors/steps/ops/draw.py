"""Directions drawn as a program says: whole groups, rows of a table, or none that are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from costmodel.distributions import NUM_RNG_MARKS, SHARED_DRAW_ELEMENTS
from executors.randomness.counter import CounterDraws, CounterKey
from executors.randomness.directions import Direction, direction_named
from executors.randomness.walks import Walk
from executors.steps.buffers import Part
from executors.steps.frames import StepFrame
from executors.steps.ops.context import Context
from executors.steps.ops.operands import Action, Unfit, only, place_of
from zosim.contents import GeneratorState, is_scaled
from zosim.instructions import Access, Instruction
from zosim.operations import Draw

Fill = Callable[[StepFrame, Generator], list[Tensor]]
"""Draws on from a generator and returns its states at the marks on the way."""


class Draws:
    """Makes actions out of draws."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._device = context.backend.device
        trainable = [tensor.num_elements for tensor in context.engine.tensors if tensor.trainable]
        self._counter = CounterDraws(trainable, self._device, threads=context.threads)

    def draw(self, instruction: Instruction) -> Action:
        """Return what draws, if there is a step whose seed it draws from."""
        op = instruction.op
        assert isinstance(op, Draw)
        wanted = [access for access in instruction.writes if not isinstance(access.what, GeneratorState)]
        if op.keep != "none":
            target = only(wanted, "write of a direction")
            if op.keep == "rows":
                self._check_table(op)
            elif self._store.part(target) is not self._part(op):
                raise Unfit(f"draws {op.group} into {target.what}")
        if op.generator == "counter":
            return self._counted(op, wanted)
        return self._walked(op, instruction, wanted)

    # -- counter -----------------------------------------------------------------------------------------------

    def _counted(self, op: Draw, wanted: Sequence[Access]) -> Action:
        part, direction = self._part(op), direction_named(op.distribution)
        indices = [tensor.index for tensor in part.tensors]

        def draw(frame: StepFrame) -> None:
            if frame.at(op.step) is None or op.keep == "none":
                return
            key = counter_key(frame, op)
            if op.keep == "rows":
                rows = self._context.rows
                kept = self._empty_rows(part, rows)
                self._counter.fill_rows(kept, rows, indices[0], key, direction)
                self._store.values[place_of(wanted[0])] = kept
                return
            views = self._flat_views(wanted[0])
            self._counter.fill_parameters(views, indices, key, direction, self._factor(wanted[0]))

        return draw

    # -- mezo --------------------------------------------------------------------------------------------------

    def _walked(self, op: Draw, instruction: Instruction, wanted: Sequence[Access]) -> Action:
        source = [place_of(access) for access in instruction.reads if isinstance(access.what, GeneratorState)]
        before = [place_of(a) for a in instruction.writes if a.what == GeneratorState(op.group, op.query)]
        after = [
            place_of(a)
            for a in instruction.writes
            if a.what == GeneratorState(op.group, op.query, is_after=True)
        ]
        walk = self._walk(op, wanted)
        fill = self._fill(op, walk, wanted)
        again = self._fill_again(op, walk, wanted) if source and not before and op.keep == "all" else None
        generator = Generator(device=self._device)
        values = self._store.values

        def draw(frame: StepFrame) -> None:
            seeded = frame.at(op.step)
            if seeded is None:
                return
            if again is not None and len(values[source[0]]) > 1:
                again(values[source[0]])
                return
            if source:
                generator.set_state(values[source[0]][0])
            else:
                generator.manual_seed(seeded.seeds[op.query])
            states = fill(frame, generator)
            for key in before:
                values[key] = states
            for key in after:
                values[key] = [generator.get_state()]

        return draw

    def _walk(self, op: Draw, wanted: Sequence[Access]) -> Walk:
        direction = direction_named(op.distribution)
        if op.keep == "all":
            numels = [length for _, length in self._stretches(wanted[0], direction)]
        else:
            numels = [tensor.num_elements for tensor in self._part(op).tensors]
        is_cut = self._device.type == "cpu" and sum(numels) >= SHARED_DRAW_ELEMENTS
        return Walk(numels, direction, NUM_RNG_MARKS if is_cut else 1, self._context.threads)

    def _fill(self, op: Draw, walk: Walk, wanted: Sequence[Access]) -> Fill:
        part = self._part(op)
        if op.keep == "none":
            like = torch.empty(0, dtype=part.tensors[0].values.dtype, device=self._device)
            return lambda _frame, generator: walk.skip(like, generator)
        if op.keep == "rows":

            def keep(_frame: StepFrame, generator: Generator) -> list[Tensor]:
                rows = self._context.rows
                kept = self._empty_rows(part, rows)
                self._store.values[place_of(wanted[0])] = kept
                return walk.rows(kept, rows, generator)

            return keep

        views = self._stretch_views(wanted[0], direction_named(op.distribution))

        def fill(_frame: StepFrame, generator: Generator) -> list[Tensor]:
            return walk.fill(views(), generator, self._factor(wanted[0]))

        return fill

    def _fill_again(self, op: Draw, walk: Walk, wanted: Sequence[Access]) -> Callable[[list[Tensor]], None]:
        views = self._stretch_views(wanted[0], direction_named(op.distribution))

        def fill(states: list[Tensor]) -> None:
            walk.fill_again(views(), states, self._factor(wanted[0]))

        return fill

    # -- operands ----------------------------------------------------------------------------------------------

    def _part(self, op: Draw) -> Part:
        return self._store.trainable(op.group)

    def _check_table(self, op: Draw) -> None:
        part = self._part(op)
        if len(part.tensors) != 1 or len(part.tensors[0].shape) != 2:
            raise Unfit(f"keeps rows of {op.group}, which is not one table")

    def _empty_rows(self, part: Part, rows: Tensor) -> Tensor:
        table = part.tensors[0]
        shape = (rows.numel(), table.shape[1])
        return torch.empty(shape, dtype=table.values.dtype, device=self._device)

    def _stretches(self, target: Access, direction: Direction) -> list[tuple[int, int]]:
        """Return first element and length of what one call draws."""
        part, dtype = self._store.part(target), self._store.format_of(target)
        # Other devices' generators begin anew with every call.
        return part.stretches(
            dtype, direction.distribution.granularity if self._device.type == "cpu" else sys.maxsize
        )

    def _stretch_views(self, target: Access, direction: Direction) -> Callable[[], list[Tensor]]:
        stretches = self._stretches(target, direction)

        def views() -> list[Tensor]:
            flat = self._store.placed(target).flat
            return [flat[begin : begin + length] for begin, length in stretches]

        return views

    def _flat_views(self, target: Access) -> list[Tensor]:
        return [view.view(-1) for view in self._store.placed(target).views]

    def _factor(self, target: Access) -> float | None:
        return self._context.hyperparameters.epsilon if is_scaled(target.what) else None


def counter_key(frame: StepFrame, op: Draw) -> CounterKey:
    """Return the key of a draw in the step that it draws for."""
    source = frame.at(op.step)
    assert source is not None
    return CounterKey.of(source.seeds[op.query], source.step, op.query)
