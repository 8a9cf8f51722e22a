"""Pieces that segments are made of, kernel by kernel: lookups, norms, attention."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from costmodel.formats import DType
from costmodel.models.model_spec import ModelSpec
from costmodel.models.tape import Tape, TapeBuffer
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


def lookup(tape: Tape, num_elements: int) -> TapeBuffer:
    """Play a gather: reads as many elements of the table as it writes."""
    output = tape.new(num_elements)
    tape.elementwise_bytes += 2 * output.size_bytes
    tape.num_kernels += 1
    return output


def norm(tape: Tape, spec: ModelSpec, hidden: TapeBuffer, rows: int | None = None) -> TapeBuffer:
    """Play a LayerNorm (one kernel) or transformers' RMSNorm (six, and a cast each way in half precision)."""
    if spec.norm == "layernorm":
        return tape.map(hidden)
    rows = rows or hidden.num_elements // spec.hidden_size
    wide: DType = "float32" if hidden.dtype != "float32" else hidden.dtype
    upcast = tape.cast(hidden, wide)
    squares = tape.map(upcast)
    variance = tape.map(squares, num_elements=rows, drop=(squares,))
    tape.num_kernels += 2  # add epsilon, reciprocal root: one number per row
    temporaries = (variance,) if upcast is hidden else (variance, upcast)
    normed = tape.map(upcast, variance, drop=temporaries)
    narrow = tape.cast(normed, hidden.dtype, drop=True)
    return tape.map(narrow, drop=(narrow,))


def attention_part(tape: Tape, spec: ModelSpec, shape: Pass) -> tuple[TapeBuffer, TapeBuffer]:
    """Play projections and attention; return its output and what stays alive to the end of the block."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    q, k, v = _project(tape, spec, shape, queries, keys)
    if spec.positions == "rotary":
        rotated = _rotate(tape, q), _rotate(tape, k)
        tape.free(q, k)
        q, k = rotated
    if spec.num_prefix_tokens:
        k, v = _prefixed(tape, spec, shape, k), _prefixed(tape, spec, shape, v)
    if shape.attention == "eager":
        mixed, kept = _eager(tape, spec, shape)
    else:
        mixed, kept = _fused(tape, spec, shape, (q, k, v)), TapeBuffer(0, shape.dtype)
    if shape.num_kept:
        picked = lookup(tape, shape.kept_rows * queries)
        tape.free(picked)
    output = tape.linear(shape.kept_rows, queries, spec.hidden_size)
    tape.free(q, k, v, mixed)
    return output, kept


def _project(
    tape: Tape, spec: ModelSpec, shape: Pass, queries: int, keys: int
) -> tuple[TapeBuffer, TapeBuffer, TapeBuffer]:
    if spec.fused_qkv:
        fused = tape.linear(shape.rows, spec.hidden_size, queries + 2 * keys)
        view = TapeBuffer(0, shape.dtype)
        return fused, view, view
    q = tape.linear(shape.rows, spec.hidden_size, queries)
    if spec.family == "opt":
        q = tape.map(q, drop=(q,))  # OPT scales the queries itself
    q = _qk_norm(tape, spec, q)
    k = _qk_norm(tape, spec, tape.linear(shape.rows, spec.hidden_size, keys))
    return q, k, tape.linear(shape.rows, spec.hidden_size, keys)


def _qk_norm(tape: Tape, spec: ModelSpec, buffer: TapeBuffer) -> TapeBuffer:
    if not spec.qk_norm:
        return buffer
    normed = norm(tape, spec, buffer, rows=buffer.num_elements // spec.head_dim)
    tape.free(buffer)
    return normed


def _prefixed(tape: Tape, spec: ModelSpec, shape: Pass, states: TapeBuffer) -> TapeBuffer:
    """Play the copy of keys or values behind those of the virtual tokens."""
    keys = spec.num_key_value_heads * spec.head_dim
    longer = lookup(tape, shape.batch * (shape.seq + spec.num_prefix_tokens) * keys)
    tape.free(states)
    return longer


def _rotate(tape: Tape, buffer: TapeBuffer) -> TapeBuffer:
    """Play ``x * cos + rotate_half(x) * sin``: five kernels, the tables being small."""
    cosine = tape.map(buffer)
    half = tape.map(buffer, num_elements=buffer.num_elements // 2)
    turned = tape.map(buffer, drop=(half,))
    sine = tape.map(turned, drop=(turned,))
    return tape.map(cosine, sine, drop=(cosine, sine))


def _fused(tape: Tape, spec: ModelSpec, shape: Pass, qkv: tuple[TapeBuffer, ...]) -> TapeBuffer:
    """Play a fused attention kernel: scores stay on chip."""
    tape.attention.append(_attention(spec, shape, materialised=False))
    tape.num_kernels += 1
    output = tape.new(shape.rows * spec.num_heads * spec.head_dim)
    tape.elementwise_bytes += sum(buffer.size_bytes for buffer in (*qkv, output))
    return output


def _eager(tape: Tape, spec: ModelSpec, shape: Pass) -> tuple[TapeBuffer, TapeBuffer]:
    """Play the two batched products with every score stored; the probabilities live to the end of the block."""
    per_token = spec.num_heads * spec.head_dim
    tape.attention.append(_attention(spec, shape, materialised=True))
    # Keys and values of heads that share them are repeated for each.
    num_repeated = 0 if spec.num_key_value_heads == spec.num_heads else 2
    repeated = tuple(lookup(tape, shape.rows * per_token) for _ in range(num_repeated))
    copies = _contiguous_copies(tape, shape, per_token, 1 if repeated else 2)
    scores = tape.new(shape.batch * spec.num_heads * shape.seq * (shape.seq + spec.num_prefix_tokens))
    tape.num_kernels += 1
    tape.free(*copies)
    scores = tape.map(scores, drop=(scores,))
    scores = tape.map(scores, drop=(scores,))
    probabilities = _softmax(tape, spec, scores)
    copies = _contiguous_copies(tape, shape, per_token, 0 if repeated else 1)
    mixed = tape.new(shape.rows * per_token)
    tape.num_kernels += 1
    tape.free(*copies)
    return tape.map(mixed, drop=(mixed, *repeated)), probabilities


def _contiguous_copies(tape: Tape, shape: Pass, per_token: int, count: int) -> tuple[TapeBuffer, ...]:
    """Play the copies that a batched product makes of transposed operands; one row alone needs none."""
    if shape.batch == 1:
        return ()
    return tuple(lookup(tape, shape.rows * per_token) for _ in range(count))


def _softmax(tape: Tape, spec: ModelSpec, scores: TapeBuffer) -> TapeBuffer:
    """Play a softmax, in float32 for all families but GPT-2 and RoBERTa, and back to the compute format."""
    if spec.family in ("gpt2", "roberta"):
        return tape.map(scores, drop=(scores,), exponentials=1)
    upcast = scores if scores.dtype == "float32" else tape.cast(scores, "float32")
    wide = tape.map(upcast, drop=() if upcast is scores else (upcast,), exponentials=1)
    narrow = tape.cast(wide, scores.dtype)
    tape.free(scores)
    if narrow is not wide:
        tape.free(wide)
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
