"""The constants that published rows may decide: few, each with a meaning, and with the span that physics leaves it.

Everything else comes from the hardware presets' data sheets. A constant here is any number chosen after seeing a
result row; its prior is centred on what one would have said before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from costmodel.rates.fitting import Prior

Values = Mapping[str, float]

GIGA = 1e9
TERA = 1e12

PAPERS = ("ZO2", "DistZO2")

Domain = Literal["speed", "memory"]


@dataclass(frozen=True)
class FittedConstant:
    """A constant to be fitted."""

    name: str
    unit: str
    meaning: str
    prior: float  # what it would have been said to be beforehand
    sigma: float  # standard deviation of the prior's logarithm
    # low, high: bounds that physics sets.
    low: float = 0.0
    high: float = float("inf")


SPEED: dict[str, tuple[FittedConstant, ...]] = {
    "ZO2": (
        FittedConstant("product_rate_fp32", "flop/s", "large float32 products, TF32 off", 17 * TERA, 0.1, high=19.5 * TERA),
        FittedConstant("product_rate_fp32_wide", "flop/s", "float32 products of hidden size 9216 and more", 17 * TERA, 0.3, high=19.5 * TERA),
        FittedConstant("product_rate_half", "flop/s", "large products in fp16 and bf16", 200 * TERA, 0.3, high=312 * TERA),
        FittedConstant("product_half_dim", "1", "dimension at which a product runs at half its rate", 60, 1.0),
        FittedConstant("memory_rate", "byte/s", "passes over parameters", 1.65 * TERA, 0.08, high=1.935 * TERA),
        FittedConstant("activation_rate", "byte/s", "passes over activations and stored scores", 1.5 * TERA, 0.2, high=1.935 * TERA),
        FittedConstant("sampling_rate", "number/s", "normals drawn on the GPU", 300 * GIGA, 0.7),
        FittedConstant("kernel_s", "s", "what any kernel takes, however small", 4e-6, 0.35),
        FittedConstant("copy_rate", "byte/s", "copies that overlap, each way", 20 * GIGA, 0.3, high=31.5 * GIGA),
        FittedConstant("copy_rate_waiting", "byte/s", "copies that the host waits for, each way", 12 * GIGA, 0.3, high=31.5 * GIGA),
        FittedConstant("allocation_s_per_byte", "s/byte", "a staging buffer taken and given back", 0.2e-9, 0.7),
        FittedConstant("pace_widest", "1", "pace of all that runs for hidden sizes above 9216, others' being 1", 1.0, 0.1),
    ),
    "DistZO2": (
        FittedConstant("product_rate_half", "flop/s", "large products in fp16", 140 * TERA, 0.05, high=148 * TERA),
        FittedConstant("attention_rate", "flop/s", "fused attention, masked half skipped", 75 * TERA, 0.4, high=148 * TERA),
        FittedConstant("product_half_dim", "1", "dimension at which a product runs at half its rate", 60, 1.0),
        FittedConstant("memory_rate", "byte/s", "passes over GPU memory", 3.4 * TERA, 0.08, high=4.0 * TERA),
        FittedConstant("sampling_rate", "number/s", "normals drawn on the GPU", 300 * GIGA, 0.7),
        FittedConstant("kernel_s", "s", "what any kernel takes, however small", 5e-6, 0.5),
        FittedConstant("host_upload_rate", "byte/s", "host to all GPUs together", 60 * GIGA, 0.7, high=126 * GIGA),
        FittedConstant("host_offload_rate", "byte/s", "all GPUs together to the host, isolated", 60 * GIGA, 1.5, high=126 * GIGA),
    ),
}  # fmt: skip
"""By paper: each ran on its own machine with its own code."""


def _temporaries(table_copies: float) -> tuple[FittedConstant, ...]:
    """Return the constants of both papers' code, given how many copies its expressions leave alive of a tensor."""
    return (
        FittedConstant("context_bytes", "byte", "CUDA context, libraries, and the allocator's rounding", 1.2e9, 0.5),
        FittedConstant("table_temporaries", "1", "copies of the largest table alive while it is changed", table_copies, 0.05),
        FittedConstant("logit_copies", "1", "copies of the logits alive in the loss", 3.0, 0.5),
        FittedConstant("second_logit_copies", "1", "further copies where both signs pass block by block", 1.5, 0.7),
    )  # fmt: skip


PERTURBING, UPDATING = 3.0, 4.0
"""Copies alive of a tensor: ``z``, ``s z`` and ``(s z) ε`` in a perturbation; ``z``, ``g z``, ``λ θ`` and their sum in an
update with weight decay, which ZO2's public code makes and DistZO2's Algorithm 1 does not."""

MEMORY: dict[str, tuple[FittedConstant, ...]] = {
    "ZO2": (
        *_temporaries(UPDATING),
        FittedConstant("block_temporaries", "1", "temporaries of one block, in units of those counted", 1.0, 0.2),
        FittedConstant("kept_probabilities", "1", "of them kept longer by MeZO, whose outputs hold them", 0.3, 0.7),
        FittedConstant("phase_norm", "1", "how phases share cached memory: 1 not at all, infinite wholly", 3.0, 0.5, low=1.0),
    ),
    "DistZO2": (
        *_temporaries(PERTURBING),
        FittedConstant("communicator_bytes", "byte", "buffers of one NCCL communicator", 0.5e9, 0.7),
    ),
}  # fmt: skip


def constants_of(paper: str, domain: Domain) -> tuple[FittedConstant, ...]:
    """Return the constants of a paper's machine and code."""
    return (SPEED if domain == "speed" else MEMORY)[paper]


def profile_values(
    paper: str, values: Values, *, hidden_size: int, ranks: int, waits: bool, isolated: str
) -> dict[str, float]:
    """Return the constants of a device's profile, by name, as the fitted ones decide them.

    Parameters
    ----------
    paper : {"ZO2", "DistZO2"}
    values : mapping of str to float
        Fitted constants by name.
    hidden_size : int
        Of the model.
    ranks : int
        Ranks that copy from one host at a time.
    waits : bool
        Whether the host waits for every copy (ZO2 without its scheduler).
    isolated : {"", "upload_rate", "offload_rate"}
        Which copies are all that is going on, as in DistZO2's Table 2; nothing for a training step.

    Notes
    -----
    Passes over parameters go at one rate from memory, those over activations at one of their own where rows tell them
    apart (ZO2's stored scores); from the L2 cache at twice that, about what data sheets state. Instructions cost the
    host nothing beside their kernels: the papers' code has no interpreter.
    """
    if hidden_size > _WIDTHS[1]:
        values = _at_slowdown(values, paper)
    constants = {
        "matmul_half_dim": values["product_half_dim"],
        "kernel_s": values["kernel_s"],
        "instruction_s": 0.0,
    }
    for name in ("memory", "elementwise", "param_pass", "scratch"):
        constants[f"{name}_bandwidth"] = values["memory_rate"]
    constants["elementwise_bandwidth"] = values.get("activation_rate", values["memory_rate"])
    for name in ("elementwise", "param_pass"):
        constants[f"{name}_cache_bandwidth"] = 2 * constants[f"{name}_bandwidth"]
    constants |= BESIDE_THE_FIT
    for dtype in ("float32", "float16", "bfloat16"):
        constants[f"sampling_rate.normal.{dtype}"] = values["sampling_rate"]
    for dtype in ("float16", "bfloat16"):
        constants[f"matmul_rate.{dtype}"] = values["product_rate_half"]
    if paper == "ZO2":
        rate = values["copy_rate_waiting" if waits else "copy_rate"]
        return constants | {
            "matmul_rate.float32": _fp32_rate(values, hidden_size),
            "copy_h2d_bandwidth": rate,
            "copy_d2h_bandwidth": rate,
            "copy_cache_bandwidth": rate,
            "allocation_s_per_byte": values["allocation_s_per_byte"],
        }
    constants |= _FITTED_ATTENTION
    constants |= {f"attention_rate.{dtype}": values["attention_rate"] for dtype in ("float16", "bfloat16")}
    upload = min(values["host_upload_rate"] / ranks, LANE)
    offload = min(values["host_offload_rate"] / ranks, LANE) if isolated else LANE
    return constants | {
        "copy_h2d_bandwidth": upload,
        "copy_d2h_bandwidth": offload,
        "copy_cache_bandwidth": offload if isolated == "offload_rate" else upload,
    }


def _at_slowdown(values: Values, paper: str) -> Values:
    """Return the constants of the machine on which the widest model ran, all rates of which have one factor.

    Whether products, passes or copies bound them, ZO2's rows of OPT-175B take 11 to 17 % longer than those of other
    models let one expect, as on another node.
    """
    slowdown = values.get("pace_widest", 1.0)
    powers = {"flop/s": 1, "byte/s": 1, "number/s": 1, "s": -1, "s/byte": -1, "1": 0}
    units = {constant.name: constant.unit for constant in SPEED[paper]}
    return {name: value * slowdown ** powers[units[name]] for name, value in values.items()}


def _fp32_rate(values: Values, hidden_size: int) -> float:
    """Return the rate of float32 products, which the widest models reach less of than the others.

    ZO2's float32 rows of 66B and 175B take about 1.4 times what their operations, and rows of the same models in mixed
    precision, would let one expect; up to 13B nothing of it shows. Why is not known, so the widths between are taken
    as between, in logarithms.
    """
    narrow, wide = _WIDTHS
    part = min(max(math.log(hidden_size / narrow) / math.log(wide / narrow), 0.0), 1.0)
    return float(values["product_rate_fp32"] ** (1 - part) * values["product_rate_fp32_wide"] ** part)


def undecided(paper: str, values: Values, *, hidden_size: int, compute: str) -> tuple[Values, ...]:
    """Return other sets of constants that explain the rows as well, at both ends of what the rows leave open.

    No row is printed for float32 products between :data:`_WIDTHS`: they may be as fast as those of the narrower models,
    or as slow as those of the widest.
    """
    narrow, wide = _WIDTHS
    if paper != "ZO2" or compute != "float32" or not narrow < hidden_size < wide:
        return ()
    names = ("product_rate_fp32", "product_rate_fp32_wide")
    return tuple({**values, **dict.fromkeys(names, values[name])} for name in names)


_WIDTHS = (5120, 9216)
"""Hidden sizes of OPT-13B and OPT-66B, which rows of the ZO2 tables are printed for."""

BESIDE_THE_FIT = {"cache_bytes": 24.0 * 2**20, "multiprocessors": 0.0, "kernel_s.product": 0.0}
"""What the rows do not decide, as it was when the constants were fitted."""

_FITTED_ATTENTION = {
    "attention_half_len": 128.0,
    "attention_diagonal_len": 0.0,
    **{f"attention_score_rate.{dtype}": 1e18 for dtype in ("float16", "bfloat16")},
}
"""Beside a fitted rate of attention, which holds all that its kernel does, where data sheets count scores and diagonals apart."""

LANE = 0.9 * 31.5 * GIGA
"""What a PCIe 4.0 x16 slot carries each way, of which pinned copies reach nine tenths (data sheet)."""


def prior_of(constants: Sequence[FittedConstant]) -> Prior:
    """Return what was taken for likely before any row was seen."""
    return Prior(
        np.log([constant.prior for constant in constants]),
        np.array([constant.sigma for constant in constants]),
    )
