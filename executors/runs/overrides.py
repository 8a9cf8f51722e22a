"""From the options of ``zosim run`` to its settings.

A value that is stated decides; else what an interrupted run recorded, if it is resumed; else the plan; else a default.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from costmodel.models.model_spec import ModelSpec
from executors.datasets.batches import Batches
from executors.models.packing import facts_of
from executors.ranks.rank_info import RankInfo, is_launched
from executors.runs.inputs import longest_line, open_data
from executors.runs.planning import plan_for, planned_device, refuse_absent, refuse_too_large, spec_for
from executors.runs.programs import recorded_programs
from executors.runs.runlog import HEADER_NAME, read_header
from executors.runs.settings import (
    RunConfig,
    RunOptions,
    RunSettings,
    evaluation_in,
    recorded_config,
)
from topology.errors import PlanError, RunError, ZosimError
from topology.limits import whole_number
from zosim.adapters import adapters_of, tuned_by
from zosim.config import PlanConfig, Search, merge
from zosim.planning.visibility import about_epsilon
from zosim.plans import ForwardPass, Plan
from zosim.plans.forward import USUAL_NEW_TOKENS
from zosim.program.program_set import ProgramSet
from zosim.program.validate_set import validate_set

_NUM_COUNTED = 4
"""Batches whose tokens are counted for predictions."""

Recorded = Mapping[str, Any]
"""The header of a run, or a part of it."""


def settings_from(
    options: RunConfig, *, plan_file: Path | None = None, program_file: Path | None = None
) -> tuple[RunSettings, list[str]]:
    """Return the settings of a run, and warnings about its smoothing radius and this machine.

    `plan_file`, `program_file`: of a plan that is carried out, and of a program in place of the plan's own.

    Raises ZosimError if something is missing, contradicts itself or does not fit.
    """
    out, is_resumed = _required(options.run.out, "a directory to write to", "--out DIR"), options.run.resume
    header = read_header(out) if is_resumed and os.path.lexists(Path(out) / HEADER_NAME) else {}
    _refuse_unnamed_code(header.get("run") or {}, options.run, out)
    config = merge(recorded_config(header), options)
    run, data = config.run, config.data
    if is_resumed and not header and not run.model:
        raise RunError(
            f"{out} holds no run to resume", hint="give another --out, or start a run with --model DIR"
        )
    model = _required(run.model, "a model", "--model DIR")
    _required(data.path, "data", "--data FILE (JSON lines)")
    lora, prefix = adapters_of(config.adapters, header.get("run"), seed=run.seed)
    tuned = tuned_by(config.adapters.tuned, lora, prefix)
    base = Plan.model_validate(header["plan"]) if header else None
    if plan_file is not None:
        base = Plan.load(plan_file)
    ranks = _num_ranks(options.plan, base, has_plan=plan_file is not None)
    device = run.given("device") or _device(header, base, out, has_plan=plan_file is not None)
    loading = {"allow_download": run.allow_download, "random_weights": run.random_weights}

    @cache
    def split_model(blocks: tuple[int, ...]) -> ModelSpec:
        try:
            return spec_for(model, tuned, blocks, **loading)
        except ZosimError:
            if not header or options.run.model or Path(model).exists():
                raise
            raise RunError(
                f"the base weights of {out} are not there: it records {model!r}",
                hint=f"name where they are now with --model; a relative path starts in {Path.cwd()}",
            ) from None

    is_requested = options.adapters.given("tuned") is not None or lora or prefix
    is_of_part = base is not None and base.model.num_trainable < base.model.num_parameters
    if plan_file is not None and base is not None and is_of_part and not is_requested:
        raise PlanError(
            f"the plan is for {base.model.describe()}, but this run would tune all of {split_model(()).name}",
            hint="repeat the options of the plan: --lora-rank and --lora-targets, --prefix, or --tune",
        )
    data, evaluation = data.complete(), evaluation_in(config.evaluation)
    plan_config = merge(config.plan, PlanConfig(search=Search(ranks=ranks))) if ranks else config.plan
    # A reward is of text: where nobody says how long, it is as long as usual.
    if run.reward is not None and (base is None or base.forward.num_new_tokens is None):
        plan_config = merge(PlanConfig(forward=ForwardPass(num_new_tokens=USUAL_NEW_TOKENS)), plan_config)
    num_threads = run.given("num_threads") or header.get("num_threads")
    plan = plan_for(
        plan_config,
        base,
        split_model,
        device=device,
        num_threads=num_threads or default_threads(ranks or 1),
        longest=lambda: longest_line(model, split_model(()), data, evaluation),
    )
    _required(config.learning_rate.given("num_steps"), "a number of steps", "--steps N")
    program = None
    if program_file is not None:
        program = ProgramSet.load(program_file)
        validate_set(program)
    elif header.get("run", {}).get("edited_program", False) and plan == Plan.model_validate(header["plan"]):
        # Another plan is lowered anew: what was edited by hand was the program of this one.
        program = recorded_programs(out, header)
    usual = RunOptions(
        device=device,
        num_threads=num_threads or default_threads(max(map(len, plan.placement.ranks_by_host))),
        checksums=device == "cpu",
        accumulate=_num_micro_batches(header, plan),
    )
    settings = RunSettings(
        plan,
        merge(usual, run).complete(),
        data,
        config.learning_rate.complete(),
        program=program,
        tuned=tuned,
        evaluation=evaluation,
    )
    settings = _with_facts(settings)
    random_weights = settings.run.random_weights
    large = refuse_too_large(plan, program, on_cpu=device == "cpu", random_weights=random_weights)
    return settings, [*about_epsilon(plan), *large]


def _with_facts(settings: RunSettings) -> RunSettings:
    """Return settings whose plan knows the lengths in the first batches, if batches are packed and the options do not say."""
    plan = settings.plan
    if not plan.perturbs_by_adapters or plan.forward.has_facts:
        return settings
    data = open_data(settings, settings.data)
    batches = Batches(data, plan.batch, shuffle=settings.data.shuffle, seed=settings.run.seed)
    first = range(min(_NUM_COUNTED, settings.learning_rate.num_steps))
    facts = facts_of(asdict(batches.batch(number)) for number in first)
    forward = plan.forward.model_copy(update=facts)
    return replace(settings, plan=plan.model_copy(update={"forward": forward}))


def default_threads(num_ranks: int = 1) -> int:
    """Return ``$OMP_NUM_THREADS``, or the physical cores that each of a host's ranks may use."""
    if wanted := whole_number(os.environ.get("OMP_NUM_THREADS", "")):
        return wanted
    # A container or taskset may leave this process fewer cores than the host has.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed) // num_ranks)


def _refuse_unnamed_code(recorded: Recorded, options: RunOptions, out: str) -> None:
    """Refuse code or an address that a record names and no option does: the record may be untrusted."""
    for name, what in (("objective", "code to import"), ("reward", "code to import, or an address to ask")):
        value = recorded.get(name)
        if value is not None and ":" in value and name not in options.model_fields_set:
            raise RunError(
                f"the run in {out} used {what} {name}={value!r}, which this command does not name",
                hint=f"if you trust it, name it again: --{name} {shlex.quote(value)}",
            )


def _required(value: Any, what: str, option: str) -> Any:
    if value in (None, ""):
        raise RunError(f"a run needs {what}", hint=f"add {option}")
    return value


def _device(header: Recorded, base: Plan | None, out: str, *, has_plan: bool) -> str:
    """Return the device of a run without ``--device``: its plan's, else the one it was begun on, else the CPU.

    Raises PlanError if torch finds no such device. Who prints the lines that start ranks of several hosts needs none.
    """
    if base is None:
        return "cpu"
    placement = base.placement
    if has_plan:
        device, why = planned_device(base), f"the plan is for {placement.devices[0]} of {placement.topology}"
    else:
        recorded = str(header.get("device", "cpu"))
        device_type, _, number = recorded.partition(":")
        # Each of several ranks takes the device of its own number.
        device = recorded if number not in ("", "0") and placement.world_size == 1 else device_type
        why = f"{out} was run on {recorded}"
    if len(placement.ranks_by_host) == 1 or is_launched():
        refuse_absent(device, why)
    return device


def _num_ranks(options: PlanConfig, base: Plan | None, *, has_plan: bool) -> int | None:
    """Return the number of ranks that the options ask for, else the number that a launcher started on this host."""
    if (
        options.search.ranks is not None
        or has_plan
        or "mesh" in options.model_fields_set
        or options.split.given("split_points")
    ):
        return options.search.ranks
    there = RankInfo.here().world_size
    # A launcher says how many ranks this host has; here all of them have to be.
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == str(there)
    known = 1 if base is None else base.placement.world_size
    return there if is_launched() and is_one_host and there != known else None


def _num_micro_batches(header: Recorded, plan: Plan) -> int:
    """Return the micro-batches of a step; in a resumed run they cut a batch into the same parts as before.

    Shards of a batch are such parts, too: a rank alone forwards those of two ranks one after the other, to the same
    losses. Where equal parts cannot be made, what was recorded stays.
    """
    recorded: int = header.get("run", {}).get("accumulate", 1)
    if not header:
        return recorded
    num_shards = plan.num_batch_shards
    num_parts = recorded * Plan.model_validate(header["plan"]).num_batch_shards
    is_even = num_parts % num_shards == 0 and plan.batch % num_parts == 0
    return num_parts // num_shards if is_even else recorded
