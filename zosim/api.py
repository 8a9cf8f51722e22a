"""What a notebook calls: plan, simulate and compare, each the whole of the command of its name but for what it prints.

Examples
--------
>>> import zosim
>>> decision = zosim.plan(
...     "opt-125m", "a100-80gb-milan", batch=1, seq=128, max_device_memory="2GiB", dtype="float16"
... )
>>> decision.plan.method
'mezo'
>>> by_simpy = zosim.simulate(decision, simulator="simpy").step_time_s
>>> abs(by_simpy / decision.prediction.step_time_s - 1) < 1e-9
True
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from topology.errors import PlanError, TimelineError, ZosimError
from topology.reading import read_json_object, refuse_irregular
from topology.validation import readable
from zosim.adapters import AdapterSettings, adapters_of, tuned_by
from zosim.config import HOST, PlanConfig, merge
from zosim.options import (
    CompareDetails,
    Densities,
    DeviceName,
    Hardware,
    HardwareName,
    ModelName,
    OneProcess,
    PathOrText,
    Profile,
    Programs,
    RankToCompare,
    SimulatorName,
    Threads,
    config_of,
    takes_earlier_names,
)
from zosim.plans import Plan, Section

if TYPE_CHECKING:
    from zosim.analysis.compare import Comparison
    from zosim.planning.differences import Differences
    from zosim.planning.planner import Decision
    from zosim.planning.predict import PlannedRun
    from zosim.planning.views import PlanComparison
    from zosim.timeline import Timeline

# Each function imports what it works with: a command's help page, which takes its options from here, needs none of it.


class PlanOptions(Section):
    """What `zosim plan` has options for: a plan, and what is tuned of the model or beside it."""

    plan: PlanConfig = PlanConfig()
    adapters: AdapterSettings = AdapterSettings()


@takes_earlier_names(PlanOptions)
def plan(
    model: ModelName,
    hardware: HardwareName = HOST,
    *,
    densities: Densities = None,
    device: DeviceName = None,
    threads: Threads = None,
    profile: Profile = None,
    **settings: Any,
) -> Decision:
    """Choose the fastest plan that fits the hardware, and explain the choice.

    Parameters
    ----------
    model : str
        A shipped size such as ``"opt-13b"``, a model directory, a config.json, or a saved ModelSpec.
    hardware : str
        A preset's name, a topology file, or ``"host"``.
    densities : path, optional
        Measured densities of the split points, from `zosim probe --json`.
    device : str, optional
        Node of the topology; by default its fastest GPU.
    threads : int, optional
        Number of threads of a CPU's kernels; by default all cores, divided among the ranks.
    profile : path, optional
        Calibrated rates to predict with, from `zosim calibrate -o`.
    **settings
        Any option of `zosim plan` by its name: ``batch=4``, ``seq=2048``, ``method="zo2"``, ``ranks=2``,
        ``max_device_memory="20GiB"``, ``dtype="bfloat16"``, ``staging_buffers=2``, ``mesh="data=2,perturb=2"``, ``lora_rank=8`` and so on.
        Without ``dtype`` the weights have the checkpoint's format (:func:`costmodel.formats.default_dtype`).

    Raises
    ------
    ZosimError
        If something is unknown, contradicts something else, or nothing fits.

    Examples
    --------
    >>> decision = plan("opt-125m", "a100-80gb-milan", batch=1, seq=128, dtype="float16")
    >>> decision.plan.method
    'mezo'
    """
    from topology.hardware import resolve as topology_named
    from zosim.planning.request import Hardware as PlannedHardware
    from zosim.planning.resolve import resolve
    from zosim.planning.split_options import model_spec, split_options_of

    options = config_of(PlanOptions, settings)
    tuned = tuned_by(options.adapters.tuned, *adapters_of(options.adapters))
    topology = topology_named(hardware)
    machine = PlannedHardware.of(topology, hardware, device=device, profile=profile, num_threads=threads)
    config = merge(PlanConfig(model=model_spec(model, tuned)), options.plan)
    measured = None if densities is None else Path(densities)
    split_options = split_options_of(model, config.split, densities=measured, tuned=tuned)
    decisions: list[Decision] = []
    resolve(config, machine, split_options, on_decision=decisions.append)
    return decisions[0]


@takes_earlier_names()
def simulate(
    plan: Plan | Decision | str | Path,
    hardware: Hardware = None,
    *,
    profile: Profile = None,
    threads: Threads = None,
    program: Programs = None,
    one_process: OneProcess = False,
    simulator: SimulatorName = "lockstep",
) -> PlannedRun:
    """Predict a plan's step time and memory with a discrete-event simulation.

    Parameters
    ----------
    plan : Plan, Decision or path
        Plan, or a file of `zosim plan -o`.
    hardware : str, optional
        A preset's name, a topology file, or ``"host"``; by default what the plan was made for.
    profile : path, optional
        Calibrated rates to predict with.
    threads : int, optional
        Number of threads of a CPU's kernels; by default all cores, divided among the ranks.
    program : path, optional
        Programs to use in place of what the plan is lowered to.
    one_process : bool
        Predict as if one process of each host drove all its GPUs.
    simulator : {"lockstep", "simpy"}
        Simulator: fast arrays, or the reference with a process per stream.

    Returns
    -------
    PlannedRun
        Its ``prediction`` has step time, memory and bottleneck, its ``timeline`` the spans.

    Raises
    ------
    ZosimError
        If the hardware has not the plan's devices, or a program breaks a rule.

    Examples
    --------
    >>> decision = plan("opt-125m", "a100-80gb-milan", batch=1, seq=128, dtype="float16")
    >>> f"{simulate(decision).step_time_s:.2f} s"
    '0.01 s'
    """
    from topology.hardware import resolve
    from zosim.hardware.profiles import Profiles
    from zosim.planning.predict import PlannedRun
    from zosim.program.program_set import ProgramSet

    if not isinstance(plan, Plan):
        plan = Plan.load(plan) if isinstance(plan, str | Path) else plan.plan
    name = hardware or plan.placement.topology
    topology = resolve(name)
    known = {node.id for node in topology.of_type("gpu", "cpu")}
    missing = [device for device in plan.placement.devices if device not in known]
    if missing:
        devices = ", ".join(node.id for node in topology.compute_devices)
        raise PlanError(
            f"the plan runs on {missing[0]}, but {name} has no such device",
            hint=f"plan again for this hardware (its devices: {devices}), or give the hardware of the plan",
        )
    plan = plan.model_copy(update={"placement": plan.placement.model_copy(update={"topology": name})})
    profiles = Profiles(topology, path=profile, num_threads=threads, is_host=name == HOST)
    first = plan.placement.devices[0]
    rates = profiles.of(first, plan.placement.devices.count(first))
    edited = None if program is None else ProgramSet.load(program)
    planned = PlannedRun(plan, topology, rates, edited, profiles, one_process, simulator)
    # What is wrong with a program is said here, and not when somebody looks at a number.
    _ = planned.programs
    return planned


@takes_earlier_names()
def compare(
    run: str | Path,
    plan: Plan | PathOrText = None,
    *,
    hardware: Hardware = None,
    profile: Profile = None,
    threads: Threads = None,
    rank: RankToCompare = None,
    details: CompareDetails = False,
    second: Plan | PathOrText = None,
) -> Comparison | PlanComparison | Differences:
    """Hold a run against its prediction, instruction by instruction, or one plan's prediction against another's.

    Parameters
    ----------
    run : path
        Directory of the run, or a second plan's file.
    plan : Plan or path, optional
        By default the run's own: its plan.json, or what its run.json says of it.
    hardware, profile, threads
        As for :func:`simulate`.
    rank : int, optional
        Rank to look at; by default the last to end its steps.
    details : bool
        Whether to compare bytes over links, memory of every rank, and instructions, too.
    second : Plan or path, optional
        A second plan to hold against the run, with `details`.

    Raises
    ------
    ZosimError
        If there is no such run, or it has no such rank.

    Examples
    --------
    >>> compare("runs/first").step_error  # doctest: +SKIP
    0.07
    """
    from zosim.analysis.compare import slowest_rank
    from zosim.planning.differences import ComparedSide, Differences
    from zosim.timeline import Timeline

    directory = Path(run)
    where: dict[str, Any] = {"hardware": hardware, "profile": profile, "threads": threads}
    if plan is not None and directory.is_file():
        if rank is not None:
            raise PlanError("--rank applies to a run, but two plans are compared", hint="leave --rank out")
        from zosim.planning.views import PlanComparison

        if second is not None:
            raise PlanError(f"{directory} is a plan, but the third must be a run", hint="name the run last")
        first, other = simulate(plan, **where), simulate(directory, **where)
        if details:
            return Differences((ComparedSide("predicted A", first), ComparedSide("predicted B", other)))
        return PlanComparison(first, other)
    if not directory.is_dir():
        raise TimelineError(
            f"{directory} is not the directory of a run"
            if directory.exists()
            else f"{directory} does not exist",
            hint="`zosim run --out DIR` writes one; to compare two plans, name both files",
        )
    refuse_irregular_run(directory, TimelineError)
    ran = planned_run_of(directory, None if second is not None else plan, **where)
    measured = Timeline.load(directory / "timeline.json")
    chosen = slowest_rank(measured) if rank is None else rank
    if chosen not in measured.ranks:
        ranks = ", ".join(map(str, measured.ranks))
        raise TimelineError(f"the run has no rank {chosen}", hint=f"its ranks: {ranks}")
    if second is not None:
        first = ran if plan is None else simulate(plan, **where)
        plans = ComparedSide("predicted A", first), ComparedSide("predicted B", simulate(second, **where))
        return Differences((*plans, ComparedSide("measured", ran, measured, chosen)))
    if details:
        return Differences(
            (ComparedSide("predicted", ran, rank=chosen), ComparedSide("measured", ran, measured, chosen))
        )
    return compared(ran, measured, chosen)


def planned_run_of(directory: Path, plan: Plan | PathOrText = None, **where: Any) -> PlannedRun:
    """Return what a run was planned to do: its own plan, or the one given, and the programs that it ran.

    Raises ZosimError as of :func:`simulate`, which has the same keywords.
    """
    ran = directory / "program.json"
    return simulate(
        plan_of_run(directory) if plan is None else plan, program=ran if ran.exists() else None, **where
    )


def compared(planned: PlannedRun, measured: Timeline, rank: int) -> Comparison:
    """Return a rank's measured timeline held against its prediction."""
    from zosim.analysis.compare import compare as compare_timelines

    return compare_timelines(
        planned.timeline_of(rank),
        measured,
        planned.programs.program_of(rank),
        rank,
        planned.at_slowdown_of(measured),
        planned.plan.tokens_per_step,
        is_calibrated=planned.profile.origin == "calibrated",
    )


def refuse_irregular_run(directory: Path, error: type[ZosimError]) -> None:
    """Raise if what is read of a run, whose directory may be untrusted, is no regular file.

    Raises ZosimError of type `error`.
    """
    names = ("plan.json", "run.json", "program.json", "timeline.json", "steps.jsonl", "metrics.jsonl")
    refuse_irregular((directory / name for name in names), error)


def plan_of_run(directory: Path) -> Plan:
    """Return the plan beside a run or, where there is none, the one that its header holds.

    Raises TimelineError if there is neither.
    """
    file, header = directory / "plan.json", directory / "run.json"
    if file.exists():
        return Plan.load(file)
    if not header.is_file():
        raise TimelineError(
            f"the run {directory} has no plan: {file} and {header} are missing",
            hint=f"give the plan of the run: zosim compare PLAN {directory}",
        )
    fields = read_json_object(header, "run's header", TimelineError).get("plan")
    with readable(f"the plan in {header}", TimelineError, model=Plan):
        return Plan.model_validate(fields)
