"""Who may connect to a run, and what an unauthenticated peer can do: nothing listens beyond this host, and nobody's code is run."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from executors.ranks.gloo import gloo_group, refuse_unauthenticated_peers
from executors.ranks.rank_info import PREFIX, launch_directory
from tests.support.command import zosim
from tests.support.forked import Command
from tests.support.runs import numbers_of
from topology.errors import RunError

pytestmark = pytest.mark.dist

NOBODY = 65534
STEPS = 12
LOOKS_EVERY_S = 0.1
"""A look at all connections takes a tenth of this; what listens does so until the run ends."""


def options(inputs, out, *more, steps=STEPS):
    return [
        "run", "--model", inputs[0], "--data", inputs[1], "--steps", steps, "--batch", 4, "--threads", 1,
        "--no-tensorboard", "--out", out, *more,
    ]  # fmt: skip


def listening(process):
    """Return the addresses at which a process and its children listen now, for streams or datagrams.

    Those of the test's own process, which its copies inherit, are left out.
    """
    with contextlib.suppress(psutil.Error):
        processes = [process, *process.children(recursive=True)]
        return set().union(*map(_listening_alone, processes)) - _listening_alone(psutil.Process())
    return set()


def _listening_alone(process):
    with contextlib.suppress(psutil.Error):
        return {
            (connection.laddr.ip, connection.laddr.port)
            for connection in process.net_connections("inet")
            # A datagram socket with a peer, as who looks up a host's name has for a moment, hears that peer alone.
            if connection.status == psutil.CONN_LISTEN
            or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
        }
    return set()


def output_of(command, each_turn):
    """Do something again and again until a command has ended; return what it wrote to stderr."""
    while command.is_running:
        each_turn()
        time.sleep(LOOKS_EVERY_S)
    return command.end()


@pytest.mark.crossed(slow=3)
@pytest.mark.parametrize(
    "more",
    [
        ("--method", "pertp", "--transfers", "sliced"),
        pytest.param(("--mesh", "stage=2", "--residency", "resident"), marks=pytest.mark.slow),
        pytest.param(
            ("--mesh", "perturb=2", "--weight-format", "int8", "--allow-lossy"), marks=pytest.mark.slow
        ),
        pytest.param(
            ("--mesh", "perturb=2", "--weights", "adapters", "--distribution", "lozo", "--tune", "linears"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--mesh", "data=2", "--lora-rank", 2, "--lora-targets", "q_proj"), marks=pytest.mark.slow
        ),
    ],
    ids=["shared", "stages", "quantized", "adapters", "lora"],
)
def test_nothing_of_a_launch_listens_beyond_this_host(inputs, tmp_path, more):
    places = set()
    # Whatever a machine's profile says of an interface: it is for several hosts.
    with Command(*options(inputs, tmp_path / "out", *more), GLOO_SOCKET_IFNAME="no-such-interface") as run:
        process = psutil.Process(run.pid)
        output = output_of(run, lambda: places.update(listening(process)))
    assert run.exit_code == 0, output
    assert len(places) >= 2
    assert {address for address, _ in places if not ipaddress.ip_address(address).is_loopback} == set()


def test_ranks_that_another_launcher_starts_join_and_listen_on_this_host_alone(inputs, tmp_path):
    """As torchrun does: told by variables, with a store that is the launcher's, here the test's own."""
    places, port = set(), free_port()
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    words = options(inputs, tmp_path / "out", "--method", "pertp", "--residency", "resident", steps=STEPS)
    with (
        Command(*words, **common, RANK=0, LOCAL_RANK=0) as first,
        Command(*words, **common, RANK=1, LOCAL_RANK=1) as second,
    ):
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        processes = [psutil.Process(rank.pid) for rank in (first, second)]
        output = output_of(first, lambda: places.update(*map(listening, processes))) + second.end()
        del store
    assert (first.exit_code, second.exit_code) == (0, 0), output
    assert len(places) >= 2
    assert {address for address, _ in places} == {"127.0.0.1"}
    assert (
        zosim(*options(inputs, tmp_path / "alone", "--no-launch", "--residency", "resident", steps=STEPS))
        == 0
    )
    assert numbers_of(tmp_path / "out") == numbers_of(tmp_path / "alone")


@pytest.mark.crossed(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "standalone"])
def test_ranks_that_torchrun_starts_on_one_host_join_and_listen_there_alone(inputs, tmp_path, rendezvous):
    """The static launcher listens everywhere; what it reads there is no pickle. What is left over is a run of one rank."""
    places = set()
    (temporary := tmp_path / "temporary").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--log-dir", tmp_path]
    if rendezvous == "static":
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    else:
        torchrun.append("--standalone")
    words = options(
        inputs, tmp_path / "out", "--method", "pertp", "--residency", "resident", "--json", steps=STEPS
    )
    output, answer = tmp_path / "said", tmp_path / "answer"
    with (
        output.open("w") as stderr,
        answer.open("w") as stdout,
        subprocess.Popen(
            list(map(str, [*torchrun, "-m", "zosim", *words])),
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"TMPDIR": str(temporary)},
            start_new_session=True,
        ) as run,
    ):
        try:
            while run.poll() is None:
                with contextlib.suppress(psutil.Error):
                    for rank in psutil.Process(run.pid).children():
                        places.update(listening(rank))
                time.sleep(LOOKS_EVERY_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, output.read_text()
    assert len(places) >= 2
    assert {address for address, _ in places} == {"127.0.0.1"}
    assert json.loads(answer.read_text())["num_steps"] == STEPS
    assert list(temporary.iterdir()) == []
    assert (
        zosim(*options(inputs, tmp_path / "alone", "--no-launch", "--residency", "resident", steps=STEPS))
        == 0
    )
    assert numbers_of(tmp_path / "out") == numbers_of(tmp_path / "alone")


class Planted:
    """What creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class UnauthenticatedPeer:
    """Connects to every port of a run and sends what might be taken for something."""

    def __init__(self, bait):
        self.pickled = pickle.dumps(Planted(bait))
        self.num_sent = 0
        self._held = []

    def attack(self, ports):
        """Send all that there is to all ports, and leave the last connections open."""
        # gloo's listeners tell peers by small numbers, which they take from whoever says them first.
        numbers = [struct.pack("<Q", number) + self.pickled for number in range(12)]
        for port in ports:
            for payload in [*numbers, self.pickled, os.urandom(4096), b"", b"\x00" * 64]:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                    self._held.append(connection)
                    connection.sendall(payload)
                    self.num_sent += 1
        while len(self._held) > 200:
            self._held.pop(0).close()

    def close(self):
        """Close all connections."""
        while self._held:
            self._held.pop().close()


@pytest.fixture
def peer(tmp_path):
    peer = UnauthenticatedPeer(tmp_path / "bait")
    yield peer
    peer.close()
    assert not (tmp_path / "bait").exists()
    # The bait would have worked.
    pickle.loads(peer.pickled)
    assert (tmp_path / "bait").exists()


@pytest.mark.parametrize("begins", ["at the start", pytest.param("in the steps", marks=pytest.mark.slow)])
def test_an_unauthenticated_peer_who_writes_to_every_port_runs_no_code(inputs, tmp_path, peer, begins):
    """Who comes while ranks connect can take a rank's place, which is noticed; later it is too late for that."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    # Only who waits for an unauthenticated peer at the start waits in vain.
    more = ("--method", "pertp", "--timeout", 5 if begins == "at the start" else 600)
    with Command(*options(inputs, out, *more)) as run:
        process = psutil.Process(run.pid)

        def attack():
            if begins == "at the start" or (out / "steps.jsonl").exists():
                peer.attack({port for _, port in listening(process)})

        output = output_of(run, attack)
    assert peer.num_sent > 0
    assert "Traceback" not in output
    if begins == "at the start" and run.exit_code == 2:
        assert "error: " in output
        return
    assert run.exit_code == 0, output
    assert zosim(*options(inputs, alone, "--no-launch", "--residency", "resident")) == 0
    assert numbers_of(out) == numbers_of(alone)


@pytest.mark.slow
def test_an_unauthenticated_peer_who_writes_under_every_key_runs_no_code(inputs, tmp_path, peer):
    """Ranks without a launcher of ours have a store that listens: gloo's addresses go through it, and nothing pickled."""
    port = free_port()
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    words = options(inputs, tmp_path / "out", "--method", "pertp", "--timeout", 5)
    ended = threading.Event()

    def write():
        while not ended.is_set():
            with contextlib.suppress(RuntimeError):
                store = dist.TCPStore(
                    "127.0.0.1", port, timeout=timedelta(seconds=10), wait_for_workers=False
                )
                while not ended.wait(0.01):
                    for key in store.list_keys() if hasattr(store, "list_keys") else KEYS:
                        store.set(key, peer.pickled)
                        peer.num_sent += 1
            ended.wait(0.05)

    writer = threading.Thread(target=write)
    with (
        Command(*words, **common, RANK="0", LOCAL_RANK="0") as first,
        Command(*words, **common, RANK="1", LOCAL_RANK="1") as second,
    ):
        writer.start()
        try:
            output = [rank.end() for rank in (first, second)]
        finally:
            ended.set()
            writer.join()
    assert peer.num_sent > 0
    for code, words in zip((first.exit_code, second.exit_code), output, strict=True):
        # gloo takes what torchrun's store holds for structures of its own: rubbish there may crash a rank, but runs nothing.
        is_crash = code in (-signal.SIGSEGV, -signal.SIGABRT)
        assert code == 0 or is_crash or (code == 2 and "error: " in words), words


KEYS = [
    f"default_pg/{key}"
    for key in ("zosim/secret", "0", "1", "zosim/roll-called", "store_based_barrier_key:1")
]
"""Some of those of a run, for a torch whose stores do not list theirs."""


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to be another user")
def test_another_user_neither_reads_nor_writes_the_store_of_a_launch(inputs, tmp_path, monkeypatch, peer):
    """Who could append to its file could write under every key."""
    tmp_path.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)  # as the system's: whoever likes makes files there
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    tries = (
        "cat {0}/store",
        "ls {0}",
        "cat {1} >> {0}/store",
        "cp {1} {0}/store",
        "cp {1} {0}/pid-0",
        "rm -f {0}/store",
        "ln -sf {1} {0}/store",
        "mv {0} {0}-gone",
    )
    with Command(*options(inputs, tmp_path / "out", "--method", "pertp")) as run:
        while not (tmp_path / "out" / "steps.jsonl").exists():
            assert run.is_running
            time.sleep(0.02)
        (directory,) = temporary.glob(f"{PREFIX}*")
        assert (directory / "store").exists()
        keys = [b"default_pg/" + key.encode() for key in ("0", "1", "zosim/secret", "zosim/waits-for/1")]
        rubbish = temporary / "rubbish"
        rubbish.write_bytes(b"".join(_as_in_a_file(part) for key in keys for part in (key, peer.pickled)))
        for words in tries:
            command = ["sh", "-c", words.format(directory, rubbish)]
            tried = subprocess.run(command, user=NOBODY, capture_output=True, text=True, check=False)
            assert tried.returncode != 0, words
            assert "ermission denied" in tried.stderr or "not permitted" in tried.stderr, words
        output = run.end()
    assert run.exit_code == 0, output


def _as_in_a_file(part):
    """Return a key or a value as torch's FileStore writes it."""
    return struct.pack("<Q", len(part)) + part


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to be another user")
def test_a_directory_that_another_user_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    made = tmp_path / f"{PREFIX}{os.getppid()}-1"
    made.mkdir()
    os.chown(made, NOBODY, NOBODY)
    with pytest.raises(RunError, match="must be a directory that only this user can access"):
        launch_directory()


def test_who_does_not_know_the_store_is_no_rank(tmp_path):
    """Two processes that connect, but have read unlike secrets."""

    def join(rank):
        addresses = dist.FileStore(str(tmp_path / "store"), 2)
        group = gloo_group(
            addresses,
            rank,
            2,
            timedelta(seconds=30),
            lambda: [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")],
        )
        own = dist.HashStore()
        own.set("zosim/secret", "guessed")
        with pytest.raises(RunError, match=f"in place of rank {1 - rank} is not a rank of this run"):
            refuse_unauthenticated_peers(group, own, rank, 2)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
