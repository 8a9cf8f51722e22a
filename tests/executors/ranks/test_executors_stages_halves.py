"""Blocks entered in the middle equal the unsplit block, bit for bit, in every family and format."""

from __future__ import annotations

import pytest
import torch

from costmodel.models.configs import LoRA
from executors.models.halves import Halfway, HalvedBlock
from executors.models.lora import attach_lora
from executors.models.model import SegmentedModel
from executors.models.recording_blocks import StepCache
from tests.support.tiny import batches, model_of
from topology.errors import ModelError

FAMILIES = ("opt", "opt-untied", "opt-projected", "gpt2", "llama", "llama-tied", "qwen3")
DTYPES = ("float32", "bfloat16", "float64")


def run_through(segmented, batch):
    """Return the loss, running segment by segment, and what each segment hands on."""
    cache, handed = StepCache(), {}
    hidden = segmented.embed(batch, cache)
    for segment in segmented.segments[1:-1]:
        hidden = handed[segment] = segmented.between(segment, hidden, cache)
    return segmented.head(hidden, batch), handed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_halves_are_the_block(name, dtype):
    model, (batch,) = model_of(name, getattr(torch, dtype)), batches(1)
    whole, halved = SegmentedModel(model), SegmentedModel(model, split_blocks=(0, 2))
    assert halved.segments == (
        "embed", "block.0.front", "block.0.back", "block.1", "block.2.front", "block.2.back", "head",
    )  # fmt: skip
    with torch.no_grad():
        loss, states = run_through(whole, batch)
        again, handed = run_through(halved, batch)
        assert torch.equal(loss, model(**batch).loss)
        assert torch.equal(loss, again)
        for i in (0, 2):
            assert torch.equal(handed[f"block.{i}.back"], states[f"block.{i}"])
    handed_on = handed["block.0.front"]
    assert isinstance(handed_on, Halfway)
    assert handed_on.activation.shape == (*batch["input_ids"].shape, halved.inner_size)
    assert handed_on.residual.shape == (*batch["input_ids"].shape, halved.hidden_size)


def test_adapters_of_the_second_linear_belong_to_the_back_half():
    model, (batch,) = model_of("opt"), batches(1)
    attach_lora(model, LoRA(rank=2, target_modules=("q_proj", "fc1", "fc2")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        segmented = SegmentedModel(model, split_blocks=(1,))
        assert torch.equal(run_through(segmented, batch)[0], model(**batch).loss)
    back = {
        t.name
        for g in segmented.param_groups
        if g.segments == ("block.1.back",)
        for t in segmented.tensors_of(g.name)
    }
    assert {name.rpartition("layers.1.")[2] for name in back if "lora" in name} == {
        "fc2.lora_A.weight",
        "fc2.lora_B.weight",
    }


def test_autocast_reaches_both_halves():
    model, (batch,) = model_of("gpt2"), batches(1)
    with torch.no_grad():
        whole, halved = (
            run_through(SegmentedModel(model, autocast_dtype=torch.bfloat16, split_blocks=blocks), batch)[0]
            for blocks in ((), (0, 1))
        )
    assert torch.equal(whole, halved)


class TestRefusals:
    def test_an_unknown_block(self):
        with pytest.raises(ModelError, match="Linear has no MLP whose second linear is one of fc2"):
            HalvedBlock(torch.nn.Linear(2, 2))

    def test_a_block_that_scales_what_it_adds(self):
        model = model_of("llama")
        for block in model.model.layers:
            block.mlp.register_forward_hook(lambda _module, _args, output: output * 0.5)
        with pytest.raises(ModelError, match="does more after the second linear"):
            SegmentedModel(model, split_blocks=(1,))

    def test_a_block_that_does_not_exist(self):
        with pytest.raises(ModelError, match="block 3 does not exist: blocks are numbered 0 to 2"):
            SegmentedModel(model_of("opt"), split_blocks=(3,))


def test_damaged_weights_are_not_taken_for_another_architecture():
    """NaNs differ from themselves; what is wrong with them is told where a codec or the loss meets them."""
    model, (batch,) = model_of("opt", torch.float32), batches(1)
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight[0, 0] = float("nan")
        segmented = SegmentedModel(model, split_blocks=(0,))
        loss, handed = run_through(segmented, batch)
    assert handed["block.0.front"].activation.isnan().any()
    assert loss.isnan()
