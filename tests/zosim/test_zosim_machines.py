"""The machines of several ranks on described hardware, and the time that their exchanges take there."""

from dataclasses import replace

import pytest

from costmodel.work import Work
from tests.support.builders import RATE, instruction, make_profile, program, simulate_ranks
from topology.clusters import cluster
from topology.documents import load_preset, preset_names
from topology.errors import ProfileError, TopologyError
from topology.rings import edge_disjoint_rings
from zosim.eval_points import EvalPoint
from zosim.hardware.machine import Machine
from zosim.hardware.machines import machines_for
from zosim.program.contents import Loss, ParamGroupWeights
from zosim.program.instructions import Access, Buffer, Space
from zosim.program.operations import Collective
from zosim.program.program_set import ProgramSet
from zosim.simulators.closed_form import step_time_bound_of
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World

SIZE = 8 * 10**9
DGX = load_preset("dgx-1v")


def exchange(size_bytes, devices, topology, profile=None, hosts=None):
    """The simulated seconds of an all_gather of `size_bytes` in all, and the machines."""
    size = len(devices)
    groups = {"world": (tuple(range(size)),)}
    work = Work(link_bytes=size_bytes * (size - 1) // size)
    step = [instruction("gather", "link", 0.0, op=Collective("all_gather", "world"), work=work)]
    whole = replace(program(step), process_groups={"world": size})
    machines = machines_for(topology, devices, profile or make_profile("gpu"), groups)
    programs = ProgramSet((whole,), (0,) * size, groups)
    return simulate_ranks(programs, machines, num_steps=1).makespan_s, machines


@pytest.mark.parametrize("num_gpus", [2, 3, 4, 6, 7, 8])
def test_gpus_that_rings_of_nvlinks_join_spread_what_they_send_over_all_of_them(num_gpus):
    devices = [f"gpu{number}" for number in range(num_gpus)]
    seconds, machines = exchange(SIZE, devices, DGX)
    rings = edge_disjoint_rings(DGX, devices)
    # Every flow has its links to itself: the simulation agrees with the closed form.
    assert seconds == pytest.approx(machines[0].rings["world"].seconds("all_gather", SIZE), rel=1e-6)
    least_s = SIZE * (num_gpus - 1) / num_gpus / rings.both_ways_bytes_per_s
    assert least_s < seconds < 1.05 * least_s
    for machine in machines:
        ring = machine.rings["world"]
        assert sum(part for _, part in ring.uses) == pytest.approx(1.0)
        assert ring.wire == "nvlink"
        for name, part in ring.uses:
            assert part * ring.bandwidth_bytes_per_s <= machine.capacities[name] * (1 + 1e-9)


def test_five_gpus_of_a_dgx_1v_fall_back_to_pcie_and_share_it():
    seconds, machines = exchange(SIZE, [f"gpu{number}" for number in range(5)], DGX)
    assert {machine.rings["world"].wire for machine in machines} & {"pcie", "socket"}
    assert seconds >= machines[0].rings["world"].seconds("all_gather", SIZE) * (1 - 1e-9)
    assert seconds > 5 * exchange(SIZE, [f"gpu{number}" for number in range(4)], DGX)[0]


def test_behind_a_switch_every_gpu_has_its_whole_port():
    topology = load_preset("dgx-h100")
    devices = [node.id for node in topology.compute_devices]
    seconds, machines = exchange(SIZE, devices, topology)
    route = topology.route(devices[0], devices[1])
    assert machines[0].rings["world"].bandwidth_bytes_per_s == route.bandwidth_bytes_per_s
    least_s = SIZE * 7 / 8 / route.bandwidth_bytes_per_s
    assert least_s < seconds < 1.05 * least_s


def test_ranks_of_one_cpu_exchange_through_its_memory():
    topology = load_preset("cpu-laptop")
    cpu = topology.compute_devices[0].id
    profile = make_profile("cpu", num_cores=4)
    seconds, machines = exchange(RATE, [cpu, cpu], topology, profile)
    ring = machines[0].rings["world"]
    assert ring.uses == ()
    assert seconds == pytest.approx(ring.latency_s + RATE / 2 / ring.bandwidth_bytes_per_s)


def test_cpus_of_several_hosts_exchange_over_the_network():
    topology = cluster(DGX, 3)
    # The description is of GPUs; its CPUs are compute devices as well.
    devices = [f"host{number}/cpu0" for number in range(3)]
    seconds, machines = exchange(SIZE, devices, topology, make_profile("cpu"))
    route = topology.route("host0/dram0", "host1/dram0")
    assert {name for name, _ in machines[0].rings["world"].uses} == set(route.resource_ids)
    latency_s = 2 * machines[0].rings["world"].latency_s
    assert latency_s >= 2 * route.latency_s
    assert seconds == pytest.approx(SIZE * 2 / 3 / route.bandwidth_bytes_per_s + latency_s, rel=1e-9)


def test_machines_made_one_by_one_have_no_way_to_each_other():
    step = [instruction("gather", "link", 0.0, op=Collective("all_gather", "world"), work=Work(link_bytes=8))]
    whole = replace(program(step), process_groups={"world": 2})
    programs = ProgramSet((whole,), (0, 0), {"world": ((0, 1),)})
    with pytest.raises(ProfileError, match="gather is a collective of world"):
        simulate_ranks(programs, [Machine(make_profile("gpu"))] * 2)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_exchanges_among_all_its_devices(name):
    topology = load_preset(name)
    devices = [node.id for node in topology.compute_devices] * (
        2 if len(topology.compute_devices) == 1 else 1
    )
    kind = topology.device_spec(devices[0]).type
    size = len(devices)
    groups = {"world": (tuple(range(size)),)}
    work = Work(link_bytes=SIZE * (size - 1) // size)
    step = [
        instruction("up", "h2d", 0.5),
        instruction("gather", "link", 0.0, ["up"], op=Collective("all_gather", "world"), work=work),
        instruction("use", "compute", 0.1, ["gather"]),
    ]
    programs = ProgramSet((replace(program(step), process_groups={"world": size}),), (0,) * size, groups)
    machines = machines_for(topology, devices, make_profile(kind), groups)
    world = World.of(programs, machines)
    every = simulate_many(world).step_time_s
    assert simulate_ranks(programs, machines).step_time_s == pytest.approx(every, rel=1e-9)
    assert simulate_many(fold(world)).step_time_s == pytest.approx(every, rel=1e-9)
    assert every >= step_time_bound_of(world) * (1 - 1e-9)


def test_a_cluster_is_its_host_many_times():
    topology = cluster(DGX, 4)
    assert len(topology.compute_devices) == 32
    assert topology.route("host2/dram0", "host2/gpu1").bandwidth_bytes_per_s == pytest.approx(
        DGX.route("dram0", "gpu1").bandwidth_bytes_per_s
    )
    between = topology.route("host0/gpu0", "host3/gpu0")
    assert {name.split("/")[0] for name in between.node_ids} == {"host0", "host3", "network0"}
    with pytest.raises(TopologyError, match="no network"):
        cluster(load_preset("cpu-laptop"), 2)
    with pytest.raises(TopologyError, match="3 hosts"):
        cluster(load_preset("a100-80gb-3x4"), 2)


def copies_of_two(processes, copy_cores, launch_s=0.0):
    """The simulated ten copies of 0.1 s to each of two GPUs."""
    profile = make_profile("gpu", copy_cores=copy_cores, copy_latency_s=launch_s)
    # Behind switches of their own, and slower than their links: what the two share is the thread.
    machines = machines_for(DGX, ["gpu0", "gpu4"], profile, processes=processes)
    step = [instruction(f"up{number}", "h2d", 0.1) for number in range(10)]
    programs = ProgramSet((program(step),), (0, 0), {})
    both = simulate_ranks(programs, machines, num_steps=1)
    folded = simulate_many(World.of(programs, machines), num_steps=1)
    assert folded.makespan_s == pytest.approx(both.makespan_s, rel=1e-9)
    return both


def test_copies_of_two_devices_queue_on_the_thread_that_issues_both():
    apart, together = copies_of_two(None, 1.0), copies_of_two((0, 0), 1.0)
    assert apart.makespan_s == pytest.approx(1.0)
    assert together.makespan_s == pytest.approx(2.0)
    # A copy keeps the thread until it ends: one ends every 0.1 s, of both devices in turn.
    ends = sorted(span.end_s for span in together.spans)
    assert ends == pytest.approx([0.1 * number for number in range(1, 21)])
    assert copies_of_two((0, 1), 1.0).makespan_s == pytest.approx(1.0)


@pytest.mark.parametrize(("launch_s", "apart_s", "together_s"), [(0.04, 1.4, 1.4), (0.5, 6.0, 10.0)])
def test_a_thread_that_only_launches_copies_is_shared_for_their_launches(launch_s, apart_s, together_s):
    # 20 launches of 40 ms take the thread 0.8 s, less than the copies take; of 0.5 s 10 s, more.
    assert copies_of_two(None, 0.0, launch_s).makespan_s == pytest.approx(apart_s)
    assert copies_of_two((0, 0), 0.0, launch_s).makespan_s == pytest.approx(together_s)


def test_a_copy_within_a_host_takes_its_part_of_a_core_while_its_ring_waits_for_the_network():
    topology = cluster(DGX, 2)
    devices = ["host0/cpu0", "host0/cpu0", "host1/cpu0", "host1/cpu0"]
    # The network carries 40 times less than a core copies.
    slow = topology.route("host0/dram0", "host1/dram0").bandwidth_bytes_per_s
    profile = make_profile("cpu", num_cores=2, loopback_bandwidth=40 * slow)
    groups = {"world": (tuple(range(4)),)}
    machines = machines_for(topology, devices, profile, groups)
    gather = instruction(
        "gather", "link", 0.0, op=Collective("all_gather", "world"), work=Work(link_bytes=SIZE)
    )
    whole = replace(program([gather]), process_groups={"world": 4})
    local, abroad = (machines[rank].activity(whole, gather) for rank in (0, 1))
    assert local.seconds == pytest.approx(abroad.seconds)
    assert dict(local.uses)[machines[0].cores] == pytest.approx(1 / 40, rel=0.01)
    # What goes abroad costs the same cores, by the byte.
    assert dict(abroad.uses)[machines[1].cores] * abroad.bound == pytest.approx(1 / 40, rel=0.01)


def seconds_of_ranks(num_ranks, topology="cpu-laptop", **values):
    """What a second of work on one core takes where so many ranks of a host do it at once."""
    laptop = load_preset(topology)
    work = instruction("work", "compute", 1.0)
    groups = {"world": (tuple(range(num_ranks)),)}
    programs = ProgramSet((program([work]),), (0,) * num_ranks, groups)
    machines = machines_for(laptop, ["cpu0"] * num_ranks, make_profile("cpu", **values), groups)
    return simulate_ranks(programs, machines, num_steps=1).makespan_s


def test_ranks_on_all_cores_of_a_host_take_from_each_other_what_was_measured():
    alone_s = seconds_of_ranks(1, num_cores=2, ranks_slowdown=1.25)
    assert alone_s == seconds_of_ranks(1, num_cores=2, ranks_slowdown=1.0)
    assert seconds_of_ranks(2, num_cores=2, ranks_slowdown=1.0) == pytest.approx(alone_s)
    assert seconds_of_ranks(2, num_cores=2, ranks_slowdown=1.25) == pytest.approx(1.25 * alone_s)
    # Where cores are to spare, nobody notices.
    assert seconds_of_ranks(2, num_cores=8, ranks_slowdown=1.25) == pytest.approx(alone_s)


def test_operations_of_one_process_take_from_each_other_what_ranks_do():
    laptop = load_preset("cpu-laptop")

    def cores(num_threads, slowdown):
        profile = make_profile("cpu", num_threads=num_threads, num_cores=8, ranks_slowdown=slowdown)
        machine = Machine.from_topology(laptop, "cpu0", profile)
        return machine.capacities[machine.cores], machine.among_ranks().capacities[machine.cores]

    assert cores(1, 1.0) == (8.0, 8.0)
    assert cores(1, 1.25) == (6.4, 6.4)
    # One operation on all cores has been measured as it is.
    assert cores(8, 1.25) == (8.0, 6.4)


def test_rings_over_several_hosts_leave_by_every_adapter_and_stay_on_nvlinks_within():
    topology = cluster(load_preset("dgx-h100"), 2)
    devices = [node.id for node in topology.compute_devices]
    seconds, machines = exchange(SIZE, devices, topology)
    ring = machines[0].rings["world"]
    adapters = [node for node in topology.nodes if node.type == "nic" and node.host == "host0"]
    one = topology.route(devices[0], devices[8]).bandwidth_bytes_per_s
    within = topology.route(devices[0], devices[1]).bandwidth_bytes_per_s
    assert ring.bandwidth_bytes_per_s == pytest.approx(min(min(8, len(adapters)) * one, within))
    assert ring.nccl is not None
    assert (ring.nccl.num_ranks, ring.nccl.num_hosts, ring.nccl.wire) == (16, 2, "nvlink")
    assert seconds == pytest.approx(ring.seconds("all_gather", SIZE), rel=1e-6)
    alone, _ = exchange(SIZE, [devices[0], devices[8]], topology)
    assert seconds < alone


WEIGHTS = ParamGroupWeights("block.0")


def gathered_beside_work(size_bytes, *, num_cores=2, what=WEIGHTS, **values):
    """What a gather takes where two CPU ranks have 10 s of work each, and what that work takes.

    A message takes 0.1 s, and a byte a nanosecond.
    """
    laptop, groups = load_preset("cpu-laptop"), {"world": ((0, 1),)}
    profile = make_profile("cpu", num_cores=num_cores, message_s=0.1, loopback_bandwidth=1e9, **values)
    gather = instruction(
        "gather",
        "link",
        0.0,
        op=Collective("all_gather", "world"),
        writes=(Access("staging.0", what, 0, size_bytes),),
        work=Work(link_bytes=size_bytes),
    )
    work = instruction("work", "compute", 10.0)
    staging_buffer = Buffer("staging.0", Space.DEVICE, size_bytes, "staging buffers", "float32")
    one = replace(program([gather, work], buffers=[staging_buffer]), process_groups={"world": 2})
    machines = machines_for(laptop, ["cpu0"] * 2, profile, groups)
    timeline = simulate_ranks(ProgramSet((one,), (0, 0), groups), machines, num_steps=1)
    return tuple(
        max(span.end_s for span in timeline.spans if span.instruction == name) for name in ("gather", "work")
    )


BUSY = {"busy_latency_s": 0.4, "busy_core_s": 0.2}


def test_weights_that_come_ahead_wait_for_cores_and_take_them_where_all_compute():
    # Unless it was measured, they wait for nothing and take nothing.
    assert gathered_beside_work(8) == pytest.approx((0.1, 10.0))
    # Two ranks and two messages want 2 (1 + 0.2 / 0.5) cores of two for half a second.
    assert gathered_beside_work(8, **BUSY) == pytest.approx((0.5 * 1.4, 10.2))
    # With cores to spare threads wake on those.
    assert gathered_beside_work(8, num_cores=4, **BUSY) == pytest.approx((0.1, 10.0))
    # Losses are waited for: nobody computes beside them.
    assert gathered_beside_work(8, what=Loss(EvalPoint(0, 1)), **BUSY) == pytest.approx((0.1, 10.0))


def test_bytes_that_are_copied_within_a_host_wait_by_sharing_its_cores():
    seconds, worked_s = gathered_beside_work(10**9, busy_latency_s=0.4)
    # 0.1 s of message, whose part of the wait is a tenth of it, and a second of copying, beside as much work.
    alone_s = 1.1 + 0.4 * 0.1 / 1.1
    assert seconds == pytest.approx(alone_s * (1 + 1 / alone_s))
    assert worked_s == pytest.approx(11.0)
