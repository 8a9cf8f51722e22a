"""What one stage holds, is called with and refuses."""

from __future__ import annotations

import re

import pytest
import torch

from costmodel.formats.codecs import codec_spec, most_bytes
from executors.codecs import codec_of
from executors.models.model import SegmentedModel
from executors.models.recording_blocks import StepCache
from executors.models.spec import spec_of_model
from executors.ranks.mesh import on_one_rank, unsplit
from executors.ranks.messages import check_length
from executors.runs.session import Session
from proofs_checks.setups.ranks import InProcess, on_all_ranks
from tests.support.staged import SETTINGS, Case, on_one_device, on_stages
from tests.support.tiny import batches
from topology.errors import CodecError, ModelError, RunError, ZosimError
from zosim.eval_points import EvalPoint
from zosim.plans import Plan
from zosim.program.contents import Message
from zosim.program.instructions import Access

THREE = Case(("block.0", "block.1.mlp"))


def sessions(case, work):
    """Return what `work` makes of every rank's session."""
    plan = case.plan()
    models = [case.made() for _ in range(plan.placement.world_size)]

    def rank(number, communicator):
        with Session(plan, models[number], communicator=communicator, **SETTINGS) as session:
            return work(session)

    return on_all_ranks(plan, rank)


@pytest.mark.parametrize("name", ["opt", "opt-projected", "gpt2", "llama"])
def test_blocks_of_later_stages_are_called_as_in_the_whole_model(name):
    (batch,) = batches(1)
    whole, cache = SegmentedModel(Case((), name).made()), StepCache()
    with torch.no_grad():
        whole.embed(batch, cache)

    def calls(session):
        found = StepCache()
        with torch.no_grad():
            session.forward_runner.embed(batch, found)
        return found.calls

    for found in sessions(Case(THREE.split_points, name), calls):
        assert str(found) == str(cache.calls)
        leaves, wanted = (torch.utils._pytree.tree_leaves(c) for c in (found, cache.calls))
        for leaf, other in zip(leaves, wanted, strict=True):
            assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other


def test_a_stage_keeps_no_memory_for_what_others_hold():
    def held(session):
        storages = {t.parameter.data.untyped_storage().data_ptr(): t.parameter.data.untyped_storage().nbytes()
                    for t in session.forward_runner.tensors}  # fmt: skip
        return sum(storages.values()), session.plan.segments_of(session.rank)

    found = sessions(Case(THREE.split_points, "opt-untied"), held)
    whole = (
        sum(group.num_parameters for group in spec_of_model(Case((), "opt-untied").made()).param_groups) * 4
    )
    assert [segments[0] for _, segments in found] == ["embed", "block.1.front", "block.1.back"]
    assert all(size < 0.7 * whole for size, _ in found)
    assert sum(size for size, _ in found) < 1.1 * whole  # aligned


def test_blocks_that_are_called_with_weights_are_refused():
    case = Case(("block.1",), "llama")
    plan, models = case.plan(), [case.made(), case.made()]
    for model in models:
        table = model.model.embed_tokens.weight
        scale = lambda _module, _args, out, table=table: tuple(t * table[5, 0] for t in out)
        model.model.rotary_emb.register_forward_hook(scale)

    def rank(number, communicator):
        try:
            Session(plan, models[number], communicator=communicator, **SETTINGS).close()
        except ModelError as error:
            return error.message
        return "nothing was noticed"

    messages = on_all_ranks(plan, rank)
    assert all("needs a tensor that no block or module" in message for message in messages), messages


def error_after(change):
    """Return what is said of a step whose messages are changed on the wire."""
    case = Case(("block.1.mlp",), codec="q4")
    plan, models = case.plan(), [case.made(), case.made()]

    class Spoiling(InProcess):
        def send(self, group, offset, message, what):
            return super().send(group, offset, change(message), what)

    def rank(number, communicator):
        communicator.__class__ = Spoiling
        with Session(plan, models[number], communicator=communicator, **SETTINGS) as session:
            session.step(batches(1, size=case.size)[0])

    with pytest.raises(ZosimError) as caught:
        on_all_ranks(plan, rank)
    return caught.value


def flipped(message):
    message = message.clone()
    message[60] ^= 1
    return message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m[:-3], "message of .* is truncated"),
        (flipped, "message of .* bytes is damaged"),
        (lambda m: torch.cat([m, m[:5]]), "is followed by 5 more"),
        (
            lambda _: codec_of(codec_spec("none")).encode(torch.zeros(4, 9, 5)),
            r"\(4, 9, 5\), but \(4, 9, 52\)",
        ),
    ],
    ids=["cut-off", "damaged", "longer", "other-shape"],
)
def test_a_spoilt_message_is_told_with_its_place(change, says):
    error = error_after(change)
    assert isinstance(error, CodecError)
    begin = r"^step\[0\]/decode\[q0\+\] on stream compute: rank 1, split point block\.1\.mlp at q0\+: "
    assert re.search(begin + ".*" + says, error.message), error.message


def test_a_message_that_is_too_long_is_not_received():
    error = error_after(lambda _: torch.zeros(10**6, dtype=torch.uint8))
    assert isinstance(error, RunError)
    assert "split point block.1.mlp at q0+: a message of 1000000 bytes is outside 1 to" in error.message


@pytest.mark.parametrize("length", [-1, 0, 11])
def test_lengths_are_bounded(length):
    check_length(10, 10, "")
    with pytest.raises(RunError, match=f"a message of {length} bytes is outside 1 to 10"):
        check_length(length, 10, "cut block.1.mlp")


def test_messages_are_no_longer_than_the_program_says():
    case = Case(("block.1.mlp",), codec="q4:affine:channel", residual_codec="none", size=2)
    plan = case.plan()
    (wire,) = {access for i in sessions(case, lambda s: s.program)[0].step for access in i.writes if access.what == Message(0, EvalPoint(0, 1))}  # fmt: skip
    assert isinstance(wire, Access)
    shapes = {"q4:affine:channel": (2, plan.seq, 52), "none": (2, plan.seq, 32)}
    assert wire.size_bytes == sum(most_bytes(codec_spec(name), shape, 4) for name, shape in shapes.items())


def test_autocast_stays_within_the_program_and_equals_one_device():
    case = Case(("block.1.mlp",), axes=(("forward", (("compute_dtype", "bfloat16"),)),))
    found, wanted = on_stages(case), on_one_device(case)
    assert all(rank[:3] == wanted[:3] for rank in found)


def test_accuracy_is_minimised_over_stages():
    from executors.datasets.objectives import objective_named

    case = Case(("block.1.mlp",))

    def work(options):
        return {**SETTINGS, **options, "objective": objective_named("accuracy")}

    plan, lines = case.plan(), batches(2, size=case.size)
    models = [case.made() for _ in range(2)]

    def rank(number, communicator):
        with Session(plan, models[number], **work({"communicator": communicator})) as session:
            return [session.step(batch).projected_gradients for batch in lines], session.digest()

    found = on_all_ranks(plan, rank)
    with Session(on_one_rank(plan), case.made(), **work({})) as session:
        assert found == [([session.step(batch).projected_gradients for batch in lines], session.digest())] * 2


def test_one_rank_does_it_with_whole_blocks():
    """Unless halves are drawn one after the other."""
    plan = Case(("block.0.mlp", "block.2.mlp"), lora=True).plan()
    assert unsplit(plan.model) == spec_of_model(Case((), lora=True).made(), "tiny")
    assert on_one_rank(plan).model == unsplit(plan.model)
    executed = plan.model_dump(mode="json")
    executed["perturbations"]["order"] = "execution"
    assert on_one_rank(Plan.model_validate(executed)).model == plan.model
