"""Host memory of several NUMA domains, and such as nobody told: what fits, how fast it is reached, what is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from costmodel import read_model_spec
from costmodel.devices.datasheet import host_memory_at
from tests.support.requests import request_for
from topology import Topology, from_nvidia_smi_topo, load_preset, resolve
from topology.errors import DoesNotFit
from zosim.planning.explain import about_host_memory
from zosim.planning.planner import Decision, choose
from zosim.planning.predict import PlannedRun

GIB = 2**30
PCIE4, XGMI = 31.508e9 * 0.8, 24e9  # of one link of x16, and between two sockets


def host(
    num_domains: int, memory: str | None = None, bandwidth: str | None = None, gpu: str = "a100-80gb-sxm"
) -> Topology:
    """A host with a GPU in each NUMA domain."""
    names = [f"GPU{i}" for i in range(num_domains)]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    for row, name in enumerate(names):
        cells = ["X" if row == column else "SYS" for column in range(num_domains)]
        lines.append("\t".join([name, *cells, f"{16 * row}-{16 * row + 15}", str(row)]))
    return from_nvidia_smi_topo("\n".join(lines), gpu=gpu, memory=memory, memory_bandwidth=bandwidth)


def decided(topology: Topology, model: str = "opt-13b", **fields: object) -> Decision:
    named = {"method": "zo2", "batch": 1, "seq": 128, "fixed": {"weights": {"dtype": "float16"}}, **fields}
    return choose(request_for(read_model_spec(model), topology, device="gpu0", **named))


@pytest.mark.slow
def test_what_one_domain_does_not_hold_lies_in_the_next() -> None:
    """756 GiB of Llama-3.1-405B on 2 TiB in four domains: 512 GiB near the GPU, a third of it across the sockets' link."""
    topology = host(4, "2 TiB", "800 GB/s")
    decision = decided(topology, "llama-3.1-405b", fixed={"weights": {"dtype": "bfloat16"}})
    planned = decision.chosen.planned
    needed = planned.footprints.hosts[0].size_bytes
    assert needed > 512 * GIB
    assert planned.far_shares == {0: pytest.approx(1 - 512 * GIB / needed)}
    words = " ".join(decision.reasons)
    assert "exceeds the 512 GiB of dram0, the nearest" in words
    assert "copies reach at 24 GB/s" in words


@pytest.mark.slow
@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(("socket_bytes_per_s", "wire"), [(6e9, "socket"), (24e9, "socket"), (100e9, "pcie")])
def test_copies_take_the_time_of_both_ways(socket_bytes_per_s: float, wire: str) -> None:
    """A step uploads every offloaded byte once; each takes the near way and the far one by the shares of what lies there."""
    topology = host(2, "32 GiB", "400 GB/s")
    links = [
        link.model_copy(
            update={
                "type": link.type.model_copy(
                    update={
                        "name": None,
                        "bandwidth": link.type.bandwidth.model_copy(
                            update={"value": socket_bytes_per_s / 1e9}
                        ),
                    }
                )
            }
        )
        if link.type.technology == "socket" and link.type.bandwidth is not None
        else link
        for link in topology.links
    ]
    slow = topology.model_copy(update={"links": tuple(links)})
    planned = decided(slow).chosen.planned
    (far,) = planned.far_shares.values()
    assert far == pytest.approx(1 - 16 * GIB / planned.footprints.hosts[0].size_bytes)
    near_only = PlannedRun(planned.plan, host(2, "64 GiB", "400 GB/s"), planned.profile)
    assert near_only.far_shares == {}
    expected = 1 - far + far * max(PCIE4 / socket_bytes_per_s, 1.0)
    uploads = [dict(each.timeline.seconds_by_label(0))["upload"] for each in (planned, near_only)]
    assert uploads[0] / uploads[1] == pytest.approx(
        expected, rel=0.02
    )  # latency of copies is no part of the ways
    assert planned.machines[0].wires["h2d"] == wire


def test_both_simulators_see_the_far_domain() -> None:
    planned = decided(host(2, "32 GiB", "400 GB/s")).chosen.planned
    other = PlannedRun(planned.plan, planned.topology, planned.profile, simulator="simpy")
    assert other.step_time_s == pytest.approx(planned.step_time_s, rel=1e-9)


def test_ranks_of_both_domains_share_all_of_the_memory() -> None:
    decision = decided(host(2, "64 GiB", "400 GB/s"), method="auto", max_ranks=2)
    assert all(candidate.planned.far_shares == {} for candidate in (decision.chosen,))


def test_a_host_too_small_says_which_domains_and_whether_they_are_assumed() -> None:
    with pytest.raises(DoesNotFit, match=r"more than 16 GiB of 2 NUMA domains: ") as caught:
        decided(host(2, "16 GiB"))
    assert "assumed" not in f"{caught.value}{caught.value.hint}"
    with pytest.raises(DoesNotFit, match=r"more than 8 GiB of dram0: "):
        decided(host(1, "8 GiB"))
    with pytest.raises(DoesNotFit, match=r"more than 8 GiB of --max-host-memory"):
        decided(host(2, "64 GiB"), max_host_bytes=8 * GIB)
    with pytest.raises(DoesNotFit, match=r"256 GiB of 2 NUMA domains, whose size is assumed") as caught:
        decided(host(2, gpu="rtx4090"), "opt-175b")
    assert "--memory" in (caught.value.hint or "")


@pytest.mark.slow
def test_the_interval_shows_a_bandwidth_that_is_assumed() -> None:
    """50 GB/s of a domain are assumed, PCIe 5.0 x16 carries 54.2: at most that, at least half of what is assumed."""
    assumed, declared = host(2, gpu="rtx5090"), host(2, "256 GiB", "100 GB/s", gpu="rtx5090")
    guess, known = (decided(topology, "opt-30b") for topology in (assumed, declared))
    assert guess.prediction.step_time_s == pytest.approx(known.prediction.step_time_s)
    low, high = guess.prediction.low_s, guess.prediction.high_s
    assert high / guess.prediction.step_time_s > 1.9
    assert low < known.prediction.low_s
    assert known.prediction.high_s < 1.3 * known.prediction.step_time_s
    assert "the bandwidth of dram0, 50 GB/s, is assumed: state yours with --memory" in " ".join(guess.reasons)
    assert "is assumed" not in " ".join(known.reasons)


def test_a_plan_names_what_of_the_host_nobody_stated() -> None:
    topology = resolve("2x rtx4090")
    plan = SimpleNamespace(is_offloaded=True, placement=SimpleNamespace(devices=("gpu0",)))
    planned = SimpleNamespace(plan=plan, topology=topology, far_shares={})
    bandwidth, others = about_host_memory(planned)
    assert "the bandwidth of dram0, 100 GB/s, is assumed" in bandwidth
    assert "assumed: the size of dram0, 256 GiB and the 16 cores of cpu0" in others
    stated = SimpleNamespace(plan=plan, topology=load_preset("dgx-h100"), far_shares={})
    assert list(about_host_memory(stated)) == []


def test_the_part_of_its_peak_that_memory_reaches_is_an_estimate() -> None:
    preset = load_preset("dgx-h100")
    ends = [host_memory_at(preset, end).resources["dram0"].bandwidth_bytes_per_s for end in ("high", "low")]
    middle = preset.resources["dram0"].bandwidth_bytes_per_s
    assert [end / middle for end in ends] == pytest.approx([0.8 / 0.85, 0.9 / 0.85])
    assert host_memory_at(preset, "central") is preset


def test_assumed_bandwidths_that_never_limit_widen_nothing() -> None:
    preset = load_preset("dgx-h100")
    assert preset.with_assumed_memory(0.5) is preset
    machine = host(1)
    halved = machine.with_assumed_memory(0.5)
    assert halved.node("dram0").bandwidth_bytes_per_s == machine.node("dram0").bandwidth_bytes_per_s / 2
    wide, exact = (decided(topology) for topology in (machine, host(1, "256 GiB", "204.8 GB/s")))
    assert (wide.prediction.low_s, wide.prediction.high_s) == (
        exact.prediction.low_s,
        exact.prediction.high_s,
    )
