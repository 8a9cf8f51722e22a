"""ZOinfer's speed-ups: a LoZO step as a training loop over the same step in a serving runtime, on a GPU that the paper does not name.

``loop = passes over parameters + 2 forwards of padded rows``, ``serving = one pass over twice the rows + what a step takes besides``

Products are counted from the models' shapes, passes over weights from the loop that its authors publish: three perturbations and an update, each of
which writes ``U·Vᵀ``, multiplies it twice and adds it, all in 16 bits. A GPU that waits for its host takes the host's time: kernels are counted, too.
Sequences have the lengths of one data set; a loop pads a batch to its longest, which grows with the batch. What remains is decided by the cells: two
rates of products, a bandwidth, a kernel's launch, lengths and their spread, and what serving adds to a step and to a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from costmodel.models.configs import read_model_spec
from costmodel.models.model_spec import ModelSpec, TrainableSubset
from studies.published.constants import FittedConstant
from studies.published.fitting import conformal_half_width
from studies.published.posterior import Posterior, TableFit, left_out_errors, log_error, posterior
from studies.published.rows import PublishedRow
from studies.published.sparq import NotPredicted
from topology.errors import ZosimError

PAPER = "ZOinfer"
SPEEDUPS = ("core_step_speedup", "speedup")
HOURS = "training_time"
STEPS = 20_000
"""Of the runs of Table 1."""

_HALF_BYTES = 2
_BYTES_PER_PASS = 8 * _HALF_BYTES
"""Write ``U·Vᵀ``; twice read and write it; read it and θ, write θ."""

_NUM_PASSES = 4
_KERNELS_PER_PASS, _KERNELS_PER_BLOCK = 6, 18
"""Of a tensor: two draws at most, a product, two multiplications, an addition. Of a block's forward in transformers."""

_ALONE = 0.5
"""Error that a cell is given which has no other, in logs."""

_SCALE = 0.08
"""Spread of printed speed-ups around any model of them, in logs: one decimal is printed, and runs differ."""

CONSTANTS = (
    FittedConstant("loop_rate", "flop/s", "products of a forward of the loop", 1.8e14, 0.4),
    FittedConstant("serving_rate", "flop/s", "products of the serving runtime, packed", 2.4e14, 0.4),
    FittedConstant("bandwidth", "byte/s", "passes over weights", 1.8e12, 0.4),
    FittedConstant("launch_s", "s", "of a kernel from Python", 8e-6, 0.4),
    FittedConstant("tokens", "token", "of a prompt with its label, on average", 22, 0.3),
    FittedConstant("spread", "1", "deviation of the logarithm of lengths", 0.5, 0.4),
    FittedConstant("step_s", "s", "that serving adds to a step", 5e-3, 0.7),
    FittedConstant("layer_s", "s", "that serving adds to a step for each block", 3e-4, 0.7),
)


@dataclass(frozen=True)
class ZoinferCase:
    """What a row's number is of."""

    model: str  # a shipped size
    batch: int
    # ``"speedup"``, or ``"loop"`` or ``"serving"``: seconds of a step; ``"loop speedup"`` over the loop that tunes
    # everything.
    quantity: str
    is_full: bool = False  # whether all parameters are tuned by the loop, not the linears of the blocks alone
    value: float | None = None


def zoinfer_case(row: PublishedRow) -> ZoinferCase:
    """Return what a row of speed-ups or of hours is about.

    Raises NotPredicted if it names a model or a method that these tables do not have.
    """
    method, quantity = row["method"].lower(), row["quantity"]
    is_serving, is_loop = "vllm" in method, "official lozo" in method
    if not (is_serving or is_loop):
        raise NotPredicted(f"method {row['method']!r} is neither the official loop nor the serving runtime")
    if quantity in SPEEDUPS:
        # Table 1 compares with the loop that tunes everything, Table 2 with its matched setting.
        what = "speedup" if is_serving else "loop speedup"
        is_full = quantity == "speedup" if is_serving else "full" in method
        return ZoinferCase(_model(row["model"]), row.count("batch_size"), what, is_full, row.value)
    seconds = None if row.value is None else row.value * 3600 / STEPS
    what = "serving" if is_serving else "loop"
    return ZoinferCase(_model(row["model"]), row.count("batch_size"), what, "full" in method, seconds)


def _model(printed: str) -> str:
    try:
        return read_model_spec(printed.lower()).name
    except ZosimError as error:
        raise NotPredicted(f"no model is known of {printed!r}") from error


def printed_cells(rows: Iterable[PublishedRow]) -> list[ZoinferCase]:
    """Return the speed-ups and hours that rows print."""
    cases = []
    for row in rows:
        if row["paper"] == PAPER and row["quantity"] in (*SPEEDUPS, HOURS) and row.value is not None:
            try:
                cases.append(zoinfer_case(row))
            except NotPredicted:
                continue
    return [case for case in cases if case.value != 1 or case.quantity != "loop speedup"]


def loop_s(case: ZoinferCase, values: Mapping[str, float]) -> tuple[float, str]:
    """Return the seconds of a step of the loop, and what takes most of them."""
    spec, blocks = _spec(case.model, "all" if case.is_full else "linears"), _spec(case.model, "linears")
    num_tensors = sum(group.num_trainable_tensors for group in spec.param_groups)
    passing = _NUM_PASSES * _BYTES_PER_PASS * spec.num_trainable / values["bandwidth"]
    launching = _NUM_PASSES * _KERNELS_PER_PASS * num_tensors * values["launch_s"]
    padded = case.batch * _padded(case.batch, values)
    products = 2 * blocks.num_trainable + 2 * spec.vocab_size * spec.hidden_size
    forwards = 2 * products * padded / values["loop_rate"]
    waiting = 2 * _KERNELS_PER_BLOCK * spec.num_blocks * values["launch_s"]
    parts = {
        "passes over parameters": float(np.hypot(passing, launching)),
        "matrix products": float(np.hypot(forwards, waiting)),
    }
    return sum(parts.values()), max(parts, key=parts.__getitem__)


def serving_s(case: ZoinferCase, values: Mapping[str, float]) -> tuple[float, str]:
    """Return the seconds of a step of the serving runtime, and what takes most of them."""
    spec = _spec(case.model, "linears")
    rows = 2 * case.batch
    products = (
        2 * spec.num_trainable * rows * values["tokens"] + 2 * spec.vocab_size * spec.hidden_size * rows
    )
    reading = _HALF_BYTES * spec.num_parameters / values["bandwidth"]
    parts = {
        "matrix products": float(np.hypot(products / values["serving_rate"], reading)),
        "host": values["step_s"] + values["layer_s"] * spec.num_blocks,
    }
    return sum(parts.values()), max(parts, key=parts.__getitem__)


@cache
def _spec(model: str, tuned: TrainableSubset) -> ModelSpec:
    return read_model_spec(model, trainable=tuned)


def _padded(batch: int, values: Mapping[str, float]) -> float:
    """Return the expected longest of a batch of lognormal lengths with this mean."""
    median = values["tokens"] * math.exp(-(values["spread"] ** 2) / 2)
    return median * math.exp(values["spread"] * NormalDist().inv_cdf(1 - 0.5 / batch))


def predicted(case: ZoinferCase, values: Mapping[str, float]) -> tuple[float, str]:
    """Return a speed-up or the seconds of a step, and what limits the slower of the two."""
    if case.quantity == "serving":
        return serving_s(case, values)
    loop, largest = loop_s(case, values)
    if case.quantity == "loop speedup":
        return loop_s(replace(case, is_full=True), values)[0] / loop, largest
    return (loop, largest) if case.quantity == "loop" else (loop / serving_s(case, values)[0], largest)


def fit_cells(known: Sequence[ZoinferCase]) -> dict[str, float]:
    """Return the constants most probable after these cells, by name."""
    return _posterior(known).values


def _posterior(known: Sequence[ZoinferCase]) -> Posterior:
    return posterior(
        CONSTANTS, lambda values: [log_error(case, values, predicted) / _SCALE for case in known]
    )


def calibrate_zoinfer(rows: Iterable[PublishedRow]) -> TableFit | None:
    """Return what rows say about ZOinfer's GPU and prompts; None where they say nothing."""
    known = printed_cells(rows)
    if not known:
        return None
    errors = left_out_errors(known, fit_cells, predicted) if len(known) > 1 else [_ALONE]
    return TableFit(
        constants=_posterior(known).found,
        half_width=max(conformal_half_width(errors), _SCALE),
        num_cells=len(known),
    )
