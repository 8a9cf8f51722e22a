"""Work of one segment's forward pass, kernel by kernel as transformers' modelling code launches it.

The account follows the eager PyTorch code of transformers 5 under ``torch.no_grad`` and in evaluation mode. It includes
temporaries that Python keeps alive to the end of a function, such as the attention probabilities of the ``eager``
implementation. Masks are those of unpadded batches unless `padded`.
"""

from __future__ import annotations

from collections.abc import Callable

from costmodel.formats import FORMATS, DType
from costmodel.models.components import (
    TANH,
    AttentionImpl,
    Pass,
    attention_core,
    lookup,
    norm,
    seen_tokens,
    traced_attention,
)
from costmodel.models.families import FAMILIES
from costmodel.models.kernel_trace import KernelTrace, TracedBuffer
from costmodel.models.model_spec import (
    BACK,
    EMBED,
    FRONT,
    HEAD,
    ElementsPerSequence,
    ModelSpec,
    block_index,
    block_segment,
)
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
    spec : ModelSpec
        The model.
    segment : str
        One of its ``segments``, such as ``"block.0"``.
    batch, seq : int
        Number of sequences, and of tokens per sequence.
    dtype : str
        Compute format; hidden states between segments have it.
    storage_dtype : str, optional
        Format of the weights in memory, `dtype` if not given. Where they differ the segment first casts its own
        weights, and the whole cast copy counts as workspace.
    attention : {"eager", "sdpa", "flash"}
        Only ``eager`` stores the score matrix. Fused kernels skip the masked half of an unpadded batch.
    loss_chunk : int, optional
        Number of tokens whose logits exist at one time; all of them if not given.
    padded : bool
        Whether a padding mask is passed, with which fused kernels compute the full square.
    num_kept : int, optional
        Number of tokens that go on behind a block's attention; all of them if not given.

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
    The head's logits are upcast to float32, and normalised into a second float32 copy before the loss picks its terms.
    So half-precision logits of ``T`` tokens over a vocabulary of ``V`` need ``(2 + 4 + 4) T V`` bytes. Those of a masked
    model are normalised as they are, and need ``(2 + 2) T V``.
    """
    if segment not in spec.segments:
        message = f"model {spec.name} has no segment {segment!r}"
        raise ModelError(message, hint=f"segments: {EMBED}, block.0 and so on, {HEAD}")
    if seq > spec.max_positions:
        message = f"seq={seq} exceeds the {spec.max_positions} positions of model {spec.name}"
        raise ModelError(message, hint=f"use a sequence of at most {spec.max_positions} tokens")
    shape = Pass(
        batch=batch,
        seq=seq,
        dtype=dtype,
        attention=attention,
        loss_chunk=loss_chunk,
        padded=padded,
        num_kept=num_kept,
        block=0 if segment in (EMBED, HEAD) else block_index(segment),
    )
    code: ModelCode = "embed" if segment == EMBED else "head" if segment == HEAD else "block"
    ending = next((end for end in (FRONT, BACK) if segment.endswith(end)), "")
    work = _PLAYERS[ending or code](spec, shape).model_copy(update={"calls": (code,)})
    if (workspace := _measured_workspace(spec, segment, shape)) is not None:
        work = work.model_copy(update={"workspace_bytes": workspace})
    stored = storage_dtype or dtype
    halves = {"float16", "bfloat16"}
    is_as_wide = FORMATS[stored].element_bytes == FORMATS[dtype].element_bytes
    if is_as_wide and {stored, dtype} != halves:
        return work
    groups = spec.param_groups_of(segment)
    elements = sum(group.num_parameters for group in groups)
    cast = Work(
        dtype=dtype,
        param_pass_bytes=elements * (FORMATS[stored].element_bytes + FORMATS[dtype].element_bytes),
        num_kernels=sum(group.num_tensors for group in groups),
    )
    workspace = work.workspace_bytes + elements * FORMATS[dtype].element_bytes
    return (work + cast).model_copy(update={"workspace_bytes": workspace})


def _elements(of_sequence: ElementsPerSequence, batch: int, seq: int) -> int:
    once, tokens, pairs = of_sequence
    return batch * (once + tokens * seq + pairs * seq**2)


def _measured_workspace(spec: ModelSpec, segment: str, shape: Pass) -> int | None:
    """Return the bytes of a segment's workspace, where moments of it are known; what it is given and hands on are no part of it."""
    index = spec.segments.index(segment)
    if not spec.live_elements or not spec.live_elements[index] or shape.loss_chunk or shape.num_kept:
        return None
    batch, seq = shape.batch, shape.seq
    most = max(_elements(moment, batch, seq) for moment in spec.live_elements[index])
    if segment == HEAD:
        # A forward drops its state, masks and tables before logits are made, but whoever runs the head still holds them.
        usual = spec.model_copy(update={"live_elements": (), "buffer_bytes": 0})
        shared = shared_activation_bytes(
            usual, batch=batch, seq=seq, dtype=shape.dtype, attention=shape.attention
        )
        return FORMATS[shape.dtype].bytes(most) + shared
    held = spec.segments[max(index - 1, 0) : index + 1]
    handed = sum(handed_elements(spec, batch=batch, seq=seq, segment=own) for own in held)
    return FORMATS[shape.dtype].bytes(max(most - handed, 0))


def handed_elements(spec: ModelSpec, *, batch: int, seq: int, segment: str = "") -> int:
    """Return the numbers that `segment` hands to the next: a hidden state, from a block's front the MLP's too, or as the model says."""
    if spec.boundary_elements and segment not in ("", HEAD):
        return _elements(spec.boundary_elements[spec.segments.index(segment)], batch, seq)
    inner = spec.intermediate_size if segment.endswith(FRONT) else 0
    return batch * seq * (spec.hidden_size + inner)


def activation_bytes(
    spec: ModelSpec, *, batch: int, seq: int, dtype: DType = "float32", segment: str = ""
) -> int:
    """Return the bytes that a segment hands to the next: a hidden state, from a block's front the MLP's activation, too.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    batch, seq : int
        Number of sequences, and of tokens per sequence.
    dtype : str
        Format of the activations.
    segment : str
        Segment that computes them; by default one that ends with a whole block.
    """
    return FORMATS[dtype].bytes(handed_elements(spec, batch=batch, seq=seq, segment=segment))


def shared_activation_bytes(
    spec: ModelSpec,
    *,
    batch: int,
    seq: int,
    dtype: DType = "float32",
    attention: AttentionImpl = "sdpa",
    is_padded: bool = True,
) -> int:
    """Return the bytes that every block reads and that live for the whole forward: masks and rotary tables.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    batch, seq : int
        Number of sequences, and of tokens per sequence.
    dtype : str
        Format of the activations.
    attention : {"eager", "sdpa", "flash"}
        Implementation. A padded batch has a mask: a number per pair of positions under ``eager``, else a byte.
    is_padded : bool
        Whether the batch is padded. If not, fused attention takes a flag that it is causal.
    """
    if spec.live_elements:  # which have them
        return spec.buffer_bytes
    width = FORMATS[dtype].element_bytes
    # Blocks that see as many tokens share a mask; one of a window is needed without padding, too.
    spans = {seen_tokens(spec, block, seq) for block in range(spec.num_blocks)}
    stores_scores = attention == "eager" or (spec.stores_scores == "always" and attention == "sdpa")
    masks = sum(width if stores_scores else bool(is_padded or span) for span in spans)
    if has_slopes := "slopes in mask" in spec.quirks:
        masks = spec.num_heads * width
    has_tables = spec.positions == "rotary" or has_slopes
    rotary = 2 * seq * (spec.rotary_dim or spec.head_dim) * width if has_tables else 0
    alibi = batch * spec.num_heads * seq * width if spec.positions == "alibi" else 0
    return batch * seq * seq * masks + rotary * len(spans) + alibi + spec.buffer_bytes


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
    for _ in range(spec.embedding_passes):
        hidden = trace.map(hidden, drop=(hidden,))
    return trace.work(output_bytes=hidden.size_bytes)


def _masked_embed_work(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> Work:
    """Play RoBERTa's sum of three tables and its norm; the code holds all summands to the end."""
    num_elements = shape.rows * spec.hidden_size
    tokens, types = lookup(trace, num_elements), lookup(trace, num_elements)
    summed = trace.map(tokens, types)
    positions = lookup(trace, num_elements)
    total = trace.map(summed, positions, drop=(summed,))
    hidden = norm(trace, spec, total)
    trace.free(tokens, types, positions, total)
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
    for number in range(spec.logit_passes):
        logits = trace.map(logits, drop=(logits,), exponentials=TANH if number == 1 else 0)
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
    normed = _normed_before(trace, spec, entry)
    attended, kept = traced_attention(trace, spec, shape)
    attended = _normed_after(trace, spec, attended)
    if shape.num_kept:
        entry = lookup(trace, shape.kept_rows * spec.hidden_size)
    is_held = spec.family == "gpt2" or "holds attention" in spec.quirks
    done = () if "holds norm" in spec.quirks else (normed,)
    residual = _added(trace, spec, entry, attended, drop=done if is_held else (*done, attended))
    return residual, _normed_before(trace, spec, residual), (kept, attended, normed)


def _normed_before(trace: KernelTrace, spec: ModelSpec, hidden: TracedBuffer) -> TracedBuffer:
    """Play the norm before attention or MLP, where there is one."""
    return norm(trace, spec, hidden) if spec.norm_placement != "after" else hidden


def _normed_after(trace: KernelTrace, spec: ModelSpec, change: TracedBuffer) -> TracedBuffer:
    """Play the norm behind attention or MLP, where there is one."""
    if spec.norm_placement == "before":
        return change
    normed = norm(trace, spec, change)
    trace.free(change)
    return normed


def _added(
    trace: KernelTrace,
    spec: ModelSpec,
    residual: TracedBuffer,
    change: TracedBuffer,
    *,
    drop: tuple[TracedBuffer, ...],
) -> TracedBuffer:
    if not spec.scaled_residual:
        return trace.map(residual, change, drop=drop)
    scaled = trace.map(change)
    return trace.map(residual, scaled, drop=(scaled, *drop))


def _block_work(spec: ModelSpec, shape: Pass) -> Work:
    trace = KernelTrace(shape.dtype, adds_biases="late biases" in spec.quirks)
    if spec.family not in FAMILIES:
        return _listed_block_work(trace, spec, shape)
    if not spec.is_causal:
        return _masked_block_work(trace, spec, shape)
    if spec.residual != "serial":
        return _parallel_block_work(trace, spec, shape)
    residual, normed, kept = _up_to_mlp(trace, spec, shape)
    output = _normed_after(trace, spec, _mlp(trace, spec, shape, normed))
    if normed is not residual:
        trace.free(normed)
    output = _added(trace, spec, residual, output, drop=(residual, output))
    trace.free(*kept)
    _adapters(trace, spec, shape)
    return trace.work(output_bytes=output.size_bytes)


def _listed_block_work(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> Work:
    """Play a block of a family of which nothing is known but its linear layers and its experts, all of whose results stay alive."""
    handed = handed_elements(spec, batch=shape.batch, seq=shape.seq, segment=block_segment(shape.block))
    entry = TracedBuffer(handed, shape.dtype)
    normed, kept = norm(trace, spec, entry), []
    for group in spec.param_groups_of(block_segment(shape.block)):
        for outputs, inputs in (*group.linears, *group.frozen_linears):
            made = trace.linear(shape.rows, inputs, outputs)
            kept.append(trace.map(made, exponentials=1))
            kept.append(made)
    attended, scores = attention_core(trace, spec, shape, ())
    residual = trace.map(entry, attended, drop=(attended,))
    if spec.has_experts(shape.block):
        change = _mixture(trace, spec, shape, shared=None)
        residual = trace.map(residual, change, drop=(residual, change))
    output = norm(trace, spec, residual)
    trace.free(normed, scores, residual, *kept)
    _adapters(trace, spec, shape)
    return trace.work(output_bytes=output.size_bytes)


def _parallel_block_work(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> Work:
    """Play a block whose attention and MLP read the same hidden state."""
    entry = TracedBuffer(shape.rows * spec.hidden_size, shape.dtype)
    normed = norm(trace, spec, entry)
    attended, kept = traced_attention(trace, spec, shape)
    other = norm(trace, spec, entry) if spec.residual == "parallel" else normed
    output = _mlp(trace, spec, shape, other)
    total = trace.map(attended, output)
    summed = trace.map(total, entry, drop=(attended, output, total, normed, other, kept))
    _adapters(trace, spec, shape)
    return trace.work(output_bytes=summed.size_bytes)


def _mlp(trace: KernelTrace, spec: ModelSpec, shape: Pass, normed: TracedBuffer) -> TracedBuffer:
    """Play a block's MLP, or its experts."""
    if spec.has_experts(shape.block):
        return _mixture(trace, spec, shape, _shared_expert(trace, spec, shape))
    inner = _first_of_mlp(trace, spec, shape, normed)
    output = trace.linear(shape.kept_rows, spec.intermediate_size, spec.hidden_size)
    trace.free(inner)
    return output


_NUM_ROUTING_KERNELS = 13
"""Kernels that choose experts and put visits in order, on a few numbers a token each."""
_ORDER_BYTES = 48
"""Of a visit's expert, its weight, and its position in the order of experts and in that of tokens."""


def _mixture(trace: KernelTrace, spec: ModelSpec, shape: Pass, shared: TracedBuffer | None) -> TracedBuffer:
    """Play a mixture of experts: visits in the order of experts, two products for each expert that is visited, and their sum.

    What is alive does not depend on who is visited: a row for each visit.
    """
    experts, rows, hidden = spec.experts, shape.kept_rows, spec.hidden_size
    assert experts is not None
    scores = trace.linear(rows, hidden, experts.num_experts)
    trace.free(trace.map(scores, drop=(scores,), exponentials=1))
    trace.num_kernels += _NUM_ROUTING_KERNELS
    assignments, inner = rows * experts.num_per_token, experts.intermediate_size
    num_active = round(experts.num_active(rows, shape.block))
    order = trace.new(assignments * _ORDER_BYTES // 4, "float32")
    picked = lookup(trace, assignments * hidden)
    biases = [lookup(trace, assignments * 2 * inner)] if experts.has_biases else []
    both = trace.grouped(assignments, hidden, 2 * inner, num_active)
    half = TracedBuffer(assignments * inner, shape.dtype)
    if experts.has_biases:  # gpt-oss clamps both halves, and writes its activation out
        parts = [trace.map(half, exponentials=number == 3) for number in range(6)]
        activated = trace.map(*parts[:2], drop=tuple(parts))
    else:
        gate = trace.map(half, exponentials=1)
        activated = trace.map(gate, half, drop=(gate,))
    trace.free(both, *biases)
    biases = [lookup(trace, assignments * hidden)] if experts.has_biases else []
    down = trace.grouped(assignments, inner, hidden, num_active)
    trace.free(activated)
    weighted = trace.map(down)
    ordered = lookup(trace, assignments * hidden)
    trace.free(weighted)
    output = trace.map(ordered, num_elements=rows * hidden, drop=(ordered, down, picked, order, *biases))
    return output if shared is None else trace.map(output, shared, drop=(output, shared))


def _shared_expert(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> TracedBuffer | None:
    """Play the MLP that all tokens go through besides; None where there is none."""
    experts, rows, hidden = spec.experts, shape.kept_rows, spec.hidden_size
    if experts is None or not experts.shared_size:
        return None
    inner = _gated(trace, spec, rows, experts.shared_size)
    shared = trace.linear(rows, experts.shared_size, hidden)
    trace.free(inner)
    if not experts.gates_shared:
        return shared
    gate = trace.linear(rows, hidden, 1)
    gate = trace.map(gate, drop=(gate,), exponentials=1)
    return trace.map(shared, gate, drop=(shared, gate))


def _masked_block_work(trace: KernelTrace, spec: ModelSpec, shape: Pass) -> Work:
    """Play RoBERTa's block, which norms what it adds, behind attention and behind the MLP."""
    entry = TracedBuffer(shape.rows * spec.hidden_size, shape.dtype)
    attended, kept = traced_attention(trace, spec, shape)
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
        return _gated(trace, spec, shape.kept_rows, spec.intermediate_size)
    inner = trace.linear(shape.kept_rows, spec.hidden_size, spec.intermediate_size)
    if spec.family == "opt":
        trace.free(normed)  # OPT's block overwrites its only name for it; the others keep it in the caller
    return _activate(trace, spec, inner)


def _gated(trace: KernelTrace, spec: ModelSpec, rows: int, width: int) -> TracedBuffer:
    if spec.fused_gate:
        both, half = trace.linear(rows, spec.hidden_size, 2 * width), TracedBuffer(rows * width, trace.dtype)
        gate = trace.map(half, exponentials=1)
        return trace.map(gate, half, drop=(gate, both))
    gate = _activate(trace, spec, trace.linear(rows, spec.hidden_size, width))
    up = trace.linear(rows, spec.hidden_size, width)
    return trace.map(gate, up, drop=(gate, up))


def _activate(trace: KernelTrace, spec: ModelSpec, inner: TracedBuffer) -> TracedBuffer:
    """Play the activation: one kernel, or several for those that transformers writes out."""
    if spec.activation == "relu2":
        positive = trace.map(inner)
        return trace.map(positive, drop=(positive, inner))
    if spec.activation not in ("gelu_new", "bloom_gelu"):
        return trace.map(inner, drop=(inner,), exponentials=0 if spec.activation == "relu" else 1)
    half = trace.map(inner)
    scaled = (trace.map(inner),) if spec.activation == "bloom_gelu" else ()
    term = trace.map(inner)
    term = trace.map(term, drop=(term,))
    term = trace.map(inner, term, drop=(term,))
    for exponentials in (0, TANH, 0):
        term = trace.map(term, drop=(term,), exponentials=exponentials)
    return trace.map(half, term, drop=(half, term, inner, *scaled))


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


_PLAYERS: dict[str, Callable[[ModelSpec, Pass], Work]] = {
    "embed": _embed_work,
    "block": _block_work,
    FRONT: _front_work,
    BACK: _back_work,
    "head": _head_work,
}
