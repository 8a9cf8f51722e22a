"""Programs that were edited by hand: what they say is done, or they are refused."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch

from executors.runs.session import Session
from tests.support.distributed import OFFLOADED
from tests.support.reference_mezo import differing
from tests.support.tiny import batches, model_of, plan_of
from tests.support.waiting import HANG_S
from topology.errors import Hazard, ProgramError, RunError
from zosim.applications.first_order.programs import PRESETS, lower_first_order
from zosim.lowering import lower
from zosim.program.instructions import Stream
from zosim.program.operations import Perturb


def edited(program, name, **changes):
    step = tuple(replace(i, **changes) if i.id == name else i for i in program.step)
    assert step != program.step
    return replace(program, step=step)


def losses(program, plan, model, steps=3):
    with Session(plan, copy.deepcopy(model), program=program, learning_rate=1e-3) as session:
        return [session.step(batch).losses_minus[0] for batch in batches(steps)]


@pytest.fixture
def opt():
    model = model_of("opt")
    plan = plan_of(model, **OFFLOADED)
    return model, plan, lower(plan)


def test_an_edited_operation_changes_what_is_done(opt):
    model, plan, program = opt
    changed = edited(program, "block.1/perturb[q0-]", op=Perturb("block.1", -1))
    assert losses(changed, plan, model) != losses(program, plan, model)


def test_a_removed_dependency_is_refused_naming_the_hazard(opt):
    model, plan, program = opt
    (update,) = [i for i in program.step if i.id == "block.1/update[q0]"]
    assert update.after
    with pytest.raises(Hazard, match=r"block\.1/upload"):
        losses(edited(program, update.id, after=()), plan, model)


def test_a_left_out_instruction_is_refused(opt):
    model, plan, program = opt
    step = tuple(i for i in program.step if i.id != "block.1/restore[q0]")
    with pytest.raises(ProgramError):
        losses(replace(program, step=step), plan, model)


def test_a_program_for_another_model_is_refused_naming_the_difference(opt):
    _, plan, program = opt
    with pytest.raises(
        ProgramError, match=r"for embed\.tokens, but the model's take|does not state where|names"
    ):
        losses(program, plan, model_of("opt-projected"))
    with pytest.raises(ProgramError):
        losses(program, plan, model_of("llama"))


def test_operands_that_do_not_fit_are_refused(opt):
    model, plan, program = opt
    (upload,) = [i for i in program.step if i.id == "block.1/upload"]
    (other,) = [i for i in program.step if i.id == "block.2/upload"]
    with pytest.raises(ProgramError):
        losses(edited(program, upload.id, reads=other.reads), plan, model)


@pytest.mark.parametrize("stream", [Stream.H2D, Stream.D2H, Stream.COMPUTE])
def test_a_failing_instruction_is_named_and_nothing_hangs(opt, stream):
    model, plan, program = opt
    with Session(plan, model, program=program) as session:
        (batch,) = batches(1)
        session.step(batch)
        resolved = session.interpreter._resolved["step"]
        position, item = next(
            (i, r) for i, r in enumerate(resolved) if r.instruction.stream == stream and i > 8
        )

        def fail(_frame):
            message = "the bus caught fire"
            raise OSError(message)

        resolved[position] = replace(item, action=fail)
        with pytest.raises(RunError, match="the bus caught fire") as caught:
            step_and_flush(session, batch)
        assert item.instruction.id in str(caught.value)
        assert f"on stream {stream}" in str(caught.value)


def step_and_flush(session, batch):
    session.step(batch)
    session.flush()


def at_rendezvous(action, other):
    def act(frame):
        other.wait(HANG_S)
        action(frame)

    return act


def test_streams_really_overlap(opt):
    """An upload listed behind a compute instruction runs beside it: each waits until the other has begun."""
    both = threading.Barrier(2)
    model, plan, program = opt
    with Session(plan, model, program=program) as session:
        (batch,) = batches(1)
        session.step(batch)
        for i, item in enumerate(session.interpreter._resolved["step"]):
            if item.instruction.id in ("block.2/upload", "block.0/forward[q0+]"):
                session.interpreter._resolved["step"][i] = replace(
                    item, action=at_rendezvous(item.action, both)
                )
        session.step(batch)
        spans = {s.instruction: s for s in session.timeline().spans if s.step == 1 and s.phase == "step"}
    upload, forward = spans["block.2/upload"], spans["block.0/forward[q0+]"]
    assert upload.start_s < forward.end_s


def test_steps_after_a_flush_begin_as_the_first_did(opt):
    model, plan, program = opt
    resumed = copy.deepcopy(model)
    with Session(plan, model, program=program, learning_rate=1e-3) as session:
        for batch in batches(4):
            session.step(batch)
            session.flush()
            session.flush()
    with Session(plan, resumed, program=program, learning_rate=1e-3) as session:
        for batch in batches(4):
            session.step(batch)
        session.flush()
    assert differing(model, resumed) == []
    assert torch.isfinite(model.lm_head.weight).all()


def test_a_first_order_step_is_refused_as_simulated_only(opt):
    model, plan, _ = opt
    program = lower_first_order(plan, PRESETS["sgd"]).program_of(0)
    with pytest.raises(ProgramError, match=r"head/backward\[m0\] belongs to a first-order step"):
        losses(program, plan, model)
