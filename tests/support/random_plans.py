"""Plans at random over all axes, as they are valid, each with the tiny model that it is for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from costmodel.models.configs import LoRA
from executors.runs.adapters import Tuned, attach
from tests.support.tiny import model_of, plan_of
from topology.errors import ZosimError
from zosim.plans import Plan

USUAL = 0.5
"""How often a field is left at its default."""

_OTHERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "residency": {
        "blocks": ("offloaded",),
        "edges": ("offloaded",),
        "num_slots": (1, 2, 4),
        "overlap": (False,),
        "reuse_slots": (False,),
        "transfer_dtype": ("bfloat16", "float16", "float8_e4m3"),
    },
    "schedule": {"traversal": ("sweep",), "update": ("delayed",)},
    "estimator": {"num_queries": (2, 3), "difference": ("forward", "residual")},
    "directions": {
        "distribution": ("rademacher", "lozo", "factorised", "lozo-released"),
        "rng": ("counter",),
        "order": ("execution",),
        "kept": (True,),
        "drawn_ahead": (True,),
        "rank": (1, 3),
        "lazy_steps": (1, 2),
    },
    "weights": {"dtype": ("bfloat16", "float16", "float64"), "perturbation": ("copies", "adapters")},
    "forward": {
        "attention": ("eager",),
        "compute_dtype": ("bfloat16",),
        "loss_chunk_tokens": (5,),
    },
    "low_bits": {
        "weights": ("int8", "int4", "int3", "float8_e4m3", "float4_e2m1"),
        "scales": ("tensor", "group"),
        "zero_point": (True,),
        "adapters": ("int8",),
        "direction_bits": (3, 4),
        "estimator": ("q-rge1", "q-rge2"),
        "update_rounding": ("step",),
        "sparsity": (0.5,),
        "activations": ("int8-token", "int8-tensor"),
        "fallback": (True,),
    },
}
_OTHER_SHAPES = ("opt-untied", "opt-projected", "llama", "llama-tied", "gpt2", "qwen3", "roberta")
_OTHERS_TUNED: tuple[Tuned, ...] = (
    "linears",
    "matrices",
    LoRA(rank=2, target_modules=("q_proj", "v_proj"), seed=3),
    LoRA(rank=2, target_modules=("q_proj", "v_proj"), seed=3, lazy_steps=2, max_rank=16),
)


@dataclass(frozen=True)
class Case:
    """A plan that is valid, and its model.

    Attributes
    ----------
    shape : str
    tuned : str or LoRA or None
    axes : dict
        What is not as usual.
    """

    shape: str
    tuned: Tuned | None
    axes: dict[str, dict[str, Any]]

    @property
    def dtype(self) -> str:
        """Format of the weights."""
        return str(self.axes.get("weights", {}).get("dtype", "float32"))

    def made(self) -> tuple[Plan, torch.nn.Module]:
        """Return the plan and the model, always with the same weights."""
        model = self._model()
        if self.tuned is not None:
            attach(model, self.tuned)
        plan = plan_of(model, dtype=self.dtype, **self.axes)
        if plan.low_bits.adapters != "none":
            model = self._model()
            attach(model, self.tuned, plan=plan)
        return plan, model

    def _model(self) -> torch.nn.Module:
        return model_of(self.shape, getattr(torch, self.dtype))

    def __str__(self) -> str:
        return f"{self.shape}, {self.tuned or 'all'}, {self.axes}"


def case_of(seed: int) -> Case:
    """Return case number `seed`; the first draw that makes a valid plan."""
    chosen = random.Random(seed)
    low_bits = chosen.random() < 1 / 3
    while True:
        axes: dict[str, dict[str, Any]] = {}
        for axis, fields in _OTHERS.items():
            if axis == "low_bits" and not low_bits:
                continue
            # The more fields an axis has, the more often each has to be usual for the plan to be valid.
            rare = USUAL if len(fields) < 4 else 0.75
            stated = {
                name: chosen.choice(others) for name, others in fields.items() if chosen.random() > rare
            }
            if axis == "low_bits":
                stated["weights"] = chosen.choice(fields["weights"])
                stated.setdefault("group_elements", 8)
            if stated:
                axes[axis] = stated
        if axes.get("residency", {}).get("blocks") != "offloaded" and chosen.random() < 0.5:
            axes.setdefault("residency", {})["blocks"] = "offloaded"
        shape = "opt" if chosen.random() < 0.4 else chosen.choice(_OTHER_SHAPES)
        tuned = None if chosen.random() < 0.6 else chosen.choice(_OTHERS_TUNED)
        case = Case(shape, tuned, axes)
        try:
            case.made()
        except (ZosimError, ValueError):
            continue
        return case
