"""``python -m studies.speed.products``: how fast products of a linear layer are in 32, 16 and 8 bits, and the passes around them.

What a forward of int8 can gain at best follows from these rates. Weights take turns, so that they come from memory as a model's do. Of
oneDNN's product with scales inside (``qlinear``) the weight is laid out beforehand; what that takes stands beside it, since quantized values that
training moves would be laid out anew in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from time import perf_counter, process_time
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import linear

from executors.low_bits.exact_products import exact_sums
from executors.low_bits.linear import byte_product, quantized_inputs
from executors.steps.heap import keep_freed_memory
from executors.turns import Way, in_turns
from zosim.console import stdout
from zosim.report import Table

SHAPES = ((768, 768), (3072, 768), (768, 3072))
"""Outputs and inputs of the linear layers of OPT-125M: four of the first, one of each other in a block."""

_NUM_TURNS, _NUM_WEIGHTS = 15, 6
_WAYS = ("float32", "bfloat16", "int_mm", "qlinear", "laid out", "inputs in int8", "sums scaled")


def main(
    rows: Annotated[int, typer.Option(min=1, help="Tokens.")] = 512,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print milliseconds, and TFLOP/s of products."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    # What one thread takes of its core is changed less by others that are at work.
    clock = process_time if threads == 1 else perf_counter
    lines = [(shape, milliseconds(rows, *shape, clock)) for shape in SHAPES]
    stdout.print(f"{rows} rows, {threads} thread(s), milliseconds (and TFLOP/s of products)")
    cells = [
        (f"{outputs} x {inputs}", *(_cell(way, taken[way], 2e-9 * rows * outputs * inputs) for way in _WAYS))
        for (outputs, inputs), taken in lines
    ]
    stdout.print(Table(("outputs x inputs", *_WAYS), cells, numeric=_WAYS))


def _cell(way: str, taken_ms: float, giga_flops: float) -> str:
    is_product = way in _WAYS[:4]
    return f"{taken_ms:.2f}" + (f" ({giga_flops / taken_ms:.2f})" if is_product else "")


def milliseconds(
    rows: int, outputs: int, inputs: int, clock: Callable[[], float] = perf_counter
) -> dict[str, float]:
    """Return the median milliseconds of each way for one shape."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0))
    narrow, (qvalues, scales) = x.bfloat16(), quantized_inputs(x.bfloat16(), "token")
    weights = [torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8) for _ in range(_NUM_WEIGHTS)]
    int8, wide = cycle(weights), cycle([weight.float() for weight in weights])
    bfloat16 = cycle([weight.bfloat16() for weight in weights])
    onednn = torch.ops.onednn
    laid_out = cycle([onednn.qlinear_prepack(weight, None) for weight in weights])
    unit, zero = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    # Without AMX oneDNN has no such kernel for inputs with a sign, and takes a second for each product.
    without_sign = qvalues.to(torch.int16).add_(128).to(torch.uint8)

    def scaled_inside(_: int) -> Tensor:
        product: Tensor = onednn.qlinear_pointwise(
            without_sign, 1.0, 128, next(laid_out), unit, zero, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )
        return product

    ways: dict[str, Way] = {
        "float32": lambda _: linear(x, next(wide)),
        "bfloat16": lambda _: linear(narrow, next(bfloat16)),
        "int_mm": lambda _: exact_sums(qvalues, next(int8)),
        "qlinear": scaled_inside,
        "laid out": lambda _: onednn.qlinear_prepack(next(int8), None),
        "inputs in int8": lambda _: quantized_inputs(narrow, "token"),
        "with scales": lambda _: byte_product(qvalues, next(int8), scales).mul_(unit).to(torch.bfloat16),
    }
    # One way after the other: each finds caches as it left them.
    taken = {
        name: 1e3 * in_turns({name: way}, _NUM_TURNS, num_warm_rounds=2, clock=clock)[name].median_s
        for name, way in ways.items()
    }
    return taken | {"sums scaled": max(0.0, taken["with scales"] - taken["int_mm"])}


if __name__ == "__main__":
    typer.run(main)
