"""First-order cost against published formulas and counts by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.models.backward import backward_work, kept_bytes, optimizer_bytes, optimizer_work
from costmodel.models.configs import read_model_spec
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import BACK, FRONT, HEAD

GPT2, OPT, LLAMA = (read_model_spec(name) for name in ("gpt2", "opt-125m", "llama-2-7b"))
SHAPES = st.tuples(st.integers(1, 64), st.integers(1, 1024))


@given(SHAPES)
def test_a_block_keeps_what_korthikanti_et_al_count(shape):
    """s·b·h·(34 + 5·a·s/h), half precision, GELU, dropout, stored scores (2022, equation 1)."""
    b, s = shape
    h, a = GPT2.hidden_size, GPT2.num_heads
    kept = kept_bytes(GPT2, "block.3", batch=b, seq=s, dtype="float16", attention="eager")
    assert kept == 34 * s * b * h + 5 * a * s * s * b


@given(SHAPES)
def test_relu_keeps_nothing_beside_its_output(shape):
    b, s = shape
    opt, gpt2 = (kept_bytes(spec, "block.0", batch=b, seq=s, dtype="float16") for spec in (OPT, GPT2))
    assert gpt2 - opt == 2 * b * s * OPT.intermediate_size


def test_a_fused_kernel_keeps_no_scores():
    one, two = (kept_bytes(GPT2, "block.0", batch=1, seq=s, dtype="float16") for s in (512, 1024))
    assert two == 2 * one


def test_half_blocks_keep_what_the_block_keeps():
    split = read_model_spec("opt-125m", split_blocks=(2,))
    whole = kept_bytes(split, "block.1", batch=4, seq=64)
    assert (
        kept_bytes(split, "block.2" + FRONT, batch=4, seq=64)
        + kept_bytes(split, "block.2" + BACK, batch=4, seq=64)
        == whole
    )


def test_the_head_keeps_float32_probabilities_of_the_vocabulary():
    kept = kept_bytes(OPT, HEAD, batch=2, seq=8, dtype="float16")
    assert kept == 16 * (2 * 2 * OPT.hidden_size + 4 * OPT.vocab_size)


def test_a_gated_mlp_keeps_both_of_its_first_products_and_theirs():
    """Gate, its activation, up, and the product, by hand; Llama drops nothing out."""
    rows, h, inner = 6, LLAMA.hidden_size, LLAMA.intermediate_size
    keys = LLAMA.num_key_value_heads * LLAMA.head_dim
    attended = 2 * h + 2 * h + 2 * keys
    statistics = 4 * LLAMA.num_heads * rows
    assert (
        kept_bytes(LLAMA, "block.0", batch=2, seq=3) == 4 * rows * (attended + 2 * h + 4 * inner) + statistics
    )


@pytest.mark.parametrize("spec", [GPT2, OPT, LLAMA], ids=lambda spec: spec.name)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_backward_multiplies_twice_what_a_forward_does(spec, attention):
    for segment in ("block.0", HEAD):
        shape = {"batch": 2, "seq": 16, "attention": attention}
        there, back = forward_work(spec, segment, **shape), backward_work(spec, segment, **shape)
        scores = sum(part.flops for part in there.attention)
        # A fused kernel makes the scores again: five products in place of two.
        assert back.flops == 2 * there.flops + (scores // 2 if attention == "sdpa" else 0)


def test_accumulating_reads_and_writes_gradients_once_more():
    plain, added = (
        backward_work(OPT, "block.0", batch=1, seq=8, accumulates=more).param_pass_bytes
        for more in (False, True)
    )
    assert added - plain == 3 * 4 * OPT.param_group("block.0").num_parameters


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_adam_takes_sixteen_bytes_a_parameter(dtype):
    """Rajbhandari et al. 2020, section 3.1: weights, gradients, moments, and a float32 copy of half weights."""
    width = {"float32": 4}.get(dtype, 2)
    assert 2 * width + optimizer_bytes(1, "adam", dtype) == 16
    assert optimizer_bytes(10, "sgd", dtype) == 0


def test_an_update_reads_and_writes_all_once():
    assert optimizer_work(100, "sgd").param_pass_bytes == 100 * 3 * 4
    assert optimizer_work(100, "adam").param_pass_bytes == 100 * (3 * 4 + 2 * 8)
