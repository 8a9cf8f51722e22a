"""``python -m studies.prediction.regret``: the planner's choice in real runs, against the plans that it passed over.

Each request is a small model on this CPU, in one process of all cores or in two ranks. The planner chooses with the rates that
``zosim calibrate`` has measured. The chosen plan, the next ones in its order and some at random then run in turns. All
compute the same losses and updates.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import torch
import typer

from costmodel.rates.profile import Profile
from executors.formats import TORCH_DTYPES
from executors.models.spec import spec_of_model
from executors.ranks.launch import launch, process_group
from executors.runs.session import Session
from executors.turns import Took, TurnTimes, Way, end_to_end, in_turns
from studies.prediction.cases import Case, fitting_cases
from studies.prediction.setting import batch_of, model_of, session_on
from topology.errors import PlanError, ZosimError
from topology.graph import Topology
from topology.hardware import resolve
from zosim.config import HOST, PlanConfig, Search, merge
from zosim.console import emit
from zosim.hardware.profiles import profile_for
from zosim.planning.planner import choose, placements
from zosim.planning.request import Hardware, Request
from zosim.planning.split_options import SplitOptions
from zosim.plans import Estimator, Perturbations, Plan, Split, Weights
from zosim.report import Bullets, Report, Table

GOALS = (1.05, 1.15)
"""Of the median of all requests, and of the worst."""
_CHOSEN, _AGAIN = "chosen", "chosen, again"
_STEPS_PER_TURN = 3
_LONGEST_STEP_S = 0.12


@dataclass(frozen=True)
class ChoiceRequest:
    """What the planner is to choose a plan for."""

    case: Case  # model, batch and format; threads of each rank
    num_ranks: int
    rng: str
    num_perturbations: int

    @property
    def name(self) -> str:
        """Everything that tells it from others."""
        case = self.case
        ranks = f"{self.num_ranks} ranks" if self.num_ranks > 1 else f"{case.num_threads} threads"
        return f"{case.shape.name} {case.batch}x{case.seq} {case.dtype}, {ranks}, {self.rng}, {self.num_perturbations} perturbations"

    def request(self, topology: Topology, profile: Profile) -> Request:
        """Return the request for a machine whose ranks have these rates each."""
        node = topology.of_type("cpu")[0].id
        hardware = Hardware(topology, HOST, node, profile, max_ranks=self.num_ranks)
        model = model_of(self.case.shape).to(TORCH_DTYPES[self.case.dtype])
        axes = PlanConfig(
            search=Search(ranks=self.num_ranks),
            weights=Weights.model_validate({"dtype": self.case.dtype}),
            perturbations=Perturbations.model_construct({"rng"}, rng=self.rng),
            estimator=Estimator(num_perturbations=self.num_perturbations),
        )
        config = PlanConfig(
            model=spec_of_model(model, name=self.case.shape.name), batch=self.case.batch, seq=self.case.seq
        )
        split = SplitOptions.of(
            Split(), lambda blocks: spec_of_model(model, name=self.case.shape.name, split_blocks=blocks)
        )
        return Request(merge(config, axes), hardware, split)


def calibrated_rates(topology: Topology, num_threads: int) -> Profile:
    """Return the rates of this machine's calibration with so many threads. Raises PlanError if there is none."""
    profile = profile_for(topology, topology.of_type("cpu")[0].id, num_threads=num_threads, is_host=True)
    if profile.origin == "datasheet":
        raise PlanError(
            f"this machine is not calibrated with {num_threads} threads per rank",
            hint=f"zosim calibrate --threads {num_threads}",
        )
    return profile


def choice_requests(
    num_requests: int, ranks: Sequence[int], num_cores: int, seed: int
) -> list[ChoiceRequest]:
    """Return random requests of so many ranks in turn, which have equal parts of the cores."""
    generator = random.Random(seed)
    fitting = fitting_cases(generator, _LONGEST_STEP_S)
    found = []
    for number in range(num_requests):
        num_ranks = ranks[number % len(ranks)]
        case = next(case for case in fitting if case.batch % num_ranks == 0)
        threads = max(1, num_cores // num_ranks)
        case = Case(case.shape, case.batch, case.seq, case.dtype, threads, "")
        found.append(
            ChoiceRequest(case, num_ranks, generator.choice(("mezo", "counter")), generator.choice((1, 1, 2)))
        )
    return found


def plans_for(request: Request, num_next: int, num_random: int, seed: int) -> dict[str, Plan]:
    """Return the chosen plan twice, the next ones in the planner's order, and some at random of all that there are."""
    decision = choose(request)
    others = [candidate.plan for candidate in decision.others][:num_next]
    generator = random.Random(seed)
    rest = [plan for plan in placements(request) if plan not in (decision.plan, *others)]
    picked = generator.sample(rest, min(num_random, len(rest)))
    plans = {_CHOSEN: decision.plan, _AGAIN: decision.plan}
    plans |= {f"next {number}: {plan.describe()}": plan for number, plan in enumerate(others, 1)}
    return plans | {f"random {number}: {plan.describe()}": plan for number, plan in enumerate(picked, 1)}


@dataclass(frozen=True)
class MeasuredChoice:
    """What the plans of one request took."""

    request: ChoiceRequest
    chosen: str
    times: Mapping[str, TurnTimes]

    def ratio(self, name: str) -> float:
        """Return what the chosen plan takes, over what another takes in the same round: the median of all rounds."""
        # The chosen plan has two sessions: the mean of both has less of a session's own luck.
        pairs = zip(
            self.times[_CHOSEN].seconds,
            self.times[_AGAIN].seconds,
            self.times[name].seconds,
            strict=True,
        )
        return median((first + second) / 2 / other for first, second, other in pairs)

    @property
    def best(self) -> str:
        """The name of the fastest plan."""
        return max((name for name in self.times if name != _AGAIN), key=self.ratio)

    @property
    def regret(self) -> float:
        """Time of the chosen plan over that of the best."""
        return max(1.0, self.ratio(self.best))

    @property
    def noise(self) -> float:
        """Slower over faster of the two sessions of the chosen plan: what no choice can do better than."""
        ratio = median(
            first / second
            for first, second in zip(self.times[_CHOSEN].seconds, self.times[_AGAIN].seconds, strict=True)
        )
        return max(ratio, 1 / ratio)


def measured(item: ChoiceRequest, plans: Mapping[str, Plan], num_rounds: int) -> dict[str, TurnTimes]:
    """Return what each plan took in each round; of several ranks, as the first saw it."""
    if item.num_ranks == 1:
        return _timed(item, plans, num_rounds)
    of_first: dict[str, TurnTimes] = launch(
        _in_rank, item, dict(plans), num_rounds, world_size=item.num_ranks
    )
    return of_first


def _in_rank(item: ChoiceRequest, plans: Mapping[str, Plan], num_rounds: int) -> dict[str, TurnTimes]:
    with process_group(device_type="cpu"):
        return _timed(item, plans, num_rounds)


def _timed(item: ChoiceRequest, plans: Mapping[str, Plan], num_rounds: int) -> dict[str, TurnTimes]:
    before = torch.get_num_threads()
    torch.set_num_threads(item.case.num_threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        sessions = {name: session_on(plan, item.case) for name, plan in plans.items()}
        times = in_turns(
            {name: turn_of(session, item.case) for name, session in sessions.items()},
            num_rounds,
            num_warm_rounds=2,
        )
        for session in sessions.values():
            session.close()
    finally:
        torch.set_num_threads(before)
    return times


def turn_of(session: Session, case: Case) -> Way:
    """Return a turn of a session: the median of some steps behind one that does not count."""
    batch = batch_of(case)

    def turn(_number: int) -> Took:
        # Caches, and what another plan has left to copy, are no part of the steps that count.
        session.step(batch)
        return Took(median(end_to_end(lambda: session.step(batch), _STEPS_PER_TURN)))

    return turn


def report(choices: Sequence[MeasuredChoice]) -> Report:
    """Return a row for each request, and the ratios that the goals are about."""
    columns = ("request", "chosen", "best", "chosen (ms)", "best (ms)", "plans", "regret", "twice")
    rows = [
        (
            each.request.name,
            each.chosen,
            each.best,
            f"{1e3 * each.times[_CHOSEN].median_s:.1f}",
            f"{1e3 * each.times[each.best].median_s:.1f}",
            str(len(each.times) - 1),
            f"{each.regret:.3f}",
            f"{each.noise:.3f}",
        )
        for each in choices
    ]
    regrets = [each.regret for each in choices]
    found = (median(regrets), max(regrets))
    lines = [
        f"{name} regret {value:.3f} of {len(regrets)} requests (goal {goal:g})"
        for name, value, goal in zip(("median", "worst"), found, GOALS, strict=True)
    ]
    lines.append(
        f"the same plan twice: {median(each.noise for each in choices):.3f} in the median, {max(each.noise for each in choices):.3f} at worst"
    )
    return Report("", Table(columns, rows, numeric=columns[3:]), Bullets(lines))


def main(
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")] = 8,
    next_plans: Annotated[int, typer.Option(min=0, help="Plans that come next in the planner's order.")] = 4,
    random_plans: Annotated[int, typer.Option(min=0, help="Plans picked at random.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each request.")] = 11,
    ranks: Annotated[
        list[int], typer.Option(min=1, help="Number of ranks; may be repeated, and requests take turns.")
    ] = [1, 2],  # noqa: B006 - typer copies it
    limit_s: Annotated[
        float, typer.Option(min=1, help="Begin no request that would probably end after so many seconds.")
    ] = 290.0,
    seed: Annotated[int, typer.Option(help="Decides the requests and the plans at random.")] = 20261126,
) -> None:
    """Run chosen plans and others of the same mathematics in turns; exit with 1 where a goal is missed."""
    topology, begin = resolve(HOST), time.perf_counter()
    num_cores = topology.device_spec(topology.of_type("cpu")[0].id).num_cores
    choices: list[MeasuredChoice] = []
    try:
        for number, item in enumerate(choice_requests(num_requests, ranks, num_cores, seed)):
            elapsed_s = time.perf_counter() - begin
            if choices and elapsed_s * (number + 1) / number > limit_s:
                break
            print(f"{elapsed_s:4.0f} s: {item.name}", file=sys.stderr)
            profile = calibrated_rates(topology, item.case.num_threads)
            plans = plans_for(item.request(topology, profile), next_plans, random_plans, seed + number)
            choices.append(MeasuredChoice(item, plans[_CHOSEN].describe(), measured(item, plans, rounds)))
    except ZosimError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        raise typer.Exit(2) from None
    emit(None, json=False, text=report(choices))
    regrets = [each.regret for each in choices]
    raise typer.Exit(median(regrets) > GOALS[0] or max(regrets) > GOALS[1])


if __name__ == "__main__":
    typer.run(main)
