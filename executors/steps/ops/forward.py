"""Forwards of segments at evaluation points, and the batch that they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from costmodel.formats.distributions import DISTRIBUTIONS
from costmodel.models.model_spec import BACK, EMBED, FRONT, HEAD, block_index
from executors.devices import staged_on
from executors.low_bits.stored import DenseTensor, PerturbationStep
from executors.models.batched import BatchedModel
from executors.models.halves import as_tensor
from executors.models.model import Batch, Handed
from executors.models.parameters import bind
from executors.models.recording_blocks import StepCache
from executors.randomness.low_rank import divisor_of
from executors.steps.arithmetic import gathered, gathered_several
from executors.steps.frames import LoadedBatch, MicroBatch, StepFrame
from executors.steps.graphs import Arguments
from executors.steps.micro_batches import accumulated, micro_batches
from executors.steps.ops.context import Context, rounding_of
from executors.steps.ops.operands import Action, Unfit, location_of, of_group, only
from zosim.eval_points import EvalPoint
from zosim.program import Program
from zosim.program.contents import (
    Hidden,
    ParamGroupWeights,
    Perturbation,
    PerturbationFactors,
    PerturbationRows,
)
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Cast, Forward, Perturb, Sample


class Forwards:
    """Makes actions out of forwards and loads of batches."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gathers = any(_needs_rows(instruction) for _, instruction in context.program.instructions())
        self._paths = _paths_to_gathered_points(context.program)
        forwards = [i.op for _, i in context.program.instructions() if isinstance(i.op, Forward)]
        self._is_of_texts = any(op.num_new_tokens for op in forwards)

    def load(self, instruction: Instruction) -> Action:
        """Return what puts a batch where the forwards read it."""
        only(instruction.writes, "write of a batch")
        context = self._context

        def load(frame: StepFrame) -> None:
            if frame.replayed:  # no row is read, but drawing none still advances the generator past the table
                none = torch.empty(0, dtype=torch.long)
                context.loaded = LoadedBatch(rows=none.to(context.backend.device), rows_on_host=none)
                return
            assert frame.batch is not None
            rows = positions = None
            if self._gathers:
                # Of a gathered table there are only the batch's rows: tokens are numbered among these.
                rows, positions = torch.unique(frame.batch["input_ids"], return_inverse=True)
            parts = micro_batches(
                frame.batch, positions, context.num_micro_batches, is_of_texts=self._is_of_texts
            )
            context.loaded = self._loaded(parts, rows)

        return load

    def _loaded(self, parts: Sequence[MicroBatch], rows: Tensor | None) -> LoadedBatch:
        """Return micro-batches on the device, which gets all their tensors in one copy."""
        on_host = [tensor for micro_batch in parts for tensor in micro_batch.tensors.values()]
        on_host += [micro_batch.positions for micro_batch in parts if micro_batch.positions is not None]
        on_host += [] if rows is None else [rows]
        there = iter(staged_on(self._context.backend.device, on_host))
        tensors = [{name: next(there) for name in micro_batch.tensors} for micro_batch in parts]
        positions = [None if micro_batch.positions is None else next(there) for micro_batch in parts]
        moved = (
            MicroBatch(own, micro_batch.num_averaged, own_positions, StepCache(host=micro_batch.tensors))
            for own, micro_batch, own_positions in zip(tensors, parts, positions, strict=True)
        )
        return LoadedBatch(tuple(moved), None if rows is None else next(there), rows)

    def forward(self, instruction: Instruction) -> Action:
        """Return what runs a segment."""
        op, context = instruction.op, self._context
        assert isinstance(op, Forward)
        if op.segment not in context.forward_runner.segments:
            raise Unfit(f"runs {op.segment}, which is not a segment of the model")
        if op.batched_eval_points:
            return self._batched(instruction, op)
        tables = [self._gathered_table(instruction, op, group) for group in op.gather]
        whole_tables = [table.access for table in tables]
        side_paths = [self._side_path(instruction, op, group) for group in op.side_paths]
        weights = [a for a in instruction.reads if context.store.is_weights(a) and a not in whole_tables]
        inputs = [access for access in instruction.reads if isinstance(access.what, Hidden)]
        output = location_of(only(instruction.writes, "write of what it makes"))
        source = location_of(only(inputs, "read of a hidden state")) if op.segment != EMBED else None
        values = context.store.values
        is_whole = op.segment not in (EMBED, HEAD) and not op.segment.endswith((FRONT, BACK))
        is_flat = all(context.store.section(access).is_flat for access in weights)
        # A graph holds addresses: it takes whole blocks, of weights that stay where they are.
        is_graph = context.graphs is not None and is_whole and is_flat and not (tables or side_paths)

        def forward(frame: StepFrame) -> None:
            if frame.replayed:
                return
            handed = None if source is None else values.pop(source)
            outputs: list[Handed] = []
            with context.reading(weights):
                for micro_batch in context.loaded.micro_batches:
                    # Where another stage embeds, nothing has recorded yet what blocks are called with.
                    if is_graph and micro_batch.cache.calls and handed and isinstance(handed[0], Tensor):
                        entering = as_tensor(handed.pop(0))
                        outputs.append(
                            self._by_graph(instruction, len(outputs), micro_batch, entering, weights)
                        )
                        continue
                    with ExitStack() as stack:
                        for table in tables:
                            table.enter(stack, micro_batch)
                        for added in side_paths:
                            stack.enter_context(added.there(frame))
                        # Popped, so that no hidden state outlives its use.
                        before = None if handed is None else handed.pop(0)
                        batch = self._borrowed(micro_batch)
                        outputs.append(
                            context.forward_runner.run(op.segment, batch, micro_batch.cache, before)
                        )
            values[output] = outputs
            if op.segment == HEAD:
                counts = [micro_batch.num_averaged for micro_batch in context.loaded.micro_batches]
                frame.losses[op.eval_point] = accumulated([as_tensor(loss) for loss in outputs], counts)

        return forward

    def _by_graph(
        self,
        instruction: Instruction,
        number: int,
        micro_batch: MicroBatch,
        before: Tensor,
        weights: Sequence[Access],
    ) -> Tensor:
        """Return what a whole block makes of the hidden state of a micro-batch, by the graph of its kernels."""
        op, context, graphs = instruction.op, self._context, self._context.graphs
        assert isinstance(op, Forward)
        assert graphs is not None
        if not graphs.admits(before):
            return as_tensor(
                context.forward_runner.run(op.segment, self._borrowed(micro_batch), micro_batch.cache, before)
            )
        index = block_index(op.segment)
        arguments = Arguments.of(graphs, number, micro_batch.cache.calls[index], micro_batch.cache.placed)
        source = next(location_of(access) for access in instruction.reads if isinstance(access.what, Hidden))
        hidden = graphs.placed((source, number), before)
        made = graphs.static_buffer((location_of(instruction.writes[0]), number), before)
        # A block finds its arguments in the cache by its index.
        cache = StepCache([arguments.tree()] * (index + 1))

        def launch() -> None:
            made.copy_(as_tensor(context.forward_runner.run(op.segment, micro_batch.tensors, cache, hidden)))

        placed = [context.store.placed(access) for access in weights]
        # Blocks of one kind that take turns at one address have a graph in common.
        layouts = [
            [(tensor.shape, view.dtype) for tensor, view in zip(p.section.tensors, p.views, strict=True)]
            for p in placed
        ]
        signature = (
            arguments.signature,
            context.adapter_rank_in_use(),
            *(
                (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
                for tensor in (hidden, made)
            ),
            *((p.flat.data_ptr(), *layout) for p, layout in zip(placed, layouts, strict=True)),
        )
        states = [made] if made is hidden else [hidden, made]
        memory = [*(p.flat for p in placed), *states, *arguments.tensors]
        graphs.run(signature, launch, memory=memory, caller=op.segment, states=states)
        return made

    def _batched(self, instruction: Instruction, op: Forward) -> Action:
        """Return what runs a segment at all points side by side."""
        context, forward_runner = self._context, self._context.forward_runner
        if not isinstance(forward_runner, BatchedModel):
            raise Unfit("is at several points, which the forward runner of the plan runs one after the other")
        store, values = context.store, context.store.values
        weights = [access for access in instruction.reads if store.is_weights(access)]
        inputs = [access for access in instruction.reads if isinstance(access.what, Hidden)]
        source = location_of(only(inputs, "read of hidden states")) if op.segment != EMBED else None
        output = location_of(instruction.writes[0])
        factors_of = {
            (access.what.param_group, access.what.perturbation): access
            for access in instruction.reads
            if isinstance(access.what, PerturbationFactors | Perturbation)
        }
        groups = [(group, self._scales_of(group, op.batched_eval_points)) for group in op.side_paths]

        def forward_batched(frame: StepFrame) -> None:
            if frame.replayed:
                return
            context.bind(weights)
            # By parameter: what its linear layer adds for each point.
            paths = {}
            for group, scales in groups:
                # The base reads any perturbation, times nothing.
                first = next(iter(perturbation for name, perturbation in factors_of if name == group))
                perturbations = [
                    eval_point.perturbation if eval_point.is_perturbed else first
                    for eval_point in op.batched_eval_points
                ]
                accesses = [factors_of[group, perturbation] for perturbation in perturbations]
                if isinstance(accesses[0].what, Perturbation):
                    views = [store.placed(access).qvalues for access in accesses]
                    for number, tensor in enumerate(store.trainable(group).tensors):
                        along = [of_eval_point[number][:] for of_eval_point in views]
                        paths[tensor.parameter] = forward_runner.path_of_left(tensor.parameter, along, scales)
                    continue
                of_eval_points = [values[location_of(access)] for access in accesses]
                for number, tensor in enumerate(store.trainable(group).tensors):
                    factors = [(of.lefts[number], of.rights[number]) for of in of_eval_points]
                    paths[tensor.parameter] = forward_runner.path(tensor.parameter, factors, scales)
            handed = None if source is None else values.pop(source)
            outputs = []
            for micro_batch in context.loaded.micro_batches:
                before = None if handed is None else handed.pop(0)
                batch = self._borrowed(micro_batch)
                outputs.append(
                    forward_runner.run_batched(
                        op.segment, batch, micro_batch.cache, before, paths, len(op.batched_eval_points)
                    )
                )
            context.let_go(weights)
            if op.segment != HEAD:
                values[output] = outputs
                return
            counts = [micro_batch.num_averaged for micro_batch in context.loaded.micro_batches]
            for number, (eval_point, access) in enumerate(
                zip(op.batched_eval_points, instruction.writes, strict=True)
            ):
                # A batched forward has a row per evaluation point.
                losses = [loss[number] for loss in outputs]
                values[location_of(access)] = losses
                frame.losses[eval_point] = accumulated(losses, counts)

        return forward_batched

    def _scales_of(self, group: str, eval_points: Sequence[EvalPoint]) -> list[float]:
        """Return what ``U·Vᵀ`` is multiplied by at each point."""
        op = next(
            i.op
            for _, i in self._context.program.instructions()
            if isinstance(i.op, Sample) and i.op.param_group == group
        )
        unit = 1 / rounding_of(op).scale if op.bits else 1.0
        epsilon = self._context.hyperparameters.epsilon * unit
        divisor = divisor_of(op.rank, DISTRIBUTIONS[op.distribution].rank_power) if op.rank else 1.0
        return [eval_point.sign * epsilon / divisor for eval_point in eval_points]

    def _borrowed(self, micro_batch: MicroBatch) -> Batch:
        return {name: self._context.backend.borrow(tensor) for name, tensor in micro_batch.tensors.items()}

    def _side_path(self, instruction: Instruction, op: Forward, group: str) -> _ForwardSidePath:
        weights = only(of_group(group, ParamGroupWeights, instruction.reads), f"read of {group}")
        perturbation = only(
            of_group(group, Perturbation, instruction.reads), f"read of a perturbation of {group}"
        )
        return _ForwardSidePath(self._context, weights, perturbation, op.eval_point)

    def _gathered_table(self, instruction: Instruction, op: Forward, group: str) -> _GatheredTable:
        table = only(of_group(group, ParamGroupWeights, instruction.reads), f"read of {group}")
        rows = {
            what.perturbation: access
            for access in instruction.reads
            if isinstance(what := access.what, Perturbation | PerturbationRows) and what.param_group == group
        }
        path = self._paths.get((instruction.id, group))
        if path is None:
            raise Unfit(
                f"gathers {group} at {op.eval_point}, where no later perturbation of the program leads"
            )
        missing = {perturbation for perturbation, _ in path} - set(rows)
        if missing:
            names = ", ".join(f"q{perturbation}" for perturbation in sorted(missing))
            raise Unfit(f"gathers {group} at {op.eval_point} without the rows of {names}")
        return _GatheredTable(
            self._context, table, [(rows[perturbation], scales) for perturbation, scales in path]
        )


@dataclass(frozen=True)
class _GatheredTable:
    """A token table read through rows that are perturbed as the table itself will be, later in the step."""

    context: Context
    access: Access
    path: list[tuple[Access, tuple[int, ...]]]

    def enter(self, stack: ExitStack, micro_batch: MicroBatch) -> None:
        """Put the rows in the table's place for as long as `stack` lasts."""
        context = self.context
        assert micro_batch.positions is not None
        placed, wanted = context.store.placed(self.access), context.rows
        step = PerturbationStep(
            context.hyperparameters.epsilon,
            context.rounded_perturbations.get(placed.section.what.param_group),
            gathered_several,
            gathered,
        )
        path = (
            (_perturbation_rows(context, perturbation, wanted), scales) for perturbation, scales in self.path
        )
        table = placed.held[0]
        assert isinstance(table, DenseTensor)
        rows = table.rows_at(wanted, path, step)
        positions = context.backend.borrow(micro_batch.positions)
        stack.enter_context(context.reading([self.access]))
        stack.enter_context(context.forward_runner.gathered_rows(placed.section.tensors[0], rows, positions))


def _perturbation_rows(context: Context, perturbation: Access, wanted: Tensor) -> Tensor:
    """Return rows of a perturbation: those that were drawn, or out of the whole where it is kept."""
    if isinstance(perturbation.what, Perturbation):
        return context.store.placed(perturbation).qvalues[0][wanted]
    sampled: Tensor = context.backend.borrow(context.store.values[location_of(perturbation)])
    return sampled


@dataclass(frozen=True)
class _ForwardSidePath:
    """A group that stays as it is, while forwards see it at a point that a rounded perturbation leads to."""

    context: Context
    weights: Access
    perturbation: Access
    eval_point: EvalPoint

    @contextmanager
    def there(self, frame: StepFrame) -> Iterator[None]:
        """Let them see it there."""
        context, perturbation = self.context, self.eval_point.perturbation
        theta, z = context.store.placed(self.weights), context.store.placed(self.perturbation)
        group = theta.section.what.param_group
        step = PerturbationStep(
            self.eval_point.sign * context.hyperparameters.epsilon,
            context.rounded_perturbations[group],
            gathered_several,
            gathered,
            context.nonzero_rows(group, frame, perturbation),
        )
        for storage, along in theta.along(z.qvalues):
            for one, view in zip(along, storage.at(along, step), strict=True):
                view.bind(one.bound)
        try:
            yield
        finally:
            # After an error, too: others read the weights where they lie.
            bind(theta.section.tensors, theta.held)


def _needs_rows(instruction: Instruction) -> bool:
    """Whether an instruction draws or gathers the rows of a table that the batch names."""
    op = instruction.op
    return (isinstance(op, Sample) and op.keep == "rows") or (isinstance(op, Forward) and bool(op.gather))


_Path = list[tuple[int, tuple[int, ...]]]
"""Perturbations one after the other: perturbations, with the scales of those of a perturbation that follow on each other."""


def _paths_to_gathered_points(program: Program) -> dict[tuple[str, str], _Path]:
    """Return the perturbations of a group between a forward that gathers it and its own arrival at that forward's point.

    By instruction and group.
    """
    paths: dict[tuple[str, str], _Path] = {}
    # Forwards of a group that still wait for the group to arrive at their point.
    gathering: dict[str, list[_Gathering]] = {}
    for instruction in program.step:
        op = instruction.op
        if isinstance(op, Forward):
            for group in op.gather:
                gathering.setdefault(group, []).append(_Gathering(instruction.id, op.eval_point))
        elif isinstance(op, Perturb | Cast):
            for read, left in product(instruction.reads, instruction.writes):
                if not (
                    isinstance(read.what, ParamGroupWeights) and isinstance(left.what, ParamGroupWeights)
                ):
                    continue
                group, eval_point = left.what.param_group, left.what.eval_point
                if read.what.param_group != group or group not in gathering:
                    continue
                step = [(op.perturbation, op.scale)] if isinstance(op, Perturb) else []
                # A cast carries the perturbations so far to another place; a perturbation adds one.
                for entry in gathering[group]:
                    steps = entry.steps[location_of(left)] = [*entry.steps.get(location_of(read), []), *step]
                    if step and entry.eval_point == eval_point:
                        paths[entry.forward, group] = _by_perturbation(steps)
                if step:
                    gathering[group] = [entry for entry in gathering[group] if entry.eval_point != eval_point]
    return paths


@dataclass(frozen=True)
class _Gathering:
    """A forward that gathers a group at a point, and the perturbations of its weights since, place by place."""

    forward: str
    eval_point: EvalPoint
    steps: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)


def _by_perturbation(steps: Sequence[tuple[int, int]]) -> _Path:
    path: _Path = []
    for perturbation, scale in steps:
        if path and path[-1][0] == perturbation:
            path[-1] = (perturbation, (*path[-1][1], scale))
        else:
            path.append((perturbation, (scale,)))
    return path
