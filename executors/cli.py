"""``zosim run`` and ``replay``. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from executors.options import (
    AttentionName,
    DifferenceName,
    DirectionName,
    LossFormat,
    MethodName,
    OrderName,
    ResidencyName,
    RngName,
    ScheduleName,
    ShareGroupName,
    Switch,
    TaskName,
    TransfersName,
    TraversalName,
    UpdateName,
    WeightsName,
)
from executors.report import summary_view
from topology.errors import RunError
from zosim.console import emit, progress, stderr

_PLACEMENT = "Placement"
_ESTIMATOR = "Estimator and learning rate"
_DATA = "Model and data"
_PRECISION = "Precision"
_KEEPING = "Evaluation, checkpoints and logs"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def run(
    plan: Annotated[
        Path | None,
        typer.Argument(help="A plan from `zosim plan -o`; without it, one is made.", show_default=False),
    ] = None,
    out: Annotated[Path | None, _option(_KEEPING, "Directory of the run.")] = None,
    model: Annotated[str | None, _option(_DATA, "Directory (or cached name) of the base weights.")] = None,
    data: Annotated[str | None, _option(_DATA, "JSON lines: input_ids and labels, or text fields.")] = None,
    steps: Annotated[int | None, _option(_ESTIMATOR, "Steps of the whole run.", min=1)] = None,
    batch: Annotated[
        int | None, _option(_DATA, "Sequences per step over all ranks; 1 by default, or the plan's.", min=1)
    ] = None,
    seq: Annotated[
        int | None, _option(_DATA, "Most tokens per sequence; by default the longest line's.", min=1)
    ] = None,
    residency: Annotated[
        ResidencyName | None,
        _option(_PLACEMENT, "Where blocks live between uses; by default what is predicted to be fastest."),
    ] = None,
    method: Annotated[
        MethodName | None,
        _option(
            _PLACEMENT,
            "Let the planner choose; pertp, ddp and 2d share a step out among ranks, sparq the model.",
        ),
    ] = None,
    mesh: Annotated[
        str | None, _option(_PLACEMENT, "Ranks, the outer axis first, such as data=2,perturb=2 or stage=2.")
    ] = None,
    ranks: Annotated[
        int | None,
        _option(
            _PLACEMENT,
            "Ranks on this host, whose mesh the planner chooses; by default what torchrun has started.",
            min=1,
        ),
    ] = None,
    cut: Annotated[
        str | None,
        _option(
            _PLACEMENT,
            "Where stages begin: block.5 (behind it), block.5.mlp (inside); by default inside, evenly.",
        ),
    ] = None,
    codec: Annotated[
        str | None,
        _option(_PRECISION, "Of activations that cross a cut, such as q4 or q4:affine-zero:token."),
    ] = None,
    residual_codec: Annotated[
        str | None, _option(_PRECISION, "Of the residual stream that crosses a cut.")
    ] = None,
    transfers: Annotated[
        TransfersName | None,
        _option(_PLACEMENT, "How ranks share host copies of offloaded blocks; private by default."),
    ] = None,
    share_group: Annotated[
        ShareGroupName | None, _option(_PLACEMENT, "Who shares blocks out: a host's ranks (default), or all.")
    ] = None,
    slots: Annotated[
        int | None, _option(_PLACEMENT, "Device slots for offloaded blocks; 3 by default.", min=1)
    ] = None,
    traversal: Annotated[
        TraversalName | None,
        _option(_PLACEMENT, "Perturb everything first, or block by block, or that for one query at a time."),
    ] = None,
    update: Annotated[
        UpdateName | None,
        _option(_PLACEMENT, "Apply a step's update at once, or in the next."),
    ] = None,
    keep_directions: Annotated[
        bool | None,
        _option(
            _PLACEMENT,
            "Draw every direction once and keep it until its update: faster, for another copy of the weights.",
            "--keep-directions/--no-keep-directions",
        ),
    ] = None,
    draw_ahead: Annotated[
        bool | None,
        _option(
            _PLACEMENT,
            "Draw directions, and write copies of weights, on a stream of their own, ahead of the forwards.",
            "--draw-ahead/--no-draw-ahead",
        ),
    ] = None,
    max_device_memory: Annotated[
        str | None, _option(_PLACEMENT, "Limit for the planner, such as 20GiB; by default all of it.")
    ] = None,
    program: Annotated[
        Path | None, _option(_PLACEMENT, "A program (perhaps edited) in place of the plan's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=_PLACEMENT)] = "cpu",
    threads: Annotated[
        int | None,
        _option(
            _PLACEMENT,
            "Threads of a CPU's kernels, of each rank; by default $OMP_NUM_THREADS, else its part of the cores.",
            min=1,
        ),
    ] = None,
    rng: Annotated[
        RngName | None,
        _option(_ESTIMATOR, "One generator (mezo, the default), or a keyed stream for each parameter."),
    ] = None,
    order: Annotated[
        OrderName | None, _option(_ESTIMATOR, "Order of draws under --rng mezo; registration by default.")
    ] = None,
    direction: Annotated[
        DirectionName | None, _option(_ESTIMATOR, "Distribution of the perturbation; gaussian by default.")
    ] = None,
    queries: Annotated[int | None, _option(_ESTIMATOR, "Directions per step; 1 by default.", min=1)] = None,
    difference: Annotated[
        DifferenceName | None, _option(_ESTIMATOR, "Finite difference; central by default.")
    ] = None,
    accumulate: Annotated[
        int | None,
        _option(_ESTIMATOR, "Micro-batches that a step's batch is forwarded in; 1 by default.", min=1),
    ] = None,
    weights: Annotated[
        WeightsName | None,
        _option(
            _ESTIMATOR,
            "How weights come to a point: serial (default), in place and back, with MeZO's drift, or copies beside them.",
        ),
    ] = None,
    eps: Annotated[float | None, _option(_ESTIMATOR, "Smoothing radius; 1e-3 by default.")] = None,
    lr: Annotated[float | None, _option(_ESTIMATOR, "Largest learning rate; 1e-6 by default.")] = None,
    lr_schedule: Annotated[
        ScheduleName | None, _option(_ESTIMATOR, "How the learning rate falls; constant by default.")
    ] = None,
    warmup: Annotated[
        int | None, _option(_ESTIMATOR, "Steps until the largest rate; 0 by default.", min=0)
    ] = None,
    weight_decay: Annotated[
        float | None, _option(_ESTIMATOR, "Of all but biases and layer norms; 0 by default.", min=0)
    ] = None,
    objective: Annotated[
        str | None,
        _option(
            _ESTIMATOR,
            "What is minimised: loss (default), accuracy, f1, or module:function of logits and batch. The module is "
            "imported and its code run: name only what you trust.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _option(_ESTIMATOR, "Of directions, the shuffle, and what adapters begin as; 0 by default.", min=0),
    ] = None,
    shuffle: Annotated[
        Switch | None, _option(_DATA, "Off: batch k is lines kB to kB+B-1. On by default.")
    ] = None,
    template: Annotated[str | None, _option(_DATA, 'Such as "{text} It was {label}."')] = None,
    label_words: Annotated[str | None, _option(_DATA, "Such as 0=terrible,1=great.")] = None,
    truncate: Annotated[
        bool | None,
        _option(
            _DATA,
            "Cut lines that are longer than --seq, or refuse them (default).",
            "--truncate/--no-truncate",
        ),
    ] = None,
    lora_rank: Annotated[int | None, _option(_DATA, "Tune adapters of this rank alone.", min=1)] = None,
    lora_targets: Annotated[
        str | None, _option(_DATA, "Linears that get one, such as q_proj,v_proj.")
    ] = None,
    lora_alpha: Annotated[
        float | None,
        _option(_DATA, "They add alpha over rank times B A x; by default twice the rank.", min=0),
    ] = None,
    prefix: Annotated[
        int | None, _option(_DATA, "Tune this many virtual tokens before every block's keys alone.", min=1)
    ] = None,
    random_weights: Annotated[
        bool | None,
        _option(
            _DATA,
            "Use the architecture alone, or its weights (default).",
            "--random-weights/--no-random-weights",
        ),
    ] = None,
    allow_download: Annotated[
        bool, typer.Option("--allow-download", help="Fetch a named model.", rich_help_panel=_DATA)
    ] = False,
    dtype: Annotated[
        str | None,
        _option(_PRECISION, "Of weights, and of the rest: float32 (default), bfloat16, float16, float64."),
    ] = None,
    compute_dtype: Annotated[
        str | None, _option(_PRECISION, "Of matrix products, such as tf32 or bfloat16; by default --dtype.")
    ] = None,
    transfer_dtype: Annotated[
        str | None,
        _option(_PRECISION, "Of offloaded blocks, such as float16; narrower is lossy. By default --dtype."),
    ] = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Accept lost precision.", rich_help_panel=_PRECISION)
    ] = False,
    loss_dtype: Annotated[
        LossFormat | None, _option(_PRECISION, "Format that the loss is computed in; the model's by default.")
    ] = None,
    loss_chunk_tokens: Annotated[
        int | None, _option(_PRECISION, "Tokens whose logits are alive at once; by default all.", min=1)
    ] = None,
    attention: Annotated[
        AttentionName | None, _option(_PRECISION, "Implementation of attention; sdpa by default.")
    ] = None,
    eval_data: Annotated[str | None, _option(_KEEPING, "Lines to evaluate on.")] = None,
    eval_task: Annotated[
        TaskName | None,
        _option(
            _KEEPING,
            "What they ask for: one of several answers, all labels, or free text; auto: told by the lines.",
        ),
    ] = None,
    eval_max_new_tokens: Annotated[
        int | None, _option(_KEEPING, "Tokens of a generated answer at most; 32 by default.", min=1)
    ] = None,
    eval_every: Annotated[
        int | None,
        _option(
            _KEEPING, "Steps between evaluations; by default only before the first and after the last.", min=0
        ),
    ] = None,
    eval_examples: Annotated[
        int | None, _option(_KEEPING, "Only the first so many; by default all.", min=1)
    ] = None,
    keep_best: Annotated[
        bool | None, _option(_KEEPING, "Keep the best weights in OUT/best.", "--keep-best/--no-keep-best")
    ] = None,
    digest_every: Annotated[
        int | None,
        _option(_KEEPING, "Steps between digests of the parameters; 100 by default, 0 never.", min=0),
    ] = None,
    checkpoint_every: Annotated[
        int | None, _option(_KEEPING, "Steps between checkpoints; 0 (default): the log is enough.", min=0)
    ] = None,
    checksums: Annotated[
        bool | None,
        _option(
            _KEEPING,
            "Notice bits of weights that nothing wrote; by default on a CPU.",
            "--checksums/--no-checksums",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what OUT holds.", rich_help_panel=_KEEPING)
    ] = False,
    early_stop: Annotated[
        bool, typer.Option(help="Stop when the loss diverges.", rich_help_panel=_KEEPING)
    ] = True,
    tensorboard: Annotated[
        bool, typer.Option(help="Write logs for TensorBoard if installed.", rich_help_panel=_KEEPING)
    ] = True,
    launch: Annotated[
        bool,
        typer.Option(help="Start ranks of their own, or run in this process.", rich_help_panel=_PLACEMENT),
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds until a rank that waits gives up.", min=1, rich_help_panel=_PLACEMENT),
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Train a model: carry out a plan, or make one and carry it out."""
    given = {
        name: value.value if isinstance(value, enum.Enum) else value for name, value in dict(locals()).items()
    }
    from executors.files import refuse_other_names
    from executors.ranks.launch import launch as launch_ranks
    from executors.ranks.mesh import launch_lines
    from executors.ranks.rank_info import RankInfo, is_launched
    from executors.runs.asking import settings_from
    from executors.runs.inputs import refuse_missing_data
    from executors.runs.run import run_in_rank

    refuse_other_names(given[name] for name in ("plan", "out", "model", "data", "eval_data") if given[name])
    settings, warnings = settings_from(given)
    is_first, placement = RankInfo.here().rank == 0, settings.plan.placement
    for warning in warnings if is_first else ():
        stderr.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if len(placement.ranks_by_host) > 1 and not is_launched():
        lines = launch_lines(settings.plan, sys.argv[1:])
        emit({"launch": lines}, json=as_json, text=lines)
        return
    if not is_launched():
        refuse_missing_data(settings)
    world_size = placement.world_size
    if not launch and world_size > 1 and not is_launched():
        raise RunError(f"--no-launch runs one rank, the plan has {world_size}", hint="leave it out")
    summary = launch_ranks(run_in_rank, settings, world_size=world_size) if launch else run_in_rank(settings)
    if is_first:
        emit(summary, json=as_json, text=summary_view(summary))


def replay(
    directory: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    model: Annotated[str, typer.Option(help="The base weights that it began from.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Where the weights go, as a model directory.", show_default=False
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(min=0, help="Steps to replay; by default all.", show_default=False)
    ] = None,
    residency: Annotated[
        ResidencyName | None, typer.Option(help="Replay placed otherwise.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="By default the run's.", show_default=False)
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option(help="Start from the newest checkpoint, or from the base.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Rebuild a run's weights, bit for bit, from its base weights and its log."""
    import torch

    from executors.ranks.mesh import alone
    from executors.runs.planning import Asked, plan_for
    from executors.runs.replay import replay as replay_run
    from executors.runs.runlog import read_header
    from zosim.plans import Plan

    header = read_header(directory)
    torch.set_num_threads(threads or header["num_threads"])
    recorded = Plan.model_validate(header["plan"])
    base = alone(recorded)
    placed = plan_for(Asked(residency=residency.value), base.model, base, None) if residency else None
    with progress() as bar:
        task = bar.add_task("replaying", total=None)
        result = replay_run(
            directory,
            model,
            output,
            num_steps=steps,
            plan=placed,
            device=device,
            use_checkpoints=checkpoints,
            warn=lambda text: stderr.print(f"warning: {text}", markup=False, soft_wrap=True),
            on_step=lambda done, total: bar.update(task, completed=done, total=total),
        )
    checked = result["digests_checked"]
    text = f"{output} holds the weights after {result['num_steps']} steps, digest {result['digest']}"
    emit(result, json=as_json, text=f"{text}; {checked} recorded digests agree" if checked else text)
