"""A small run to look at: a model of two blocks, trained for some steps, offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from executors.models.spec import plan_of_model
from executors.runs.records import StepRecord
from executors.runs.session import Session

EPSILON = 1e-3


@dataclass(frozen=True)
class LogRow:
    """What one step leaves in the log."""

    seed: int  # the step's, given to ``torch.Generator.manual_seed``
    projected_gradient: float  # ``g = (l₊ - l₋)/2ε``
    learning_rate: float  # the one that this step's update is applied with


@dataclass(frozen=True)
class TunedRun:
    """A finished run."""

    # base, tuned: parameters before and after, in registration order, in float32.
    base: Mapping[str, Tensor]
    tuned: Mapping[str, Tensor]
    records: tuple[StepRecord, ...]

    @property
    def log(self) -> list[LogRow]:
        """Seeds and scalars of the steps, one perturbation each."""
        return [LogRow(r.seeds[0], r.projected_gradients[0], r.learning_rate) for r in self.records]


def small_model() -> nn.Module:
    """Return the base model; its weights are the same at every call."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def session_of(model: nn.Module, *, offloaded: bool, seed: int = 0) -> Session:
    """Return a session on `model` with a learning rate that falls from step to step."""
    axes = {
        "estimator": {"epsilon": EPSILON},
        "residency": {"blocks": "offloaded" if offloaded else "resident"},
        "schedule": {"update": "delayed" if offloaded else "immediate"},
    }
    plan = plan_of_model(model, batch=2, seq=16, **axes)
    return Session(plan, model, learning_rate=lambda step: 1e-2 / (1 + step), seed=seed, num_timed_steps=0)


def train(num_steps: int, *, seed: int = 0) -> TunedRun:
    """Train the small model on random tokens, its blocks offloaded."""
    model = small_model()
    base = weights_of(model)
    generator = torch.Generator().manual_seed(seed)
    with session_of(model, offloaded=True, seed=seed) as session:
        records = []
        for _ in range(num_steps):
            ids = torch.randint(0, 64, (2, 16), generator=generator)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            records.append(session.step(batch))
        return TunedRun(base, session.state_dict(), tuple(records))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's parameters by name, in registration order."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def num_differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> int:
    """Return how many elements of float32 parameters differ in a bit."""
    return sum(int((first[k].view(torch.int32) != second[k].view(torch.int32)).sum()) for k in first)
