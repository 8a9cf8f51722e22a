"""Blocks split inside: two halves that together are the block."""

from __future__ import annotations

import pytest

from costmodel.models.configs import LoRA, Prefix, Trainable, read_model_spec
from costmodel.models.forward import activation_bytes, forward_work
from costmodel.models.model_spec import segments_of
from topology.errors import ModelError

MODELS = ("opt-125m", "opt-350m", "gpt2", "llama-2-7b", "qwen3-1.7b")
SHAPE = {"batch": 2, "seq": 16}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_halves_do_the_work_of_the_block(name: str, attention: str) -> None:
    whole = forward_work(read_model_spec(name), "block.1", **SHAPE, attention=attention)  # type: ignore[arg-type]
    split = read_model_spec(name, split_blocks=(1,))
    front, back = (
        forward_work(split, f"block.1.{half}", **SHAPE, attention=attention)  # type: ignore[arg-type]
        for half in ("front", "back")
    )
    both = front + back
    assert (both.flops, both.num_kernels) == (whole.flops, whole.num_kernels)
    assert (both.elementwise_bytes, both.num_exponentials) == (
        whole.elementwise_bytes,
        whole.num_exponentials,
    )
    assert both.workspace_bytes <= whole.workspace_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "trainable", ["all", LoRA(rank=2, target_modules=("q_proj", "fc2")), Prefix(num_tokens=3)]
)
def test_halves_hold_the_parameters_of_the_block(name: str, trainable: Trainable) -> None:
    if isinstance(trainable, LoRA) and name != "opt-125m":
        pytest.skip("targets are named after OPT's linears")
    whole = read_model_spec(name, trainable=trainable)
    split = read_model_spec(name, trainable=trainable, split_blocks=(0, 2))
    for count in ("num_parameters", "num_trainable", "num_tensors", "num_trainable_tensors"):
        halves = [g for s in ("block.0.front", "block.0.back") for g in split.param_groups_of(s)]
        assert sum(getattr(g, count) for g in halves) == sum(
            getattr(g, count) for g in whole.param_groups_of("block.0")
        )
    inner, hidden = split.intermediate_size, split.hidden_size
    behind = sum(group.num_parameters for group in split.param_groups_of("block.0.back"))
    assert inner * hidden <= behind <= inner * hidden + 8 * (inner + hidden)


def test_what_crosses_is_the_activation_and_the_residual_stream() -> None:
    spec = read_model_spec("opt-125m", split_blocks=(3,))
    assert activation_bytes(spec, **SHAPE, segment="block.3.front") == 2 * 16 * (3072 + 768) * 4
    assert activation_bytes(spec, **SHAPE, segment="block.3.back") == 2 * 16 * 768 * 4


def test_a_block_that_is_not_there_cannot_be_cut() -> None:
    assert segments_of(2, (1,)) == ("embed", "block.0", "block.1.front", "block.1.back", "head")
    with pytest.raises(ModelError, match="block 12 does not exist"):
        read_model_spec("opt-125m", split_blocks=(12,))
