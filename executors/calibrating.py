"""A machine's calibration from beginning to end: measured, fitted, and held against whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from costmodel.calibration import FitReport, Residual, fit_profile
from costmodel.contention import with_copy_cores
from costmodel.datasheet import datasheet_profile
from costmodel.profile import Profile
from executors.calibrate import DEFAULT_BUDGET_S, calibrate, threads_set
from executors.whole_steps import measure_steps, with_interval_scale, with_step_overhead
from topology.graph import Topology
from zosim.machine import Machine
from zosim.simulate import simulate

_STEPS_SHARE = 0.3
"""Part of the time to measure for that goes to whole steps."""

_NO_DURATION_TELLS = {
    "cache_bytes": "assumed; durations depend on it together with the bandwidths of cache and memory",
    "context_bytes": "memory, not time",
    "allocator_slack": "memory, not time",
    "allocation_granularity": "memory, not time",
}


def calibrated(
    topology: Topology,
    node: str,
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    on_share: Callable[[float], None] = lambda _: None,
) -> tuple[Profile, FitReport]:
    """Measure a device of this machine, and return what its operations cost, and how well that explains them.

    Parameters
    ----------
    topology : Topology
        This machine.
    node : str
        That `device` is.
    device : str
        ``"cpu"`` or a CUDA device.
    num_threads : int, optional
        Threads of a CPU's kernels; all its cores if not given.
    budget_s : float
        Seconds to measure for. Building what is measured, and the least that is, take some twenty more.
    on_share : callable
        Told the share of the work that is done.

    Raises
    ------
    RunError
        If the device is not there.

    Notes
    -----
    Single operations say what the constants are. Whole steps of small models, of none of whose times a constant
    was fitted but the time between steps, say how wide intervals have to be.
    """
    base = datasheet_profile(topology, node, num_threads=num_threads)
    # A GPU's profile has one thread; those of its host are as torch has them.
    threads = base.num_threads if device == "cpu" else num_threads
    measurements = calibrate(
        device=device,
        num_threads=threads,
        budget_s=(1 - _STEPS_SHARE) * budget_s,
        on_round=lambda share: on_share((1 - _STEPS_SHARE) * share),
    )
    profile, fit = fit_profile(measurements, base)
    profile, unknown = with_copy_cores(profile, measurements)
    with threads_set(threads or torch.get_num_threads()):
        steps = measure_steps(
            topology,
            node,
            device=device,
            budget_s=_STEPS_SHARE * budget_s,
            on_share=lambda share: on_share(1 - _STEPS_SHARE * (1 - share)),
        )
    profile = with_interval_scale(with_step_overhead(profile, steps), topology, node, steps)
    reasons = {**fit.unidentified, **_NO_DURATION_TELLS} | ({"copy_cores": unknown} if unknown else {})
    found = ("step_s",) if unknown else ("step_s", "copy_cores")
    machine = Machine.from_topology(topology, node, profile)
    residuals = (Residual(s.name, s.seconds, simulate(s.program, machine).step_time_s) for s in steps)
    identified = (*fit.identified, *found)
    return profile, replace(fit, identified=identified, unidentified=reasons, steps=tuple(residuals))
