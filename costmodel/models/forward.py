"""Work of one segment's forward pass, kernel by kernel as transformers' modelling code launches it.

The account follows the eager PyTorch code of transformers 5 under ``torch.no_grad`` and in evaluation mode,
including temporaries that Python keeps alive to the end of a function (the attention probabilities of the
``eager`` implementation, for one). Masks are those of unpadded batches unless `padded`.
"""

from __future__ import annotations

from collections.abc import Callable

from costmodel.formats import FORMATS, DType
from costmodel.models.kernel_trace import KernelTrace, TracedBuffer
from costmodel.models.model_spec import BACK, EMBED, FRONT, HEAD, ModelSpec
from costmodel.models.pieces import AttentionImpl, Pass, attention_part, lookup, norm
from costmodel.work import ModelCode, Work
from topology.errors import ModelError

_NUM_LOSS_SCALARS = 16
"""The loss, the weight that it is a mean over, and what becomes of the two until the step is through."""


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
    num_kept: int | None = None,
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
    num_kept : int, optional
        Tokens of a block that go on behind its attention; all of them if not given.

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
    terms, so half-precision logits of ``T`` tokens over a vocabulary of ``V`` need ``(2 + 4 + 4) T V`` bytes; those of
    a masked model, which are normalised as they are, ``(2 + 2) T V``.
    """
    if segment not in spec.segments:
        message = f"model {spec.name} has no segment {segment!r}"
        raise ModelError(message, hint=f"segments run from {EMBED} over block.0 to {HEAD}")
    if seq > spec.max_positions:
        message = f"seq={seq} is longer than the {spec.max_positions} positions of model {spec.name}"
        raise ModelError(message, hint=f"use a sequence of at most {spec.max_positions} tokens")
    shape = Pass(
        batch=batch,
        seq=seq,
        dtype=dtype,
        attention=attention,
        loss_chunk=loss_chunk,
        padded=padded,
        num_kept=num_kept,
    )
    code: ModelCode = "embed" if segment == EMBED else "head" if segment == HEAD else "block"
    ending = next((end for end in (FRONT, BACK) if segment.endswith(end)), "")
    work = _PLAYERS[ending or code](spec, shape).model_copy(update={"calls": (code,)})
    stored = storage_dtype or dtype
    halves = {"float16", "bfloat16"}
    is_as_wide = FORMATS[stored].element_bytes == FORMATS[dtype].element_bytes
    if is_as_wide and {stored, dtype} != halves:
        return work
    groups = spec.param_groups_of(segment)
    elements = sum(group.num_parameters for group in groups)
    cast = Work(
        dtype=dtype,
        sweep_bytes=elements * (FORMATS[stored].element_bytes + FORMATS[dtype].element_bytes),
        num_kernels=sum(group.num_tensors for group in groups),
    )
    workspace = work.workspace_bytes + elements * FORMATS[dtype].element_bytes
    return (work + cast).model_copy(update={"workspace_bytes": workspace})


def activation_bytes(
    spec: ModelSpec, *, batch: int, seq: int, dtype: DType = "float32", segment: str = ""
) -> int:
    """Return the bytes that `segment` hands to the next: a hidden state, from a block's front the MLP's too."""
    inner = spec.intermediate_size if segment.endswith(FRONT) else 0
    return FORMATS[dtype].bytes(batch * seq * (spec.hidden_size + inner))


def shared_activation_bytes(
    spec: ModelSpec,
    *,
    batch: int,
    seq: int,
    dtype: DType = "float32",
    attention: AttentionImpl = "sdpa",
    is_padded: bool = True,
) -> int:
    """Return the most bytes that every block reads and that live for the whole forward: mask and rotary tables.

    A padded batch has a mask, a number for each pair of positions under ``eager`` and a byte under fused attention; without
    padding fused attention takes a flag that it is causal.
    """
    width = FORMATS[dtype].element_bytes
    mask = batch * seq * seq * (width if attention == "eager" else is_padded)
    rotary = 2 * seq * spec.head_dim * width if spec.positions == "rotary" else 0
    return mask + rotary


def _embed_work(spec: ModelSpec, shape: Pass) -> Work:
    trace = KernelTrace(shape.dtype)
    if not spec.is_causal:
        return _masked_embed_work(trace, spec, shape)
    hidden = lookup(trace, shape.rows * spec.embed_dim)
    if spec.positions == "learned":
        # OPT looks positions up for every row of the batch, the others once for all rows.
        rows = shape.rows if spec.family == "opt" else shape.seq
        table = lookup(trace, rows * spec.hidden_size)
        if spec.embed_dim != spec.hidden_size:
            narrow, hidden = hidden, trace.linear(shape.rows, spec.embed_dim, spec.hidden_size)
            trace.free(narrow)
        hidden = trace.map(hidden, table, drop=(hidden, table))
    return trace.work(output_bytes=hidden.size_bytes)


def _masked_embed_work(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> Work:
    """Play RoBERTa's sum of three tables and its norm; the code holds all summands to the end."""
    num_elements = shape.rows * spec.hidden_size
    tokens, types = lookup(trace, num_elements), lookup(trace, num_elements)
    summed = trace.map(tokens, types)
    places = lookup(trace, num_elements)
    total = trace.map(summed, places, drop=(summed,))
    hidden = norm(trace, spec, total)
    trace.free(tokens, types, places, total)
    return trace.work(output_bytes=hidden.size_bytes)


def _head_work(spec: ModelSpec, shape: Pass) -> Work:
    trace = KernelTrace(shape.dtype)
    hidden = TracedBuffer(shape.rows * spec.hidden_size, shape.dtype)
    if spec.final_norm:
        hidden = norm(trace, spec, hidden)
    if not spec.is_causal:
        dense = _activate(trace, spec, trace.linear(shape.rows, spec.hidden_size, spec.hidden_size))
        hidden = norm(trace, spec, dense)
        trace.free(dense)
    if spec.embed_dim != spec.hidden_size:
        wide, hidden = hidden, trace.linear(shape.rows, spec.hidden_size, spec.embed_dim)
        trace.free(wide)
    chunk = min(shape.loss_chunk or shape.rows, shape.rows)
    num_whole, rest = divmod(shape.rows, chunk)
    with trace.repeated(num_whole):
        _loss(trace, spec, chunk)
    if rest:
        _loss(trace, spec, rest)
    return trace.work()


def _loss(trace: KernelTrace, spec: ModelSpec, rows: int) -> None:
    logits = trace.linear(rows, spec.embed_dim, spec.vocab_size)
    upcast = logits  # transformers' masked models take the loss of logits as they are
    if spec.is_causal:
        if trace.dtype == "float64":  # which a cast of the trace takes for as wide
            upcast = trace.map(logits, dtype="float32")
        else:
            upcast = trace.cast(logits, "float32")
    log_probabilities = trace.map(upcast, exponentials=1)
    trace.num_kernels += 1  # the loss picks one element per row, which costs a launch and a few numbers
    loss = trace.new(_NUM_LOSS_SCALARS, "float32")
    trace.free(logits, upcast, log_probabilities, loss)


def _front_work(spec: ModelSpec, shape: Pass) -> Work:
    """Play a block up to the input of the MLP's second linear, which leaves with the residual stream."""
    trace = KernelTrace(shape.dtype)
    residual, normed, kept = _up_to_mlp(trace, spec, shape)
    inner = _first_of_mlp(trace, spec, shape, normed)
    trace.free(*kept, normed)
    _adapters(trace, spec, shape, behind=False)
    return trace.work(output_bytes=inner.size_bytes + residual.size_bytes)


def _back_work(spec: ModelSpec, shape: Pass) -> Work:
    """Play the rest of such a block."""
    trace = KernelTrace(shape.dtype)
    residual = TracedBuffer(shape.rows * spec.hidden_size, shape.dtype)
    output = trace.linear(shape.rows, spec.intermediate_size, spec.hidden_size)
    output = trace.map(residual, output, drop=(output,))
    _adapters(trace, spec, shape, behind=True)
    return trace.work(output_bytes=output.size_bytes)


def _up_to_mlp(
    trace: KernelTrace, spec: ModelSpec, shape: Pass
) -> tuple[TracedBuffer, TracedBuffer, tuple[TracedBuffer, ...]]:
    """Play a block up to its MLP; return the residual stream, the MLP's input, and what stays alive meanwhile."""
    entry = TracedBuffer(shape.rows * spec.hidden_size, shape.dtype)
    normed = norm(trace, spec, entry)
    attended, kept = attention_part(trace, spec, shape)
    if shape.num_kept:
        entry = lookup(trace, shape.kept_rows * spec.hidden_size)
    residual = trace.map(entry, attended, drop=(normed, attended) if spec.family != "gpt2" else (normed,))
    return residual, norm(trace, spec, residual), (kept, attended)


def _block_work(spec: ModelSpec, shape: Pass) -> Work:
    trace = KernelTrace(shape.dtype)
    if not spec.is_causal:
        return _masked_block_work(trace, spec, shape)
    residual, normed, kept = _up_to_mlp(trace, spec, shape)
    inner = _first_of_mlp(trace, spec, shape, normed)
    output = trace.linear(shape.kept_rows, spec.intermediate_size, spec.hidden_size)
    trace.free(inner, normed)
    output = trace.map(residual, output, drop=(residual, output))
    trace.free(*kept)
    _adapters(trace, spec, shape)
    return trace.work(output_bytes=output.size_bytes)


def _masked_block_work(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> Work:
    """Play RoBERTa's block, which norms what it adds, behind attention and behind the MLP."""
    entry = TracedBuffer(shape.rows * spec.hidden_size, shape.dtype)
    attended, kept = attention_part(trace, spec, shape)
    residual = _added_and_normed(trace, spec, entry, attended)
    inner = _first_of_mlp(trace, spec, shape, residual)
    output = trace.linear(shape.rows, spec.intermediate_size, spec.hidden_size)
    output = _added_and_normed(trace, spec, residual, output)
    trace.free(inner, residual, kept)
    _adapters(trace, spec, shape)
    return trace.work(output_bytes=output.size_bytes)


def _added_and_normed(
    trace: KernelTrace, spec: ModelSpec, residual: TracedBuffer, change: TracedBuffer
) -> TracedBuffer:
    total = trace.map(residual, change)
    normed = norm(trace, spec, total)
    trace.free(change, total)
    return normed


def _first_of_mlp(trace: KernelTrace, spec: ModelSpec, shape: Pass, normed: TracedBuffer) -> TracedBuffer:
    """Play the MLP up to the input of its second linear."""
    if spec.mlp == "gated":
        gate = trace.linear(shape.kept_rows, spec.hidden_size, spec.intermediate_size)
        gate = _activate(trace, spec, gate)
        up = trace.linear(shape.kept_rows, spec.hidden_size, spec.intermediate_size)
        return trace.map(gate, up, drop=(gate, up))
    inner = trace.linear(shape.kept_rows, spec.hidden_size, spec.intermediate_size)
    if spec.family == "opt":
        trace.free(normed)  # OPT's block overwrites its only name for it; the others keep it in the caller
    return _activate(trace, spec, inner)


def _activate(trace: KernelTrace, spec: ModelSpec, inner: TracedBuffer) -> TracedBuffer:
    """Play the activation: one kernel, or eight for ``gelu_new``, which transformers writes out."""
    if spec.activation != "gelu_new":
        return trace.map(inner, drop=(inner,), exponentials=0 if spec.activation == "relu" else 1)
    half = trace.map(inner)
    term = trace.map(inner)
    term = trace.map(term, drop=(term,))
    term = trace.map(inner, term, drop=(term,))
    for exponentials in (0, _TANH, 0):
        term = trace.map(term, drop=(term,), exponentials=exponentials)
    return trace.map(half, term, drop=(half, term, inner))


def _adapters(trace: KernelTrace, spec: ModelSpec, shape: Pass, *, behind: bool | None = None) -> None:
    """Play the adapters' two narrow products each, the scaling and the addition to the base's output."""
    for inputs, outputs in spec.adapter_shapes:
        if behind is not None and behind != (inputs == spec.intermediate_size):
            continue
        narrow = trace.linear(shape.rows, inputs, spec.adapter_rank)
        wide = trace.linear(shape.rows, spec.adapter_rank, outputs)
        scaled = trace.map(wide, drop=(narrow, wide))
        total = trace.map(TracedBuffer(scaled.num_elements, shape.dtype), scaled, drop=(scaled,))
        trace.free(total)


_TANH = 4
"""Exponentials that a hyperbolic tangent counts as: torch's takes about four times as long on a CPU."""

_PLAYERS: dict[str, Callable[[ModelSpec, Pass], Work]] = {
    "embed": _embed_work,
    "block": _block_work,
    FRONT: _front_work,
    BACK: _back_work,
    "head": _head_work,
}
