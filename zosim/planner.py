"""Which placement to use: every plan that computes the same thing, the ones that fit, the fastest of them.

The closed form bounds every candidate from below; candidates are then simulated in the order of their bounds until
no bound is left under the best simulated step. The answer says what was chosen and why, what came second, and
what does not fit for want of how much memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from costmodel.model_spec import ModelSpec
from costmodel.profile import Profile
from topology.errors import DoesNotFit, PlanError
from topology.graph import Topology
from topology.units import format_bytes, format_seconds
from topology.validation import readable
from zosim.plan import Estimator, Placement, Plan, Precision, Residency, Runtime, TransferDType
from zosim.predict import Prediction, Subject
from zosim.recurrence import step_time_bound

Method = Literal["auto", "mezo", "zo2"]
_SLOTS = (1, 2, 3)
_LOSS_CHUNK_TOKENS = 512
_SIGNIFICANT_DIGITS = 6
_ALIKE = 5e-4
_LOSSY_TRANSFERS: tuple[TransferDType, ...] = ("float16", "bfloat16", "float8_e4m3")


@dataclass(frozen=True)
class Request:
    """What is asked of the planner.

    Attributes
    ----------
    model : ModelSpec
    topology : Topology
    hardware : str
        How `topology` was named, so that a plan can find it again.
    device : str
        Node that the plan's rank runs on.
    profile : Profile
        What operations cost there.
    batch, seq : int
    estimator : Estimator
    precision : Precision
    method : str
        ``"mezo"`` keeps all blocks on the device, ``"zo2"`` offloads them, ``"auto"`` tries both.
    attention : str
    max_device_bytes, max_host_bytes : int or None
        Limits below what the hardware has.
    allow_lossy : bool
        Whether plans that compute something else (a narrower transfer format) may be considered.
    fixed : mapping
        Fields of ``residency`` and ``runtime`` that every plan must have, whatever the planner would choose:
        how an ablation is asked for.
    """

    model: ModelSpec
    topology: Topology
    hardware: str
    device: str
    profile: Profile
    batch: int
    seq: int
    estimator: Estimator = field(default_factory=Estimator)
    precision: Precision = field(default_factory=Precision)
    method: Method = "auto"
    attention: Literal["eager", "sdpa"] = "sdpa"
    max_device_bytes: int | None = None
    max_host_bytes: int | None = None
    allow_lossy: bool = False
    fixed: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def device_limit_bytes(self) -> int:
        """Memory that a plan may take on the device."""
        return min(self.topology.device_spec(self.device).memory_bytes, self.max_device_bytes or 2**63)

    @property
    def host_limit_bytes(self) -> int:
        """Memory that a plan may take on the host."""
        return min(self.topology.host_memory(self.device).memory_bytes, self.max_host_bytes or 2**63)


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at.

    Attributes
    ----------
    subject : Subject
    seconds : float
        Step time: simulated, or bounded from below by the closed form.
    is_simulated : bool
    missing : str
        What does not fit and by how much; empty if everything does.
    prediction : Prediction or None
        For the one that is chosen.
    """

    subject: Subject
    seconds: float
    is_simulated: bool = False
    missing: str = ""
    prediction: Prediction | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.subject.plan

    @property
    def sort_key(self) -> tuple[float, int, int]:
        """Faster first; of two that are as fast, the one with less to do; then the one that takes less memory."""
        seconds = float(f"{self.seconds:.{_SIGNIFICANT_DIGITS}g}")
        return (seconds, len(self.subject.program.step), self.subject.footprint.device_bytes)

    def describe(self) -> str:
        """Return the plan in a few words."""
        return describe(self.plan)


@dataclass(frozen=True)
class Decision:
    """The planner's answer.

    Attributes
    ----------
    chosen : Candidate
    others : tuple of Candidate
        That fit, best first; those beyond the second may never have been simulated.
    rejected : tuple of Candidate
        That do not fit, fastest first.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this one: what limits it, what came second, and what a larger memory would buy."""
        best = self.chosen
        assert best.prediction is not None
        limit = best.prediction.bottleneck
        seconds = format_seconds(best.prediction.step_time_s)
        found = [f"{best.describe()}: {seconds} a step, {limit.share:.0%} of it {limit.words}"]
        if self.others:
            second = self.others[0]
            slower = second.seconds / best.prediction.step_time_s - 1
            word = "" if second.is_simulated else "at least "
            difference = f"{word}{slower:.1%} slower" if slower >= _ALIKE else "as fast"
            found.append(f"second: {second.describe()}, {difference}")
        faster = [c for c in self.rejected if c.seconds < best.prediction.step_time_s]
        if faster:
            found.append(f"would be faster but does not fit: {faster[0].describe()} ({faster[0].missing})")
        return tuple(found)


def choose(request: Request) -> Decision:
    """Return the fastest plan that fits.

    Raises
    ------
    DoesNotFit
        If none fits, naming the one that comes closest and what it lacks.
    PlanError
        If the request contradicts itself.
    """
    candidates = list(_candidates(request))
    fitting = sorted((c for c in candidates if not c.missing), key=lambda c: c.sort_key)
    rejected = sorted((c for c in candidates if c.missing), key=lambda c: c.sort_key)
    if not fitting:
        raise _nothing_fits(request, rejected)
    best, *others = _simulate_survivors(fitting)
    chosen = replace(best, prediction=best.subject.prediction)
    return Decision(chosen, tuple(others), tuple(rejected))


def placements(request: Request) -> Iterator[Plan]:
    """Yield every plan that the request admits.

    All of them compute the same losses and updates, except those with a narrower transfer format, which are
    yielded only if loss is allowed.
    """
    if request.precision.is_lossy and not request.allow_lossy:
        raise PlanError(
            f"transfer format {request.precision.transfer} is narrower than storage format "
            f"{request.precision.storage} and loses precision at every offload",
            hint="add --allow-lossy if that is meant",
        )
    seen: list[Plan] = []
    contradiction: PlanError | None = None
    for point in _points(request):
        try:
            plan = _plan(request, *point)
        except PlanError as error:
            contradiction = error
            continue
        if plan not in seen:
            seen.append(plan)
            yield plan
    if contradiction is not None and not seen:
        raise contradiction


def _plan(request: Request, residency: Residency, runtime: Runtime, precision: Precision) -> Plan:
    """Return one point as a plan, with the fields that the request fixes."""
    runtime = runtime.model_copy(update={"attention": request.attention})
    with readable("what the plan is asked to fix", PlanError):
        return Plan(
            model=request.model,
            placement=Placement(topology=request.hardware, devices=(request.device,)),
            batch=request.batch,
            seq=request.seq,
            estimator=request.estimator,
            residency=Residency.model_validate(dict(residency) | dict(request.fixed.get("residency", {}))),
            precision=precision,
            runtime=Runtime.model_validate(dict(runtime) | dict(request.fixed.get("runtime", {}))),
        )


def describe(plan: Plan) -> str:
    """Return a plan in a few words, axis by axis where it differs from plain MeZO."""
    words = [plan.method]
    if plan.residency.blocks == "offloaded":
        words.append(f"{plan.residency.num_slots} slot{'s' if plan.residency.num_slots > 1 else ''}")
        if not plan.residency.overlap:
            words.append("no overlap")
        if not plan.residency.reuse_slots:
            words.append("slots allocated anew")
        if plan.residency.edges == "offloaded":
            words.append("embedding and head offloaded")
        if plan.precision.is_lossy:
            words.append(f"{plan.precision.transfer} transfers (lossy)")
    else:
        words.append(plan.runtime.traversal)
    if plan.runtime.draw_ahead:
        words.append("draws ahead")
    if plan.runtime.loss_chunk_tokens:
        words.append(f"loss in chunks of {plan.runtime.loss_chunk_tokens}")
    return ", ".join(words)


def _points(request: Request) -> Iterator[tuple[Residency, Runtime, Precision]]:
    same = request.precision.model_copy(update={"transfer": request.precision.storage})
    if request.method in ("auto", "mezo"):
        for update in ("immediate", "delayed"):
            yield Residency(), Runtime(update=update), same
        yield Residency(), Runtime(traversal="sweep"), same
    if request.method in ("auto", "zo2"):
        for precision in _transfer_formats(request):
            for slots in _SLOTS:
                residency = Residency(blocks="offloaded", num_slots=slots)
                yield residency, Runtime(update="delayed"), precision
                if not request.model.tied_head:
                    edges_too = residency.model_copy(update={"edges": "offloaded"})
                    yield edges_too, Runtime(update="delayed"), precision


def _transfer_formats(request: Request) -> Iterator[Precision]:
    yield request.precision
    if request.allow_lossy and not request.precision.is_lossy:
        for transfer in _LOSSY_TRANSFERS:
            narrower = request.precision.model_copy(update={"transfer": transfer})
            if narrower.narrows:
                yield narrower


def _candidates(request: Request) -> Iterator[Candidate]:
    """Yield every placement, and again with a chunked loss where that makes it fit."""
    is_open = "loss_chunk_tokens" not in request.fixed.get("runtime", {})
    for plan in placements(request):
        whole = _candidate(request, plan)
        yield whole
        if whole.missing and is_open and plan.tokens_per_step > _LOSS_CHUNK_TOKENS:
            runtime = plan.runtime.model_copy(update={"loss_chunk_tokens": _LOSS_CHUNK_TOKENS})
            chunked = _candidate(request, plan.model_copy(update={"runtime": runtime}))
            if not chunked.missing:
                yield chunked


def _candidate(request: Request, plan: Plan) -> Candidate:
    subject = Subject(plan, request.topology, request.profile)
    bound = step_time_bound(subject.program, subject.machine)
    return Candidate(subject, bound, missing="; ".join(_missing(request, subject)))


def _missing(request: Request, subject: Subject) -> Iterator[str]:
    taken = subject.footprint
    sides: tuple[tuple[str, int, int], ...] = (
        ("device", taken.device_bytes, request.device_limit_bytes),
        ("host", taken.host_bytes, request.host_limit_bytes),
    )
    for where, needed, limit in sides:
        if needed > limit:
            yield (
                f"needs {format_bytes(needed)} of {where} memory, {format_bytes(needed - limit)} more than "
                f"{format_bytes(limit)}: {taken.describe(where)}"
            )


def _simulate_survivors(fitting: list[Candidate]) -> list[Candidate]:
    """Simulate in the order of the bounds until no bound undercuts the second best, and rank."""
    simulated: list[Candidate] = []
    waiting = list(fitting)
    while waiting:
        times = sorted(candidate.seconds for candidate in simulated)
        if len(times) >= 2 and waiting[0].seconds >= times[1]:
            break
        candidate = waiting.pop(0)
        seconds = candidate.subject.timeline.step_time_s
        simulated.append(replace(candidate, seconds=seconds, is_simulated=True))
    ranked = sorted(simulated, key=lambda candidate: candidate.sort_key)
    return [*ranked[:2], *sorted([*ranked[2:], *waiting], key=lambda candidate: candidate.sort_key)]


def _nothing_fits(request: Request, rejected: list[Candidate]) -> DoesNotFit:
    closest = min(rejected, key=lambda candidate: candidate.subject.footprint.device_bytes)
    message = (
        f"no plan fits {request.model.name} with batch {request.batch} and {request.seq} tokens on "
        f"{request.device} of {request.hardware}; the closest, {closest.describe()}, {closest.missing}"
    )
    return DoesNotFit(
        message, hint="a smaller batch or sequence, a narrower --dtype, or hardware with more memory"
    )
