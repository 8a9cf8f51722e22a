"""How weights come to a point: copies leave every bit of the weights alone, serial weights drift; both equal their literal loop."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from executors.runs.session import Session
from tests.support.reference_mezo import differing
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import ProgramError
from zosim.lowering import lower
from zosim.program.instructions import Dependency, Space, Stream
from zosim.program.operations import Perturb, Sample, Update
from zosim.program.validate import validate

PLACEMENTS = {
    "full": {"schedule": {"traversal": "full"}},
    "resident": {},
    "resident-delayed": {"schedule": {"update": "delayed"}},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
    "offloaded-immediate": {"residency": {"blocks": "offloaded", "num_staging_buffers": 1}},
    "offloaded-fresh-buffers": {"residency": {"blocks": "offloaded", "reuse_staging_buffers": False}},
    "kept": {"perturbations": {"kept": True}},
    "full-kept": {"perturbations": {"kept": True}, "schedule": {"traversal": "full"}},
}
AHEAD = {f"{name}-ahead": placement | {"perturbations": placement.get("perturbations", {}) | {"sampled_ahead": True}}
         for name, placement in PLACEMENTS.items()}  # fmt: skip
PLACEMENTS |= AHEAD
EDGES = {
    "residency": {"blocks": "offloaded", "embedding_and_head": "offloaded"},
    "schedule": {"update": "delayed"},
}
QUICK = ("full", "resident-delayed", "offloaded-ahead", "full-kept-ahead")
RATE = 1e-2


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


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), EDGES], ids=[*PLACEMENTS, "offloaded-edges"])
@pytest.mark.parametrize("perturbations", [1, 3])
def test_programs_hold_the_copies_that_they_name_and_one_pass_less(placement, perturbations):
    model = model_of("opt-untied")
    plans = [
        plan_of(model, estimator={"num_perturbations": perturbations}, **weighing(placement, how))
        for how in ("serial", "copies")
    ]
    serial, copied = map(lower, plans)
    validate(copied)
    assert all(buffer.role != "copies" for buffer in serial.buffers)
    sizes = {buffer.name: buffer.size_bytes for buffer in copied.buffers if buffer.role == "copies"}
    is_full_pass = plans[1].schedule.traversal == "full"
    assert len(sizes) == 2 if is_full_pass or plans[1].perturbations.sampled_ahead else 1
    touched = {a.buffer for i in copied.step for a in (*i.reads, *i.writes) if a.buffer in sizes}
    assert touched == set(sizes)
    bytes_of = {group.name: 4 * group.num_trainable for group in plans[1].model.param_groups}
    at_least = sum(bytes_of.values()) if is_full_pass else max(bytes_of.values())
    assert at_least <= sizes["copy.0"] < at_least * (1 if is_full_pass else 1.2) + 64 * 100
    passes = [sum(isinstance(i.op, Perturb) for i in p.step) for p in (serial, copied)]
    assert passes[1] == passes[0] * 2 // 3
    assert {i.op.scale for i in copied.step if isinstance(i.op, Perturb)} == {1, -1}


def test_a_full_pass_samples_twice_where_it_sampled_four_times():
    sampled = []
    for how in ("serial", "copies"):
        program = lower(plan_of(model_of("opt"), **weighing(PLACEMENTS["full"], how)))
        sampled.append(sum(isinstance(i.op, Sample) and i.op.param_group == "block.1" for i in program.step))
    assert sampled == [4, 2]


def test_what_is_written_ahead_leaves_the_compute_stream_and_waits_for_nobody_else():
    program = lower(plan_of(model_of("opt"), **weighing(AHEAD["resident-ahead"])))
    streams = {i.stream for i in program.step if isinstance(i.op, Sample | Perturb | Update)}
    assert streams == {Stream.SAMPLE}
    by_name = {i.id: i for i in program.step}
    waits = {edge.instruction for edge in by_name["block.1/perturb[q0+]"].after}
    assert waits <= {"block.0/forward[q0+]", "embed/forward[q0-]"}


def test_param_passes_on_two_streams_are_refused():
    model = model_of("opt")
    plan = plan_of(model, **weighing({}))
    program = lower(plan)
    before = [Dependency(program.step[-1].id, 1), *(Dependency(i.id) for i in program.step)]
    chained = [replace(i, after=(edge,)) for i, edge in zip(program.step, before, strict=False)]
    step = tuple(replace(i, stream=Stream.SAMPLE) if i.id == "block.2/update[q0]" else i for i in chained)
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


@pytest.mark.parametrize("placement", ["resident", "full", "full-ahead", "offloaded-ahead"])
def test_the_memory_that_is_planned_is_what_is_taken(placement):
    model = model_of("opt")
    plan = plan_of(model, **weighing(PLACEMENTS[placement]))
    planned = sum(b.size_bytes for b in lower(plan).buffers if b.role == "copies")
    with Session(plan, model, learning_rate=RATE) as session:
        session.step(batches(1)[0])
        taken = session.memory().arena_bytes
    assert taken[Space.DEVICE, "copies"] == planned
