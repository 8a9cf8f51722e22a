"""All points in one forward over packed sequences: the losses of points taken one by one, and the same updates."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, PhiConfig

from executors.models.batched import BatchedModel
from executors.models.packing import pack
from executors.models.recording_blocks import StepCache
from executors.runs.adapters import attach
from executors.runs.session import Session
from studies.families.tiny import tiny_model
from tests.support.command import saved_model, train
from tests.support.distributed import OFFLOADED
from tests.support.reference_mezo import differing
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import DataError, ModelError, PlanError
from zosim.lowering import lower
from zosim.plans import Plan
from zosim.program.operations import Forward

LOZO = {"distribution": "lozo", "lazy_steps": 3}


def linears_of(shape, dtype=torch.float64, **changed):
    model = model_of(shape, dtype, **changed)
    attach(model, "linears")
    return model


def ragged(lengths, *, num_labels=2, shared=12):
    """A batch of sequences of these lengths, the third to the fifth beginning alike."""
    generator = torch.Generator().manual_seed(0)
    columns = max(lengths)
    tokens = torch.randint(3, 90, (len(lengths), columns), generator=generator)
    tokens[2:5, :shared] = tokens[2, :shared]
    places, ends = torch.arange(columns), torch.tensor(lengths)[:, None]
    mask = (places < ends).long()
    labels = tokens.masked_fill((places >= ends) | (places < ends - num_labels), -100)
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("shape", ["opt", "opt-projected", "llama", "gpt2", "qwen3"])
def test_losses_at_all_points_are_those_of_perturbed_models(shape):
    model = linears_of(shape)
    plain, forward_runner = copy.deepcopy(model), BatchedModel(model, loss_dtype="fp64")
    batch, scales = ragged([19, 15, 21, 20, 19, 5, 19], shared=17), (0.05, -0.05, 0.0)
    tuned = [tensor for tensor in forward_runner.tensors if tensor.trainable]
    factors = {
        tensor.name: tuple(torch.randn(side, 3, dtype=torch.float64) for side in tensor.shape)
        for tensor in tuned
    }
    paths = {t.parameter: forward_runner.path(t.parameter, [factors[t.name]] * 3, scales) for t in tuned}
    cache, hidden = StepCache(), None
    with torch.no_grad():
        for segment in forward_runner.segments:
            hidden = forward_runner.run_batched(segment, batch, cache, hidden, paths, 3)
        for loss, scale in zip(hidden, scales, strict=True):
            moved = copy.deepcopy(plain)
            for name, parameter in moved.named_parameters():
                if name in factors:
                    left, right = factors[name]
                    parameter.add_(left @ right.T, alpha=scale)
            assert loss.item() == pytest.approx(moved(**batch).loss.item(), rel=1e-6)
    # The third to the fifth share a run; nothing is computed of padding, nor of a label that nothing follows.
    assert cache.packing.num_tokens == 19 + 15 + 21 + 20 + 19 + 5 + 19 - 7 - 2 * 17


PACKED = {
    "mistral": "a sliding window",
    "gemma2": "windows in turn, capped scores",
    "gpt_oss": "windows in turn, sinks",
    "deepseek_v3": "values narrower than keys",
}


@pytest.mark.parametrize("family", PACKED)
def test_attention_over_packed_sequences_is_that_of_a_family(family):
    model = tiny_model(family)
    attach(model, "linears")
    forward_runner, batch = BatchedModel(model), ragged([19, 15, 21, 20, 19, 5, 19], shared=17)
    cache, hidden = StepCache(), None
    with torch.no_grad():
        for segment in forward_runner.segments:
            hidden = forward_runner.run_batched(segment, batch, cache, hidden, {}, 2)
        loss = model(**batch, use_cache=False).loss.item()
    assert hidden.tolist() == pytest.approx([loss, loss], rel=1e-5)
    assert {group.mask is None for group in cache.packing.groups} == {True, False}


UNPACKED = {
    "recurrent_gemma": "see one another where they are packed",  # recurrent blocks
    "xglm": "see one another where they are packed",  # attention of its own
    "roberta": "but .* on padded ones",  # positions that begin behind the padding token
}


@pytest.mark.parametrize("family", UNPACKED)
def test_a_family_with_other_losses_where_it_is_packed_is_refused(family):
    model = tiny_model(family)
    attach(model, "linears")
    with pytest.raises(ModelError, match=UNPACKED[family]):
        BatchedModel(model)


def rows_of(tensor):
    return tensor.numel() // tensor.shape[-1]


@pytest.mark.parametrize("shape", ["opt", "opt-projected", "llama", "gpt2", "qwen3"])
def test_behind_the_last_attention_is_what_predicts_a_label(shape):
    model = linears_of(shape)
    forward_runner = BatchedModel(model, loss_dtype="fp64")
    seen = []
    behind = {"out_proj", "o_proj", "fc1", "fc2", "c_fc", "c_proj", "gate_proj", "up_proj", "down_proj"}
    for name, module in forward_runner.blocks[-1].named_modules():
        if name.rpartition(".")[2] in behind:
            module.register_forward_hook(lambda _module, inputs, _output: seen.append(rows_of(inputs[0])))
    losses = {}
    for num_labels in (2, 15):
        batch = ragged([19, 15, 21, 20, 19, 5, 19], num_labels=num_labels, shared=0)
        for forward_runner.narrows in (True, False):
            seen.clear()
            cache, hidden, before = StepCache(), None, []
            with torch.no_grad():
                for segment in forward_runner.segments:
                    before.append((hidden, None if hidden is None else hidden.clone()))
                    hidden = forward_runner.run_batched(segment, batch, cache, hidden, {}, 3)
            packing = cache.packing
            is_few = forward_runner.narrows and num_labels == 2
            rows = {3 * (len(packing.predictors) if is_few else packing.num_tokens)}
            assert set(seen) == rows
            assert all(torch.equal(given, then) for given, then in before[1:])  # nobody else's is narrowed
            losses[num_labels, forward_runner.narrows] = hidden
        assert torch.allclose(losses[num_labels, True], losses[num_labels, False], rtol=1e-13, atol=0)


def test_blocks_whose_mlp_reads_what_attention_read_are_run_whole():
    """Phi's MLP stands beside attention, on the same normalised states of all tokens."""
    config = PhiConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=96, resid_pdrop=0
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    attach(model, "linears")
    forward_runner = BatchedModel(model, loss_dtype="fp64")
    assert not forward_runner.narrows
    batch, cache, hidden = ragged([19, 15, 21, 20, 19]), StepCache(), None
    with torch.no_grad():
        for segment in forward_runner.segments:
            hidden = forward_runner.run_batched(segment, batch, cache, hidden, {}, 1)
        assert hidden.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        OFFLOADED,
        {"estimator": {"num_perturbations": 2}, "perturbations": {"distribution": "factorised", "rank": 3}},
        {"estimator": {"difference": "forward"}, "perturbations": LOZO | {"rng": "counter"}},
    ],
    ids=["lozo", "offloaded", "perturbations", "forward-counter"],
)
def test_steps_are_those_of_copies_but_for_the_rounding_of_losses(axes):
    base, outcomes = linears_of("opt", num_hidden_layers=2), []
    for way in ("copies", "adapters"):
        model = copy.deepcopy(base)
        plan = plan_of(
            model, dtype="float64", **({"perturbations": LOZO} | axes | {"weights": {"perturbation": way}})
        )
        with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, seed=3, loss_dtype="fp64") as session:
            records = [session.step(batch) for batch in batches(5)]
            session.flush()
        outcomes.append((records, model))
    (one, left), (other, right) = outcomes
    for record, same in zip(one, other, strict=True):
        # 1e-13 of a loss is 1e-10 of its difference by 2·ε, relative to a gradient of 1.
        assert record.projected_gradients == pytest.approx(same.projected_gradients, abs=1e-9)
    for parameter, same in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.allclose(parameter, same, rtol=0, atol=1e-10)


def test_an_update_from_factors_has_the_bits_of_one_from_their_product():
    base, models = linears_of("opt", torch.float32, num_hidden_layers=1), []
    records = None
    for way in ("copies", "adapters"):
        model = copy.deepcopy(base)
        plan = plan_of(model, perturbations=LOZO, weights={"perturbation": way})
        with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, seed=3) as session:
            records = records or [session.step(batch) for batch in batches(4)]
            if way == "adapters":
                for record in records:
                    session.replay(record)
            session.flush()
        models.append(model)
    assert differing(*models) == []


def test_what_cannot_be_adapters_is_refused():
    model = model_of("opt", num_hidden_layers=1)
    adapters = {"weights": {"perturbation": "adapters"}}
    with pytest.raises(PlanError, match="only the linear layers of blocks"):
        plan_of(model, perturbations=LOZO, **adapters)
    attach(model, "linears")
    with pytest.raises(PlanError, match="distribution=gaussian"):
        plan_of(model, **adapters)
    with pytest.raises(PlanError, match="traversal=full"):
        plan_of(model, perturbations=LOZO, schedule={"traversal": "full"}, **adapters)
    plan = plan_of(model, perturbations=LOZO, **adapters)
    with pytest.raises(ModelError, match="objective"):
        Session(plan, model, objective=lambda logits, _batch: logits.sum())
    assert Plan.model_validate(plan.model_dump(mode="json")) == plan


def test_a_batch_that_cannot_be_packed_is_refused():
    batch = ragged([9, 7, 8, 8, 8])
    with pytest.raises(DataError, match="padded on the right"):
        pack(batch | {"attention_mask": batch["attention_mask"].flip(1)})
    with pytest.raises(DataError, match="no label"):
        pack(batch | {"labels": torch.full_like(batch["labels"], -100)})


def test_equal_sequences_are_computed_once():
    batch = ragged([30, 30, 30, 30, 30], num_labels=1, shared=30)
    packing = pack(batch)
    assert packing.num_tokens == 3 * 29
    assert packing.predictors[2] == packing.predictors[3] == packing.predictors[4]


@pytest.mark.parametrize("num_prompts", [1, 16, 64])
@pytest.mark.parametrize("length", [1, 2])
def test_answers_behind_one_prompt_cost_one_prompt(num_prompts, length):
    """Those of one token nothing more, at any size of a batch; longer ones their own tokens but the last."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 90, (num_prompts, 9), generator=generator)
    prompts[:, 0] = torch.arange(num_prompts) + 100  # nothing in common but with its own
    answers = torch.arange(5)[:, None].repeat(num_prompts, length)
    tokens = torch.cat([prompts.repeat_interleave(5, 0), answers], 1)
    labels = torch.cat([torch.full((5 * num_prompts, 9), -100), answers], 1)
    packing = pack({"input_ids": tokens, "labels": labels})
    assert packing.num_tokens == num_prompts * (9 + 5 * (length - 1))
    assert packing.targets.tolist() == answers.flatten().tolist()
    if length == 1:
        assert [group.mask for group in packing.groups] == [None]  # one call of attention, and causal


def test_two_answers_behind_a_short_prompt_are_one_row():
    tokens = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 8, 9]])
    labels = tokens.masked_fill(torch.tensor([1, 1, 1, 0]).bool(), -100)
    packing = pack({"input_ids": tokens, "labels": labels})
    assert packing.tokens.tolist() == [[5, 6, 7, 5, 6, 8]]
    assert packing.predictors.tolist() == [2, 2, 5]


def test_a_run_counts_what_its_batches_hold_for_predictions(tmp_path):
    model, data, out = saved_model("opt", tmp_path), tmp_path / "data.jsonl", tmp_path / "out"
    lines = []
    for number, length in enumerate((14, 16, 18, 20)):  # behind ten tokens that are the same
        prompt = [*range(10, 20), *[20 + number] * (length - 10)]
        lines += [{"input_ids": [*prompt, answer], "labels": [-100] * length + [answer]} for answer in (5, 6)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    packed = {"tune": "linears", "distribution": "lozo", "weights": "adapters"}
    assert train(model, data, out, steps=2, batch=8, **packed) == 0
    plan = Plan.load(out / "plan.json")
    assert plan.forward.num_labels == 1
    assert (plan.forward.num_tokens, plan.forward.num_answers, plan.forward.num_shared) == (17, 2, 10)
    packing = pack({name: torch.tensor(rows) for name, rows in padded(lines).items()})
    # The ten that are shared see each other; behind them stand 4, 6, 8 and 10 more, in calls of three and of one.
    assert plan.forward.num_attended == round((10 * 10 + 3 * 8 * 18 + 10 * 20) / (10 + 4 * 7))
    block = next(i.work for i in lower(plan).step if isinstance(i.op, Forward) and i.op.segment == "block.0")
    assert max(one.m for one in block.matmuls) == 2 * packing.num_tokens == 2 * (10 + 4 * 7)
    assert train(model, data, out, "--resume", steps=3, batch=8, **packed) == 0


def padded(lines):
    columns = max(len(line["input_ids"]) for line in lines)
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: [line[name] + [fill[name]] * (columns - len(line[name])) for line in lines] for name in fill
    }
