"""What goes wrong among ranks is caught and named."""

from __future__ import annotations

import socket
import time

import pytest
from torch.distributed import DistNetworkError, HashStore

from executors.ranks import missing_ranks
from executors.ranks.communicator import Communicator
from executors.ranks.launch import launch, process_group
from executors.ranks.missing_ranks import MissingRanks, missing_from
from tests.support import distributed
from topology.errors import RunError

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_a_fault_of_one_rank_is_named_in_every_mode():
    """Without a checksum after every change but where the weights are resident."""
    output = launch(distributed.plant_faults, world_size=3)
    differs = "replicas differ: rank 1 differs from the other 2 in block.1"
    inputs = "ranks did other steps: rank 1 differs from the other 2 in the "
    assert output["resident", "bit at rest"].startswith(differs)
    assert output["sliced", "bit in a forward"].startswith(differs)
    assert output["private", "learning rate"].startswith(inputs)
    assert "learning rate" in output["private", "learning rate"]
    assert output["shared", "batch"].startswith(inputs)
    assert "batch" in output["shared", "batch"]
    found = "; rank 1 found other bits in block.1 than were left there, in step 3, step/block.1/perturb[q0"
    assert found in output["resident", "bit at rest"]


def test_ranks_that_begin_with_other_weights_are_named():
    output = launch(distributed.start_unlike, world_size=2)
    assert output.startswith("ranks must start with the same base digest, but rank 1 and rank 0 differ (")


def test_who_is_waited_for_in_vain_is_named_and_memory_leaves_nothing():
    reported = launch(distributed.wait_for_peer, world_size=2)
    output = "block.1/offload of rank 1: waited 1 s for rank 1, last at rank 1 at work"
    assert reported == {"said": output, "left": [], "given_up": [1]}


def test_a_plan_of_another_number_of_ranks_is_refused():
    assert launch(distributed.forget_the_plan, world_size=2) == "the plan has 1 ranks, but 2 were started"


def test_rank_0_that_takes_the_store_with_it_is_named(monkeypatch):
    """Who loses rank 0 asks a store that dies with it who else is missing."""

    class Gone:
        def __getattr__(self, name):
            raise DistNetworkError("failed to recv, got 0 bytes")

    monkeypatch.setattr("executors.ranks.missing_ranks.roll_store", Gone)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with (
        pytest.raises(RunError, match="writing a checkpoint: rank 0 ended"),
        MissingRanks(1, 20.0).named((0, 1, 2), "writing a checkpoint"),
    ):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


WAITS = {
    "directly": ({0: [1], 1: None}, [1]),
    "by way of another": ({0: [2], 2: [1], 1: None}, [1]),
    "stages and shards: two wait for each other's pipelines": ({0: [2], 2: [3], 3: [1], 1: None}, [1]),
    "one of two has ended": ({0: [1, 2], 1: [0, 2], 2: None, 3: None}, [2]),
    "one that stands still before one that computes": ({0: [1, 2], 1: [], 2: None}, [2]),
    "one that computes": ({0: [1], 1: [2], 2: []}, [2]),
    "all wait for each other": ({0: [1], 1: [0]}, []),
}


@pytest.mark.parametrize(("waits", "missing"), WAITS.values(), ids=WAITS)
def test_answers_lead_to_the_ranks_that_are_missing(waits, missing):
    assert missing_from(waits.get, 0) == missing


@pytest.fixture
def store(monkeypatch):
    """A store of a world of four ranks, all in this process."""
    made = HashStore()
    monkeypatch.setattr(missing_ranks, "roll_store", lambda: made)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(missing_ranks, "_PERIOD_S", 0.01)
    monkeypatch.setattr(missing_ranks, "_SETTLE_S", 0.02)
    monkeypatch.setattr(missing_ranks, "_GRACE_S", 0.1)
    monkeypatch.setenv("ZOSIM_LAUNCH_DIRECTORY", "nowhere")
    monkeypatch.setattr(missing_ranks, "give_up", lambda ranks, why: made.set("given up", str(ranks)))
    yield made
    missing_ranks._waits.cache_clear()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({0: "[1]"}, "waited 30 s for rank 1 (Timed out)"),
        ({0: "[3]", 3: "[1]"}, "waited 30 s for rank 1 (Timed out)"),
        ({0: "[1]", 1: "[0]"}, "no rank is missing, all wait for each other (Timed out)"),
        ({0: "[3]", 3: "cos\nsystem\n(S'true'\ntR."}, "waited 30 s for rank 3 (Timed out)"),
        ({0: "[9]"}, "waited 30 s for rank 0 (Timed out)"),
    ],
)
def test_a_rank_that_is_waited_for_by_way_of_others_is_named(store, answers, words):
    for rank, answer in answers.items():
        store.set(f"zosim/waits-for/{rank}", answer)
    with pytest.raises(RunError) as caught, MissingRanks(2, 30.0).named((0, 2), "losses"):
        raise RuntimeError("Timed out")
    assert caught.value.message == f"losses: {words}"
    assert store.check(["given up"]) == words.startswith("waited")
    assert store.get("zosim/waits-for/2") == b"[0]"


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({0: "[]"}, "Invalid scalar type", "waited 0 s for rank 0 (Invalid scalar type)"),
        (
            {0: "[2]"},
            "timed out connecting, remote=[127.0.0.1]:2446",
            "all ranks are there, but they cannot connect (timed out connecting, remote=[127.0.0.1]:2446)",
        ),
        ({0: "[2]"}, "Invalid scalar type", "it failed, and no rank is missing (Invalid scalar type)"),
    ],
)
def test_a_failure_that_is_no_wait_is_not_told_as_one(store, monkeypatch, answers, error, words):
    monkeypatch.setattr(missing_ranks, "_now_s", lambda: 5.0)
    for rank, answer in answers.items():
        store.set(f"zosim/waits-for/{rank}", answer)
    with pytest.raises(RunError) as caught, MissingRanks(2, 120.0).named((0, 2), "losses"):
        raise RuntimeError(error)
    assert caught.value.message == f"losses: {words}"
    assert ("loopback" in caught.value.hint) == ("connect" in words)


def test_a_rank_answers_what_it_waits_for_when_the_roll_is_called(store):
    def answered(answer):
        while not store.check(["zosim/waits-for/1"]) or store.get("zosim/waits-for/1") != answer:
            time.sleep(0.01)

    with missing_ranks.answering(1, store):
        time.sleep(0.05)
        assert not store.check(["zosim/waits-for/1"])
        store.set("zosim/roll-called", "1")
        answered(b"[]")
        with MissingRanks(1, 30.0).named((1, 3), "losses"):
            answered(b"[3]")
            with MissingRanks(1, 30.0).named((0,), "a message"):
                answered(b"[0, 3]")
        answered(b"[]")
        with pytest.raises(RunError), MissingRanks(1, 30.0).named((2,), "a message"):
            raise RuntimeError("Timed out")
        answered(b"[2]")  # also when it has given up


def test_ranks_that_never_come_are_no_mistake_of_ours(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(
            RunError, match=r"rank 0 could not join the others of 2 ranks: waited 1 s for rank 1 \("
        ),
        process_group("cpu", timeout_s=1),
    ):
        pass


def test_a_store_that_nobody_keeps_is_no_mistake_of_ours(monkeypatch):
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    for port in ("1", "seven", ""):
        monkeypatch.setenv("MASTER_PORT", port)
        with (
            pytest.raises(
                RunError,
                match=f"rank 1 cannot join .* the store at MASTER_ADDR=127.0.0.1 MASTER_PORT={port} ",
            ),
            process_group("cpu", timeout_s=1),
        ):
            pass


def test_a_group_that_cannot_be_made_is_no_mistake_of_ours(monkeypatch):
    """As when gloo finds rubbish in the store after all have joined."""

    def new_group(**_):
        raise RuntimeError("Gloo connectFullMesh failed with Connect timeout\nand lines of C++")

    groups = {"world": ((0,),)}
    with process_group("cpu") as info:
        assert info.world_size == 1
        monkeypatch.setattr("torch.distributed.new_group", new_group)
        with pytest.raises(
            RunError, match=r"rank 0 could not join the others of 1 ranks: .* \(Gloo connectFullMesh"
        ):
            Communicator(groups)
        monkeypatch.undo()
