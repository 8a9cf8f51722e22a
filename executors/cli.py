"""``zosim run`` and ``replay``. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from executors.files import refuse_other_names
from executors.report import RunSummary, summary_view
from executors.runs.settings import RunConfig, check_data, evaluation_in
from topology.errors import RunError, refusing_ignored
from topology.limits import MAX_THREADS
from zosim.cli import NEEDED_TO_RUN, refuse_without
from zosim.config import PlanConfig
from zosim.console import emit, progress, stderr
from zosim.help_pages import EXPERT
from zosim.options import Json, config_of, takes_earlier_names, with_settings
from zosim.plans import Plan, Residency

if TYPE_CHECKING:
    from zosim.planning.planner import Decision


@with_settings(RunConfig)
def run(
    plan: Annotated[
        Path | None,
        typer.Argument(help="Plan file, from `zosim plan -o`.", show_default="plan first, from the options"),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            help="Program file to run in place of the plan's own, perhaps edited.",
            show_default=False,
            rich_help_panel=f"{EXPERT}: Run",
            hidden=True,
        ),
    ] = None,
    launch: Annotated[
        bool,
        typer.Option(
            help="Start a process per rank, or run one rank in this process.",
            rich_help_panel=f"{EXPERT}: Run",
            hidden=True,
        ),
    ] = True,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Train a model by a plan, or plan first for this machine.

    For example:
      zosim run --model my-model --data train.jsonl --steps 1000 --out runs/first
      zosim run --out runs/first --resume
    """
    options = config_of(RunConfig, settings)
    summary = _run(options, plan, program=program, launch=launch, arguments=sys.argv[1:])
    if "launch" in summary:
        emit(summary, json=as_json, text=summary["launch"])
    elif summary:
        emit(summary, json=as_json, text=summary_view(summary))


@takes_earlier_names(RunConfig)
def run_with(
    plan: Plan | Decision | str | Path | None = None,
    *,
    program: str | Path | None = None,
    launch: bool = True,
    **settings: Any,
) -> RunSummary:
    """Train a model by a plan, or plan first. In Python this is ``zosim.run``.

    Parameters
    ----------
    launch : bool
        As options of `zosim run`.
    **settings
        Any other option of `zosim run`, by its name: ``model="path/to/model"``, ``data="train.jsonl"``, ``steps=100``,
        ``out="runs/first"``, ``lr=1e-6`` and so on.

    Returns
    -------
    RunSummary
        A dict of what the run came to: ``num_steps``, ``first_loss``, ``last_loss``, ``step_time_s``, ``device_bytes`` and others.

    Raises
    ------
    ZosimError
        If something is unknown, contradicts something else, or a rank fails.
    """
    options = config_of(RunConfig, settings)
    with tempfile.TemporaryDirectory(prefix="zosim-plan-") as folder, refusing_ignored():
        edited = None if program is None else Path(program)
        return RunSummary(_run(options, _as_file(plan, Path(folder)), program=edited, launch=launch))


def _as_file(plan: Plan | Decision | str | Path | None, folder: Path) -> Path | None:
    """Return the file that holds a plan; one that is an object is written into `folder`."""
    if plan is None or isinstance(plan, str | Path):
        return None if plan is None else Path(plan)
    from zosim.planning.planner import Decision

    file = folder / "plan.json"
    (plan.plan if isinstance(plan, Decision) else plan).save(file)
    return file


def _run(
    options: RunConfig,
    plan: Path | None,
    *,
    program: Path | None,
    launch: bool,
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return what a run came to; on other ranks than the first nothing, and for several hosts the lines to start."""
    refuse_without(*NEEDED_TO_RUN)
    named = (plan, options.run.out, options.run.model, options.data.path, options.evaluation.path)
    refuse_other_names(path for path in named if path)
    # Data are refused before the seconds of importing torch. Those of a resumed run are in its record, which comes later.
    is_reported = bool(options.data.path) and not options.run.resume
    if is_reported:
        check_data(options.data.complete(), evaluation_in(options.evaluation))
    from executors.ranks.launch import launch as launch_ranks
    from executors.ranks.mesh import launch_lines
    from executors.ranks.rank_info import RankInfo, is_launched
    from executors.runs.overrides import settings_from
    from executors.runs.planning import where_it_runs
    from executors.runs.run import run_in_rank

    settings, warnings = settings_from(options, plan_file=plan, program_file=program)
    is_first, placement = RankInfo.here().rank == 0, settings.plan.placement
    where = where_it_runs(settings.plan, settings.run.device)
    for line in (where, *(f"warning: {warning}" for warning in warnings)) if is_first else ():
        stderr.print(line, markup=False, soft_wrap=True)
    if len(placement.ranks_by_host) > 1 and not is_launched():
        if arguments is None:
            raise RunError(
                f"the plan has ranks on {len(placement.ranks_by_host)} hosts, but one Python process starts "
                "ranks on its own host only",
                hint="save the plan: `zosim run plan.json ...` prints the command for each host; or start this "
                "script with torchrun on every host",
            )
        lines = launch_lines(settings.plan, arguments, device=settings.run.device)
        return {"launch": lines}
    if not is_reported and not is_launched():
        check_data(settings.data, settings.evaluation)
    world_size = placement.world_size
    if not launch and world_size > 1 and not is_launched():
        raise RunError(
            f"--no-launch runs one rank, but the plan has {world_size}", hint="leave --no-launch out"
        )
    summary = launch_ranks(run_in_rank, settings, world_size=world_size) if launch else run_in_rank(settings)
    return summary if is_first else {}


_RunDirectory = Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)]
_BaseWeights = Annotated[
    str | None,
    typer.Option(
        help="Base weights of the run: a model directory or a cached name.",
        show_default="those recorded in the run",
    ),
]


def _recorded_base(header: Mapping[str, Any], directory: Path) -> str:
    """Return, and say, from which base weights a run began.

    Raises RunError if its header does not say: a loop of one's own wrote it.
    """
    model: str | None = (header.get("run") or {}).get("model")
    if model is None:
        raise RunError(
            f"{directory} does not record its base weights", hint="name the base weights with --model"
        )
    stderr.print(f"base weights: {model}, as recorded in {directory}", markup=False, soft_wrap=True)
    return model


def adapter(
    directory: _RunDirectory,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory to write the adapter to, in PEFT's format.", show_default=False
        ),
    ],
    model: _BaseWeights = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps to include, from the first.", show_default="all steps"),
    ] = None,
    max_rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum rank of the adapter, which is compacted to it.", show_default="no limit"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Export a run with low-rank perturbations as a LoRA adapter, from its log."""
    from executors.runs.increments_of_run import write_adapter
    from executors.runs.runlog import read_header

    model = model or _recorded_base(read_header(directory), directory)
    with progress() as bar:
        task = bar.add_task("adding up", total=None)
        result = write_adapter(
            directory,
            model,
            output,
            num_steps=steps,
            max_rank=max_rank,
            on_step=lambda done, total: bar.update(task, completed=done, total=total),
        )
    emit(
        result,
        json=as_json,
        text=f"{output} holds {result['num_steps']} steps beside {result['num_matrices']} "
        f"matrices, of rank {result['rank']}; compacting left out at most {result['relative_error']:.2e} of any",
    )


def replay(
    directory: _RunDirectory,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Model directory to write the weights to.", show_default=False),
    ],
    model: _BaseWeights = None,
    steps: Annotated[
        int | None,
        typer.Option(min=0, help="Number of steps to replay, from the first.", show_default="all steps"),
    ] = None,
    residency: Annotated[
        Literal["resident", "offloaded", "nvme"] | None,
        typer.Option(help="Where blocks live during the replay.", show_default="as in the run"),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to run on, such as cpu, cuda or cuda:0.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Number of CPU threads.", show_default="as in the run"),
    ] = None,
    checkpoints: Annotated[
        bool,
        typer.Option(
            help="Start from the newest checkpoint, or from the base weights.",
            show_default="the newest checkpoint",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Rebuild a run's weights bit for bit, from its base weights and its log."""
    from executors.ranks.mesh import on_one_rank
    from executors.runs.replay import replay as replay_run
    from executors.runs.runlog import read_header
    from executors.threads import use_threads
    from zosim.planning.resolve import laid_over, resolve

    header = read_header(directory)
    model = model or _recorded_base(header, directory)
    use_threads(threads or header["num_threads"])
    recorded = Plan.model_validate(header["plan"])
    base = on_one_rank(recorded)
    placed = None
    if residency is not None:
        config = laid_over(base, PlanConfig(residency=Residency(blocks=residency)), lambda _: base.model)
        placed = resolve(config)
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
