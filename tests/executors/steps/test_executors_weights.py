"""How weights come to a point: copies leave every bit of the weights alone, serial weights drift; both equal their literal loop."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from test_executors_parity import execution_order

from costmodel.models.configs import LoRA
from executors.models.lora import attach_lora
from executors.runs.session import Session
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import ProgramError
from zosim.lowering import lower
from zosim.program.instructions import Dependency, Space, Stream
from zosim.program.operations import Draw, Perturb, Update
from zosim.program.validate import validate

PLACEMENTS = {
    "sweep": {"schedule": {"traversal": "sweep"}},
    "resident": {},
    "resident-delayed": {"schedule": {"update": "delayed"}},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
    "offloaded-immediate": {"residency": {"blocks": "offloaded", "num_slots": 1}},
    "offloaded-fresh-slots": {"residency": {"blocks": "offloaded", "reuse_slots": False}},
    "kept": {"directions": {"kept": True}},
    "sweep-kept": {"directions": {"kept": True}, "schedule": {"traversal": "sweep"}},
}
AHEAD = {f"{name}-ahead": placement | {"directions": placement.get("directions", {}) | {"drawn_ahead": True}}
         for name, placement in PLACEMENTS.items()}  # fmt: skip
PLACEMENTS |= AHEAD
EDGES = {"residency": {"blocks": "offloaded", "edges": "offloaded"}, "schedule": {"update": "delayed"}}
QUICK = ("sweep", "resident-delayed", "offloaded-ahead", "sweep-kept-ahead")
DECAY, RATE = 0.1, 1e-2


def weighing(placement, how="copies"):
    return placement | {"weights": {"perturbation": how}}


def some(*values, quick=False):
    """Return a case of a parametrised test, slow unless it is quick."""
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


def root_mean_square_drift(dtype, how, placement, *, steps=6):
    """Return how far the weights are from where they began after steps at learning rate 0."""
    model = model_of("opt", getattr(torch, dtype))
    start = copy.deepcopy(model)
    plan = plan_of(model, dtype=dtype, **weighing(placement, how))
    with Session(plan, model, learning_rate=0.0) as session:
        for batch in batches(steps):
            session.step(batch)
        session.flush()
    theirs = dict(start.named_parameters())
    squares = [(p.double() - theirs[name].double()).square().mean() for name, p in model.named_parameters()]
    return (sum(squares) / len(squares)).sqrt().item(), differing(start, model)


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        *(some(name, "bfloat16", quick=name in QUICK) for name in PLACEMENTS),
        some("resident", "float32"),
        some("offloaded", "float32", quick=True),
    ],
)
def test_copies_drift_by_nothing_and_serial_weights_by_roundings(placement, dtype):
    placement = PLACEMENTS[placement]
    assert root_mean_square_drift(dtype, "copies", placement) == (0.0, [])
    drift, changed = root_mean_square_drift(dtype, "serial", placement)
    # A rounding is off by 2^-25 (float32) or 2^-9 (bfloat16) of a weight at most; weights here are 0.05 to 1.
    unit = {"float32": 2**-25, "bfloat16": 2**-9}[dtype]
    assert 0.05 * unit < drift < 3 * 6 * unit
    assert len(changed) > 20


ESTIMATORS = {
    "central": {},
    "three-queries": {"num_queries": 3},
    "forward": {"difference": "forward"},
    "forward-queries": {"difference": "forward", "num_queries": 3},
}
SHAPES = ("opt", "opt-untied", "llama-tied", "gpt2")
PRODUCT = list(itertools.product(SHAPES, PLACEMENTS, ESTIMATORS, ["registration", "execution"]))


def assert_literal(plan, model, loop, *, steps=3):
    """Train, and compare every loss, projected gradient and weight with a literal loop."""
    with Session(plan, model, learning_rate=lambda step: RATE / (step + 1), weight_decay=DECAY) as session:
        for step, batch in enumerate(batches(steps)):
            record = session.step(batch)
            expected = loop.step(batch, record.seeds, RATE / (step + 1))
            others = record.losses_minus or (record.loss_base,) * len(expected)
            found = zip(record.losses_plus, others, record.projected_gradients, strict=True)
            assert list(found) == expected, f"step {step}"
        session.flush()
    assert differing(loop.model, model) == []


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("shape", "placement", "estimator", "order"),
    [some(*case, quick=n % 37 == 0) for n, case in enumerate(PRODUCT)],
)
def test_copies_equal_the_literal_loop(shape, placement, estimator, order):
    reference = model_of(shape)
    model, estimator = copy.deepcopy(reference), ESTIMATORS[estimator]
    is_walked = order == "execution" and shape != "gpt2"
    loop = LiteralMezo(
        reference,
        epsilon=1e-3,
        weight_decay=DECAY,
        walk=execution_order if is_walked else None,
        central="difference" not in estimator,
        weights="copies",
    )
    axes = weighing(PLACEMENTS[placement])
    walked = axes.get("directions", {}) | {"order": order if is_walked else "registration"}
    assert_literal(plan_of(model, **axes | {"estimator": estimator, "directions": walked}), model, loop)


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("placement", ["resident", "sweep-ahead", "offloaded-ahead"])
def test_other_formats_and_adapters_equal_the_literal_loop(placement, dtype):
    reference = model_of("opt", getattr(torch, dtype))
    if dtype == "float64":
        attach_lora(reference, LoRA(rank=2, target_modules=("q_proj", "v_proj"), seed=3))
    model = copy.deepcopy(reference)
    loop = LiteralMezo(reference, epsilon=1e-3, weight_decay=DECAY, weights="copies")
    plan = plan_of(model, dtype=dtype, estimator={"num_queries": 2}, **weighing(PLACEMENTS[placement]))
    assert_literal(plan, model, loop)


@pytest.mark.parametrize("direction", ["gaussian", "rademacher"])
def test_a_keyed_stream_gives_the_same_copies_under_every_placement(direction):
    """Each point is made of the weights and one direction alone, so that nothing depends on what was visited before."""
    found = []
    for placement in map(PLACEMENTS.get, QUICK):
        model = model_of("opt")
        axes = weighing(placement)
        axes["directions"] = axes.get("directions", {}) | {"rng": "counter", "distribution": direction}
        with Session(plan_of(model, estimator={"num_queries": 2}, **axes), model, learning_rate=RATE) as s:
            losses = [(r.losses_plus, r.losses_minus) for r in map(s.step, batches(2))]
            found.append((losses, s.digest()))
    assert all(one == found[0] for one in found)


def test_points_are_theta_plus_and_minus_one_product_rounded_once():
    """The serial minus point is reached from the rounded plus point, and differs in last bits; the plus points are equal."""
    losses = []
    for how in ("serial", "copies"):
        model = model_of("opt", torch.bfloat16)
        plan = plan_of(model, dtype="bfloat16", **weighing({}, how))
        with Session(plan, model, learning_rate=RATE) as session:
            record = session.step(batches(1)[0])
            losses.append((record.losses_plus, record.losses_minus))
    serial, copies = losses
    assert serial[0] == copies[0]
    assert serial[1] != copies[1]


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), EDGES], ids=[*PLACEMENTS, "offloaded-edges"])
@pytest.mark.parametrize("queries", [1, 3])
def test_programs_hold_the_copies_that_they_name_and_one_sweep_less(placement, queries):
    model = model_of("opt-untied")
    plans = [
        plan_of(model, estimator={"num_queries": queries}, **weighing(placement, how))
        for how in ("serial", "copies")
    ]
    serial, copied = map(lower, plans)
    validate(copied)
    assert all(buffer.role != "copies" for buffer in serial.buffers)
    sizes = {buffer.name: buffer.size_bytes for buffer in copied.buffers if buffer.role == "copies"}
    is_sweep = plans[1].schedule.traversal == "sweep"
    assert len(sizes) == 2 if is_sweep or plans[1].directions.drawn_ahead else 1
    touched = {a.buffer for i in copied.step for a in (*i.reads, *i.writes) if a.buffer in sizes}
    assert touched == set(sizes)
    bytes_of = {group.name: 4 * group.num_trainable for group in plans[1].model.groups}
    at_least = sum(bytes_of.values()) if is_sweep else max(bytes_of.values())
    assert at_least <= sizes["copy.0"] < at_least * (1 if is_sweep else 1.2) + 64 * 100
    sweeps = [sum(isinstance(i.op, Perturb) for i in p.step) for p in (serial, copied)]
    assert sweeps[1] == sweeps[0] * 2 // 3
    assert {i.op.scale for i in copied.step if isinstance(i.op, Perturb)} == {1, -1}


def test_a_sweep_draws_twice_where_it_drew_four_times():
    drawn = []
    for how in ("serial", "copies"):
        program = lower(plan_of(model_of("opt"), **weighing(PLACEMENTS["sweep"], how)))
        drawn.append(sum(isinstance(i.op, Draw) and i.op.group == "block.1" for i in program.step))
    assert drawn == [4, 2]


def test_what_is_written_ahead_leaves_the_compute_stream_and_waits_for_nobody_else():
    program = lower(plan_of(model_of("opt"), **weighing(AHEAD["resident-ahead"])))
    streams = {i.stream for i in program.step if isinstance(i.op, Draw | Perturb | Update)}
    assert streams == {Stream.DRAW}
    by_name = {i.id: i for i in program.step}
    waits = {edge.instruction for edge in by_name["block.1/perturb[q0+]"].after}
    assert waits <= {"block.0/forward[q0+]", "embed/forward[q0-]"}


def test_sweeps_on_two_streams_are_refused():
    model = model_of("opt")
    plan = plan_of(model, **weighing({}))
    program = lower(plan)
    before = [Dependency(program.step[-1].id, 1), *(Dependency(i.id) for i in program.step)]
    chained = [replace(i, after=(edge,)) for i, edge in zip(program.step, before, strict=False)]
    step = tuple(replace(i, stream=Stream.DRAW) if i.id == "block.2/update[q0]" else i for i in chained)
    with pytest.raises(ProgramError, match="they share temporaries"):
        Session(plan, model, learning_rate=RATE, program=replace(program, step=step))


def test_an_unchanged_block_is_not_sent_back():
    """Without a pending update, what was uploaded need not be offloaded after the forwards."""
    model = model_of("opt-untied")
    serial, copied = (
        lower(plan_of(model, **weighing(PLACEMENTS["offloaded-immediate"], how)))
        for how in ("serial", "copies")
    )
    offloads = [[i.id for i in p.step if i.label == "offload"] for p in (serial, copied)]
    assert set(offloads[1]) == {name for name in offloads[0] if name.endswith(":update")}
    assert len(offloads[0]) == 2 * len(offloads[1])


def test_an_updated_block_is_sent_back_while_it_is_forwarded():
    """A copy is forwarded, so the way back waits for the update alone, not for the last forward."""
    program = lower(plan_of(model_of("opt-untied"), **weighing(PLACEMENTS["offloaded"])))
    offload = next(i for i in program.step if i.id == "block.1/offload")
    assert {edge.instruction for edge in offload.after if not edge.distance} == {"block.1/update[q0]"}


@pytest.mark.parametrize("placement", ["resident", "sweep", "sweep-ahead", "offloaded-ahead"])
def test_the_memory_that_is_planned_is_what_is_taken(placement):
    model = model_of("opt")
    plan = plan_of(model, **weighing(PLACEMENTS[placement]))
    planned = sum(b.size_bytes for b in lower(plan).buffers if b.role == "copies")
    with Session(plan, model, learning_rate=RATE) as session:
        session.step(batches(1)[0])
        taken = session.memory().arena_bytes
    assert taken[Space.DEVICE, "copies"] == planned


@pytest.mark.parametrize("ran", ["sweep", "offloaded-ahead"])
def test_replay_depends_on_updates_alone(ran):
    """However points were reached: the weights of a replay are those of the run under every placement."""
    model = model_of("opt")
    with Session(plan_of(model, **weighing(PLACEMENTS[ran])), model, learning_rate=RATE, seed=3) as session:
        records = [session.step(batch) for batch in batches(4)]
        session.flush()
    for placement in ("resident", "sweep", "offloaded"):
        again = model_of("opt")
        plan = plan_of(again, **weighing(PLACEMENTS[placement]))
        with Session(plan, again, learning_rate=RATE, seed=3) as session:
            for record in records:
                session.replay(record)
            session.flush()
        assert differing(model, again) == []
