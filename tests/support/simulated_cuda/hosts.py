"""Functions that tests start in processes which are ranks, each with a simulated device of its own."""

from __future__ import annotations

import os
from unittest import mock

from executors.ranks.communicator import default_communicator
from executors.ranks.launch import process_group
from executors.ranks.rank_info import RankInfo
from executors.runs.session import Session
from tests.support import staged
from tests.support.simulated_cuda import simulated
from tests.support.tiny import batches
from topology.errors import RunError


def steps_on_own_host(case, *, has_own_name=True):
    """Train as the only rank of a host; return by rank the projected gradients, and how many findings its device has.

    Where hosts have one name, two ranks seem to be on one device: then return what is said.
    """
    rank = RankInfo.here().rank
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    plan, model = case.plan(), case.made()
    name = f"host{rank}" if has_own_name else "host"
    with simulated() as device, process_group("cuda"):
        try:
            with mock.patch("executors.ranks.accelerators.socket.gethostname", return_value=name):
                communicator = default_communicator(plan.process_groups, "cuda:0")
        except RunError as error:
            return error.message
        with Session(plan, model, communicator=communicator, learning_rate=1e-2, device="cuda") as session:
            lines = batches(staged.STEPS, size=case.size)
            numbers = [session.step(batch).projected_gradients for batch in lines]
            session.flush()
        own = [numbers, [finding.what for finding in device.findings]]
        return communicator.all_gather_json(own, "comparing")


def exchange_seconds_on_own_host():
    """Measure exchanges between two simulated devices; return the bytes that were sent."""
    from executors.calibration.device_facts import exchange_seconds

    os.environ |= {"LOCAL_RANK": "0"}
    with simulated(), mock.patch("executors.calibration.device_facts._EXCHANGED_BYTES", (8, 1024)):
        return exchange_seconds("cuda")
