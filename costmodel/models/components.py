"""Components of segments, kernel by kernel: lookups, norms, attention."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from costmodel.formats import FORMATS, DType
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
    block: NonNegativeInt = 0

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
        if "wide norm" not in spec.quirks or hidden.dtype in ("float32", "float64"):
            return trace.map(hidden)
        upcast = trace.cast(hidden, "float32")
        return trace.cast(trace.map(upcast, drop=(upcast,)), hidden.dtype, drop=True)
    rows = rows or hidden.num_elements // spec.hidden_size
    wide: DType = "float32" if hidden.dtype != "float32" else hidden.dtype
    trace.num_kernels += ("shifted norm" in spec.quirks) * (1 if hidden.dtype == wide else 3)
    upcast = trace.cast(hidden, wide)
    squares = trace.map(upcast)
    variance = trace.map(squares, num_elements=rows, drop=(squares,))
    trace.num_kernels += 2  # add epsilon, reciprocal root: one number per row
    temporaries = (variance,) if upcast is hidden else (variance, upcast)
    normed = trace.map(upcast, variance, drop=temporaries)
    narrow = trace.cast(normed, hidden.dtype, drop=True)
    return trace.map(narrow, drop=(narrow,))


def seen_tokens(spec: ModelSpec, block: int, seq: int) -> int:
    """Return how many tokens the attention of a block sees at most, 0 where that is all of a sequence."""
    window = spec.windows[block] if spec.windows else 0
    return window if window < seq else 0


def traced_attention(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> tuple[TracedBuffer, TracedBuffer]:
    """Play projections and attention; return its output and what stays alive to the end of the block."""
    queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
    q, k, v, *held = _project_latents(trace, spec, shape) if spec.latent else _project(trace, spec, shape)
    if spec.num_prefix_tokens:
        k, v = _prefixed(trace, spec, shape, k), _prefixed(trace, spec, shape, v)
    mixed, kept = attention_core(trace, spec, shape, (q, k, v))
    if shape.num_kept:
        picked = lookup(trace, shape.kept_rows * queries)
        trace.free(picked)
    output = trace.linear(shape.kept_rows, values, spec.hidden_size)
    trace.free(q, k, v, mixed, *held)
    return output, kept


def attention_core(
    trace: KernelTrace, spec: ModelSpec, shape: Pass, qkv: tuple[TracedBuffer, ...]
) -> tuple[TracedBuffer, TracedBuffer]:
    """Play attention between its projections; return its output and what stays alive to the end of the block."""
    if shape.attention == "eager" or (spec.stores_scores == "always" and shape.attention == "sdpa"):
        return _eager(trace, spec, shape)
    return _fused(trace, spec, shape, qkv), TracedBuffer(0, shape.dtype)


def _project(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> tuple[TracedBuffer, ...]:
    """Play the products that make queries, keys and values, their norms and rotations; the last is what lies under views."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    if spec.fused_qkv:
        fused = trace.linear(shape.rows, spec.hidden_size, queries + 2 * keys)
        if spec.positions != "rotary":
            view = TracedBuffer(0, shape.dtype)
            return fused, view, view
        q, k, v = (TracedBuffer(shape.rows * width, shape.dtype) for width in (queries, keys, keys))
        held = [fused]
    else:
        q = trace.linear(shape.rows, spec.hidden_size, queries)
        if spec.family == "opt":
            q = trace.map(q, drop=(q,))  # OPT scales the queries itself
        are_late = "late head norms" in spec.quirks
        q = q if are_late else _qk_norm(trace, spec, q)
        k = trace.linear(shape.rows, spec.hidden_size, keys)
        k = k if are_late else _qk_norm(trace, spec, k)
        v, held = trace.linear(shape.rows, spec.hidden_size, keys), []
        if are_late:
            q, k = _qk_norm(trace, spec, q), _qk_norm(trace, spec, k)
    if spec.positions == "rotary":
        rotated = _rotated(trace, spec, q, k)
        if "holds projections" in spec.quirks:
            share = spec.rotary_dim or spec.head_dim
            held += [q, k, *(trace.new(part.num_elements * share // spec.head_dim) for part in (q, k))]
        else:
            trace.free(q, k)
        q, k = rotated
    return q, k, v, *held


def _rotated(
    trace: KernelTrace, spec: ModelSpec, q: TracedBuffer, k: TracedBuffer
) -> tuple[TracedBuffer, TracedBuffer]:
    """Play the rotations of queries and keys, which some code makes in float32, of numbers in it or not."""
    is_wide = {"wide rotation", "wide products"} & {*spec.quirks} and FORMATS[q.dtype].element_bytes < 4
    wide: DType = "float32" if is_wide else q.dtype
    begun = [trace.cast(part, wide) if "wide rotation" in spec.quirks else part for part in (q, k)]
    # Of heads that are turned in part, the turned shares of queries live until those of keys do.
    share = trace.new(q.num_elements * spec.rotary_dim // spec.head_dim * _is_partial(spec), wide)
    turned = [_rotate(trace, spec, part, wide) for part in begun]
    trace.free(share)
    if begun[0] is not q:
        trace.free(*begun)
    q_turned, k_turned = (trace.cast(part, q.dtype, drop=True) for part in turned)
    return q_turned, k_turned


def _project_latents(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> tuple[TracedBuffer, ...]:
    """Play multi-head latent attention up to queries, keys and values, which are views of what comes out of latents."""
    latent, rows, width = spec.latent, shape.rows, spec.num_heads * spec.head_dim
    assert latent is not None
    narrow = TracedBuffer(rows * spec.hidden_size, shape.dtype)
    if latent.query_rank:
        first = trace.linear(rows, spec.hidden_size, latent.query_rank)
        narrow = norm(trace, spec, first, rows)
        trace.free(first)
    q = trace.linear(rows, latent.query_rank or spec.hidden_size, width)
    trace.free(narrow)
    both = trace.linear(rows, spec.hidden_size, latent.key_value_rank + spec.rotary_dim)
    narrow = norm(trace, spec, TracedBuffer(rows * latent.key_value_rank, shape.dtype), rows)
    rotated = _rotate(trace, spec, q)
    own = spec.head_dim - spec.rotary_dim
    key_values = trace.linear(rows, latent.key_value_rank, spec.num_heads * (own + latent.value_dim))
    k = trace.map(key_values, num_elements=rows * width)
    v = TracedBuffer(rows * spec.num_heads * latent.value_dim, shape.dtype)
    scaled = (
        trace.new(rows * width),
        trace.new(rows * width),
    )  # which torch's own products make where no fused kernel fits
    return rotated, k, v, key_values, both, narrow, q, *scaled


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


def _is_partial(spec: ModelSpec) -> bool:
    return 0 < spec.rotary_dim < spec.head_dim


def _rotate(
    trace: KernelTrace, spec: ModelSpec, buffer: TracedBuffer, dtype: DType | None = None
) -> TracedBuffer:
    """Play ``x * cos + rotate_half(x) * sin``: five kernels, the tables being small, and one that puts what is not turned beside it."""
    is_partial = _is_partial(spec)
    share = TracedBuffer(buffer.num_elements * spec.rotary_dim // spec.head_dim, buffer.dtype)
    turning = share if is_partial else buffer
    cosine = trace.map(turning, dtype=dtype)
    half = trace.map(turning, num_elements=turning.num_elements // 2)
    turned = trace.map(turning, drop=(half,))
    sine = trace.map(turned, dtype=dtype, drop=(turned,))
    rotated = trace.map(cosine, sine, drop=(cosine, sine))
    if not is_partial:
        return rotated
    return trace.map(rotated, num_elements=buffer.num_elements, drop=(rotated,))


def _fused(trace: KernelTrace, spec: ModelSpec, shape: Pass, qkv: tuple[TracedBuffer, ...]) -> TracedBuffer:
    """Play a fused attention kernel: scores stay on chip."""
    trace.attention.append(_attention(spec, shape, materialised=False))
    trace.num_kernels += 1
    # Beside a mask, which torch turns into numbers, transformers repeats keys and values of heads that share them. A batch
    # may have one, so there is memory for it; its time is not counted.
    is_masked = shape.attention == "sdpa"
    extra = [trace.new(shape.rows * shape.seq)] if is_masked else []
    if is_masked and spec.num_key_value_heads < spec.num_heads:
        extra += [trace.new(shape.rows * spec.num_heads * spec.head_dim) for _ in range(2)]
    extra.append(trace.new(shape.rows * spec.num_heads, "float32"))  # sums of exponentials
    output = trace.new(shape.rows * spec.num_heads * spec.value_dim)
    trace.elementwise_bytes += sum(buffer.size_bytes for buffer in (*qkv, output))
    # Code that turns a part of heads, or all as a part, leaves queries by head, and so lies the output.
    if spec.rotary_dim and not spec.latent:
        extra.append(trace.new(output.num_elements))
    trace.free(*extra)
    return output


def _eager(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> tuple[TracedBuffer, TracedBuffer]:
    """Play the two batched products with every score stored; the probabilities live to the end of the block."""
    per_token = spec.num_heads * spec.head_dim
    trace.attention.append(_attention(spec, shape, materialised=True))
    # Keys and values of heads that share them are repeated for each.
    num_repeated = 0 if spec.num_key_value_heads == spec.num_heads else 2
    repeated = tuple(lookup(trace, shape.rows * per_token) for _ in range(num_repeated))
    dtype = shape.dtype
    if "wide scores" in spec.quirks and FORMATS[dtype].element_bytes < FORMATS["float32"].element_bytes:
        dtype = "float32"
        repeated += tuple(trace.new(shape.rows * per_token, dtype) for _ in range(2))
    copies = _contiguous_copies(trace, shape, per_token, 1 if repeated else 2)
    scores = trace.new(shape.batch * spec.num_heads * shape.seq * (shape.seq + spec.num_prefix_tokens), dtype)
    trace.num_kernels += 1
    if "holds projections" in spec.quirks:
        repeated += copies
    else:
        trace.free(*copies)
    scores = trace.map(scores, drop=(scores,))
    if spec.attention_softcap:
        for exponentials in (0, TANH, 0):
            scores = trace.map(scores, drop=(scores,), exponentials=exponentials)
    scores = trace.map(scores, drop=(scores,))
    if spec.has_sinks:
        scores = trace.map(scores, drop=(scores,))
        scores = trace.map(scores, drop=(scores,))
    unmasked = scores
    if "holds scores" in spec.quirks:
        scores = trace.map(scores)
    is_eager = shape.attention == "eager"
    probabilities = trace.cast(_softmax(trace, spec, scores, is_eager=is_eager), shape.dtype, drop=True)
    trace.free(unmasked)
    copies = _contiguous_copies(trace, shape, per_token, 0 if repeated else 1)
    mixed = trace.new(shape.rows * spec.num_heads * spec.value_dim)
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


def _softmax(trace: KernelTrace, spec: ModelSpec, scores: TracedBuffer, *, is_eager: bool) -> TracedBuffer:
    """Play a softmax, in float32 for all families but a few, and back to the compute format."""
    is_narrow = "narrow softmax" in spec.quirks and is_eager
    if spec.family in ("gpt2", "gpt_oss") or not spec.is_causal or is_narrow:
        return trace.map(scores, drop=(scores,), exponentials=1)
    upcast = scores if scores.dtype == "float32" else trace.cast(scores, "float32")
    wide = trace.map(upcast, drop=() if upcast is scores else (upcast,), exponentials=1)
    narrow = trace.cast(wide, scores.dtype)
    trace.free(scores)
    if narrow is not wide:
        trace.free(wide)
    return narrow


def _attention(spec: ModelSpec, shape: Pass, *, materialised: bool) -> Attention:
    window = seen_tokens(spec, shape.block, shape.seq)
    skips = not materialised and spec.is_causal and not shape.padded and not spec.num_prefix_tokens
    # Of torch's fused kernels only FlashAttention knows windows; the others take a mask of them and skip nothing.
    is_banded = bool(window) and shape.attention == "flash" and not shape.padded
    return Attention(
        num=shape.batch * spec.num_heads,
        query=shape.seq,
        key=window if is_banded else shape.seq + spec.num_prefix_tokens,
        head_dim=spec.head_dim,
        value_dim=spec.latent.value_dim if spec.latent else None,
        materialised=materialised,
        causal_skip=skips and not window,
    )


TANH = 4
"""Exponentials that a hyperbolic tangent counts as: torch's takes about four times as long on a CPU."""
