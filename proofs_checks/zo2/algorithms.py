"""ZO2's algorithms as printed: delayed updates, the order of drawing, its scheduler, and transfers in fewer bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proofs_checks.claims import Checks, conditioned, corrected, counterexample, printed, reading
from proofs_checks.exact import at_most, equal, exceeds, is_true, within
from proofs_checks.faults import empty_flush, present_rate, updates_that_do_not_wait
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with
from proofs_checks.setups.executed import Case, differences
from proofs_checks.setups.placements import OFFLOADED, same_bits, tiny_model, train
from proofs_checks.zo2.step_time import TOLERANCE, block_bytes, model, program
from zosim.lowering import lower
from zosim.plans import Placement, Plan, Residency, Schedule
from zosim.program.operations import Forward

# -- algorithm 1 beside algorithm 3 -----------------------------------------------------------------------------------

_WIDTH, _EPSILON = 3, 1e-3
_INPUT = torch.tensor([0.4, -0.9, 0.2])


def _forward(theta: Tensor, hidden: Tensor) -> Tensor:
    return torch.tanh(hidden @ theta + hidden)


def _loss(hidden: Tensor) -> Tensor:
    return ((hidden - 0.3) ** 2).sum()


def blocks(count: int, *, tied: bool = False) -> list[Tensor]:
    """Return a chain's matrices; the last is the first where they are tied."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn((_WIDTH, _WIDTH), generator=generator) * 0.5 for _ in range(count)]
    return [*made[:-1], made[0]] if tied else made


def _sample(generator: torch.Generator) -> Tensor:
    return torch.normal(0.0, 1.0, (_WIDTH, _WIDTH), generator=generator)


def literal_mezo(chain: Sequence[Tensor], rates: Sequence[float]) -> None:
    """Run algorithm 3 in place, a step for each learning rate; a tensor that stands twice in the chain is one parameter."""
    parameters = list({id(theta): theta for theta in chain}.values())

    def add_perturbation(seed: int, factor: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for theta in parameters:
            theta.add_(factor * _sample(generator))

    for step, rate in enumerate(rates):
        losses = []
        for factor in (_EPSILON, -2 * _EPSILON):
            add_perturbation(step, factor)
            hidden = _INPUT
            for theta in chain:
                hidden = _forward(theta, hidden)
            losses.append(_loss(hidden))
        add_perturbation(step, _EPSILON)
        g = ((losses[0] - losses[1]) / (2 * _EPSILON)).item()
        generator = torch.Generator().manual_seed(step)
        for theta in parameters:
            theta.sub_(rate * (g * _sample(generator)))


def literal_zo2(chain: Sequence[Tensor], rates: Sequence[float], *, own_rate: bool, flushed: bool) -> None:
    """Run algorithm 1 in place, a step for each learning rate.

    - `chain`: embedding, blocks and head in turn, each handed to DualForward.
    - `rates`: ``η_t``.
    - `own_rate`: an update uses the learning rate of the step that its g is of; else that of the step in which it runs.
    - `flushed`: the last step's update is applied behind the loop, which the print leaves out.
    """
    generator, buffer, g = torch.Generator(), deque[Tensor](), 0.0

    def update(theta: Tensor, state: Tensor, rate: float) -> Tensor:
        generator.set_state(state)
        theta.sub_(rate * (g * _sample(generator)))
        return generator.get_state()

    def perturb(theta: Tensor, state: Tensor, factor: float) -> Tensor:
        generator.set_state(state)
        theta.add_(factor * _sample(generator))
        return generator.get_state()

    for step, rate in enumerate(rates):
        generator.manual_seed(step)
        state = generator.get_state()
        buffer.append(state)
        last = buffer.popleft() if step else state
        plus = minus = _INPUT
        of_update = rates[step - 1] if own_rate and step else rate
        for theta in chain:
            if g:
                last = update(theta, last, of_update)
            perturb(theta, state, _EPSILON)
            plus = _forward(theta, plus)
            perturb(theta, state, -2 * _EPSILON)
            minus = _forward(theta, minus)
            state = perturb(theta, state, _EPSILON)
        g = ((_loss(plus) - _loss(minus)) / (2 * _EPSILON)).item()
    if flushed:
        last = buffer.popleft()
        for theta in chain:
            last = update(theta, last, rates[-1])


def _unlike(first: Sequence[Tensor], second: Sequence[Tensor]) -> int:
    return sum(not same_bits(a, b) for a, b in zip(first, second, strict=True))


def _apart(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def _mezo(rates: Sequence[float], *, tied: bool = False) -> list[Tensor]:
    chain = blocks(3, tied=tied)
    literal_mezo(chain, rates)
    return chain


def _zo2(
    rates: Sequence[float], *, tied: bool = False, own_rate: bool = True, flushed: bool = True
) -> list[Tensor]:
    chain = blocks(3, tied=tied)
    literal_zo2(chain, rates, own_rate=own_rate, flushed=flushed)
    return chain


_STEADY = (0.05, 0.05, 0.05)
_FALLING = (0.05, 0.025, 0.0125)


def check_as_printed(_context: Context) -> Outcome:
    """Show that algorithm 1 as printed ends with T - 1 updates, and takes the wrong learning rate where that changes."""
    parts = {
        "T steps are T - 1 of MeZO's": within(
            _apart(_zo2(_STEADY, flushed=False), _mezo(_STEADY[:-1])),
            1e-6,
            what="largest difference, T = 3, up to the drift",
        ),
        "and not T": exceeds(
            _apart(_zo2(_STEADY, flushed=False), _mezo(_STEADY)), 1e-3, what="largest difference"
        ),
        "η_t of the step in which an update runs": equal(
            float(_unlike(_zo2(_FALLING, own_rate=False), _mezo(_FALLING))),
            3.0,
            what="of 3 blocks that differ",
        ),
    }
    return everything_holds(parts)


def check_mended(_context: Context) -> Outcome:
    """Compare algorithm 1, flushed, each update at its own learning rate, with MeZO, bit for bit."""
    return everything_holds(
        {
            name: is_true(_unlike(_zo2(rates), _mezo(rates)) == 0, what="bits, T = 3")
            for name, rates in (("one learning rate", _STEADY), ("falling", _FALLING))
        }
    )


def check_shipped_offloading(context: Context) -> Outcome:
    """Count what differs in any bit between the shipped offloaded run, its updates delayed, and a literal MeZO loop."""
    case = Case(blocks="offloaded", update="delayed", num_steps=context.samples(4, 3))
    unlike = differences(case, context.seed)
    return is_true(not unlike, what=f"{case.describe()}: {unlike[:3] or 'no bit differs'}")


def check_tied_table(_context: Context) -> Outcome:
    """Show that a table that is embedding and head draws twice under algorithm 1, and ends elsewhere than under MeZO."""
    tied, untied = (_unlike(_zo2(_STEADY, tied=kind), _mezo(_STEADY, tied=kind)) for kind in (True, False))
    return everything_holds(
        {
            "tied": equal(float(tied), 3.0, what="places of the chain that differ"),
            "untied": equal(float(untied), 0.0, what="places of the chain that differ"),
        }
    )


def check_registration_order(context: Context) -> Outcome:
    """Count what differs in any bit between MeZO and the shipped offloaded run of a tied model that draws in registration order."""
    case = Case(model="tied", blocks="offloaded", update="delayed", num_steps=2)
    unlike = differences(case, context.seed)
    return is_true(not unlike, what=f"{unlike[:3] or 'no bit differs'}")


# -- algorithm 2 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSeconds:
    """How long a block's upload, dual forward and offload take."""

    upload: float
    compute: float
    offload: float


def most_resident(count: int, seconds: BlockSeconds, *, waits_for_offloads: bool = False) -> int:
    """Return how many blocks lie on the device at once under algorithm 2 as printed, three streams and its waits alone.

    `waits_for_offloads`: the host also waits for the offload of block ``i - 2`` before it launches that of ``i - 1``.

    >>> most_resident(12, BlockSeconds(1.0, 1.0, 1.0))
    3
    """
    free = dict.fromkeys("UCO", 0.0)
    begins: dict[tuple[str, int], float] = {}
    ends: dict[tuple[str, int], float] = {("C", 0): 0.0}
    host = 0.0
    takes = {"U": seconds.upload, "C": seconds.compute, "O": seconds.offload}

    def launch(kind: str, block: int) -> None:
        begins[kind, block] = max(host, free[kind])
        ends[kind, block] = free[kind] = begins[kind, block] + takes[kind]

    launch("C", 0)  # the embedding
    launch("U", 1)
    for i in range(1, count):
        host = max(host, ends["U", i])
        if i > 1:
            host = max(host, ends["C", i - 1])
            if waits_for_offloads and i > 2:
                host = max(host, ends["O", i - 2])
            launch("O", i - 1)
        launch("C", i)
        launch("U", i + 1)
    host = max(host, ends["C", count - 1], ends["U", count])
    launch("O", count - 1)
    launch("C", count)
    host = max(host, ends["C", count])
    launch("O", count)
    lives = [(begins["U", i], ends["O", i]) for i in range(1, count + 1)]
    return max(sum(begin <= at < end for begin, end in lives) for at, _ in lives)


def check_blocks_pile_up(_context: Context) -> Outcome:
    """Count blocks on the device under algorithm 2 where offloads are slow: nothing waits for them."""
    parts = {}
    for count in (8, 16, 32):
        parts[f"{count} blocks, offloads of ten forwards"] = exceeds(
            most_resident(count, BlockSeconds(1.0, 1.0, 10.0)), 0.8 * count, what="blocks at once"
        )
        parts[f"{count} blocks, offloads of 1.5 forwards"] = exceeds(
            most_resident(count, BlockSeconds(1.0, 1.0, 1.5)), count / 4, what="blocks at once"
        )
    return everything_holds(parts)


def check_blocks_are_few(_context: Context) -> Outcome:
    """Count blocks on the device under algorithm 2 where offloads keep up: three, as figure 1 shows."""
    parts = {}
    for upload, compute, offload in ((1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 4, 2), (3, 1, 1)):
        peak = most_resident(24, BlockSeconds(upload, compute, offload))
        parts[f"{upload}, {compute} and {offload} s"] = at_most(peak, 3, what="blocks at once")
    waiting = most_resident(24, BlockSeconds(1, 1, 10), waits_for_offloads=True)
    parts["offloads of ten forwards, waited for"] = at_most(waiting, 4, what="blocks at once")
    return everything_holds(parts)


# -- transfers ----------------------------------------------------------------------------------------------------------------

_RATE = 1e-7
"""The learning rate of the paper's experiments."""


def _stay(transfer: str | None, seed: int, num_steps: int) -> tuple[int, int]:
    """Return how many weights of blocks are, in the format of transfers, what they were before a run, and how many there are."""
    axes: dict[str, Any] = {
        **OFFLOADED,
        "residency": Residency.model_validate({"blocks": "offloaded", "transfer_dtype": transfer}),
    }
    trace = train(
        "untied", num_steps=num_steps, learning_rate=lambda _step: _RATE, weight_decay=0.0, seed=seed, **axes
    )
    same = total = 0
    for name, start in tiny_model("untied").named_parameters():
        if ".layers." in name:
            before = (
                start.detach() if transfer is None else start.detach().to(getattr(torch, transfer)).float()
            )
            same += int((trace.weights[name] == before).sum())
            total += start.numel()
    return same, total


def check_updates_lost(context: Context) -> Outcome:
    """Count weights of blocks that a run with transfers in bfloat16 moves, at the paper's learning rate: next to none."""
    steps = context.samples(20, 4)
    narrow, total = _stay("bfloat16", context.seed, steps)
    wide, _ = _stay(None, context.seed, steps)
    roundoff = 2.0**-8
    lost, kept = (float((torch.tensor(1.0) - part * roundoff / 2).bfloat16()) for part in (0.99, 1.01))
    return everything_holds(
        {
            f"bfloat16, {steps} steps": exceeds(narrow, 0.99 * total, what="weights as they were"),
            f"float32, {steps} steps": within(wide, 0.1 * total, what="weights as they were"),
            "an update below half a step of bfloat16": equal(lost, 1.0, what="1 - 0.99·2⁻⁹"),
            "and one above": equal(kept, 1.0 - roundoff, what="1 - 1.01·2⁻⁹"),
        }
    )


def _copied_bytes(transfer: str | None) -> int:
    plan = Plan(
        model=model(),
        placement=Placement(topology="none", devices=("gpu0",)),
        batch=1,
        seq=64,
        residency=Residency.model_validate({"blocks": "offloaded", "transfer_dtype": transfer}),
        schedule=Schedule(update="delayed"),
    )
    return sum(item.work.copy_bytes for item in lower(plan).step if item.label in {"upload", "offload"})


def check_transfer_sizes(_context: Context) -> Outcome:
    """Compare bytes that cross the bus in narrower formats with those in float32."""
    whole = _copied_bytes(None)
    return everything_holds(
        {
            name: equal(
                _copied_bytes(name) / whole, part, what="part of float32's bytes", tolerance=TOLERANCE / part
            )
            for name, part in (("float16", 0.5), ("bfloat16", 0.5), ("float8_e4m3", 0.25))
        }
    )


# -- what "half the overhead" means ---------------------------------------------------------------------------------------------

_LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 6.0)
"""A block's transfer over one of its forwards."""


def check_bytes_per_forward(_context: Context) -> Outcome:
    """Compare bytes uploaded for each forward of a block in a shipped step with half of the block."""
    items = program().step
    forwards = sum(isinstance(item.op, Forward) and item.op.segment.startswith("block.") for item in items)
    uploaded = sum(item.work.copy_bytes for item in items if item.label == "upload")
    return equal(uploaded / forwards / block_bytes(), 0.5, what="blocks a forward", tolerance=TOLERANCE)


def check_waiting(_context: Context) -> Outcome:
    """Compare what a step waits for a block's transfer with two forwards beside it and with one: half at one ratio alone."""
    waits = [(max(0.0, load - 2), max(0.0, load - 1)) for load in _LOADS]
    shares = [two / one for two, one in waits if one]
    return equal(shares, [0.5] * len(shares), what=f"waiting, transfers of {_LOADS[2:]} forwards")


# -- faults -------------------------------------------------------------------------------------------------------------------


execution_order = called_with(
    "zosim.lowering.perturbations:sampling_order",
    "the order of execution for that of registration",
    plan=lambda plan: altered(plan, perturbations=altered(plan.perturbations, order="execution")),
)


def _zo2_with(name: str, **changes: bool) -> Fault:
    """Return a fault by which ZO2's algorithm 1 is run in one way or other, whatever is asked for."""
    return Fault(
        name,
        f"{__name__}:literal_zo2",
        lambda shipped, chain, rates, **how: shipped(chain, rates, **{**how, **changes}),
    )


_MENDED = (
    corrected(
        check_mended,
        _zo2_with("the print: no update behind the loop", flushed=False),
        _zo2_with("the print: the present learning rate", own_rate=False),
    ),
    corrected(check_shipped_offloading, empty_flush, present_rate),
    counterexample(
        check_as_printed,
        _zo2_with("an update behind the loop, which the print lacks", flushed=True),
        _zo2_with("the learning rate of the step before, which the print lacks", own_rate=True),
    ),
)
_FEW = (
    conditioned(
        check_blocks_are_few,
        Fault(
            "offloads that nothing waits for",
            f"{__name__}:most_resident",
            lambda shipped, count, seconds, **_: shipped(count, seconds),
        ),
    ),
    counterexample(
        check_blocks_pile_up,
        called_with(f"{__name__}:most_resident", "offloads that are waited for", waits_for_offloads=True),
    ),
)

CHECKS: Checks = {
    "zo2-algorithm-1-last-update": _MENDED,
    "zo2-path-needs-mezo-order": (
        conditioned(check_registration_order, execution_order),
        counterexample(
            check_tied_table,
            Fault("a head of its own", f"{__name__}:blocks", lambda shipped, count, **_: shipped(count)),
        ),
    ),
    "zo2-algorithm-2-blocks-at-once": _FEW,
    "zo2-narrow-transfers-lose-updates": counterexample(
        check_updates_lost,
        called_with(
            "executors.steps.arithmetic:ParamPass.update",
            "steps ten thousand times as long",
            learning_rate=lambda learning_rate: 1e4 * learning_rate,
        ),
    ),
    "zo2-transfer-sizes": printed(
        check_transfer_sizes,
        Fault(
            "transfers in the weights' format",
            "zosim.plans:Plan.transfer_dtype",
            lambda _shipped, self: self.weights.dtype,
        ),
    ),
    "zo2-half-the-overhead": (
        reading(
            "bytes for each forward",
            check_bytes_per_forward,
            updates_that_do_not_wait,
        ),
        reading(
            "time that a step waits for transfers",
            check_waiting,
        ),
    ),
}

DISTZO2_COPIES: Checks = {
    "distzo2-algorithm-3-last-update": _MENDED,
    "distzo2-algorithm-2-blocks-at-once": _FEW,
}
"""DistZO2 reprints ZO2's algorithms."""
