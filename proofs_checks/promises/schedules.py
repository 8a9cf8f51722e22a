"""Programs that cannot go wrong, whatever their instructions take, and what makes them so."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, islice

from proofs_checks.claims import Checks, corrected, counterexample, printed
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import Fault, altered, called_with, planted
from proofs_checks.setups.placements import tiny_model, tiny_plan
from topology.errors import Hazard, PlanError, ProgramError
from zosim.lowering import lower
from zosim.plans import Plan, Residency, Schedule
from zosim.program import Program
from zosim.program.instructions import Access, Dependency, Instruction, Phase, Stream
from zosim.program.step_graph import Listed, StepGraph
from zosim.program.validate import validate

_NUM_STEPS = 3


_AXES: Mapping[str, Mapping[str, Sequence[object]]] = {
    "estimator": {"difference": ("central", "forward"), "num_perturbations": (1, 2)},
    "perturbations": {
        "rng": ("mezo", "counter"),
        "order": ("registration", "execution"),
        "sampled_ahead": (False, True),
    },
    "weights": {"perturbation": ("serial", "copies")},
    "residency": {
        "blocks": ("offloaded", "resident"),
        "embedding_and_head": ("resident", "offloaded"),
        "num_staging_buffers": (1, 2, 3),
        "overlap": (True, False),
        "reuse_staging_buffers": (True, False),
        "transfer_dtype": ("float32", "bfloat16"),
    },
    "schedule": {"traversal": ("full", "blockwise"), "update": ("immediate", "delayed")},
}


def plans(rng: random.Random) -> Iterator[Plan]:
    """Yield plans without end, axes chosen at random; combinations that contradict themselves are left out."""
    models = [tiny_plan(tiny_model(name)).model_dump() for name in ("tied", "untied")]
    while True:
        chosen = {
            axis: {name: rng.choice(options) for name, options in fields.items()}
            for axis, fields in _AXES.items()
        }
        with suppress(PlanError):
            yield Plan.model_validate(rng.choice(models) | chosen)


def zo2_program(num_staging_buffers: int = 3) -> Program:
    """Return the offloaded program with delayed updates of a tiny model."""
    residency = Residency(blocks="offloaded", num_staging_buffers=num_staging_buffers)
    return lower(tiny_plan(tiny_model("untied"), residency=residency, schedule=Schedule(update="delayed")))


def check_rules(context: Context) -> Outcome:
    """Look for a lowered program that the validator refuses, or that goes wrong under random durations."""
    rng = random.Random(context.seed)
    chosen = islice(plans(rng), context.samples(300, 40))
    count = 0
    for count, plan in enumerate(chosen, 1):
        program = lower(plan)
        try:
            validate(program)
        except ProgramError as error:
            return Outcome(
                1, 0, "programs that break a rule", (f"program {count} is refused: {error.message}",)
            )
        if met := clashes(program, rng) or clashes(program, rng):
            return Outcome(len(met), 0, "programs that break a rule", (f"program {count}: {met[0]} met",))
    line = f"{count} combinations of axes: none refused by the validator, no conflicting accesses met under random durations"
    return Outcome(0, 0, "programs that break a rule", (line,))


def clashes(program: Program, rng: random.Random) -> list[tuple[str, str]]:
    """Return pairs of instructions that touch common bytes at one time, one of them writing, in a random run.

    Durations spread over four decades. Nothing of the validator, the simulator or their order is used: a second
    witness for what may overlap.
    """
    placed = StepGraph(program, _NUM_STEPS).listed
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    free: dict[Stream, float] = {}
    for item in placed:
        stream = item.instruction.stream
        starts[item.index] = max([free.get(stream, 0.0), *(ends[index] for index in item.after)])
        ends[item.index] = free[stream] = starts[item.index] + 10.0 ** rng.uniform(-2, 2)
    return [
        (first.instruction.id, second.instruction.id)
        for first, second in _conflicting(placed)
        if starts[first.index] < ends[second.index] and starts[second.index] < ends[first.index]
    ]


def _conflicting(placed: Sequence[Listed]) -> Iterator[tuple[Listed, Listed]]:
    """Yield pairs on different streams that touch common bytes, one of them writing."""
    touched: dict[str, list[tuple[Listed, Access, bool]]] = {}
    for item in placed:
        for access in item.instruction.reads:
            touched.setdefault(access.buffer, []).append((item, access, False))
        for access in item.instruction.writes:
            touched.setdefault(access.buffer, []).append((item, access, True))
    for uses in touched.values():
        for (first, mine, writes), (second, theirs, overwrites) in combinations(uses, 2):
            apart = first.instruction.stream != second.instruction.stream
            if apart and (writes or overwrites) and mine.overlaps(theirs):
                yield first, second


def check_edges(_context: Context) -> Outcome:
    """Count dependencies of the offloaded program that could be removed without anyone noticing."""
    unnoticed, refused, reordered = 0, 0, 0
    for num_staging_buffers in (1, 2, 3):
        program = zo2_program(num_staging_buffers)
        edges = [(phase, item, edge) for phase, item in program.instructions() for edge in item.after]
        for phase, item, edge in edges:
            reduced = without(program, phase, item, edge)
            if is_refused(reduced):
                refused += 1
            elif _is_host_loop(program, edge) and _orders_less(reduced, program):
                reordered += 1
            else:
                unnoticed += 1
    detail = (
        f"{refused + reordered + unnoticed} edges removed one by one: {refused} refused by the validator, {reordered} "
        f"only let a stream start before the host has read the step's scalars, {unnoticed} not noticed"
    )
    return Outcome(unnoticed, 0, "dependencies whose loss nobody notices", (detail,))


def without(program: Program, phase: Phase, item: Instruction, edge: Dependency) -> Program:
    """Return `program` with one dependency less."""
    after = tuple(other for other in item.after if other != edge)
    changed = tuple(replace(i, after=after) if i.id == item.id else i for i in getattr(program, phase))
    parts = {phase: changed}
    return replace(
        program,
        prologue=parts.get("prologue", program.prologue),
        step=parts.get("step", program.step),
        flush=parts.get("flush", program.flush),
    )


def is_refused(program: Program) -> bool:
    """Whether the validator finds a hazard."""
    try:
        validate(program)
    except Hazard:
        return True
    return False


def _is_host_loop(program: Program, edge: Dependency) -> bool:
    last = [item.id for item in program.step if item.stream is Stream.COMPUTE][-1]
    return edge == Dependency(last, 1)


def _orders_less(reduced: Program, program: Program) -> bool:
    before, after = (StepGraph(p, _NUM_STEPS) for p in (program, reduced))
    pairs = combinations(range(len(before.listed)), 2)
    return any(before.ordered(*pair) and not after.ordered(*pair) for pair in pairs)


def check_staging_buffers(context: Context) -> Outcome:
    """Count random runs of the shipped program in which an upload meets the offload of the block before it."""
    rng = random.Random(context.seed)
    details, total = [], 0
    for num_staging_buffers in (1, 2):
        program = zo2_program(num_staging_buffers)
        runs = context.samples(200, 60)
        met = sum(bool(clashes(program, rng)) for _ in range(runs)) + is_refused(program)
        total += met
        details.append(
            f"{num_staging_buffers} staging buffers: conflicting accesses met in {met} of {runs} random runs"
        )
    return Outcome(total, 0, "runs in which conflicting accesses met", tuple(details))


def check_published_staging_buffers(context: Context) -> Outcome:
    """Look for a run of the two printed rules in which a staging buffer is overwritten during its offload; the validator refuses both."""
    rng = random.Random(context.seed)
    details, unnoticed = [], 0
    for num_staging_buffers in (1, 2):
        published = under_published_rules(zo2_program(num_staging_buffers))
        refused = is_refused(published)
        # About one run in eight; that none of them all does has a probability below 1e-20.
        met = next((run for run in range(1, 401) if any(map(_is_overwritten, clashes(published, rng)))), None)
        unnoticed += (not refused) + (met is None)
        details.append(
            f"{num_staging_buffers} staging buffers: {'refused' if refused else 'accepted'}, a staging buffer overwritten in random run {met} of at most 400"
        )
    return Outcome(unnoticed, 0, "programs whose hazard goes unnoticed", tuple(details))


def under_published_rules(program: Program) -> Program:
    """Return `program` with uploads that wait for the upload before them, and for their own block's last offload.

    The first is the stream's order. The second stands for the end of an iteration, which the publication leaves
    open. Nothing makes an upload wait for the block that had the staging buffer before.
    """
    last = [item.id for item in program.step if item.stream is Stream.COMPUTE][-1]

    def published(item: Instruction) -> tuple[Dependency, ...]:
        own = Dependency(item.id.replace("upload", "offload"), 1)
        return (own, *(edge for edge in item.after if edge.instruction == last))

    step = tuple(replace(i, after=published(i)) if i.label == "upload" else i for i in program.step)
    return replace(program, step=step)


def _is_overwritten(pair: tuple[str, str]) -> bool:
    return sorted(name.rpartition("/")[2] for name in pair) == ["offload", "upload"]


reads_unseen = called_with(
    "zosim.lowering.hazards:_Touched.conflicts",
    "a write that does not wait for those who read",
    instruction=lambda instruction: replace(
        instruction, reads=instruction.reads + instruction.writes, writes=()
    ),
)


_CONFLICTS = "zosim.program.validate:_State._check_conflicts"


blind_validator = called_with(
    _CONFLICTS, "a validator that forgets readers", held=lambda held: altered(held, readers={})
)


@planted("zosim.lowering.weights:EvalPoints.perturb", "blocks that are not restored")
def blocks_not_restored(shipped, self, groups, segment, perturbation, transition):
    shipped(self, groups if transition.eval_point.is_perturbed else (), segment, perturbation, transition)


@planted("zosim.lowering.rank:Listing.emit", "a perturbation not drawn again")
def not_sampled_again(shipped, self, name, op, stream, label, *rest):
    if label != "sample" or not name.endswith(":update"):
        shipped(self, name, op, stream, label, *rest)


CHECKS: Checks = {
    "schedules-are-safe": printed(
        check_rules,
        reads_unseen,
        Fault(
            "a step without its delayed updates",
            "zosim.lowering.schedule:StepWriter._pending_updates",
            lambda *_given: None,
        ),
        blocks_not_restored,
        not_sampled_again,
    ),
    "every-dependency-is-needed": printed(
        check_edges,
        blind_validator,
        Fault(
            "an order that nothing can break",
            "zosim.program.step_graph:StepGraph.ordered",
            lambda _shipped, _self, earlier, later: later >= earlier,
        ),
        Fault(
            "dependencies that others imply",
            "zosim.program.step_graph:StepGraph.needed",
            lambda _shipped, _self, item: sorted(set(item.after)),
        ),
    ),
    "staging-buffers-are-not-overwritten": (
        corrected(check_staging_buffers, reads_unseen),
        counterexample(
            check_published_staging_buffers,
            Fault("a validator that lets anything be overwritten", _CONFLICTS, lambda *_given: None),
        ),
    ),
}
