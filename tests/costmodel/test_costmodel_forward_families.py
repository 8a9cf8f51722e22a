"""The forward's work of every family against what transformers' own code does, on tiny models."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from costmodel import spec_of_config
from costmodel.models.experts import Experts
from costmodel.models.families import FAMILIES
from costmodel.models.forward import forward_work, shared_activation_bytes
from tests.costmodel.test_costmodel_forward_torch import DTYPES, LiveStorages
from tests.support.tiny_families import TINY, skip_earlier_attention
from topology.errors import ModelError

NEW = [family for family in TINY if family not in ("opt", "gpt2", "llama", "qwen3", "roberta")]
"""Families that are not told kernel by kernel elsewhere."""


def _model(family, attention, dtype="float32", **fields):
    fields = {"pad_token_id": 1, **TINY[family], **fields}
    config = AutoConfig.for_model(family, **fields)
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if FAMILIES[family].is_causal else AutoModelForMaskedLM
    model = auto.from_config(config, attn_implementation=attention).to(DTYPES[dtype]).eval()
    return model, spec_of_config({"model_type": family, **fields}, name=family)


def _tokens(spec, batch, seq):
    return torch.randint(2, spec.vocab_size, (batch, seq))


def _run_block(model, spec, batch, seq):
    """Return what running the second block, which has experts where any has, allocates, launches and leaves."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == spec.num_blocks]
    block, called = lists[0][1], {}
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: called.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    mask = torch.ones((batch, seq), dtype=torch.long)
    mask[0, -1] = 0
    with torch.no_grad():
        model(input_ids=_tokens(spec, batch, seq), attention_mask=mask, use_cache=False)
        hook.remove()
        given = [leaf for leaf in tree_leaves(called) if isinstance(leaf, torch.Tensor)]
        with LiveStorages([*model.parameters(), *model.buffers(), *given]) as mode:
            output = block(*called["args"], **called["kwargs"])
    output = output[0] if isinstance(output, tuple) else output
    return mode.peak - output.untyped_storage().nbytes(), len(mode.kernels)


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", "float32"), ("eager", "bfloat16")])
def test_blocks_take_the_memory_and_the_kernels_that_are_counted(family, attention, dtype):
    skip_earlier_attention(family)
    if attention == "sdpa" and family in ("gemma2", "bloom", "gpt_neo", "mpt", "gpt_oss"):
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            _model(family, attention, dtype)
        return
    model, spec = _model(family, attention, dtype)
    assert (
        spec.stores_scores == "never"
        or attention == "eager"
        or family in ("falcon", "deepseek_v2", "deepseek_v3")
    )
    as_on_a_cpu = "eager" if spec.stores_scores == "cpu" else attention
    for batch, seq in ((3, 28), (1, 24)):
        peak, num_kernels = _run_block(model, spec, batch, seq)
        work = forward_work(
            spec, "block.1", batch=batch, seq=seq, dtype=dtype, attention=as_on_a_cpu, padded=True
        )
        # Never too low, but for a few numbers per row.
        assert peak - 40 * batch * seq <= work.workspace_bytes <= 1.35 * peak, (batch, seq)
        # A router's few numbers take a dozen kernels more or less, and so does what a mask has torch and transformers make.
        slack = 16 if spec.experts else 8
        assert abs(work.num_kernels - num_kernels) <= slack + 0.1 * num_kernels, (batch, seq)


_WIDE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 48}
ODD = [
    ("granite", _WIDE_HEADS),
    ("glm", {**_WIDE_HEADS, "intermediate_size": 64}),
    ("glm", {**_WIDE_HEADS, "intermediate_size": 64, "partial_rotary_factor": 1.0}),
    ("nemotron", {**_WIDE_HEADS, "num_key_value_heads": 8, "intermediate_size": 64}),
    ("phimoe", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    ("falcon", {"alibi": True, "bias": True, "parallel_attn": False, "multi_query": False}),
    ("gemma3_text", {"final_logit_softcapping": 11.0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
]


@pytest.mark.parametrize(("family", "fields"), ODD)
def test_legal_fields_that_few_models_have_are_counted(family, fields):
    model, spec = _model(family, "sdpa", **fields)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    peak, _ = _run_block(model, spec, 3, 28)
    work = forward_work(spec, "block.1", batch=3, seq=28, padded=True)
    assert peak - 40 * 3 * 28 <= work.workspace_bytes <= 1.35 * peak


def test_masks_with_slopes_are_counted_by_head():
    _, spec = _model("falcon", "sdpa", alibi=True)
    shared = [shared_activation_bytes(spec, batch=2, seq=seq) for seq in (16, 32)]
    assert shared[1] - 2 * shared[0] >= 4 * spec.num_heads * 2 * (32**2 - 2 * 16**2)


def _grouped_flops(rows, weights, *args, out_shape=None, **kwargs) -> int:
    return 2 * rows[0] * rows[1] * weights[2]


@pytest.mark.parametrize("family", NEW)
def test_flops_equal_an_independent_count(family):
    model, spec = _model(family, "eager")
    tokens = _tokens(spec, 2, 30)
    # The counter knows no product of many weights.
    with (
        torch.no_grad(),
        FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops}
        ) as counter,
    ):
        model(tokens, labels=tokens, use_cache=False)
    works = [
        forward_work(spec, segment, batch=2, seq=30, attention="eager", padded=True)
        for segment in spec.segments
    ]
    assert sum(work.flops for work in works) == counter.get_total_flops()


def test_a_window_is_a_band_for_kernels_that_know_windows_and_a_mask_for_others():
    spec = spec_of_config({"model_type": "gemma3_text", "sliding_window": 512}, name="gemma")
    assert spec.windows[:6] == (512, 512, 512, 512, 512, 0)

    def attention(block, kernel, seq=2048):
        work = forward_work(spec, f"block.{block}", batch=1, seq=seq, dtype="bfloat16", attention=kernel)
        return work.attention[0]

    assert (attention(0, "flash").key, attention(0, "flash").causal_skip) == (512, False)
    assert (attention(0, "sdpa").key, attention(0, "sdpa").causal_skip) == (2048, False)
    assert attention(5, "flash").causal_skip
    # What is no longer than the window is attended to as ever.
    assert attention(0, "sdpa", seq=512) == attention(5, "sdpa", seq=512)


def test_experts_that_are_visited_are_counted_as_they_are_when_tokens_choose():
    experts = Experts(num_experts=16, num_per_token=3, intermediate_size=1)
    torch.manual_seed(0)
    for num_tokens in (1, 4, 16, 64):
        chosen = torch.rand(2000, num_tokens, 16).topk(3).indices.flatten(1)
        active = torch.tensor([len(row.unique()) for row in chosen], dtype=torch.float64)
        error = active.std() / 2000**0.5
        assert (
            abs(active.mean() - experts.num_active(num_tokens)) <= 4 * error + 1e-4
        )  # where all were visited in all of 2000 draws


def test_uneven_experts_are_visited_by_no_more_than_even_ones():
    shares = [0.9, *15 * (0.1 / 15,)]  # one row for all blocks, as earlier versions wrote it
    uneven = Experts.model_validate(
        {"num_experts": 16, "num_per_token": 2, "intermediate_size": 1, "shares": shares}
    )
    even = uneven.model_copy(update={"shares": ()})
    for num_tokens in (1, 2, 8, 100):
        assert uneven.num_active(num_tokens) <= even.num_active(num_tokens) + 1e-9
        # The largest share is above 1 visit for each token, so that expert is always visited, and a cache of it misses none.
        cached = uneven.num_active(num_tokens, num_resident=1)
        assert uneven.num_active(num_tokens) - cached == pytest.approx(1)
        assert even.num_active(num_tokens) <= even.most_uploads(num_tokens)
    assert uneven.num_active(1) == pytest.approx(2)
    with pytest.raises(ModelError, match="shares of 3 experts"):
        Experts(num_experts=16, num_per_token=2, intermediate_size=1, shares=((1, 1, 1),))


def test_the_error_of_active_experts_covers_what_samples_of_shares_make_of_it():
    torch.manual_seed(0)
    shares, counted = torch.rand(8).softmax(0), []
    for _ in range(400):
        visits = torch.multinomial(shares, 200, replacement=True).bincount(minlength=8) / 200
        counted.append(_experts_of(visits).num_active(6))
    errors = (shares * (1 - shares) / 200).sqrt()
    error = _experts_of(shares, errors).active_error(6)
    assert torch.tensor(counted).std() == pytest.approx(error, rel=0.2)


def test_routing_is_between_even_and_half_of_the_experts_unless_it_is_measured():
    assumed = Experts(num_experts=16, num_per_token=2, intermediate_size=1)
    assert assumed.bounding("high") == assumed.bounding("central") == assumed
    for num_tokens in (1, 4, 100):
        half = Experts(num_experts=8, num_per_token=2, intermediate_size=1).num_active(num_tokens)
        assert assumed.bounding("low").num_active(num_tokens) == pytest.approx(half)
    shares = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.06, 0.04])
    for error in (0.0, 0.01, 0.03):
        measured = _experts_of(shares, error * torch.ones(8))
        low, central, high = (measured.bounding(end).num_active(6) for end in ("low", "central", "high"))
        assert (low < central < high) if error else (low == pytest.approx(central) == pytest.approx(high))
        # About as far as errors of single shares make it, which do not grow together.
        assert high - low == pytest.approx(2 * 1.96 * measured.active_error(6), rel=0.5, abs=1e-9)


def _experts_of(shares, errors=None):
    rows = {} if errors is None else {"share_errors": (tuple(errors.tolist()),)}
    return Experts(
        num_experts=8, num_per_token=2, intermediate_size=1, shares=(tuple(shares.tolist()),), **rows
    )
