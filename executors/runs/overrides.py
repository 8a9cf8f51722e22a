"""From the options of ``zosim run`` to its settings.

A value that is stated decides; else what an interrupted run recorded, if it is resumed; else the plan; else a default.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from costmodel.model_spec import ModelSpec
from executors.datasets.batches import Batches
from executors.models.packing import facts_of
from executors.ranks.rank_info import RankInfo, is_launched
from executors.runs.inputs import longest_line, open_data
from executors.runs.learning_rate import LearningRate
from executors.runs.planning import Asked, plan_for, planned_device, refuse_absent, refuse_too_large, spec_for
from executors.runs.programs import recorded_programs
from executors.runs.runlog import HEADER_NAME, read_header
from executors.runs.settings import RUN_SECTIONS, DataSettings, RunSettings, evaluation_in
from topology.errors import PlanError, RunError
from topology.limits import whole_number
from zosim.adapters import adapters_of, tuned_by
from zosim.planning.visibility import about_epsilon
from zosim.plans import Plan, fields_of
from zosim.plans.forward import USUAL_NEW_TOKENS
from zosim.program_set import ProgramSet
from zosim.stated import Stated
from zosim.validate_set import validate_set

_NUM_COUNTED = 4
"""Batches whose tokens are counted for predictions."""

Recorded = Mapping[str, Any]
"""The header of a run, or a part of it."""


def settings_from(
    asked: Asked, *, plan_file: Path | None = None, program_file: Path | None = None
) -> tuple[RunSettings, list[str]]:
    """Return the settings of a run, and warnings about its smoothing radius and this machine.

    Parameters
    ----------
    asked : Asked
        What the options stated, of the plan and of the run.
    plan_file, program_file : path, optional
        Of a plan that is carried out, and of a program in place of the plan's own.

    Raises
    ------
    ZosimError
        If something is missing, contradicts itself or does not fit.
    """
    stated = asked.stated
    out = _required(stated.get("run", {}).get("out"), "a directory to write to", "--out DIR")
    is_resumed = stated.get("run", {}).get("resume", False)
    header = read_header(out) if is_resumed and os.path.lexists(Path(out) / HEADER_NAME) else {}
    _refuse_unnamed_code(header.get("run") or {}, stated.get("run", {}), out)
    fields = _laid_over(_recorded_fields(header), stated)
    run = fields["run"]
    if is_resumed and not header and "model" not in run:
        raise RunError(
            f"{out} holds no run to go on with", hint="look for another --out, or begin one with --model DIR"
        )
    model = _required(run.get("model"), "a model", "--model DIR")
    _required(fields["data"].get("path"), "data", "--data FILE (JSON lines)")
    lora, prefix = adapters_of(fields["adapters"], header.get("run"), seed=run.get("seed", 0))
    base = _base_plan(plan_file, header)
    ranks = _num_ranks(asked, base, has_plan=plan_file is not None)
    if header:
        run.setdefault("num_threads", header["num_threads"])
    if "device" not in run:
        run["device"] = _device(header, base, out, has_plan=plan_file is not None)
    asked = replace(
        asked,
        ranks=ranks,
        device=run["device"],
        num_threads=run.get("num_threads") or default_threads(ranks or 1),
        stated=_with_implied_residency(asked, is_open=plan_file is None and not is_resumed),
    )
    if run.get("reward") is not None and (base is None or base.forward.num_new_tokens is None):
        asked = replace(asked, stated=_with_text(asked.stated))
    loading = {name: run.get(name, False) for name in ("allow_download", "random_weights")}
    spec = spec_for(model, tuned_by(run.get("tuned", "all"), lora, prefix), asked, base, **loading)
    if plan_file is not None and base is not None:
        _refuse_other_tuned(base, spec, is_stated="tuned" in stated.get("run", {}) or bool(lora or prefix))
    data, evaluation = DataSettings(**fields["data"]), evaluation_in(fields["evaluation"])
    plan = plan_for(asked, spec, base, lambda: longest_line(model, spec, data, evaluation))
    _required(fields["learning_rate"].get("num_steps"), "a number of steps", "--steps N")
    program = _program_by_hand(program_file) or _recorded_program(out, header, plan)
    run.setdefault("num_threads", default_threads(max(map(len, plan.placement.ranks_by_host))))
    run.setdefault("checksums", asked.device == "cpu")
    run.setdefault("accumulate", _num_micro_batches(header, plan))
    settings = RunSettings(
        **run,
        plan=plan,
        data=data,
        learning_rate=LearningRate(**fields["learning_rate"]),
        program=program,
        lora=lora,
        prefix=prefix,
        evaluation=evaluation,
    )
    settings = _with_facts(settings)
    on_cpu = settings.device == "cpu"
    large = refuse_too_large(plan, program, on_cpu=on_cpu, random_weights=settings.random_weights)
    return settings, [*about_epsilon(plan), *large]


def _with_facts(settings: RunSettings) -> RunSettings:
    """Return settings whose plan, where batches are packed and nothing is said of them, has what the first of them hold."""
    plan = settings.plan
    if not plan.points_are_adapters or plan.forward.has_facts:
        return settings
    data = open_data(settings, settings.data)
    batches = Batches(data, plan.batch, shuffle=settings.data.shuffle, seed=settings.seed)
    first = range(min(_NUM_COUNTED, settings.learning_rate.num_steps))
    facts = facts_of(asdict(batches.batch(number)) for number in first)
    forward = plan.forward.model_copy(update=facts)
    return replace(settings, plan=plan.model_copy(update={"forward": forward}))


def default_threads(num_ranks: int = 1) -> int:
    """Return ``$OMP_NUM_THREADS``, or the physical cores that each of a host's ranks may use."""
    if wanted := whole_number(os.environ.get("OMP_NUM_THREADS", "")):
        return wanted
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed) // num_ranks)


def _recorded_fields(header: Recorded) -> Stated:
    """Return what a resumed run takes over from its record, by section: what changes its numbers, and its data."""
    run = header.get("run", {})
    own = {**header, **run}
    # How weights are written is no number of the run, but whoever goes on with it wants it still.
    names = [
        field.name
        for field in fields_of(RunSettings).values()
        if field.setting.changes != "speed" or field.name == "save_as"
    ]
    return {
        "run": {name: own[name] for name in names if name in own and name != "accumulate"},
        "data": dict(run.get("data", {})),
        "learning_rate": dict(run.get("schedule", {})),
        "evaluation": dict(run.get("evaluation") or {}),
    }


def _refuse_unnamed_code(recorded: Recorded, stated: Mapping[str, Any], out: str) -> None:
    """Refuse code to run, or an address to ask, that a record names and no option does: the record may be a stranger's."""
    for name, what in (("objective", "code to import"), ("reward", "code to import, or an address to ask")):
        value = recorded.get(name)
        if value is not None and ":" in value and name not in stated:
            raise RunError(
                f"the record of {out} names {what}: {name}={value!r}, and this command does not",
                hint=f"where you trust it, name it again: --{name} {shlex.quote(value)}",
            )


def _laid_over(recorded: Stated, stated: Stated) -> Stated:
    """Return the fields of every section of a run: those that are stated in place of those that were recorded."""
    return {name: {**recorded.get(name, {}), **stated.get(name, {})} for name in RUN_SECTIONS}


def _required(value: Any, what: str, option: str) -> Any:
    if value is None:
        raise RunError(f"a run needs {what}", hint=f"add {option}")
    return value


def _base_plan(path: Path | None, header: Recorded) -> Plan | None:
    if path is not None:
        return Plan.load(path)
    return Plan.model_validate(header["plan"]) if header else None


def _device(header: Recorded, base: Plan | None, out: str, *, has_plan: bool) -> str:
    """Return the device of a run for which no option names one: that of its plan, or on which it was begun; else the CPU.

    Raises
    ------
    PlanError
        If torch finds no such device. Who prints the lines that start ranks of several hosts needs none.
    """
    if base is None:
        return "cpu"
    placement = base.placement
    if has_plan:
        device, why = planned_device(base), f"the plan is for {placement.devices[0]} of {placement.topology}"
    else:
        recorded = str(header.get("device", "cpu"))
        kind, _, number = recorded.partition(":")
        # Each of several ranks takes the device of its own number.
        device = recorded if number not in ("", "0") and placement.world_size == 1 else kind
        why = f"{out} was run on {recorded}"
    if len(placement.ranks_by_host) == 1 or is_launched():
        refuse_absent(device, why)
    return device


def _program_by_hand(path: Path | None) -> ProgramSet | None:
    """Return the program of a file, which need not be one that a plan is lowered to."""
    if path is None:
        return None
    programs = ProgramSet.load(path)
    validate_set(programs)
    return programs


def _recorded_program(out: str, header: Recorded, plan: Plan) -> ProgramSet | None:
    """Return the program that a resumed run was given by hand, as long as its plan stays."""
    edited = header.get("run", {}).get("edited_program", False)
    return recorded_programs(out, header) if edited and Plan.model_validate(header["plan"]) == plan else None


def _num_ranks(asked: Asked, base: Plan | None, *, has_plan: bool) -> int | None:
    """Return how many ranks the options ask for, or else those of this host that a launcher has started."""
    if asked.ranks is not None or has_plan or asked.mesh is not None or asked.cuts:
        return asked.ranks
    there = RankInfo.here().world_size
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == str(there)
    known = 1 if base is None else base.placement.world_size
    return there if is_launched() and is_one_host and there != known else None


def _with_implied_residency(asked: Asked, *, is_open: bool) -> Stated:
    """Return what is stated, blocks offloaded if ranks are to share copies of them, and nothing else places them."""
    residency = asked.stated.get("residency", {})
    shares = residency.get("transfers") in ("shared", "sliced")
    if not (shares and is_open and asked.placing is None and "blocks" not in residency):
        return asked.stated
    return {**asked.stated, "residency": {**residency, "blocks": "offloaded"}}


def _with_text(stated: Stated) -> Stated:
    """Return what is stated, with as many new tokens as is usual for a reward, where none are."""
    return {**stated, "forward": {"num_new_tokens": USUAL_NEW_TOKENS, **stated.get("forward", {})}}


def _num_micro_batches(header: Recorded, plan: Plan) -> int:
    """Return the micro-batches of a step: of a run that is gone on with, as make up the parts of a batch that it had.

    Shards of a batch are such parts, too: a rank alone forwards those of two ranks one after the other, to the same
    losses. Where equal parts cannot be made, what was recorded stays.
    """
    recorded: int = header.get("run", {}).get("accumulate", 1)
    if not header:
        return recorded
    num_parts, num_shards = (
        recorded * Plan.model_validate(header["plan"]).num_batch_shards,
        plan.num_batch_shards,
    )
    is_even = num_parts % num_shards == 0 and plan.batch % num_parts == 0
    return num_parts // num_shards if is_even else recorded


def _refuse_other_tuned(base: Plan, spec: ModelSpec, *, is_stated: bool) -> None:
    """Refuse a plan for a part of a model, or for what lies beside it, where no option says what is tuned."""
    if not is_stated and base.model.num_trainable < base.model.num_parameters:
        raise PlanError(
            f"the plan is for {base.model.describe()}, and this run would tune all of {spec.name}",
            hint="say what the plan was made with: --lora-rank and --lora-targets, --prefix, or --tune",
        )
