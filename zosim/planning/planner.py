"""Which placement to use: every plan that computes the same thing, the ones that fit, the fastest of them.

A lower bound of every candidate is known and says exactly what memory it takes; candidates are then lowered and
simulated in the order of their bounds until no bound is left that could change the answer. The answer says what was
chosen and why, what came second, and what does not fit for want of how much memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

from costmodel.models.model_spec import block_segment
from topology.errors import DoesNotFit, PlanError
from topology.units import format_bytes, format_seconds
from zosim.planning.bounds import Bound, Bounds
from zosim.planning.disks import fewest_on_disk, may_use_disks
from zosim.planning.explain import ALIKE, about_split_points, reasons
from zosim.planning.footprint import Footprints
from zosim.planning.predict import PlannedRun, Prediction
from zosim.planning.request import ASSUMED_SIZE, HOW_TO_STATE_MEMORY, Request
from zosim.planning.space import placements, too_few_ranks
from zosim.planning.split_options import sparsest_near_the_middle
from zosim.planning.staging import staged_plans
from zosim.plans import INSIDE, Plan
from zosim.simulators.assembly import without_garbage_collection

__all__ = ["Candidate", "Decision", "Request", "candidates", "choose", "placements"]

# Logits of so many tokens are small beside a block, and long enough for a product.
_LOSS_CHUNK_TOKENS = 512
# Step times that agree in so many digits are equal: sums in another order must not decide.
_SIGNIFICANT_DIGITS = 6
# A second that takes longer than this is not simulated: its bound says enough.
_WORTH_A_LOOK = 1.1
_IN_ORDER = attrgetter("sort_key")


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at.

    Attributes
    ----------
    planned : PlannedRun
    bound : Bound
        What was known of it before it was lowered.
    seconds : float
        Step time: simulated, or bounded from below.
    is_simulated : bool
    """

    planned: PlannedRun
    bound: Bound
    seconds: float
    is_simulated: bool = False

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.planned.plan

    @property
    def footprints(self) -> Footprints:
        """Memory of one rank and one host of each kind."""
        return self.bound.footprints

    @property
    def missing(self) -> str:
        """What does not fit and by how much; empty if everything does."""
        return self.bound.missing

    @property
    def sort_key(self) -> tuple[float, int, int, int, int]:
        """Faster first; of two that are as fast, the one that needs less: ranks, hosts, instructions, memory."""
        seconds = float(f"{self.seconds:.{_SIGNIFICANT_DIGITS}g}")
        placement = self.plan.placement
        return (
            seconds,
            placement.world_size,
            len(placement.ranks_by_host),
            self.bound.num_instructions,
            self.footprints.largest.device_bytes * placement.world_size + self.footprints.fullest.size_bytes,
        )

    def describe(self) -> str:
        """Return the plan in a few words."""
        return self.plan.describe()


@dataclass(frozen=True, repr=False)
class Decision:
    """The planner's answer.

    Attributes
    ----------
    chosen : Candidate
    others : tuple of Candidate
        That fit, best first; those beyond the second may never have been simulated.
    rejected : tuple of Candidate
        That do not fit, fastest first.
    printed_split_points : tuple of str
        Where SparQ's own rule would split for as many stages, if densities are known.
    notes : tuple of str
        What the request left open and was filled in before the search, such as the format of the weights.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    printed_split_points: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        plan, footprint = self.chosen.plan, self.chosen.footprints.largest
        size = format_bytes(footprint.device_bytes)
        where = (
            f"{len(plan.placement.devices)} x" if plan.placement.world_size > 1 else plan.placement.devices[0]
        )
        step = format_seconds(self.chosen.seconds)
        return f"Decision({plan.model.name}: {self.chosen.describe()} on {where} of {plan.placement.topology}, {step} a step, {size})"

    def _repr_html_(self) -> str:
        from zosim.planning.views import decision_view

        return decision_view(self).to_html()

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.chosen.plan

    @property
    def prediction(self) -> Prediction:
        """What it is predicted to do."""
        return self.chosen.planned.prediction

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this one: what was filled in, what limits it, what came second, and what a larger memory would buy."""
        why = reasons(self.chosen, self.prediction, self.others, self.rejected)
        return (*self.notes, *why, *about_split_points(self.chosen, self.others, self.printed_split_points))


@without_garbage_collection()
def choose(request: Request) -> Decision:
    """Return the fastest plan that fits.

    Raises
    ------
    DoesNotFit
        If none fits, naming the one that comes closest and what it lacks.
    PlanError
        If the request contradicts itself.
    """
    bounds = Bounds(request)
    fitting, rejected = _parted(_bounded(request, bounds, placements(request)))
    ranked = _simulate_survivors(fitting) if fitting else []
    if request.seeks_stages:
        # Stages are worth a look only where their bounds undercut what is known without.
        fastest_s = ranked[0].seconds if ranked else inf
        try:
            staged, too_large = _parted(_bounded(request, bounds, staged_plans(request, fastest_s)))
        except PlanError:
            if not (ranked or rejected):
                raise
            staged, too_large = [], []  # what is asked for does not go with stages
        # Those that were simulated already stay so, and the new ones have to undercut them.
        ranked = _simulate_survivors(sorted((*ranked, *staged), key=_IN_ORDER)) if staged else ranked
        rejected = sorted((*rejected, *too_large), key=_IN_ORDER)
    if not ranked and not rejected:
        raise too_few_ranks(request)
    if not ranked:
        raise _nothing_fits(request, rejected)
    best, *others = ranked
    # For comparison: where the paper would split for as many stages.
    inside = [block_segment(index) + INSIDE for index in range(best.plan.model.num_blocks)]
    printed_split_points = sparsest_near_the_middle(
        inside, request.split_options.densities, best.plan.num_stages
    )
    return Decision(best, tuple(others), tuple(rejected), printed_split_points, request.notes)


def _parted(listed: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return those that fit and those that do not, the fastest first."""
    ordered = sorted(listed, key=_IN_ORDER)
    return [c for c in ordered if not c.missing], [c for c in ordered if c.missing]


def candidates(request: Request) -> list[Candidate]:
    """Return every plan that :func:`choose` may choose from with its bound, none simulated: those that fit first, the fastest first.

    Raises
    ------
    PlanError
        If the request contradicts itself.
    """
    bounds = Bounds(request)
    listed = list(_bounded(request, bounds, placements(request)))
    if request.seeks_stages:
        fastest_s = min((candidate.seconds for candidate in listed if not candidate.missing), default=inf)
        try:
            listed += _bounded(request, bounds, staged_plans(request, fastest_s))
        except PlanError:
            if not listed:
                raise
    return sorted(listed, key=lambda candidate: (bool(candidate.missing), candidate.sort_key))


def _bounded(request: Request, bounds: Bounds, plans: Iterable[Plan]) -> Iterator[Candidate]:
    is_open = "loss_chunk_tokens" not in request.config.forward.model_fields_set
    for plan in plans:
        whole = _candidate(request, bounds, plan)
        yield whole
        # Chunks cost launches, so they are tried only where the logits are what does not fit, and shown only where they help.
        if whole.missing and is_open and plan.tokens_per_step > _LOSS_CHUNK_TOKENS:
            forward = plan.forward.model_copy(update={"loss_chunk_tokens": _LOSS_CHUNK_TOKENS})
            chunked = _candidate(request, bounds, plan.model_copy(update={"forward": forward}))
            if not chunked.missing:
                yield chunked
        yield from _with_disks(request, bounds, plan)


def _with_disks(request: Request, bounds: Bounds, plan: Plan) -> Iterator[Candidate]:
    """Yield a plan with blocks on drives where host memory lacks space for all, as few as can be."""
    if may_use_disks(request, plan) and (plan.uses_disks or bounds.of(plan).lacks_host):
        few = fewest_on_disk(plan, lambda spilled: not bounds.of(spilled).lacks_host)
        if few is not None:
            yield _candidate(request, bounds, few)


def _candidate(request: Request, bounds: Bounds, plan: Plan) -> Candidate:
    bound, hardware = bounds.of(plan), request.hardware
    planned = PlannedRun(plan, hardware.topology, hardware.profile, profiles=hardware.profiles)
    return Candidate(planned, bound, bound.seconds)


def _simulate_survivors(fitting: list[Candidate]) -> list[Candidate]:
    """Simulate in the order of the bounds until none that is left can be the best, or a second worth a look, and rank."""
    simulated = [candidate for candidate in fitting if candidate.is_simulated]
    waiting = [candidate for candidate in fitting if not candidate.is_simulated]
    # In the order of bounds, so the first that cannot win ends the search.
    while waiting and waiting[0].seconds < _enough_s([candidate.seconds for candidate in simulated]):
        candidate = waiting.pop(0)
        seconds = candidate.planned.step_time_s
        simulated.append(replace(candidate, seconds=seconds, is_simulated=True))
    best = min(simulated, key=_IN_ORDER)
    others = [candidate for candidate in (*simulated, *waiting) if candidate is not best]
    return [best, *sorted(others, key=_IN_ORDER)]


def _enough_s(times: list[float]) -> float:
    """Return the bound from which on no candidate needs a simulation.

    A plan whose bound is not below the best by :data:`ALIKE` cannot be the answer. It can be the second one, as long as its
    bound is below the second best and below :data:`_WORTH_A_LOOK` times the best.
    """
    if not times:
        return inf
    # The best decides what can win, the second what is worth showing.
    best, *rest = sorted(times)
    return max(best, min(rest[0] if rest else inf, best * _WORTH_A_LOOK)) * (1 - ALIKE)


def _nothing_fits(request: Request, rejected: list[Candidate]) -> DoesNotFit:
    closest = min(rejected, key=lambda candidate: candidate.footprints.largest.device_bytes)
    message = (
        f"no plan for {request.config.spec.name} with batch {request.config.batch} and "
        f"{request.config.seq} tokens fits {request.hardware.device} of {request.hardware.name}; the "
        f"closest, {closest.describe()}, {closest.missing}"
    )
    hint = "use a smaller batch or sequence, a narrower --dtype, or hardware with more memory"
    if ASSUMED_SIZE in closest.missing:
        hint += f"; the host's memory is assumed: {HOW_TO_STATE_MEMORY}"
    return DoesNotFit(message, hint=hint)
