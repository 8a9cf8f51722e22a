"""Ranks that are processes compute what one does, bit for bit; how ranks share a step in all other ways, the matrix holds."""

from __future__ import annotations

import json
from math import prod

import pytest

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
QUICK = ("pertp-sliced", "ddp-shared", "2d-two-hosts")
UNEQUAL = CASES.pop("ddp-unequal")


def found(case):
    """Return what all ranks find, each a process."""
    first, *others = launch(distributed.run_cases, {"it": case}, world_size=prod(_shape(case)))["it"]
    assert len(others) == prod(_shape(case)) - 1
    assert all(other == first for other in others)
    return first


def _shape(case):
    return case["mesh"].get("data", 1), case["mesh"].get("perturb", 1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_ranks_together_equal_a_rank_alone(name):
    """A rank alone accumulates over as many micro-batches as there are shards."""
    case = CASES[name]
    plan = distributed.plan_for(case, alone=True)
    alone = distributed.trained(case, plan, num_micro_batches=_shape(case)[0])
    assert found(case) == json.loads(json.dumps(alone))


def test_unequal_shards_count_by_their_labels():
    """The reference is the literal loop, its loss the mean over all labels, part by part in float64."""
    model, shards = model_of("opt"), 2

    def loss(batch):
        parts = [{k: v.chunk(shards)[i] for k, v in batch.items()} for i in range(shards)]
        counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        assert len(set(counts)) > 1
        return accumulated([model(**part).loss for part in parts], counts)

    loop = LiteralMezo(model, epsilon=1e-3, weight_decay=DECAY, loss=loss)
    of_ranks = found(UNEQUAL)
    for step, batch in enumerate(distributed.lines_for(UNEQUAL)):
        ((plus, minus, g),) = loop.step(batch, [seed_of(SEED, step, 0)], RATE)
        assert of_ranks["steps"][step] == [[plus], [minus], None, [g]]
    assert of_ranks["digest"] == weights_digest(model)
