"""Seconds of a first-order step by recipe: the works of forwards and backwards, what devices exchange, and the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from costmodel.estimate import estimate
from costmodel.formats import FORMATS
from costmodel.models.backward import backward_work
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import EMBED, HEAD, ModelSpec
from costmodel.models.training import TrainingRun
from costmodel.param_passes import copy_work
from costmodel.rates.profile import Bound, Profile
from costmodel.work import Matmul, Work
from topology.errors import PlanError
from topology.graph import Topology
from zosim.hardware.machines import machines_for

_ADAPTER_KERNELS = 6
"""Of one adapter's forward: a dropout, two products, a scaling, an addition, a cast."""

_HOOK_S = 0.012 / 36
"""Seconds of the host for one module of one pass under ZeRO's third stage, whose hooks gather and free weights. Fitted to a
published run of 7B on two devices, at 256 and 512 tokens: 12 modules a block, passed forward, forward again and backward."""
_BLOCK_MODULES, _EXPERT_MODULES = 12, 5
"""Of a block, and of each expert besides: three linears, an activation, and what holds them."""


def hooks_s(model: ModelSpec, num_tokens: int) -> float:
    """Return the seconds of the host for hooks of ZeRO's third stage in one pass, of which `num_tokens` visit experts."""
    num_modules: float = _BLOCK_MODULES * model.num_blocks
    if (experts := model.experts) is not None:
        mixed = [block for block in range(model.num_blocks) if block not in experts.dense_blocks]
        num_modules += _EXPERT_MODULES * sum(experts.num_active(num_tokens, block) for block in mixed)
    return _HOOK_S * num_modules


def adapter_shapes(model: ModelSpec, targets: str) -> list[tuple[int, int]]:
    """Return inputs and outputs of each linear of a block that carries an adapter, by what tools call these.

    Raises PlanError if a name is unknown, or there are none.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    q_width, kv_width = model.num_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    up, down = (hidden, inner), (inner, hidden)
    output = (q_width, hidden)
    mlp = [up, up, down] if model.mlp == "gated" else [up, down]
    q, kv = (hidden, q_width), (hidden, kv_width)
    fused, is_qwen = (hidden, q_width + 2 * kv_width), "c_attn" in targets
    names: list[tuple[str, list[tuple[int, int]]]] = [
        ("q wq", [q]),
        ("k v key value wk wv", [kv]),
        ("o out output wo dense", [output]),
        ("c_attn w_pack query_key_value qkv wqkv", [fused]),
        ("gate up w1 w3 fc1 c_fc dense_h_to_4h", [up]),
        ("w2", [up if is_qwen else down]),
        ("down fc2 dense_4h_to_h", [down]),
        ("c_proj", [output, down]),
        ("mlp", mlp),
        ("lm_head head embed_tokens embedding", []),
        ("all all-linear", [q, kv, kv, output, *mlp]),
    ]
    known = {name: linears for several, linears in names for name in several.split()}
    shapes: list[tuple[int, int]] = []
    for target in filter(None, (part.strip().lower() for part in targets.split(","))):
        name = target.removesuffix("_proj") if target != "c_proj" else target
        if name not in known:
            raise PlanError(f"no linear is called {target!r}", hint=f"names: {', '.join(known)}")
        shapes += known[name]
    if not shapes:
        raise PlanError("adapters need a linear to stand beside", hint="such as q,v")
    return shapes


def step_seconds(
    run: TrainingRun, topology: Topology, devices: Sequence[str], profile: Profile, bound: Bound = "central"
) -> float:
    """Return the seconds of one step of `run` on `devices`, all micro-batches included.

    Exchanges of shards are counted after the computation: published runs hide little of them.
    """
    forward, backward = pass_works(run)
    computing_s = sum(estimate(work, profile, bound=bound).seconds for work in (forward, backward))
    if run.sharding == "zero-3":
        computing_s = max(computing_s, 3 * hooks_s(run.model, run.tokens))
    gathered = run.stored_weight_bytes if run.weight_shards > 1 or "weights" in run.recipe.on_host else 0.0
    exchanged_s = 0.0
    if len(devices) > 1:
        ring = machines_for(topology, list(devices), profile, {"world": (tuple(range(len(devices))),)})[
            0
        ].rings["world"]
        gradients = round(run.num_trained * run.recipe.gradient_bytes) + run.num_adapter_parameters * 2
        # Before the forward, and before the backward, which takes the forward of a block along.
        micro_s = 2 * ring.seconds("all_gather", round(gathered), bound) if gathered else 0.0
        micro_s += (
            ring.seconds("reduce_scatter", gradients, bound) if run.weight_shards > 1 and gradients else 0.0
        )
        exchanged_s = run.accumulation * micro_s
        if run.weight_shards == 1 and gradients:
            exchanged_s += ring.seconds("all_reduce", gradients, bound)
    if "weights" in run.recipe.on_host:
        exchanged_s += (
            2 * run.accumulation * estimate(copy_work(round(gathered)), profile, bound=bound).seconds
        )
    return run.accumulation * computing_s + exchanged_s + _update_s(run, profile, bound)


def _update_s(run: TrainingRun, profile: Profile, bound: Bound) -> float:
    recipe, shards = run.recipe, 1 if run.sharding == "none" else run.num_devices
    trained = run.num_trained // shards
    moved = (
        trained
        * 2
        * (recipe.weight_bits / 8 + recipe.gradient_bytes + recipe.master_bytes + recipe.state_bytes)
    )
    moved += 2 * 16 * run.num_adapter_parameters / shards
    update_s = estimate(
        Work(dtype=run.dtype, param_pass_bytes=round(moved), num_kernels=1), profile, bound=bound
    ).seconds
    if "state" not in recipe.on_host:
        return update_s
    # The host updates, at the speed of its link at best.
    copied = round(2 * trained * recipe.gradient_bytes)
    return update_s + estimate(copy_work(copied), profile, bound=bound).seconds


def pass_works(run: TrainingRun) -> tuple[Work, Work]:
    """Return the work of a micro-batch's forward, and of its backward with what is computed again; of zeroth order two forwards."""
    shape: dict[str, Any] = {
        "batch": run.batch,
        "seq": run.seq,
        "dtype": run.dtype,
        "attention": run.attention,
    }
    forwards, backwards = [], []
    trains_blocks = run.recipe.trained in ("all", "block")
    for segment, times in _segments(run):
        is_block = segment not in (EMBED, HEAD)
        forward = forward_work(run.model, segment, **shape)
        backward = backward_work(run.model, segment, **shape)
        trains = trains_blocks if is_block else run.num_trained > 0 and run.recipe.trained != "block"
        if not trains:
            # Of the two products of a frozen linear, that for its input alone.
            backward = backward.model_copy(update={"matmuls": backward.matmuls[::2]})
        if run.wide_norms:  # norms and what blocks hand on are read and written in float32
            forward, backward = _widened(forward), _widened(backward)
        if is_block:
            adapters, dequantizing = _adapters(run), _dequantizing(run)
            forward += adapters + dequantizing
            backward += adapters.repeated(2) + dequantizing
            if run.checkpointing != "none":
                backward += forward
        forwards.append(forward.repeated(times))
        backwards.append(backward.repeated(times))
    forward = _total(forwards)
    return forward, _total(backwards) if run.recipe.has_backward else forward


def _widened(work: Work) -> Work:
    return work.model_copy(update={"elementwise_bytes": 2 * work.elementwise_bytes})


def _segments(run: TrainingRun) -> Iterator[tuple[str, int]]:
    """Yield segments whose works differ, each with how often it is there."""
    same: dict[int, list[str]] = {}
    for segment in run.model.segments[1:-1]:
        size = sum(group.num_parameters for group in run.model.param_groups_of(segment))
        same.setdefault(size, []).append(segment)
    yield from ((segments[0], len(segments)) for segments in same.values())
    yield from ((segment, 1) for segment in (EMBED, HEAD))


def _adapters(run: TrainingRun) -> Work:
    """Return what a block's adapters add to a forward."""
    if not run.adapter_inputs:
        return Work(dtype=run.dtype)
    width = FORMATS[run.dtype].element_bytes
    rank = max(
        1, run.num_adapter_parameters // (run.model.num_blocks * (run.adapter_inputs + run.adapter_outputs))
    )
    passes = run.tokens * width * (2 * run.adapter_inputs + 5 * run.adapter_outputs)
    products = (
        Matmul(m=run.tokens, n=rank, k=run.adapter_inputs),
        Matmul(m=run.tokens, n=run.adapter_outputs, k=rank),
    )
    return Work(dtype=run.dtype, matmuls=products, elementwise_bytes=passes, num_kernels=_ADAPTER_KERNELS)


def _dequantizing(run: TrainingRun) -> Work:
    """Return what it takes to write a block's quantized weights out in 16 bits."""
    if not run.recipe.is_quantized:
        return Work(dtype=run.dtype)
    size = round(run.num_largest_block * (run.recipe.weight_bits / 8 + 2 * 2))
    return Work(dtype=run.dtype, param_pass_bytes=size, num_kernels=7)


def _total(works: Sequence[Work]) -> Work:
    total = works[0]
    for work in works[1:]:
        total += work
    return total
