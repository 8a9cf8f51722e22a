from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import Attention, Matmul, Work, read_model_spec
from costmodel.models.forward import activation_bytes, forward_work, shared_activation_bytes
from costmodel.param_passes import (
    allocation_work,
    cast_work,
    copy_work,
    perturb_work,
    sampling_work,
    update_work,
)
from topology.errors import ModelError

SPEC = read_model_spec("opt-1m")
counts = st.integers(0, 10**6)
works = st.builds(
    Work,
    matmuls=st.lists(
        st.builds(Matmul, m=st.integers(1, 99), n=st.integers(1, 99), k=st.integers(1, 99)), max_size=3
    ),
    elementwise_bytes=counts,
    param_pass_bytes=counts,
    num_normals=counts,
    num_skipped=counts,
    num_kernels=counts,
    copy_bytes=counts,
    allocation_bytes=counts,
    workspace_bytes=counts,
)


@given(works, works, works)
def test_work_adds_up(a, b, c):
    assert (a + b) + c == a + (b + c)
    assert (a + b).flops == a.flops + b.flops
    assert (a + b).workspace_bytes == max(a.workspace_bytes, b.workspace_bytes)
    assert a + Work() == a


def test_formats_come_from_the_part_that_uses_them():
    total = sampling_work(4, dtype="bfloat16", distribution="rademacher") + perturb_work(4, dtype="float16")
    assert (total.sampling_dtype, total.distribution, total.dtype) == ("bfloat16", "rademacher", "float16")
    product = Work(dtype="tf32", matmuls=(Matmul(m=1, n=1, k=1),))
    assert (perturb_work(4, dtype="float16") + product).dtype == "tf32"
    with pytest.raises(ValueError, match="draws of"):
        sampling_work(1) + sampling_work(1, distribution="rademacher")
    with pytest.raises(ValueError, match="tf32 and in float64"):
        product + Work(dtype="float64", matmuls=product.matmuls)


def test_products_and_attention_count_multiply_adds_twice():
    assert Matmul(m=2, n=3, k=5, num=7).flops == 2 * 2 * 3 * 5 * 7
    assert Matmul(m=2, n=3, k=5, num=7).elements == (10 + 15 + 6) * 7
    square = Attention(num=6, query=10, key=10, head_dim=4)
    assert square.flops == 2 * (2 * 6 * 10 * 10 * 4)
    assert square.model_copy(update={"causal_skip": True}).flops == square.flops // 2


@pytest.mark.parametrize(
    ("arithmetic", "passes", "kernels"), [("fused", 3, 1), ("scaled", 5, 2), ("literal", 7, 3)]
)
def test_perturbations_count_their_passes(arithmetic, passes, kernels):
    work = perturb_work(100, dtype="float32", arithmetic=arithmetic, num_tensors=4)
    assert work.param_pass_bytes == passes * 4 * 100
    assert work.num_kernels == kernels * 4


def test_the_literal_form_keeps_two_temporaries_of_the_largest_tensor():
    work = perturb_work(100, arithmetic="literal", num_tensors=3, largest_tensor=60)
    assert work.workspace_bytes == 2 * 60 * 4


def test_updates_casts_copies_and_allocations():
    assert update_work(100) == perturb_work(100)
    assert update_work(100, weight_decay=True).param_pass_bytes == (3 + 2) * 400
    assert update_work(100, weight_decay=True, arithmetic="literal").param_pass_bytes == (7 + 5) * 400
    # The executor's passes over parameters: z and θ are read and θ is written once, all else stays in scratch memory.
    pieces = perturb_work(100, arithmetic="chunked")
    assert (pieces.param_pass_bytes, pieces.scratch_bytes, pieces.num_kernels) == (3 * 400, 2 * 400, 2)
    for weight_decay, passes in ((False, 4), (True, 9)):
        update = update_work(100, arithmetic="chunked", weight_decay=weight_decay)
        assert (update.param_pass_bytes, update.scratch_bytes) == (3 * 400, passes * 400)
    assert perturb_work(100, dtype="bfloat16", perturbation_dtype="float32").param_pass_bytes == 100 * (
        2 + 4 + 2
    )
    cast = cast_work(100, source="float32", target="float16")
    back = cast_work(100, source="float16", target="float32")
    assert (cast.num_casts, cast.cast_dtype, cast.dtype) == (100, "float32", "float32")
    assert (back.num_casts, back.cast_dtype, back.dtype) == (100, "float16", "float32")
    assert copy_work(77).copy_bytes == 77
    assert allocation_work(77, num_allocations=2).num_allocations == 2


def test_products_of_a_block_are_twelve_squares_and_attention():
    h, tokens = SPEC.hidden_size, 3 * 64
    work = forward_work(SPEC, "block.0", batch=3, seq=64)
    assert sum(part.flops for part in work.matmuls) == 2 * tokens * 12 * h * h
    (attention,) = work.attention
    assert attention.flops == 2 * tokens * 64 * h  # 4 tokens seq hidden, halved by the causal mask


def test_a_chunked_loss_needs_less_memory_for_the_same_products():
    whole = forward_work(SPEC, "head", batch=2, seq=64, dtype="bfloat16")
    parts = forward_work(SPEC, "head", batch=2, seq=64, dtype="bfloat16", loss_chunk=48)
    assert whole.flops == parts.flops
    assert [(part.m, part.num) for part in parts.matmuls] == [(48, 2), (32, 1)]
    logits_bytes = 128 * SPEC.vocab_size * (2 + 4 + 4)
    norm_bytes, loss_bytes = 128 * SPEC.hidden_size * 2, 16 * 4
    assert whole.workspace_bytes == logits_bytes + norm_bytes + loss_bytes
    assert parts.workspace_bytes == logits_bytes * 48 // 128 + norm_bytes + loss_bytes


@given(st.integers(1, SPEC.max_positions), st.integers(1, 300))
def test_chunks_of_a_loss_count_as_if_played_one_by_one(seq, chunk):
    options = {"batch": 1, "dtype": "float32"}
    whole = forward_work(SPEC, "head", seq=seq, **options)
    parts = forward_work(SPEC, "head", seq=seq, loss_chunk=chunk, **options)
    rows = [min(chunk, seq - first) for first in range(0, seq, chunk)]
    alone = [forward_work(SPEC, "head", seq=num, **options) for num in rows]
    norm_kernels = 1
    assert [part.m for part in parts.matmuls for _ in range(part.num)] == rows
    assert parts.num_products == len(rows)
    assert parts.num_kernels - norm_kernels == sum(work.num_kernels - norm_kernels for work in alone)
    assert parts.elementwise_bytes == whole.elementwise_bytes
    assert parts.num_exponentials == whole.num_exponentials
    norm_bytes = (seq - max(rows)) * SPEC.hidden_size * 4
    assert parts.workspace_bytes == max(work.workspace_bytes for work in alone) + norm_bytes


def test_chunks_of_any_number_are_counted_without_playing_them():
    parts = forward_work(SPEC, "head", batch=10**6, seq=100, loss_chunk=7)
    assert [(part.m, part.num) for part in parts.matmuls] == [(7, 10**8 // 7), (10**8 % 7, 1)]


def test_weights_of_another_format_are_cast_and_held():
    plain = forward_work(SPEC, "block.0", batch=1, seq=8, dtype="bfloat16")
    cast = forward_work(SPEC, "block.0", batch=1, seq=8, dtype="bfloat16", storage_dtype="float32")
    elements = SPEC.param_group("block.0").num_parameters
    assert cast.param_pass_bytes - plain.param_pass_bytes == elements * (4 + 2)
    assert cast.workspace_bytes - plain.workspace_bytes == elements * 2
    assert cast.num_kernels - plain.num_kernels == SPEC.param_group("block.0").num_tensors
    assert (
        forward_work(SPEC, "head", batch=1, seq=8, dtype="tf32", storage_dtype="float32").param_pass_bytes
        == 0
    )


@given(
    st.integers(1, 4), st.integers(1, 64), st.sampled_from(["eager", "sdpa"]), st.sampled_from(SPEC.segments)
)
def test_work_grows_with_batch_and_sequence(batch, seq, attention, segment):
    def of(batch: int, seq: int) -> Work:
        return forward_work(SPEC, segment, batch=batch, seq=seq, attention=attention)

    small = of(batch, seq)
    for large in (of(batch + 1, seq), of(batch, seq + 1)):
        assert large.flops >= small.flops
        assert large.elementwise_bytes > small.elementwise_bytes
        assert large.workspace_bytes >= small.workspace_bytes


def test_lora_adds_two_products_per_target():
    from costmodel import LoRA

    adapted = read_model_spec("opt-1m", trainable=LoRA(rank=4, target_modules=("q_proj", "v_proj")))
    extra = forward_work(adapted, "block.1", batch=1, seq=16).flops
    extra -= forward_work(SPEC, "block.1", batch=1, seq=16).flops
    assert extra == 2 * (2 * 16 * 4 * 128 + 2 * 16 * 4 * 128)


def test_a_prefix_adds_keys_that_every_token_sees():
    from costmodel import Prefix

    prefixed = read_model_spec("opt-1m", trainable=Prefix(num_tokens=4))
    assert prefixed.num_trainable == prefixed.num_blocks * 2 * 4 * 128
    (found,), (plain,) = (forward_work(s, "block.1", batch=3, seq=16).attention for s in (prefixed, SPEC))
    assert (found.key, plain.key) == (20, 16)
    # A mask is passed, so that the masked half is computed as well.
    assert found.flops == 2 * plain.flops * 20 // 16
    eager, bare = (forward_work(s, "block.1", batch=3, seq=16, attention="eager") for s in (prefixed, SPEC))
    assert eager.elementwise_bytes > bare.elementwise_bytes


def test_hidden_states_and_what_blocks_share():
    assert activation_bytes(SPEC, batch=2, seq=16, dtype="bfloat16") == 2 * 16 * 128 * 2
    assert shared_activation_bytes(SPEC, batch=2, seq=16) == 2 * 16 * 16
    assert shared_activation_bytes(SPEC, batch=2, seq=16, is_padded=False) == 0
    assert shared_activation_bytes(SPEC, batch=2, seq=16, attention="eager") == 2 * 16 * 16 * 4
    llama = read_model_spec("llama-1m")
    assert shared_activation_bytes(llama, batch=2, seq=16, is_padded=False) == 2 * 16 * 32 * 4


def test_forwards_that_cannot_be_are_refused():
    with pytest.raises(ModelError, match=r"no segment 'block\.9'"):
        forward_work(SPEC, "block.9", batch=1, seq=8)
    with pytest.raises(ModelError, match="seq=300 exceeds the 256 positions"):
        forward_work(SPEC, "head", batch=1, seq=300)
