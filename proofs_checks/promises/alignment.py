"""Every placement, order, slice and resume point draws the same directions."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from scipy.stats import kstest, kstwobign

from executors.randomness.counter import BLOCK_ELEMENTS, CounterDraws, CounterKey
from executors.randomness.directions import DIRECTIONS, Direction
from executors.randomness.rng import generator_on
from executors.randomness.walks import draw_rows, walk_past
from executors.threads import DrawThreads
from proofs_checks.claims import Checks, printed
from proofs_checks.faults import groups_from_the_seed
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.setups import literal
from proofs_checks.setups.executed import Case, against_literal, random_cases
from proofs_checks.setups.placements import OFFLOADED, num_unlike, same_bits, train
from proofs_checks.statistics import LEVEL
from zosim.plans import Directions

_CPU = torch.device("cpu")


CASES = (
    Case(traversal="sweep", num_queries=2),
    Case(num_queries=2, blocks="offloaded", update="delayed", num_slots=1),
    Case(
        num_queries=2,
        blocks="offloaded",
        update="delayed",
        rng="counter",
        drawn_ahead=True,
        num_draw_threads=2,
    ),
    Case(dtype="bfloat16", difference="forward", update="delayed", resumed_at=1, num_steps=3),
    Case(num_micro_batches=2, perturbation="copies"),
    Case(distribution="lozo", rank=2, lazy_steps=2, num_steps=3, update="delayed"),
    Case(
        distribution="factorised", rank=3, rng="counter", num_queries=2, blocks="offloaded", update="delayed"
    ),
)
"""Runs that each take another path through the executor: swept, in one slot, drawn ahead, in half precision and resumed, in micro-batches, of low rank."""


def check_placements(context: Context) -> Outcome:
    """Count directions, gradients and weights that differ in a bit from a literal loop, under plans of all kinds."""
    cases = [*CASES, *random_cases("one device", context.samples(150, 10), context.seed)]
    return against_literal(cases, context.seed)


RELEASED = (
    Case(distribution="lozo-released", rank=2, lazy_steps=2, num_steps=3),
    Case(
        distribution="lozo-released",
        rank=2,
        lazy_steps=2,
        num_queries=2,
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
"""Directions of the released LoZO loop: on one rank; on two, resumed within a window; and with a new V in every step, updates delayed."""


def check_released(context: Context) -> Outcome:
    """Count what differs in any bit between runs along the released LoZO loop's directions and a literal loop that draws again for its updates."""
    return against_literal(RELEASED, context.seed)


def check_orders(context: Context) -> Outcome:
    """Compare directions drawn in registration and in execution order with the normal distribution."""
    registration, execution = (
        train(
            "tied",
            num_steps=context.samples(12, 3),
            directions=Directions(order=order),
            seed=context.seed,
            **OFFLOADED,
        ).drawn
        for order in ("registration", "execution")
    )
    num_unlike_groups = num_unlike(registration, execution)
    details = [f"{num_unlike_groups} of {len(registration)} directions differ between the orders"]
    statistic, bound = 0.0, float(kstwobign.isf(LEVEL))
    for order, directions in (("registration", registration), ("execution", execution)):
        sample = torch.cat(list(directions.values())).double().numpy()
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
    slices = sum(_unlike_slices(direction, context.seed) for direction in DIRECTIONS.values())
    walks = sum(_unlike_walks(direction, context.seed) for direction in DIRECTIONS.values())
    keys = _keys_that_meet(context.seed)
    details = [
        f"counter: {slices} of the slices, rows and threaded draws differ from the whole",
        f"counter: {keys} keys that differ in one part draw the same numbers",
        f"mezo: {walks} of the redraws, kept rows and walks differ from the whole",
    ]
    cases = [replace(case, resumed_at=1, num_steps=2, model="tied") for case in CASES[:3]]
    resumed = against_literal(cases, context.seed)
    details += [f"resumed: {line}" for line in resumed.details]
    total = slices + walks + keys + resumed.statistic
    return Outcome(total, 0, "pieces that differ in a bit from the whole", tuple(details))


def _unlike_slices(direction: Direction, seed: int) -> int:
    block = BLOCK_ELEMENTS["cpu"] * direction.distribution.block_factor
    width = 96
    numels = [33, 4 * block + width, 2 * width]
    numels[1] -= numels[1] % width
    threads = DrawThreads(2)
    alone, threaded = CounterDraws(numels, _CPU), CounterDraws(numels, _CPU, threads=threads)
    key = CounterKey.of(seed, 3, 1)
    (_, whole, _) = (
        tensor.flatten()
        for tensor in literal.directions(
            [(numel,) for numel in numels],
            seed=seed,
            step=3,
            query=1,
            rng="counter",
            distribution=direction.distribution.name,
            dtype=torch.float32,
        )
    )
    pieces = torch.empty_like(whole)
    # Descending, so that no piece can lean on the one before it.
    for begin, end in ((3 * block + 1, numels[1]), (block - 1, 3 * block + 1), (17, block - 1), (0, 17)):
        alone.fill(pieces[begin:end], 1, begin, key, direction)
    at_once = torch.empty_like(whole)
    threaded.fill(at_once, 1, 0, key, direction)
    threads.close()
    rows = torch.tensor([0, 1, block // width, numels[1] // width - 1])
    kept = torch.empty((len(rows), width))
    alone.fill_rows(kept, rows, 1, key, direction)
    table = whole.view(-1, width)
    return sum(not same_bits(*pair) for pair in ((pieces, whole), (at_once, whole), (kept, table[rows])))


def _keys_that_meet(seed: int) -> int:
    keys = [(seed, 0, 0), (seed + 1, 0, 0), (seed, 1, 0), (seed, 0, 1)]
    draws = CounterDraws([40, 40], _CPU)
    seen = set()
    for key in keys:
        for parameter in (0, 1):
            out = torch.empty(40)
            draws.fill(out, parameter, 0, CounterKey.of(*key), DIRECTIONS["gaussian"])
            seen.add(tuple(out.tolist()))
    return 2 * len(keys) - len(seen)


def _unlike_walks(direction: Direction, seed: int) -> int:
    """Count what differs from drawing everything where a walk passes one tensor, keeps some rows of a table and draws the next."""
    shapes = [(301,), (2100, 33), (50,)]
    generator = generator_on(_CPU, seed)
    name = direction.distribution.name
    whole = [literal.drawn(shape, name, generator, torch.float32) for shape in shapes]
    again = generator_on(_CPU, seed)
    walk_past([301], torch.empty(0), direction, again)
    state = again.get_state()
    # One of them lies across two of the pieces that are drawn at once.
    rows = torch.tensor([0, 5, 1986, 2099])
    kept = torch.empty((len(rows), 33))
    draw_rows(kept, rows, 2100, direction, again)
    last = torch.empty(shapes[2])
    direction.fill(last, again)
    redrawn = torch.empty(shapes[1])
    again.set_state(state)
    direction.fill(redrawn, again)
    pairs = ((kept, whole[1][rows]), (last, whole[2]), (redrawn, whole[1]))
    return sum(not same_bits(*pair) for pair in pairs)


CHECKS: Checks = {
    "same-direction-everywhere": printed(
        check_placements,
        Mutant("other seeds of steps", "executors.runs.records:_NUM_SEEDS", "1000000000", "999999999"),
        Mutant(
            "one decay too many",
            "executors.models.parameters:_NO_DECAY",
            ", 'layer_norm', 'layernorm'",
            ",",
        ),
        Mutant(
            "counter blocks of 256 elements",
            "executors.randomness.counter:BLOCK_ELEMENTS",
            "'cpu': 16384",
            "'cpu': 256",
        ),
        Mutant(
            "one bit of a weight",
            "executors.steps.arithmetic:Sweeper.update",
            "self._sweep(theta, sweep, num_temporaries=2 if weight_decay else 1)",
            "self._sweep(theta, sweep, num_temporaries=2 if weight_decay else 1); theta[:1].mul_(1 + 2**-23)",
        ),
        Mutant(
            "a right factor that is drawn anew in every step",
            "executors.randomness.low_rank:FactorDraws.walked",
            "opens = step == window.first",
            "opens = True",
        ),
        Mutant(
            "low rank updates without 1/r",
            "executors.randomness.low_rank:divisor_of",
            "float(rank) ** -rank_power",
            "1.0",
        ),
        Mutant(
            "the last micro-batch's loss not counted",
            "executors.steps.micro_batches:accumulated",
            "for loss, n in pairs:",
            "for loss, n in pairs[:-1]:",
        ),
        groups_from_the_seed,
        Mutant(
            "a delayed update draws from the present step",
            "executors.steps.ops.draw:counter_key",
            "source = frame.at(op.step)",
            "source = frame.at(0) if frame.seeds else frame.at(op.step)",
        ),
        Mutant(
            "rows perturbed with another rounding than their table",
            "executors.steps.arithmetic:gathered",
            "rows.add_(torch.mul(z, scale * epsilon, out=torch.empty_like(rows)))",
            "rows.add_(z, alpha=scale * epsilon)",
        ),
        Mutant(
            "gathered rows that skip the step to -ε",
            "executors.steps.arithmetic:gathered",
            "for scale in scales:",
            "for scale in scales[:1]:",
        ),
    ),
    "drawing-orders": printed(
        check_orders,
        Mutant(
            "the order ignored",
            "zosim.lowering.directions:walk_order",
            'plan.directions.order == "registration"',
            "plan.directions.order",
        ),
        Mutant(
            "normals of the wrong width",
            "executors.randomness.directions:Gaussian.fill",
            "out.normal_(0.0, 1.0,",
            "out.normal_(0.0, 1.2,",
        ),
    ),
    "released-loop-draws-again": printed(
        check_released,
        Mutant(
            "updates along what was perturbed by",
            "zosim.lowering.directions:Directions.draw",
            "for_update and self._rank.distribution.is_redrawn",
            "False",
        ),
        Mutant(
            "a walk that passes V again",
            "executors.randomness.low_rank:FactorDraws.redrawn",
            "lefts, _ = self._draw(group, generator, with_rights=False, places=places)",
            "lefts, _ = self._draw(group, generator, with_rights=True, places=places)",
        ),
        Mutant(
            "groups before it passed with their V",
            "executors.randomness.low_rank:FactorDraws.redrawn",
            "self._walk_to(group, query, generator, with_rights=False)",
            "self._walk_to(group, query, generator, with_rights=True)",
        ),
    ),
    "slices-and-resume-points": printed(
        check_slices,
        Mutant(
            "a slice read from its block's start",
            "executors.randomness.counter:CounterDraws._window",
            "numbers[low - begin : high - begin]",
            "numbers[: high - low]",
        ),
        Mutant(
            "a key without its step",
            "executors.randomness.counter:CounterKey.of",
            "mixed(seed, step, query)",
            "mixed(seed, query)",
        ),
        Mutant(
            "blocks numbered within their parameter",
            "executors.randomness.counter:CounterDraws._seeds",
            " + np.uint64(first_block)",
            "",
        ),
        Mutant(
            "a walk that draws pieces of 1000",
            "executors.randomness.walks:_pieces",
            "length = min(most, numel - begin)",
            "length = min(1000, numel - begin)",
        ),
        Mutant(
            "a resumed run that starts its seeds again",
            "executors.runs.session:Session.seeds_of",
            "step, query)",
            "step - 2 * (self.first_timed_step > 0), query)",
        ),
    ),
}
