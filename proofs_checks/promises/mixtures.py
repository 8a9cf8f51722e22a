"""Mixtures of experts: what a step does to experts that no token visits."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from executors.models.spec import plan_of_model
from executors.runs.session import Session
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import equal, within
from proofs_checks.faults import central_by_epsilon, climbing, wide_normals
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import called_with
from proofs_checks.setups import literal
from zosim.plans import Plan

_RATE, _EPSILON = 1e-3, 1e-3
_ROUNDING = 1e-6
"""Relative, of weights in float64 after three passes."""


def _mixture() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=1, max_position_embeddings=16,
    )  # fmt: skip
    config._experts_implementation = "eager"  # others know no float64
    torch.manual_seed(0)
    model: nn.Module = MixtralForCausalLM(config).double().eval()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


def _batch() -> dict[str, Tensor]:
    tokens = torch.tensor([[3, 7, 3, 7]])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(**_batch(), use_cache=False).loss
    return loss


def _unvisited(model: nn.Module) -> Tensor:
    """Return which experts of the only block no token visits: the loss has no gradient along them."""
    probed = copy.deepcopy(model)
    _loss(probed).backward()
    gradient = next(p.grad for name, p in probed.named_parameters() if name.endswith("experts.down_proj"))
    assert gradient is not None
    return gradient.flatten(1).abs().sum(1) == 0


def _stepped(model: nn.Module, seed: int) -> tuple[float, dict[str, Tensor]]:
    """Return the projected gradient of one step, and the weights after it."""
    plan: Plan = plan_of_model(model, batch=1, seq=4, estimator={"epsilon": _EPSILON})
    with Session(plan, copy.deepcopy(model), learning_rate=_RATE) as session:
        record = session.step(_batch(), seeds=(seed,))
        session.flush()
        return record.projected_gradients[0], session.state_dict()


def check_unvisited(context: Context) -> Outcome:
    """Compare the experts that no token visits with a literal step, and the step with one of other such experts."""
    model = _mixture()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    z = literal.perturbations(
        [tuple(weights.shape) for weights in before.values()],
        seed=context.seed,
        step=0,
        perturbation=0,
        rng="mezo",
        distribution="gaussian",
        dtype=torch.float64,
    )
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, along in zip(moved.parameters(), z, strict=True):
                parameter.add_(along, alpha=sign * _EPSILON)
        losses.append((_loss(moved).item(), _unvisited(moved)))
    (plus, unvisited), (minus, others) = losses
    unvisited = unvisited & others
    assert unvisited.any(), "every expert is visited"
    g = (plus - minus) / (2 * _EPSILON)
    stepped, after = _stepped(model, context.seed)
    changed = copy.deepcopy(model)
    name = next(name for name in before if name.endswith("experts.down_proj"))
    with torch.no_grad():
        changed.get_parameter(name)[unvisited] *= -1
    expected = before[name] - _RATE * g * dict(zip(before, z, strict=True))[name]
    return everything_holds(
        {
            "moves by -ηg·z": equal(
                after[name][unvisited], expected[unvisited], what="weights", tolerance=_ROUNDING
            ),
            "does not change g": within(
                abs(_stepped(changed, context.seed)[0] - stepped),
                _ROUNDING * abs(g),
                what="a difference of g",
            ),
        }
    )


long = called_with(
    "executors.steps.arithmetic:ParamPass.update",
    "an update 3 % too long",
    learning_rate=lambda learning_rate: 1.03 * learning_rate,
)


CHECKS: Checks = {
    "unvisited-experts-move": printed(check_unvisited, climbing, central_by_epsilon, wide_normals, long),
}
