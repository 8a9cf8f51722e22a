"""Directions kept from their draw to their update: the same bits as drawing them again, from fewer draws."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_executors_parity import execution_order

from costmodel.models.configs import LoRA, Prefix
from executors.models.lora import attach_lora
from executors.models.prefix import attach_prefix
from executors.runs.records import StepRecord
from executors.runs.session import Session
from tests.support.command import rows_of, saved_lines, saved_model, zosim
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import Hazard
from zosim.lowering import lower
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.instructions import Space
from zosim.program.operations import Draw, Update
from zosim.program.validate import validate

PLACEMENTS = {
    "sweep": {"schedule": {"traversal": "sweep"}},
    "resident": {},
    "draw-ahead": {"directions": {"drawn_ahead": True}},
    "delayed": {"schedule": {"update": "delayed"}},
    "delayed-draw-ahead": {"directions": {"drawn_ahead": True}, "schedule": {"update": "delayed"}},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
    "offloaded-immediate": {"residency": {"blocks": "offloaded", "num_slots": 1}},
    "copies": {"weights": {"perturbation": "copies"}},
}


@pytest.fixture(scope="module")
def model():
    return model_of("opt")


SHAPES = ("opt", "opt-untied", "llama", "llama-tied", "gpt2")
DECAY, RATE = 0.1, 1e-2


def keeping(placement, kept=True):
    return placement | {"directions": placement.get("directions", {}) | {"kept": kept}}


def plan_for(placement, model, *, kept=True, estimator=None, directions=None):
    axes = keeping(PLACEMENTS[placement], kept)
    axes["directions"] |= directions or {}
    return plan_of(model, estimator=estimator or {}, **axes)


def trained(plan: Plan, model, *, steps=3, flush_at=(), **options) -> list[tuple[object, ...]]:
    """Train `model` and return what every step found."""
    found: list[tuple[object, ...]] = []
    with Session(
        plan, model, learning_rate=lambda step: RATE / (step + 1), weight_decay=DECAY, **options
    ) as session:
        for step, batch in enumerate(batches(steps)):
            record = session.step(batch)
            found.append(
                (record.losses_plus, record.losses_minus, record.loss_base, record.projected_gradients)
            )
            if step in flush_at:
                session.flush()
        session.flush()
    return found


PRODUCT = list(itertools.product(SHAPES, PLACEMENTS, ["registration", "execution"]))


@pytest.mark.crossed(quick=3, slow=4)
@pytest.mark.parametrize(
    ("name", "placement", "order"),
    [pytest.param(*case, marks=() if n % 11 == 0 else pytest.mark.slow) for n, case in enumerate(PRODUCT)],
)
def test_kept_directions_equal_the_literal_loop(name, placement, order):
    reference = model_of(name)
    model, start = copy.deepcopy(reference), copy.deepcopy(reference)
    walk = execution_order if order == "execution" and name != "gpt2" else None
    weights = PLACEMENTS[placement].get("weights", {}).get("perturbation", "serial")
    loop = LiteralMezo(reference, epsilon=1e-3, weight_decay=DECAY, walk=walk, weights=weights)
    order = order if walk else "registration"
    plan = plan_for(placement, model, directions={"order": order})
    with Session(plan, model, learning_rate=lambda step: RATE / (step + 1), weight_decay=DECAY) as session:
        for step, batch in enumerate(batches(4)):
            record = session.step(batch)
            ((plus, minus, g),) = loop.step(batch, record.seeds, RATE / (step + 1))
            assert (record.losses_plus[0], record.losses_minus[0], record.projected_gradients[0]) == (
                plus,
                minus,
                g,
            )
        session.flush()
    assert differing(reference, model) == []
    assert len(differing(start, model)) == len(list(model.parameters()))


ESTIMATORS = {
    "two-queries": {"estimator": {"num_queries": 2}},
    "forward": {"estimator": {"difference": "forward", "num_queries": 2}},
    "counter": {"directions": {"rng": "counter"}},
    "counter-queries": {"estimator": {"num_queries": 3}, "directions": {"rng": "counter"}},
    "signs": {"directions": {"rng": "counter", "distribution": "rademacher"}},
    "walked-signs": {"estimator": {"num_queries": 2}, "directions": {"distribution": "rademacher"}},
}


@pytest.mark.crossed(quick=4, slow=4)
@pytest.mark.parametrize(
    ("placement", "name"),
    [
        pytest.param(*case, marks=() if n % 7 == 0 else pytest.mark.slow)
        for n, case in enumerate(itertools.product(PLACEMENTS, ESTIMATORS))
    ],
)
def test_kept_directions_equal_those_drawn_again(placement, name):
    kept, again, axes = model_of("opt"), model_of("opt"), ESTIMATORS[name]
    options = {"num_draw_threads": 2, "flush_at": (1,)}
    found = trained(plan_for(placement, kept, **axes), kept, **options)
    assert found == trained(plan_for(placement, again, kept=False, **axes), again, **options)
    assert differing(kept, again) == []


@pytest.mark.parametrize(
    ("placement", "dtype"), [("resident", "bfloat16"), ("offloaded", "float16"), ("offloaded", "float64")]
)
def test_other_formats_equal_those_drawn_again(placement, dtype):
    models = [model_of("llama-tied", getattr(torch, dtype)) for _ in range(2)]
    plans = [
        plan_of(model, dtype=dtype, **keeping(PLACEMENTS[placement], kept))
        for model, kept in zip(models, (True, False), strict=True)
    ]
    found = [trained(plan, model) for plan, model in zip(plans, models, strict=True)]
    assert found[0] == found[1]
    assert differing(*models) == []


@pytest.mark.parametrize("tuned", ["adapters", "prefix"])
@pytest.mark.parametrize("placement", ["resident", "offloaded"])
def test_what_is_tuned_beside_a_base_is_kept_alone(placement, tuned):
    models = [model_of("opt") for _ in range(2)]
    for model in models:
        if tuned == "adapters":
            attach_lora(model, LoRA(rank=2, target_modules=("q_proj", "v_proj"), seed=3))
        else:
            attach_prefix(model, Prefix(num_tokens=3, seed=3))
    plans = [plan_for(placement, model, kept=kept) for model, kept in zip(models, (True, False), strict=True)]
    found = [trained(plan, model) for plan, model in zip(plans, models, strict=True)]
    assert found[0] == found[1]
    assert differing(*models) == []
    buffers = [buffer for buffer in lower(plans[0]).buffers if buffer.role == "directions"]
    assert sum(buffer.size_bytes for buffer in buffers) < sum(g.num_parameters for g in plans[0].model.groups)


def test_micro_batches_share_a_kept_direction():
    kept, again = model_of("opt"), model_of("opt")
    found = trained(plan_for("resident", kept), kept, num_micro_batches=3)
    assert found == trained(plan_for("resident", again, kept=False), again, num_micro_batches=3)
    assert differing(kept, again) == []


@pytest.mark.parametrize(
    ("placement", "rng"), [("resident", "mezo"), ("delayed", "counter"), ("offloaded", "mezo")]
)
def test_a_replay_with_kept_directions_rebuilds_a_run_without(placement, rng):
    ran, replayed = model_of("opt"), model_of("opt")
    records: list[StepRecord] = []
    with Session(
        plan_for(placement, ran, kept=False, directions={"rng": rng}), ran, learning_rate=RATE, seed=3
    ) as session:
        records += [session.step(batch) for batch in batches(4)]
        session.flush()
    with Session(
        plan_for(placement, replayed, directions={"rng": rng}), replayed, learning_rate=RATE, seed=3
    ) as session:
        for record in records:
            session.replay(record)
        session.flush()
    assert differing(ran, replayed) == []


def draws(program: Program) -> Counter[tuple[str, int]]:
    drawn = [i.op for _, i in program.instructions() if isinstance(i.op, Draw)]
    return Counter((op.group, op.query) for op in drawn if op.keep != "none")


@pytest.mark.parametrize(("queries", "rng"), [(1, "mezo"), (3, "mezo"), (1, "counter")])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_direction_is_drawn_once(model, placement, queries, rng):
    program = lower(plan_for(placement, model, estimator={"num_queries": queries}, directions={"rng": rng}))
    validate(program)
    groups = [group for group in plan_of(model).model.groups if group.num_trainable]
    assert draws(program) == {(group.name, query): 1 for group in groups for query in range(queries)}
    assert not [i for i in program.flush if isinstance(i.op, Draw)]
    kept = [buffer for buffer in program.buffers if buffer.role == "directions"]
    assert {buffer.name for buffer in kept} == {
        f"directions.{group.name}.q{query}" for group in groups for query in range(queries)
    }
    # The generator's state is kept where the walk has passed a group that is drawn later: OPT's final norm.
    states = [
        buffer for buffer in program.buffers if buffer.name.startswith("rng.") and "head" not in buffer.name
    ]
    assert len(states) == (queries if rng == "mezo" else 0)


@pytest.mark.parametrize("placement", ["resident", "delayed", "offloaded"])
def test_the_memory_that_is_planned_is_what_is_taken(placement):
    model = model_of("opt")
    plan = plan_for(placement, model, estimator={"num_queries": 2})
    planned = sum(buffer.size_bytes for buffer in lower(plan).buffers if buffer.role == "directions")
    weights = sum(4 * group.num_trainable for group in plan.model.groups)
    with Session(plan, model) as session:
        session.step(batches(1)[0])
        taken = session.memory().arena_bytes[Space.DEVICE, "directions"]
    assert taken == planned
    tensors = sum(group.num_trainable_tensors for group in plan.model.groups)
    assert 2 * weights <= planned <= 2 * (weights + 64 * (tensors + len(plan.model.groups)))


@pytest.mark.parametrize("placement", ["resident", "delayed"])
def test_a_direction_that_is_overwritten_before_its_last_reader_is_a_hazard(placement):
    program = lower(plan_for(placement, model_of("opt"), directions={"rng": "counter"}))
    step = list(program.step)
    update = next(k for k, i in enumerate(step) if isinstance(i.op, Update) and i.op.group == "block.1")
    redraw = next(i for i in step if isinstance(i.op, Draw) and i.op.group == "block.1")
    other = replace(redraw, id="too-early", writes=tuple(replace(a, step=1) for a in redraw.writes))
    with pytest.raises(Hazard, match=r"block\.1/update.* needs z:block\.1"):
        validate(replace(program, step=(*step[:update], other, *step[update:])))


def test_a_direction_that_another_stream_draws_waits_for_the_update_before():
    program = lower(plan_for("delayed-draw-ahead", model_of("opt")))
    position = next(k for k, i in enumerate(program.step) if i.id == "block.1/draw[q0]")
    assert program.step[position].after
    for edge in program.step[position].after:
        kept = tuple(other for other in program.step[position].after if other != edge)
        freed = replace(program.step[position], after=kept)
        with pytest.raises(Hazard, match="nothing orders"):
            validate(replace(program, step=(*program.step[:position], freed, *program.step[position + 1 :])))


def test_a_run_that_keeps_directions_goes_on_without_and_is_replayed(tmp_path):
    model, data = saved_model("opt", tmp_path), tmp_path / "data.jsonl"
    saved_lines(data)
    out, plain = tmp_path / "out", tmp_path / "plain"
    common = (
        "run",
        "--model",
        model,
        "--data",
        data,
        "--batch",
        2,
        "--lr",
        1e-2,
        "--threads",
        1,
        "--no-launch",
    )
    offloaded = ("--residency", "offloaded", "--digest-every", 2)
    assert zosim(*common, *offloaded, "--out", plain, "--steps", 6) == 0
    assert zosim(*common, *offloaded, "--out", out, "--steps", 3, "--keep-directions") == 0
    header = json.loads((out / "run.json").read_text())
    assert header["plan"]["directions"]["kept"] is True
    assert zosim("run", "--out", out, "--resume", "--steps", 6, "--no-keep-directions", "--no-launch") == 0
    assert [row["loss_plus"] for row in rows_of(out)] == [row["loss_plus"] for row in rows_of(plain)]
    assert zosim("replay", out, "--model", model, "-o", tmp_path / "again") == 0
    found = [load_file(folder / "model.safetensors") for folder in (plain, out, tmp_path / "again")]
    assert all(
        bool((tensor == found[0][name]).all()) for other in found[1:] for name, tensor in other.items()
    )
