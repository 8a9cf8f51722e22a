"""Perturbations and updates as a program says, each by the shortest arithmetic that has the literal roundings."""

from __future__ import annotations

from functools import partial

from costmodel.formats import FORMATS
from costmodel.formats.distributions import DISTRIBUTIONS
from executors.low_bits.stored import UpdateCounts, UpdateStep
from executors.models.parameters import NamedTensor
from executors.randomness.low_rank import divisor_of, is_matrix, product_tiles
from executors.randomness.rounded import RoundingUniforms, rounding_key
from executors.steps.arithmetic import ParamPass
from executors.steps.buffers import runs_alike
from executors.steps.frames import StepFrame
from executors.steps.ops.context import Context
from executors.steps.ops.operands import Action, Unfit, location_of, of_group, only
from zosim.program import Program
from zosim.program.contents import (
    UPDATE_SUM,
    Named,
    ParamGroupWeights,
    Perturbation,
    PerturbationFactors,
    is_scaled,
)
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Perturb, Sample, Scalar, Update

Location = tuple[str, int]
"""Under which the store keeps what is no flat array."""


class ParamPasses:
    """Makes actions out of perturbations and updates."""

    def __init__(self, context: Context) -> None:
        self._context = context
        program = context.program
        self.param_pass = ParamPass(_scratch_elements(program))
        self.num_perturbations = 1 + max(
            (i.op.perturbation for i in program.step if isinstance(i.op, Scalar)), default=-1
        )
        param_passes = [i for _, i in program.instructions() if isinstance(i.op, Perturb | Update)]
        # All passes share one scratch memory, so they must follow each other: on the stream of the first.
        self._streams = {i.stream for i in param_passes[:1]}
        samples = {op.param_group: op for _, i in program.instructions() if isinstance(op := i.op, Sample)}
        self._signs = {
            group for group, op in samples.items() if DISTRIBUTIONS[op.distribution].is_sign and not op.bits
        }
        # Of groups whose perturbations are rounded.
        self._roundings = context.rounded_perturbations
        trainable = [tensor.num_elements for tensor in context.forward_runner.tensors if tensor.trainable]
        self._uniforms = RoundingUniforms(trainable, context.backend.device, context.threads)
        self.counts = UpdateCounts()
        self._matrix_divisors = {
            group: divisor_of(op.rank, DISTRIBUTIONS[op.distribution].update_rank_power)
            for group, op in samples.items()
            if op.rank
        }
        self._product_divisors = {
            group: divisor_of(op.rank, DISTRIBUTIONS[op.distribution].rank_power)
            for group, op in samples.items()
            if op.rank
        }

    def perturb(self, instruction: Instruction) -> Action:
        """Return what perturbs a group, where it lies or into another place."""
        op = instruction.op
        assert isinstance(op, Perturb)
        read, left, perturbation = self._operands(instruction, op.param_group)
        epsilon, param_pass = self._context.hyperparameters.epsilon, self.param_pass
        is_kept_scaled, is_sign = is_scaled(perturbation.what), op.param_group in self._signs
        if (rounding := self._roundings.get(op.param_group)) is not None:
            return self._perturb_by_qvalues(op, (read, left, perturbation), epsilon / rounding.scale)

        def perturb(_frame: StepFrame) -> None:
            # As one stretch, gaps between tensors included: a pass over all is faster than one for each.
            theta, out, z = (self._context.store.placed(access).flat for access in (read, left, perturbation))
            if is_kept_scaled:
                param_pass.perturb_scaled(theta, z, op.scale, out)
            elif is_sign:
                param_pass.perturb_signs(theta, z, op.scale, epsilon, out)
            else:
                param_pass.perturb(theta, z, op.scale, epsilon, out)

        return perturb

    def _perturb_by_qvalues(
        self, op: Perturb, accesses: tuple[Access, Access, Access], epsilon: float
    ) -> Action:
        """Return what perturbs a group by a rounded perturbation, one tensor after the other."""

        def perturb(_frame: StepFrame) -> None:
            read, left, perturbation = map(self._context.store.placed, accesses)
            thetas, outs = ([view.view(-1) for view in placed.views] for placed in (read, left))
            zs = [qvalues.view(-1) for qvalues in perturbation.qvalues]
            self.param_pass.perturb_several(thetas, zs, op.scale, epsilon, outs)

        return perturb

    def update(self, instruction: Instruction) -> Action:
        """Return what updates a group, if there is a step whose gradient it applies."""
        op = instruction.op
        assert isinstance(op, Update)
        if of_group(op.param_group, PerturbationFactors, instruction.reads):
            return self._update_by_factors(instruction, op)
        read, weights, perturbation = self._operands(instruction, op.param_group)
        if location_of(read) != location_of(weights):
            raise Unfit(f"updates {op.param_group} out of place")
        if is_scaled(perturbation.what):
            raise Unfit(
                f"updates along {perturbation.describe()}, which has been multiplied by epsilon and rounded"
            )
        # Several perturbations are one step, which decays once. A decay of 0 changes nothing.
        weight_decay = self._context.hyperparameters.weight_decay if op.perturbation == 0 else 0.0
        param_pass, is_sign = self.param_pass, op.param_group in self._signs
        if op.param_group in self._roundings:
            before, after = (
                next(
                    (
                        location_of(a)
                        for a in accesses
                        if isinstance(a.what, Named) and a.what.name == UPDATE_SUM
                    ),
                    None,
                )
                for accesses in (instruction.reads, instruction.writes)
            )
            return self._update_by_qvalues(op, weights, perturbation, (before, after))
        matrix_divisor = self._matrix_divisors.get(op.param_group, 1.0)
        is_uniform = not weight_decay and matrix_divisor == 1
        # On an accelerator few kernels are worth more than few passes.
        is_launched = self._context.backend.device.type != "cpu"

        def traits(tensor: NamedTensor) -> tuple[bool, float]:
            return bool(weight_decay) and tensor.decays, matrix_divisor if is_matrix(tensor.shape) else 1.0

        def update(frame: StepFrame) -> None:
            source = frame.at(op.step)
            if source is None:
                return
            theta, z = self._context.store.placed(weights), self._context.store.placed(perturbation)
            gradient = source.gradients[op.perturbation] / self.num_perturbations
            rate = source.learning_rate
            runs = [(0, theta.flat.numel(), (False, 1.0))] if is_uniform else runs_alike(theta, traits)
            # One pass over all, which adds the decay to the stretches that have one.
            if is_launched and matrix_divisor == 1 and not is_uniform:
                decaying = [(begin, end) for begin, end, (decays, _) in runs if decays]
                param_pass.update(
                    theta.flat,
                    z.flat,
                    gradient=gradient,
                    learning_rate=rate,
                    weight_decay=weight_decay,
                    decaying=decaying,
                )
                return
            if is_launched and not is_uniform:
                of_divisor = {divisor: gradient / divisor for divisor in (1.0, matrix_divisor)}
                param_pass.update_several(
                    [theta.flat[begin:end] for begin, end, _ in runs],
                    [z.flat[begin:end] for begin, end, _ in runs],
                    gradients=[of_divisor[divisor] for _, _, (_, divisor) in runs],
                    learning_rate=rate,
                    weight_decay=weight_decay,
                    decaying=[decays for _, _, (decays, _) in runs],
                )
                return
            # On a CPU, or where all is alike: neighbours that are treated alike in one pass each.
            for begin, end, (decays, divisor) in runs:
                chunk, along = theta.flat[begin:end], z.flat[begin:end]
                if is_sign and not decays:
                    param_pass.update_signs(chunk, along, gradient=gradient, learning_rate=rate)
                else:
                    decay = weight_decay if decays else None
                    param_pass.update(
                        chunk, along, gradient=gradient / divisor, learning_rate=rate, weight_decay=decay
                    )

        return update

    def _update_by_factors(self, instruction: Instruction, op: Update) -> Action:
        """Return what updates matrices along products of factors, which are made chunk by chunk."""
        store, group = self._context.store, op.param_group
        weights = only(of_group(group, ParamGroupWeights, instruction.writes), f"write of {group}")
        source_of = location_of(
            only(of_group(group, PerturbationFactors, instruction.reads), f"read of factors of {group}")
        )
        weight_decay = self._context.hyperparameters.weight_decay if op.perturbation == 0 else 0.0
        product_divisor, matrix_divisor = self._product_divisors[group], self._matrix_divisors[group]

        def update(frame: StepFrame) -> None:
            source = frame.at(op.step)
            if source is None:
                return
            theta, factors = store.placed(weights), store.values[source_of]
            # A step moves along the mean over its perturbations.
            gradient = source.gradients[op.perturbation] / self.num_perturbations / matrix_divisor
            matrices = zip(theta.section.tensors, theta.views, factors.lefts, factors.rights, strict=True)
            for tensor, matrix, left, right in matrices:
                decay = weight_decay if weight_decay and tensor.decays else None
                for begin, tile in product_tiles(left, right, product_divisor):
                    self.param_pass.update(
                        matrix[begin : begin + tile.shape[0]].view(-1),
                        tile.view(-1),
                        gradient=gradient,
                        learning_rate=source.learning_rate,
                        weight_decay=decay,
                    )

        return update

    def _update_by_qvalues(
        self, op: Update, weights: Access, perturbation: Access, sums: tuple[Location | None, Location | None]
    ) -> Action:
        """Return what updates a group along a rounded perturbation, each parameter as it is stored.

        `sums` are the places of what quantized values change by over the perturbations before, and over these and this one, which are rounded later.
        """
        values, (before, after) = self._context.store.values, sums
        # Several perturbations are one step, which decays once: with the first, or where all are rounded together.
        weight_decay = self._context.hyperparameters.weight_decay
        numbers_decay = weight_decay if op.perturbation == 0 else 0.0
        quantized_decay = (
            weight_decay if (before is not None or op.perturbation == 0) and after is None else 0.0
        )

        def update(frame: StepFrame) -> None:
            source = frame.at(op.step)
            if source is None:
                return
            theta, z = self._context.store.placed(weights), self._context.store.placed(perturbation)
            key = rounding_key(source.seeds[op.perturbation], source.step, op.perturbation, "update")
            step = UpdateStep(
                gradient=source.gradients[op.perturbation] / self.num_perturbations / op.divisor,
                rate=source.learning_rate,
                decay=numbers_decay,
                rounded_decay=quantized_decay,
                rounding=self._roundings[op.param_group],
                rows=self._context.nonzero_rows(op.param_group, source, op.perturbation),
                uniforms=partial(self._uniforms.between, key=key),
                counted=self.counts,
                add=self.param_pass.update_several,
                sums=values.pop(before) if before is not None else None,
                is_rounded=after is None,
            )
            for storage, along in theta.along(z.qvalues):
                storage.update(along, step)
            if after is not None:
                values[after] = step.sums

        return update

    def _operands(self, instruction: Instruction, group: str) -> tuple[Access, Access, Access]:
        """Return the accesses to a group's trainable parameters, before and after, and to its perturbation."""
        section = self._context.store.trainable(group)
        weights = only(of_group(group, ParamGroupWeights, instruction.writes), f"write of {group}")
        perturbation = only(
            of_group(group, Perturbation, instruction.reads), f"read of a perturbation of {group}"
        )
        read = only(of_group(group, ParamGroupWeights, instruction.reads), f"read of {group}")
        # Quantized values of a perturbation are of another format than what they move.
        alike = (read, weights) if group in self._roundings else (read, weights, perturbation)
        dtypes = {self._context.program.buffer(access.buffer).dtype for access in alike}
        if len(dtypes) != 1 or not section.tensors:
            raise Unfit(f"mixes formats: {', '.join(sorted(dtypes))}")
        if instruction.stream not in self._streams:
            raise Unfit(
                f"runs on {instruction.stream}, but others on {', '.join(self._streams)}: they share temporaries"
            )
        return read, weights, perturbation


def _scratch_elements(program: Program) -> int | None:
    """Return what the program sets aside for a CPU's temporaries; None where it says nothing of them."""
    scratch = [buffer for buffer in program.buffers if buffer.role == "scratch"]
    return sum(FORMATS[buffer.dtype].num_elements(buffer.size_bytes) for buffer in scratch) or None
