"""The event simulator with several ranks: collectives, what ranks share, and whom they wait for."""

from dataclasses import replace

import pytest

from costmodel.work import Work
from tests.support.builders import RATE, instruction, make_profile, program, shared, simulate_ranks, unshared
from topology.errors import ProgramError
from zosim.hardware.machine import Machine, Ring
from zosim.program.instructions import Dependency
from zosim.program.operations import Collective
from zosim.program.program_set import ProgramSet

# Times are sums of a few durations: rounding alone.


def _gather(name, seconds, after=(), group="world"):
    work = Work(link_bytes=round(seconds * RATE))
    return instruction(name, "link", seconds, after, op=Collective("all_gather", group), work=work)


def _ranks(steps, machines, groups=None):
    """Programs of ranks that are all of one group, unless told otherwise."""
    size = len(steps)
    groups = groups or {"world": (tuple(range(size)),)}
    sizes = {name: len(parts[0]) for name, parts in groups.items()}
    listed = tuple(replace(program(step), process_groups=sizes) for step in steps)
    return ProgramSet(listed, tuple(range(size)), groups), machines


def _ringed(rank, size=2, *, wire=(), latency_s=0.0, capacities=None):
    ring = Ring(latency_s, RATE, tuple(wire), "nvlink", num_ranks=size)
    return Machine(make_profile("gpu"), capacities or {}, rings={"world": ring})


def ends(timeline):
    return {(span.rank, span.instruction): span.end_s for span in timeline.spans}


def test_a_collective_starts_with_its_last_member_and_ends_for_all_at_once():
    steps = [
        [instruction("work", "compute", seconds), _gather("gather", 1.0, ["work"])] for seconds in (1.0, 3.0)
    ]
    timeline = simulate_ranks(*_ranks(steps, [_ringed(0), _ringed(1)]), num_steps=1)
    gathers = [span for span in timeline.spans if span.instruction == "gather"]
    assert [(span.start_s, span.end_s) for span in gathers] == [(3.0, 4.0)] * 2


def test_members_whose_flows_end_first_wait_for_the_last():
    # The second rank's flow has half a link.
    machines = [_ringed(0), _ringed(1, wire=[("slow", 1.0)], capacities={"slow": RATE / 2})]
    steps = [[_gather("gather", 1.0), instruction("use", "compute", 1.0, ["gather"])]] * 2
    timeline = simulate_ranks(*_ranks(steps, machines), num_steps=1)
    assert ends(timeline) == {
        (rank, name): end for rank in (0, 1) for name, end in (("gather", 2.0), ("use", 3.0))
    }


def test_small_payloads_take_their_messages_and_occupy_nothing():
    machines = [
        _ringed(rank, 8, wire=[("bus", 1.0)], latency_s=0.5, capacities={"bus": RATE}) for rank in range(8)
    ]
    steps = [[_gather("gather", 1e-9)]] * 8
    # Three rounds of recursive doubling, and an eighth part each time besides.
    assert simulate_ranks(*_ranks(steps, machines), num_steps=1).makespan_s == pytest.approx(1.5 + 1e-9)


def test_a_large_payload_waits_for_its_turn_on_a_core_and_a_small_one_does_not():
    found = {}
    for seconds in (1.0, 1e-9):
        ring = Ring(0.5, RATE, wire="nvlink", busy_latency_s=0.25, num_ranks=2)
        machines = [Machine(make_profile("gpu"), rings={"world": ring}) for _ in range(2)]
        found[seconds] = simulate_ranks(
            *_ranks([[_gather("gather", seconds)]] * 2, machines), num_steps=1
        ).makespan_s
    assert found == pytest.approx({1.0: 1.75, 1e-9: 0.5})


def test_a_collective_beside_an_upload_shares_the_link_between_them():
    """PCIe alone: both cross it. NVLink: the exchange has links of its own."""
    steps = [[instruction("up", "h2d", 1.0), _gather("gather", 1.0)]] * 2
    found = {}
    for wire in ("pcie", "nvlink"):
        machines = [
            Machine(
                make_profile("gpu"),
                {f"pcie{rank}": RATE, f"nvlink{rank}": RATE},
                routes={"h2d": (f"pcie{rank}",)},
                rings={"world": Ring(0.0, RATE, ((f"{wire}{rank}", 1.0),), wire, num_ranks=2)},
            )
            for rank in (0, 1)
        ]
        found[wire] = simulate_ranks(*_ranks(steps, machines), num_steps=1).makespan_s
    assert found == pytest.approx({"pcie": 2.0, "nvlink": 1.0})


def test_devices_that_pull_through_one_root_complex_and_one_memory_share_them():
    profile = make_profile("gpu")

    def machine(rank, root, memory):
        routes = {"h2d": (memory, root, f"link{rank}"), "d2h": (f"link{rank}", root, memory)}
        return Machine(profile, {memory: 3 * RATE, root: 1.5 * RATE, f"link{rank}": RATE}, routes=routes)

    upload = [[instruction("up", "h2d", 3.0)]]
    one_root = [machine(rank, "root", "dram") for rank in (0, 1)]
    assert simulate_ranks(*_ranks(upload * 2, one_root), num_steps=1).makespan_s == pytest.approx(4.0)
    own_roots = [machine(rank, f"root{rank}", "dram") for rank in range(6)]
    assert simulate_ranks(*_ranks(upload * 3, own_roots[:3]), num_steps=1).makespan_s == pytest.approx(3.0)
    assert simulate_ranks(*_ranks(upload * 6, own_roots), num_steps=1).makespan_s == pytest.approx(6.0)
    # Reads and writes of one memory share it, although the links are full-duplex.
    both = [[instruction("up", "h2d", 3.0), instruction("down", "d2h", 3.0)]]
    duplex = [
        replace(machine(0, "root", "dram"), capacities={"dram": RATE, "root": 9 * RATE, "link0": 2 * RATE})
    ]
    assert simulate_ranks(*_ranks(both, duplex), num_steps=1).makespan_s == pytest.approx(6.0)


def test_ranks_on_one_cpu_share_its_cores():
    machine = shared(num_cores=2.0, num_threads=2)
    steps = [[instruction("work", "compute", 1.0)]] * 3
    assert simulate_ranks(*_ranks(steps, [machine] * 3), num_steps=1).makespan_s == pytest.approx(3.0)


def test_a_dependency_on_peers_waits_for_all_others_of_the_group_and_no_others():
    def step(rank):
        wait = replace(instruction("use", "compute", 1.0), after=(Dependency("up", 0, "pair"),))
        return [instruction("up", "h2d", float(rank + 1)), wait]

    groups = {"pair": ((0, 1), (2, 3)), "world": ((0, 1, 2, 3),)}
    programs, machines = _ranks([step(rank) for rank in range(4)], [unshared()] * 4, groups)
    timeline = simulate_ranks(programs, machines, num_steps=1)
    # Each waits for the other's upload, not for its own: ranks 0 and 1 for 2 and 1 s, ranks 2 and 3 for 4 and 3 s.
    found = {rank: end for (rank, name), end in ends(timeline).items() if name == "use"}
    assert found == {0: 3.0, 1: 2.0, 2: 5.0, 3: 4.0}


def test_a_collective_without_a_partner_is_named():
    steps = [[_gather("gather", 1.0)], [instruction("work", "compute", 1.0)]]
    with pytest.raises(ProgramError, match="step/gather of rank 0 waits for a partner that never comes"):
        simulate_ranks(*_ranks(steps, [_ringed(0), _ringed(1)]), num_steps=1)
