"""QuZO's tables: memory of quantized fine-tuning on one A100, and seconds of a step of OPT-30B.

``memory = weights in bits + 16-bit parts + bytes a token · tokens + context``

Bytes a token are counted from the models' shapes: what a first-order step keeps for its backward
(:mod:`costmodel.models.backward`), or what a forward alone holds (keys and values, copies of the logits, one block's
temporaries). The paper states neither batch sizes nor lengths: it gives a grid of batches for each method, so the tokens
of a peak are constants of a method and a data set. Conventions:

* Table 14's baselines are LoRA runs as bitsandbytes makes them: linears in 8 or 4 bits, embeddings and head in 16, and
  activations in 16 bits that LLM.int8() keeps more copies of;
* QuZO's weights are all in its bits (Table 13: |w|/4 and |w|/8 of float32), and so is what else it holds;
* Table 4 is full tuning and follows Table 13, in which everything a method has scales with its bits, and the gradient of
  a layer takes the place of its activations where it is larger;
* a gigabyte is 2^30 bytes, as torch and nvidia-smi count.

Tables 13 and 15: :func:`formula` and :func:`step_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from costmodel.models.backward import kept_bytes
from costmodel.models.configs import read_model_spec
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import EMBED, HEAD, block_segment
from studies.published.constants import FittedConstant
from studies.published.fitting import conformal_half_width
from studies.published.posterior import (
    FoundConstant,
    Posterior,
    TableFit,
    left_out_errors,
    log_error,
    posterior,
)
from studies.published.rows import PublishedRow
from studies.published.sparq import NotPredicted
from topology.errors import ZosimError

PAPER = "QuZO"
MEMORY, SECONDS, FORMULAS = (
    ("memory", "memory_total"), "time_per_step", ("weight_memory_formula", "dynamic_memory_formula"),
)  # fmt: skip
DATASETS = ("SST-2", "MultiRC", "ReCoRD", "SQuAD", "DROP")
GIBIBYTE = 2**30
CAPACITY_GIB = 39.4
"""What an A100 of 40 GB lets a process have, as nvidia-smi shows it."""

LORA, ZEROTH_ORDER, FULL = ("LLM.INT8", "QLORA"), ("QUZO", "MEZO"), ("FO-SGD", "FO")
FULL_TABLES = ("4",)
"""Tables of full tuning, whose runs have tokens of their own."""

_HALF = 16
_SCALE = 0.12
"""Spread of printed peaks around any model of them, in logs: what the batch that decides a peak happens to hold."""

_LENGTHS = {"SST-2": 50, "MultiRC": 400, "ReCoRD": 300, "SQuAD": 300, "DROP": 500}
"""Tokens of a long prompt by data set."""


def _constants() -> Iterator[FittedConstant]:
    for data in DATASETS:
        yield FittedConstant(
            f"tokens|{data}", "token", f"at the peak of a first-order run on {data}", 2000, 1.5
        )
        yield FittedConstant(
            f"length|{data}", "token", f"of a sequence at that peak on {data}", _LENGTHS[data], 0.3
        )
        yield FittedConstant(
            f"nf4_part|{data}", "1", f"of them in QLoRA's runs on {data}, others' being 1", 1, 0.3
        )
        yield FittedConstant(
            f"zeroth_order_part|{data}",
            "1",
            f"of them in zeroth-order runs on {data}, beyond the next",
            1,
            0.5,
        )
        yield FittedConstant(
            f"four_bit_part|{data}",
            "1",
            f"of 8-bit QuZO's other bytes at 4 bits on {data}, beyond all's",
            1,
            0.25,
        )
    yield FittedConstant(
        "zeroth_order_part", "1", "tokens of a zeroth-order batch over those of a first-order one", 1, 1.0
    )
    yield FittedConstant(
        "int8_copies", "1", "what LLM.int8() keeps for a backward over what the products need", 1.4, 0.4
    )
    yield FittedConstant(
        "four_bit_part", "1", "of what 8-bit QuZO holds beside weights, at 4 bits (Table 13: 1/2)", 0.5, 0.3
    )
    yield FittedConstant("context", "GiB", "CUDA context and libraries", 0.5, 0.5)
    yield FittedConstant("logit_copies", "1", "16-bit copies of the logits in a forward alone", 2, 0.4)
    yield FittedConstant("table_part", "1", "tokens of Table 4's runs over those of Table 14's", 1, 1.5)
    for method in ("first order", "zeroth order"):
        for data in DATASETS:
            yield FittedConstant(f"table_part|{method}|{data}", "1", f"the same, {method} on {data}, beyond all's", 1, 0.7)  # fmt: skip


CONSTANTS = tuple(_constants())

_MODELS = {"OPT": "opt", "LLAMA-2": "llama-2", "LLAMA2": "llama-2", "LLAMA-3": "llama-3", "LLAMA3": "llama-3",
           "LLAMA": "llama-2"}  # fmt: skip


@dataclass(frozen=True)
class QuzoCase:
    """What a row's number is of."""

    model: str  # a shipped size
    method: str  # as printed, without its brackets, in upper case
    bits: int  # of a weight
    dataset: str  # one of :data:`DATASETS`; empty for all
    is_full: bool  # whether the table is one of full tuning
    gpus: int = 1
    value: float | None = None


class QuzoFit(TableFit):
    """Constants of QuZO's tables."""

    times: tuple[FoundConstant, ...] = ()  # of the seconds of a step; empty where no row prints them

    @property
    def values(self) -> dict[str, float]:
        """Values by name, of memory and of seconds."""
        return super().values | {constant.name: constant.value for constant in self.times}


def quzo_case(row: PublishedRow) -> QuzoCase:
    """Return what a row of memory or of seconds is about.

    Raises NotPredicted if it names a model, a method or a precision that these tables do not have.
    """
    method = row["method"].split("(")[0].strip().upper()
    if method not in (*LORA, *ZEROTH_ORDER, *FULL):
        raise NotPredicted(f"method {row['method']!r} is not one of QuZO's tables'")
    dataset = next((name for name in DATASETS if name.lower() == row["dataset"].lower()), "")
    if row["dataset"] and not dataset:
        raise NotPredicted(f"nothing is known of the batches of {row['dataset']!r}")
    return QuzoCase(
        model=_model(row["model"]),
        method=method,
        bits=_bits(row["precision"] or row["method"]),
        dataset=dataset,
        is_full=row["table"] in FULL_TABLES,
        gpus=row.count("gpus") if row["gpus"] else 1,
        value=row.value,
    )


def _model(printed: str) -> str:
    size = (printed.upper().replace("-", " ").split() or [""])[-1]
    family = printed.upper()[: -len(size)].strip(" -").replace(" ", "-")
    name = f"{_MODELS.get(family, family.lower())}-{size.lower()}"
    try:
        read_model_spec(name)
    except ZosimError as error:
        raise NotPredicted(f"no model is known of {printed!r}") from error
    return name


def _bits(precision: str) -> int:
    text = precision.lower()
    for bits, names in {
        4: ("4-bit", "w4", "int4"),
        8: ("8-bit", "w8", "int8", "fp8"),
        16: ("16",),
        32: ("32",),
    }.items():
        if any(name in text for name in names):
            return bits
    raise NotPredicted(f"precision {precision!r} is none of 4-bit, 8-bit, fp16 and fp32")


def printed_peaks(rows: Iterable[PublishedRow]) -> list[QuzoCase]:
    """Return the peaks on one GPU and one data set that rows print."""
    return [case for case in _printed(rows, MEMORY) if case.dataset and case.gpus == 1]


def printed_steps(rows: Iterable[PublishedRow]) -> list[QuzoCase]:
    """Return the seconds of a step that rows print."""
    return _printed(rows, (SECONDS,))


def _printed(rows: Iterable[PublishedRow], quantities: Sequence[str]) -> list[QuzoCase]:
    cases = []
    for row in rows:
        if row["paper"] == PAPER and row["quantity"] in quantities and row.value is not None:
            try:
                cases.append(quzo_case(row))
            except NotPredicted:
                continue
    return cases


# -- memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """What a model's shapes say."""

    # parameters, ends: all stored elements, and those outside the blocks.
    parameters: int
    ends: int
    # kept, temporaries, cache, logits: bytes a token in 16 bits: for a backward; a block's temporaries; keys and values;
    # one copy of the logits.
    kept: float
    temporaries: float
    cache: float
    logits: float


@cache
def counted(model: str, length: int) -> Counted:
    """Return what is counted of a model for sequences of one length; attention stores its scores."""
    spec, batch = read_model_spec(model), 8
    tokens = batch * length

    def kept(segment: str) -> int:
        return kept_bytes(spec, segment, batch=batch, seq=length, dtype="float16", attention="eager")

    block = forward_work(
        spec,
        block_segment(0),
        batch=batch,
        seq=length,
        dtype="float16",
        storage_dtype="float16",
        attention="eager",
    )
    return Counted(
        parameters=spec.num_parameters,
        ends=sum(group.num_parameters for group in spec.param_groups if group.segments[0] in (EMBED, HEAD)),
        kept=(spec.num_blocks * kept(block_segment(0)) + kept(HEAD)) / tokens,
        temporaries=block.workspace_bytes / tokens,
        cache=2 * spec.num_blocks * spec.num_key_value_heads * spec.head_dim * 2,
        logits=2 * spec.vocab_size,
    )


def peak_gib(case: QuzoCase, values: Mapping[str, float]) -> tuple[float, str]:
    """Return the peak of all GPUs together in GiB, and what most of it is. Without a data set, the mean of all in logs."""
    if not case.dataset:
        each = [peak_gib(replace(case, dataset=data), values) for data in DATASETS]
        return math.exp(float(np.mean([math.log(peak) for peak, _ in each]))), each[0][1]
    parts = _parts(case, values)
    return sum(parts.values()) / GIBIBYTE, max(parts, key=parts.__getitem__)


def _parts(case: QuzoCase, values: Mapping[str, float]) -> dict[str, float]:
    shape = counted(case.model, max(1, round(values[f"length|{case.dataset}"])))
    tokens, context = _tokens(case, values), values["context"] * GIBIBYTE
    weights = shape.parameters * case.bits / 8
    if case.method in ZEROTH_ORDER:
        one = shape.cache + values["logit_copies"] * shape.logits + shape.temporaries
        part = _zeroth_order_part(case, values)
        return {"weights": weights, "the forward": one * tokens * part, "context": context * part}
    kept = shape.kept * tokens
    if case.method in LORA:
        linears = (shape.parameters - shape.ends) * case.bits / 8
        copies = values["int8_copies"] if case.bits == 8 else 1.0
        return {"weights": linears + 2 * shape.ends, "activations": kept * copies, "context": context}
    # Layers differ in which of the two is larger, so that the sum of maxima is a smooth one.
    dynamic = float(np.linalg.norm([weights, kept * case.bits / _HALF], 4))
    return {"weights": weights, "activations and gradients": dynamic, "context": context * case.bits / 8}


def _zeroth_order_part(case: QuzoCase, values: Mapping[str, float]) -> float:
    """Return the bytes that everything but weights takes over those of an 8-bit run."""
    if case.bits == 4 and not case.is_full:
        return values["four_bit_part"] * values[f"four_bit_part|{case.dataset}"]
    return min(case.bits, _HALF) / 8


def _tokens(case: QuzoCase, values: Mapping[str, float]) -> float:
    tokens, order = values[f"tokens|{case.dataset}"], "first order"
    if case.method in ZEROTH_ORDER:
        tokens *= values["zeroth_order_part"] * values[f"zeroth_order_part|{case.dataset}"]
        order = "zeroth order"
    if case.method in LORA and case.bits == 4:
        tokens *= values[f"nf4_part|{case.dataset}"]
    if case.is_full:
        tokens *= values["table_part"] * values[f"table_part|{order}|{case.dataset}"]
    return tokens


# -- fitting ---------------------------------------------------------------------------------------------------


def fit_peaks(known: Sequence[QuzoCase]) -> dict[str, float]:
    """Return the constants most probable after these peaks, by name."""
    return _posterior(known).values


def _posterior(known: Sequence[QuzoCase]) -> Posterior:
    # Lengths are whole tokens, so that steps of a derivative must be wide enough to reach the next.
    return posterior(
        CONSTANTS,
        lambda values: [log_error(case, values, peak_gib) / _SCALE for case in known],
        diff_step=1e-3,
    )


def calibrate_quzo(rows: Sequence[PublishedRow]) -> QuzoFit | None:
    """Return what rows say about the constants of QuZO's tables; None if too few of them do."""
    known = printed_peaks(rows)
    if len(known) < 2:
        return None
    return QuzoFit(
        constants=_posterior(known).found,
        half_width=conformal_half_width(left_out_errors(known, fit_peaks, peak_gib)),
        num_cells=len(known),
        times=fit_times(printed_steps(rows)),
    )


# -- seconds ---------------------------------------------------------------------------------------------------

_PRODUCTS = 16e12
"""Flop/s of large float32 products of OPT-30B's width on an A100, TF32 off: what ZO2's rows fit, between its two widths
(``zosim calibrate --rows shipped``)."""

_PASSES_BYTES_PER_S = 0.78 * 1.555e12
"""Bytes/s of passes over the weights: of an A100-40GB's 1555 GB/s (data sheet) the part that ZO2's rows fit."""

TIMES = (
    FittedConstant("step_tokens", "token", "of one forward of Table 15's step", 1000, 1.0),
    FittedConstant(
        "exchange_rate",
        "byte/s",
        "of the shards that the first-order run gathers and reduces, per GPU",
        12e9,
        1.0,
    ),
    FittedConstant("four_bit_time", "1", "of a float32 step that its 4-bit one takes", 0.5, 0.5),
)


def step_s(case: QuzoCase, values: Mapping[str, float]) -> tuple[float, str]:
    """Return the seconds of a step and what most of them are.

    A float32 step is counted: two forwards and four passes over the weights, one GPU after the other; or one forward
    and a backward of twice its operations on every GPU, with shards gathered twice and reduced once. Those in 4 bits are
    printed as parts of these, see the audit.
    """
    parameters = read_model_spec(case.model).num_parameters
    forward = 2 * parameters * values["step_tokens"] / _PRODUCTS
    if case.method in ZEROTH_ORDER:
        parts = {
            "matrix products": 2 * forward,
            "passes over parameters": 4 * 2 * 4 * parameters / _PASSES_BYTES_PER_S,
        }
    else:
        away = (case.gpus - 1) / case.gpus
        parts = {
            "matrix products": 3 * forward,
            "exchange": 3 * away * 4 * parameters / values["exchange_rate"],
        }
    factor = 1.0 if case.bits >= _HALF else values["four_bit_time"] * case.bits / 4
    return factor * sum(parts.values()), max(parts, key=parts.__getitem__)


def fit_times(known: Sequence[QuzoCase]) -> tuple[FoundConstant, ...]:
    """Return the constants of the seconds of a step that rows print; none without rows."""
    if not known:
        return ()
    return posterior(TIMES, lambda values: [log_error(case, values, step_s) / _SCALE for case in known]).found


# -- formulas --------------------------------------------------------------------------------------------------


def formula(row: PublishedRow) -> str:
    """Return what Table 13 must print: the bytes of float32 weights and activations over 32 bits' worth of them.

    Raises NotPredicted if its method is not one of that table.
    """
    name = row["method"].split("(")[0].strip().upper()
    if name not in (*ZEROTH_ORDER, *FULL):
        raise NotPredicted(f"method {row['method']!r} is not one of QuZO's tables'")
    divisor = 32 // _bits(row["method"] if "bit" in row["method"] else row["precision"] or "fp32")
    part = f"/{divisor}" if divisor > 1 else ""
    if row["quantity"] == FORMULAS[0]:
        return f"|w|{part}"
    return f"max_l |w|{part}" if name in ZEROTH_ORDER else f"sum_l max(|a|{part}, |w|{part})"
