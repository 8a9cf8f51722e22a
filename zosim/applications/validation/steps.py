"""Training steps and the memory that they take: zeroth-order and first-order, simulated as plans are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from costmodel.devices.gpus import is_widened
from costmodel.formats import DType
from costmodel.memory import CONTEXT, SLACK
from costmodel.rates.profile import Bound
from topology.units import format_bytes
from zosim.applications.first_order.programs import FirstOrder, lower_first_order
from zosim.applications.published_code import all_as_published, with_kernels
from zosim.applications.validation.codes import KERNEL_NAMES, code_of
from zosim.applications.validation.measured_machines import MeasuredMachine, bounded
from zosim.applications.validation.models import model_of
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable
from zosim.lowering import lower_all
from zosim.options import axis
from zosim.planning.footprint import footprint
from zosim.planning.predict import PlannedRun
from zosim.plans import ForwardPass, Mesh, Placement, Plan, Residency, Schedule, Split


def attention_of(row: MeasuredRow, measured_machine: MeasuredMachine) -> Literal["eager", "sdpa"]:
    """Return the implementation of attention: the row's, or else the code's; stored scores where torch has no fused kernel."""
    if stores_scores(row, measured_machine):
        return "eager"
    code = code_of(row["code"])
    of_latents = code.latent_attention if code.latent_attention and model_of(row).latent else None
    return row.choice("attention_kernel", KERNEL_NAMES) or of_latents or code.attention


def stores_scores(row: MeasuredRow, measured_machine: MeasuredMachine) -> bool:
    """Whether torch has no fused attention in a row's format on a machine's devices."""
    return row.dtype == "bfloat16" and is_widened(measured_machine.device, "bfloat16")


def step(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a zeroth-order step, simulated with both ends of the profile's intervals beside.

    Raises Unpredictable if its method, format or attention is none that is predicted, or it needs more devices than there are.
    Raises ModelError if it names no model, and brings no configuration.
    """
    return _timed(_zeroth_order(row, measured_machine))


def device_memory(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the bytes that a zeroth-order step takes of its devices."""
    return _device_bytes(_zeroth_order(row, measured_machine), row)


def host_memory(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the bytes that a zeroth-order step takes of its hosts.

    Raises Unpredictable if nothing of it lies in host memory, and as for :func:`step`.
    """
    planned = _zeroth_order(row, measured_machine)
    size = float(sum(host.size_bytes for host in planned.footprints.hosts))
    if not size:
        raise Unpredictable("the plan keeps nothing in host memory")
    # torch's allocator of pinned memory rounds each block up to a power of two (c10, CachingHostAllocator).
    return Forecast(size, size, 2 * size)


def first_order_step(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a first-order step."""
    return _timed(_first_order(row, measured_machine))


def first_order_memory(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the bytes that a first-order step takes of its devices."""
    return _device_bytes(_first_order(row, measured_machine), row)


def _timed(planned: PlannedRun) -> Forecast:
    ends = planned.bounding_step_s("low"), planned.bounding_step_s("high")
    return Forecast(planned.step_time_s, *ends, assumed=tuple(_about_headroom(planned)))


def _about_headroom(planned: PlannedRun) -> Iterator[str]:
    """Yield that a device's memory would do, where a plan takes more than there is."""
    taken = planned.footprints
    spec = planned.topology.device_spec(planned.plan.placement.devices[taken.largest_rank])
    device_bytes = spec.memory_bytes
    if spec.type == "gpu" and taken.largest.device_bytes > device_bytes:
        yield f"memory for {format_bytes(taken.largest.device_bytes)} on a device of {format_bytes(device_bytes)}"


def _device_bytes(planned: PlannedRun, row: MeasuredRow) -> Forecast:
    """Return the bytes of all devices: what the driver counts, or what the framework's allocator handed out."""
    is_allocated = row["quantity"] == "allocated device memory"

    def size(bound: Bound) -> float:
        footprints = [
            footprint(planned.programs.program_of(rank), profile, bound)
            for rank, profile in enumerate(planned.rank_profiles)
        ]
        runtime = (CONTEXT, SLACK) if is_allocated else ()
        components = (
            component for taken in footprints for component in taken.components if component.where == "device"
        )
        return float(sum(component.size_bytes for component in components if component.name not in runtime))

    # What code leaves alive may be more or less than its lines say.
    counted = bounded(size)
    return Forecast(counted.predicted, counted.low * _ALIVE[0], counted.high * _ALIVE[1])


_ALIVE = (0.95, 1.08)
"""Part of the counted bytes that published code was found to hold, beyond what the runtime's interval covers."""


def _zeroth_order(row: MeasuredRow, measured_machine: MeasuredMachine) -> PlannedRun:
    is_offloaded = row.choice("method", {"mezo": False, "zo2": True})
    dtype = row.dtype
    devices = measured_machine.devices_of(row, row.count_or("devices", 1))
    plan = axis(
        Plan,
        model=model_of(row),
        placement=Placement(topology=measured_machine.name, devices=devices),
        batch=row.count("batch"),
        seq=row.count("seq"),
        mesh=Mesh(data=len(devices)),
        weights={"dtype": _stored(dtype)},
        residency=Residency(blocks="offloaded" if is_offloaded else "resident"),
        schedule=Schedule(
            traversal="blockwise" if is_offloaded else "full",
            update="delayed" if is_offloaded else "immediate",
        ),
        forward=ForwardPass(
            attention=attention_of(row, measured_machine), compute_dtype=dtype if dtype == "tf32" else None
        ),
    )
    programs = lower_all(plan)
    if row["code"] == "published":
        programs = all_as_published(programs, plan)
    profile = code_of(row["code"]).profile(measured_machine.profile)
    return PlannedRun(plan, measured_machine.topology, profile, programs)


def _first_order(row: MeasuredRow, measured_machine: MeasuredMachine) -> PlannedRun:
    data, stage = row.count_or("data_parallel", 1), row.count_or("pipeline_parallel", 1)
    devices = measured_machine.devices_of(row, data * stage)
    model = model_of(row)
    dtype: DType = row.dtype
    code = code_of(row["code"])
    stored: DType = code.stored or _stored(dtype)
    plan = axis(
        Plan,
        model=model,
        placement=Placement(topology=measured_machine.name, devices=devices),
        batch=row.count("batch"),
        seq=row.count("seq"),
        mesh=Mesh(data=data, stage=stage),
        split=Split(
            split_points=tuple(
                f"block.{model.num_blocks * boundary // stage - 1}" for boundary in range(1, stage)
            )
        ),
        weights={"dtype": stored},
        forward={"attention": attention_of(row, measured_machine), "compute_dtype": dtype},
    )
    settings = axis(
        FirstOrder,
        optimizer=_optimizer(row["optimizer"] or "adam"),
        schedule="1f1b",
        num_microbatches=row.count_or("num_micro_batches", 1),
        dropout=code.dropout,
        recompute=row.choice("recompute", _RECOMPUTED),
        sharding=code.sharding,
    )
    programs = lower_first_order(plan, settings)
    programs = replace(
        programs,
        programs=tuple(
            with_kernels(program, attention=code.kernel, fuses_softmax=code.fuses_softmax)
            for program in programs.programs
        ),
    )
    return PlannedRun(plan, measured_machine.topology, code.profile(measured_machine.profile), programs)


_RECOMPUTED = {
    **dict.fromkeys(("", "none", "false", "no", "0"), False),
    **dict.fromkeys(("full", "true", "yes", "1"), True),
}
"""Whether activations are computed again, by what rows say."""


def _stored(dtype: DType) -> DType:
    """Return the format that weights are kept in: TF32 is one of products alone."""
    return "float32" if dtype == "tf32" else dtype


_ADAMS = frozenset(
    {"adam", "adamw", "fusedadam", "fusedadamw", "adamwtorch", "adamwtorchfused", "decoupledadamw"}
)
"""Names of Adam in float32 without and with decoupled weight decay, which costs no time of its own."""


def _optimizer(name: str) -> str:
    """Return what the simulator calls an optimizer."""
    plain = name.lower().replace("_", "").replace("-", "").replace(".", "")
    return "adam" if plain in _ADAMS else plain
