"""Sessions of several ranks: cases by name, and the workers that tests start to run them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

STEPS, RATE, DECAY, SEED = 4, 1e-2, 0.1, 5

OFFLOADED = {"residency": {"blocks": "offloaded"}, "runtime": {"update": "delayed"}}
SHARED = {"residency": {"blocks": "offloaded", "transfers": "shared"}, "runtime": {"update": "delayed"}}
SLICED = {"residency": {"blocks": "offloaded", "transfers": "sliced"}, "runtime": {"update": "delayed"}}
PERTP, DDP = {"perturb": 2}, {"data": 2}
COUNTER = {"rng": "counter"}

PAIRS = {
    "pertp": {"mesh": PERTP},
    "pertp-sweep": {"mesh": PERTP, "runtime": {"traversal": "sweep"}},
    "pertp-bfloat16": {"mesh": PERTP, "dtype": "bfloat16"},
    "pertp-forward": {"mesh": PERTP, "estimator": {"difference": "forward"}},
    "pertp-offloaded": {"mesh": PERTP, **OFFLOADED},
    "pertp-shared": {"mesh": PERTP, **SHARED},
    "pertp-sliced": {"mesh": PERTP, "model": "opt-untied", **SLICED},
    "pertp-sliced-immediate": {
        "mesh": PERTP,
        "residency": {"blocks": "offloaded", "transfers": "sliced"},
    },
    "pertp-sliced-two-hosts": {
        "mesh": PERTP,
        "hosts": ("a", "b"),
        "residency": {"blocks": "offloaded", "transfers": "sliced", "share_group": "world"},
        "runtime": {"update": "delayed"},
    },
    "pertp-edges-offloaded": {
        "mesh": PERTP,
        "model": "opt-untied",
        "residency": {"blocks": "offloaded", "edges": "offloaded", "transfers": "sliced"},
        "runtime": {"update": "delayed"},
        "estimator": COUNTER,
    },
    "pertp-lossy": {
        "mesh": PERTP,
        "precision": {"transfer": "bfloat16"},
        **SLICED,
    },
    "ddp": {"mesh": DDP},
    "ddp-shared": {"mesh": DDP, "estimator": COUNTER, **SHARED},
    "ddp-shared-fresh-slots": {
        "mesh": DDP,
        "residency": {"blocks": "offloaded", "transfers": "shared", "reuse_slots": False},
        "runtime": {"update": "delayed"},
    },
    "ddp-sliced-one-slot": {
        "mesh": DDP,
        "residency": {"blocks": "offloaded", "transfers": "sliced", "num_slots": 1},
        "runtime": {"update": "delayed", "draw_ahead": True},
    },
    "ddp-unequal": {"mesh": DDP, "batch": 5, **SLICED},
    "ddp-unequal-resident": {"mesh": DDP, "batch": 3},
}

FOURS = {
    "2d": {"mesh": {"data": 2, "perturb": 2}},
    "2d-data-inner": {"mesh": {"data": 2, "perturb": 2, "inner": "data"}, "estimator": COUNTER, **SHARED},
    "2d-sliced": {"mesh": {"data": 2, "perturb": 2}, "model": "llama-tied", **SLICED},
    "2d-two-hosts": {"mesh": {"data": 2, "perturb": 2}, "hosts": ("a", "a", "b", "b"), **SLICED},
    "queries": {"mesh": {"perturb": 4}, "estimator": {"num_queries": 2}, **SHARED},
    "queries-forward-unequal": {
        "mesh": {"perturb": 4},
        "estimator": {"num_queries": 4, "difference": "forward", "rng": "counter"},
    },
    "ddp-of-4": {"mesh": {"data": 4}, "batch": 8, **OFFLOADED},
}


def plan_for(case, *, alone=False):
    """Return the plan of a case, or what a rank alone does in its place."""
    from tiny import model_of, plan_of

    from zosim.plan import Plan

    axes = {key: dict(case.get(key, {})) for key in ("estimator", "residency", "runtime", "precision")}
    shared_out = {
        name: axes["residency"].pop(name)
        for name in ("transfers", "share_group")
        if name in axes["residency"]
    }
    size = case.get("batch", 4)
    dtype = case.get("dtype", "float32")
    plan = plan_of(model_of(case.get("model", "opt")), size=size, dtype=dtype, **axes)
    data = plan.model_dump(mode="json")
    if not alone:
        data["residency"] |= shared_out
        data["mesh"] = case["mesh"]
        world_size = case["mesh"].get("data", 1) * case["mesh"].get("perturb", 1)
        data["placement"] |= {"devices": ["cpu0"] * world_size, "hosts": list(case.get("hosts", ()))}
    return Plan.model_validate(data)


def lines_for(case, steps=STEPS):
    from tiny import batches

    return batches(steps, size=case.get("batch", 4))


def trained(case, plan, **options):
    """Train, flushing on the way, and return what the steps found and the weights' hash; a rank alone accumulates."""
    import torch
    from tiny import model_of

    from executors.session import Session

    model = model_of(case.get("model", "opt"), getattr(torch, case.get("dtype", "float32")))
    with Session(plan, model, learning_rate=RATE, weight_decay=DECAY, seed=SEED, **options) as session:
        found = []
        for number, batch in enumerate(lines_for(case)):
            record = session.step(batch)
            found.append(
                (record.losses_plus, record.losses_minus, record.loss_base, record.projected_gradients)
            )
            if number == 1:
                session.compare_replicas()
        session.compare_replicas()
        return {"steps": found, "digest": session.digest(), "loss": session.loss(lines_for(case)[0])}


def run_cases(cases):
    """Run cases one after the other in this rank, and return what all ranks found."""
    import torch

    from executors.communicator import Communicator
    from executors.launch import process_group

    torch.set_num_threads(1)
    with process_group("cpu"):
        found = {}
        for name, case in cases.items():
            plan = plan_for(case)
            communicator = Communicator(plan.groups)
            own = trained(case, plan, communicator=communicator)
            told = communicator.gathered_bytes(json.dumps(own).encode(), name)
            found[name] = [json.loads(text) for text in told]
        return found
