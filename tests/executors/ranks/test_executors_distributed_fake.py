"""At sizes that cannot be run here: the calls and the bytes are those that the program says.

torch's fake backend moves no data. So what others would send is not there, and what is checked is what is asked of the
wire.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executors.models.model import SegmentedModel
from executors.ranks import communicator as communicator_module
from executors.ranks.communicator import Communicator
from executors.steps.interpreter import Hyperparameters, Interpreter
from executors.steps.streams import backend_for
from tests.support.distributed import SLICED, plan_for
from tests.support.tiny import batches, model_of
from zosim.lowering import lower
from zosim.program.operations import Collective

STEPS = 2

SIZES = {
    "pertp": {"mesh": {"perturb": 2}, "hosts": 1},
    "2d-8": {"mesh": {"data": 4, "perturb": 2}, "hosts": 1},
    "2d-64-data-inner": {"mesh": {"data": 16, "perturb": 4, "inner": "data"}, "hosts": 8},
    "ddp-1024": {"mesh": {"data": 1024}, "hosts": 128},
    "2d-1024": {"mesh": {"data": 512, "perturb": 2}, "hosts": 128},
}


@pytest.fixture
def fake(request):
    world_size = request.param
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield world_size
    dist.destroy_process_group()


def world_size_of(name):
    mesh = SIZES[name]["mesh"]
    return mesh.get("data", 1) * mesh.get("perturb", 1)


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("axes", [{}, SLICED], ids=["resident", "sliced"])
@pytest.mark.parametrize(
    ("fake", "name"), [(world_size_of(name), name) for name in SIZES], indirect=["fake"], ids=SIZES
)
def test_calls_and_bytes_are_those_of_the_program(fake, name, axes, monkeypatch):
    torch.set_num_threads(1)
    size = SIZES[name]
    per_host = fake // size["hosts"]
    case = {
        "mesh": size["mesh"],
        "batch": max(2, size["mesh"].get("data", 1)),
        "hosts": [f"host{rank // per_host}" for rank in range(fake)],
        "estimator": {"num_perturbations": 2},
        "perturbations": {"rng": "counter"},
        **axes,
    }
    plan = plan_for(case)
    program = lower(plan, 0)
    calls = Counter()

    def spied(gathered, own, *, group):
        members = dist.get_world_size(group)
        calls[members, gathered.numel() * gathered.element_size()] += 1
        real(gathered, own, group=group)
        if gathered.dtype == torch.float64:
            gathered.view(-1, 2)[:, 1] = 1.0  # labels of the losses that others would have sent

    real = communicator_module.all_gather_flat
    model, communicator = model_of("opt"), Communicator(plan.process_groups)
    interpreter = Interpreter(
        program, SegmentedModel(model), Hyperparameters(1e-3), backend_for("cpu"), communicator=communicator
    )
    monkeypatch.setattr(communicator_module, "all_gather_flat", spied)
    rows = plan.rows_of(0)
    for step, batch in enumerate(batches(STEPS, size=2)):
        own = {key: tensor[: len(rows)] for key, tensor in batch.items()}
        interpreter.step(own, (step, step + 7), 1e-3)
    interpreter.backend.drain()
    wanted_calls, wanted_bytes, wanted = Counter(), Counter(), Counter()
    for instruction in program.step:
        if isinstance(instruction.op, Collective):
            group, members = (
                instruction.op.process_group,
                program.process_groups[instruction.op.process_group],
            )
            wanted_calls[group] += STEPS * len(instruction.writes)
            wanted_bytes[group] += STEPS * instruction.work.link_bytes
            for write in instruction.writes:
                wanted[members, write.size_bytes] += STEPS
    interpreter.close()
    assert communicator.num_calls == wanted_calls
    assert communicator.num_bytes == wanted_bytes
    assert calls == wanted
    assert sum(wanted_bytes.values()) > 0
