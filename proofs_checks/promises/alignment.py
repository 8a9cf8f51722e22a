"""Every placement, order, slice and resume point draws the same perturbations."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from scipy.stats import kstest, kstwobign

from executors.randomness.counter import BLOCK_ELEMENTS, CounterKey, CounterSampler
from executors.randomness.rng import generator_on
from executors.randomness.samplers import SAMPLERS, DistributionSampler
from executors.randomness.sequential import sample_rows, skip_tensors
from executors.threads import SamplingThreads
from proofs_checks.claims import Checks, printed
from proofs_checks.faults import groups_from_the_seed, updates_without_rank, wider_normals
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import Fault, altered, called_with, planted
from proofs_checks.setups import literal
from proofs_checks.setups.executed import Case, against_literal, random_cases
from proofs_checks.setups.placements import OFFLOADED, num_unlike, same_bits, train
from proofs_checks.statistics import LEVEL
from zosim.plans import Perturbations

_CPU = torch.device("cpu")


CASES = (
    Case(traversal="full", num_perturbations=2),
    Case(num_perturbations=2, blocks="offloaded", update="delayed", num_staging_buffers=1),
    Case(
        num_perturbations=2,
        blocks="offloaded",
        update="delayed",
        rng="counter",
        sampled_ahead=True,
        num_sampling_threads=2,
    ),
    Case(dtype="bfloat16", difference="forward", update="delayed", resumed_at=1, num_steps=3),
    Case(num_micro_batches=2, perturbation="copies"),
    Case(distribution="lozo", rank=2, lazy_steps=2, num_steps=3, update="delayed"),
    Case(
        distribution="factorised",
        rank=3,
        rng="counter",
        num_perturbations=2,
        blocks="offloaded",
        update="delayed",
    ),
)
"""Runs that each take another path through the executor: in full passes, in one staging buffer, drawn ahead, in half precision and resumed, in micro-batches, of low rank."""


def check_placements(context: Context) -> Outcome:
    """Count perturbations, gradients and weights that differ in a bit from a literal loop, under plans of all kinds."""
    cases = [*CASES, *random_cases("one device", context.samples(150, 10), context.seed)]
    return against_literal(cases, context.seed)


RELEASED = (
    Case(distribution="lozo-released", rank=2, lazy_steps=2, num_steps=3),
    Case(
        distribution="lozo-released",
        rank=2,
        lazy_steps=2,
        num_perturbations=2,
        perturb=2,
        resumed_at=1,
        num_steps=3,
    ),
    Case(
        model="untied",
        distribution="lozo-released",
        rank=1,
        lazy_steps=1,
        update="delayed",
        blocks="offloaded",
    ),
)
"""Perturbations of the released LoZO loop: on one rank; on two, resumed within an interval; and with a new V in every step, updates delayed."""


def check_released(context: Context) -> Outcome:
    """Count what differs in any bit between runs along the released LoZO loop's perturbations and a literal loop that draws again for its updates."""
    return against_literal(RELEASED, context.seed)


def check_orders(context: Context) -> Outcome:
    """Compare perturbations drawn in registration and in execution order with the normal distribution."""
    registration, execution = (
        train(
            "tied",
            num_steps=context.samples(12, 3),
            perturbations=Perturbations(order=order),
            seed=context.seed,
            **OFFLOADED,
        ).sampled
        for order in ("registration", "execution")
    )
    num_unlike_groups = num_unlike(registration, execution)
    details = [f"{num_unlike_groups} of {len(registration)} perturbations differ between the orders"]
    statistic, bound = 0.0, float(kstwobign.isf(LEVEL))
    for order, perturbations in (("registration", registration), ("execution", execution)):
        sample = torch.cat(list(perturbations.values())).double().numpy()
        distance = kstest(sample, "norm").statistic * math.sqrt(len(sample))
        details.append(
            f"{order}: {distance:.2f} = √n times Kolmogorov's distance to the normal, n = {len(sample)}"
        )
        statistic = max(statistic, float(distance))
    statistic = statistic if num_unlike_groups else math.inf
    return Outcome(
        statistic, bound, "√n times Kolmogorov's distance; infinite if the streams are one", tuple(details)
    )


def check_slices(context: Context) -> Outcome:
    """Count slices, rows and resumed runs that differ from the whole."""
    slices = sum(_unlike_slices(sampler, context.seed) for sampler in SAMPLERS.values())
    sequences = sum(_unlike_sequences(sampler, context.seed) for sampler in SAMPLERS.values())
    keys = _keys_that_meet(context.seed)
    details = [
        f"counter: {slices} of the slices, rows and threaded draws differ from the whole",
        f"counter: {keys} keys that differ in one part draw the same numbers",
        f"mezo: {sequences} of the redraws, kept rows and sequences differ from the whole",
    ]
    cases = [replace(case, resumed_at=1, num_steps=2, model="tied") for case in CASES[:3]]
    resumed = against_literal(cases, context.seed)
    details += [f"resumed: {line}" for line in resumed.details]
    total = slices + sequences + keys + resumed.statistic
    return Outcome(total, 0, "pieces that differ in a bit from the whole", tuple(details))


def _unlike_slices(sampler: DistributionSampler, seed: int) -> int:
    block = BLOCK_ELEMENTS["cpu"] * sampler.distribution.block_factor
    width = 96
    numels = [33, 4 * block + width, 2 * width]
    numels[1] -= numels[1] % width
    threads = SamplingThreads(2)
    alone, threaded = CounterSampler(numels, _CPU), CounterSampler(numels, _CPU, threads=threads)
    key = CounterKey.of(seed, 3, 1)
    (_, whole, _) = (
        tensor.flatten()
        for tensor in literal.perturbations(
            [(numel,) for numel in numels],
            seed=seed,
            step=3,
            perturbation=1,
            rng="counter",
            distribution=sampler.distribution.name,
            dtype=torch.float32,
        )
    )
    pieces = torch.empty_like(whole)
    # Descending, so that no piece can lean on the one before it.
    for begin, end in ((3 * block + 1, numels[1]), (block - 1, 3 * block + 1), (17, block - 1), (0, 17)):
        alone.fill(pieces[begin:end], 1, begin, key, sampler)
    at_once = torch.empty_like(whole)
    threaded.fill(at_once, 1, 0, key, sampler)
    threads.close()
    rows = torch.tensor([0, 1, block // width, numels[1] // width - 1])
    kept = torch.empty((len(rows), width))
    alone.fill_rows(kept, rows, 1, key, sampler)
    table = whole.view(-1, width)
    return sum(not same_bits(*pair) for pair in ((pieces, whole), (at_once, whole), (kept, table[rows])))


def _keys_that_meet(seed: int) -> int:
    keys = [(seed, 0, 0), (seed + 1, 0, 0), (seed, 1, 0), (seed, 0, 1)]
    counter = CounterSampler([40, 40], _CPU)
    seen = set()
    for key in keys:
        for parameter in (0, 1):
            out = torch.empty(40)
            counter.fill(out, parameter, 0, CounterKey.of(*key), SAMPLERS["gaussian"])
            seen.add(tuple(out.tolist()))
    return 2 * len(keys) - len(seen)


def _unlike_sequences(sampler: DistributionSampler, seed: int) -> int:
    """Count what differs from drawing everything where a sequence skips one tensor, keeps some rows of a table and draws the next."""
    shapes = [(301,), (2100, 33), (50,)]
    generator = generator_on(_CPU, seed)
    name = sampler.distribution.name
    whole = [literal.sampled(shape, name, generator, torch.float32) for shape in shapes]
    again = generator_on(_CPU, seed)
    skip_tensors([301], torch.empty(0), sampler, again)
    state = again.get_state()
    # One of them lies across two of the pieces that are drawn at once.
    rows = torch.tensor([0, 5, 1986, 2099])
    kept = torch.empty((len(rows), 33))
    sample_rows(kept, rows, 2100, sampler, again)
    last = torch.empty(shapes[2])
    sampler.fill(last, again)
    resampled = torch.empty(shapes[1])
    again.set_state(state)
    sampler.fill(resampled, again)
    pairs = ((kept, whole[1][rows]), (last, whole[2]), (resampled, whole[1]))
    return sum(not same_bits(*pair) for pair in pairs)


@planted("executors.steps.arithmetic:ParamPass.update", "one bit of a weight")
def one_bit(shipped, self, theta, *rest, **named):
    shipped(self, theta, *rest, **named)
    theta[:1].mul_(1 + 2**-23)


@planted(
    "executors.randomness.low_rank:FactorSampler.sequential",
    "a right factor that is drawn anew in every step",
)
def right_sampled_anew(shipped, self, group, perturbation, _step, interval, *rest):
    return shipped(self, group, perturbation, interval.first, interval, *rest)


last_loss_not_counted = called_with(
    "executors.steps.micro_batches:accumulated",
    "the last micro-batch's loss not counted",
    losses=lambda losses: [*losses[:-1], 0 * losses[-1]] if len(losses) > 1 else losses,
)


@planted("executors.steps.ops.sample:counter_key", "a delayed update draws from the present step")
def samples_of_the_present_step(shipped, frame, op):
    return shipped(frame, replace(op, step=0) if frame.seeds else op)


@planted("executors.steps.arithmetic:gathered", "rows perturbed with another rounding than their table")
def rows_rounded_once(shipped, theta, z, *rest):
    return shipped(theta.double(), z.double(), *rest).to(theta.dtype)


order_ignored = called_with(
    "zosim.lowering.perturbations:sampling_order",
    "the order ignored",
    plan=lambda plan: altered(plan, perturbations=altered(plan.perturbations, order="registration")),
)


@planted("zosim.lowering.perturbations:Perturbations.sample", "updates along what was perturbed by")
def updates_along_perturbations(shipped, *given, **named):
    return shipped(*given, **{**named, "for_update": False})


def resampled_with_rights(method: str, name: str) -> Fault:
    """Return a fault of resampled factors, for which a method of theirs draws or passes ``V``, too."""

    @planted("executors.randomness.low_rank:FactorSampler.resampled", name)
    def fault(shipped, self, *given):
        shipped_method = getattr(self, method)  # also where it is never called, as after it was renamed

        def with_rights(*rest, **named):
            return shipped_method(*rest, **{**named, "with_rights": True})

        return shipped(altered(self, **{method: with_rights}), *given)

    return fault


@planted("executors.randomness.counter:CounterSampler.fill", "a slice read from its block's start")
def slice_from_its_block_on(shipped, self, out, parameter, offset, key, sampler, *factor):
    start = offset - offset % self.block_elements(sampler)
    shipped(self, out, parameter, start, key, sampler, *factor)


CHECKS: Checks = {
    "same-direction-everywhere": printed(
        check_placements,
        Fault("other seeds of steps", "executors.runs.records:_NUM_SEEDS", lambda num: num - 1),
        Fault("one decay too many", "executors.models.parameters:_NO_DECAY", lambda names: names[:1]),
        Fault(
            "counter blocks of 256 elements",
            "executors.randomness.counter:BLOCK_ELEMENTS",
            lambda elements: {**elements, "cpu": 256},
        ),
        one_bit,
        right_sampled_anew,
        updates_without_rank,
        last_loss_not_counted,
        groups_from_the_seed,
        samples_of_the_present_step,
        rows_rounded_once,
        called_with(
            "executors.steps.arithmetic:gathered",
            "gathered rows that skip the step to -ε",
            scales=lambda scales: scales[:1],
        ),
    ),
    "drawing-orders": printed(
        check_orders,
        order_ignored,
        wider_normals(1.2, "normals of the wrong width"),
    ),
    "released-loop-draws-again": printed(
        check_released,
        updates_along_perturbations,
        resampled_with_rights("_sample", "a sequence with V again"),
        resampled_with_rights("_skip_to", "groups before it passed with their V"),
    ),
    "slices-and-resume-points": printed(
        check_slices,
        slice_from_its_block_on,
        called_with("executors.randomness.counter:CounterKey.of", "a key without its step", step=0),
        called_with(
            "executors.randomness.counter:CounterSampler._seeds",
            "blocks numbered within their parameter",
            parameter=0,
        ),
        called_with(
            "executors.randomness.sequential:_chunks",
            "a sequence drawn in pieces of 1000",
            most=lambda most: min(most, 1000),
        ),
        Fault(
            "a resumed run that starts its seeds again",
            "executors.runs.session:Session.seeds_of",
            lambda shipped, self, step: shipped(self, step - 2 * (self.first_timed_step > 0)),
        ),
    ),
}
