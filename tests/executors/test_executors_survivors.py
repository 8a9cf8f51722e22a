"""Ranks without a launcher that lose rank 0, and with it the store that all of them ask: they end in time, and name it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.command import saved_lines, saved_model

pytestmark = pytest.mark.dist

PATIENCE_S = 300


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    saved_lines(folder / "data.jsonl")
    return saved_model("opt", folder), folder / "data.jsonl"


def started_by_hand(inputs, out, *more, num_ranks=2):
    """Start ranks as no launcher does, each with an environment of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": 1,
    }
    options = [
        "run", "--model", inputs[0], "--data", inputs[1], "--steps", 100_000, "--batch", 4, "--threads", 1,
        "--no-tensorboard", "--out", out, *more,
    ]  # fmt: skip
    command = [sys.executable, "-m", "zosim", *map(str, options)]
    places = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, **common} for rank in range(num_ranks)
    ]
    environments = [os.environ | {name: str(value) for name, value in place.items()} for place in places]
    return [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for environment in environments
    ]


@pytest.mark.parametrize(
    ("happens", "more", "says"),
    [
        (
            signal.SIGKILL,
            ("--mesh", "data=2", "--transfers", "shared", "--timeout", 30),
            "rank 0, last at step[",
        ),
        (
            signal.SIGSTOP,
            ("--mesh", "perturb=2", "--residency", "resident", "--timeout", 4),
            "waited 4 s for rank 0, last at step[",
        ),
    ],
    ids=["killed", "stopped"],
)
def test_who_is_left_ends_in_time_and_names_rank_0(inputs, tmp_path, happens, more, says):
    ranks = started_by_hand(inputs, tmp_path / "out", *more)
    try:
        log, end = tmp_path / "out" / "steps.jsonl", time.monotonic() + PATIENCE_S
        while not log.exists() or not log.stat().st_size:
            assert all(rank.poll() is None for rank in ranks)
            assert time.monotonic() < end
            time.sleep(0.05)
        ranks[0].send_signal(happens)
        said = ranks[1].communicate(timeout=PATIENCE_S)[1]
        assert ranks[1].returncode == 2
        assert says in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
