"""``python -m studies.quzo.products``: what multiplies by quantized weights fastest, weights made of them or torch's weight-only products.

One thread; every row of the table is one run, in which the ways take turns, and medians are taken. At an evaluation point the perturbation,
of a byte an element, is added: to the weights that are made, or as a second weight-only product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from costmodel.formats.low_bits import QuantConfig
from executors.formats import format_of
from executors.low_bits.quantized import QuantizedTensor
from executors.turns import in_turns

ROWS = (16, 128, 512)
_SHAPE = torch.Size((768, 768))
_GROUP = 32
_NUM_TURNS = 7


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(
        "milliseconds of a product of 768 x 768 in bfloat16: dequantized, weight-only, and the latter's largest error"
    )
    for rows in ROWS:
        inputs = torch.randn(rows, _SHAPE[1], generator=torch.Generator().manual_seed(0)).bfloat16()
        for name in ("int8", "int4"):
            print(_line(name, inputs))


def _line(name: str, inputs: Tensor) -> str:
    quant_config = QuantConfig("int8") if name == "int8" else QuantConfig("int4", "group", _GROUP)
    quantized = QuantizedTensor.empty(
        QuantConfig(quant_config.format, quant_config.scales, quant_config.group_elements, dtype="bfloat16"),
        _SHAPE,
        torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    quantized.encode(torch.randn(_SHAPE, generator=generator) * 0.02)
    perturbation = torch.randint(-127, 128, _SHAPE, dtype=torch.int8, generator=generator)
    alone = weight_only(quantized)
    scale = torch.full((_SHAPE[0],), 1e-5, dtype=torch.bfloat16)
    dtype = inputs.dtype
    assert format_of(dtype) == quantized.quant_config.dtype
    seconds = in_turns(
        {
            "made": lambda _: linear(inputs, quantized.values(dtype)),
            "made, moved": lambda _: linear(inputs, quantized.values(dtype).add_(perturbation, alpha=1e-5)),
            "alone": lambda _: alone(inputs),
            "alone, moved": lambda _: alone(inputs) + torch._weight_int8pack_mm(inputs, perturbation, scale),
        },
        _NUM_TURNS,
    )
    exact = inputs.double() @ quantized.values(torch.float64).T
    error = float((alone(inputs).double() - exact).abs().max() / exact.abs().max())
    made, alone_ms, made_moved, alone_moved = (
        1e3 * seconds[way].median_s for way in ("made", "alone", "made, moved", "alone, moved")
    )
    return (
        f"{name}, {inputs.shape[0]:4} rows: at the base {made:7.2f} and {alone_ms:7.2f} ({alone_ms / made:5.2f}), "
        f"at a point {made_moved:7.2f} and {alone_moved:7.2f} ({alone_moved / made_moved:5.2f}), error {error:.1e}"
    )


def weight_only(quantized: QuantizedTensor) -> Callable[[Tensor], Tensor]:
    """Return torch's product of bfloat16 inputs by the quantized values of a weight: int8 by channel, or int4 by groups."""
    levels = quantized.levels()
    if quantized.quant_config.format == "int8":
        return lambda inputs: torch._weight_int8pack_mm(inputs, levels, quantized.scales.view(-1))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32) + 8, 1)
    scales = torch.stack([quantized.scales.T, torch.zeros_like(quantized.scales.T)], -1).contiguous()

    def product(inputs: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, packed, _GROUP, scales)
        return made

    return product


if __name__ == "__main__":
    main()
