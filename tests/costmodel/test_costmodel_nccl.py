"""What NCCL's messages and collectives take, held against its own tables, limits, and published times."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from costmodel.devices import gpus
from costmodel.devices.gpus import ARCHITECTURES, architecture_of, clocks_per_s
from costmodel.devices.nccl import Communicator
from topology.documents import catalogue, load_preset
from topology.errors import TopologyError

A100 = Communicator(8, 1, "nvlink", "ampere", 240e9, 270e9)
US = 1e-6


def test_the_smallest_sum_takes_a_base_and_a_hop_per_step() -> None:
    """A ring of eight in LL: 6.6 us and 14 steps of 0.6 us."""
    assert A100.seconds("all_reduce", 8) == pytest.approx((6.6 + 14 * 0.6) * US, rel=1e-3)
    # A tree of two passes one hop up and one down, as a ring does.
    pair = replace(A100, num_ranks=2)
    assert pair.seconds("all_reduce", 8) == pytest.approx((6.6 + 2 * 0.6) * US, rel=1e-3)


def test_large_sums_reach_the_published_bus_bandwidth() -> None:
    """nccl-tests on eight A100s behind switches print 234.9 GB/s for 16 GiB."""
    size = 2**34
    bus = size * 2 * 7 / 8 / A100.seconds("all_reduce", size)
    assert bus == pytest.approx(234.9e9, rel=0.03)


@pytest.mark.parametrize("function", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
@pytest.mark.parametrize("wire", ["nvlink", "pcie"])
def test_more_bytes_take_longer_and_never_less_than_the_links_do(function, num_hosts, wire) -> None:
    group = Communicator(8 * num_hosts, num_hosts, wire, "ampere", 100e9)
    sizes = [2**power for power in range(4, 34)]
    times = [group.seconds(function, size) for size in sizes]
    assert times == sorted(times)
    steps = (2 if function == "all_reduce" else 1) * (group.num_ranks - 1) / group.num_ranks
    # A tree of two hosts may send less than a ring does.
    assert times[-1] > (0.9 if num_hosts > 1 else 1) * steps * sizes[-1] / 100e9
    for bound, compare in (("low", float.__le__), ("high", float.__ge__)):
        assert all(
            compare(group.seconds(function, size, bound), time)
            for size, time in zip(sizes, times, strict=True)
        )


def test_switches_that_add_up_reach_the_published_bus_bandwidth() -> None:
    """nccl-tests on eight H100s: 370 GB/s by rings, 480 by NVLS, which NCCL takes from 2 MiB on; on H200 133 us for 16 MiB."""
    rings = Communicator(8, 1, "nvlink", "hopper", 370.8e9)
    board = replace(rings, in_switch_sums=True)
    size = 2**33
    b300 = replace(rings, generation="blackwell", bandwidth_bytes_per_s=18 * 40.1e9)
    b300_board = replace(b300, in_switch_sums=True)
    for group, published in ((rings, 370e9), (board, 480e9), (b300, 695e9), (b300_board, 845e9)):
        assert size * 2 * 7 / 8 / group.seconds("all_reduce", size) == pytest.approx(published, rel=0.05)
    call_s = 25 * US
    assert call_s + board.seconds("all_reduce", 2**24) == pytest.approx(133.5 * US, rel=0.1)
    assert board.seconds("all_reduce", 2**19) == rings.seconds("all_reduce", 2**19)
    # They may be switched off; two GPUs, older ones and other functions have none.
    assert board.seconds("all_reduce", size, "high") == rings.seconds("all_reduce", size, "high")
    assert board.seconds("all_gather", size) == rings.seconds("all_gather", size)
    for without in (
        replace(board, num_ranks=2),
        replace(board, generation="ampere"),
        replace(board, num_ranks=16, num_hosts=2),
    ):
        assert without.seconds("all_reduce", size) == replace(without, in_switch_sums=False).seconds(
            "all_reduce", size
        )


def test_hosts_far_apart_cost_a_small_sum_latency() -> None:
    assert replace(A100, num_ranks=16, num_hosts=2).seconds("all_reduce", 8) > 1.5 * A100.seconds(
        "all_reduce", 8
    )


def test_messages_go_in_ll_up_to_16_kib() -> None:
    """6.6 us and a hop; then 8.4 us, a hop of 3.4 us, and the bytes."""
    assert A100.message_s(2048) == pytest.approx(7.2 * US + 2048 / 270e9)
    assert A100.message_s(2**20) == pytest.approx(11.8 * US + 2**20 / 270e9)


def test_every_gpu_of_the_catalogue_is_of_one_known_architecture() -> None:
    import re

    for spec in catalogue().devices.values():
        if spec.type == "gpu":
            assert sum(re.search(item.names, spec.name) is not None for item in ARCHITECTURES) == 1, spec.name
    names = ("dgx-h100", "a100-80gb-milan", "h20-4x-milan", "rtx4090-2x", "dgx-1v", "h200-1x")
    known = [architecture_of(load_preset(name).device_spec("gpu0")) for name in names]
    assert [item and item.name for item in known] == ["hopper", "ampere", "hopper", "ada", "volta", "hopper"]


def test_a_user_s_file_has_architectures_that_go_first(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("architectures:\n  mine: {names: RTX 9090, float32_per_clock: 256, nccl: blackwell}\n")
    monkeypatch.setenv("ZOSIM_CATALOGUE", str(path))
    listed, _ = gpus._read()
    assert listed[0].name == "mine"
    assert listed[1:] == ARCHITECTURES
    path.write_text(path.read_text().replace("}", ", float64_part: 0.25}"))  # as before it was a fraction
    assert gpus._read()[0][0].float64_fraction == 0.25
    path.write_text("architectures:\n  mine: {names: RTX 9090}\n")
    with pytest.raises(TopologyError, match="an architecture of ZOSIM_CATALOGUE is not valid"):
        gpus._read()


def test_rings_across_hosts_post_every_step_to_the_network() -> None:
    """Sixteen ranks on two hosts in LL: 28 steps of a post, 2 us, and two of 2.7 us."""
    far = replace(A100, num_ranks=16, num_hosts=2)
    assert far._latency_us(("ring", "LL"), "all_reduce", 8) == pytest.approx(6.6 + 28 * 2 + 2 * 2.7)
    # One rank on each host: the network's latency as of a tree.
    alone = replace(A100, num_ranks=2, num_hosts=2)
    assert alone._latency_us(("ring", "LL"), "all_reduce", 8) == pytest.approx(6.6 + 2 * 5.0)


@pytest.mark.parametrize(
    ("preset", "boost_hz"),
    [("a100-80gb-milan", 1.41e9), ("dgx-h100", 1.98e9), ("dgx-1v", 1.53e9), ("rtx4090-2x", 2.52e9)],
)
def test_lanes_and_peaks_tell_the_boost_clocks_of_the_data_sheets(preset: str, boost_hz: float) -> None:
    spec = load_preset(preset).device_spec("gpu0")
    assert clocks_per_s(spec) / spec.num_cores == pytest.approx(boost_hz, rel=0.01)


GPUS = [spec for spec in catalogue().devices.values() if spec.type == "gpu"]


@pytest.mark.parametrize("spec", GPUS, ids=lambda spec: spec.id)
def test_peaks_of_a_data_sheet_are_a_power_of_two_of_operations_per_clock(spec) -> None:
    """A figure that was mistyped, or is of the sparse peak, is none, or leaves no clock that a GPU runs at.

    Tensor cores are rated at a lower boost clock than float32 on Hopper and Blackwell, which is a sixth of an octave.
    """
    clocks = clocks_per_s(spec)
    assert 1.0e9 < clocks / spec.num_cores < 2.7e9
    for name in ("fp16", "int8"):
        declared = spec.peak_dense.get(name)
        if declared is not None:
            octaves = log2(declared.in_si("compute") / clocks)
            assert abs(octaves - round(octaves)) < 0.25
    if "int8" in spec.peak_dense:
        # GeForce cards halve products of floats that are added up in 32 bits; A10G, L40 and others do not print that.
        times = spec.peak_flop_per_s("int8") / spec.peak_flop_per_s("fp16")
        assert times == pytest.approx(4 if spec.name.startswith("NVIDIA GeForce") else 2, rel=0.02)
