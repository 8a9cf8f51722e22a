"""Work of one segment's forward pass, kernel by kernel as transformers' modelling code launches it.

The account follows the eager PyTorch code of transformers 5 under ``torch.no_grad`` and in evaluation mode,
including temporaries that Python keeps alive to the end of a function (the attention probabilities of the
``eager`` implementation, for one). Masks are those of unpadded batches unless `padded`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from costmodel.model_spec import BACK, EMBED, FRONT, HEAD, ModelSpec
from costmodel.tape import Buffer, Tape
from costmodel.work import DTYPE_BYTES, Attention, DType, ModelCode, Work
from topology.errors import ModelError

AttentionImpl = Literal["eager", "sdpa", "flash"]

_NUM_LOSS_SCALARS = 16
"""The loss, the weight that it is a mean over, and what becomes of the two until the step is through."""


class _Pass(BaseModel):
    """One forward's shape: everything about it that is not the model."""

    model_config = ConfigDict(frozen=True)

    batch: PositiveInt
    seq: PositiveInt
    dtype: DType
    attention: AttentionImpl
    loss_chunk: PositiveInt | None
    padded: bool

    @property
    def rows(self) -> int:
        return self.batch * self.seq


def forward_work(
    spec: ModelSpec,
    segment: str,
    *,
    batch: int,
    seq: int,
    dtype: DType = "float32",
    storage_dtype: DType | None = None,
    attention: AttentionImpl = "sdpa",
    loss_chunk: int | None = None,
    padded: bool = False,
) -> Work:
    """Return the work of one forward of `segment` over ``batch x seq`` tokens.

    Parameters
    ----------
    dtype : str
        Compute format; hidden states between segments have it.
    storage_dtype : str, optional
        Format of the weights in memory, `dtype` if not given. Where they differ the segment first casts its own
        weights, and the whole cast copy counts as workspace.
    attention : {"eager", "sdpa", "flash"}
        Only ``eager`` stores the score matrix. Fused kernels skip the masked half of an unpadded batch.
    loss_chunk : int, optional
        Tokens whose logits exist at one time; all of them if not given.
    padded : bool
        Whether a padding mask is passed, with which fused kernels compute the full square.

    Returns
    -------
    Work
        ``workspace_bytes`` is the peak of what the segment allocates less its output, which the caller holds
        until the next segment is done; the input is the caller's too.

    Raises
    ------
    ModelError
        If the model has no such segment, or `seq` is longer than it accepts.

    Notes
    -----
    The head's logits are upcast to float32 and normalised into a second float32 copy before the loss picks its
    terms, so half-precision logits of ``T`` tokens over a vocabulary of ``V`` need ``(2 + 4 + 4) T V`` bytes.
    """
    if segment not in spec.segments:
        message = f"model {spec.name} has no segment {segment!r}"
        raise ModelError(message, hint=f"segments run from {EMBED} over block.0 to {HEAD}")
    if seq > spec.max_positions:
        message = f"seq={seq} is longer than the {spec.max_positions} positions of model {spec.name}"
        raise ModelError(message, hint=f"use a sequence of at most {spec.max_positions} tokens")
    shape = _Pass(
        batch=batch, seq=seq, dtype=dtype, attention=attention, loss_chunk=loss_chunk, padded=padded
    )
    work = _player_of(segment)(spec, shape).model_copy(update={"calls": (_code_of(segment),)})
    stored = storage_dtype or dtype
    if DTYPE_BYTES[stored] == DTYPE_BYTES[dtype] and {stored, dtype} != {"float16", "bfloat16"}:
        return work
    return _with_cast_weights(work, spec, segment, stored, dtype)


def activation_bytes(
    spec: ModelSpec, *, batch: int, seq: int, dtype: DType = "float32", segment: str = ""
) -> int:
    """Return the bytes that `segment` hands to the next: a hidden state, from a block's front the MLP's too."""
    inner = spec.intermediate_size if segment.endswith(FRONT) else 0
    return batch * seq * (spec.hidden_size + inner) * DTYPE_BYTES[dtype]


def shared_activation_bytes(
    spec: ModelSpec, *, batch: int, seq: int, dtype: DType = "float32", attention: AttentionImpl = "sdpa"
) -> int:
    """Return the bytes that every block reads and that live for the whole forward: mask and rotary tables.

    An unpadded batch has a mask under ``eager`` only; fused attention is told that it is causal.
    """
    width = DTYPE_BYTES[dtype]
    mask = batch * seq * seq * width if attention == "eager" else 0
    rotary = 2 * seq * spec.head_dim * width if spec.positions == "rotary" else 0
    return mask + rotary


def segment_parameters(spec: ModelSpec, segment: str) -> int:
    """Return the number of stored parameters that `segment` reads, a tied table under each of its readers."""
    return sum(group.num_parameters for group in spec.groups_of(segment))


def _code_of(segment: str) -> ModelCode:
    if segment == EMBED:
        return "embed"
    return "head" if segment == HEAD else "block"


def _with_cast_weights(work: Work, spec: ModelSpec, segment: str, stored: DType, dtype: DType) -> Work:
    groups = spec.groups_of(segment)
    elements = sum(group.num_parameters for group in groups)
    cast = Work(
        dtype=dtype,
        sweep_bytes=elements * (DTYPE_BYTES[stored] + DTYPE_BYTES[dtype]),
        num_kernels=sum(group.num_tensors for group in groups),
    )
    workspace = work.workspace_bytes + elements * DTYPE_BYTES[dtype]
    return (work + cast).model_copy(update={"workspace_bytes": workspace})


def _embed_work(spec: ModelSpec, shape: _Pass) -> Work:
    tape = Tape(shape.dtype)
    hidden = _lookup(tape, shape.rows * spec.embed_dim)
    if spec.positions == "learned":
        # OPT looks positions up for every row of the batch, the others once for all rows.
        rows = shape.rows if spec.family == "opt" else shape.seq
        table = _lookup(tape, rows * spec.hidden_size)
        if spec.embed_dim != spec.hidden_size:
            narrow, hidden = hidden, tape.linear(shape.rows, spec.embed_dim, spec.hidden_size)
            tape.free(narrow)
        hidden = tape.map(hidden, table, drop=(hidden, table))
    return tape.work(output_bytes=hidden.size_bytes)


def _lookup(tape: Tape, num_elements: int) -> Buffer:
    """Play a gather: reads as many elements of the table as it writes."""
    output = tape.new(num_elements)
    tape.elementwise_bytes += 2 * output.size_bytes
    tape.num_kernels += 1
    return output


def _head_work(spec: ModelSpec, shape: _Pass) -> Work:
    tape = Tape(shape.dtype)
    hidden = Buffer(shape.rows * spec.hidden_size, shape.dtype)
    if spec.final_norm:
        hidden = _norm(tape, spec, hidden)
    if spec.embed_dim != spec.hidden_size:
        wide, hidden = hidden, tape.linear(shape.rows, spec.hidden_size, spec.embed_dim)
        tape.free(wide)
    chunk = min(shape.loss_chunk or shape.rows, shape.rows)
    num_whole, rest = divmod(shape.rows, chunk)
    with tape.repeated(num_whole):
        _loss(tape, spec, chunk)
    if rest:
        _loss(tape, spec, rest)
    return tape.work()


def _loss(tape: Tape, spec: ModelSpec, rows: int) -> None:
    logits = tape.linear(rows, spec.embed_dim, spec.vocab_size)
    upcast = tape.cast(logits, "float32") if tape.dtype != "float64" else tape.map(logits, dtype="float32")
    log_probabilities = tape.map(upcast, exponentials=1)
    tape.num_kernels += 1  # the loss picks one element per row, which costs a launch and a few numbers
    loss = tape.new(_NUM_LOSS_SCALARS, "float32")
    tape.free(logits, upcast, log_probabilities, loss)


def _player_of(segment: str) -> Callable[[ModelSpec, _Pass], Work]:
    if segment.endswith(FRONT):
        return _front_work
    return _back_work if segment.endswith(BACK) else _SEGMENTS.get(segment, _block_work)


def _front_work(spec: ModelSpec, shape: _Pass) -> Work:
    """Play a block up to the input of the MLP's second linear, which leaves with the residual stream."""
    tape = Tape(shape.dtype)
    residual, normed, kept = _up_to_mlp(tape, spec, shape)
    inner = _first_of_mlp(tape, spec, shape, normed)
    tape.free(*kept, normed)
    _adapters(tape, spec, shape, behind=False)
    return tape.work(output_bytes=inner.size_bytes + residual.size_bytes)


def _back_work(spec: ModelSpec, shape: _Pass) -> Work:
    """Play the rest of such a block."""
    tape = Tape(shape.dtype)
    residual = Buffer(shape.rows * spec.hidden_size, shape.dtype)
    output = tape.linear(shape.rows, spec.intermediate_size, spec.hidden_size)
    output = tape.map(residual, output, drop=(output,))
    _adapters(tape, spec, shape, behind=True)
    return tape.work(output_bytes=output.size_bytes)


def _up_to_mlp(tape: Tape, spec: ModelSpec, shape: _Pass) -> tuple[Buffer, Buffer, tuple[Buffer, ...]]:
    """Play a block up to its MLP; return the residual stream, the MLP's input, and what stays alive meanwhile."""
    entry = Buffer(shape.rows * spec.hidden_size, shape.dtype)
    normed = _norm(tape, spec, entry)
    attended, kept = _attention_part(tape, spec, shape)
    residual = tape.map(entry, attended, drop=(normed, attended) if spec.family != "gpt2" else (normed,))
    return residual, _norm(tape, spec, residual), (kept, attended)


def _block_work(spec: ModelSpec, shape: _Pass) -> Work:
    tape = Tape(shape.dtype)
    residual, normed, kept = _up_to_mlp(tape, spec, shape)
    output = _mlp(tape, spec, shape, normed)
    output = tape.map(residual, output, drop=(residual, output))
    tape.free(*kept)
    _adapters(tape, spec, shape)
    return tape.work(output_bytes=output.size_bytes)


def _norm(tape: Tape, spec: ModelSpec, hidden: Buffer, rows: int | None = None) -> Buffer:
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


def _attention_part(tape: Tape, spec: ModelSpec, shape: _Pass) -> tuple[Buffer, Buffer]:
    """Play projections and attention; return its output and what stays alive to the end of the block."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    q, k, v = _project(tape, spec, shape, queries, keys)
    if spec.positions == "rotary":
        q, k = _rotate_both(tape, q, k)
    if spec.num_prefix_tokens:
        k, v = _prefixed(tape, spec, shape, k), _prefixed(tape, spec, shape, v)
    if shape.attention == "eager":
        mixed, kept = _eager(tape, spec, shape)
    else:
        mixed, kept = _fused(tape, spec, shape, (q, k, v)), Buffer(0, shape.dtype)
    output = tape.linear(shape.rows, queries, spec.hidden_size)
    tape.free(q, k, v, mixed)
    return output, kept


def _project(
    tape: Tape, spec: ModelSpec, shape: _Pass, queries: int, keys: int
) -> tuple[Buffer, Buffer, Buffer]:
    if spec.fused_qkv:
        fused = tape.linear(shape.rows, spec.hidden_size, queries + 2 * keys)
        view = Buffer(0, shape.dtype)
        return fused, view, view
    q = tape.linear(shape.rows, spec.hidden_size, queries)
    if spec.family == "opt":
        q = tape.map(q, drop=(q,))  # OPT scales the queries itself
    q = _qk_norm(tape, spec, q)
    k = _qk_norm(tape, spec, tape.linear(shape.rows, spec.hidden_size, keys))
    return q, k, tape.linear(shape.rows, spec.hidden_size, keys)


def _qk_norm(tape: Tape, spec: ModelSpec, buffer: Buffer) -> Buffer:
    if not spec.qk_norm:
        return buffer
    normed = _norm(tape, spec, buffer, rows=buffer.num_elements // spec.head_dim)
    tape.free(buffer)
    return normed


def _prefixed(tape: Tape, spec: ModelSpec, shape: _Pass, states: Buffer) -> Buffer:
    """Play the copy of keys or values behind those of the virtual tokens."""
    keys = spec.num_key_value_heads * spec.head_dim
    longer = _lookup(tape, shape.batch * (shape.seq + spec.num_prefix_tokens) * keys)
    tape.free(states)
    return longer


def _rotate_both(tape: Tape, q: Buffer, k: Buffer) -> tuple[Buffer, Buffer]:
    rotated = _rotate(tape, q), _rotate(tape, k)
    tape.free(q, k)
    return rotated


def _rotate(tape: Tape, buffer: Buffer) -> Buffer:
    """Play ``x * cos + rotate_half(x) * sin``: five kernels, the tables being small."""
    cosine = tape.map(buffer)
    half = tape.map(buffer, num_elements=buffer.num_elements // 2)
    turned = tape.map(buffer, drop=(half,))
    sine = tape.map(turned, drop=(turned,))
    return tape.map(cosine, sine, drop=(cosine, sine))


def _fused(tape: Tape, spec: ModelSpec, shape: _Pass, qkv: tuple[Buffer, ...]) -> Buffer:
    """Play a fused attention kernel: scores stay on chip."""
    tape.attention.append(_attention(spec, shape, materialised=False))
    tape.num_kernels += 1
    output = tape.new(shape.rows * spec.num_heads * spec.head_dim)
    tape.elementwise_bytes += sum(buffer.size_bytes for buffer in (*qkv, output))
    return output


def _eager(tape: Tape, spec: ModelSpec, shape: _Pass) -> tuple[Buffer, Buffer]:
    """Play the two batched products with every score stored; the probabilities live to the end of the block."""
    per_token = spec.num_heads * spec.head_dim
    tape.attention.append(_attention(spec, shape, materialised=True))
    repeated = _repeat_heads(tape, spec, shape)
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


def _repeat_heads(tape: Tape, spec: ModelSpec, shape: _Pass) -> tuple[Buffer, ...]:
    if spec.num_key_value_heads == spec.num_heads:
        return ()
    return tuple(_lookup(tape, shape.rows * spec.num_heads * spec.head_dim) for _ in "kv")


def _contiguous_copies(tape: Tape, shape: _Pass, per_token: int, count: int) -> tuple[Buffer, ...]:
    """Play the copies that a batched product makes of transposed operands; one row alone needs none."""
    if shape.batch == 1:
        return ()
    return tuple(_lookup(tape, shape.rows * per_token) for _ in range(count))


def _softmax(tape: Tape, spec: ModelSpec, scores: Buffer) -> Buffer:
    """Play a softmax, in float32 for all families but GPT-2, and back to the compute format."""
    if spec.family == "gpt2":
        return tape.map(scores, drop=(scores,), exponentials=1)
    upcast = scores if scores.dtype == "float32" else tape.cast(scores, "float32")
    wide = tape.map(upcast, drop=() if upcast is scores else (upcast,), exponentials=1)
    narrow = tape.cast(wide, scores.dtype)
    tape.free(scores)
    if narrow is not wide:
        tape.free(wide)
    return narrow


def _attention(spec: ModelSpec, shape: _Pass, *, materialised: bool) -> Attention:
    return Attention(
        num=shape.batch * spec.num_heads,
        query=shape.seq,
        key=shape.seq + spec.num_prefix_tokens,
        head_dim=spec.head_dim,
        materialised=materialised,
        causal_skip=not materialised and not shape.padded and not spec.num_prefix_tokens,
    )


def _mlp(tape: Tape, spec: ModelSpec, shape: _Pass, normed: Buffer) -> Buffer:
    inner = _first_of_mlp(tape, spec, shape, normed)
    output = tape.linear(shape.rows, spec.intermediate_size, spec.hidden_size)
    tape.free(inner, normed)
    return output


def _first_of_mlp(tape: Tape, spec: ModelSpec, shape: _Pass, normed: Buffer) -> Buffer:
    """Play the MLP up to the input of its second linear."""
    if spec.mlp == "gated":
        gate = tape.linear(shape.rows, spec.hidden_size, spec.intermediate_size)
        gate = _activate(tape, spec, gate)
        up = tape.linear(shape.rows, spec.hidden_size, spec.intermediate_size)
        return tape.map(gate, up, drop=(gate, up))
    inner = tape.linear(shape.rows, spec.hidden_size, spec.intermediate_size)
    if spec.family == "opt":
        tape.free(normed)  # OPT's block overwrites its only name for it; the others keep it in the caller
    return _activate(tape, spec, inner)


def _activate(tape: Tape, spec: ModelSpec, inner: Buffer) -> Buffer:
    """Play the activation: one kernel, or eight for ``gelu_new``, which transformers writes out."""
    if spec.activation != "gelu_new":
        return tape.map(inner, drop=(inner,), exponentials=0 if spec.activation == "relu" else 1)
    half = tape.map(inner)
    term = tape.map(inner)
    term = tape.map(term, drop=(term,))
    term = tape.map(inner, term, drop=(term,))
    for exponentials in (0, _TANH, 0):
        term = tape.map(term, drop=(term,), exponentials=exponentials)
    return tape.map(half, term, drop=(half, term, inner))


def _adapters(tape: Tape, spec: ModelSpec, shape: _Pass, *, behind: bool | None = None) -> None:
    """Play the adapters' two narrow products each, the scaling and the addition to the base's output."""
    for inputs, outputs in spec.adapter_shapes:
        if behind is not None and behind != (inputs == spec.intermediate_size):
            continue
        narrow = tape.linear(shape.rows, inputs, spec.adapter_rank)
        wide = tape.linear(shape.rows, spec.adapter_rank, outputs)
        scaled = tape.map(wide, drop=(narrow, wide))
        total = tape.map(Buffer(scaled.num_elements, shape.dtype), scaled, drop=(scaled,))
        tape.free(total)


_TANH = 4
"""Exponentials that a hyperbolic tangent counts as: torch's takes about four times as long on a CPU."""

_SEGMENTS = {EMBED: _embed_work, HEAD: _head_work}
