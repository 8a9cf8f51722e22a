"""What a rank shares, on machines that topologies describe."""

import math

import pytest

from costmodel.work import Work
from tests.support.builders import RATE, instruction, make_profile, pipeline, program, shared
from topology.changes import FigureChange, times
from topology.documents import load_preset, preset_names
from topology.errors import ProfileError
from zosim.hardware.machine import Machine
from zosim.program.contents import ParamGroupWeights
from zosim.program.instructions import Access, Buffer, Space
from zosim.simulators.closed_form import step_time_bound
from zosim.simulators.simulate import simulate

COPY = instruction("upload", "h2d", 1.0)
PARAM_PASS = instruction("param_pass", "compute", 1.0)
LAUNCHES = instruction("small", "compute", 0.0, work=Work(num_kernels=1000))


def of_type(kind):
    for name in preset_names():
        topology = load_preset(name)
        for device in topology.compute_devices:
            if topology.device_spec(device.id).type == kind:
                return topology, device.id
    pytest.skip(f"no preset has a {kind}")


def test_a_gpus_copy_is_a_flow_over_its_route():
    topology, device = of_type("gpu")
    machine = Machine.from_topology(topology, device, make_profile("gpu"))
    activity = machine.activity(program([COPY]), COPY)
    memory = topology.host_memory(device).id
    assert {name for name, _ in activity.uses} >= set(topology.route(memory, device).resource_ids)
    assert activity.seconds == pytest.approx(1.0)
    assert activity.bound == pytest.approx(RATE)
    assert activity.limiter == "pcie"


def test_a_datasheets_copy_is_no_faster_than_its_route_and_a_measured_one_is():
    topology, device = of_type("gpu")
    memory = topology.host_memory(device).id
    bandwidth = topology.route(memory, device).bandwidth_bytes_per_s
    work = Work(copy_bytes=round(bandwidth))
    upload = instruction("upload", "h2d", 1.0, work=work)
    whole = program([upload])
    seconds = {
        origin: Machine.from_topology(
            topology, device, make_profile("gpu", copy_h2d_bandwidth=2 * bandwidth, origin=origin)
        )
        .activity(whole, upload)
        .seconds
        for origin in ("datasheet", "calibrated")
    }
    assert seconds == pytest.approx({"datasheet": 1.0, "calibrated": 0.5})


def test_kernels_take_the_device_and_launches_take_a_core():
    topology, device = of_type("gpu")
    machine = Machine.from_topology(topology, device, make_profile("gpu", dispatch_s=1e-6, num_cores=4))
    assert dict(machine.activity(program([PARAM_PASS]), PARAM_PASS).uses) == {machine.kernels: 1.0}
    launching = dict(machine.activity(program([LAUNCHES]), LAUNCHES).uses)
    assert launching == {machine.cores: pytest.approx(1.0)}
    sample = instruction("sample", "sample", 1.0)
    # Two streams of kernels share one device.
    assert simulate(program([PARAM_PASS, sample]), machine, num_steps=1).makespan_s == pytest.approx(2.0)


def test_a_cpus_copy_takes_a_core_and_moves_its_bytes_twice():
    topology, device = of_type("cpu")
    profile = make_profile(num_threads=2, num_cores=4)
    machine = Machine.from_topology(topology, device, profile)
    memory = topology.host_memory(device).id
    assert dict(machine.activity(program([COPY]), COPY).uses) == pytest.approx(
        {machine.cores: 1.0, memory: 2 * RATE}
    )
    assert dict(machine.activity(program([PARAM_PASS]), PARAM_PASS).uses) == pytest.approx(
        {machine.cores: 2.0, memory: RATE}
    )
    assert machine.capacities[machine.cores] == 4.0


def test_an_operation_alone_is_never_slowed_by_a_capacity_that_was_declared_too_small():
    machine = shared(num_cores=4.0, memory=RATE / 10)
    activity = machine.activity(program([COPY]), COPY)
    assert dict(activity.uses)["dram"] == RATE / 10
    assert simulate(program([COPY]), machine, num_steps=1).makespan_s == pytest.approx(1.0)


def test_a_memory_that_limits_no_copy_changes_nothing_that_is_done_alone():
    topology = load_preset("a100-80gb-milan")
    profile, memory = make_profile("gpu"), topology.host_memory("gpu0").id

    def alone(factor):
        change = FigureChange(frozenset({memory}), "bandwidth", times(factor))
        return Machine.from_topology(change.apply(topology), "gpu0", profile).alone

    assert alone(2.0) == alone(1.0) == alone(0.5) != alone(0.1)


def test_where_bytes_go_decides_over_the_stream():
    buffers = [Buffer("host", Space.HOST, 8, "weights", "float32")]
    down = instruction(
        "x",
        "compute",
        1.0,
        work=Work(copy_bytes=int(RATE)),
        writes=(Access("host", ParamGroupWeights("w"), 0, 8),),
    )
    machine = Machine(make_profile("gpu", copy_d2h_bandwidth=RATE / 2))
    assert machine.activity(program([down], buffers=buffers), down).seconds == pytest.approx(2.0)


def test_resources_without_capacity_and_profiles_of_other_devices_are_refused():
    with pytest.raises(ProfileError, match="'link'"):
        Machine(make_profile("gpu"), {}, routes={"h2d": ("link",)})
    topology, device = of_type("gpu")
    with pytest.raises(ProfileError, match="is a gpu, but the profile is of a cpu"):
        Machine.from_topology(topology, device, make_profile("cpu"))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_simulated(name):
    topology = load_preset(name)
    whole = pipeline(3, 0.2, 0.3, 0.1, num_staging_buffers=3)
    for device in topology.compute_devices:
        kind = topology.device_spec(device.id).type
        machine = Machine.from_topology(topology, device.id, make_profile(kind, num_cores=2))
        assert all(capacity > 0 for capacity in machine.capacities.values())
        step_time_s = simulate(whole, machine).step_time_s
        assert math.isfinite(step_time_s)
        assert step_time_s >= step_time_bound(whole, machine) * (1 - 1e-9)
