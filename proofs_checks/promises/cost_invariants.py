"""What holds of every predicted duration, whatever the constants: monotony, bounds, units, and memory that is enough.

These are the properties that a cost model must have before it is worth calibrating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from costmodel.devices.datasheet import datasheet_profile
from costmodel.estimate import estimate
from costmodel.models.configs import read_model_spec, spec_of_config
from costmodel.models.forward import forward_work
from costmodel.rates.profile import Constant, Profile
from costmodel.work import Attention, Matmul, Work
from proofs_checks.claims import Checks, printed
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import Fault, called_with, planted, returning
from topology import load_preset
from topology.errors import DoesNotFit
from zosim.config import PlanConfig, Search, merge
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.planning.planner import choose
from zosim.planning.request import Hardware, Request
from zosim.plans import Placement, Plan, Residency, Schedule
from zosim.program import Program
from zosim.simulators.closed_form import step_time_bound
from zosim.simulators.simulate import simulate

_DEVICES = (("dgx-h100", "gpu0"), ("rtx4090-2x", "gpu0"), ("dgx-h100", "cpu0"), ("cpu-laptop", "cpu0"))
_ROUNDING = 1e-9
"""Sums of hundreds of durations in another order; a fault shows as percents."""
_FACTORS = (1.5, 4.0)
_LARGEST = 10**10
_DENSITY = 0.3
_SIZES = (
    "elementwise_bytes",
    "param_pass_bytes",
    "scratch_bytes",
    "num_exponentials",
    "num_normals",
    "num_kept_rows",
    "copy_bytes",
    "num_allocations",
    "allocation_bytes",
)
"""Kernels are not among them: each finds its own part in cache, so more of them may serve the same bytes faster."""
_DIMS = {"m", "n", "k", "num", "query", "key", "head_dim"}
_BYTES = ("elementwise_bytes", "param_pass_bytes", "scratch_bytes", "copy_bytes", "allocation_bytes")
_GIB = 2**30


def profiles() -> Iterator[Profile]:
    """Yield profiles of GPUs and CPUs, from their data sheets."""
    for preset, device in _DEVICES:
        yield datasheet_profile(load_preset(preset), device)


def random_work(generator: np.random.Generator) -> Work:
    """Return work of a few kinds at once, sizes spread over decades, so that each kind matters to some work."""

    def size(largest: int = _LARGEST) -> int:
        return round(float(np.exp(generator.uniform(0, np.log(largest)))))

    def is_there() -> bool:
        return bool(generator.random() < _DENSITY)

    matmul = Matmul(m=size(4096), n=size(4096), k=size(4096))
    attention = Attention(num=size(64), query=size(2048), key=size(2048), head_dim=64)
    sizes = {name: size() for name in _SIZES if is_there()}
    return Work.model_validate(
        sizes
        | {"matmuls": (matmul,) if is_there() else (), "attention": (attention,) if is_there() else ()}
        | {"num_kernels": size(1000), "calls": ("block",)}
    )


def scaled_profile(profile: Profile, factor_of: Callable[[Constant], float]) -> Profile:
    """Return a profile whose constants are multiplied."""
    constants = []
    for constant in profile.constants:
        factor = factor_of(constant)
        scaled = {end: getattr(constant, end) * factor for end in ("value", "low", "high")}
        constants.append(constant.model_copy(update=scaled))
    return profile.with_constants(*constants, origin=profile.origin)


def _rise(before: float, after: float) -> float:
    """Return by what part something has become larger; nothing if it has not."""
    return max(0.0, after / before - 1)


def check_rates(context: Context) -> Outcome:
    """Raise every constant in turn: no rate makes work longer, no duration makes it shorter."""
    generator = np.random.default_rng(context.seed)
    largest, count, moved = 0.0, 0, set()
    for profile in profiles():
        works = [random_work(generator) for _ in range(context.samples(24, 8))]
        works += [
            Work.model_validate({name: _LARGEST, "num_kernels": 1, "calls": ("block",)}) for name in _SIZES
        ]
        for constant in profile.constants:
            faster = scaled_profile(profile, lambda c, name=constant.name: 2.0 if c.name == name else 1.0)  # type: ignore[misc]
            for work in works:
                before, after = estimate(work, profile).seconds, estimate(work, faster).seconds
                helps = constant.is_rate or constant.quantity in ("cache_bytes", "memory_overlap")
                largest = max(largest, _rise(before, after) if helps else _rise(after, before))
                count += 1
                moved |= {constant.quantity} if before != after else set()
    unmoved = _COUNTED - moved
    # Constants that no duration depends on would make this true of anything.
    return Outcome(
        largest if not unmoved else float("inf"),
        _ROUNDING,
        "largest change of a duration in the wrong direction",
        (
            f"{count} pairs of estimates",
            f"kinds that changed nothing: {', '.join(sorted(unmoved)) or 'none'}",
        ),
    )


_COUNTED = {"matmul_rate", "memory_bandwidth", "param_pass_bandwidth", "sampling_rate", "copy_h2d_bandwidth"}
"""Kinds of which each must matter to some work."""


def check_sizes(context: Context) -> Outcome:
    """Enlarge every size in turn: no duration gets shorter."""
    generator = np.random.default_rng(context.seed)
    largest, count = 0.0, 0
    for profile in profiles():
        for _ in range(context.samples(40, 10)):
            work = random_work(generator)
            before = estimate(work, profile).seconds
            for larger in _enlarged(work):
                largest = max(largest, _rise(estimate(larger, profile).seconds, before))
                count += 1
    largest = max(largest, _largest_fall_of_forwards(context))
    return Outcome(largest, _ROUNDING, "largest fall of a duration", (f"{count} pairs of estimates",))


def _enlarged(work: Work) -> Iterator[Work]:
    """Yield the same work with one size of it larger."""
    for factor in _FACTORS:
        for name in _SIZES:
            yield work.model_copy(update={name: round(getattr(work, name) * factor) + 1})
        for kind in ("matmuls", "attention"):
            for part in getattr(work, kind):
                for dim in set(type(part).model_fields) & _DIMS:
                    larger = part.model_copy(update={dim: round(getattr(part, dim) * factor) + 1})
                    yield work.model_copy(update={kind: (larger,)})


def _largest_fall_of_forwards(context: Context) -> float:
    """Return by how much a forward over more sequences, or longer ones, gets shorter."""
    spec, largest = read_model_spec("opt-125m"), 0.0
    profile = next(profiles())
    for segment in ("embed", "block.0", "head"):
        for shapes in (((1, 64), (2, 64), (16, 64)), ((1, 64), (1, 128), (1, 1024))):
            seconds = [
                estimate(forward_work(spec, segment, batch=batch, seq=seq), profile).seconds
                for batch, seq in shapes[: context.samples(3, 2)]
            ]
            largest = max(largest, *(_rise(later, before) for before, later in pairwise(seconds)))
    return largest


def programs() -> Iterator[tuple[str, Program]]:
    """Yield programs of unlike schedules: resident, offloaded, offloaded without overlap, in full passes."""
    config = {
        "model_type": "opt",
        "hidden_size": 256,
        "ffn_dim": 1024,
        "word_embed_proj_dim": 256,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    }
    base = Plan(
        model=spec_of_config(config, name="five blocks"),
        placement=Placement(topology="any", devices=("gpu0",)),
        batch=2,
        seq=64,
    )
    offloaded = Residency(blocks="offloaded")
    points: Mapping[str, dict[str, object]] = {
        "resident": {},
        "full pass": {"schedule": Schedule(traversal="full")},
        "offloaded": {"residency": offloaded, "schedule": Schedule(update="delayed")},
        "one staging buffer": {
            "residency": offloaded.model_copy(update={"num_staging_buffers": 1}),
            "schedule": Schedule(update="delayed"),
        },
        "no overlap": {
            "residency": offloaded.model_copy(update={"overlap": False}),
            "schedule": Schedule(update="delayed"),
        },
    }
    for name, fields in points.items():
        yield name, lower(base.model_copy(update=fields))


def check_bounds(_context: Context) -> Outcome:
    """Hold operations and steps between their longest part and the sum of their parts."""
    details, largest = [], 0.0
    for preset, device in _DEVICES:
        topology = load_preset(preset)
        profile = datasheet_profile(topology, device)
        machine = Machine.from_topology(topology, device, profile)
        for name, program in programs():
            parts = [_outside(estimate(item.work, profile)) for item in program.step]
            seconds = {item.id: machine.activity(program, item).seconds for item in program.step}
            busiest = _busiest_s(program, seconds)
            total = sum(seconds.values()) + machine.step_s()
            bound, simulated = step_time_bound(program, machine), simulate(program, machine).step_time_s
            outside = max(_rise(bound, busiest), _rise(simulated, bound), _rise(total, bound), *parts)
            largest = max(largest, outside)
            details.append(
                f"{device} of {preset}, {name}: {busiest:.3g} <= {bound:.3g} <= {total:.3g} s, simulated {simulated:.3g}"
            )
    return Outcome(largest, _ROUNDING, "largest part by which a duration lies outside", tuple(details))


def _outside(cost: object) -> float:
    """Return by what part the seconds of an operation lie outside of its longest term and the sum of its terms."""
    terms, seconds = cost.terms, cost.seconds  # type: ignore[attr-defined]
    if not sum(terms.values()):
        return 0.0
    return max(_rise(seconds, max(terms.values())), _rise(sum(terms.values()), seconds))


def _busiest_s(program: Program, seconds: Mapping[str, float]) -> float:
    by_stream: dict[str, float] = {}
    for item in program.step:
        by_stream[item.stream] = by_stream.get(item.stream, 0.0) + seconds[item.id]
    return max(by_stream.values())


def check_units(context: Context) -> Outcome:
    """Measure time, and bytes, in other units: durations follow the first and do not see the second."""
    generator = np.random.default_rng(context.seed)
    largest, count = 0.0, 0
    for profile in profiles():
        slower = scaled_profile(profile, lambda c: 8.0 ** _power(c.unit, "s"))
        finer = scaled_profile(profile, lambda c: 8.0 ** _power(c.unit, "byte"))
        for _ in range(context.samples(20, 4)):
            work = random_work(generator)
            before = estimate(work, profile).seconds
            largest = max(largest, abs(estimate(work, slower).seconds / (8.0 * before) - 1))
            moving = work.model_copy(update={"matmuls": (), "attention": ()})
            counted = moving.model_copy(update={name: 8 * getattr(work, name) for name in _BYTES})
            same = estimate(moving, profile).seconds
            largest = max(largest, abs(estimate(counted, finer).seconds / same - 1))
            count += 2
    return Outcome(
        largest, _ROUNDING, "largest deviation from the same duration", (f"{count} pairs of estimates",)
    )


def _power(unit: str, of: str) -> int:
    """Return the power in which a unit holds another: of ``s/byte``, 1 of ``s`` and -1 of ``byte``."""
    above, _, below = unit.partition("/")
    return (above == of) - (below == of)


def check_memory(context: Context) -> Outcome:
    """Give a machine more and more memory: what fitted fits, and the chosen step gets no longer."""
    topology = load_preset("rtx4090-2x")
    hardware = Hardware(topology, "rtx4090-2x", "gpu0", datasheet_profile(topology, "gpu0"))
    config = PlanConfig(model=read_model_spec("opt-125m"), seq=64)
    details, largest, before = [], 0.0, float("inf")
    for size in (_GIB // 2, 3 * _GIB // 4, _GIB, 5 * _GIB // 4, 20 * _GIB)[:: context.samples(1, 2)]:
        try:
            limited = merge(config, PlanConfig(search=Search(max_device_bytes=size)))
            best = choose(Request(limited, hardware)).chosen
        except DoesNotFit:
            details.append(f"{size / _GIB:g} GiB: nothing fits")
            largest = max(largest, float("inf") if before < float("inf") else 0.0)
            continue
        taken = best.planned.footprint.device_bytes
        largest = max(largest, _rise(before, best.seconds), _rise(size, taken))
        before = best.seconds
        details.append(
            f"{size / _GIB:g} GiB: {best.describe()}, {best.seconds:.4g} s, {taken / _GIB:.2f} GiB"
        )
    if len({line.partition(":")[2] for line in details}) < 2:
        largest = float("inf")  # memory that never decides anything shows nothing
    return Outcome(largest, _ROUNDING, "largest rise of step or need with more memory", tuple(details))


@planted("costmodel.estimate:work_terms", "copies that a faster route makes slower")
def slower_by_a_faster_route(shipped, work, values, direction="h2d"):
    name = f"copy_{direction}_bandwidth"
    return shipped(work, {**values, name: 1e18 / values[name]}, direction)


@planted("costmodel.estimate:work_terms", "passes over parameters at no particular rate")
def param_passes_at_one_rate(shipped, work, values, *rest):
    rates = {name: 1e9 for name in values if name.startswith("param_pass_bandwidth")}
    return shipped(work, {**values, **rates}, *rest)


@planted("costmodel.estimate:combine_terms", "launches in place of kernels")
def launches_in_place_of_kernels(shipped, terms, device_type):
    seconds = shipped(terms, device_type)
    return seconds if device_type == "cpu" else min(seconds, terms.get("dispatch", 0.0) + terms["overhead"])


CHECKS: Checks = {
    "durations-fall-with-rates": printed(
        check_rates,
        slower_by_a_faster_route,
        param_passes_at_one_rate,
    ),
    "durations-grow-with-sizes": printed(
        check_sizes,
        Fault(
            "an efficiency that has no limit",
            "costmodel.estimate:_efficiency",
            lambda shipped, op, *rest: op.m * shipped(op, *rest),
        ),
        Fault(
            "passes of which the cache holds more than there is",
            "costmodel.estimate:_cached_bytes",
            lambda _shipped, size_bytes, *_rest: 1.5 * size_bytes,
        ),
    ),
    "steps-lie-between-parts-and-sum": printed(
        check_bounds,
        launches_in_place_of_kernels,
        called_with(
            "zosim.simulators.maxplus:MaxPlus.advance",
            "instructions that end halfway",
            seconds=lambda seconds: [0.5 * alone_s for alone_s in seconds],
        ),
    ),
    "durations-have-their-units": printed(
        check_units,
        called_with(
            "costmodel.estimate:work_terms",
            "a latency in microseconds",
            values=lambda values: {**values, "copy_latency_s": 10e-6},
        ),
        called_with(
            "costmodel.estimate:_cached_bytes",
            "a cache in kibibytes",
            cache_bytes=lambda cache_bytes: 1024 * cache_bytes**0.5,
        ),
    ),
    "more-memory-still-fits": printed(
        check_memory,
        returning(
            "zosim.planning.request:Request.device_limit_bytes",
            "a limit that falls as memory grows",
            lambda it: _GIB**2 // it,
        ),
    ),
}
