"""Perturbations drawn as a program says: whole groups, rows of a table, or none that are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Generator, Tensor

from costmodel.formats.distributions import DISTRIBUTIONS, NUM_RNG_MARKS, SHARED_SAMPLING_ELEMENTS
from executors.formats import TORCH_DTYPES
from executors.low_bits.packed import QValues
from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.low_rank import (
    Factors,
    FactorSampler,
    Outputs,
    divisor_of,
    fill_product,
    fill_product_rows,
)
from executors.randomness.rounded import SamplingKeys
from executors.randomness.samplers import DistributionSampler, sampler_named
from executors.randomness.sequential import SequentialSampler
from executors.steps.buffers import ParamSection
from executors.steps.frames import StepFrame
from executors.steps.ops.context import Context, rounding_of
from executors.steps.ops.operands import Action, Unfit, location_of, only
from zosim.program.contents import GeneratorState, ParamGroupWeights, is_scaled
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Sample

Location = tuple[str, int]
_Filled = TypeVar("_Filled")

Fill = Callable[[StepFrame, Generator], list[Tensor]]
"""Draws on from a generator and returns its states at the marks on the way."""


class Sampling:
    """Makes actions out of draws."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._device = context.backend.device
        trainable = [tensor for tensor in context.forward_runner.tensors if tensor.trainable]
        self._counter = CounterSampler(
            [tensor.num_elements for tensor in trainable], self._device, threads=context.threads
        )
        self._factors: FactorSampler | None = None
        samples = [i for _, i in context.program.instructions() if isinstance(i.op, Sample) and i.op.rank]
        # All groups share a sampler, which keeps factors over a lazy interval: one stream may use it.
        self._factor_streams = {i.stream for i in samples[:1]}

    def sample(self, instruction: Instruction) -> Action:
        """Return what draws, if there is a step whose seed it draws from."""
        op = instruction.op
        assert isinstance(op, Sample)
        wanted = [access for access in instruction.writes if not isinstance(access.what, GeneratorState)]
        if op.keep != "none":
            target = only(wanted, "write of a perturbation")
            if op.keep == "rows":
                section = self._section(op)
                if len(section.tensors) != 1 or len(section.tensors[0].shape) != 2:
                    raise Unfit(f"keeps rows of {op.param_group}, which is not one table")
            elif op.keep == "all" and self._store.section(target) is not self._section(op):
                raise Unfit(f"draws {op.param_group} into {target.what}")
        if op.rank:
            return self._factored(op, instruction, wanted)
        if op.bits and op.generator == "counter":
            return self._counted_qvalues(op, wanted)
        if op.generator == "counter":
            return self._counted(op, wanted)
        return self._sequential(op, instruction, wanted)

    # -- counter -----------------------------------------------------------------------------------------------

    def _counted(self, op: Sample, wanted: Sequence[Access]) -> Action:
        section, sampler = self._section(op), sampler_named(op.distribution)
        indices = [tensor.index for tensor in section.tensors]

        def sample(frame: StepFrame) -> None:
            if frame.at(op.step) is None or op.keep == "none":
                return
            key = counter_key(frame, op)
            if op.keep == "rows":
                rows = self._context.rows
                kept = self._empty_rows(section, rows)
                self._counter.fill_rows(kept, self._context.rows_on_host, indices[0], key, sampler)
                self._store.values[location_of(wanted[0])] = kept
                return
            # A counter has no state: each parameter's numbers depend on the key and its index alone.
            views = [view.view(-1) for view in self._store.placed(wanted[0]).views]
            self._scaling(wanted[0], partial(self._counter.fill_parameters, views, indices, key, sampler))

        return sample

    def _counted_qvalues(self, op: Sample, wanted: Sequence[Access]) -> Action:
        section, rounded_sampler, sampler = (
            self._section(op),
            self._context.sampler_of(rounding_of(op)),
            sampler_named(op.distribution),
        )
        indices = [tensor.index for tensor in section.tensors]

        def sample(frame: StepFrame) -> None:
            if frame.at(op.step) is None or op.keep == "none":
                return
            key, keys = counter_key(frame, op), _sampling_keys(frame, op)
            if op.keep == "rows":
                rows = self._context.rows_on_host
                numbers = self._empty_rows(section, rows, torch.float32)
                self._counter.fill_rows(numbers, rows, indices[0], key, sampler)
                self._store.values[location_of(wanted[0])] = rounded_sampler.rows(
                    numbers, rows, indices[0], keys
                )
                return
            rounded_sampler.fill_counted(self._flat_qvalues(wanted[0]), indices, key, keys)

        return sample

    # -- mezo --------------------------------------------------------------------------------------------------

    def _sequential(self, op: Sample, instruction: Instruction, wanted: Sequence[Access]) -> Action:
        source, before, after = _states(op, instruction)
        sequential = self._sampler(op, wanted)
        fill = self._fill(op, sequential, wanted)
        # Where the states at the marks are kept, threads continue from all of them at once.
        again = (
            self._fill_again(op, sequential, wanted) if source and not before and op.keep == "all" else None
        )
        own, graphs = Generator(device=self._device), self._context.graphs
        values = self._store.values

        def sample(frame: StepFrame) -> None:
            seeded = frame.at(op.step)
            if seeded is None:
                return
            # One generator for all graphs of a stream, so that equal draws have one graph in common.
            generator = own if graphs is None else graphs.generator()
            # Several threads go on from the marks at once, with the bits that one sequence has.
            if again is not None and len(values[source[0]]) > 1:
                again(frame, values[source[0]])
                return
            if source:
                generator.set_state(values[source[0]][0])
            else:
                # The first group of a perturbation begins its sequence; each other goes on where one ended, as in MeZO's loop.
                generator.manual_seed(seeded.seeds[op.perturbation])
            states = fill(frame, generator)
            for key in before:
                values[key] = states
            for key in after:
                values[key] = [generator.get_state()]

        return sample

    def _sampler(self, op: Sample, wanted: Sequence[Access]) -> SequentialSampler:
        sampler = sampler_named(op.distribution)
        if op.keep == "all" and not op.bits:
            numels = [length for _, length in self._spans(wanted[0], sampler)]
        else:
            numels = [tensor.num_elements for tensor in self._section(op).tensors]
        # Smaller groups are not worth sharing among threads.
        is_shared = self._device.type == "cpu" and sum(numels) >= SHARED_SAMPLING_ELEMENTS
        return SequentialSampler(numels, sampler, NUM_RNG_MARKS if is_shared else 1, self._context.threads)

    def _fill(self, op: Sample, sequential: SequentialSampler, wanted: Sequence[Access]) -> Fill:
        section = self._section(op)
        if op.keep == "none":

            def skip(_frame: StepFrame, generator: Generator) -> list[Tensor]:
                # Asked for when it is drawn: before weights moved into buffers they may have had their files' format.
                dtype = torch.float32 if op.bits else section.tensors[0].values.dtype
                return sequential.skip(torch.empty(0, dtype=dtype, device=self._device), generator)

            return skip
        if op.keep == "rows":

            def keep(frame: StepFrame, generator: Generator) -> list[Tensor]:
                rows = self._context.rows
                kept = self._empty_rows(section, rows, torch.float32 if op.bits else None)
                states = sequential.rows(kept, rows, generator)
                if op.bits:
                    index, keys = section.tensors[0].index, _sampling_keys(frame, op)
                    on_host = self._context.rows_on_host
                    kept = self._context.sampler_of(rounding_of(op)).rows(kept, on_host, index, keys)
                self._store.values[location_of(wanted[0])] = kept
                return states

            return keep
        if op.bits:
            return self._sequential_qvalues(op, sequential, wanted)

        views, graphs = self._span_views(wanted[0], sampler_named(op.distribution)), self._context.graphs

        def fill(_frame: StepFrame, generator: Generator) -> list[Tensor]:
            if graphs is None:
                return self._scaling(wanted[0], partial(sequential.fill, views(), generator))
            # Read before: the restore and the update sample the same numbers again from here.
            state, sampled, flat = generator.get_state(), views(), self._store.placed(wanted[0]).flat

            def sample(generator: Generator) -> None:
                self._scaling(wanted[0], partial(sequential.sample, sampled, generator))

            outputs = tuple((view.data_ptr(), view.numel()) for view in sampled)
            signature = op.distribution, is_scaled(wanted[0].what), flat.data_ptr(), flat.dtype, outputs
            graphs.run(signature, sample, memory=(flat,), generators=(generator,))
            return [state]

        return fill

    def _sequential_qvalues(
        self, op: Sample, sequential: SequentialSampler, wanted: Sequence[Access]
    ) -> Callable[[StepFrame, Generator | list[Tensor]], list[Tensor]]:
        rounded_sampler, indices = (
            self._context.sampler_of(rounding_of(op)),
            [tensor.index for tensor in self._section(op).tensors],
        )

        def fill(frame: StepFrame, source: Generator | list[Tensor]) -> list[Tensor]:
            views = self._flat_qvalues(wanted[0])
            return rounded_sampler.fill_sequential(
                sequential, views, indices, source, _sampling_keys(frame, op)
            )

        return fill

    def _fill_again(
        self, op: Sample, sequential: SequentialSampler, wanted: Sequence[Access]
    ) -> Callable[[StepFrame, list[Tensor]], object]:
        if op.bits:
            return self._sequential_qvalues(op, sequential, wanted)
        views = self._span_views(wanted[0], sampler_named(op.distribution))

        def fill(_frame: StepFrame, states: list[Tensor]) -> None:
            self._scaling(wanted[0], partial(sequential.fill_again, views(), states))

        return fill

    # -- factors -----------------------------------------------------------------------------------------------

    def _factored(self, op: Sample, instruction: Instruction, wanted: Sequence[Access]) -> Action:
        if instruction.stream not in self._factor_streams:
            raise Unfit(
                f"runs on {instruction.stream}, but others on {', '.join(self._factor_streams)}: they share factors"
            )
        factor_sampler, values = self._factor_sampler(op), self._store.values
        source, before, after = _states(op, instruction)
        generator = Generator(device=self._device)

        def from_generator(frame: StepFrame, outputs: Outputs) -> Factors | None:
            assert frame.interval is not None
            if op.for_update and frame.step == frame.interval.first:
                return factor_sampler.resampled(
                    op.param_group, op.perturbation, frame.seeds[op.perturbation], frame.interval, outputs
                )
            if source:
                generator.set_state(values[source[0]][0])
            else:
                generator.manual_seed(frame.seeds[op.perturbation])
            states = [generator.get_state()]
            factors = None
            if op.keep == "none":
                # Passed over all the same: groups behind this one go on in the same sequence.
                factor_sampler.pass_over(op.param_group, frame.step, frame.interval, generator)
            else:
                factors = factor_sampler.sequential(
                    op.param_group, op.perturbation, frame.step, frame.interval, generator, outputs
                )
            for key in before:
                values[key] = states
            for key in after:
                values[key] = [generator.get_state()]
            return factors

        def sample(frame: StepFrame) -> None:
            seeded = frame.at(op.step)
            if seeded is None:
                return
            factors: Factors | None = None
            outputs = self._store.placed(wanted[0]).views if op.keep == "all" else None
            if op.generator == "mezo":
                factors = from_generator(seeded, outputs)
            elif op.keep != "none":
                assert seeded.interval is not None
                factors = factor_sampler.counted(
                    op.param_group, op.perturbation, counter_key(frame, op), seeded.interval, outputs
                )
            if factors is not None and op.keep == "factors":
                values[location_of(wanted[0])] = factors
            elif factors is not None:
                self._multiply(op, factors, wanted[0])

        return sample

    def _multiply(self, op: Sample, factors: Factors, target: Access) -> None:
        """Leave the perturbation that has these factors at its place."""
        divisor = divisor_of(op.rank, DISTRIBUTIONS[op.distribution].rank_power)
        if op.keep == "rows":
            rows, right = self._context.rows, factors.rights[0]
            assert right is not None
            kept = self._empty_rows(self._section(op), rows)
            fill_product_rows(kept, self._context.rows_on_host, factors.lefts[0], right, divisor)
            self._store.values[location_of(target)] = kept
            return
        views = self._store.placed(target).views
        for view, left, right in zip(views, factors.lefts, factors.rights, strict=True):
            if right is not None:  # others have been drawn there
                fill_product(view, left, right, divisor)

    def _factor_sampler(self, op: Sample) -> FactorSampler:
        """Return what draws factors for all groups, of one rank."""
        if self._factors is None:
            tensors = [tensor for tensor in self._context.forward_runner.tensors if tensor.trainable]
            groups = {
                what.param_group: [tensor.index for tensor in section.tensors]
                for what, section in self._store.sections.items()
                if isinstance(what, ParamGroupWeights)
            }
            self._factors = FactorSampler(
                [tensor.shape for tensor in tensors],
                groups,
                self._sampling_order,
                op.rank,
                self._device,
                TORCH_DTYPES[
                    next(b.dtype for b in self._context.program.buffers if b.role == "perturbations")
                ],
                threads=self._context.threads,
            )
        return self._factors

    def _sampling_order(self, perturbation: int) -> list[str]:
        """Return the groups that the step's generator of a perturbation visits, in their order."""
        return [
            i.op.param_group
            for i in self._context.program.step
            if isinstance(i.op, Sample)
            and i.op.perturbation == perturbation
            and any(isinstance(a.what, GeneratorState) and a.what.is_after for a in i.writes)
        ]

    # -- operands ----------------------------------------------------------------------------------------------

    def _section(self, op: Sample) -> ParamSection:
        return self._store.trainable(op.param_group)

    def _empty_rows(self, section: ParamSection, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        table = section.tensors[0]
        shape = (rows.numel(), table.shape[1])
        return torch.empty(shape, dtype=dtype or table.values.dtype, device=self._device)

    def _spans(self, target: Access, sampler: DistributionSampler) -> list[tuple[int, int]]:
        """Return first element and length of what one call draws."""
        section, dtype = self._store.section(target), self._store.format_of(target)
        # Other devices' generators begin anew with every call.
        return section.spans(
            dtype, sampler.distribution.granularity if self._device.type == "cpu" else sys.maxsize
        )

    def _span_views(self, target: Access, sampler: DistributionSampler) -> Callable[[], list[Tensor]]:
        spans = self._spans(target, sampler)

        def views() -> list[Tensor]:
            flat = self._store.placed(target).flat
            return [flat[begin : begin + length] for begin, length in spans]

        return views

    def _flat_qvalues(self, target: Access) -> list[QValues]:
        return [qvalues.view(-1) for qvalues in self._store.placed(target).qvalues]

    def _scaling(self, target: Access, fill: Callable[[float | None], _Filled]) -> _Filled:
        """Call `fill` with what multiplies every number, or None: of a group on an accelerator one kernel multiplies all."""
        factor = self._context.hyperparameters.epsilon if is_scaled(target.what) else None
        if factor is None or self._device.type == "cpu":
            return fill(factor)
        filled = fill(None)
        self._store.placed(target).flat.mul_(factor)
        return filled


def _states(op: Sample, instruction: Instruction) -> tuple[list[Location], list[Location], list[Location]]:
    """Return where the sequential generator's state is read, where that before the group is left, and where that after it."""

    def written(*, is_after: bool) -> list[Location]:
        state = GeneratorState(op.param_group, op.perturbation, is_after=is_after)
        return [location_of(access) for access in instruction.writes if access.what == state]

    source = [location_of(access) for access in instruction.reads if isinstance(access.what, GeneratorState)]
    return source, written(is_after=False), written(is_after=True)


def counter_key(frame: StepFrame, op: Sample) -> CounterKey:
    """Return the key of a draw in the step that it draws for."""
    source = frame.at(op.step)
    assert source is not None
    return CounterKey.of(source.seeds[op.perturbation], source.step, op.perturbation)


def _sampling_keys(frame: StepFrame, op: Sample) -> SamplingKeys:
    """Return the keys of what quantizes a draw."""
    source = frame.at(op.step)
    assert source is not None
    return SamplingKeys.of(
        source.seeds[op.perturbation], source.step, op.perturbation, is_second=bool(op.rounding)
    )
