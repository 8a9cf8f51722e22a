"""CUDA graphs of draws and blocks, on a simulated device: the same bits, fewer launches, and faults that are planted."""

from __future__ import annotations

import pytest
import torch

from executors.runs.records import LossNotFinite
from executors.runs.session import Session
from executors.steps.graphs import Graphs
from proofs_checks.mutation import Mutant
from tests.support.distributed import OFFLOADED
from tests.support.simulated_cuda import simulated
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import PlanError, RunError

AHEAD = {"directions": {"drawn_ahead": True}}
PLACEMENTS = {
    "resident": ("opt", {}),
    "offloaded": ("opt", OFFLOADED),
    "offloaded, ahead": ("opt", OFFLOADED | AHEAD),
    "two queries, offloaded": ("opt", OFFLOADED | {"estimator": {"num_queries": 2}}),
    "signs": ("opt", {"directions": {"distribution": "rademacher"}}),
    "llama, offloaded": ("llama", OFFLOADED),
}


def trained(shape, axes, *, steps=4, graphs=True, change=None, **options):
    """Return the device, projected gradients with the weights that they lead to, and launches of the last step."""
    with simulated() as device:
        model = model_of(shape, num_hidden_layers=2)
        plan = plan_of(model, **axes)
        numbers = []
        with Session(plan, model, learning_rate=1e-2, device="cuda:0", graphs=graphs, **options) as session:
            for step, batch in enumerate(batches(steps)):
                if change is not None:
                    change(session, step)
                before = device.launches.total()
                numbers.append(session.step(batch).projected_gradients)
                launches = device.launches.total() - before
            numbers.append(session.digest())
        return device, numbers, launches


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_graphs_find_the_same_bits_in_fewer_launches(placement):
    device, numbers, launches = trained(*PLACEMENTS[placement])
    _, wanted, most = trained(*PLACEMENTS[placement], graphs=False)
    assert numbers == wanted
    assert device.findings == []
    assert launches < 0.7 * most


def test_accumulated_losses_have_graphs_of_their_own():
    device, numbers, _ = trained("opt", {}, num_micro_batches=3)
    assert numbers == trained("opt", {}, graphs=False, num_micro_batches=3)[1]
    assert device.findings == []


def slots_elsewhere(session, step):
    """Let the blocks' slots be other memory from the third step on."""
    if step == 3:
        session.flush()
        store = session.interpreter.store
        for buffer in session.program.buffers:
            if buffer.role == "slots" and buffer.space == "device":
                session.kept = store._flat[buffer.name]  # or the new memory may be the old
                store.free(buffer.name)
                store.allocate(buffer.name)


def test_slots_that_move_are_captured_anew():
    device, numbers, _ = trained(*PLACEMENTS["offloaded"], change=slots_elsewhere)
    assert numbers == trained(*PLACEMENTS["offloaded"], graphs=False, change=slots_elsewhere)[1]
    assert device.findings == []


GRAPHS = "executors.steps.graphs:Graphs"
FAULTS = {
    "a graph is replayed wherever the slots are": ("offloaded", f"{GRAPHS}.run", "captured.signature != signature", "False"),
    "the graphs of all streams share temporaries": ("offloaded, ahead", f"{GRAPHS}._capture", "current.stream_id", "0"),
    "a block reads the hidden state of the step that was captured": ("resident", f"{GRAPHS}.placed", "_whole(place).copy_(_whole(tensor))", "pass"),
    "a generator is not told of the graph": ("resident", f"{GRAPHS}._capture", "graph.register_generator_state(generator)", "pass"),
    "the default stream is captured": ("resident", f"{GRAPHS}._capture", "with on_stream(stream):", "if True:"),
    "what was captured is not launched": ("resident", f"{GRAPHS}.run", "captured.graph = self._capture(launch, generators)", "captured.graph = self._capture(launch, generators); return"),
    "one graph serves all blocks": ("resident", f"{GRAPHS}.run", "captured.signature != signature", "captured.graph is not None and (captured := next(iter(self._captured.values()))) is None"),
}  # fmt: skip


def seen(device_and_more, wanted):
    device, numbers, _ = device_and_more
    return bool(device.findings) or numbers != wanted


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_graphs_is_found(fault):
    placement, *where = FAULTS[fault]
    _, wanted, _ = trained(*PLACEMENTS[placement], graphs=False, change=slots_elsewhere)
    with Mutant(fault, *where).apply():
        try:
            is_found = seen(trained(*PLACEMENTS[placement], change=slots_elsewhere), wanted)
        except LossNotFinite:  # what a capture leaves is no number
            is_found = True
        except RunError as error:
            is_found = "captur" in error.message
    assert is_found


def test_a_capture_computes_nothing():
    with simulated() as device:
        graphs, here = Graphs(torch.device("cuda:0")), torch.zeros(4, device="cuda")

        def add():
            here.add_(torch.ones(4, device="cuda"))

        graphs.run("add", (), add)
        assert here.tolist() == [1] * 4
        launches = device.launches.total()
        graphs.run("add", (), add)
        graphs.run("add", (), add)
        assert device.launches.total() - launches == 2
        assert here.tolist() == [3] * 4
    assert device.findings == []


def test_graphs_are_refused_where_none_can_be():
    model = model_of("opt")
    with pytest.raises(PlanError, match="needs a CUDA device"):
        Session(plan_of(model), model, graphs=True)
    plan = plan_of(model, residency={"blocks": "offloaded", "reuse_slots": False})
    with simulated(), pytest.raises(PlanError, match="blocks that stay"):
        Session(plan, model, device="cuda:0", graphs=True)
