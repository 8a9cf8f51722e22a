"""Plans of two stages, what crosses between them, and estimates through a rounded activation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from costmodel.formats.codecs import codec_spec, overhead_bytes
from costmodel.models.configs import spec_of_config
from zosim.lowering import lower_all
from zosim.plans import Estimator, Mesh, Placement, Plan, Split
from zosim.program.operations import Send


@dataclass(frozen=True)
class BoundaryCase:
    """A step of a model that is split once, every message packed densely."""

    # hidden, inner: widths of the residual stream and of the MLP's activation.
    hidden: int
    inner: int
    # batch, seq: sequences, and tokens of each.
    batch: int
    seq: int
    inside: bool  # whether the split point is at the input of an MLP's second linear; else between two blocks
    # activation_bits, residual_bits: per number that is sent.
    activation_bits: int
    residual_bits: int
    num_perturbations: int  # directions ``P``
    difference: Literal["central", "forward"]  # ``"central"`` or ``"forward"``


@cache
def plan_of(case: BoundaryCase) -> Plan:
    """Return the plan of two stages."""
    config = {
        "model_type": "opt",
        "hidden_size": case.hidden,
        "ffn_dim": case.inner,
        "word_embed_proj_dim": case.hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": case.seq,
    }
    split_point = "block.1.mlp" if case.inside else "block.1"
    split = Split(
        split_points=(split_point,),
        codec=_codec(case.activation_bits),
        residual_codec=_codec(case.residual_bits),
    )
    return Plan(
        model=spec_of_config(config, name="made up", split_blocks=split.split_blocks),
        placement=Placement(topology="none", devices=("cpu0", "cpu1")),
        batch=case.batch,
        seq=case.seq,
        mesh=Mesh(stage=2),
        split=split,
        estimator=Estimator(num_perturbations=case.num_perturbations, difference=case.difference),
    )


def _codec(bits: int) -> str:
    return "none" if bits == 32 else f"q{bits}:dense"


def forward_bytes(case: BoundaryCase) -> float:
    """Return the bytes that the plan's program sends forward in a step, headers and grids left out."""
    plan = plan_of(case)
    shapes = [(case.hidden, plan.split.residual_codec)]
    if case.inside:
        shapes.append((case.inner, plan.split.codec))
    beside = sum(overhead_bytes(codec_spec(name), (case.batch, case.seq, width), 4) for width, name in shapes)
    sends = [item for item in lower_all(plan).program_of(0).step if isinstance(item.op, Send)]
    return float(sum(item.work.link_bytes - beside for item in sends))


def slopes(
    radius: float, place: float, *, stochastic: bool, num_samples: int = 200_000, seed: int = 0
) -> tuple[float, float]:
    """Return mean and deviation of ``g·u`` through an activation that is rounded, where the gradient is 1.

    - `radius`: smoothing radius, in steps of the grid.
    - `place`: where the activation is, in steps from its grid value.
    - `stochastic`: whether it is rounded at random, with numbers that both signs share; else to the nearest.
    """
    generator = np.random.default_rng(seed)
    u = generator.standard_normal(num_samples)
    threshold = generator.random(num_samples) if stochastic else 0.5
    plus, minus = (np.floor(place + sign * radius * u + threshold) for sign in (1, -1))
    estimates = (plus - minus) * u / (2 * radius)
    return float(estimates.mean()), float(estimates.std())


def same_numbers(num_samples: int = 200_000, *, seed: int = 0) -> tuple[float, float]:
    """Return the mean estimate of a first stage's gradient 1 beside a second's of -2: own numbers, and the same ones."""
    generator = np.random.default_rng(seed)
    first, second = generator.standard_normal((2, num_samples))
    own, same = ((first - 2 * other) * first for other in (second, first))
    return float(own.mean()), float(same.mean())
