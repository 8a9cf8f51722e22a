"""Which placement to use: every plan that computes the same thing, the ones that fit, the fastest of them.

A shape of the space has a lower bound, of its forwards alone. A plan has one of its whole step, and its exact memory. The
search looks at the least bound first, and simulates the plans that could be the answer. It ends when no bound
is left that could change it. The answer says what was chosen and why, and how far it can be from the best. It also names what
came second, and what does not fit, with the memory that it lacks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from operator import attrgetter, itemgetter, le
from typing import TYPE_CHECKING, Any, Protocol

from costmodel.models.model_spec import block_segment
from topology.errors import DoesNotFit, PlanError
from topology.units import format_bytes, format_seconds
from zosim.console import LateBar
from zosim.lowering import lower_all
from zosim.planning.block_bound import BlockBounder, with_few_blocks
from zosim.planning.bounds import Bound, Bounds
from zosim.planning.disks import (
    fewest_on_disk,
    keeping,
    may_be_mixed,
    may_keep_blocks,
    may_use_disks,
    mixtures,
    num_kept,
)
from zosim.planning.explain import ALIKE, about_guarantee, about_split_points, reasons
from zosim.planning.footprint import WORKSPACE, Footprints
from zosim.planning.predict import PlannedRun, Prediction
from zosim.planning.request import ASSUMED_SIZE, HOW_TO_STATE_MEMORY, Request
from zosim.planning.space import PlanShape, check, too_few_ranks
from zosim.planning.split_options import sparsest_near_the_middle
from zosim.planning.split_search import Costs, in_chunks
from zosim.planning.variants import Variants, chunks, placements, shapes
from zosim.plans import AXES, INSIDE, Mesh, Plan, Residency, fields_of
from zosim.program.validate_set import validate_set
from zosim.report import Reportable, frame
from zosim.simulators.assembly import without_garbage_collection

if TYPE_CHECKING:
    from zosim.report import Report

__all__ = ["Candidate", "Compared", "Decision", "Guarantee", "Request", "candidates", "choose", "placements"]

# Step times that agree in so many digits are equal: sums in another order must not decide.
_SIGNIFICANT_DIGITS = 6
# A second that takes longer than this is not simulated: its bound says enough.
_WORTH_A_LOOK = 1.1
# Simulations to find the best, where bounds leave much open, and the second.
_MOST_SIMULATED, _MOST_FOR_SECOND = 24, 1
# Other meshes whose best plan is bounded for the report.
_NUM_RIVALS = 3
# Plans that do not fit after which it is looked whether any of a shape can, where none has.
_MANY_REJECTED = 60
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
        """Memory of one rank and one host of each class."""
        return self.bound.footprints

    @property
    def missing(self) -> str:
        """What does not fit and by how much; empty if everything does."""
        return self.bound.missing

    @cached_property
    def sort_key(self) -> tuple[float, int, int, int, int, int, int]:
        """Faster first; of two that are as fast, the one that needs less: ranks, hosts, unusual values, memory, instructions."""
        seconds = float(f"{self.seconds:.{_SIGNIFICANT_DIGITS}g}")
        placement = self.plan.placement
        return (
            seconds,
            placement.world_size,
            len(placement.ranks_by_host),
            num_unusual(self.plan),
            # Memory of devices is what there is least of.
            self.footprints.largest.device_bytes,
            self.footprints.fullest.size_bytes,
            self.bound.num_instructions,
        )

    @property
    def costs(self) -> tuple[float, int, int, float]:
        """What a step takes: seconds, bytes of the fullest device and of the fullest host, and seconds of devices, which are money."""
        seconds = float(f"{self.seconds:.{_SIGNIFICANT_DIGITS}g}")
        taken = self.footprints
        return (
            seconds,
            taken.largest.device_bytes,
            taken.fullest.size_bytes,
            seconds * len(set(self.plan.placement.devices)),
        )

    def describe(self) -> str:
        """Return the plan in a few words."""
        return self.plan.describe()


def num_unusual(plan: Plan) -> int:
    """Return how many fields that the planner chooses are not at their defaults, apart from mesh and split points."""
    return sum(
        getattr(axis, field.name) != field.default
        for name, axis in plan.axes.items()
        for field in fields_of(AXES[name]).values()
        if field.setting.planned and name not in ("mesh", "split")
    )


def pareto_front(listed: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates of which no other takes less of one cost and no more of any, the fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(listed, key=_IN_ORDER):
        if not any(all(map(le, other.costs, candidate.costs)) for other in front):
            front.append(candidate)
    return front


@dataclass(frozen=True)
class Guarantee:
    """How far the answer can be from the best of all plans that were looked at.

    Attributes
    ----------
    num_plans : int
        Shapes times what they leave open.
    num_bounded, num_simulated : int
    within : float
        Part of the step time that any other plan can save at most, by the lower bounds of what was not simulated; 0 where
        none can be faster.
    """

    num_plans: int
    num_bounded: int
    num_simulated: int
    within: float

    @property
    def is_optimal(self) -> bool:
        """Whether no plan is faster by more than what is called as fast."""
        return self.within <= ALIKE


class Compared(Protocol):
    """A plan held against other ways to tune the model."""

    def view(self) -> Report:
        """Return both as people read it."""
        ...

    def to_data(self) -> dict[str, Any]:
        """Return both as JSON knows it."""
        ...


@dataclass(frozen=True, repr=False)
class Decision(Reportable):
    """The planner's answer.

    Attributes
    ----------
    chosen : Candidate
        The fastest plan that fits.
    others : tuple of Candidate
        That fit and were bounded, best first; those beyond the second may never have been simulated.
    rejected : tuple of Candidate
        That do not fit and were bounded, fastest first: all that could be faster than the chosen one.
    printed_split_points : tuple of str
        Where SparQ's own rule would split for as many stages, if densities are known.
    guarantee : Guarantee
        How much faster any plan that was not simulated could be.
    request : Request
        With notes of what it left open and was filled in before the search, such as the format of the weights.
    compared : Compared or None
        Other ways to tune the model that somebody asked to hold the plan against.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    guarantee: Guarantee
    request: Request
    printed_split_points: tuple[str, ...] = ()
    compared: Compared | None = None

    def __repr__(self) -> str:
        plan, footprint = self.chosen.plan, self.chosen.footprints.largest
        size = format_bytes(footprint.device_bytes)
        where = (
            f"{len(plan.placement.devices)} x" if plan.placement.world_size > 1 else plan.placement.devices[0]
        )
        step = format_seconds(self.chosen.seconds)
        return f"Decision({plan.model.name}: {self.chosen.describe()} on {where} of {plan.placement.topology}, {step} a step, {size})"

    def view(self) -> Report:
        """Return the candidates, the prediction of the best, the reasons, and what it is held against."""
        from zosim.planning.views import decision_view

        return decision_view(self)

    def _repr_html_(self) -> str:
        from zosim.analysis.pictures import with_picture
        from zosim.planning.views import candidates_svg

        return with_picture(self.view(), candidates_svg(self))

    def to_pandas(self) -> Any:
        """Return all candidates as a pandas frame, the chosen one first."""
        from zosim.planning.views import candidates_data

        return frame(candidates_data(self))

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.chosen.plan

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of all plans that fit (:func:`front`)."""
        return front(self.request)

    @property
    def prediction(self) -> Prediction:
        """What it is predicted to do."""
        return self.chosen.planned.prediction

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this one: what was filled in, what limits it, what came second, and what a larger memory would buy."""
        why = (
            *reasons(self.chosen, self.prediction, self.others, self.rejected),
            about_guarantee(self.guarantee),
        )
        return (
            *self.request.notes,
            *why,
            *about_split_points(self.chosen, self.others, self.printed_split_points),
        )


@without_garbage_collection()
def choose(request: Request, bounder: BlockBounder | None = None) -> Decision:
    """Return the fastest plan that fits; `bounder` keeps what requests for one model find.

    Raises
    ------
    DoesNotFit
        If none fits, naming the one that comes closest and what it lacks.
    PlanError
        If the request contradicts itself.
    """
    search = _Search(request, bounder)
    with LateBar("planning") as bar:
        search.run(watch=bar.advance)
    if not search.simulated:
        raise _nothing_fits(request, search.rejected)
    best, others = search.ranked()
    validate_set(lower_all(with_few_blocks(best.plan)))
    # For comparison: where the paper would split for as many stages.
    inside = [block_segment(index) + INSIDE for index in range(best.plan.model.num_blocks)]
    printed_split_points = sparsest_near_the_middle(
        inside, request.split_options.densities, best.plan.num_stages
    )
    rejected = tuple(sorted(search.rejected, key=_IN_ORDER))
    return Decision(best, others, rejected, search.guarantee(best), request, printed_split_points)


def candidates(request: Request, bounder: BlockBounder | None = None) -> list[Candidate]:
    """Return plans with their bounds, none simulated: those that fit first, the fastest first.

    The first is the plan of the least bound that fits. All that do not fit and have a lesser one are among them, and where
    nothing fits every plan. Requests for one model find more together: `bounder` keeps it.

    Raises
    ------
    PlanError
        If the request contradicts itself.
    """
    search = _Search(request, bounder)
    search.run(num_simulated=0)
    listed = (*search.waiting, *search.rejected)
    return sorted(listed, key=lambda candidate: (bool(candidate.missing), candidate.sort_key))


@without_garbage_collection()
def front(request: Request) -> tuple[Candidate, ...]:
    """Return the Pareto front of all plans that fit: of step time, device memory, host memory and money, the fastest first.

    Money is proportional to devices times seconds on one machine. Times are simulated for as many as a reader looks at, and bounds
    beyond.

    Raises
    ------
    PlanError
        If the request contradicts itself.
    """
    search = _Search(request)
    most = pareto_front(candidate for candidate in search.every() if not candidate.missing)
    some = (each for candidate in most for each in search.keeping_some(candidate) if not each.missing)
    listed = pareto_front((*most, *some))
    shown = [search.simulated_of(candidate) for candidate in listed[:_MOST_SIMULATED]]
    return tuple(pareto_front((*shown, *listed[_MOST_SIMULATED:])))


@dataclass(order=True)
class _Node:
    """Something with a lower bound: a shape, a plan that a relaxed one bounds, or a candidate."""

    key: tuple[object, ...]
    shape: PlanShape | None = field(default=None, compare=False)
    candidate: Candidate | None = field(default=None, compare=False)
    plan: Plan | None = field(default=None, compare=False)
    restrictions: _Restrictions | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)

    @property
    def of_shape(self) -> PlanShape | None:
        """The shape, or that of a plan which is not bounded yet."""
        return self.shape if self.restrictions is None else self.restrictions.shape

    @property
    def bound_s(self) -> float:
        """Seconds of a step, at least."""
        return self.key[0]  # type: ignore[return-value]


class _Restrictions:
    """The plans of a shape, by number, and those that each one relaxes."""

    def __init__(self, plans: list[Plan], relaxed: list[int | None], shape: PlanShape) -> None:
        self.plans = plans
        self.shape = shape
        self.of: dict[int | None, list[int]] = {}
        for number, before in enumerate(relaxed):
            self.of.setdefault(before, []).append(number)


class _Search:
    """A search that looks first at what has the least bound."""

    def __init__(self, request: Request, bounder: BlockBounder | None = None) -> None:
        check(request)
        self.simulated: list[Candidate] = []
        self.rejected: list[Candidate] = []
        self._request = request
        costs = Costs(request.config.spec, request.split_options)
        self._bounds = Bounds(request, costs.paths, bounder)
        self._variants = Variants(request)
        self._heap: list[_Node] = []
        self._order = count()
        self._num_plans = 0
        self._leanest: Candidate | None = None
        self._has_looked = False
        self._shapes: list[PlanShape] = []
        try:
            for shape in shapes(request, costs):
                self._shapes.append(shape)
                self._push(shape.least_s, shape=shape)
                self._num_plans += len(self._variants.of(shape))
        except PlanError:
            if not self._num_plans:
                raise  # else what is asked for does not go with stages
        if not self._num_plans:
            raise self._variants.contradiction or too_few_ranks(request)

    @property
    def waiting(self) -> list[Candidate]:
        """Candidates that fit and were not simulated."""
        return [node.candidate for node in self._heap if node.candidate is not None]

    def run(self, num_simulated: int = _MOST_SIMULATED, watch: Callable[[], object] = lambda: None) -> None:
        """Look at plans until no bound is left that could change the answer, or so many were simulated.

        - `watch`: called for each plan looked at.
        """
        while self._heap and self._heap[0].bound_s < self._enough_s():
            if self._heap[0].candidate is not None and len(self.simulated) >= num_simulated:
                break
            node = heappop(self._heap)
            watch()
            if node.candidate is not None and not self.simulated:
                self._simulate_plainest(node.candidate)
            elif node.candidate is not None:
                self._simulate(node.candidate)
            elif node.shape is not None:
                self._open(node.shape)
            else:
                self._bound(node)
            is_hard = len(self.rejected) >= _MANY_REJECTED or not self._heap
            if is_hard and not (self._has_looked or self.simulated or self.waiting):
                self._leave_out_what_never_fits()
        if num_simulated and self.simulated:
            self._look_at_rivals()
            self._simulate_plainer()
            self._simulate_leaner()
            self._simulate_second()
        if not self.simulated and not self.rejected and not self._heap:
            raise self._variants.contradiction or too_few_ranks(self._request)

    def _leave_out_what_never_fits(self) -> None:
        """Leave out shapes of which not even the plans that relax no other fit; of these the one that lacks least is kept for the report."""
        self._has_looked = True
        left: dict[int, tuple[int, Plan]] = {}
        for shape in self._shapes:
            relaxing = {variant.relaxed for variant in self._variants.of(shape)}
            leanest = [plan for n, plan in enumerate(self._variants.plans(shape)) if n not in relaxing]
            leanest += [in_chunks(plan, n) for plan in leanest for n in chunks(self._request, plan)[:1]]
            if leanest:
                left[id(shape)] = max(
                    ((self._bounds.left_bytes(plan), plan) for plan in leanest), key=itemgetter(0)
                )
        gone = {number for number, (left_bytes, _) in left.items() if left_bytes < 0}
        self._heap = [node for node in self._heap if id(node.of_shape) not in gone]
        heapify(self._heap)
        if left and not self._heap:
            self.rejected.append(self._candidate(max(left.values(), key=itemgetter(0))[1]))

    def every(self) -> Iterator[Candidate]:
        """Yield every plan with its bound, those that take their loss in chunks where that saves memory or time.

        Where blocks may stay on the device, as many do as it has space for.
        """
        for node in self._heap:
            assert node.shape is not None
            for plan in self._variants.plans(node.shape):
                yield self._candidate(plan)
                # The smallest chunk saves as much memory as any.
                yield from (self._candidate(in_chunks(plan, n)) for n in chunks(self._request, plan)[:1])
                yield from map(self._candidate, mixtures(self._request, plan, self._bounds.left_bytes))

    def keeping_some(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield an offloaded plan with some of its blocks on the device: a quarter, half and three quarters of those that may stay."""
        if may_keep_blocks(self._request, candidate.plan):
            most = num_kept(self._request, candidate.plan) or candidate.plan.model.num_blocks
            for num_blocks in sorted({most // 4, most // 2, 3 * most // 4} - {0}):
                yield self._candidate(keeping(candidate.plan, num_blocks))

    def simulated_of(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its simulated step time."""
        return replace(candidate, seconds=self._step_time_s(candidate), is_simulated=True)

    def ranked(self) -> tuple[Candidate, tuple[Candidate, ...]]:
        """Return the best of those simulated, and all others that fit in their order.

        Of those as fast as the fastest the best is the one that needs least, and is the plainest.
        """
        fastest_s = min(candidate.seconds for candidate in self.simulated)
        as_fast = [c for c in self.simulated if c.seconds <= fastest_s * (1 + ALIKE)]
        best = min(as_fast, key=lambda c: c.sort_key[1:])
        others = [c for c in (*self.simulated, *self.waiting) if c is not best]
        return best, tuple(sorted(others, key=_IN_ORDER))

    def guarantee(self, best: Candidate) -> Guarantee:
        """Return how far the best can be from what was not simulated."""
        least_s = min((node.bound_s for node in self._heap), default=inf)
        least_s = min(least_s, *(candidate.seconds for candidate in self.simulated))
        num_bounded = len(self.simulated) + len(self.waiting) + len(self.rejected)
        return Guarantee(
            max(self._num_plans, num_bounded),
            num_bounded,
            len(self.simulated),
            max(0.0, 1 - least_s / best.seconds),
        )

    def _enough_s(self) -> float:
        """Return the bound from which on nothing can be faster than the answer by more than what is called as fast."""
        return min((candidate.seconds for candidate in self.simulated), default=inf) * (1 - ALIKE)

    def _push(self, bound_s: float, **what: object) -> None:
        # Of equal bounds candidates come first: what they relax is then known to be no better. Then plans that copy blocks once a step,
        # of which more is hidden. Rounding tells none apart.
        bound_s, candidate, plan = float(f"{bound_s:.12g}"), what.get("candidate"), what.get("plan")
        is_slow = isinstance(plan, Plan) and plan.copies_blocks_twice
        key = (0, *candidate.sort_key) if isinstance(candidate, Candidate) else (1 + is_slow,)
        heappush(self._heap, _Node((bound_s, *key, next(self._order)), **what))  # type: ignore[arg-type]

    def _open(self, shape: PlanShape) -> None:
        """Look at the plans of a shape that no other relaxes."""
        plans = self._variants.plans(shape)
        if plans:
            relaxed = [variant.relaxed for variant in self._variants.of(shape)]
            restrictions = _Restrictions(plans, relaxed, shape)
            self._push_restrictions(restrictions, None, shape.least_s, shape.least_s)

    def _push_restrictions(
        self, restrictions: _Restrictions, number: int | None, bound_s: float, mixed_s: float
    ) -> None:
        """Look at the plans that one relaxes; `mixed_s`: the least of those that some blocks may stay of."""
        for restriction in restrictions.of.get(number, ()):
            plan = restrictions.plans[restriction]
            known_s = mixed_s if may_be_mixed(self._request, plan) else bound_s
            least_s = max(known_s, self._bounds.least_s(plan, restrictions.shape))
            self._push(least_s, plan=plan, restrictions=restrictions, number=restriction)

    def _bound(self, node: _Node) -> None:
        """Bound a plan, with the loss at once or in chunks, and go on with those that it relaxes."""
        assert node.plan is not None
        whole = self._candidate(node.plan)
        if node.restrictions is None:
            self._keep(whole, *self._with_disks(whole))
            return
        chunked = {n: in_chunks(node.plan, n) for n in chunks(self._request, node.plan)}
        loss_s = {n: self._bounds.loss_s(plan) for n, plan in chunked.items()}
        # The fewest launches among those that take as long.
        in_order = sorted(chunked, key=lambda num_tokens: (loss_s[num_tokens], -num_tokens))
        num_forwards = whole.plan.mesh.most_eval_points(whole.plan.estimator.num_eval_points)
        saved_s = num_forwards * (self._bounds.loss_s(whole.plan) - loss_s[in_order[0]]) if chunked else 0.0
        made = [whole, *self._in_chunks(whole, chunked, in_order, saved_s)]
        self._keep(*made, *self._with_disks(whole))
        for candidate in made:
            # As many blocks on the device as it has space for, beside few staging buffers.
            for mixed in mixtures(self._request, candidate.plan, self._bounds.left_bytes):
                self._push(self._bounds.least_s(mixed, node.restrictions.shape), plan=mixed)
        if whole.missing:
            # What waits for more is never faster: it is looked at only where that saves memory which lacks.
            least_s = max(node.bound_s, whole.seconds - max(0.0, saved_s))
            # Of a plan whose blocks all move, mixtures may copy less; of one whose blocks all stay, none does.
            mixed_s = node.bound_s if whole.plan.is_offloaded else least_s
            self._push_restrictions(node.restrictions, node.number, least_s, mixed_s)

    def _keep(self, *made: Candidate) -> None:
        """Keep what does not fit for the report, and all else for the search."""
        for candidate in made:
            if candidate.missing:
                self.rejected.append(candidate)
            else:
                self._push(candidate.seconds, candidate=candidate)

    def _in_chunks(
        self, whole: Candidate, chunked: dict[int, Plan], in_order: list[int], saved_s: float
    ) -> Iterator[Candidate]:
        """Yield the fastest plan that takes its loss in chunks, where that is faster, or the only way to fit."""
        # Where not even the smallest chunk fits, logits are not what takes the memory. They are workspace, and slack beside it.
        workspaces = (
            sum(c.size_bytes for c in rank.components if c.name == WORKSPACE)
            for rank in whole.footprints.ranks
        )
        is_short = bool(chunked) and 0 < whole.bound.missing_bytes <= 2 * max(workspaces)
        is_short = is_short and not self._candidate(chunked[min(chunked)]).missing
        if is_short or (saved_s > ALIKE * whole.seconds and not whole.missing):
            made = (self._candidate(chunked[num_tokens]) for num_tokens in in_order)
            yield from islice((candidate for candidate in made if not candidate.missing), 1)

    def _with_disks(self, whole: Candidate) -> Iterator[Candidate]:
        """Yield a plan with blocks on drives where host memory lacks space for all, as few as can be."""
        plan = whole.plan
        if may_use_disks(self._request, plan) and (plan.uses_disks or whole.bound.lacks_host):
            few = fewest_on_disk(plan, lambda spilled: not self._bounds.of(spilled).lacks_host)
            if few is not None:
                yield self._candidate(few)

    def _candidate(self, plan: Plan) -> Candidate:
        bound, hardware = self._bounds.of(plan), self._request.hardware
        planned = PlannedRun(
            plan, hardware.topology, hardware.profile, profiles=hardware.profiles, is_validated=False
        )
        # Of a thousand ranks they take more time than all else.
        planned.__dict__["near_machines"] = self._bounds.machines(plan)
        return Candidate(planned, bound, bound.seconds)

    def _simulate(self, candidate: Candidate) -> None:
        self.simulated.append(self.simulated_of(candidate))

    def _simulate_plainest(self, candidate: Candidate) -> None:
        """Simulate first, of what is as fast as a candidate by its bound, what would be chosen if all of it were."""
        limit_s = candidate.seconds * (1 + ALIKE)
        as_fast = (each for each in (candidate, *self.waiting) if each.seconds <= limit_s)
        plainest = min(as_fast, key=lambda each: each.sort_key[1:])
        self._leanest = next(iter(self._leaner(plainest, limit_s)), plainest)
        self._simulate(self._leanest)
        if self._leanest is not candidate:
            self._push(candidate.seconds, candidate=candidate)

    def _step_time_s(self, candidate: Candidate) -> float:
        """Return the step time, by the graph of blocks where that is exact, else by a simulation of all of them."""
        seconds = self._bounds.step_time_s(candidate.planned, candidate.bound)
        if seconds is not None:
            candidate.planned.__dict__["step_time_s"] = seconds
        return candidate.planned.step_time_s

    def _take(self, wanted: Iterable[Candidate]) -> None:
        """Simulate waiting candidates."""
        taken = {id(candidate) for candidate in wanted}
        for node in [node for node in self._heap if id(node.candidate) in taken]:
            self._heap.remove(node)
            assert node.candidate is not None
            self._simulate(node.candidate)
        self._heap.sort()

    def _simulate_plainer(self) -> None:
        """Simulate what is plainer than the best and perhaps as fast."""
        best, _ = self.ranked()
        limit_s = best.seconds * (1 + ALIKE)
        if self._request.config.residency.given("num_staging_buffers") is None:
            usual = {"num_staging_buffers": Residency().num_staging_buffers}
            known = {candidate.plan for candidate in (*self.simulated, *self.waiting)}
            for candidate in (best, *self.waiting):
                plan = candidate.plan
                fewer = plan.model_copy(update={"residency": plan.residency.model_copy(update=usual)})
                if not plan.is_offloaded or candidate.seconds > limit_s or fewer in known:
                    continue
                known.add(fewer)
                plainer = self._candidate(fewer)
                if not plainer.missing:
                    self._push(plainer.seconds, candidate=plainer)
        rivals = [
            candidate
            for candidate in self.waiting
            if candidate.seconds <= limit_s and candidate.sort_key[1:] < best.sort_key[1:]
        ]
        self._take(sorted(rivals, key=lambda candidate: candidate.sort_key[1:])[:1])

    def _leaner(self, candidate: Candidate, limit_s: float) -> list[Candidate]:
        """Return a few candidates with fewer blocks on the device, from the fewest on that bounds let be as fast."""
        most = num_kept(self._request, candidate.plan)
        known = {most: candidate}

        def keeping_few(num_blocks: int) -> Candidate:
            if num_blocks not in known:
                known[num_blocks] = self._candidate(keeping(candidate.plan, num_blocks))
            return known[num_blocks]

        # Each block more that stays is copies less. No bound is above its simulation.
        counts = range(1, max(1, most))
        least = 1 + bisect_left(counts, True, key=lambda count: keeping_few(count).seconds <= limit_s)
        tried = range(least, most, max(1, (most - least) // 4))
        return [each for count in tried if not (each := keeping_few(count)).missing]

    def _simulate_leaner(self) -> None:
        """Simulate what is as fast as the best with fewer blocks on the device, to a quarter of those that bounds leave open."""
        best, _ = self.ranked()
        limit_s = best.seconds * (1 + ALIKE)
        if self._leanest is None or best.plan == self._leanest.plan:
            return
        fewer = self._leaner(best, limit_s)
        known: dict[int, Candidate] = {}

        def is_as_fast(number: int) -> bool:
            known[number] = self.simulated_of(fewer[number])
            return known[number].seconds <= limit_s

        index = bisect_left(range(len(fewer)), True, key=is_as_fast)
        if index < len(fewer):
            self.simulated.append(known[index])

    def _simulate_second(self) -> None:
        """Simulate what is perhaps the second, as long as it is worth a look."""
        for _ in range(_MOST_FOR_SECOND):
            first_s, *rest = sorted(candidate.seconds for candidate in self.simulated)
            second = min(self.waiting, key=_IN_ORDER, default=None)
            if second is None or second.seconds >= min((*rest[:1], first_s * _WORTH_A_LOOK)) * (1 - ALIKE):
                return
            self._take([second])

    def _look_at_rivals(self) -> None:
        """Bound a plan of one device, of the next meshes and of the next stages, for the report."""
        known = {candidate.plan.mesh for candidate in (*self.simulated, *self.waiting)}
        plans: dict[Mesh, list[Plan]] = {}
        for node in sorted(node for node in self._heap if node.candidate is None):
            mesh = node.shape.mesh if node.shape is not None else node.plan.mesh  # type: ignore[union-attr]
            if mesh in known:
                continue
            if node.shape is None:
                plans.setdefault(mesh, []).append(node.plan)  # type: ignore[arg-type]
            elif mesh not in plans:
                # The plainest with blocks that stay, or else that move.
                plain = {plan.is_offloaded: plan for plan in reversed(self._variants.plans(node.shape))}
                plans[mesh] = list(reversed(plain.values()))
        listed = list(plans)
        shown = listed[:_NUM_RIVALS]
        shown += [mesh for mesh in listed if mesh.world_size == 1 and mesh not in shown]
        shown += [mesh for mesh in listed if mesh.is_staged and not any(each.is_staged for each in shown)][:1]
        for mesh in shown:
            made = map(self._candidate, sorted(plans[mesh], key=num_unusual)[:_NUM_RIVALS])
            for candidate in islice((candidate for candidate in made if not candidate.missing), 1):
                self._push(candidate.seconds, candidate=candidate)


def _nothing_fits(request: Request, rejected: list[Candidate]) -> DoesNotFit:
    closest = min(rejected, key=lambda each: (each.footprints.largest.device_bytes, each.sort_key))
    message = (
        f"no plan for {request.config.spec.name} with batch {request.config.batch} and "
        f"{request.config.seq} tokens fits {request.hardware.device} of {request.hardware.name}: the "
        f"closest ({closest.describe()}) {closest.missing}"
    )
    hint = "use a smaller batch or sequence, a narrower --dtype, or hardware with more memory"
    if ASSUMED_SIZE in closest.missing:
        hint += f"; the host's memory is assumed: {HOW_TO_STATE_MEMORY}"
    return DoesNotFit(message, hint=hint)
