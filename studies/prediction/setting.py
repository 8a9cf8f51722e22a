"""Models, plans and sessions of cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from executors.formats import TORCH_DTYPES
from executors.models.model import Batch
from executors.models.random_models import random_model
from executors.models.spec import spec_of_model
from executors.runs.session import Session
from studies.prediction.cases import Case, Shape
from zosim.plans import Placement, Plan

if TYPE_CHECKING:
    from torch import nn

_NARROWER = {"float32": "bfloat16", "bfloat16": "float8_e4m3"}


def plan_of(case: Case, model: nn.Module, *, topology: str, device: str) -> Plan:
    """Return the plan of a case for its model."""
    axes = {axis: dict(fields) for axis, fields in case.axes.items()}
    if axes.get("residency", {}).get("transfer_dtype") == "narrower":
        axes["residency"]["transfer_dtype"] = _NARROWER[case.dtype]
    return Plan.model_validate(
        {
            "model": spec_of_model(model, name=case.shape.name),
            "placement": Placement(topology=topology, devices=(device,) * case.num_ranks),
            "batch": case.batch,
            "seq": case.seq,
            "weights": {"dtype": case.dtype},
            **axes,
        }
    )


def session_of(case: Case, *, topology: str, device: str) -> Session:
    """Return a session of a case; torch's number of threads must be the case's already."""
    model = model_of(case.shape).to(TORCH_DTYPES[case.dtype])
    return session_on(plan_of(case, model, topology=topology, device=device), case, model)


def session_on(plan: Plan, case: Case, model: nn.Module | None = None) -> Session:
    """Return a session of the model of a case under any plan."""
    model = model or model_of(case.shape).to(TORCH_DTYPES[case.dtype])
    return Session(plan, model, learning_rate=1e-7, num_sampling_threads=case.num_threads)


def batch_of(case: Case, seed: int = 0) -> Batch:
    """Return a batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(case.shape.vocab, (case.batch, case.seq), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def model_of(shape: Shape) -> nn.Module:
    """Return a model with random weights, always the same for one shape."""
    return random_model(
        shape.family,
        hidden=shape.hidden,
        num_blocks=shape.num_blocks,
        num_heads=shape.num_heads,
        vocab=shape.vocab,
        max_positions=256,
        tied=shape.tied,
    )
