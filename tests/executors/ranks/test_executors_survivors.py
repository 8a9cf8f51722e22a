"""Ranks without a launcher that lose rank 0, and with it the store that all of them ask: they end in time, and name it."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.forked import Command
from tests.support.runs import FOREVER, PATIENCE_S, options, wait_for_steps
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.dist


@contextmanager
def started_by_hand(inputs, out, *more):
    """Start two ranks as no launcher does, each with an environment of its own, and wait until they have made steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as started:
        ranks = [
            started.enter_context(
                Command(
                    *options(inputs, out, *more, steps=FOREVER),
                    RANK=rank,
                    LOCAL_RANK=rank,
                    WORLD_SIZE=2,
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                    GLOO_SOCKET_IFNAME="lo",
                )
            )
            for rank in range(2)
        ]
        yield ranks


def test_who_is_left_ends_by_itself_and_names_a_killed_rank_0(inputs, tmp_path):
    """It has more patience than the test: that it ends shows that the death is noticed."""
    more = ("--mesh", "data=2", "--transfers", "shared", "--timeout", 10 * HANG_S)
    with started_by_hand(inputs, tmp_path / "out", *more) as ranks:
        wait_for_steps(ranks[0], tmp_path / "out", 1)
        ranks[0].kill()
        output = ranks[1].end()
        assert ranks[1].exit_code == 2
    assert "rank 0, last at step[" in output


@pytest.mark.slow
def test_who_is_left_does_not_wait_for_ever_for_a_stopped_rank_0(inputs, tmp_path):
    for patience_s in PATIENCE_S:
        out = tmp_path / f"patience-{patience_s}"
        more = ("--mesh", "perturb=2", "--residency", "resident", "--timeout", patience_s)
        with started_by_hand(inputs, out, *more) as ranks:
            try:
                wait_for_steps(ranks[0], out, 1)
            except AssertionError:
                continue
            ranks[0].send_signal(signal.SIGSTOP)
            output = ranks[1].end()
            assert ranks[1].exit_code == 2
        if f"waited {patience_s} s for rank 0, last at step[" in output:
            return
    raise AssertionError(output)
