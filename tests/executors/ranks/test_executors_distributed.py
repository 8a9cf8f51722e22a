"""Ranks that are processes compute what one does, bit for bit; how ranks share a step in all other ways, the matrix holds."""

from __future__ import annotations

import json

import pytest
import torch

from executors.models.weight_files import weights_digest
from executors.ranks.launch import launch
from executors.runs.records import seed_of
from executors.steps.micro_batches import accumulated
from tests.support import distributed
from tests.support.distributed import DECAY, FOURS, PAIRS, RATE, SEED
from tests.support.reference_mezo import LiteralMezo
from tests.support.tiny import model_of

pytestmark = pytest.mark.dist

CASES = PAIRS | FOURS
UNEQUAL = [name for name, case in CASES.items() if case.get("batch", 4) % case["mesh"].get("data", 1)]


@pytest.fixture(scope="module")
def found():
    """Run all cases in two launches: what costs time is starting processes."""
    pairs, fours = (
        launch(distributed.run_cases, cases, world_size=n) for n, cases in ((2, PAIRS), (4, FOURS))
    )
    return pairs | fours


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_find_the_same(found, name):
    first, *others = found[name]
    assert len(others) == CASES[name]["mesh"].get("data", 1) * CASES[name]["mesh"].get("perturb", 1) - 1
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNEQUAL])
def test_ranks_together_equal_a_rank_alone(found, name):
    """A rank alone accumulates over as many micro-batches as there are shards."""
    torch.set_num_threads(1)
    case = CASES[name]
    plan, shards = distributed.plan_for(case, alone=True), case["mesh"].get("data", 1)
    alone = distributed.trained(case, plan, num_micro_batches=shards)
    assert found[name][0] == json.loads(json.dumps(alone))


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_shards_count_by_their_labels(found, name):
    """The reference is the literal loop, its loss the mean over all labels, part by part in float64."""
    torch.set_num_threads(1)
    case = CASES[name]
    model, shards = model_of(case.get("model", "opt")), case["mesh"]["data"]

    def loss(batch):
        parts = [{k: v.chunk(shards)[i] for k, v in batch.items()} for i in range(shards)]
        counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        assert len(set(counts)) > 1
        return accumulated([model(**part).loss for part in parts], counts)

    loop = LiteralMezo(model, epsilon=1e-3, weight_decay=DECAY, loss=loss)
    for step, batch in enumerate(distributed.lines_for(case)):
        ((plus, minus, g),) = loop.step(batch, [seed_of(SEED, step, 0)], RATE)
        assert found[name][0]["steps"][step] == [[plus], [minus], None, [g]]
    assert found[name][0]["digest"] == weights_digest(model)
