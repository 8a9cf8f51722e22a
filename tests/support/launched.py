"""Functions that tests start in ranks of their own."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

from executors.ranks.rank_info import RankInfo


def add_ranks(offset):
    import torch
    import torch.distributed as dist

    from executors.ranks.launch import process_group

    with process_group("cpu") as info:
        total = torch.tensor([info.rank + offset])
        dist.all_reduce(total)
        return int(total)


def refuse():
    from topology.errors import PlanError

    message = "this plan cannot be"
    raise PlanError(message, hint="make another")


def be_ignored():
    import warnings

    warnings.warn("`past_key_values` is ignored", FutureWarning, stacklevel=1)


def end_by_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def exit_by_sigterm():
    """End as a process does that takes SIGTERM as an exception."""
    raise SystemExit(128 + signal.SIGTERM)


def leave_silently():
    os._exit(7)


def fail_in_an_instruction():
    from executors.ranks.rank_info import progress_of_this_rank
    from topology.errors import CodecError

    instruction = "step[0]/decode on stream compute"
    progress_of_this_rank().note(instruction)
    message = f"{instruction}: it is damaged"
    raise CodecError(message)


JOINING = {
    "before it comes": "executors.ranks.launch._store",
    "when others wait for it": "executors.ranks.gloo.gloo_group",
    "when groups are made": "torch.distributed.new_subgroups_by_enumeration",
}
"""Functions in which a rank may stand still."""


def stop_while_ranks_join(instant):
    from unittest import mock

    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group

    def stop(*_, **__):
        os.kill(os.getpid(), signal.SIGSTOP)

    is_victim = RankInfo.here().rank == 1
    with (
        mock.patch(JOINING[instant], stop) if is_victim else nullcontext(),
        mock.patch("executors.ranks.missing_ranks._GRACE_S", 2.0),
        process_group("cpu", timeout_s=2),
    ):
        Communicator({"all": [range(2)]}, timeout_s=2)


def stop_at_the_end():
    from executors.ranks.launch import process_group

    with process_group("cpu", timeout_s=20) as info:
        if info.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def die():
    from executors.ranks.rank_info import progress_of_this_rank

    progress = progress_of_this_rank()
    progress.note("step[3]/block.1/forward[q0+]")
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_training():
    from executors.runs.session import Session
    from tests.support.tiny import batches, model_of, plan_of

    model = model_of("opt")
    session = Session(plan_of(model), model)
    (batch,) = batches(1)
    session.step(batch)
    session.forward_runner.blocks[1].register_forward_pre_hook(
        lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    session.step(batch)


def memory_of_loading(folder):
    """Load a model and make a session of it; return by rank how its own memory grew, beside its own buffers, in bytes."""
    import threading

    from executors.ranks.communicator import default_communicator
    from executors.ranks.launch import process_group
    from executors.runs.replay import load_base
    from executors.runs.session import Session
    from zosim.plans import Plan

    def own_bytes():
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("RssAnon:") + 1]) * 1024

    plan = Plan.load(Path(folder) / "plan.json")
    with process_group("cpu"):
        communicator = default_communicator(plan.process_groups, "cpu")
        load_base(folder, plan)  # what libraries take when they are first used
        before, seen, ended = own_bytes(), [], threading.Event()

        def watch():
            while not ended.wait(0.002):
                seen.append(own_bytes())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        with Session(plan, load_base(folder, plan), communicator=communicator) as session:
            ended.set()
            watcher.join()
            buffers = sum(b.size_bytes for b in session.program.buffers if not b.shared)
            shared = sum(b.size_bytes for b in session.program.buffers if b.shared)
            own = [max(seen) - before, buffers, shared]
            rows = communicator.all_gather_json(own, "memory")
            digest = session.digest()
    return rows, digest


def gathered_by_doubling():
    """Gather numbers among all ranks; return how many messages each sent for the first of them."""
    import torch
    import torch.distributed as dist

    from executors.ranks.communicator import WORLD, Communicator
    from executors.ranks.launch import process_group

    with process_group("cpu") as info:
        ranks = Communicator({})
        sent, real = [], dist.isend
        dist.isend = lambda *given, **more: sent.append(given) or real(*given, **more)
        try:
            for size in (1, 5, 300):
                rows = torch.arange(ranks.world_size * size, dtype=torch.float64).view(-1, size)
                whole = torch.zeros(rows.numel(), dtype=torch.float64)
                ranks.all_gather(WORLD, whole, rows[info.rank].clone(), "gathering")
                assert torch.equal(whole.view_as(rows), rows)
        finally:
            dist.isend = real
        # Of three gathers.
        return ranks.all_gather_host(torch.tensor(len(sent) // 3), "counting").tolist()


def over_plain_groups(function, *arguments):
    """Do something where torch has no options of gloo.

    Once in a process: groups of a second session would find the addresses of the first one's in the store.
    """
    import torch.distributed as dist

    del dist.ProcessGroupGloo._Options
    return function(*arguments)


def gathered_once(own):
    """Gather one tensor over a group that is made as a run's are."""
    import torch

    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group

    with process_group("cpu"):
        communicator = Communicator({"pair": [[0, 1]]})
        whole = torch.zeros(2 * own.numel())
        communicator.all_gather("pair", whole, own, "gathering")
        return whole.tolist()


def threads_of_more_groups():
    """Make groups as a program of pairs has them, again and again; return how many threads those after the first add."""
    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group

    with process_group("cpu"):
        groups = {"data": [[0, 1]], "perturb": [[0], [1]], "pipeline": [[0, 1]]}
        made, counts = [], []
        for _ in range(4):
            made.append(Communicator(groups))
            made[-1].barrier("counting threads")
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            # Those of sockets have a name in newer versions of torch alone; those that run collectives have one in all.
            counts.append(sum(name != "pt_gloo_runloop" for name in names))
        return counts[-1] - counts[0]


def say_and_wait(folder):
    """Leave this process's id, and wait for ever."""
    Path(folder, f"{os.getpid()}.pid").touch()
    signal.pause()
