"""Fifty steps and more against the literal loop: every loss, every projected gradient, every weight, bit for bit.

What a run can be asked for has eight axes here. Quick runs cover every pair of values, a few for fifty steps; all of them for as
many, and the full product, are slow. Others have fewer steps: what a combination gets wrong shows in the first, or in the
one after it, whose weights it made.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from costmodel.models.configs import LoRA, Prefix
from executors.models.lora import attach_lora
from executors.models.prefix import attach_prefix
from executors.runs.learning_rate import LearningRate
from executors.runs.session import Session
from tests.support.reference_mezo import CachedPrefix, LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of

NUM_STEPS, NUM_STEPS_OF_OTHERS, NUM_STEPS_OF_EVERY = 52, 8, 4
WARMUP_STEPS = 2
AXES = {
    "shape": ("opt", "opt-untied", "llama", "llama-tied"),
    "dtype": ("float32", "bfloat16", "float64"),
    "tuned": ("all", "adapters", "prefix"),
    "placement": ("sweep", "resident", "offloaded"),
    "order": ("registration", "execution"),
    "weights": ("serial", "copies"),
    "decay": (0.0, 0.1),
    "rate": ("constant", "linear", "cosine"),
}
PLACEMENTS = {
    "sweep": {"schedule": {"traversal": "sweep"}},
    "resident": {},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
}
LORA = LoRA(rank=2, target_modules=("q_proj", "v_proj"), seed=3)
BASE_RATE = 1e-3


PRODUCT = list(itertools.product(*AXES.values()))


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def covering_cases():
    """Return cases that together hold every pair of values, each the one with most pairs still missing."""
    pairs = {case: pairs_of(case) for case in PRODUCT}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(PRODUCT, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


COVERING = covering_cases()


def words(case):
    return "-".join(map(str, case))


def rate_at(kind, step, num_steps):
    """Return the learning rate as the formulas have it, with some steps of warm-up under cosine."""
    if kind == "constant":
        return BASE_RATE
    if kind == "linear":
        return BASE_RATE * (1 - step / num_steps)
    if step < WARMUP_STEPS:
        return BASE_RATE * ((step + 1) / (WARMUP_STEPS + 1))
    part = (step - WARMUP_STEPS) / (num_steps - WARMUP_STEPS)
    return BASE_RATE * ((1 + math.cos(math.pi * part)) / 2)


def execution_order(named):
    """Draw what the head alone reads after the blocks, wherever it is registered."""
    late = [pair for pair in named if "final_layer_norm" in pair[0] and "layers" not in pair[0]]
    late += [pair for pair in named if "lm_head" in pair[0]]
    names = {name for name, _ in late}
    return [pair for pair in named if pair[0] not in names] + late


def prefix_parts(model):
    return [p for name, p in model.named_parameters() if name.endswith(("prefix_keys", "prefix_values"))]


def assert_parity(shape, dtype, tuned, placement, order, weights, decay, rate, *, num_steps):
    reference = model_of(shape, getattr(torch, dtype), num_hidden_layers=2)
    if tuned == "adapters":
        attach_lora(reference, LORA)
    model = copy.deepcopy(reference)
    if tuned == "prefix":
        attach_prefix(model, Prefix(num_tokens=3, seed=3))
        reference = CachedPrefix(reference, prefix_parts(model))
    start = copy.deepcopy(model)
    loop = LiteralMezo(
        reference,
        epsilon=1e-3,
        weight_decay=decay,
        weights=weights,
        walk=execution_order if order == "execution" else None,
    )
    placed = PLACEMENTS[placement] | {"weights": {"perturbation": weights}}
    plan = plan_of(model, size=2, seq=6, dtype=dtype, directions={"order": order}, **placed)
    warmup_steps = WARMUP_STEPS if rate == "cosine" else 0
    schedule = LearningRate(
        kind=rate, learning_rate=BASE_RATE, num_steps=num_steps, warmup_steps=warmup_steps
    )
    with Session(plan, model, learning_rate=schedule.at, weight_decay=decay, seed=11) as session:
        for step, batch in enumerate(batches(num_steps, size=2, seq=6)):
            record = session.step(batch)
            ((plus, minus, g),) = loop.step(batch, record.seeds, rate_at(rate, step, num_steps))
            found = (record.losses_plus[0], record.losses_minus[0], record.projected_gradients[0])
            assert found == (plus, minus, g), f"step {step}"
        session.flush()
    if tuned == "prefix":
        assert all(torch.equal(*pair) for pair in zip(prefix_parts(model), reference.parts, strict=True))
    else:
        assert differing(reference, model) == []
    assert differing(start, model) == [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.crossed(slow=3)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=words(case), marks=() if number < 3 else pytest.mark.slow)
        for number, case in enumerate(COVERING)
    ],
)
def test_fifty_steps_equal_the_literal_loop_bit_for_bit(case):
    assert_parity(*case, num_steps=NUM_STEPS)


@pytest.mark.parametrize("case", COVERING[3:], ids=words)
def test_steps_of_every_pair_of_values_equal_the_literal_loop_bit_for_bit(case):
    assert_parity(*case, num_steps=NUM_STEPS_OF_OTHERS)


@pytest.mark.crossed(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("shape", AXES["shape"])
def test_the_first_steps_of_every_combination_equal_the_literal_loop_bit_for_bit(shape, dtype):
    for case in PRODUCT:
        if case[:2] == (shape, dtype):
            assert_parity(*case, num_steps=NUM_STEPS_OF_EVERY)


def test_every_pair_of_values_is_covered():
    assert set().union(*map(pairs_of, COVERING)) == set().union(*map(pairs_of, PRODUCT))
    assert len(COVERING) < 30
