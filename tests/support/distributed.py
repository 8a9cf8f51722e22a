"""Sessions of several ranks: cases by name, and the workers that tests start to run them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STEPS, RATE, DECAY, SEED = 4, 1e-2, 0.1, 5

OFFLOADED = {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}}
FRESH = {
    "residency": {"blocks": "offloaded", "reuse_staging_buffers": False},
    "schedule": {"update": "delayed"},
}
AHEAD = {"perturbations": {"sampled_ahead": True}}
SHARED = {"residency": {"blocks": "offloaded", "transfers": "shared"}, "schedule": {"update": "delayed"}}
SLICED = {"residency": {"blocks": "offloaded", "transfers": "sliced"}, "schedule": {"update": "delayed"}}
PERTP, DDP = {"perturb": 2}, {"data": 2}
COUNTER = {"rng": "counter"}
LAZY_LORA = {"rank": 2, "target_modules": ("q_proj", "fc2"), "lazy_steps": 2, "max_rank": 4}

PAIRS = {
    "pertp": {"mesh": PERTP},
    "pertp-sliced": {"mesh": PERTP, "model": "opt-untied", **SLICED},
    "pertp-windows": {"mesh": PERTP, "lora": LAZY_LORA, "weights": {"perturbation": "adapters"}},
    "ddp-int4-sliced": {"mesh": DDP, "low_bits": {"weights": "int4", "estimator": "q-rge2"}, **SLICED},
    "ddp-shared": {"mesh": DDP, "perturbations": COUNTER, **SHARED},
    "ddp-unequal": {"mesh": DDP, "batch": 5, **SLICED},
}
"""By how two processes meet: losses alone, parts of blocks, memory of the host; the rest of a step is the matrix's."""

FOURS = {
    "2d-data-inner": {"mesh": {"data": 2, "perturb": 2, "inner": "data"}, "perturbations": COUNTER, **SHARED},
    "2d-two-hosts": {"mesh": {"data": 2, "perturb": 2}, "hosts": ("a", "a", "b", "b"), **SLICED},
    "queries-forward-unequal": {
        "mesh": {"perturb": 4},
        "estimator": {"num_perturbations": 4, "difference": "forward"},
        "perturbations": {"rng": "counter"},
    },
    "queries-copies-unequal": {
        "mesh": {"perturb": 4},
        "estimator": {"num_perturbations": 3},
        "weights": {"perturbation": "copies"},
        "schedule": {"update": "delayed"},
    },
}


def model_for(case, plan=None):
    """Return the model of a case, with its adapters, as they are kept by a plan."""
    import torch

    from costmodel.models.configs import LoRA
    from executors.runs.adapters import attach
    from tests.support.tiny import model_of

    model = model_of(case.get("model", "opt"), getattr(torch, case.get("dtype", "float32")))
    if "lora" in case:
        attach(model, LoRA(**case["lora"]), plan=plan)
    return model


def plan_for(case, *, alone=False):
    """Return the plan of a case, or what a rank alone does in its place."""
    from tests.support.tiny import plan_of
    from zosim.plans import AXES, Plan

    axes = {key: dict(case[key]) for key in AXES if key in case and key != "mesh"}
    transfers = axes.get("residency", {}).pop("transfers", "private")
    size = case.get("batch", 4)
    dtype = case.get("dtype", "float32")
    plan = plan_of(model_for(case), size=size, dtype=dtype, **axes)
    data = plan.model_dump(mode="json")
    if not alone:
        data["residency"]["transfers"] = transfers
        data["mesh"] = case["mesh"]
        world_size = case["mesh"].get("data", 1) * case["mesh"].get("perturb", 1)
        data["placement"] |= {"devices": ["cpu0"] * world_size, "hosts": list(case.get("hosts", ()))}
    return Plan.model_validate(data)


def lines_for(case, steps=STEPS):
    from tests.support.tiny import batches

    return batches(steps, size=case.get("batch", 4))


def trained(case, plan, **options):
    """Train, flushing on the way, and return what the steps found and the weights' hash; a rank alone accumulates."""
    from executors.runs.session import Session

    model = model_for(case, plan)
    options = {"checksums": True, "weight_decay": DECAY, **options}
    with Session(plan, model, learning_rate=RATE, seed=SEED, **options) as session:
        found = []
        for number, batch in enumerate(lines_for(case)):
            record = session.step(batch)
            found.append(
                (record.losses_plus, record.losses_minus, record.loss_base, record.projected_gradients)
            )
            if number == 1:
                session.verify()
        session.verify()
        return {"steps": found, "digest": session.digest(), "loss": session.loss(lines_for(case)[0])}


def run_cases(cases):
    """Run cases one after the other in this rank, and return what all ranks found."""
    import torch

    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group

    torch.set_num_threads(1)
    with process_group("cpu"):
        found = {}
        for name, case in cases.items():
            plan = plan_for(case)
            communicator = Communicator(plan.process_groups)
            own = trained(case, plan, communicator=communicator)
            found[name] = communicator.all_gather_json(own, name)
        return found


MODES = {
    "resident": {},
    "private": OFFLOADED,
    "shared": SHARED,
    "sliced": SLICED,
}


FAULTS = {
    "resident": ("bit at rest",),
    "private": ("learning rate",),
    "shared": ("batch",),
    "sliced": ("bit in a forward",),
}
"""Those that are planted in each mode."""


def plant_faults():
    """Plant faults on rank 1 of 3, in each mode, and return what is said at the next verification."""
    import torch

    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group
    from executors.runs.session import Session
    from tests.support import faults
    from tests.support.tiny import model_of

    torch.set_num_threads(1)
    output = {}
    with process_group("cpu"):
        communicator = Communicator(plan_for({"mesh": {"data": 3}}).process_groups)
        options = {"learning_rate": RATE, "weight_decay": DECAY, "communicator": communicator}
        for name, axes in MODES.items():
            case = {"mesh": {"data": 3}, "batch": 3, **axes}
            for fault in FAULTS[name]:
                checksums = name == "resident"
                with Session(plan_for(case), model_of("opt"), checksums=checksums, **options) as session:
                    lines = lines_for(case, faults.STEPS)
                    reported = faults.disturbed(session, lines, fault, victim=1)
                assert set(communicator.all_gather_json(reported, name)) == {reported}
                output[name, fault] = reported.removeprefix("after 4 steps, and not yet after 2, ")
    return output


def start_unlike():
    """Begin with other weights on rank 1, and return what is said."""
    from executors.ranks.launch import process_group
    from executors.ranks.rank_info import RankInfo
    from executors.runs.session import Session
    from tests.support.tiny import model_of
    from topology.errors import RunError

    with process_group("cpu"):
        plan = plan_for({"mesh": DDP})
        try:
            Session(plan, model_of("opt", seed=RankInfo.here().rank))
        except RunError as error:
            return error.message
        return "nothing was noticed"


def wait_for_peer():
    """Wait for an instruction that rank 1 never does, and leave what is said."""
    from executors.ranks import host_memory, missing_ranks
    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group
    from executors.ranks.rank_info import launch_directory, progress_of_this_rank
    from topology.errors import RunError
    from zosim.lowering import lower

    with process_group("cpu") as info:
        plan = plan_for({"mesh": DDP, **SHARED})
        communicator = Communicator(plan.process_groups, timeout_s=60)
        memory = host_memory.HostMemory(lower(plan, info.rank), communicator)
        given_up = []
        # The other rank is needed for what follows.
        missing_ranks.give_up = lambda ranks, _why: given_up.extend(ranks)
        progress_of_this_rank().note(f"rank {info.rank} at work")
        communicator.barrier("beginning")
        communicator.timeout_s, communicator.missing = 1, missing_ranks.MissingRanks(info.rank, 1)
        output, is_reported = "", launch_directory() / "told"
        if info.rank == 0:
            try:
                memory.wait("block.1/offload", 3)
            except RunError as error:
                output = error.message
            is_reported.touch()
        while not is_reported.exists():
            time.sleep(0.01)
        communicator.barrier("going on")
        memory.note("block.1/offload", 3)
        memory.wait("block.1/offload", 3)
        # Rank 0 may take as long as it wants to: it shows signs of life.
        communicator.on_rank_0(lambda: __import__("time").sleep(2.5), "sleeping")
        left = [str(path) for path in Path("/dev/shm").glob(f"zosim-host-{os.getpid()}-*")]  # rank 0 made it
        return communicator.on_rank_0(lambda: {"said": output, "left": left, "given_up": given_up}, "telling")


def forget_the_plan():
    """Make a session of one rank among two, and leave a refusal."""
    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group
    from executors.runs.session import Session
    from tests.support.tiny import model_of, plan_of
    from topology.errors import RunError

    with process_group("cpu"):
        model = model_of("opt")
        try:
            Session(plan_of(model), model, communicator=Communicator({}))
        except RunError as error:
            return error.message
        return "nothing was noticed"


def run_apart(settings):
    """Run as `settings` say, on every rank but 0 without access to the directory of the run."""
    from dataclasses import replace

    from executors.ranks.rank_info import RankInfo
    from executors.runs.run import run_in_rank
    from executors.runs.settings import RunOptions
    from zosim.config import merge

    unseen = replace(settings, run=merge(settings.run, RunOptions(out="/nonexistent/run")))
    return run_in_rank(settings if RankInfo.here().rank == 0 else unseen)


def run_unlike(settings):
    """Begin a run again and again, each time with something else on rank 1; return what is said each time."""
    from contextlib import nullcontext
    from dataclasses import replace
    from unittest import mock

    import torch

    from executors.ranks.communicator import default_communicator
    from executors.ranks.launch import process_group
    from executors.runs.run import Run
    from executors.runs.settings import RunOptions
    from topology.errors import RunError
    from zosim.config import merge

    changes = {
        "number of steps": {"learning_rate": settings.learning_rate.model_copy(update={"num_steps": 20})},
        "digest every": {"run": merge(settings.run, RunOptions(digest_every=5))},
        "num threads": mock.patch("torch.get_num_threads", return_value=7),
        "torch": mock.patch("torch.__version__", "2.99.0"),
        "instruction set": mock.patch("torch.backends.cpu.get_cpu_capability", return_value="NONE"),
        "zosim version": mock.patch("zosim.__version__", "0.0"),
    }
    torch.set_num_threads(1)
    output = {}
    with process_group("cpu", timeout_s=settings.run.timeout_s) as info:
        communicator = default_communicator(settings.plan.process_groups, "cpu", settings.run.timeout_s)
        for name, change in changes.items():
            is_setting = isinstance(change, dict)
            own = replace(settings, **change) if is_setting and info.rank else settings
            with nullcontext() if is_setting or not info.rank else change:
                try:
                    Run(own, communicator).run()
                except RunError as error:
                    output[name] = error.message
    return output


def run_with_fault(settings, step):
    """Run as `settings` say, with another learning rate on rank 1 in one step."""
    from executors.ranks.rank_info import RankInfo
    from executors.runs.run import run_in_rank
    from executors.runs.session import Session

    real = Session.begin_step

    def faulty(session, batch, **given):
        return real(session, batch, **given, **({"learning_rate": 1.0} if session.num_steps == step else {}))

    if RankInfo.here().rank == 1:
        Session.begin_step = faulty
    return run_in_rank(settings)


def run_astray(settings, fault, step, end, victim):
    """Run as `settings` say, rank `victim` with a fault in one step, and the last rank dead before another."""
    from executors.ranks.rank_info import RankInfo
    from executors.runs.run import run_in_rank
    from executors.runs.session import Session
    from tests.support import faults

    real, rank = Session.begin_step, RankInfo.here().rank

    def faulty(session, batch, **given):
        if session.num_steps == step and fault == "bit":
            faults.flip_at_rest(session, is_victim=rank == victim)
        elif session.num_steps == step and rank == victim and fault == "label":
            batch = {name: tensor.clone() for name, tensor in batch.items()}
            batch["labels"][batch["labels"] >= 0] += 1
        elif session.num_steps == step and rank == victim and fault == "seeds":
            given["seeds"] = tuple(seed + 1 for seed in session.seeds_of(step))
        if session.num_steps == end and rank == RankInfo.here().world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(session, batch, **given)

    Session.begin_step = faulty
    return run_in_rank(settings)
