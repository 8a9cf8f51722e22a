"""One small model trained under every placement, with what was drawn and done on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from executors.models.model import Batch, SegmentedModel
from executors.models.spec import spec_of_model
from executors.runs.records import StepRecord
from executors.runs.session import Session
from executors.steps.interpreter import StepFrame
from executors.steps.ops.operands import of_group
from zosim.plans import Placement, Plan, Residency, Schedule, Weights
from zosim.program.contents import ParamGroupWeights, Perturbation, is_scaled
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Perturb, Update

_SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS = {
    "tied": lambda: OPTConfig(ffn_dim=24, word_embed_proj_dim=16, **_SHAPE),
    "untied": lambda: LlamaConfig(intermediate_size=24, **_SHAPE),
}

FULL_PASS: dict[str, Any] = {"schedule": Schedule(traversal="full")}
BLOCKWISE: dict[str, Any] = {}
DELAYED: dict[str, Any] = {"schedule": Schedule(update="delayed")}
OFFLOADED: dict[str, Any] = {"residency": Residency(blocks="offloaded"), **DELAYED}
Key = tuple[int, int, str]
"""Step, perturbation and parameter group of a perturbation."""


@dataclass(frozen=True)
class RecordedPass:
    """One perturbation as it ran."""

    key: Key  # step, perturbation and group
    scale: int
    # before, after: the group's parameters before and after.
    before: Tensor
    after: Tensor


@dataclass
class Trace:
    """What a training run did."""

    records: list[StepRecord] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the flush
    # By step, perturbation and group: the perturbation ``z``.
    sampled: dict[Key, Tensor] = field(default_factory=dict)
    # By step, perturbation and group: ``z·ε`` of each perturbation and update that used it, in turn. Perturbations may
    # find it multiplied already, updates find ``z``.
    perturbations: dict[Key, list[Tensor]] = field(default_factory=dict)
    param_passes: list[RecordedPass] = field(default_factory=list)
    # By group: name and number of elements of each of its parameters, in their order.
    parameters: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a causal language model of three small blocks: ``"tied"`` or ``"untied"``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model: nn.Module = AutoModelForCausalLM.from_config(_CONFIGS[name](), attn_implementation="sdpa")
        for parameter in model.parameters():  # initial zeros and ones would hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(dtype).eval()


def tiny_batches(count: int, num_sequences: int = 2) -> list[Batch]:
    """Return batches of sequences of 7 tokens, of which all but the first are padded, each by one more token."""
    generator = torch.Generator().manual_seed(11)
    batches: list[Batch] = []
    for _ in range(count):
        ids = torch.randint(3, 48, (num_sequences, 7), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(1, num_sequences):
            mask[row, max(2, 6 - row) :] = 0
        ids[mask == 0] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches


def tiny_plan(model: nn.Module, *, dtype: str = "float32", **axes: Any) -> Plan:
    """Return a plan for a tiny model with these axes."""
    alone = Placement(topology="none", devices=("cpu0",))
    return Plan(
        model=spec_of_model(SegmentedModel(model), name="tiny"),
        batch=2,
        seq=7,
        **{
            "placement": alone,
            **axes,
            "weights": axes.get("weights", Weights()).model_copy(update={"dtype": dtype}),
        },
    )


def train(
    name: str,
    *,
    num_steps: int = 3,
    dtype: str = "float32",
    learning_rate: Callable[[int], float] = lambda step: 1e-2 / (step + 1),
    weight_decay: float = 0.1,
    seed: int = 0,
    num_sampling_threads: int = 1,
    num_micro_batches: int = 1,
    **axes: Any,
) -> Trace:
    """Train a tiny model under one placement and return what happened."""
    model = tiny_model(name, getattr(torch, dtype))
    plan = tiny_plan(model, dtype=dtype, **axes)
    trace = Trace()
    with Session(
        plan,
        model,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        seed=seed,
        num_sampling_threads=num_sampling_threads,
        num_micro_batches=num_micro_batches,
        num_timed_steps=0,
    ) as session:
        observe(session, trace)
        trace.records += [session.step(batch) for batch in tiny_batches(num_steps)]
        trace.weights.update(session.state_dict())
    return trace


def observe(session: Session, trace: Trace) -> None:
    """Have every perturbation and update of `session` leave its operands in `trace`."""
    resolved = session.interpreter._resolved
    for part, items in resolved.items():
        resolved[part] = [
            replace(item, action=_observed(item.instruction, item.action, session, trace))
            if isinstance(item.instruction.op, Perturb | Update)
            else item
            for item in items
        ]


def _observed(
    instruction: Instruction, action: Callable[[StepFrame], None], session: Session, trace: Trace
) -> Callable[[StepFrame], None]:
    op = instruction.op
    assert isinstance(op, Perturb | Update)
    offset = op.step if isinstance(op, Update) else 0
    (read,) = of_group(op.param_group, ParamGroupWeights, instruction.reads)
    (weights,) = of_group(op.param_group, ParamGroupWeights, instruction.writes)
    (perturbation,) = of_group(op.param_group, Perturbation, instruction.reads)
    is_kept_scaled, epsilon = is_scaled(perturbation.what), session.plan.estimator.epsilon

    def values(access: Access) -> Tensor:
        return torch.cat([view[:].flatten() for view in session.interpreter.store.placed(access).qvalues])

    tensors = session.interpreter.store.trainable(op.param_group).tensors
    trace.parameters[op.param_group] = [(tensor.name, tensor.num_elements) for tensor in tensors]

    def observed(frame: StepFrame) -> None:
        used = frame.at(offset)
        if used is None:
            action(frame)
            return
        key, z, before = (used.step, op.perturbation, op.param_group), values(perturbation), values(read)
        action(frame)
        if not is_kept_scaled:
            trace.sampled[key] = z
        trace.perturbations.setdefault(key, []).append(z if is_kept_scaled else z * epsilon)
        if isinstance(op, Perturb):
            trace.param_passes.append(RecordedPass(key, op.scale, before, values(weights)))

    return observed


def num_unlike(first: Mapping[Any, Tensor], second: Mapping[Any, Tensor]) -> int:
    """Return how many tensors of two collections are missing in one of them, or differ in a bit."""
    common = first.keys() & second.keys()
    unlike = sum(not same_bits(first[key], second[key]) for key in common)
    return len(first.keys() ^ second.keys()) + unlike


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree in format, shape and every bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[first.element_size()]
    return torch.equal(first.contiguous().view(width), second.contiguous().view(width))
