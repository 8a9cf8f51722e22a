"""``zosim demo``: the whole job on this machine, from its topology to how close the prediction came.

Every stage is also a command of its own (``topology detect``, ``calibrate``, ``plan``, ``run``, ``compare``); the
demo calls what they call.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topology.errors import RunError
from topology.limits import MAX_SEED, MAX_THREADS
from zosim.cli import NEEDED_TO_RUN, refuse_without

if TYPE_CHECKING:
    from costmodel.rates.profile import Profile
    from executors.models.pretrain import Pretrained, Recipe
    from topology.graph import Topology
    from zosim.analysis.compare import Comparison
    from zosim.config import PlanConfig
    from zosim.planning.planner import Decision
    from zosim.planning.request import Hardware
    from zosim.plans import Plan

_NUM_EVALUATED = 500
_CALIBRATION_S = 20.0
_NUM_STAGES = 7
_METHOD_NAMES = ("MeZO, all on the device", "ZO2-style offload")


def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for the demo's run; an earlier demo there is replaced.")
    ] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=4, help="Number of training steps.")] = 400,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Number of CPU threads.", show_default="all cores"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Plan, run and compare on this machine in a few minutes; needs no model or data."""
    from zosim.console import emit

    stages = Stages(out, steps, threads, seed)
    outcome = stages.run()
    emit(outcome.data(), json=as_json, text=outcome.view())


@dataclass(frozen=True)
class DemoResult:
    """What the demo found."""

    comparison: Comparison  # predicted and measured
    summary: dict[str, Any]  # the run's
    # before, after: loss and accuracy on held-out questions.
    before: dict[str, float]
    after: dict[str, float]
    bottleneck: str
    # Share of the calibration behind the prediction that others disturbed, if that is too much to rely on; else 0.
    disturbed_share: float = 0.0

    def data(self) -> dict[str, Any]:
        """Return the outcome as JSON knows it."""
        import json

        return {
            "comparison": json.loads(self.comparison.to_json()),
            "summary": self.summary,
            "before": self.before,
            "after": self.after,
            "bottleneck": self.bottleneck,
            "disturbed_share": self.disturbed_share,
        }

    def view(self) -> Any:
        """Return the outcome as a person reads it."""
        from zosim.report import Report, Table

        learned = Table(
            ("held-out questions", "before", "after"),
            [
                ("accuracy", f"{self.before['accuracy']:.1%}", f"{self.after['accuracy']:.1%}"),
                ("loss", f"{self.before['loss']:.3f}", f"{self.after['loss']:.3f}"),
            ],
            numeric=("before", "after"),
        )
        disturbed = (
            f"predicted from a disturbed profile: other processes disturbed {self.disturbed_share:.0%} of its calibration; on an "
            "idle machine `zosim calibrate` makes a better one"
        )
        return Report(
            "",
            self.comparison.view(),
            f"bottleneck, predicted: {self.bottleneck}",
            *([disturbed] if self.disturbed_share else []),
            learned,
        )


class Stages:
    """The demo's stages, each with a heading on standard error (`recipe`: of the model; the default one if not given)."""

    def __init__(
        self,
        out: Path,
        num_steps: int,
        num_threads: int | None,
        seed: int,
        *,
        recipe: Recipe | None = None,
        calibration_s: float = _CALIBRATION_S,
    ) -> None:
        self.out = out
        self.recipe = recipe
        self.calibration_s = calibration_s
        self.num_steps = num_steps
        self.num_threads = num_threads
        self.seed = seed
        self._stage = 0
        self._began_s = self._stage_began_s = time.perf_counter()

    def run(self) -> DemoResult:
        """Go through all stages."""
        refuse_without(*NEEDED_TO_RUN)
        _check_out(self.out)
        topology = self._detect()
        pretrained = self._model()
        self._first_plan(topology, pretrained)
        profile = self._calibrate(topology)
        decision = self._plan(topology, profile, pretrained)
        summary = self._train(decision.chosen.plan, pretrained)
        return self._compare(decision, summary)

    def _detect(self) -> Topology:
        from topology.hardware import resolve
        from topology.text import render_text
        from zosim.config import HOST
        from zosim.console import stderr

        self._heading("this machine")
        topology = resolve(HOST)
        stderr.print(render_text(topology), markup=False)
        return topology

    def _model(self) -> Pretrained:
        from executors.models.pretrain import Recipe, pretrained_model, progress_bar
        from zosim.console import stderr

        self._heading("a small byte-level language model, pretrained on text that comes with Python")
        recipe = self.recipe or Recipe()
        with progress_bar(recipe) as on_step:
            pretrained = pretrained_model(recipe, on_step=on_step)
        stderr.print(
            f"{pretrained.model.name}: {pretrained.bits_per_byte:.2f} bits per byte; "
            f"task: is a passage documentation or code?",
            markup=False,
        )
        return pretrained

    def _first_plan(self, topology: Topology, pretrained: Pretrained) -> None:
        """Show what data sheets say before anything is measured."""
        from zosim.console import stderr
        from zosim.hardware.profiles import profile_for
        from zosim.planning.views import simulation_view

        self._heading("a first plan and its simulated step, from data sheets only")
        profile = profile_for(topology, topology.compute_devices[0].id)
        stderr.print(
            simulation_view(_decision(*self._requested(topology, profile, pretrained)).chosen.planned)
        )

    def _calibrate(self, topology: Topology) -> Profile:
        from executors.calibration.calibrating import calibrated
        from zosim.console import progress, stderr
        from zosim.hardware.profiles import save_host_profile, undisturbed_host_profile

        self._heading(
            f"calibration: {self.calibration_s:.0f} s of measurements of this machine, and about a minute of preparation"
        )
        device = topology.compute_devices[0].id
        with progress() as bar:
            task = bar.add_task("calibrating", total=100)
            profile, fit = calibrated(
                topology,
                device,
                num_threads=self.num_threads,
                budget_s=self.calibration_s,
                on_share=lambda share: bar.update(task, completed=round(100 * share)),
            )
        self.num_threads = profile.num_threads
        path = save_host_profile(profile)
        outcome = f"kept in {path}"
        if path is None:
            outcome = f"not saved: other processes disturbed {profile.disturbed_share:.0%} of the calibration"
            if earlier := undisturbed_host_profile(profile.device_name, profile.num_threads):
                profile, outcome = earlier, f"{outcome}; predictions use the earlier, undisturbed profile"
            else:
                outcome = f"{outcome}; this demo predicts with it, and saves it as {self.out}/profile.json"
        stderr.print(
            f"{len(fit.residuals)} measurements fitted, median residual {fit.median_error:.0%}; {outcome}",
            markup=False,
        )
        return profile

    def _plan(self, topology: Topology, profile: Profile, pretrained: Pretrained) -> Decision:
        from zosim.config import PlanConfig, Search, merge
        from zosim.console import stderr
        from zosim.planning.views import decision_view

        self._heading("plans: first with all memory, then with a limit that only offloaded plans meet")
        config, hardware = self._requested(topology, profile, pretrained)
        stderr.print(f"without a limit: {_decision(config, hardware).reasons[0]}", markup=False)
        limit = PlanConfig(search=Search(max_device_bytes=_between(config, hardware)))
        decision = _decision(merge(config, limit), hardware)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        stderr.print(decision_view(decision))
        return decision

    def _requested(
        self, topology: Topology, profile: Profile, pretrained: Pretrained
    ) -> tuple[PlanConfig, Hardware]:
        from costmodel.models.configs import read_model_spec
        from executors.models.pretrain import TaskSettings
        from executors.runs.inputs import longest_line
        from executors.runs.settings import DataSettings, EvaluationSettings
        from zosim.config import HOST, PlanConfig
        from zosim.planning.request import Hardware
        from zosim.plans import Estimator

        task = TaskSettings()
        model = read_model_spec(str(pretrained.model))
        data = DataSettings(path=str(pretrained.train))
        evaluation = EvaluationSettings(path=str(pretrained.validation), num_examples=_NUM_EVALUATED)
        config = PlanConfig(
            model=model,
            batch=task.batch,
            seq=longest_line(str(pretrained.model), model, data, evaluation),
            estimator=Estimator(epsilon=task.epsilon),
        )
        return config, Hardware(topology, HOST, topology.compute_devices[0].id, profile)

    def _train(self, plan: Plan, pretrained: Pretrained) -> dict[str, Any]:
        from executors.models.pretrain import TaskSettings
        from executors.ranks.launch import launch
        from executors.runs.learning_rate import LearningRate
        from executors.runs.planning import planned_device
        from executors.runs.run import run_in_rank
        from executors.runs.settings import DataSettings, EvaluationSettings, RunOptions, RunSettings

        self._heading(
            f"{self.num_steps} steps of {_METHOD_NAMES[plan.is_offloaded]}, under torch.distributed"
        )
        _clear(self.out)
        settings = RunSettings(
            plan=plan,
            run=RunOptions(
                model=str(pretrained.model),
                out=str(self.out),
                seed=self.seed,
                device=planned_device(plan),
                num_threads=self.num_threads or 1,
                log_every=max(1, self.num_steps // 20),
            ),
            data=DataSettings(path=str(pretrained.train)),
            learning_rate=LearningRate(learning_rate=TaskSettings().learning_rate, num_steps=self.num_steps),
            evaluation=EvaluationSettings(path=str(pretrained.validation), num_examples=_NUM_EVALUATED),
        )
        summary: dict[str, Any] = launch(run_in_rank, settings, world_size=plan.placement.world_size)
        return summary

    def _compare(self, decision: Decision, summary: dict[str, Any]) -> DemoResult:
        from executors.runs.jsonlines import read_lines
        from zosim.analysis.compare import compare
        from zosim.timeline import Timeline

        self._heading("predicted and measured")
        planned = decision.chosen.planned
        if planned.profile.is_disturbed:
            planned.profile.save(self.out / "profile.json")
        measured = Timeline.load(self.out / "timeline.json")
        rows = [line.row for line in read_lines(self.out / "metrics.jsonl")]
        evaluations = [row for row in rows if row.get("split") == "eval"]
        self._describe_duration()
        return DemoResult(
            comparison=compare(
                planned.timeline,
                measured,
                planned.program,
                at_slowdown=planned.at_slowdown_of(measured),
                planned_tokens=planned.plan.tokens_per_step,
            ),
            summary=summary,
            before=evaluations[0],
            after=evaluations[-1],
            bottleneck=decision.prediction.bottleneck.description,
            disturbed_share=decision.prediction.disturbed_share,
        )

    def _heading(self, text: str) -> None:
        """Say how long the stage before took, and what comes."""
        from zosim.console import stderr

        self._describe_duration()
        self._stage += 1
        stderr.print(f"\n{self._stage} of {_NUM_STAGES}. {text}", style="bold", soft_wrap=True)

    def _describe_duration(self) -> None:
        from zosim.console import stderr

        now_s = time.perf_counter()
        if self._stage:
            stage_s, all_s = now_s - self._stage_began_s, now_s - self._began_s
            stderr.print(f"took {stage_s:.0f} s, {all_s:.0f} s so far", style="dim")
        self._stage_began_s = now_s


def _decision(config: PlanConfig, hardware: Hardware) -> Decision:
    """Return what the planner chooses, and from what, as every command asks it."""
    from zosim.planning.resolve import resolve

    decisions: list[Decision] = []
    resolve(config, hardware, on_decision=decisions.append)
    return decisions[0]


def _between(config: PlanConfig, hardware: Hardware) -> int:
    """Return a limit that lets in the leanest offloaded plan, and little more: no resident one."""
    from zosim.planning.bounds import Bounds
    from zosim.planning.planner import placements
    from zosim.planning.request import Request
    from zosim.planning.split_options import SplitOptions

    request = Request.of(config, hardware, SplitOptions())
    bounds = Bounds(request)
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for plan in placements(request):
        sizes[plan.is_offloaded].append(bounds.of(plan).footprints.largest.device_bytes)
    leanest = {is_offloaded: min(listed) for is_offloaded, listed in sizes.items()}
    return leanest[True] + (leanest[False] - leanest[True]) // 4


def _check_out(out: Path) -> None:
    """Refuse a directory that holds something else than a run, before the minutes that the demo takes."""
    if out.exists() and not out.is_dir():
        raise RunError(f"--out {out} is a file, not a directory", hint="give another --out")
    if out.exists() and any(out.iterdir()) and not (out / "run.json").exists():
        raise RunError(f"--out {out} is not empty and holds no run", hint="give another --out")


def _clear(out: Path) -> None:
    """Remove an earlier demo; anything else is left alone.

    Raises RunError if the directory holds something that is not a run.
    """
    _check_out(out)
    if out.exists():
        shutil.rmtree(out)
