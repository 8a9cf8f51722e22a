"""Adapters that runs and servers hold: intervals closed before V is drawn anew, versions, tenants, rewards, and replay from the log.

The other side of each comparison adds matrices to a whole model of transformers, from numbers that it draws by itself.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn

from costmodel.models.configs import LoRA
from executors.datasets.prompts import Example
from executors.datasets.rewards import mean_cost
from executors.models.increments import AdapterState
from executors.models.lora import joined_factors, merge_lora, save_adapters
from executors.runs.adapters import attach
from executors.runs.increments_of_run import _Updates
from executors.runs.lazy_intervals import lazy_intervals_of
from executors.runs.records import StepRecord
from executors.runs.session import Session
from executors.serving.runner import Request
from executors.serving.runtime import Runtime
from executors.serving.versions import Versions
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import Array, at_most, equal, exceeds, is_true, moments_of_estimate, normal_nodes
from proofs_checks.faults import central_by_epsilon
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with, planted, scaled
from proofs_checks.setups.literal import chained, sampled
from proofs_checks.setups.placements import tiny_batches, tiny_model, tiny_plan
from zosim.plans import Estimator, Perturbations

_RATE, _RANK, _LAZY_STEPS, _NUM_STEPS = 0.3, 2, 2, 7
_DOUBLE = torch.float64
_SCORE = 1e-6
"""Log-probabilities are float32, whatever the model is."""

# -- intervals ----------------------------------------------------------------------------------------------------------


def _carrying(seed: int, max_rank: int) -> nn.Module:
    """Return a tiny model with adapters whose A is drawn anew every other step."""
    model = tiny_model("tied", _DOUBLE)
    lora = LoRA(
        rank=_RANK, target_modules=("q_proj", "fc2"), seed=seed, lazy_steps=_LAZY_STEPS, max_rank=max_rank
    )
    attach(model, lora)
    return model


def _carriers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_used")]


def _trained(base: nn.Module, seed: int, steps: range) -> tuple[nn.Module, list[StepRecord]]:
    """Return a copy of a model after `steps`, and their records."""
    model = copy.deepcopy(base)
    options: dict[str, Any] = {"num_timed_steps": 0, "loss_dtype": "fp64", "seed": seed}
    with Session(tiny_plan(model, dtype="float64"), model, learning_rate=_RATE, **options) as session:
        session.start_at(steps.start)
        records = [session.step(batch) for batch in tiny_batches(steps.stop)[steps.start :]]
        session.flush()
    return model, records


def learnt_matrix_by_matrix(model: nn.Module, records: Sequence[StepRecord], seed: int) -> list[Tensor]:
    """Return what each adapted weight has moved by: ``-ηg·U·Aᵀ/√r``, step by step, from seeds alone."""
    modules = _carriers(model)
    moved = [torch.zeros_like(module.weight) for module in modules]
    for record in records:
        generator = torch.Generator().manual_seed(record.seeds[0])
        for number, module in enumerate(modules):
            left = sampled(module.lora_B.weight.shape, "gaussian", generator, _DOUBLE)
            key = chained(seed, record.step // _LAZY_STEPS, number)
            right = torch.randn(
                module.lora_A.weight.shape, generator=torch.Generator().manual_seed(key)
            ).double()
            moved[number] -= _RATE * record.projected_gradients[0] * (left @ right) / math.sqrt(_RANK)
    return moved


def check_intervals(context: Context) -> Outcome:
    """Compare increments after three intervals and a half with sums of matrices, whole and compacted, and a run cut at every step with one that is not."""
    seed, parts = context.seed, dict[str, Outcome]()
    for max_rank in (16, 4):
        base = _carrying(seed, max_rank)
        model, records = _trained(base, seed, range(_NUM_STEPS))
        off, size, most = 0.0, 0.0, 0.0
        for module, whole in zip(_carriers(model), learnt_matrix_by_matrix(base, records, seed), strict=True):
            inner, outer = (factor.detach() for factor in joined_factors(module))
            off = max(off, float((outer @ inner - whole).norm()))
            size = max(size, float(whole.norm()))
            most = max(most, float(module.lora_lost))
            parts[f"rank {max_rank}, error of {len(parts)}"] = at_most(
                float((outer @ inner - whole).norm()),
                float(module.lora_lost) + 1e-10 * size,
                what="error made, and reported",
            )
        if max_rank == 16:
            parts["all intervals"] = equal(
                1 + off / size, 1.0, what="1 + relative distance to the sum of steps"
            )
            parts["nothing is lost"] = is_true(most == 0, what="no error is reported")
        else:
            parts["compacted"] = exceeds(off, 1e-6 * size, what="distance to the sum of steps")
            intervals = lazy_intervals_of(model)
            assert intervals is not None
            parts["rank"] = equal(float(intervals.rank), 4.0, what="rank of all increments")
        if max_rank == 16:
            continue
        for begin in range(1, _NUM_STEPS):
            half, _ = _trained(base, seed, range(begin))
            rest, _ = _trained(half, seed, range(begin, _NUM_STEPS))
            pairs = zip(rest.state_dict().values(), model.state_dict().values(), strict=True)
            unlike = sum(not torch.equal(*pair) for pair in pairs)
            parts[f"cut after {begin} steps"] = is_true(unlike == 0, what=f"{unlike} tensors differ in a bit")
    return everything_holds(parts)


# -- versions and tenants ---------------------------------------------------------------------------------------------


def _adapted(seed: int) -> nn.Module:
    """Return the tiny model with an adapter that is not zero."""
    model = tiny_model("tied", _DOUBLE)
    attach(model, LoRA(rank=_RANK, target_modules=("q_proj", "fc2"), seed=seed, alpha=2.5 * _RANK))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(
                    0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                )
    return model


def _merged(seed: int | None) -> nn.Module:
    """Return the model of :func:`_adapted` with its adapter added to the weights; without a seed, the model without adapter."""
    if seed is None:
        return tiny_model("tied", _DOUBLE)
    model = _adapted(seed)
    merge_lora(model)
    return model


def _prompts(seed: int, num_shared: int = 0) -> list[tuple[int, ...]]:
    """Return prompts of unlike lengths that begin with the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(3, 48, (num_shared,), generator=generator).tolist()
    return [(*common, *torch.randint(3, 48, (length,), generator=generator).tolist()) for length in (5, 3, 4)]


@torch.no_grad()
def literal_scores(model: nn.Module, tokens: Sequence[int]) -> list[float]:
    """Return log-probabilities of all tokens but the first."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]


def check_versions(context: Context) -> Outcome:
    """Compare what a server scores with versions promoted, rolled back and refused, bit for bit with the same before, and with whole models."""
    parts: dict[str, Outcome] = {}
    runtime, prompts = Runtime(tiny_model("tied", _DOUBLE)), _prompts(context.seed)
    lines = [Example(tokens, (-100, *tokens[1:])) for tokens in prompts]

    def scores() -> list[list[float]]:
        name = "served" if "served" in runtime.adapters() else None
        return runtime.score([Request(tokens, 1, name) for tokens in prompts])

    def loss(seed: int | None) -> float:
        model = _merged(seed)
        each = [score for tokens in prompts for score in literal_scores(model, tokens)]
        return -math.fsum(each) / len(each)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for seed in (1, 2):
            save_adapters(_adapted(seed), path / f"adapter-{seed}")
        versions = Versions(path / "versions", runtime, "served")
        versions.keep("first", path / "adapter-1")
        versions.keep("second", path / "adapter-2")
        save_adapters(
            _adapted(3), path / "adapter-1"
        )  # tuning goes on and overwrites its files, which no kept version may notice
        before = scores()
        canary = versions.compare("first", lines)
        parts["losses"] = equal(
            [canary.served, canary.candidate],
            [loss(None), loss(1)],
            what="of the base and the candidate",
            tolerance=_SCORE,
        )
        parts["a comparison serves nothing"] = is_true(
            runtime.adapters() == () and scores() == before, what="the server is as it was"
        )
        versions.promote("first", lines, tolerance=math.inf)
        first = scores()
        versions.promote("second", lines, tolerance=math.inf)
        parts["another is served"] = is_true(scores() != first, what="scores are the second version's")
        refused = False
        try:
            versions.promote("first", lines, tolerance=-math.inf)
        except Exception:  # noqa: BLE001 - any refusal
            refused = True
        parts["what loses more is not served"] = is_true(
            refused and versions.served == "second", what="the second goes on being served"
        )
        versions.roll_back()
        parts["rolled back"] = is_true(scores() == first, what="the first version's scores, to the bit")
        parts["rolled back, the file"] = is_true(versions.served == "first", what="the file says so, too")
        versions.roll_back()
        parts["rolled back to the base"] = is_true(scores() == before, what="the base's scores, to the bit")
    whole = [score for tokens in prompts for score in literal_scores(_merged(1), tokens)]
    parts["the first version"] = equal(
        [score for row in first for score in row], whole, what="scores of the whole model", tolerance=_SCORE
    )
    return everything_holds(parts)


def check_tenants(context: Context) -> Outcome:
    """Compare scores and text of tenants in one forward with whole models', and one's scores beside several others bit for bit."""
    parts: dict[str, Outcome] = {}
    runtime, prompts = Runtime(tiny_model("tied", _DOUBLE)), _prompts(context.seed, num_shared=11 - 3)
    with tempfile.TemporaryDirectory() as folder:
        for seed in (1, 2, 3):
            save_adapters(_adapted(seed), Path(folder) / str(seed))
        runtime.load("one", Path(folder) / "1")
        beside = []
        for other in (2, 3):
            runtime.load("other", Path(folder) / str(other))
            tenants: list[tuple[str | None, int | None]] = [("other", other), ("one", 1), (None, None)]
            requests = [Request(tokens, 1, name) for tokens in prompts for name, _ in tenants]
            scores = runtime.score(requests)
            for place, (name, own) in enumerate(tenants):
                whole = [score for tokens in prompts for score in literal_scores(_merged(own), tokens)]
                parts[f"{name or 'the base'}, other {other}"] = equal(
                    [score for row in scores[place::3] for score in row],
                    whole,
                    what="scores",
                    tolerance=_SCORE,
                )
            # Few of many tokens are asked for: the last block leaves the others behind at its attention.
            few = runtime.score(
                [Request(tokens, len(tokens) - 2, name) for tokens in prompts for name, _ in tenants]
            )
            for place, (name, own) in enumerate(tenants):
                parts[f"{name or 'the base'}, other {other}, last tokens"] = equal(
                    [score for row in few[place::3] for score in row],
                    [score for tokens in prompts for score in literal_scores(_merged(own), tokens)[-2:]],
                    what="scores of the last two",
                    tolerance=_SCORE,
                )
            beside.append((scores[1::3], scores[2::3]))
            text = runtime.generate(prompts[:1], "one", max_new_tokens=3)[0]
            last = list(prompts[0])
            for token in text:
                with torch.no_grad():
                    wanted = int(_merged(1)(input_ids=torch.tensor([last])).logits[0, -1].argmax())
                parts[f"text beside {other}, token {len(last)}"] = is_true(
                    token == wanted, what="most probable"
                )
                last.append(token)
    parts["whoever else is there"] = is_true(beside[0] == beside[1], what="no bit of one's scores differs")
    return everything_holds(parts)


# -- rewards ----------------------------------------------------------------------------------------------------------

_PUSH = torch.tensor([0.6, -0.8, 0.0], dtype=_DOUBLE)
"""Perturbation, of length 1, along which a text changes."""


def _cost_of_text(x: Tensor) -> Tensor:
    """Return what a step minimises of two texts, each of which changes where a plane is crossed; one changes earlier."""
    along = float(_PUSH @ x)
    made = [[int(along > 0.3)], [int(along > 0.5)]]

    def reward(_prompts: Sequence[Any], texts: Sequence[Any]) -> list[float]:
        return [4.0 * text[0] for text in texts]

    return torch.tensor(mean_cost(reward, [[0], [0]], made, None), dtype=_DOUBLE)


_FINE = (np.arange(1200) + 0.5) / 100 - 6
"""Midpoints of cells on whose borders texts change."""


def _plane_nodes() -> tuple[Array, Array]:
    """Return perturbations in three dimensions and their weights: fine along the push, by Gauss and Hermite beside it."""
    beside, weights = normal_nodes(2, 2)
    across = np.array([[0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    nodes = np.concatenate([t * _PUSH.numpy()[None] + beside @ across for t in _FINE])
    return nodes, np.concatenate([probability * weights for probability in norm.pdf(_FINE) / 100])


def check_rewards(context: Context) -> Outcome:  # noqa: ARG001 - by quadrature
    """Compare mean and variance of the estimate of a reward that jumps with those of the smoothed reward's gradient."""
    epsilon, margins = 0.25, (0.3 / 0.25, 0.5 / 0.25)
    nodes = _plane_nodes()
    mean, square = moments_of_estimate(_cost_of_text, (0.0, 0.0, 0.0), epsilon, central=True, nodes=nodes)
    # Each text is worth 4/2 of the mean; the smoothed reward is the sum of 2·Φ(-m).
    slope = sum(2 * float(norm.pdf(m)) for m in margins) / epsilon
    near, far = margins
    # (R₊ - R₋)² is 4 between the planes and 16 behind both; two perturbations lie beside the push.
    tail = {m: float(norm.sf(m)) for m in margins}
    second = {m: m * float(norm.pdf(m)) + tail[m] for m in margins}
    along = (4 * (second[near] - second[far]) + 16 * second[far]) * 2
    across = (4 * (tail[near] - tail[far]) + 16 * tail[far]) * 2 * 2
    total = (along + across) / (4 * epsilon**2)
    return everything_holds(
        {
            "mean": equal(
                mean, -slope * _PUSH, what="E[ĝ], less the smoothed reward's gradient", tolerance=1e-3
            ),
            "second moment": equal(square, total, what="E|ĝ|²", tolerance=2e-3),
            "steps in vain": equal(
                sum(
                    float(norm.pdf(t)) / 100
                    for t in _FINE
                    if float(_cost_of_text(epsilon * t * _PUSH)) == float(_cost_of_text(-epsilon * t * _PUSH))
                ),
                1 - 2 * tail[near],
                what="probability that both signs say the same",
                tolerance=2e-3,
            ),
        }
    )


# -- replay -----------------------------------------------------------------------------------------------------------


def check_replayed(context: Context) -> Outcome:
    """Compare the increments that are made of a run's records alone with what the run did to its weights."""
    parts: dict[str, Outcome] = {}
    for distribution, rng in (
        ("lozo", "mezo"),
        ("factorised", "counter"),
        ("lozo-released", "mezo"),
    ):
        base = tiny_model("tied", _DOUBLE)
        attach(base, "linears")
        model = copy.deepcopy(base)
        plan = tiny_plan(
            model,
            dtype="float64",
            perturbations=Perturbations.model_validate(
                {"distribution": distribution, "rank": _RANK, "lazy_steps": _LAZY_STEPS, "rng": rng}
            ),
            estimator=Estimator(num_perturbations=2),
        )
        options: dict[str, Any] = {"num_timed_steps": 0, "loss_dtype": "fp64", "seed": context.seed}
        with Session(plan, model, learning_rate=lambda step: 0.1 / (step + 1), **options) as session:
            records = tuple(session.step(batch) for batch in tiny_batches(5))
            session.flush()
        state, updates = AdapterState(), _Updates(plan, copy.deepcopy(base))
        for record in records:
            updates.add_to(state, record, records)
        after, off, size = dict(model.named_parameters()), 0.0, 0.0
        for name, parameter in base.named_parameters():
            moved = after[name].detach() - parameter.detach()
            if name in state.increments:
                left, right = state.increments[name].joined()
                off = max(off, float((left @ right.T - moved).abs().max()))
                size = max(size, float(moved.abs().max()))
            else:
                off = max(off, float(moved.abs().max()))
        parts[f"{distribution}, {rng}"] = equal(
            1 + off / size, 1.0, what="1 + relative distance of the products"
        )
        intervals = -(-5 // _LAZY_STEPS) * 2
        if distribution != "lozo-released":
            increments = next(iter(state.increments.values()))
            parts[f"{distribution}, {rng}, increments"] = equal(
                float(increments.rank),
                float(intervals * _RANK),
                what="one for each interval and perturbation",
            )
    return everything_holds(parts)


# -- claims -----------------------------------------------------------------------------------------------------------

_INTERVALS = "executors.runs.lazy_intervals"
_VERSIONS = "executors.serving.versions:Versions"
_RUNTIME = "executors.serving.runtime:Runtime"
_JOINED = "executors.models.packing:joined"
_ADD_TO = "executors.runs.increments_of_run:_Updates.add_to"


@planted(f"{_INTERVALS}:LazyIntervals.open", "drawn anew before what was learnt is folded")
def sampled_before_folding(shipped, self, step, **named):
    self.draw(step // self.lazy_steps, **named)
    shipped(self, step, **named)


@planted(f"{_INTERVALS}:close_increment", "what was learnt is thrown away")
def thrown_away(shipped, module, closed_rank):
    shipped(module, closed_rank)
    module.lora_closed_B.data.zero_()


def left_by_closing(name: str, which: Callable[[Any], Tensor]) -> Fault:
    """Return a fault of an increment that is closed and leaves one of its tensors as it was."""

    @planted(f"{_INTERVALS}:close_increment", name)
    def fault(shipped, module, closed_rank):
        before = which(module).detach().clone()
        shipped(module, closed_rank)
        which(module).data.copy_(before)

    return fault


@planted(f"{_VERSIONS}.roll_back", "rolled back to itself")
def rolled_back_to_itself(shipped, self):
    history = self._history()
    return shipped(altered(self, _history=lambda: [*history, *history[-1:]]))


@planted(f"{_VERSIONS}.compare", "a candidate that stays")
def candidate_stays(shipped, self, version, examples):
    canary = shipped(self, version, examples)
    self.runner.load("candidate", self.directory / version)
    return canary


@planted(f"{_VERSIONS}.keep", "versions that are links")
def linked_versions(shipped, self, version, adapter):
    shipped(self, version, adapter)
    shutil.rmtree(self.directory / version)
    (self.directory / version).symlink_to(adapter.resolve())


@planted(f"{_VERSIONS}.compare", "candidate and served exchanged")
def exchanged(shipped, self, version, examples):
    canary = shipped(self, version, examples)
    return replace(canary, served=canary.candidate, candidate=canary.served)


def narrowed_rows(name: str, begin: int, end: int) -> Fault:
    """Return a fault of narrowed rows that begin and end elsewhere, where they are several."""

    @planted("executors.models.batched:_Narrowing.positions", name)
    def fault(shipped, self, whole):
        place = shipped(self, whole)
        return slice(place.start + begin, place.stop + end) if place.stop - place.start > 1 else place

    return fault


@planted("executors.serving.peft:read_adapter", "an alpha that is read a fifth too small")
def alpha_read_short(shipped, directory, shapes):
    adapter = shipped(directory, shapes)
    return replace(
        adapter, factors={path: (inner, 0.8 * outer) for path, (inner, outer) in adapter.factors.items()}
    )


@planted(_JOINED, "keys of another tenant")
def keys_of_another(shipped, packings):
    row, places = shipped(packings)
    own = [group.keys for packing in packings for group in packing.groups]
    groups = (replace(group, keys=keys) for group, keys in zip(row.groups, own, strict=True))
    return replace(row, groups=tuple(groups)), places


@planted(_JOINED, "increments that reach the tokens before")
def increments_reach_before(shipped, packings):
    row, places = shipped(packings)
    return row, [slice(0, place.stop) for place in places]


@planted(_JOINED, "predictions of another tenant")
def predictions_of_another(shipped, packings):
    row, places = shipped(packings)
    return replace(row, predictors=torch.cat([packing.predictors for packing in packings])), places


def for_adapters(name: str, chosen: Callable[[str, str | None], str]) -> Fault:
    """Return a fault of a server that takes requests for other adapters, given its first one and each request's own."""

    @planted(f"{_RUNTIME}.score", name)
    def fault(shipped, self, requests):
        first = self.adapters()[0]
        return shipped(self, [replace(one, adapter=chosen(first, one.adapter)) for one in requests])

    return fault


@planted(f"{_RUNTIME}._predicting", "answers to another tenant")
def answers_to_another(shipped, self, requests):
    order, *rest = shipped(self, requests)
    return sorted(order), *rest


@planted(_ADD_TO, "a sum of perturbations for their mean")
def perturbations_of_records_summed(shipped, self, state, record, records):
    rate = record.learning_rate * self._plan.estimator.num_perturbations
    shipped(self, state, replace(record, learning_rate=rate), records)


def with_family(name: str, target: str, **traits: object) -> Fault:
    """Return a fault of replayed updates whose perturbations are taken for others."""

    @planted(target, name)
    def fault(shipped, self, *given):
        return shipped(altered(self, _distribution=replace(self._distribution, **traits)), *given)

    return fault


CHECKS: Checks = {
    "zoinfer-fold-before-the-redraw": printed(
        check_intervals,
        sampled_before_folding,
        thrown_away,
        left_by_closing("a factor that is not emptied", lambda module: module.lora_B.weight),
        called_with(
            f"{_INTERVALS}:LazyIntervals.opens", "an interval one step late", step=lambda step: step - 1
        ),
        left_by_closing("an error that is not reported", lambda module: module.lora_lost),
        called_with(
            f"{_INTERVALS}:LazyIntervals.stand_at",
            "closed increments that a resumed run does not read",
            step=0,
        ),
        called_with(f"{_INTERVALS}:LazyIntervals.draw", "one V for all intervals", interval=0),
        called_with(
            "executors.models.lora:joined_factors",
            "folded without the scale",
            module=lambda module: altered(module, lora_scale=1.0),
        ),
    ),
    "versions-come-back-to-the-bit": printed(
        check_versions,
        rolled_back_to_itself,
        called_with(
            f"{_VERSIONS}.roll_back",
            "a history that stays",
            self=lambda it: altered(it, _write=lambda _history: None),
        ),
        candidate_stays,
        linked_versions,
        Fault(
            "served whatever it loses",
            f"{_VERSIONS}.promote",
            lambda shipped, self, version, examples, **_tolerance: shipped(
                self, version, examples, tolerance=math.inf
            ),
        ),
        exchanged,
    ),
    "tenants-see-their-own-increments": printed(
        check_tenants,
        narrowed_rows("narrowed rows one too far", 1, 1),
        narrowed_rows("narrowed rows one short", 0, -1),
        alpha_read_short,
        Fault(
            "an alpha that is written as twice the rank",
            "executors.models.lora:write_peft",
            lambda shipped, *given, **named: shipped(*given, **{**named, "alpha": 2.0 * named["rank"]}),
        ),
        keys_of_another,
        increments_reach_before,
        predictions_of_another,
        for_adapters("the base beside a tenant's increments", lambda first, own: own or first),
        for_adapters("beginnings shared between tenants", lambda first, _own: first),
        answers_to_another,
    ),
    "zoinfer-rewards-of-a-candidate": printed(
        check_rewards,
        scaled("executors.datasets.rewards:mean_cost", -1, "a reward that is minimised"),
        Fault(
            "a sum for a mean",
            "executors.datasets.rewards:mean_cost",
            lambda shipped, reward, prompts, made, decode: shipped(reward, prompts, made, decode) * len(made),
        ),
        central_by_epsilon,
    ),
    "adapters-replay-their-run": printed(
        check_replayed,
        called_with(
            _ADD_TO,
            "against the gradient",
            record=lambda record: replace(record, learning_rate=-record.learning_rate),
        ),
        perturbations_of_records_summed,
        Fault(
            "V of the step itself",
            _ADD_TO,
            lambda shipped, self, state, record, records: shipped(
                self, state, record, (record,) * len(records)
            ),
        ),
        with_family("without the rank", _ADD_TO, rank_power=0.0, update_rank_power=0.0),
        with_family(
            "the released refresh taken for a plain one",
            "executors.runs.increments_of_run:_Updates._factors",
            is_resampled=False,
        ),
    ),
}
