"""From the options of ``zosim run`` to its settings.

An option that is given decides; else what an interrupted run recorded, if it is resumed; else the plan; else a
default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from costmodel.configs import LoRA, Prefix
from executors.datasets.prompts import parse_label_words
from executors.ranks.rank_info import RankInfo, is_launched
from executors.runs.planning import Asked, longest_example, plan_for, refuse_too_large, spec_for
from executors.runs.programs import recorded_programs
from executors.runs.runlog import HEADER_NAME, read_header
from executors.runs.schedule import Schedule
from executors.runs.settings import DataSettings, EvaluationSettings, RunSettings
from topology.errors import PlanError, RunError
from topology.validation import readable
from zosim.options import formats_of, memory_limit
from zosim.planning.visibility import about_epsilon
from zosim.plans import Plan
from zosim.program_set import ProgramSet
from zosim.validate_set import validate_set

Given = Mapping[str, Any]
"""Options by parameter name, None where they were left out."""

DEFAULT_LEARNING_RATE = 1e-6
_DIGEST_EVERY = 100
_MAX_NEW_TOKENS = 32


def settings_from(given: Given) -> tuple[RunSettings, list[str]]:
    """Return the settings of a run, and warnings about its smoothing radius and this machine.

    Raises
    ------
    ZosimError
        If something is missing, contradicts itself or does not fit.
    """
    out = given["out"]
    if out is None:
        raise RunError("a run needs a directory to write to", hint="add --out DIR")
    recorded = _recorded(Path(out)) if given["resume"] else {}
    header, run = recorded, recorded.get("run", {})
    if given["resume"] and not recorded and not given["model"]:
        raise RunError(
            f"{out} holds no run to go on with", hint="look for another --out, or begin one with --model DIR"
        )
    model = _required(given["model"] or run.get("model"), "a model", "--model DIR")
    lora, prefix = _lora(given, header), _prefix(given, header)
    base = _base_plan(given, header)
    loading = {
        "allow_download": given["allow_download"],
        "random_weights": _or(given, run, "random_weights", False),
    }
    data = _data(given, run)
    ranks = _num_ranks(given, base)
    num_threads = given["threads"] or default_threads(ranks or 1)
    asked = _asked(given, num_threads, ranks)
    spec = spec_for(model, lora or prefix, asked, base, **loading)
    plan = plan_for(asked, spec, base, longest_example(data.path))
    program = _program_by_hand(given["program"]) or _recorded_program(out, header, plan)
    num_threads = given["threads"] or default_threads(max(map(len, plan.placement.ranks_by_host)))
    settings = RunSettings(
        model=model,
        plan=plan,
        data=data,
        schedule=_schedule(given, run),
        out=str(out),
        program=program,
        seed=_or(given, header, "seed", 0),
        weight_decay=_or(given, header, "weight_decay", 0.0),
        loss_dtype=_or(given, header, "loss_dtype", "model"),
        objective=_or(given, run, "objective", "loss"),
        accumulate=given["accumulate"] or _num_micro_batches(header, plan),
        device=given["device"],
        num_threads=num_threads,
        lora=lora,
        prefix=prefix,
        evaluation=_evaluation(given, run.get("evaluation") or {}),
        digest_every=_or(given, run, "digest_every", _DIGEST_EVERY),
        checkpoint_every=_or(given, run, "checkpoint_every", 0),
        checksums=given["device"] == "cpu" if given["checksums"] is None else given["checksums"],
        resume=given["resume"],
        early_stop=given["early_stop"],
        tensorboard=given["tensorboard"],
        timeout_s=given["timeout"],
        **loading,
    )
    large = refuse_too_large(plan, program, random_weights=settings.random_weights)
    return settings, [*about_epsilon(plan), *large]


def default_threads(num_ranks: int = 1) -> int:
    """Return ``$OMP_NUM_THREADS``, or the physical cores that each of a host's ranks may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed) // num_ranks)


def _recorded(out: Path) -> dict[str, Any]:
    return read_header(out) if (out / HEADER_NAME).exists() else {}


def _or(given: Given, recorded: Given, name: str, default: Any) -> Any:
    """Return an option, else what was recorded under its name, else a default."""
    value = given[name]
    return value if value is not None else recorded.get(name, default)


def _required(value: str | None, what: str, option: str) -> str:
    if value is None:
        raise RunError(f"a run needs {what}", hint=f"add {option}")
    return value


def _base_plan(given: Given, header: Given) -> Plan | None:
    if given["plan"] is not None:
        return Plan.load(given["plan"])
    return Plan.model_validate(header["plan"]) if header else None


def _program_by_hand(path: Path | None) -> ProgramSet | None:
    """Return the program of a file, which need not be one that a plan is lowered to."""
    if path is None:
        return None
    programs = ProgramSet.load(path)
    validate_set(programs)
    return programs


def _recorded_program(out: str, header: Given, plan: Plan) -> ProgramSet | None:
    """Return the program that a resumed run was given by hand, as long as its plan stays."""
    edited = header.get("run", {}).get("edited_program", False)
    return recorded_programs(out, header) if edited and Plan.model_validate(header["plan"]) == plan else None


def _num_ranks(given: Given, base: Plan | None) -> int | None:
    """Return how many ranks the options ask for, or else those of this host that a launcher has started."""
    if given["ranks"] is not None or given["plan"] is not None or given["mesh"] is not None or given["cut"]:
        ranks: int | None = given["ranks"]
        return ranks
    there = RankInfo.here().world_size
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == str(there)
    known = 1 if base is None else base.placement.world_size
    return there if is_launched() and is_one_host and there != known else None


def _asked(given: Given, num_threads: int, ranks: int | None) -> Asked:
    return Asked(
        method=given["method"],
        residency=given["residency"] or _implied_residency(given),
        batch=given["batch"],
        seq=given["seq"],
        device=given["device"],
        num_threads=num_threads,
        allow_lossy=given["allow_lossy"],
        max_device_bytes=memory_limit("--max-device-memory", given["max_device_memory"]),
        mesh=given["mesh"],
        ranks=ranks,
        cuts=tuple(cut.strip() for cut in (given["cut"] or "").split(",") if cut.strip()),
        axes=_axes(given),
    )


def _axes(given: Given) -> dict[str, dict[str, Any]]:
    """Return the fields that were given, by axis."""
    formats = formats_of(given["dtype"], given["compute_dtype"], given["transfer_dtype"])
    named = {
        "split": {"codec": given["codec"], "residual_codec": given["residual_codec"]},
        "estimator": {
            "difference": given["difference"],
            "num_queries": given["queries"],
            "epsilon": given["eps"],
        },
        "directions": {
            "rng": given["rng"],
            "order": given["order"],
            "distribution": given["direction"],
            "drawn_ahead": given["draw_ahead"],
            "kept": given["keep_directions"],
        },
        "weights": {"perturbation": given["weights"]},
        "residency": {
            "num_slots": given["slots"],
            "transfers": given["transfers"],
            "share_group": given["share_group"],
        },
        "schedule": {"traversal": given["traversal"], "update": given["update"]},
        "forward": {"attention": given["attention"], "loss_chunk_tokens": given["loss_chunk_tokens"]},
    }
    return {
        axis: {name: value for name, value in fields.items() if value is not None} | formats.get(axis, {})
        for axis, fields in named.items()
    }


def _implied_residency(given: Given) -> str | None:
    """Return where blocks reside if ranks are to share copies of them, and nothing else places them."""
    shares = given["transfers"] in ("shared", "sliced")
    is_open = (
        given["plan"] is None
        and given["method"] in (None, "pertp", "ddp", "2d", "sparq")
        and not given["resume"]
    )
    return "offloaded" if shares and is_open else None


def _data(given: Given, run: Given) -> DataSettings:
    known = run.get("data", {})
    path = _required(given["data"] or known.get("path"), "data", "--data FILE (JSON lines)")
    words = given["label_words"]
    shuffle = given["shuffle"]
    return DataSettings(
        path=path,
        template=_or(given, known, "template", None),
        label_words=parse_label_words(words) if words else known.get("label_words"),
        truncate=_or(given, known, "truncate", False),
        shuffle=known.get("shuffle", True) if shuffle is None else shuffle == "on",
    )


def _schedule(given: Given, run: Given) -> Schedule:
    known = run.get("schedule", {})
    steps = given["steps"] or known.get("num_steps")
    if steps is None:
        raise RunError("a run needs a number of steps", hint="add --steps N")
    rate, kind, warmup = given["lr"], given["lr_schedule"], given["warmup"]
    return Schedule(
        kind=kind or known.get("kind", "constant"),
        learning_rate=known.get("learning_rate", DEFAULT_LEARNING_RATE) if rate is None else rate,
        num_steps=steps,
        warmup_steps=known.get("warmup_steps", 0) if warmup is None else warmup,
    )


def _num_micro_batches(header: Given, plan: Plan) -> int:
    """Return the micro-batches of a step: of a run that is gone on with, as make up the parts of a batch that it had.

    Shards of a batch are such parts, too: a rank alone forwards those of two ranks one after the other, to the same
    losses. Where equal parts cannot be made, what was recorded stays.
    """
    recorded: int = header.get("run", {}).get("accumulate", 1)
    if not header:
        return recorded
    num_parts, num_shards = recorded * Plan.model_validate(header["plan"]).mesh.data, plan.mesh.data
    is_even = num_parts % num_shards == 0 and plan.batch % num_parts == 0
    return num_parts // num_shards if is_even else recorded


def _lora(given: Given, header: Given) -> LoRA | None:
    rank, targets, alpha = given["lora_rank"], given["lora_targets"], given["lora_alpha"]
    known = header.get("run", {}).get("lora")
    recorded = LoRA.model_validate(known) if known else None
    if rank is None and targets is None and recorded is None and alpha is None:
        return None
    if recorded is None and (rank is None or targets is None):
        raise PlanError(
            "adapters need a rank and the linears that they stand beside",
            hint="such as --lora-rank 8 --lora-targets q_proj,v_proj",
        )
    known = {"seed": _or(given, header, "seed", 0)} if recorded is None else recorded.model_dump()
    names = None if targets is None else tuple(name.strip() for name in targets.split(",") if name.strip())
    asked = {"rank": rank, "target_modules": names, "alpha": alpha}
    with readable("the adapters", PlanError):
        return LoRA.model_validate(
            known | {name: value for name, value in asked.items() if value is not None}
        )


def _prefix(given: Given, header: Given) -> Prefix | None:
    known = header.get("run", {}).get("prefix")
    recorded = Prefix.model_validate(known) if known else None
    if given["prefix"] is None:
        return recorded
    seed = recorded.seed if recorded else _or(given, header, "seed", 0)
    return Prefix(num_tokens=given["prefix"], seed=seed)


def _evaluation(given: Given, known: Given) -> EvaluationSettings | None:
    path = given["eval_data"] or known.get("path")
    if path is None:
        if given["eval_every"] or given["keep_best"]:
            raise RunError("there is nothing to evaluate on", hint="add --eval-data FILE")
        return None
    return EvaluationSettings(
        path=path,
        every=given["eval_every"] if given["eval_every"] is not None else known.get("every", 0),
        num_examples=given["eval_examples"] or known.get("num_examples"),
        keep_best=_or(given, known, "keep_best", False),
        task=given["eval_task"] or known.get("task", "auto"),
        max_new_tokens=given["eval_max_new_tokens"] or known.get("max_new_tokens", _MAX_NEW_TOKENS),
    )
