"""Planted faults that more than one claim's check must notice."""

from __future__ import annotations

from dataclasses import replace

from costmodel.param_passes import copy_work
from proofs_checks.planting import Fault, altered, called_with, planted, returning
from zosim.program.contents import GeneratorState
from zosim.program.instructions import Stream


@planted("executors.codecs.grids:fit", "a symmetric grid that ends before the largest value")
def short_grid(shipped, rows, spec, *rest, **named):
    parameters = shipped(rows, spec, *rest, **named)
    levels = 2 ** (spec.bits - 1) - 1
    return (parameters[0] * levels / (levels + 1),) if spec.grid == "symmetric" and levels else parameters


rounding_up = returning("executors.codecs.grids:Fitted.scaled", "rounding up", lambda it: it.ceil_())


def wider_normals(factor: float, name: str) -> Fault:
    """Return a fault that multiplies normals."""

    @planted("executors.randomness.samplers:Gaussian.fill", name)
    def fault(shipped, self, out, generator):
        shipped(self, out, generator)
        out.mul_(factor)

    return fault


wide_normals = wider_normals(1.03, "normals 3 % too wide")


@planted("executors.codecs.quantizing:rounded_at_random", "rounding to the nearest")
def nearest(_shipped, numbers, *_generator):
    return numbers.round()


@planted("executors.randomness.low_rank:divisor_of", "low rank updates without 1/r")
def updates_without_rank(shipped, rank, rank_power):
    return shipped(rank, rank_power) if rank_power == -0.5 else 1.0


second_by_epsilon = called_with(
    "executors.steps.arithmetic:ParamPass.perturb",
    "second perturbation by -ε, not -2ε",
    scale=lambda scale: 1 if scale > 0 else -1,
)


climbing = called_with(
    "executors.steps.arithmetic:ParamPass.update",
    "an update that climbs",
    learning_rate=lambda learning_rate: -learning_rate,
)


@planted("executors.steps.arithmetic:projected_gradient", "a central difference divided by ε")
def central_by_epsilon(shipped, *given, **_central):
    return shipped(*given, central=False)


@planted("executors.steps.arithmetic:projected_gradient", "a forward difference divided by 2ε")
def forward_by_two_epsilon(shipped, *given, **_central):
    return shipped(*given, central=True)


@planted("executors.steps.interpreter:Interpreter._run", "a flush that applies nothing")
def empty_flush(shipped, self, phase, frame):
    shipped(self, phase, replace(frame, previous=None) if phase == "flush" else frame)


@planted("executors.steps.micro_batches:accumulated", "shards' losses added, not averaged")
def losses_added(shipped, losses, counts):
    return shipped(losses, counts) * (sum(counts) if len(losses) > 1 else 1)


@planted("executors.steps.ops.sample:Sampling.sample", "every group starts from the seed")
def groups_from_the_seed(shipped, self, instruction):
    reads = tuple(access for access in instruction.reads if not isinstance(access.what, GeneratorState))
    return shipped(self, replace(instruction, reads=reads))


@planted("executors.steps.frames:StepFrame.at", "the present step's learning rate")
def present_rate(shipped, self, offset):
    source = shipped(self, offset)
    return source and replace(source, learning_rate=self.learning_rate or source.learning_rate)


perturbations_summed = called_with(
    "executors.steps.ops.param_passes:ParamPasses.update",
    "perturbations summed, not averaged",
    self=lambda it: altered(it, num_perturbations=1),
)


@planted("zosim.lowering.rank:Rank.is_delayed", "updates that do not wait for their block's turn")
def updates_that_do_not_wait(*_given):
    return False


@planted("zosim.lowering.rank:Listing.emit", "every rank uploads all slices")
def all_slices(shipped, self, name, op, stream, label, segment, reads, writes, work):
    whole = copy_work(sum(access.size_bytes for access in writes))
    shipped(self, name, op, stream, label, segment, reads, writes, whole if label == "upload" else work)


@planted("zosim.lowering.rank:Listing.emit", "a share sent to itself as well")
def sent_to_itself(shipped, self, name, op, stream, label, segment, reads, writes, work):
    if label == "gather":
        work = work.model_copy(update={"link_bytes": sum(access.size_bytes for access in writes)})
    shipped(self, name, op, stream, label, segment, reads, writes, work)


def on_stream(label: str, stream: Stream, name: str) -> Fault:
    """Return a fault of instructions of a label, which run on another stream."""

    @planted("zosim.lowering.rank:Listing.emit", name)
    def fault(shipped, *given):
        self, named, op, own, of, *rest = given
        shipped(self, named, op, stream if of == label else own, of, *rest)

    return fault
