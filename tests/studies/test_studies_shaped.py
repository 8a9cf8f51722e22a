"""Shaped networks: two real ones where this machine can make them, and what is predicted on them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from costmodel.devices.datasheet import datasheet_profile
from studies.shaped import benchmark, network
from studies.shaped.cases import FOUR, RATES, STRATEGIES, TWO, ShapedCase, all_cases, cases_of
from studies.shaped.hosts import machines_of, plan_of, topology_of
from studies.shaped.network import (
    FRAME_EFFICIENCY,
    ShapedNetwork,
    rate_bits_per_s,
    remove_stale_files,
    why_not,
)
from studies.shaped.ranks import environment, run_ranks
from tests.support.waiting import HANG_S
from topology import detect, load_preset
from topology.errors import RunError
from zosim.lowering import lower_all
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World

REASON = why_not()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"no shaped links here: {REASON}")


def namespaces():
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob("zosim-shaped-*")) if folder.is_dir() else []


@pytest.mark.parametrize(("text", "rate"), [("100mbit", 1e8), ("1gbit", 1e9), ("1.5Mbit", 1.5e6)])
def test_rates_are_read_as_tc_writes_them(text, rate):
    assert rate_bits_per_s(text) == rate


@pytest.mark.parametrize("text", ["", "100", "mbit", "-1mbit", "0mbit", "1gb"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(RunError, match="must be a number with bit"):
        rate_bits_per_s(text)


def test_without_root_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(RunError, match="root"), ShapedNetwork(2, 1e8):
        pass


def test_without_the_tools_their_names_are_told(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(RunError, match="tc not found"), ShapedNetwork(2, 1e8):
        pass


def test_ranks_are_told_what_torchrun_tells():
    reported = environment(ShapedNetwork(2, 1e8), 3, 2)
    assert (reported["RANK"], reported["LOCAL_RANK"], reported["GROUP_RANK"]) == ("3", "1", "1")
    assert (reported["WORLD_SIZE"], reported["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert (reported["MASTER_ADDR"], reported["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")


@needs_namespaces
@pytest.mark.dist
@pytest.mark.slow
def test_the_lines_that_a_run_prints_for_ssh_start_it_on_two_hosts(tmp_path):
    """What ssh would run on either host, run in its namespace; Slurm's line differs in where the host's number is from."""
    from executors.ranks.mesh import launch_lines
    from tests.support.command import rows_of, saved_lines, saved_model
    from tests.support.distributed import FOURS, plan_for

    model, lines = saved_model("opt", tmp_path), tmp_path / "data.jsonl"
    saved_lines(lines)
    with ShapedNetwork(2, 1e9) as made:
        addresses = [made.address(host) for host in (0, 0, 1, 1)]
        plan = plan_for({**FOURS["2d-two-hosts"], "hosts": addresses})
        plan.save(tmp_path / "plan.json")
        words = ["run", tmp_path / "plan.json", "--model", model, "--data", lines, "--steps", 2, "--batch", 4]
        words += ["--threads", 1, "--out", tmp_path / "out", "--no-tensorboard"]
        text = launch_lines(plan, [str(word) for word in words])
        by_ssh = [shlex.split(line) for line in text.splitlines() if line.startswith("ssh ")]
        (by_slurm,) = [shlex.split(line) for line in text.splitlines() if line.startswith("srun ")]
        started = []
        for number, (_, name, remote, end) in enumerate(by_ssh):
            assert (name, end) == (made.address(number), "&")
            assert by_slurm[-1].replace("$SLURM_NODEID", str(number)) == remote.partition("&& ")[2]
            home = tmp_path / f"host{number}"
            home.mkdir()
            environ = {**os.environ, "GLOO_SOCKET_IFNAME": network.INTERFACE, "TMPDIR": str(home)}
            started.append(subprocess.Popen([*made.within(number), "sh", "-c", remote], env=environ))
        assert [process.wait() for process in started] == [0, 0]
    assert [row["step"] for row in rows_of(tmp_path / "out")] == [0, 1]


SENDER = """
import os, socket, time
payload = 4_000_000
if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], 6000)) as server:
        taken, _ = server.accept()
        begin, left = None, payload
        while left:
            left -= len(taken.recv(left))
            begin = begin or time.perf_counter()
        print(time.perf_counter() - begin, flush=True)
else:
    while True:
        try:
            sender = socket.create_connection((os.environ["MASTER_ADDR"], 6000))
            break
        except OSError:
            time.sleep(0.05)
    sender.sendall(bytes(payload))
    sender.close()
"""


@needs_namespaces
def test_two_hosts_send_at_the_rate_of_their_link_and_leave_nothing(tmp_path):
    script = tmp_path / "send.py"
    script.write_text(SENDER)
    before = namespaces()
    words = ["-m", "studies.shaped", "--rate", "20mbit", "--", sys.executable, str(script)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    # The kernel sends; only the clock's beginning and end wait for a core, which is little in 1.7 s.
    assert float(done.stdout) == pytest.approx(4e6 / (20e6 / 8 * FRAME_EFFICIENCY), rel=0.15)
    assert namespaces() == before


EXCHANGE = """
import time, torch
from itertools import pairwise
from statistics import median
from executors.ranks.communicator import WORLD, Communicator
from executors.ranks.launch import process_group

with process_group("cpu") as info:
    ranks = Communicator({})
    whole = torch.zeros(2, 6_000_000, dtype=torch.uint8)
    whole[info.rank] = info.rank + 1
    ranks.barrier("beginning")
    ends = [time.perf_counter()]
    for _ in range(5):
        ranks.all_gather(WORLD, whole.view(-1), whole[info.rank], "exchanging")
        ends.append(time.perf_counter())
    assert whole[0].eq(1).all() and whole[1].eq(2).all()
    if ranks.is_first:
        print(median(end - begin for begin, end in pairwise(ends)), flush=True)
"""


@needs_namespaces
@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_fill_both_directions_of_their_link(tmp_path):
    """One after the other would take twice as long; gloo's own all_gather takes 1.6 times as long."""
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    words = ["-m", "studies.shaped", "--rate", "100mbit", "--", sys.executable, "-W", "ignore", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=environ)
    # A median of half seconds, in which the kernel sends what lies in its buffers while ranks wait for a core.
    assert float(run.stdout) == pytest.approx(6e6 / (100e6 / 8 * FRAME_EFFICIENCY), rel=0.25)


@pytest.mark.slow
@needs_namespaces
def test_a_rank_that_fails_ends_the_others_and_the_network(tmp_path):
    before = namespaces()
    with ShapedNetwork(2, 1e8) as made:
        # The other one would go on for longer than a test may hang.
        status = run_ranks(made, ["sh", "-c", f"[ $RANK = 1 ] && exit 7; exec sleep {10 * HANG_S:.0f}"])
        assert len(namespaces()) == len(before) + 3
    assert status == 7
    assert namespaces() == before


@needs_namespaces
def test_what_runs_too_long_is_ended():
    with ShapedNetwork(1, 1e8) as made:
        assert run_ranks(made, ["sleep", f"{10 * HANG_S:.0f}"], timeout_s=0.3) == 124


@contextmanager
def started():
    """Yield a run whose ranks are up and have long to go."""
    command = [sys.executable, "-m", "studies.shaped", "--", "sh", "-c", "echo up; exec sleep 9000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_removes_its_network(how):
    before = namespaces()
    with started() as process:
        process.send_signal(how)
        assert process.wait(HANG_S) == 128 + how
    assert namespaces() == before


@needs_namespaces
def test_what_a_killed_run_left_is_removed_at_the_next_start():
    with started() as process:
        process.kill()
    left = [name for name in namespaces() if f"-{process.pid}-" in name]
    assert len(left) == 3
    removed = remove_stale_files()
    assert set(left) <= set(removed)
    assert not set(left) & set(namespaces())


@needs_namespaces
def test_a_failing_build_leaves_nothing(monkeypatch):
    before = namespaces()
    monkeypatch.setattr(network, "_bucket", lambda rate: ["tbf", "rate", "nonsense"])
    monkeypatch.setattr(network, "why_not", lambda: "")
    with pytest.raises(RunError, match="tc -n"), ShapedNetwork(2, 1e8):
        pass
    assert namespaces() == before


# -- predictions -------------------------------------------------------------------------------------------------


def machine():
    return load_preset("cpu-laptop")


def seconds(case, *, rate=None, latency_s=1e-4):
    topology = topology_of(machine(), case.layout.num_hosts, rate or case.rate, latency_s)
    plan = plan_of(case, topology.name)
    programs = lower_all(plan)
    profile = datasheet_profile(topology, plan.placement.devices[0], num_threads=1)
    machines = machines_of(topology, plan.placement.devices, profile, programs.process_groups)
    return simulate_many(fold(World.of(programs, machines))).step_time_s


def test_every_strategy_runs_at_every_rate():
    cases = all_cases()
    assert {(case.rate, case.strategy) for case in cases} == {(r, s) for r in RATES for s in STRATEGIES}
    assert len({(case.rate, case.name) for case in cases}) == len(cases)
    assert {case.layout for case in cases_of("1gbit", TWO)} == {TWO}


def test_the_route_between_hosts_has_the_rate_and_the_latency():
    topology = topology_of(machine(), 2, "100mbit", 3e-4)
    route = topology.route(*(topology.host_memory(f"host{host}/cpu0").id for host in range(2)))
    assert route.bandwidth_bytes_per_s == pytest.approx(12.5e6 * FRAME_EFFICIENCY)
    # The fabrics of both hosts add their tenths of microseconds.
    assert route.latency_s == pytest.approx(3e-4, rel=1e-2)


def test_losses_alone_hardly_notice_the_rate():
    case = ShapedCase("1gbit", "ddp", cases_of("1gbit", TWO)[0].setting)
    assert seconds(case, rate="100mbit") == pytest.approx(seconds(case), rel=1e-3)


def test_four_hosts_of_two_cores_take_twice_as_long_to_compute():
    case = ShapedCase("1gbit", "2d", cases_of("1gbit", FOUR)[0].setting)
    topology = topology_of(machine(), 4, "1gbit", 0.0)
    plan = plan_of(case, topology.name)
    programs = lower_all(plan)
    found = {}
    for num_cores in (2, 4):
        profile = datasheet_profile(topology, plan.placement.devices[0], num_threads=1)
        profile = profile.model_copy(update={"num_cores": num_cores})
        machines = machines_of(topology, plan.placement.devices, profile, programs.process_groups)
        assert {name for item in machines for name in item.capacities if "cores" in name} == {"machine:cores"}
        found[num_cores] = simulate_many(fold(World.of(programs, machines))).step_time_s
    # All four compute nearly all the time.
    assert found[2] == pytest.approx(2 * found[4], rel=0.05)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.dist
def test_ranks_in_namespaces_train_together(tmp_path):
    out = tmp_path / "found.json"
    script = tmp_path / "gather.py"
    script.write_text(
        "import json, sys, torch\n"
        "from executors.ranks.communicator import Communicator\n"
        "from executors.ranks.launch import process_group\n"
        "with process_group('cpu') as info:\n"
        "    rows = Communicator({}).all_gather_host(torch.tensor(float(info.rank)), 'trying')\n"
        "    if info.rank == 0:\n"
        "        open(sys.argv[1], 'w').write(json.dumps(rows.tolist()))\n"
    )
    with ShapedNetwork(2, 1e9) as made:
        status = run_ranks(made, [sys.executable, str(script), str(out)], timeout_s=HANG_S)
    assert status == 0
    assert json.loads(out.read_text()) == [0.0, 1.0]
    assert os.environ.get("RANK") is None


def test_figures_of_another_release_are_refused():
    with pytest.raises(RunError, match="does not hold the figures") as raised:
        benchmark.steps_of({"link": {"message_s": 1e-4}, "cases": []}, "1gbit-2x1")
    assert "delete 1gbit-2x1.json" in raised.value.hint


def test_a_report_is_made_of_the_networks_that_are_there(tmp_path, monkeypatch):
    """The networks cannot be made here: what is measured of two cases is made up, and predicted."""
    profile = datasheet_profile(detect(), "cpu0", num_threads=1)
    link = {"message_s": 1e-4, "bandwidth_bytes_per_s": 1e8, "core_s_per_byte": 1e-9, "busy_latency_s": 1e-3}
    case = {"step_s": [0.2, 0.3, 0.25], "seconds_by_label": {"forward": 0.1}, "foreign_cores": 0.5}
    steps = [
        {"name": item.name, **case, "before_s": 2e-4, "after_s": 2e-4} for item in cases_of(RATES[0], TWO)[:2]
    ]
    kept_results = benchmark.KeptResults(tmp_path)
    kept_results.keep("calibration", {"profile": profile.model_dump(mode="json")})
    kept_results.keep(f"{RATES[0]}-{TWO.name}", {"link": {**link, "num_cores": 2.0}, "cases": steps})
    monkeypatch.setattr(benchmark, "NETWORKS", (TWO,))
    with pytest.raises(typer.Exit) as ended:
        benchmark.main(tmp_path, stop_after_s=-1.0, cases="", out=tmp_path / "out", budget=1.0)
    assert ended.value.exit_code == 75  # the slower rate is to be measured
    (page,) = (tmp_path / "out").glob("*-shaped-links.md")
    text = page.read_text()
    assert "| all | 2 | 0 |" in text
    assert "In 2 of the 2 cases other processes used more" in text
    assert "250.0" in text  # the median step, in milliseconds
    data = json.loads(page.with_suffix(".json").read_text())
    assert [row["measured_s"] for row in data["rows"]] == [0.25, 0.25]
