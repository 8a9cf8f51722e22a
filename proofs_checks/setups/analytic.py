"""A causal language model whose loss is any function of its parameters, to run theory through the shipped executor.

Every segment appends its parameters to the hidden state, and the head computes the loss from all of them. To the
executor it is a model like any other: split, placed in buffers, perturbed, forwarded and updated block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig

from executors.models.model import SegmentedModel
from executors.models.spec import spec_of_model
from executors.runs.session import Session
from zosim.plans import Estimator, Perturbations, Placement, Plan, Weights

NUM_BLOCKS = 2
PER_SEGMENT = 2
DIMENSION = PER_SEGMENT * (NUM_BLOCKS + 2)
"""Parameters ``d`` of the model."""

Loss = Callable[[Tensor], Tensor]
"""From parameters of shape (d,) to a scalar."""

BATCH = {
    "input_ids": torch.zeros((1, 1), dtype=torch.long),
    "attention_mask": torch.ones((1, 1), dtype=torch.long),
    "labels": torch.zeros((1, 1), dtype=torch.long),
}


class _Append(nn.Module):
    """Appends its parameters to the hidden state, whose first ones leave: its width stays, as a block's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PER_SEGMENT, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight.expand(*hidden.shape[:-1], -1)
        return torch.cat([hidden[..., PER_SEGMENT:], weight], dim=-1)


class AnalyticModel(nn.Module):
    """A model of ``d`` parameters in float64 whose loss is `loss` of them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=1,
            hidden_size=PER_SEGMENT,
            intermediate_size=1,
            num_hidden_layers=NUM_BLOCKS,
            num_attention_heads=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.config._attn_implementation = "sdpa"
        self.tokens = nn.Embedding(1, PER_SEGMENT, dtype=torch.float64)
        self.layers = nn.ModuleList(_Append() for _ in range(NUM_BLOCKS))
        self.final = _Append()
        self._loss = loss

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token table, as transformers models do."""
        return self.tokens

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_ignored: Any) -> Any:
        """Return ``loss`` and ``logits``; the latter are the parameters themselves."""
        hidden = pad(self.tokens(input_ids), (DIMENSION - PER_SEGMENT, 0))
        for layer in self.layers:
            hidden = layer(hidden)
        theta = self.final(hidden)
        return SimpleNamespace(logits=theta, loss=None if labels is None else self._loss(theta[0, 0]))


def plan_of(model: AnalyticModel, **axes: Any) -> Plan:
    """Return a plan for `model` with these axes."""
    usual = {"placement": Placement(topology="none", devices=("cpu0",)), "batch": 1, "seq": 1}
    return Plan(
        model=spec_of_model(SegmentedModel(model), name="analytic"),
        weights=Weights(dtype="float64"),
        **{**usual, **axes},
    )


def estimates(
    loss: Loss,
    theta: Tensor,
    num_steps: int,
    *,
    seed: int,
    num_perturbations: int = 1,
    distribution: str = "gaussian",
    rng: str = "mezo",
    **estimator: Any,
) -> Tensor:
    """Return gradient estimates as the shipped executor applies them.

    Every step starts at `theta`, runs with learning rate 1, and what the weights lose is the estimate ``g·z``
    (the mean over perturbations).

    - `theta`: shape (d,), float64.
    - `num_steps`: sample size ``n``.
    - `distribution`: distribution of the perturbations.
    - `rng`: what they are drawn from.
    - `**estimator`: other fields of the plan's estimator.

    Returns
    -------
    torch.Tensor
        Shape (n, d), float64.
    """
    model = AnalyticModel(loss)
    plan = plan_of(
        model,
        estimator=Estimator(num_perturbations=num_perturbations, **estimator),
        perturbations=Perturbations.model_validate({"distribution": distribution, "rng": rng}),
    )
    estimates_SP = torch.empty((num_steps, DIMENSION), dtype=torch.float64)
    with Session(plan, model, learning_rate=1.0, seed=seed, num_timed_steps=0) as session:
        session.flush()
        segments = list(theta.split(PER_SEGMENT))
        for row in estimates_SP:
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), segments, strict=True):
                    parameter.view(-1).copy_(values)
                session.step(BATCH)
                row.copy_(theta - torch.cat([parameter.view(-1) for parameter in model.parameters()]))
    return estimates_SP
