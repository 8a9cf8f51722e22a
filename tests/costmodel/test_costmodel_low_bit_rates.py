"""Rates of products of few bits: from data sheets, by format, and what a plan makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.estimate import estimate
from costmodel.formats.low_bits import samples_for_rows
from costmodel.formats.quant_passes import PASSES
from costmodel.rates.calibration import fit_profile
from costmodel.rates.measurement import Measurement
from costmodel.work import Matmul, Work
from topology.documents import load_preset


def seconds(profile, format_="", dtype="float16", **shape):
    product = Matmul(**({"m": 8192, "n": 8192, "k": 8192} | shape), format=format_)
    return estimate(Work(dtype=dtype, matmuls=(product,)), profile).terms["matmul"]


@pytest.fixture(scope="module")
def a100():
    return datasheet_profile(load_preset("a100-80gb-milan"), "gpu0")


def test_a_gpu_multiplies_integers_at_the_rate_of_its_data_sheet(a100):
    # 624 T/s, of which 60 % are reached.
    assert seconds(a100, "int8") == pytest.approx(2 * 8192**3 / (0.6 * 624e12), rel=0.02)
    assert seconds(a100, "int8") < seconds(a100)


def test_few_rows_read_a_byte_a_weight(a100):
    memory = a100.values()["memory_bandwidth"]
    few = seconds(a100, "int8", m=1)
    # Reading is not quite as fast as memory: data sheets' profiles have a time beside it.
    assert few == pytest.approx((8192 * 8192 + 8192 + 4 * 8192) / memory, rel=0.06)
    assert few / seconds(a100, m=1) == pytest.approx(0.5, rel=0.03)


def test_without_a_rate_of_its_own_a_format_multiplies_as_it_computes(a100):
    others = [constant for constant in a100.constants if constant.name != "matmul_rate.int8"]
    without = type(a100)(**{**dict(a100), "constants": tuple(others)})
    assert seconds(without, "int8") == seconds(a100)


def test_a_cpu_without_a_declared_peak_has_an_honest_interval():
    topology = load_preset("a100-80gb-milan")
    cpu = datasheet_profile(topology, topology.of_type("cpu")[0].id, num_threads=2)
    rate = cpu.constant("matmul_rate.int8")
    assert rate.low < cpu.constant("matmul_rate.float32").value < rate.value < rate.high


@pytest.mark.parametrize(
    ("shape", "share", "block"), [((384, 64), 0.02, 2048), ((96, 768), 0.1, 16384), ((10, 64), 0.5, 2048)]
)
def test_rows_that_move_are_reached_past_as_many_numbers_as_chance_has_it(shape, share, block):
    """Against 400 draws of which rows move: blocks that hold any, and what lies before the first of each, and from it to the last."""
    outputs, inputs = shape
    generator, rows_of_block = np.random.default_rng(0), block // inputs
    num_blocks, num_sampled, num_passed = [], [], []
    for _ in range(400):
        nonzero = generator.random(outputs) < share
        blocks = [nonzero[begin : begin + rows_of_block] for begin in range(0, outputs, rows_of_block)]
        ends = [(int(part.nonzero()[0][0]), int(part.nonzero()[0][-1]) + 1) for part in blocks if part.any()]
        num_blocks.append(len(ends))
        num_passed.append(sum(first for first, _ in ends) * inputs)
        num_sampled.append(sum(last - first for first, last in ends) * inputs)
    predicted = samples_for_rows([shape], share, block)
    assert predicted.num_blocks == pytest.approx(np.mean(num_blocks), rel=0.06, abs=0.6)
    assert predicted.num_sampled == pytest.approx(np.mean(num_sampled), rel=0.06)
    assert predicted.num_passed == pytest.approx(np.mean(num_passed), rel=0.06)


@pytest.fixture(scope="module")
def cpu():
    return datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=1)


def test_a_cpu_passes_over_qvalues_at_rates_of_its_own(cpu):
    work = Work(dtype="bfloat16", quant_passes=(("inputs", 1000), ("updates", 3000)))
    values = cpu.values()
    expected = 1000 / values["quant_rate.inputs.bfloat16"] + 3000 / values["quant_rate.updates"]
    assert estimate(work, cpu).terms["quantized"] == pytest.approx(expected)
    assert values["quant_rate.updates"] == PASSES["updates"].core_rate


def test_where_no_rate_is_known_bytes_say_what_passes_over_qvalues_take(cpu, a100):
    num = 1 << 24
    passes = Work(dtype="float16", quant_passes=(("updates", num),))
    size_bytes = PASSES["updates"].size_bytes(num, "float16")
    assert estimate(passes, a100) == estimate(Work(dtype="float16", scratch_bytes=size_bytes), a100)
    others = [constant for constant in cpu.constants if constant.quantity != "quant_rate"]
    without = type(cpu)(**{**dict(cpu), "constants": tuple(others)})
    terms = estimate(passes, without).terms
    assert "quantized" not in terms
    assert (
        terms["param_pass"]
        == estimate(Work(dtype="float16", scratch_bytes=size_bytes), without).terms["param_pass"]
    )


def test_rates_of_passes_are_fitted_with_all_else_as_it_is(cpu):
    true = {"updates": 0.1e9, "matrices": 2e3}
    measured = []
    for number, (moves, matrices) in enumerate([(10**6, 1), (10**7, 40), (10**5, 60)]):
        work = Work(dtype="float32", quant_passes=(("matrices", matrices), ("updates", moves)))
        rest_s = estimate(work, cpu).seconds - estimate(work, cpu).terms["quantized"]
        seconds = rest_s + moves / true["updates"] + matrices / true["matrices"]
        measured.append(Measurement(f"{number}", work, seconds, seconds, 3, 1))
    fitted, report = fit_profile(measured, cpu, quantities=("quant_rate",))
    for name, rate in true.items():
        assert fitted.values()[f"quant_rate.{name}"] == pytest.approx(rate, rel=0.1)
        assert f"quant_rate.{name}" in report.identified
    changed = {c.quantity for c, d in zip(fitted.constants, cpu.constants, strict=True) if c.value != d.value}
    assert changed == {"quant_rate"}
