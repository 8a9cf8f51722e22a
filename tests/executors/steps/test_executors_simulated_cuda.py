"""The CUDA backend on a simulated device: the right numbers, and nothing left to chance; faults that are planted are found."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from costmodel.formats.codecs import codec_spec
from costmodel.models.configs import LoRA
from executors.codecs import codec_of, decode, messages_of
from executors.devices import on_stream
from executors.low_bits import joint_updates, linear
from executors.models.packing import pack, packed_attention
from executors.randomness.rng import generator_on
from executors.randomness.rounded import RoundedSampler
from executors.runs.adapters import attach
from executors.runs.replay import machine_differences
from executors.runs.session import Session
from executors.steps import arithmetic
from executors.steps.streams_accelerator import AcceleratorBackend
from proofs_checks.planting import Fault, altered
from proofs_checks.setups.ranks import on_all_ranks
from tests.support import distributed, matrix, staged
from tests.support.command import rows_of, saved_lines, saved_model, zosim
from tests.support.distributed import AHEAD, FOURS, FRESH, OFFLOADED, PAIRS, SHARED, SLICED
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.simulated_cuda import seen_by, simulated
from tests.support.simulated_cuda.clocks import Shadow, Use
from tests.support.simulated_cuda.device import Stream
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import CodecError
from zosim.program.instructions import Stream as StreamName

SPARSE = {"low_bits": {"weights": "int8", "sparsity": 0.5}}
PLACEMENTS = {
    "resident": {},
    "full": {"schedule": {"traversal": "full"}},
    "kept": {"perturbations": {"kept": True}},
    "perturbations": {"estimator": {"num_perturbations": 2}},
    "copies": {"weights": {"perturbation": "copies"}},
    "copies, ahead": {"weights": {"perturbation": "copies"}, **AHEAD},
    "copies, ahead, forward": {
        "weights": {"perturbation": "copies"},
        "estimator": {"difference": "forward"},
        **AHEAD,
    },
    "offloaded": OFFLOADED,
    "offloaded, immediate": {"residency": {"blocks": "offloaded"}},
    "offloaded, ahead": OFFLOADED | AHEAD,
    "offloaded, fresh buffers": FRESH,
    "offloaded, in bfloat16": {
        "residency": {"blocks": "offloaded", "transfer_dtype": "bfloat16"},
        "schedule": {"update": "delayed"},
    },
    "offloaded, counter": OFFLOADED | {"perturbations": {"rng": "counter"}},
    "offloaded, two perturbations": OFFLOADED | {"estimator": {"num_perturbations": 2}},
    "offloaded, int8": OFFLOADED | {"low_bits": {"weights": "int8"}},
    "offloaded, sparse int8, ahead, two perturbations": OFFLOADED
    | AHEAD
    | SPARSE
    | {"estimator": {"num_perturbations": 2}},
    "int4 along 4 bits": {"low_bits": {"weights": "int4", "perturbation_bits": 4}},
    "offloaded, sparse W8A8": OFFLOADED
    | {"low_bits": {"weights": "int8", "activations": "int8-token", "sparsity": 0.5}},
    "offloaded, LoRA over int8": OFFLOADED
    | {"lora": LoRA(rank=2, target_modules=("q_proj", "fc2")), "low_bits": {"weights": "int8"}},
}
LITERAL = ("resident", "offloaded", "offloaded, ahead", "offloaded, fresh buffers")
"""Placements whose every bit is the literal loop's."""

SEVERAL = {
    "perturb": {"mesh": {"perturb": 2}},
    "perturb, private": {"mesh": {"perturb": 2}, **OFFLOADED},
    "data, shared": {"mesh": {"data": 2}, **SHARED},
    "perturb, sliced": {"mesh": {"perturb": 2}, **SLICED},
}


def trained(axes, *, shape="opt", dtype="float32", steps=3, change=None):
    """Return the device, and what a session on it found."""
    with simulated() as device:
        model = model_of(shape, getattr(torch, dtype), num_hidden_layers=2)
        axes = dict(axes)
        if (lora := axes.pop("lora", None)) is not None:
            attach(model, lora)
        plan = plan_of(model, dtype=dtype, **axes)
        options = {"learning_rate": 1e-2, "weight_decay": 0.1, "device": "cuda:0"}
        with Session(plan, model, **options) as session:
            if change is not None:
                change(session)
            numbers = [session.step(batch).projected_gradients for batch in batches(steps)]
            session.flush()
        return device, numbers


@pytest.mark.crossed(quick=9, slow=2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_placement_leaves_anything_to_chance(placement):
    device, numbers = trained(PLACEMENTS[placement])
    assert device.findings == []
    assert len(set(numbers)) == 3


def found_by(case, *, graphs):
    """Return the device, and what a session of a case found on it."""
    plan, model = case.made()
    with simulated() as device:
        options = {"learning_rate": 1e-2, "weight_decay": 0.1, "device": "cuda:0", "graphs": graphs}
        with Session(plan, model, **options) as session:
            numbers = [session.step(batch).projected_gradients for batch in matrix.lines()]
            session.flush()
            return device, [*numbers, session.digest()]


CLOSING_IN_8_BITS = matrix.Case.of({"shape": "llama", "tuned": "windows", "residency.blocks": "offloaded", "residency.transfer_dtype": "float8_e4m3"})  # fmt: skip


@pytest.mark.crossed(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("number", [None, *range(20)])  # windows close on a host in 8 bits; at random
def test_nor_does_another_plan(number):
    case = CLOSING_IN_8_BITS if number is None else matrix.random_case_of_one_rank(number)
    device, numbers = found_by(case, graphs=False)
    assert device.findings == [], case
    if case["residency.reuse_staging_buffers"]:
        device, same = found_by(case, graphs=True)
        assert device.findings == [], case
        assert same == numbers


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("placement", ["resident", "offloaded"])
def test_nor_does_another_family(placement, shape):
    device, _ = trained(PLACEMENTS[placement], shape=shape)
    assert device.findings == []


@pytest.mark.crossed(quick=4, slow=3)
@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        pytest.param(placement, dtype, marks=() if (row + column) % 2 else pytest.mark.slow)
        for row, placement in enumerate(LITERAL)
        for column, dtype in enumerate(["float32", "bfloat16"])
    ],
)
def test_the_literal_loop_on_the_device_finds_the_same_bits(placement, dtype):
    with simulated() as device:
        reference = model_of("opt", getattr(torch, dtype))
        tuned = copy.deepcopy(reference)
        reference.cuda()
        loop = LiteralMezo(reference, epsilon=1e-3, weight_decay=0.01)
        plan = plan_of(tuned, dtype=dtype, **PLACEMENTS[placement])
        with Session(plan, tuned, learning_rate=1e-3, weight_decay=0.01, device="cuda:0") as session:
            for step, batch in enumerate(batches(3)):
                moved = {name: tensor.cuda() for name, tensor in batch.items()}
                ((plus, minus, g),) = loop.step(moved, (step,), 1e-3)
                record = session.step(batch, seeds=(step,))
                assert (*record.losses_plus, *record.losses_minus, *record.projected_gradients) == (
                    plus,
                    minus,
                    g,
                )
            with session.unsharded_model() as whole:
                assert whole.get_input_embeddings().weight.is_cuda
                assert differing(reference, whole) == []
    assert device.findings == []


def trained_in(plan, case, model, **options):
    """Return projected gradients and a digest of the weights of three steps of a case."""
    lines = distributed.lines_for(case, 3)
    with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, device="cuda:0", **options) as session:
        return [session.step(batch).projected_gradients for batch in lines], session.digest()


def all_ranks(device, case):
    """Return what all ranks of a case find on one device."""
    plan = distributed.plan_for(case)
    # Made here: all threads draw from one generator.
    models = [distributed.model_for(case, plan) for _ in range(plan.placement.world_size)]

    def rank(number, communicator):
        with seen_by(device):
            return trained_in(plan, case, models[number], communicator=communicator)

    return on_all_ranks(plan, rank)


@pytest.mark.crossed(quick=4, slow=3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in SEVERAL.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in (PAIRS | FOURS).items()],
)
def test_ranks_on_one_device_find_what_a_rank_alone_does(case):
    shards = case["mesh"].get("data", 1)
    with simulated() as device:
        ranks = all_ranks(device, case)
        if case.get("batch", 4) % shards == 0:
            alone = distributed.plan_for(case, alone=True)
            ranks.append(
                trained_in(alone, case, distributed.model_for(case, alone), num_micro_batches=shards)
            )
    assert all(rank == ranks[0] for rank in ranks)
    assert device.findings == []


def test_a_run_is_resumed_from_its_log(tmp_path):
    """CUDA divides by a number as it multiplies by its reciprocal: the log's projected gradients are read as such."""
    lines, model = tmp_path / "data.jsonl", saved_model("opt", tmp_path)
    saved_lines(lines)
    words = ["run", "--model", model, "--data", lines, "--batch", 4, "--lr", "1e-3", "--device", "cuda:0"]
    words += ["--no-launch", "--no-tensorboard", "--residency", "resident"]
    with simulated():
        assert zosim(*words, "--steps", 2, "--out", tmp_path / "whole") == 0
        assert zosim(*words, "--steps", 1, "--out", tmp_path / "parts") == 0
        assert zosim(*words, "--steps", 2, "--out", tmp_path / "parts", "--resume") == 0
    rows = rows_of(tmp_path / "whole")
    divided = [(row["loss_plus"] - row["loss_minus"]) / 2e-3 for row in rows]
    as_on_cpu = [torch.tensor(row["loss_plus"]) - torch.tensor(row["loss_minus"]) for row in rows]
    assert [row["projected_grad"] for row in rows] != [(loss / 2e-3).item() for loss in as_on_cpu]
    assert [row["projected_grad"] for row in rows] == pytest.approx(divided, rel=1e-4)
    for name in ("projected_grad", "loss_plus", "loss_minus"):
        assert [row[name] for row in rows] == [row[name] for row in rows_of(tmp_path / "parts")]


STAGES = {
    "stages": staged.Case(("block.0",)),
    "stages, inputs of 8 bits": staged.Case(("block.0.mlp",), codec="q8:affine-zero:token"),
}


def all_stages(device, case):
    """Return what the stages of a case find on one device."""
    plan, models = case.plan(), [case.made() for _ in range(2)]

    def rank(number, communicator):
        options = {"communicator": communicator, "learning_rate": 1e-2, "device": "cuda:0"}
        with seen_by(device), Session(plan, models[number], **options) as session:
            return [session.step(batch).projected_gradients for batch in batches(3, size=staged.SIZE)]

    return on_all_ranks(plan, rank)


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("case", STAGES)
def test_stages_on_one_device_leave_nothing_to_chance(case):
    with simulated() as device:
        first, last = all_stages(device, STAGES[case])
    assert first == last
    assert device.findings == []


SHARED_PASSES = {
    "int8": {"low_bits": {"weights": "int8"}, "perturbations": {"rng": "counter"}},
    "int4 in groups, two perturbations": {
        "low_bits": {"weights": "int4", "scales": "group", "group_elements": 16},
        "perturbations": {"rng": "counter"},
        "estimator": {"num_perturbations": 2},
    },
    "factors": {"perturbations": {"distribution": "lozo", "rank": 3}},
}


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("placement", SHARED_PASSES)
def test_tensors_that_share_passes_have_the_bits_of_those_that_do_not(placement, monkeypatch):
    def bits():
        with simulated() as device:
            model = model_of("opt-untied", torch.bfloat16, num_hidden_layers=2)
            plan = plan_of(model, dtype="bfloat16", **SHARED_PASSES[placement])
            with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, device="cuda:0") as session:
                numbers = [session.step(batch).projected_gradients for batch in batches(3)]
                return numbers, session.digest(), device.launches.total(), device.findings

    *together, launches, findings = bits()
    monkeypatch.setattr(arithmetic, "_LAUNCHED_ALONE_ELEMENTS", -1)
    monkeypatch.setattr(joint_updates, "_SHARED_ELEMENTS", -1)
    monkeypatch.setattr(RoundedSampler, "_batches", lambda _, blocks: ([block] for block in blocks))
    *alone, more, _ = bits()
    assert together == alone
    assert launches < 0.8 * more
    assert findings == []


@pytest.mark.parametrize(
    "name", ["none", "q8:affine-zero:token", "q4", "q1:affine", "q2:affine:channel:stochastic"]
)
def test_a_message_of_a_device_is_waited_for_once_and_taken_apart_without_waiting(name):
    codec, numbers = (
        codec_of(codec_spec(name)),
        torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)),
    )
    with simulated() as device:
        there = [numbers.cuda() for _ in range(2)]
        before = device.synchronisations.total()
        messages = messages_of([codec.quantized(each, generator_on("cuda", 1)) for each in there])
        assert device.synchronisations.total() == before + 1
        there = decode(messages[0], shape=(3, 5, 8), device="cuda:0")
        assert device.synchronisations.total() == before + 1
        assert there.is_cuda
        assert torch.equal(there.cpu(), decode(messages[1]))
    assert device.findings == []


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("q8:token", [1.0, torch.inf]), ("q1:affine-zero", [-1.0, 1.0]), ("q1:affine", [3e38, -3e38])],
)
def test_what_a_codec_cannot_represent_is_refused_on_a_device_in_the_words_of_the_host(name, numbers):
    codec, values = codec_of(codec_spec(name)), torch.tensor([numbers])
    with pytest.raises(CodecError) as of_host:
        codec.encode(values)
    with simulated(), pytest.raises(CodecError) as of_device:
        codec.encode(values.cuda())
    assert of_device.value.message == of_host.value.message


# -- faults that are planted -----------------------------------------------------------------------------------------


def test_a_stream_that_waits_for_no_event_is_found(monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)
    device, _ = trained(OFFLOADED)
    assert {finding.kind for finding in device.findings} >= {"race"}


@pytest.mark.parametrize("is_reported", [True, False])
def test_memory_that_another_stream_still_uses_is_found(is_reported):
    with simulated() as device:
        backend, side = AcceleratorBackend("cuda:0"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = torch.ones(4, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        used = (backend.borrow(made) if is_reported else made) + 1
        del made
    assert [finding.kind for finding in device.findings] == ([] if is_reported else ["freed"])
    assert used.sum() == 8


def test_buffers_that_are_given_back_too_soon_are_found(monkeypatch):
    def free(_, let_go):
        let_go()
        torch.cuda.synchronize()

    monkeypatch.setattr(AcceleratorBackend, "free", free)
    device, _ = trained(FRESH)
    assert {finding.kind for finding in device.findings} == {"freed"}


BACKEND = "executors.steps.streams_accelerator:AcceleratorBackend"
INTERPRETER = "executors.steps.interpreter:Interpreter"
READING = "executors.device_scalars:ScalarReading"
BOUNDARIES = "executors.steps.ops.codec:BoundaryActions"
EXCHANGES = "executors.steps.ops.exchange:Exchanges"
PARAM_PASS = "executors.steps.arithmetic:ParamPass.update"
UNTIED = {
    "residency": {"blocks": "offloaded", "embedding_and_head": "offloaded"},
    "schedule": {"update": "delayed"},
}


def handing_on(event_of):
    """Hand on another event than the one behind a task; `event_of` may say what is done before the task, and returns the event."""

    def issue(shipped, self, task, issued):
        event = torch.Event(self.device)
        before = event_of(self, event, self._streams[task.instruction.stream])

        def action():
            before()
            task.action()

        def hand_on(_end):
            event_of(self, event, None)
            issued.issue(event)

        shipped(self, replace(task, action=action), SimpleNamespace(issue=hand_on))

    return issue


def recorded_elsewhere(backend, event, stream):
    if stream is None:
        event.record(backend._streams[StreamName.COMPUTE])
    return lambda: None


def recorded_before(_backend, event, stream):
    return lambda: event.record(stream)


def on_compute(shipped, self, task, issued):
    for ticket in task.after:
        self._streams[StreamName.COMPUTE].wait_event(ticket.recorded())
    shipped(self, replace(task, after=()), issued)


def beside_its_event(shipped, self, task, issued):
    def action():
        with on_stream(torch.Stream(self.device)):
            task.action()

    shipped(self, replace(task, action=action), issued)


def told_when_issued(shipped, self, task, issued):
    shipped(self, replace(task, done=None), issued)
    if task.done is not None:
        task.done()


def not_awaited_zeros(shipped, self, buffer, num_elements, dtype):
    if buffer.space == "host":
        return shipped(self, buffer, num_elements, dtype)
    return torch.zeros(num_elements, dtype=dtype, device=self.device)


def handed_out_twice(shipped, self, buffer, num_elements, dtype):
    memory = shipped(self, buffer, num_elements, dtype)
    if buffer.space == "host":
        self._pinned.setdefault(memory.nbytes, []).append(memory.view(torch.uint8))
    return memory


def shared_by_size(shipped, self, buffer, num_elements, dtype):
    memory = shipped(self, buffer, num_elements, dtype)
    return memory if buffer.space == "host" else vars(self).setdefault(f"{num_elements} {dtype}", memory)


def overlapping(shipped, self, sizes):
    shipped(self, sizes)
    for slices in self._pinned.values():
        slices[:] = slices[:1] * len(slices)


def not_pinned(shipped, self, sizes):
    shipped(self, sizes)
    for slices in self._pinned.values():
        slices[:] = map(torch.zeros_like, slices)


KEPT = {}


def staged_again(shipped, device, tensors):
    if device.type == "cpu" or not tensors:
        return shipped(device, tensors)
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    kept = KEPT.setdefault(
        shapes, [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in shapes]
    )
    for place, tensor in zip(kept, tensors, strict=True):
        place.copy_(tensor)
    return [place.to(device, non_blocking=True) for place in kept]


def read_at_once(shipped, self):
    return shipped(altered(self, _copied=SimpleNamespace(query=lambda: True)))


def event_elsewhere(shipped, self, numbers):
    shipped(self, numbers)
    self._copied = torch.Event(numbers.device)
    self._copied.record(torch.cuda.Stream())


def copied_again(shipped, self, numbers):
    shipped(self, numbers)
    self._here.copy_(numbers, non_blocking=True)


def place_not_pinned(shipped, self, numbers):
    shipped(self, numbers)
    self._here = torch.empty(numbers.shape, dtype=numbers.dtype)
    self._here.copy_(numbers, non_blocking=True)


def beside(shipped, *given, **named):
    torch.accelerator.set_stream(torch.Stream())
    return shipped(*given, **named)


def action_beside(shipped, *given):
    action = shipped(*given)
    return lambda frame: beside(action, frame)


def copies_beside(shipped, self, target, source):
    with on_stream(torch.Stream(self.device)):
        shipped(self, target, source)


def packed_early(shipped, self, instruction):
    pack = shipped(self, instruction)

    def action(frame):
        early = replace(
            frame, losses={p: loss.to("cpu", non_blocking=True) for p, loss in frame.losses.items()}
        )
        pack(early)
        frame.packed = early.packed

    return action


def flushed_only(shipped, self):
    self.backend.drain = lambda: None
    shipped(self)
    del self.backend.drain


def freed_too_soon(shipped, self, let_go):
    self._streams[StreamName.COMPUTE].synchronize()
    let_go()
    shipped(self, lambda: None)


def not_borrowed(shipped, self, *given, **named):
    return shipped(
        altered(self, _backend=altered(self._backend, borrow=lambda tensor: tensor)), *given, **named
    )


def pinned_in_part(shipped, self):
    shipped(altered(self, size_bytes=self.size_bytes // 2))


FAULTS = {
    "an event is recorded on another stream": ("offloaded", f"{BACKEND}._issue", handing_on(recorded_elsewhere)),
    "an event is never recorded": ("offloaded", f"{BACKEND}._issue", handing_on(lambda *_: lambda: None)),
    "the event from before the work is handed on": ("offloaded", f"{BACKEND}._issue", handing_on(recorded_before)),
    "another stream waits": ("offloaded", f"{BACKEND}._issue", on_compute),
    "only the first dependency is waited for": ("offloaded, ahead", f"{BACKEND}._issue", lambda shipped, self, task, issued: shipped(self, replace(task, after=task.after[:1]), issued)),
    "only the last dependency is waited for": ("offloaded, ahead", f"{BACKEND}._issue", lambda shipped, self, task, issued: shipped(self, replace(task, after=task.after[-1:]), issued)),
    "zeroing is not waited for": ("edges", f"{BACKEND}.allocate", not_awaited_zeros),
    "the end does not wait": ("offloaded", f"{BACKEND}.drain", lambda *_: None),
    "pinned buffers overlap": ("offloaded", f"{BACKEND}.reserve", overlapping),
    "a pinned buffer is handed out twice": ("offloaded", f"{BACKEND}.allocate", handed_out_twice),
    "the step before is not waited for": ("offloaded", f"{INTERPRETER}._task", lambda shipped, self, item, phase, frame, _before, *rest: shipped(self, item, phase, frame, {}, *rest)),
    "others are told too early": ("data, shared", "executors.steps.streams_accelerator:_notify", lambda _shipped, _event, done: done()),
    "a number is read before it has come": ("resident", f"{READING}.numbers", read_at_once),
    "a number's event is recorded elsewhere": ("resident", f"{READING}.__init__", event_elsewhere),
    "others are not waited for": ("data, shared", "executors.steps.streams:PeersTicket.wait", lambda *_: None),
    "a message is read before it has come": ("stages, inputs of 8 bits", "executors.codecs.codec:_on_host", lambda shipped, tensors: shipped([tensor.to("cpu", non_blocking=True) for tensor in tensors])),
    "a staging buffer is used again": ("stages, inputs of 8 bits", "executors.devices:staged_on", staged_again),
    "the next batch is staged where the last one was": ("resident", "executors.devices:staged_on", staged_again),
    "shares are gathered on another stream": ("perturb, sliced", f"{EXCHANGES}._gather_shares", action_beside),
    "staging buffers of one size share memory": ("offloaded", f"{BACKEND}.allocate", shared_by_size),
}  # fmt: skip
MORE_FAULTS = {
    "kernels go to another stream than their event": ("offloaded", f"{BACKEND}._issue", beside_its_event),
    "every copy has a stream of its own": ("offloaded", f"{BACKEND}.copy", copies_beside),
    "a number is copied on a stream of its own": ("resident", f"{READING}.__init__", beside),
    "a number is copied behind its event": ("resident", f"{READING}.__init__", copied_again),
    "a flush does not drain": ("offloaded", f"{INTERPRETER}.flush", flushed_only),
    "nothing of the same step is waited for": (
        "offloaded",
        f"{INTERPRETER}._task",
        lambda shipped, self, item, *rest: shipped(self, replace(item, waits=()), *rest),
    ),
    "losses are read before they have come": ("perturb", f"{EXCHANGES}._pack", packed_early),
    "an update goes to a stream beside": ("resident", PARAM_PASS, beside),
    "a perturbation is drawn beside its stream": (
        "offloaded, ahead",
        "executors.steps.ops.sample:Sampling._scaling",
        beside,
    ),
    "others are told when work is issued": ("data, shared", f"{BACKEND}._issue", told_when_issued),
}
FREED = {
    "memory goes back when one stream is through": (
        "offloaded, fresh buffers",
        f"{BACKEND}.free",
        freed_too_soon,
    ),
    "what is received is not borrowed": ("stages", f"{BOUNDARIES}._tensors", not_borrowed),
    "what is sent is not borrowed": ("stages", f"{BOUNDARIES}.send", not_borrowed),
}
WAITING = {
    "buffers of the host are not pinned": ("offloaded", f"{BACKEND}.reserve", not_pinned),
    "a number's place is not pinned": ("resident", f"{READING}.__init__", place_not_pinned),
    "what ranks share is pinned in part": ("data, shared", "executors.ranks.host_memory:HostMemory.pin", pinned_in_part),
    "an update takes its number from the host": ("resident", PARAM_PASS, lambda shipped, *given, gradient, **named: shipped(*given, gradient=float(gradient), **named)),
}  # fmt: skip


def ran(placement):
    """Return the device on which a placement has trained."""
    with simulated() as device:
        if placement in SEVERAL:
            all_ranks(device, SEVERAL[placement])
        elif placement in STAGES:
            all_stages(device, STAGES[placement])
        else:
            model = model_of("opt-untied" if placement == "edges" else "opt", num_hidden_layers=2)
            plan = plan_of(model, **(PLACEMENTS | {"edges": UNTIED})[placement])
            with Session(plan, model, learning_rate=1e-2, device="cuda:0") as session:
                begun = [session.begin_step(batch) for batch in batches(3)]
                assert all(step.record() for step in begun)
                session.digest()
    return device


@pytest.mark.crossed(quick=5, slow=3)
@pytest.mark.parametrize(
    "fault", [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAULTS)]
)
def test_a_fault_in_streams_events_or_buffers_is_found(fault):
    placement, *where = (FAULTS | MORE_FAULTS)[fault]
    with Fault(fault, *where).apply():
        device = ran(placement)
    assert "race" in {finding.kind for finding in device.findings}


@pytest.mark.parametrize("fault", FREED)
def test_memory_that_is_given_back_too_soon_is_found(fault):
    placement, *where = FREED[fault]
    with Fault(fault, *where).apply():
        device = ran(placement)
    assert {finding.kind for finding in device.findings} == {"freed"}


@pytest.mark.crossed(slow=2)
@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.slow) for name in WAITING])
def test_a_fault_that_only_makes_the_host_wait_is_counted(fault):
    placement, *where = WAITING[fault]
    right = ran(placement)
    with Fault(fault, *where).apply():
        wrong = ran(placement)
    counts = [(device.synchronisations.total(), device.standstills.total()) for device in (right, wrong)]
    assert counts[0] < counts[1]
    assert wrong.findings == []


def other_weights_decay(shipped, *given, decaying=None, **named):
    shipped(*given, decaying=decaying and [(0, end - begin) for begin, end in decaying], **named)


SCALAR = "executors.device_scalars:DeviceScalar"
WRONG_NUMBERS = {
    "a number is rounded to the format of weights": ("bfloat16", f"{SCALAR}.factor", lambda shipped, self, dtype: shipped(self, dtype).to(dtype)),
    "other weights decay": ("float32", PARAM_PASS, other_weights_decay),
    "a quotient is not divided": ("float32", f"{SCALAR}.__truediv__", lambda _shipped, self, _divisor: self),
}  # fmt: skip


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("fault", WRONG_NUMBERS)
def test_a_fault_in_what_stays_on_the_device_changes_numbers(fault):
    dtype, *where = WRONG_NUMBERS[fault]
    axes = {"estimator": {"num_perturbations": 2}}
    _, right = trained(axes, dtype=dtype, steps=2)
    with Fault(fault, *where).apply():
        _, wrong = trained(axes, dtype=dtype, steps=2)
    assert right != wrong


@cache
def cross_stream_edges(placement):
    """Every dependency between streams of a step: the instruction, in which list it stands, and on what."""
    edges = []

    def look(session):
        for item in session.interpreter._resolved["step"]:
            for kind in ("waits", "waits_before"):
                edges.extend((item.instruction.id, kind, name) for name in getattr(item, kind))

    trained(PLACEMENTS[placement], steps=0, change=look)
    return edges


NUM_PARTS = 4


class Without:
    """Takes a dependency out of a session's program, and looks whether the host waits in its place.

    It does so between the two where it asks how many rows of a sparse perturbation move, gives memory back, or reads what a step found.
    """

    def __init__(self, edge):
        self.name, self.kind, self.other = edge
        self.before, self.is_known = None, []

    def __call__(self, session):
        items = session.interpreter._resolved["step"]
        for number, item in enumerate(items):
            if item.instruction.id == self.name:
                left = [each for each in getattr(item, self.kind) if each != self.other]
                items[number] = replace(item, **{self.kind: left}, action=partial(self.begins, item.action))
            elif item.instruction.id == self.other:
                items[number] = replace(item, action=partial(self.ends, item.action))

    def begins(self, action, frame):
        if self.before is not None:
            host = torch.accelerator.current_stream()._simulated.host
            self.is_known.append(self.before.is_known_to("host", host.clock))
        action(frame)

    def ends(self, action, frame):
        action(frame)
        stream = torch.accelerator.current_stream()
        self.before = Use(stream.name, stream.clock.get(stream.name, 0), self.other)

    @property
    def changes_nothing(self):
        """Whether nothing can come of it: each step's batch is in memory of its own, or the host always waits."""
        return self.name == "load" or (len(self.is_known) > 1 and all(self.is_known))


REMOVED = [(placement, part) for part in range(NUM_PARTS) for placement in sorted(PLACEMENTS, key=lambda name: name != "offloaded")]  # fmt: skip


@pytest.mark.crossed(quick=len(REMOVED), slow=14)
@pytest.mark.parametrize(("placement", "part"), REMOVED)
def test_every_dependency_between_streams_that_is_removed_is_found(placement, part):
    """Every fourth one in each case; of the first ones of an offloaded step, some are."""
    changes = list(map(Without, cross_stream_edges(placement)[part::NUM_PARTS]))
    silent = [change for change in changes if not trained(PLACEMENTS[placement], change=change)[0].findings]
    assert [(change.name, change.other) for change in silent if not change.changes_nothing] == []
    assert (placement, part) != REMOVED[0] or silent != changes


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, torch.clone])
def test_pinned_memory_that_is_read_before_its_copy_is_over_is_found(read):
    with simulated() as device:
        here = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
        assert device.synchronisations.total() == 0
        read(here)
        assert [finding.kind for finding in device.findings] == ["race"]


# -- what it counts --------------------------------------------------------------------------------------------------


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("shape", ["opt", "llama", "gpt2"])
def test_the_host_waits_for_the_device_once_a_step_which_then_has_the_next_one_to_do(shape):
    """For the projected gradient and the losses; what transformers ask of a batch's mask is known on the host."""
    with simulated() as device:
        model = model_of(shape, num_hidden_layers=2)
        with Session(plan_of(model, **OFFLOADED), model, learning_rate=1e-3, device="cuda:0") as session:
            first, second, third = batches(3)
            session.step(first)
            begun = session.begin_step(second)
            waits, standstills = device.synchronisations.total(), device.standstills.total()
            session.begin_step(third)
            assert device.synchronisations.total() == waits
            begun.record()
            assert device.synchronisations.total() - waits == 1
            assert device.standstills.total() == standstills


def test_records_that_are_read_late_are_those_that_are_read_at_once():
    with simulated():
        late, at_once = ([], [])
        for numbers, is_late in ((late, True), (at_once, False)):
            model = model_of("opt", num_hidden_layers=1)
            plan = plan_of(model, **OFFLOADED, estimator={"num_perturbations": 2})
            with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, device="cuda:0") as session:
                begun = []
                for batch in batches(3):
                    begun.append(session.begin_step(batch))
                    if not is_late:
                        begun[-1].record()
                numbers += [replace(step.record(), seconds=0.0) for step in begun]
                numbers.append(session.digest())
    assert late == at_once


def test_an_operation_on_lists_of_tensors_is_as_many_kernels_as_cuda_makes_of_it():
    def counted(operation, *lists):
        launches = device.launches.total()
        operation(*lists)
        return device.launches.total() - launches

    with simulated() as device:
        floats, others, bytes_ = ([torch.zeros(3, dtype=dtype, device="cuda") for _ in range(4)] for dtype in (torch.float32, torch.float32, torch.int8))  # fmt: skip
        assert counted(torch._foreach_add_, floats, others) == 1
        assert counted(torch._foreach_copy_, floats, bytes_) == 1
        assert counted(torch._foreach_mul_, bytes_, 2) == 4
        assert counted(torch._foreach_add_, floats, [other[:1] for other in others]) == 4
        large = [torch.zeros(65536 * 321, device="cuda")]
        assert counted(torch._foreach_mul_, large, 2.0) == 2


def test_memory_is_counted_as_the_allocator_does():
    with simulated() as device:
        held = torch.zeros(3, device="cuda")
        assert torch.cuda.memory_allocated() == 512
        pinned = torch.zeros(1000, pin_memory=True)
        assert pinned.is_pinned()
        assert not held.is_pinned()
        assert (device.pinned_bytes, device.pinned_taken_bytes) == (4000, 4096)
        del held
        assert torch.cuda.memory_allocated() == 0


def test_uses_of_a_byte_conflict_unless_one_is_known():
    shadow = Shadow()
    write, read = Use("a", 1, "a write"), Use("b", 1, "a read")
    assert shadow.access(0, 10, write, {"a": 1}, writes=True) == []
    assert shadow.access(8, 12, read, {"b": 1}, writes=False) == [("write", write)]
    assert shadow.access(8, 12, read, {"b": 1, "a": 1}, writes=False) == []
    again = Use("a", 2, "a write")
    assert shadow.access(0, 8, again, {"a": 2}, writes=True) == []
    assert shadow.access(0, 12, again, {"a": 2}, writes=True) == [("read", read)]
    shadow.forget(0, 20)
    assert shadow.access(0, 20, Use("c", 1, "a write"), {"c": 1}, writes=True) == []


def test_two_devices_in_one_kernel_are_refused():
    with simulated(), pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="cuda") + torch.ones(2)


QUANTIZED = {
    "int4": {"weights": "int4", "scales": "group", "group_elements": 16},
    "W8A8": {"weights": "int8", "activations": "int8-token"},
    "e4m3": {"weights": "float8_e4m3", "activations": "float8-token", "perturbation_bits": 5},
}


@pytest.mark.crossed(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("quantized", QUANTIZED.values(), ids=QUANTIZED)
def test_qvalues_are_multiplied_on_the_device_in_any_format(quantized):
    """Offloaded quantized values cross the bus as they are; each kernel is that which the plan counts on."""
    axes = {"low_bits": quantized, "perturbations": {"rng": "counter"}}
    device, numbers = trained({**OFFLOADED, **axes}, shape="opt-untied")
    assert device.findings == []
    _, resident = trained(axes, shape="opt-untied")
    # Weights are dequantized wherever there is room, and a product's last bit depends on where; over 2ε it is 2.4e-4. In later
    # steps it decides how inputs and updates are rounded.
    assert numbers[0] == pytest.approx(resident[0], abs=1e-3)


@pytest.mark.slow
def test_transformers_can_be_imported_first_inside():
    program = (
        "import torch\n"
        "from tests.support.simulated_cuda import simulated\n"
        "with simulated():\n"
        "    import transformers.generation.continuous_batching.utils\n"
        "    assert isinstance(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph)\n"
        "    assert isinstance(torch.cuda.Event(), torch.cuda.Event)\n"
        "    assert isinstance(torch.cuda.Stream(), torch.cuda.Stream)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_int8_products_of_any_width_run_on_the_device():
    """CUDA multiplies rows of multiples of 8; zeros fill others up, and add nothing."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-127, 128, (rows, 21), generator=generator).to(torch.int8) for rows in (5, 9)
    )
    wanted = (left.long() @ right.long().T).float()
    axes = {"low_bits": {"weights": "int8", "activations": "int8-token"}, "perturbations": {"rng": "counter"}}
    with simulated() as device:
        there = linear.byte_product(left.cuda(), right.cuda(), torch.ones(1, device="cuda"))
        assert torch.equal(there.cpu(), wanted)
        model = model_of("opt-untied", num_hidden_layers=1, ffn_dim=60)
        with Session(plan_of(model, **axes), model, learning_rate=1e-2, device="cuda:0") as session:
            assert [session.step(batch) for batch in batches(1)]
    assert device.findings == []


PACKED = {
    "perturbations": {"distribution": "lozo", "rank": 2},
    "weights": {"perturbation": "adapters"},
}


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("axes", [{}, OFFLOADED, PACKED], ids=["resident", "offloaded", "packed"])
def test_batches_go_up_from_pinned_memory_and_nothing_of_them_is_waited_for(axes):
    with simulated() as device:
        model = model_of("opt")
        if axes is PACKED:
            attach(model, "linears")
        with Session(plan_of(model, **axes), model, learning_rate=1e-3, device="cuda:0") as session:
            first, second, third = batches(3)
            session.step(first)
            session.begin_step(second)
            waits, pageable = device.synchronisations.total(), device.pageable.total()
            session.begin_step(third)
            assert device.synchronisations.total() == waits
            assert device.pageable.total() == pageable
    assert device.findings == []


@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_packed_attention_does_without_plans_for_each_shape(num_key_heads, monkeypatch):
    """cuDNN's kernel is left out; the others take no mask beside fewer heads of keys, so that these are repeated."""
    (batch,) = batches(1, size=3, seq=18)
    batch["input_ids"][:, :12] = batch["input_ids"][0, :12]
    seen, real = [], nn.functional.scaled_dot_product_attention

    def attention(*args, **options):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), options["attn_mask"], options["enable_gqa"]))
        return real(*args, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)

    def attended(device):
        packing = pack(batch, device=torch.device(device))
        generator = torch.Generator().manual_seed(0)
        heads = (4, num_key_heads, num_key_heads)
        states = (torch.randn(2, each, packing.num_tokens, 8, generator=generator) for each in heads)
        moved = [each.to(device) for each in states]
        return packed_attention(nn.Identity(), *moved, None, packing=packing)[0].cpu()

    wanted, on_host = attended("cpu"), len(seen)
    with simulated():
        found = attended("cuda:0")
    assert torch.allclose(found, wanted, atol=1e-6)
    assert all(is_enabled for is_enabled, *_ in seen[:on_host])
    assert not any(is_enabled for is_enabled, *_ in seen[on_host:])
    assert any(mask is not None for _, mask, _ in seen[on_host:])
    assert not any(mask is not None and is_grouped for _, mask, is_grouped in seen[on_host:])


def test_a_run_on_a_device_notes_which_kernels_of_attention_it_may_use():
    model = model_of("opt", num_hidden_layers=1)
    with simulated():
        with Session(plan_of(model), model, learning_rate=1e-3, device="cuda:0") as session:
            header = session.header
            assert header["attention_kernels"] == ["flash", "memory-efficient", "products", "cudnn"]
            assert "cudnn" in header
        began = header | {"attention_kernels": ["flash"]}
        assert any("attention_kernels was" in line for line in machine_differences(began, "cuda:0"))
    assert not any("attention" in line for line in machine_differences(header, "cpu"))
