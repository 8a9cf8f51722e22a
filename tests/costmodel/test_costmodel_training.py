"""Memory of first-order recipes: closed forms, what must grow or shrink, and printed runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.models.configs import read_model_spec
from costmodel.models.recipes import RECIPES, recipe_of
from costmodel.models.training import CodeQuirks, TrainingRun
from topology.errors import PlanError

OPT = read_model_spec("opt-1.3b")
FULL = TrainingRun(OPT, recipe_of("adamw-bf16"), batch=1, seq=128)
LORA = TrainingRun(
    OPT, recipe_of("lora"), batch=1, seq=128, num_adapter_parameters=1_572_864,
    adapter_inputs=4096, adapter_outputs=4096,
)  # fmt: skip


def test_short_sequences_peak_at_the_update() -> None:
    """Weights, gradients, two moments and one root in 16 bits: ten bytes a parameter."""
    assert FULL.limiting_peak == "update"
    assert FULL.peaks["update"] == 10 * OPT.num_parameters


def test_long_sequences_peak_at_the_loss() -> None:
    longer = replace(LORA, batch=8, seq=2048)
    assert longer.limiting_peak == "loss"
    assert replace(longer, chunks_loss=True).allocated_bytes < longer.allocated_bytes


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("adamw-fp32-master", 16),
        ("adamw-bf16", 8),
        ("adamw-8bit-in-backward", 6.03),
        ("adalomo", 4),
        ("mezo", 2),
    ],
)
def test_full_fine_tuning_is_a_number_of_bytes_by_recipe(name: str, size: float) -> None:
    assert recipe_of(name).bytes_per_parameter == pytest.approx(size)


def test_counters_are_ordered_and_shards_take_less() -> None:
    for recipe in RECIPES.values():
        run = replace(LORA, recipe=recipe, batch=2, seq=512)
        sharded = replace(run, sharding="fsdp", num_devices=8)
        assert 0 < run.allocated_bytes <= run.reserved_bytes
        assert sharded.resting_bytes <= run.resting_bytes


def test_what_saves_memory_saves_it() -> None:
    run = replace(LORA, batch=4, seq=1024, checkpointing="none")
    checkpointed = replace(run, checkpointing="full")
    offloaded = replace(run, checkpointing="full-offloaded")
    assert offloaded.allocated_bytes < checkpointed.allocated_bytes < run.allocated_bytes
    assert offloaded.host_bytes > checkpointed.host_bytes == 0
    narrow = replace(run, recipe=recipe_of("qlora-nf4"))
    assert (
        replace(narrow, recipe=recipe_of("qlora-nf4-dq")).resting_bytes
        < narrow.resting_bytes
        < run.resting_bytes
    )
    assert replace(narrow, wide_norms=True).allocated_bytes > narrow.allocated_bytes
    in_backward = replace(FULL, recipe=recipe_of("adamw-bf16-in-backward"))
    assert in_backward.allocated_bytes < FULL.allocated_bytes


def test_only_products_of_bitsandbytes_keep_what_frozen_linears_read() -> None:
    """Of a gated MLP twice the hidden width and its inner one, less what adapters read; litgpt's adapters share one input."""
    spec = read_model_spec("llama-2-7b")
    run = replace(LORA, model=spec, adapter_inputs=4096, adapter_outputs=4096)
    kept = replace(run, recipe=recipe_of("qlora-nf4")).block_bytes - run.block_bytes
    assert kept == 128 * 2 * (2 * 4096 + 11008 - 4096)
    # A frozen head in float32 is narrowed for its product.
    assert replace(run, wide_norms=True).loss_bytes - run.loss_bytes == 2 * 32000 * 4096
    two = replace(
        run, adapter_inputs=2 * 4096, adapter_outputs=2 * 4096, quirks=CodeQuirks(fuses_adapters=True)
    )
    # A dropped input with its mask, queries and keys beside values, and what adapters write.
    assert two.block_bytes - run.block_bytes == 128 * (3 * 4096 + 2 * 2 * 4096 + 2 * 2 * 4096 - 2 * 4096)


def test_accumulation_under_no_sync_keeps_whole_gradients() -> None:
    run = replace(LORA, sharding="fsdp", num_devices=2, accumulation=4)
    kept = replace(run, quirks=CodeQuirks(whole_gradients=True))
    assert kept.gradient_bytes - run.gradient_bytes > 2 * OPT.num_parameters


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown"):
        recipe_of("qlora-nf5")
