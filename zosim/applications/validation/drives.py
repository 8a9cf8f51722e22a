"""Models whose weights, or whose whole training state, lie on drives: as fast as the drives bring what each pass reads."""

from __future__ import annotations

from math import ceil

from costmodel.estimate import estimate
from costmodel.formats import FORMATS
from costmodel.param_passes import copy_work
from costmodel.rates.profile import Bound
from zosim.applications.validation.codes import code_of
from zosim.applications.validation.measured_machines import MeasuredMachine, bounded
from zosim.applications.validation.models import model_of
from zosim.applications.validation.passes import generation_s, pass_s
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable
from zosim.hardware.machine import Drives

_SUSTAINED = 0.92
"""Assumed: part of what drives read in one large transfer that transfers of layers reach."""
_WRITE_SHARE = 0.45
"""Part of their reads that drives write at, where only these are stated: DeepNVMe writes 4 to 5 GB/s where it reads 10, and 11 where it reads 27."""
_SPREAD = (0.6, 1.35)
_MASTER_BYTES, _GRADIENT_BYTES = 12, 4
"""Of a parameter: its float32 copy with both moments, and its float32 gradient."""
_QUANTITIES = ("generated_tokens_per_s", "tokens_per_s")


def nvme_streamed(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the tokens a second of passes, or of training steps, that read weights from drives or from host memory.

    Raises
    ------
    RowsError
        If a cell that it needs is empty, or no number.
    Unpredictable
        If its recipe or quantity is none that is predicted, or nothing says how fast its drives are.
    """
    if row["quantity"] not in _QUANTITIES:
        raise Unpredictable(f"quantity {row['quantity']!r} must be one of {', '.join(_QUANTITIES)}")
    recipes = {"weights-on-nvme": True, "weights-on-host": True, "zero-infinity-nvme": False}
    generates = row.choice("recipe", recipes)
    devices = row.count_or("devices", 1)
    # Of a pass the batch is that of all devices, which share the weights' way out.
    share = ceil(row.count("batch") / devices) if generates else row.count("batch")
    own = MeasuredRow({**row.fields, "batch": str(share)}, row.where)
    size = FORMATS[row.dtype].element_bytes * model_of(row).num_parameters
    profile = code_of(row["code"]).profile(measured_machine.burst_profile)
    from_drive_s = 0.0 if row["recipe"] == "weights-on-host" else size / _read_rate(row, measured_machine)

    def moved_s(bound: Bound) -> float:
        return max(from_drive_s, estimate(copy_work(size // devices), profile, bound=bound).seconds)

    times = row.count_or("accumulation", 1)
    if generates:
        tokens = row.count("batch") * (
            row.count_or("generated_tokens", 1) if row["quantity"] == _QUANTITIES[0] else row.count("seq")
        )
        seconds = bounded(lambda bound: generation_s(own, measured_machine, moved_s, bound))
    else:
        tokens = times * devices * share * row.count("seq")
        seconds = bounded(lambda bound: _step_s(own, measured_machine, times * moved_s(bound), bound))
        times = 1
    low, high = _SPREAD
    rate = times * tokens / seconds.predicted
    return Forecast(
        rate, min(low * rate, times * tokens / seconds.high), max(high * rate, times * tokens / seconds.low)
    )


def _step_s(row: MeasuredRow, measured_machine: MeasuredMachine, moved_s: float, bound: Bound) -> float:
    """Return the seconds of a step whose weights, gradients and moments lie on drives.

    Weights come forward and once more backward, while devices compute; then the optimizer reads and writes all states, part by part.
    """
    num_parameters = model_of(row).num_parameters
    reads = _read_rate(row, measured_machine)
    writes = reads * _write_share(measured_machine)
    forwards = 3.0 if row["checkpointing"].lower() == "none" else 4.0
    computed_s = row.count_or("accumulation", 1) * forwards * pass_s(row, measured_machine, bound)
    kept = _MASTER_BYTES + _GRADIENT_BYTES
    optimizer_s = num_parameters * (kept / reads + (kept + FORMATS[row.dtype].element_bytes) / writes)
    return max(2 * moved_s, computed_s) + optimizer_s


def _read_rate(row: MeasuredRow, measured_machine: MeasuredMachine) -> float:
    """Return the bytes a second that drives bring: as the row says, or else as the topology's data sheets do."""
    if row["storage_read"]:
        return _SUSTAINED * row.number("storage_read")
    drives = Drives.of(measured_machine.topology, measured_machine.devices[0])
    if drives is None:
        raise Unpredictable("storage_read is empty, and the hardware has no drive")
    return _SUSTAINED * drives.read_bytes_per_s


def _write_share(measured_machine: MeasuredMachine) -> float:
    device = measured_machine.devices[0]
    drives, disks = Drives.of(measured_machine.topology, device), measured_machine.topology.disks_of(device)
    is_declared = drives is not None and any(disk.write_bandwidth is not None for disk in disks)
    return drives.write_bytes_per_s / drives.read_bytes_per_s if drives and is_declared else _WRITE_SHARE
