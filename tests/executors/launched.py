"""Functions that tests start in ranks of their own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def add_ranks(offset):
    import torch
    import torch.distributed as dist

    from executors.launch import process_group

    with process_group("cpu") as info:
        total = torch.tensor([info.rank + offset])
        dist.all_reduce(total)
        return int(total)


def refuse():
    from topology.errors import PlanError

    message = "this plan cannot be"
    raise PlanError(message, hint="make another")


def die():
    from executors.launch import progress_of_this_rank

    progress = progress_of_this_rank()
    progress.note("step[3]/block.1/forward[q0+]")
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_training():
    from tiny import batches, model_of, plan_of

    from executors.session import Session

    model = model_of("opt")
    session = Session(plan_of(model), model)
    (batch,) = batches(1)
    session.step(batch)
    session.cut.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    session.step(batch)
