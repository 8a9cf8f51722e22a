"""Constants that were chosen after looking at measurements, judged by sources that had no say in them.

Each constant is fitted again to the measurements of all sources but one, by the factor on the shipped value with the least
error, and predicts the one left out. A constant that only its own source needs is worth no more on others than leaving
it out, which is its neutral value: what one would take without having seen a measurement.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any
from unittest.mock import patch

from costmodel import estimate
from costmodel.devices import datasheet, gpus, nccl
from costmodel.models import training
from costmodel.scoring import Row, Score
from zosim.applications.first_order import recipes
from zosim.applications.validation import codes, passes
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import Forecast, MeasuredRow, Outcome, joined
from zosim.hardware import machines

FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0)
"""Of the shipped value, among which a fit chooses."""
_OF_STEPS = (0.7, 1.0, 1.4)
"""Fewer where each prediction plays a whole step."""

Apply = Callable[[float], AbstractContextManager[Any]]
Predictions = Mapping[float, Mapping[str, float]]
"""Seconds or bytes of each row, by the factor that one constant was multiplied with."""


@dataclass(frozen=True)
class Chosen:
    """A constant that somebody chose with measurements in view."""

    name: str
    kinds: tuple[str, ...]  # kinds of the rows that it was chosen beside
    apply: Apply  # context in which its value is so many times the shipped one
    neutral: float  # factor that leads to the value without measurements
    without: str  # that value, in words
    factors: tuple[float, ...] = FACTORS  # among which a fit chooses
    codes: tuple[str, ...] = ()  # codes of the rows, where it is not of all

    def concerns(self, row: MeasuredRow) -> bool:
        """Whether a row is of those that the constant was chosen beside."""
        return row["kind"] in self.kinds and (not self.codes or row["code"] in self.codes)


@dataclass(frozen=True)
class HeldOut:
    """A constant beside the rows of one source that had no say in it."""

    chosen: Chosen
    left_out: str  # source or machine
    # num_rows, num_others: rows of it, and of all others.
    num_rows: int
    num_others: int
    factor: float  # fitted to the others; neutral where there are none
    # shipped, refitted, neutral: median errors of its rows with each value.
    shipped: float
    refitted: float
    neutral: float


def _number(module: ModuleType, name: str) -> Apply:
    """Return what scales a number or a spread of a module."""

    def apply(factor: float) -> AbstractContextManager[Any]:
        return patch.object(module, name, _scaled(getattr(module, name), factor))

    return apply


def _scaled(value: Any, factor: float) -> Any:
    return tuple(factor * item for item in value) if isinstance(value, tuple) else factor * value


def _gpu_constant(name: str) -> Apply:
    """Return what scales a constant that data sheets of all GPUs share."""

    def apply(factor: float) -> AbstractContextManager[Any]:
        constants = datasheet._HOST_CONSTANTS["gpu"]
        return patch.dict(constants, {name: _scaled(constants[name], factor)})

    return apply


def _architectures(change: Callable[[gpus.Architecture, float], gpus.Architecture]) -> Apply:
    @contextmanager
    def apply(factor: float) -> Iterator[None]:
        changed = tuple(change(item, factor) for item in gpus.ARCHITECTURES)
        with patch.object(gpus, "ARCHITECTURES", changed):
            gpus._architecture.cache_clear()
            yield
        gpus._architecture.cache_clear()

    return apply


def _code(name: str, change: Callable[[codes.SystemCode, float], codes.SystemCode]) -> Apply:
    def apply(factor: float) -> AbstractContextManager[Any]:
        changed = MappingProxyType({**codes.CODES, name: change(codes.CODES[name], factor)})
        return patch.object(codes, "CODES", changed)

    return apply


def _tiles(factor: float) -> AbstractContextManager[Any]:
    tiles = tuple(
        (rows, columns, min(1.0, factor * reached) if reached < 1 else reached)
        for rows, columns, reached in estimate._TILES
    )
    return patch.object(estimate, "_TILES", tiles)


def _half_lengths(factor: float) -> AbstractContextManager[Any]:
    scaled = {way: factor * tokens for way, tokens in gpus._HALF_LENGTHS.items()}
    return patch.object(gpus, "_HALF_LENGTHS", scaled)


def _more_score_clocks(item: gpus.Architecture, factor: float) -> gpus.Architecture:
    attention = {key: (part, max(1e-9, factor * clocks)) for key, (part, clocks) in item.attention.items()}
    return replace(item, attention=attention)


def _other_kernel(code: codes.SystemCode, factor: float) -> codes.SystemCode:
    return code if factor == 1 else replace(code, kernel=None)


_PRODUCTS, _ATTENTION = ("matmul",), ("attention", "attention_backward")
_NETWORK, _STEPS = ("all_reduce",), ("first_order_step",)
_MEMORY = ("device_memory", "first_order_memory")
_RECIPE_MEMORY, _RECIPE_SPEED = ("first_order_memory",), ("first_order_throughput",)

CHOSEN = (
    Chosen("rates of tiles smaller than the largest", _PRODUCTS, _tiles, 10.0, "all tiles reach the same"),
    Chosen("start of a product", _PRODUCTS, _gpu_constant("kernel_s.product"), 0.0, "none"),
    Chosen("part of the peak", _PRODUCTS, _number(datasheet, "_GEMM_GPU"), 0.8 / 0.77, "the middle of 70-90 %"),
    Chosen("operands' bandwidth", _PRODUCTS, _number(datasheet, "_OPERANDS_GPU"), 0.89 / 0.80, "that of passes"),
    Chosen("passes' bandwidth", ("elementwise",), _number(datasheet, "_STREAM_GPU"), 0.85 / 0.89, "STREAM's on CPUs"),
    Chosen(
        "part of L2 that passes find",
        ("elementwise",),
        _architectures(lambda item, factor: replace(item, cache_mib=max(1e-3, factor * item.cache_mib))),
        0.0,
        "no cache",
    ),
    Chosen("clocks of a score", _ATTENTION, _architectures(_more_score_clocks), 0.0, "products alone"),
    Chosen("half lengths of attention", _ATTENTION, _half_lengths, 0.01, "none"),
    Chosen("tokens on the diagonal", _ATTENTION, _gpu_constant("attention_diagonal_len"), 0.5, "one tile, 128"),
    Chosen("calling a collective", _NETWORK, _gpu_constant("call_s.collective"), 0.0, "NCCL's model alone"),
    Chosen("filling of channels", _NETWORK, _number(nccl, "_STEP_BYTES"), 0.0, "NCCL's model alone"),
    Chosen("part of planned bandwidth", _NETWORK, _number(nccl, "_REACHED"), 1 / 0.97, "all of it"),
    Chosen("one message's part", ("p2p",), _number(machines, "NVLINK_MESSAGE_FRACTION"), 0.8 / 0.9, "as rings"),
    Chosen(
        "energy of an operation",
        _STEPS,
        _architectures(lambda item, factor: replace(item, flop_j=factor * item.flop_j)),
        0.0,
        "no power limit",
        factors=_OF_STEPS,
    ),
    Chosen(
        "Megatron's host",
        _STEPS,
        _code(
            "megatron-deepspeed",
            lambda code, factor: replace(
                code, host_s={**code.host_s, "call_s.block": factor * code.host_s["call_s.block"]}
            ),
        ),
        60e-6 / 0.92e-3,
        "as other code",
        factors=_OF_STEPS,
        codes=("megatron-deepspeed",),
    ),
    Chosen(
        "FlashAttention 1 in llm-foundry",
        _STEPS,
        _code("llm-foundry", _other_kernel),
        0.0,
        "FlashAttention 2",
        factors=(0.0, 1.0),
        codes=("llm-foundry",),
    ),
    Chosen("context", _MEMORY, _number(datasheet, "_CONTEXT"), 0.5, "the least that is known"),
    Chosen("slack of temporaries", _MEMORY, _gpu_constant("allocator_slack"), 0.0, "none"),
    Chosen("cache, equal lengths", _RECIPE_MEMORY, _number(training, "CACHED"), 0.0, "nothing is kept"),
    Chosen("cache, unlike lengths", _RECIPE_MEMORY, _number(training, "CACHED_UNLIKE"), 0.0, "nothing is kept"),
    Chosen("cache, gathered weights", _RECIPE_MEMORY, _number(training, "CACHED_SHARDED"), 0.0, "nothing is kept"),
    Chosen("libraries' workspaces", _RECIPE_MEMORY, _number(training, "LIBRARY_BYTES"), 0.0, "none"),
    Chosen("fragments under ZeRO's third stage", _RECIPE_MEMORY, _number(training, "_ZERO3_FRAGMENTED"), 0.0, "none"),
    Chosen("hooks of ZeRO's third stage", (*_RECIPE_SPEED, "moe_forward"), _number(recipes, "_HOOK_S"), 0.0, "none"),
    Chosen(
        "beginning of fms-acceleration's runs",
        _RECIPE_SPEED,
        _code("fms-acceleration", lambda code, factor: replace(code, begin_s=factor * code.begin_s)),
        0.0,
        "steps alone count",
        codes=("fms-acceleration",),
    ),
    Chosen("part of the drives' reads", ("nvme_streamed",), _number(passes, "_SUSTAINED"), 1 / 0.92, "all of them"),
)  # fmt: skip
"""As listed in docs/explanation/data-sheet-predictions.md."""


def source_of(row: MeasuredRow) -> str:
    """Return who published a row: the repository where the cell names one, or else all that it says.

    >>> source_of(MeasuredRow({"source": "microsoft/vidur data/profiling/compute"}, "here"))
    'microsoft/vidur'
    """
    text = row["source"]
    return next((word.rstrip(",") for word in text.split() if "/" in word and ":" not in word), text)


def machine_of(row: MeasuredRow) -> str:
    """Return the machine that a row was measured on."""
    return row["hardware"]


def predictions(
    rows: Sequence[MeasuredRow], measured_machines: MeasuredMachines, chosen: Chosen
) -> Predictions:
    """Return what is predicted for rows with each value of a constant."""
    return {
        factor: _predicted(rows, measured_machines, ((chosen, factor),))
        for factor in dict.fromkeys((*chosen.factors, 1.0, chosen.neutral))
    }


def _predicted(
    rows: Sequence[MeasuredRow],
    measured_machines: MeasuredMachines,
    changes: Collection[tuple[Chosen, float]],
) -> dict[str, float]:
    """Return the predicted numbers by the rows' names, with constants changed."""
    outcomes = _outcomes(rows, measured_machines, changes)
    return {row.name: reported.predicted for row, reported in outcomes if isinstance(reported, Forecast)}


def _outcomes(
    rows: Sequence[MeasuredRow],
    measured_machines: MeasuredMachines,
    changes: Collection[tuple[Chosen, float]],
) -> list[tuple[MeasuredRow, Outcome]]:
    with ExitStack() as changed:
        for chosen, factor in changes:
            changed.enter_context(chosen.apply(factor))
        anew = measured_machines.renewed()
        return [(row, outcome(row, anew)) for row in rows]


def held_out(
    rows: Sequence[MeasuredRow],
    measured_machines: MeasuredMachines,
    chosen: Chosen,
    axes: Sequence[Callable[[MeasuredRow], str]],
) -> list[list[HeldOut]]:
    """Return, for each axis, one entry for each source or machine whose rows a constant matters to."""
    concerned = [row for row in rows if chosen.concerns(row)]
    numbers = predictions(concerned, measured_machines, chosen)
    moved = [row for row in concerned if _is_moved(row, numbers)]
    return [
        [_leave_out(chosen, moved, numbers, axis, name) for name in sorted(set(map(axis, moved)))]
        for axis in axes
    ]


def _is_moved(row: MeasuredRow, numbers: Predictions) -> bool:
    """Whether a constant matters to a row: at the ends of what it may be, predictions differ by a thousandth."""
    reported = [by_row[row.name] for by_row in numbers.values() if row.name in by_row]
    return bool(reported) and max(reported) > 1.001 * min(reported)


def _leave_out(
    chosen: Chosen,
    rows: Sequence[MeasuredRow],
    numbers: Predictions,
    axis: Callable[[MeasuredRow], str],
    name: str,
) -> HeldOut:
    own = [row for row in rows if axis(row) == name]
    others = [row for row in rows if axis(row) != name]
    factor = fitted(others, numbers, chosen) if others else chosen.neutral
    errors = (_median_error(own, numbers[at]) for at in (1.0, factor, chosen.neutral))
    return HeldOut(chosen, name, len(own), len(others), factor, *errors)


def fitted(rows: Sequence[MeasuredRow], numbers: Predictions, chosen: Chosen) -> float:
    """Return the factor with the least mean error in logs, groups of one machine weighing alike; of equals that nearest to 1."""

    def loss(factor: float) -> tuple[float, float]:
        by_group: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in rows:
            if row.measured and row.name in numbers[factor]:
                ratio = numbers[factor][row.name] / row.measured
                by_group[row.group, machine_of(row)].append(abs(math.log(ratio)))
        return round(statistics.fmean(map(statistics.fmean, by_group.values())), 6), abs(
            math.log(factor or 1e-9)
        )

    return min(chosen.factors, key=loss)


def _median_error(rows: Sequence[MeasuredRow], predicted: Mapping[str, float]) -> float:
    score = Score.of(Row(row.name, row["kind"], row.measured, predicted.get(row.name)) for row in rows)
    return score.median if score.errors else math.nan


def all_left_out(
    rows: Sequence[MeasuredRow],
    measured_machines: MeasuredMachines,
    judged: Sequence[HeldOut],
    axis: Callable[[MeasuredRow], str],
) -> list[Row]:
    """Return all rows, each predicted with no constant that its own source or machine had a say in.

    Every constant that matters to a source takes the value that the others fit, all at once.
    """
    changes: dict[str, list[tuple[Chosen, float]]] = defaultdict(list)
    for item in judged:
        changes[item.left_out].append((item.chosen, item.factor))
    outcomes = {
        row.name: joined(row, reported)
        for name in sorted(set(map(axis, rows)))
        for row, reported in _outcomes(
            [row for row in rows if axis(row) == name], measured_machines, changes[name]
        )
    }
    return [outcomes[row.name] for row in rows]
