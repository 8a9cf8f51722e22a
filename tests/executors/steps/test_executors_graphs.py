"""CUDA graphs of draws and blocks, on a simulated device: the same bits, fewer launches, and faults that are planted."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from costmodel.models.configs import LoRA
from executors.devices import on_stream
from executors.randomness.rng import generator_on
from executors.runs.adapters import attach
from executors.runs.records import LossNotFinite
from executors.runs.session import Session
from executors.steps.graphs import Graphs
from executors.steps.streams_accelerator import AcceleratorBackend
from proofs_checks.planting import Fault, altered
from proofs_checks.setups.ranks import on_all_ranks
from tests.support import distributed
from tests.support.distributed import AHEAD, OFFLOADED
from tests.support.simulated_cuda import seen_by, simulated
from tests.support.simulated_cuda.device import Stream as SimulatedStream
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import PlanError, RunError
from zosim.program.instructions import Stream

PLACEMENTS = {
    "resident": ("opt", {}),
    "offloaded": ("opt", OFFLOADED),
    "offloaded, ahead": ("opt", OFFLOADED | AHEAD),
    "two perturbations, offloaded": ("opt", OFFLOADED | {"estimator": {"num_perturbations": 2}}),
    "signs": ("opt", {"perturbations": {"distribution": "rademacher"}}),
    "llama, offloaded": ("llama", OFFLOADED),
    "factors, ahead": (
        "opt",
        OFFLOADED | {"perturbations": {"distribution": "lozo", "rank": 2, "sampled_ahead": True}},
    ),
    # Blocks take turns in staging buffers, and divide attention by their number.
    "unlike blocks": ("gpt2-unlike", OFFLOADED),
}


def trained(shape, axes, *, steps=4, graphs=True, change=None, num_blocks=2, **options):
    """Return the device, projected gradients with the weights that they lead to, and launches of the last step."""
    with simulated() as device:
        more = {"scale_attn_by_inverse_layer_idx": True} if shape == "gpt2-unlike" else {}
        model = model_of(shape.removesuffix("-unlike"), num_hidden_layers=num_blocks + 2 * len(more), **more)
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


@pytest.mark.crossed(quick=8, slow=2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_graphs_find_the_same_bits_in_fewer_launches(placement):
    device, numbers, launches = trained(*PLACEMENTS[placement])
    _, wanted, most = trained(*PLACEMENTS[placement], graphs=False)
    assert numbers == wanted
    assert device.findings == []
    assert launches < (0.9 if placement.startswith("factors") else 0.7) * most  # factors are drawn one by one


@pytest.mark.slow
def test_accumulated_losses_have_graphs_of_their_own():
    device, numbers, _ = trained("opt", {}, num_micro_batches=3)
    assert numbers == trained("opt", {}, graphs=False, num_micro_batches=3)[1]
    assert device.findings == []


@pytest.mark.slow
@pytest.mark.crossed(slow=2)
@pytest.mark.parametrize("axes", [{}, OFFLOADED], ids=["resident", "offloaded"])
def test_adapters_that_grow_are_captured_anew(axes):
    """When a window closes, blocks read more of the memory of staging buffers, at the same addresses."""
    found = []
    for graphs in (True, False):
        with simulated() as device:
            model = model_of("opt", num_hidden_layers=2)
            attach(model, LoRA(rank=2, target_modules=("q_proj", "fc2"), lazy_steps=2, max_rank=6))
            with Session(
                plan_of(model, **axes), model, learning_rate=1e-1, device="cuda:0", graphs=graphs
            ) as session:
                found.append([session.step(batch).projected_gradients for batch in batches(8)])
        assert device.findings == []
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", [{"mesh": {"perturb": 2}, **OFFLOADED}], ids=["perturb, private"])
def test_ranks_whose_streams_have_threads_find_the_same_bits(case):
    """What waits for another rank has a thread for each stream, which goes on to copy while blocks are captured."""
    found = []
    for graphs in (True, False):
        with simulated() as device:
            plan = distributed.plan_for(case)
            models = [distributed.model_for(case, plan) for _ in range(plan.placement.world_size)]

            def rank(number, communicator, *, models=models, plan=plan, device=device, graphs=graphs):
                options = {"communicator": communicator, "learning_rate": 1e-2, "device": "cuda:0"}
                with seen_by(device), Session(plan, models[number], graphs=graphs, **options) as session:
                    lines = distributed.lines_for(case, 3)
                    return [session.step(batch).projected_gradients for batch in lines], session.digest()

            found.append(on_all_ranks(plan, rank))
        assert device.findings == []
    assert found[0] == found[1]


def buffers_elsewhere(session, step):
    """Let the blocks' staging buffers be other memory from the third step on."""
    if step == 3:
        session.flush()
        store = session.interpreter.store
        for buffer in session.program.buffers:
            if buffer.role == "staging buffers" and buffer.space == "device":
                vars(session).setdefault("kept", []).append(
                    store._flat[buffer.name]
                )  # or the new memory may be the old
                store.free(buffer.name)
                store.allocate(buffer.name)


def test_staging_buffers_that_move_are_captured_anew():
    device, numbers, _ = trained(*PLACEMENTS["offloaded"], change=buffers_elsewhere)
    assert numbers == trained(*PLACEMENTS["offloaded"], graphs=False, change=buffers_elsewhere)[1]
    assert device.findings == []


GRAPHS = "executors.steps.graphs:Graphs"


def anywhere(shipped, self, signature, *rest, states=(), **named):
    if states:  # of a block, whose signature ends with what its staging buffers hold, and where
        signature = (*signature[:4], *((0, *layout) for _, *layout in signature[4:]))
    shipped(self, signature, *rest, states=states, **named)


def one_pool(shipped, self, *given):
    for pool in list(self._pools.values())[:1]:
        self._pools.setdefault(torch.accelerator.current_stream(self._device).stream_id, pool)
    return shipped(self, *given)


def captured_on(stream_of):
    """Capture on a stream that torch is asked for when it is simulated."""
    return lambda shipped, self, *given: shipped(
        altered(self, _capture_stream=lambda: stream_of(torch, self._device)), *given
    )


def replayed_elsewhere(shipped, self, *given):
    graph = shipped(self, *given)

    def replay():
        with on_stream(self._capture_stream()):
            graph.replay()

    return graph and SimpleNamespace(replay=replay)


def launched_once(shipped, self, *given):
    graph = shipped(self, *given)
    launches = iter([graph.replay] if graph else ())

    def replay():
        next(launches, int)()

    return graph and SimpleNamespace(replay=replay)


def not_awaited(shipped, self, *given):
    capture, wait = self._capture_stream(), SimulatedStream.wait_stream

    def waits(one, other):
        if one.stream_id == capture.stream_id:
            wait(one, other)

    with mock.patch.object(SimulatedStream, "wait_stream", waits):
        return shipped(self, *given)


def captured_where_sampled(shipped, self, device):
    shipped(self, device)
    self._capture_streams = dict.fromkeys(self._capture_streams, self._streams[Stream.SAMPLE])


def verified_unseen(_shipped, _self, entry, caller, *_rest):
    entry.graph.replay()
    entry.verified_for.add(caller)


CAPTURE = f"{GRAPHS}._capture"
FAULTS = {
    "a graph is replayed wherever the staging buffers are": ("offloaded", f"{GRAPHS}.run", anywhere),
    "the graphs of all streams share temporaries": ("offloaded, ahead", CAPTURE, one_pool),
    "a block reads the hidden state of the step that was captured": ("resident", f"{GRAPHS}.placed", lambda _shipped, self, key, tensor: self.static_buffer(key, tensor)),
    "a generator is not told of the graph": ("resident", CAPTURE, lambda shipped, self, launch, generators: shipped(self, partial(launch, *generators), ())),
    "the default stream is captured": ("resident", CAPTURE, captured_on(lambda torch, device: torch.accelerator.current_stream(device))),
    "a stream is asked for at each capture": ("resident", CAPTURE, captured_on(lambda torch, device: torch.cuda.Stream(device))),
    "another stream replays": ("resident", CAPTURE, replayed_elsewhere),
    "what was captured is launched once": ("resident", CAPTURE, launched_once),
    "a capture is not waited for": ("resident", CAPTURE, not_awaited),
    "the default stream's workspace is all there is": ("resident", f"{GRAPHS}._make_workspace", lambda *_: None),
    "blocks are captured where perturbations are drawn": ("factors, ahead", "executors.steps.streams_accelerator:AcceleratorBackend.__init__", captured_where_sampled),
    "unlike blocks share a graph": ("unlike blocks", f"{GRAPHS}._verify", verified_unseen),
}  # fmt: skip


def seen(device_and_more, wanted):
    device, numbers, _ = device_and_more
    return bool(device.findings) or numbers != wanted


@pytest.mark.crossed(quick=12, slow=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_graphs_is_found(fault):
    placement, *where = FAULTS[fault]
    _, wanted, _ = trained(*PLACEMENTS[placement], graphs=False, change=buffers_elsewhere)
    with Fault(fault, *where).apply():
        try:
            is_found = seen(trained(*PLACEMENTS[placement], change=buffers_elsewhere), wanted)
        except LossNotFinite:  # what a capture leaves is no number
            is_found = True
        except RunError as error:
            is_found = "captur" in error.message
    assert is_found


@pytest.fixture
def there():
    """A simulated device, with the graphs of a backend on it."""
    with simulated() as device:
        backend = AcceleratorBackend("cuda:0")
        yield device, Graphs(backend.device, backend.capture_stream)


def test_a_capture_computes_nothing(there):
    device, graphs = there
    here = torch.zeros(4, device="cuda")

    def add():
        here.add_(torch.ones(4, device="cuda"))

    for _ in range(2):  # cuBLAS's workspace is made once
        graphs.run("add", add)
    assert here.tolist() == [2] * 4
    launches = device.launches.total()
    graphs.run("add", add)
    assert device.launches.total() - launches == 1
    assert here.tolist() == [3] * 4
    assert device.findings == []


def number_of_graphs(axes, *, num_blocks, lengths=(9,), repeats=3):
    with simulated() as device:
        model = model_of("opt", num_hidden_layers=num_blocks)
        plan = plan_of(model, seq=max(lengths), **axes)
        before = len(device.streams)
        with Session(plan, model, learning_rate=1e-2, device="cuda:0", graphs=True) as session:
            for length in lengths:
                for batch in batches(repeats, seq=length):
                    session.step(batch)
            return len(session.interpreter._context.graphs), len(device.streams) - before, device.findings


@pytest.mark.slow
def test_blocks_that_take_turns_in_staging_buffers_and_equal_draws_share_graphs():
    """Three staging buffers at two points, and six kinds of draws; each of a step's streams is a native one of its own."""
    few, *_ = number_of_graphs(OFFLOADED, num_blocks=4)
    more, num_streams, findings = number_of_graphs(OFFLOADED, num_blocks=8)
    assert more == few <= 3 * 2 + 6
    assert num_streams <= 9
    assert findings == []


def test_batches_of_many_shapes_have_few_graphs(monkeypatch):
    monkeypatch.setattr("executors.steps.graphs._MOST_SHAPES", 2)
    with pytest.warns(RuntimeWarning, match="more than 2 shapes"):
        number, _, findings = number_of_graphs({}, num_blocks=1, lengths=range(7, 12), repeats=2)
    assert number <= 2 * 2 + 6  # two points, and six kinds of draws
    assert findings == []


def test_what_cannot_be_captured_is_launched_one_by_one_with_a_warning_that_says_why(there):
    device, graphs = there
    here, sampled = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    asks = True

    def launch(generator):
        here.add_(1)
        sampled.normal_(generator=generator)
        if asks:
            here.sum().item()

    for number in range(4):
        generator = graphs.generator().manual_seed(number)
        if number == 1:
            with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing"):
                graphs.run("ask", launch, generators=(generator,))
        else:
            graphs.run("ask", launch, generators=(generator,))
        expected = torch.zeros(4, device="cuda").normal_(generator=generator_on("cuda", number))
        assert sampled.tolist() == expected.tolist()
    assert here.tolist() == [4] * 4
    asks = False
    for _ in range(3):  # others go on to have graphs
        graphs.run("do not ask", launch, generators=(graphs.generator(),))
    assert len(graphs) == 1
    assert device.findings == []


def test_a_graph_of_memory_that_is_given_back_is_captured_anew(there):
    device, graphs = there
    total, address = torch.zeros(64, device="cuda"), bytearray(256)
    for _ in range(3):
        source = taken_at(address, device).fill_(2)
        for _ in range(3):
            graphs.run("add", partial(total.add_, source), memory=(source, total))
    assert total.tolist() == [18] * 64
    assert len(graphs) == 3
    assert device.findings == []


def test_graphs_of_two_sessions_with_one_stream_to_capture_on_wait_for_each_other():
    with simulated() as device:
        backend = AcceleratorBackend("cuda:0")
        left, made = torch.ones((8, 8), device="cuda"), torch.zeros((8, 8), device="cuda")

        def multiply():
            made.copy_(left @ left)

        for _ in range(2):
            graphs = Graphs(backend.device, backend.capture_stream)
            for _ in range(3):
                graphs.run("multiply", multiply)
    assert device.findings == []


@pytest.mark.parametrize("is_one", [False, True])
def test_graphs_of_two_streams_have_two_generators(is_one, there):
    device, graphs = there
    side, sampled = torch.cuda.Stream(), [torch.zeros(4, device="cuda") for _ in range(2)]
    side.wait_stream(torch.cuda.current_stream())
    for stream, here in ((torch.cuda.current_stream(), sampled[0]), (side, sampled[1])):
        generator = graphs.generator()
        with torch.cuda.stream(stream):
            generator = generator if is_one else graphs.generator()
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(generator)
            captured(lambda: here.normal_(generator=generator), graph=graph)  # noqa: B023 - called at once
            graph.replay()
    assert kinds(device) == ({"race"} if is_one else set())


# -- what the simulated device calls a finding ---------------------------------------------------------------------------


def captured(launch, *, graph=None, stream=None, pool=None):
    graph, stream = graph or torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        launch()
        graph.capture_end()
    return graph


def kinds(device):
    return {finding.kind for finding in device.findings}


def test_torch_goes_round_32_streams():
    with simulated():
        streams = [torch.cuda.Stream() for _ in range(33)]
    assert len({stream.stream_id for stream in streams}) == 32
    assert streams[32].stream_id == streams[0].stream_id


def test_the_streams_of_a_rank_are_apart_wherever_torch_is_in_its_round():
    with simulated():
        for _ in range(40):
            torch.cuda.Stream()
            backend = AcceleratorBackend("cuda:0")
            streams = [*backend._streams.values(), *backend._capture_streams.values()]
            assert len({stream.stream_id for stream in streams}) == len(streams) == 10


def test_work_of_another_thread_on_a_stream_that_is_captured_is_found():
    with simulated() as device:
        stream, here = torch.cuda.Stream(), torch.zeros(4, device="cuda")

        def elsewhere():
            with seen_by(device), torch.cuda.stream(stream):
                torch.ones(4, device="cuda")

        def launch():
            here.add_(1)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

        torch.cuda.synchronize()
        captured(launch, stream=stream)
    assert kinds(device) == {"captured"}


def test_a_pool_of_two_streams_is_found():
    with simulated() as device:
        here, pool = torch.zeros(4, device="cuda"), torch.cuda.graph_pool_handle()
        graphs = [captured(lambda: here.add_(1), pool=pool) for _ in range(2)]
        assert kinds(device) == {"pool"}
        assert len(graphs) == 2


def test_a_pool_without_graphs_cannot_be_captured_into_again():
    with simulated() as device:
        here, pool = torch.zeros(4, device="cuda"), torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        captured(lambda: here.add_(1), pool=pool, stream=stream)
        with pytest.raises(RuntimeError, match="use_count"):
            captured(lambda: here.add_(1), pool=pool, stream=stream)
        assert kinds(device) == {"pool"}


def test_a_replay_on_two_streams_is_found_even_where_one_waits_for_the_other():
    with simulated() as device:
        here, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        graph = captured(lambda: here.add_(1))
        graph.replay()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
    assert kinds(device) == {"pool"}


def test_a_replay_while_another_stream_writes_what_it_reads_is_found():
    with simulated() as device:
        here, made, side = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = captured(lambda: made.copy_(here))
        with torch.cuda.stream(side):
            here.fill_(1)
        graph.replay()
    assert kinds(device) == {"race"}


def taken_at(address, device):
    """Return memory of the device that begins where `address` does."""
    taken = torch.frombuffer(address, dtype=torch.float32)
    device.allocate(taken, "device")
    return taken


def test_a_replay_whose_memory_has_become_somebody_elses_is_found():
    with simulated() as device:
        made, address = torch.zeros(64, device="cuda"), bytearray(256)
        graph = captured(lambda: made.copy_(taken_at(address, device)))
        other = taken_at(address, device)
        graph.replay()
        assert other.data_ptr()
    assert kinds(device) == {"freed"}


@pytest.mark.parametrize("waits_for", ["what runs beside", "the capture"])
def test_a_dependency_between_a_capture_and_what_runs_beside_is_refused(waits_for):
    with simulated():
        here, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()

        def launch():
            here.add_(1)
            stream = torch.cuda.current_stream()
            one, other = (stream, side) if waits_for == "what runs beside" else (side, stream)
            one.wait_stream(other)

        with pytest.raises(RuntimeError, match=r"uncaptured work|unjoined work"):
            captured(launch)


def test_graphs_are_refused_where_none_can_be():
    model = model_of("opt")
    with pytest.raises(PlanError, match="needs a CUDA device"):
        Session(plan_of(model), model, graphs=True)
    plan = plan_of(model, residency={"blocks": "offloaded", "reuse_staging_buffers": False})
    with simulated(), pytest.raises(PlanError, match="resident blocks"):
        Session(plan, model, device="cuda:0", graphs=True)
