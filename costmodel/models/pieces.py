"""Pieces that segments are made of, kernel by kernel: lookups, norms, attention."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from costmodel.formats import DType
from costmodel.models.kernel_trace import KernelTrace, TracedBuffer
from costmodel.models.model_spec import ModelSpec
from costmodel.work import Attention

AttentionImpl = Literal["eager", "sdpa", "flash"]


class Pass(BaseModel):
    """One forward's shape: everything about it that is not the model."""

    model_config = ConfigDict(frozen=True)

    batch: PositiveInt
    seq: PositiveInt
    dtype: DType
    attention: AttentionImpl
    loss_chunk: PositiveInt | None
    padded: bool
    num_kept: PositiveInt | None = None

    @property
    def rows(self) -> int:
        """Tokens, one row of every product each."""
        return self.batch * self.seq

    @property
    def kept_rows(self) -> int:
        """Tokens that go on behind attention."""
        return self.num_kept or self.rows


def lookup(trace: KernelTrace, num_elements: int) -> TracedBuffer:
    """Play a gather: reads as many elements of the table as it writes."""
    output = trace.new(num_elements)
    trace.elementwise_bytes += 2 * output.size_bytes
    trace.num_kernels += 1
    return output


def norm(trace: KernelTrace, spec: ModelSpec, hidden: TracedBuffer, rows: int | None = None) -> TracedBuffer:
    """Play a LayerNorm (one kernel) or transformers' RMSNorm (six, and a cast each way in half precision)."""
    if spec.norm == "layernorm":
        return trace.map(hidden)
    rows = rows or hidden.num_elements // spec.hidden_size
    wide: DType = "float32" if hidden.dtype != "float32" else hidden.dtype
    upcast = trace.cast(hidden, wide)
    squares = trace.map(upcast)
    variance = trace.map(squares, num_elements=rows, drop=(squares,))
    trace.num_kernels += 2  # add epsilon, reciprocal root: one number per row
    temporaries = (variance,) if upcast is hidden else (variance, upcast)
    normed = trace.map(upcast, variance, drop=temporaries)
    narrow = trace.cast(normed, hidden.dtype, drop=True)
    return trace.map(narrow, drop=(narrow,))


def attention_part(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> tuple[TracedBuffer, TracedBuffer]:
    """Play projections and attention; return its output and what stays alive to the end of the block."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    q, k, v = _project(trace, spec, shape, queries, keys)
    if spec.positions == "rotary":
        rotated = _rotate(trace, q), _rotate(trace, k)
        trace.free(q, k)
        q, k = rotated
    if spec.num_prefix_tokens:
        k, v = _prefixed(trace, spec, shape, k), _prefixed(trace, spec, shape, v)
    if shape.attention == "eager":
        mixed, kept = _eager(trace, spec, shape)
    else:
        mixed, kept = _fused(trace, spec, shape, (q, k, v)), TracedBuffer(0, shape.dtype)
    if shape.num_kept:
        picked = lookup(trace, shape.kept_rows * queries)
        trace.free(picked)
    output = trace.linear(shape.kept_rows, queries, spec.hidden_size)
    trace.free(q, k, v, mixed)
    return output, kept


def _project(
    trace: KernelTrace, spec: ModelSpec, shape: Pass, queries: int, keys: int
) -> tuple[TracedBuffer, TracedBuffer, TracedBuffer]:
    if spec.fused_qkv:
        fused = trace.linear(shape.rows, spec.hidden_size, queries + 2 * keys)
        view = TracedBuffer(0, shape.dtype)
        return fused, view, view
    q = trace.linear(shape.rows, spec.hidden_size, queries)
    if spec.family == "opt":
        q = trace.map(q, drop=(q,))  # OPT scales the queries itself
    q = _qk_norm(trace, spec, q)
    k = _qk_norm(trace, spec, trace.linear(shape.rows, spec.hidden_size, keys))
    return q, k, trace.linear(shape.rows, spec.hidden_size, keys)


def _qk_norm(trace: KernelTrace, spec: ModelSpec, buffer: TracedBuffer) -> TracedBuffer:
    if not spec.qk_norm:
        return buffer
    normed = norm(trace, spec, buffer, rows=buffer.num_elements // spec.head_dim)
    trace.free(buffer)
    return normed


def _prefixed(trace: KernelTrace, spec: ModelSpec, shape: Pass, states: TracedBuffer) -> TracedBuffer:
    """Play the copy of keys or values behind those of the virtual tokens."""
    keys = spec.num_key_value_heads * spec.head_dim
    longer = lookup(trace, shape.batch * (shape.seq + spec.num_prefix_tokens) * keys)
    trace.free(states)
    return longer


def _rotate(trace: KernelTrace, buffer: TracedBuffer) -> TracedBuffer:
    """Play ``x * cos + rotate_half(x) * sin``: five kernels, the tables being small."""
    cosine = trace.map(buffer)
    half = trace.map(buffer, num_elements=buffer.num_elements // 2)
    turned = trace.map(buffer, drop=(half,))
    sine = trace.map(turned, drop=(turned,))
    return trace.map(cosine, sine, drop=(cosine, sine))


def _fused(trace: KernelTrace, spec: ModelSpec, shape: Pass, qkv: tuple[TracedBuffer, ...]) -> TracedBuffer:
    """Play a fused attention kernel: scores stay on chip."""
    trace.attention.append(_attention(spec, shape, materialised=False))
    trace.num_kernels += 1
    output = trace.new(shape.rows * spec.num_heads * spec.head_dim)
    trace.elementwise_bytes += sum(buffer.size_bytes for buffer in (*qkv, output))
    return output


def _eager(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> tuple[TracedBuffer, TracedBuffer]:
    """Play the two batched products with every score stored; the probabilities live to the end of the block."""
    per_token = spec.num_heads * spec.head_dim
    trace.attention.append(_attention(spec, shape, materialised=True))
    # Keys and values of heads that share them are repeated for each.
    num_repeated = 0 if spec.num_key_value_heads == spec.num_heads else 2
    repeated = tuple(lookup(trace, shape.rows * per_token) for _ in range(num_repeated))
    copies = _contiguous_copies(trace, shape, per_token, 1 if repeated else 2)
    scores = trace.new(shape.batch * spec.num_heads * shape.seq * (shape.seq + spec.num_prefix_tokens))
    trace.num_kernels += 1
    trace.free(*copies)
    scores = trace.map(scores, drop=(scores,))
    scores = trace.map(scores, drop=(scores,))
    probabilities = _softmax(trace, spec, scores)
    copies = _contiguous_copies(trace, shape, per_token, 0 if repeated else 1)
    mixed = trace.new(shape.rows * per_token)
    trace.num_kernels += 1
    trace.free(*copies)
    return trace.map(mixed, drop=(mixed, *repeated)), probabilities


def _contiguous_copies(
    trace: KernelTrace, shape: Pass, per_token: int, count: int
) -> tuple[TracedBuffer, ...]:
    """Play the copies that a batched product makes of transposed operands; one row alone needs none."""
    if shape.batch == 1:
        return ()
    return tuple(lookup(trace, shape.rows * per_token) for _ in range(count))


def _softmax(trace: KernelTrace, spec: ModelSpec, scores: TracedBuffer) -> TracedBuffer:
    """Play a softmax, in float32 for all families but GPT-2 and RoBERTa, and back to the compute format."""
    if spec.family in ("gpt2", "roberta"):
        return trace.map(scores, drop=(scores,), exponentials=1)
    upcast = scores if scores.dtype == "float32" else trace.cast(scores, "float32")
    wide = trace.map(upcast, drop=() if upcast is scores else (upcast,), exponentials=1)
    narrow = trace.cast(wide, scores.dtype)
    trace.free(scores)
    if narrow is not wide:
        trace.free(wide)
    return narrow


def _attention(spec: ModelSpec, shape: Pass, *, materialised: bool) -> Attention:
    return Attention(
        num=shape.batch * spec.num_heads,
        query=shape.seq,
        key=shape.seq + spec.num_prefix_tokens,
        head_dim=spec.head_dim,
        materialised=materialised,
        causal_skip=not materialised and spec.is_causal and not shape.padded and not spec.num_prefix_tokens,
    )
