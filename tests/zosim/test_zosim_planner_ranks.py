"""The planner with several devices: meshes, where they lie, what they share, and when slicing pays."""

from __future__ import annotations

import pytest

from costmodel import read_model_spec
from tests.support.requests import request_for
from topology import Topology, load_preset
from topology.clusters import cluster
from topology.errors import DoesNotFit, PlanError
from zosim.planning.planner import Request, choose, placements
from zosim.planning.space import layouts, meshes
from zosim.plans import Estimator, Mesh, Weights

GIB = 2**30
HALF = Weights(dtype="float16")


def request(
    hardware: str | Topology,
    model: str = "opt-125m",
    *,
    num_hosts: int = 1,
    **fields,
) -> Request:
    topology = load_preset(hardware) if isinstance(hardware, str) else hardware
    topology = cluster(topology, num_hosts) if num_hosts > 1 else topology
    most = len(topology.compute_devices)
    fields = {"batch": 8, "seq": 128, "weights": HALF, "max_ranks": most} | fields
    return request_for(read_model_spec(model), topology, **fields)


def seconds(requested: Request) -> float:
    return choose(requested).chosen.seconds


def fed_over_pcie(*, nvlink: bool, transfers: str | None = None) -> Request:
    """Eight H100 on two sockets with so little to compute that uploads limit, with or without their NVLinks."""
    machine = load_preset("dgx-h100")
    links = tuple(link for link in machine.links if nvlink or link.type.technology != "nvlink")
    nodes = tuple(node for node in machine.nodes if nvlink or node.type != "nvswitch")
    topology = machine.model_copy(update={"links": links, "nodes": nodes})
    fixed = {"blocks": "offloaded"} | ({"transfers": transfers} if transfers else {})
    return request(
        topology, "opt-1.3b", mesh=Mesh(data=4, perturb=2), batch=4, seq=8, fixed={"residency": fixed}
    )


@pytest.mark.slow
def test_slicing_pays_over_nvlink_and_loses_where_peers_meet_on_a_narrower_link() -> None:
    """DistZO2's slicing is "no worse" only where slices reach the peers as fast as PCIe would have brought them."""
    whole_s, sliced_s = (seconds(fed_over_pcie(nvlink=True, transfers=name)) for name in ("shared", "sliced"))
    assert sliced_s < 0.7 * whole_s
    # The sockets' link carries seven eighths of every block, at less than half the speed of PCIe 5.0 x16.
    whole_s, sliced_s = (
        seconds(fed_over_pcie(nvlink=False, transfers=name)) for name in ("shared", "sliced")
    )
    assert sliced_s > 1.2 * whole_s


@pytest.mark.slow
def test_the_planner_slices_where_that_pays_alone() -> None:
    for nvlink in (True, False):
        decision = choose(fed_over_pcie(nvlink=nvlink))
        assert (decision.chosen.plan.residency.transfers == "sliced") == nvlink


@pytest.mark.slow
def test_the_choice_is_the_best_of_a_full_search() -> None:
    requested = request("rtx4090-2x", batch=3, seq=256, fixed={"residency": {"num_staging_buffers": 2}})
    decision = choose(requested)
    every = [candidate.planned.step_time_s for candidate in (decision.chosen, *decision.others)]
    assert decision.chosen.seconds <= min(every) * (1 + 1e-3)
    assert decision.chosen.plan.mesh.world_size > 1


def test_bounds_of_meshes_are_bounds() -> None:
    decision = choose(request("rtx4090-2x", batch=3, seq=64))
    for candidate in (decision.chosen, *decision.others[::4]):
        assert candidate.bound.seconds <= candidate.planned.step_time_s * (1 + 1e-9)


@pytest.mark.slow
def test_more_devices_never_make_the_best_plan_slower() -> None:
    times = [seconds(request("h20-4x-milan", "opt-1.3b", max_ranks=ranks)) for ranks in (1, 2, 3, 4)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("mezo", {(1, 1)}),
        ("zo2", {(1, 1)}),
        ("pertp", {(1, 2)}),
        ("ddp", {(2, 1), (3, 1), (4, 1)}),
        ("2d", {(2, 2)}),
        ("auto", {(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (2, 2)}),
    ],
)
def test_methods_name_meshes(method: str, shapes: set[tuple[int, int]]) -> None:
    requested = request("h20-4x-milan", method=method)
    assert {(mesh.data, mesh.perturb) for mesh in meshes(requested)} == shapes
    blocks = {plan.residency.blocks for plan in placements(requested)}
    assert blocks == {"mezo": {"resident"}, "zo2": {"offloaded"}}.get(method, {"resident", "offloaded"})


def test_perturbations_are_shared_out_as_far_as_that_helps() -> None:
    requested = request("dgx-h100", method="pertp", estimator=Estimator(num_perturbations=3))
    # Six points: by 4 or 5 ranks the largest part is two, as by 3.
    assert sorted(mesh.perturb for mesh in meshes(requested)) == [2, 3, 6]


def test_a_mesh_reads_as_it_is_nested() -> None:
    assert Mesh.parse("data=2,perturb=4") == Mesh(data=2, perturb=4, inner="perturb")
    assert Mesh.parse("perturb=2, data=3") == Mesh(data=3, perturb=2, inner="data")
    for text, says in (
        ("data=2,date=2", "'date' is not a mesh axis"),
        ("data=0", "no size"),
        ("data=2,data=2", "twice"),
    ):
        with pytest.raises(PlanError, match=says):
            Mesh.parse(text)


def test_ranks_lie_on_one_host_if_they_fit_and_on_like_numbers_of_devices_otherwise() -> None:
    requested = request("dgx-h100", num_hosts=2)
    first, *spread = layouts(requested, 4)
    assert first.devices == ("host0/gpu0", "host0/gpu1", "host0/gpu2", "host0/gpu3")
    assert first.hosts == ()
    assert {len(part) for placement in spread for part in placement.ranks_by_host} <= {1, 2, 4}
    (whole,) = layouts(requested, 16)
    assert [len(part) for part in whole.ranks_by_host] == [8, 8]


def test_several_ranks_share_a_cpu_and_its_cores_only_where_asked() -> None:
    alone = request("cpu-laptop")
    assert [mesh.world_size for mesh in meshes(alone)] == [1]
    two = choose(request("cpu-laptop", mesh=Mesh(data=2))).chosen
    assert two.plan.placement.devices == ("cpu0", "cpu0")
    assert {profile.num_threads for profile in two.planned.rank_profiles} == {4}


def test_a_gpu_takes_one_rank() -> None:
    with pytest.raises(PlanError, match="3 ranks need 3 GPUs, but rtx4090-2x has 2"):
        choose(request("rtx4090-2x", mesh=Mesh(data=3)))


def test_what_a_method_needs_is_said() -> None:
    with pytest.raises(PlanError, match="--method ddp needs at least 2 ranks and 2 sequences"):
        choose(request("h20-4x-milan", method="ddp", batch=1))
    with pytest.raises(PlanError, match="--method zo2 does not allow data=2"):
        request("h20-4x-milan", method="zo2", mesh=Mesh(data=2))


@pytest.mark.slow
def test_private_copies_may_not_fit_a_host_that_holds_a_shared_one() -> None:
    def requested(**residency: str) -> Request:
        fixed = {"residency": {"blocks": "offloaded", **residency}}
        return request("h20-4x-milan", "opt-1.3b", mesh=Mesh(data=4), max_host_bytes=4 * GIB, fixed=fixed)

    assert choose(requested()).plan.residency.transfers != "private"
    with pytest.raises(DoesNotFit, match="host memory"):
        choose(requested(transfers="private"))
    with pytest.raises(DoesNotFit, match="host memory"):
        choose(
            request(
                "h20-4x-milan", "opt-1.3b", mesh=Mesh(data=4), max_host_bytes=GIB, max_device_bytes=2 * GIB
            )
        )


def test_hosts_on_a_slow_network_share_the_forwards_and_say_what_that_costs() -> None:
    decision = choose(request("cpu-cluster-1gbit"))
    plan, words = decision.chosen.plan, " ".join(decision.reasons)
    assert len(plan.placement.ranks_by_host) == plan.placement.world_size > 1
    for phrase in ("on one device:", "the exchange of losses", "up to rounding", "torchrun"):
        assert phrase in words
    # Two messages through the switch at least, and nothing like the time of a forward.
    assert 2 * 50e-6 < decision.prediction.exchange_s < 0.01 * decision.chosen.seconds


def test_what_ranks_share_is_named() -> None:
    fixed = {"residency": {"blocks": "offloaded", "transfers": "private"}}
    decision = choose(request("h20-4x-milan", "opt-1.3b", mesh=Mesh(data=4), batch=4, seq=8, fixed=fixed))
    prediction = decision.prediction
    assert prediction is not None
    assert prediction.contention[0].resource == "dram0"
    assert prediction.contention[0].ranks == (0, 1, 2, 3)


@pytest.mark.slow
def test_hundreds_of_ranks_are_planned_as_one_host_is() -> None:
    decision = choose(
        request("dgx-h100", num_hosts=32, batch=128, method="2d", mesh=Mesh(data=128, perturb=2))
    )
    assert decision.chosen.plan.placement.world_size == 256
    small = choose(request("dgx-h100", batch=4, mesh=Mesh(data=4, perturb=2)))
    # The ring in which 256 ranks gather their losses has hops between 32 hosts, each with a message posted to the
    # network: half a millisecond.
    assert decision.chosen.seconds == pytest.approx(small.chosen.seconds + 0.5e-3, rel=0.01)


def test_isomorphic_hosts_are_devices_that_are_placed_alike() -> None:
    topology = cluster(load_preset("dgx-1v"), 3)
    hosts = topology.isomorphic_hosts
    assert {hosts.representative(f"host{host}/gpu5") for host in range(3)} == {"host0/gpu5"}
    changed = topology.nodes[0].host or "host0"
    slower = tuple(
        link.model_copy(update={"count": link.count + 1}) if link.source.startswith("host1/") else link
        for link in topology.links
    )
    apart = Topology(name="apart", nodes=topology.nodes, links=slower).isomorphic_hosts
    assert (
        apart.representative("host1/gpu5")
        == "host1/gpu5"
        != apart.representative("host2/gpu5")
        == f"{changed}/gpu5"
    )


def test_hosts_may_have_unlike_numbers_of_gpus():
    machine = load_preset("a100-80gb-3x4")
    gone = {"node0/gpu1", "node0/gpu2", "node0/gpu3"}
    nodes = tuple(node for node in machine.nodes if node.id not in gone)
    links = tuple(link for link in machine.links if not gone & {link.source, link.target})
    uneven = machine.model_copy(update={"nodes": nodes, "links": links})
    requested = request(uneven, "opt-1.3b", mesh=Mesh(data=4), seq=512)
    plan = choose(requested).chosen.plan
    assert [len(ranks) for ranks in plan.placement.ranks_by_host] == [1, 3]
    assert seconds(requested) < seconds(request(uneven, "opt-1.3b", mesh=Mesh(), seq=512))
