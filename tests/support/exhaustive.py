"""``python -m tests.support.exhaustive``: hold the planner's choice against every plan of the space, on random small requests.

Each request is a model of a few blocks on one of a few machines, with a random limit of memory. Every plan of the space is
bounded; those whose bound undercuts the choice are simulated, and some others, to see that bounds hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from costmodel import read_model_spec
from tests.support.requests import request_for
from topology import load_preset
from topology.errors import DoesNotFit, PlanError
from zosim.plans import AXES, Estimator, Perturbations, Weights, fields_of
from zosim.simulators.shortening import with_blocks

MODELS = ("opt-1.3b", "gpt2-xl", "qwen3-0.6b", "tinyllama-1.1b")
MACHINES = ("a100-80gb-milan", "rtx4090-2x", "a6000-2x", "cpu-laptop", "h20-4x-milan")
_LEFT_OPEN = ("blocks", "transfers", "loss_chunk_tokens", "num_disk_blocks")
BETTER = 1e-3
"""Relative; a plan that is faster by less is as fast."""


@dataclass(frozen=True)
class Case:
    """A request in words: how it was drawn."""

    model: str
    num_blocks: int
    machine: str
    batch: int
    seq: int
    num_perturbations: int
    dtype: str
    rng: str
    share: float
    """Of the memory that the plainest plan takes."""
    max_ranks: int = 2
    named: tuple[tuple[str, str, Any], ...] = ()
    """Axes, fields and values that the request names, so that few plans are left."""

    def request(self, max_device_bytes: int | None = None) -> Any:
        """Return the request, with a limit of memory or without."""
        model = with_blocks(read_model_spec(self.model), range(self.num_blocks))
        topology = load_preset(self.machine)
        fixed: dict[str, dict[str, Any]] = {}
        for axis, field, value in self.named:
            fixed.setdefault(axis, {})[field] = value
        return request_for(
            model,
            topology,
            batch=self.batch,
            seq=self.seq,
            max_ranks=min(self.max_ranks, len(topology.compute_devices)),
            fixed=fixed,
            weights=Weights(dtype=self.dtype),
            estimator=Estimator(num_perturbations=self.num_perturbations),
            perturbations=Perturbations.model_construct({"rng"}, rng=self.rng),
            max_device_bytes=max_device_bytes,
        )

    def limited(self) -> Any:
        """Return the request with a share of the memory that it takes without a limit."""
        from zosim.planning.bounds import Bounds
        from zosim.planning.planner import placements

        free = self.request()
        taken = Bounds(free).of(next(placements(free))).footprints.largest
        if taken.is_cpu:
            return free
        # The runtime takes its memory of any plan.
        fixed = sum(one.size_bytes for one in taken.components if one.name == "runtime context")
        return self.request(round(fixed + self.share * (taken.device_bytes - fixed)))


def cases(num_cases: int, seed: int) -> list[Case]:
    """Return random requests."""
    rng = random.Random(seed)
    return [
        Case(
            rng.choice(MODELS),
            rng.choice((3, 4, 6)),
            rng.choice(MACHINES),
            rng.choice((1, 2, 3)),
            rng.choice((16, 48, 128, 384)),
            rng.choice((1, 1, 2, 4)),
            rng.choice(("float32", "float16")),
            rng.choice(("mezo", "counter")),
            rng.choice((1.0, 0.9, 0.7, 0.5, 0.3)),
        )
        for _ in range(num_cases)
    ]


def few_plans(num_cases: int, seed: int) -> list[Case]:
    """Return random requests that name most of what a planner chooses, many of them for several ranks."""
    rng = random.Random(seed)
    drawn = cases(num_cases, seed)
    return [
        replace(
            case,
            num_blocks=rng.choice((2, 3, 4, 9)),
            max_ranks=rng.choice((1, 2, 2, 4)),
            named=tuple(_named(rng)),
        )
        for case in drawn
    ]


def _named(rng: random.Random) -> Iterator[tuple[str, str, Any]]:
    is_offloaded = rng.random() < 0.5
    if is_offloaded:
        yield "residency", "blocks", "offloaded"
    for axis, fields in AXES.items():
        for field in fields_of(fields).values():
            is_chosen = field.setting.planned and axis not in ("mesh", "split")
            # How blocks move says nothing of those that stay; ranks that share copies are the planner's to find.
            is_free = field.name in _LEFT_OPEN or (axis == "residency" and not is_offloaded)
            if is_chosen and not is_free and rng.random() < 0.6:
                yield axis, field.name, rng.choice(field.tried)


@dataclass(frozen=True)
class Outcome:
    """What was chosen, and the best of all plans; None where nothing fits."""

    case: Case
    chosen_s: float | None
    best_s: float | None
    best: str
    num_plans: int
    num_simulated: int

    @property
    def regret(self) -> float:
        """By how much the choice takes longer than the best; infinite where it was said that nothing fits and something does."""
        if self.best_s is None:
            return 0.0
        return float("inf") if self.chosen_s is None else self.chosen_s / self.best_s - 1


def chosen_s(request: Any) -> float | None:
    """Return the step time of what the planner chooses; None where nothing fits."""
    from zosim.planning.planner import choose

    try:
        return choose(request).chosen.seconds
    except DoesNotFit:
        return None


def outcome(case: Case, *, every: int = 50, chosen: tuple[float | None] | None = None) -> Outcome:
    """Return what was chosen, here or by another planner, and the best of all plans.

    - `every`: Of the plans that cannot be the best by their bounds, how many are passed over for one that is simulated.
    """
    from zosim.planning.bounds import Bounds
    from zosim.planning.planner import placements
    from zosim.planning.predict import PlannedRun

    request = case.limited()
    hardware, bounds = request.hardware, Bounds(request)
    (taken_s,) = (chosen_s(request),) if chosen is None else chosen
    best_s, best, num_plans, num_simulated = taken_s, "the choice", 0, 0
    for plan in placements(request):
        bound = bounds.of(plan)
        num_plans += 1
        if bound.missing or (best_s is not None and bound.seconds >= best_s and num_plans % every):
            continue
        seconds = PlannedRun(
            plan, hardware.topology, hardware.profile, profiles=hardware.profiles, is_validated=False
        ).step_time_s
        num_simulated += 1
        assert bound.seconds <= seconds * (1 + 1e-9), f"{plan.describe()} of {case}: the bound is no bound"
        if best_s is None or seconds < best_s:
            best_s, best = seconds, plan.describe()
    return Outcome(case, taken_s, best_s, best, num_plans, num_simulated)


def main() -> int:
    """Print each request with a better plan than the chosen one, and how many there are."""
    parser = argparse.ArgumentParser(prog="tests.support.exhaustive", description=__doc__)
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few-plans", action="store_true", help="requests that name most of the settings")
    parser.add_argument(
        "--choose-only", type=Path, help="only write what is chosen, for another version's search"
    )
    parser.add_argument("--of", type=Path, help="judge what another version chose, as it wrote it")
    parsed = parser.parse_args()
    drawn = (few_plans if parsed.few_plans else cases)(parsed.num_requests, parsed.seed)
    if parsed.choose_only:
        parsed.choose_only.write_text(json.dumps([chosen_s(case.limited()) for case in drawn]))
        return 0
    known = [(value,) for value in json.loads(parsed.of.read_text())] if parsed.of else []
    found = list(outcomes(drawn, known=known))
    worse = [each for each in found if each.regret > BETTER]
    print(
        f"{len(worse)} of {len(found)} requests have a better plan, by up to "
        f"{max((each.regret for each in worse), default=0.0):.1%}; {sum(each.num_plans for each in found):,} plans "
        f"bounded, {sum(each.num_simulated for each in found):,} simulated"
    )
    return bool(worse)


def outcomes(
    drawn: Sequence[Case], *, every: int = 50, known: Sequence[tuple[float | None] | None] = ()
) -> Iterator[Outcome]:
    """Yield what is found of each case that does not contradict itself, and print those with a better plan."""
    for case, chosen in zip_longest(drawn, known):
        try:
            found = outcome(case, every=every, chosen=chosen)
        except PlanError as error:
            if isinstance(error, DoesNotFit) or not case.named:
                raise
            continue
        if found.regret > BETTER:
            print(f"{found.regret:8.2%} {case}\n         {found.best}", flush=True)
        yield found


if __name__ == "__main__":
    sys.exit(main())
