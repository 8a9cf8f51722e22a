"""Rates of products of few bits: from data sheets, by format, and what a plan makes of them."""

from __future__ import annotations

import pytest

from costmodel.datasheet import datasheet_profile
from costmodel.estimate import estimate
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
    cpu = datasheet_profile(topology, topology.of_kind("cpu")[0].id, num_threads=2)
    rate = cpu.constant("matmul_rate.int8")
    assert rate.low < cpu.constant("matmul_rate.float32").value < rate.value < rate.high
