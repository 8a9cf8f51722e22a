"""Weight-only products and peaks of memory: what the studies compare is what they say."""

from __future__ import annotations

import pytest
import torch

from costmodel.formats.low_bits import QuantConfig
from executors.low_bits.quantized import QuantizedTensor
from studies.quzo import memory
from studies.quzo.products import weight_only
from studies.speed import __main__ as speed
from studies.speed.products import milliseconds


@pytest.mark.parametrize(
    "quant_config",
    [QuantConfig("int8", dtype="bfloat16"), QuantConfig("int4", "group", 32, dtype="bfloat16")],
)
def test_a_weight_only_product_is_that_of_the_numbers_that_qvalues_stand_for(quant_config):
    generator = torch.Generator().manual_seed(0)
    quantized = QuantizedTensor.empty(quant_config, torch.Size((64, 128)), torch.device("cpu"))
    quantized.encode(torch.randn(64, 128, generator=generator))
    inputs = torch.randn(16, 128, generator=generator).bfloat16()
    exact = inputs.double() @ quantized.values(torch.float64).T
    # Eight digits of bfloat16, of inputs, scales and the output.
    assert (weight_only(quantized)(inputs).double() - exact).abs().max() < 2**-7 * exact.abs().max()


@pytest.mark.slow
def test_peaks_are_predicted_and_never_too_low(monkeypatch):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    monkeypatch.setitem(speed.SHAPES, "tiny", shape)
    monkeypatch.setattr(
        memory, "QUANTIZED", {name: memory.QUANTIZED[name] for name in ("bfloat16", "int4 by groups of 64")}
    )
    for place in memory.PLACES:
        plain, narrow = memory.peaks("tiny", place, batch=1, seq=16, loss_chunk=16)
        assert narrow.measured_bytes < plain.measured_bytes <= plain.predicted_bytes
        assert narrow.measured_bytes <= narrow.predicted_bytes


def test_every_way_to_multiply_is_timed():
    assert {"float32", "int_mm", "laid out", "sums scaled"} < milliseconds(4, 64, 32).keys()
