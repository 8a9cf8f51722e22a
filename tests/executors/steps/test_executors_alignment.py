"""Tensors of a plan on GPUs start at multiples of 256 bytes, others' at multiples of 64, and no number depends on it."""

from __future__ import annotations

import shutil

import pytest
import torch

import zosim
from executors.runs.session import Session
from proofs_checks.setups.ranks import on_all_ranks
from tests.support import distributed, matrix
from tests.support.command import zosim as command
from tests.support.distributed import OFFLOADED, SLICED
from tests.support.recorded import OFFLOADED as RESIDING
from tests.support.recorded import options, same, saved_inputs, truncate
from tests.support.simulated_cuda import seen_by, simulated
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import ProgramError
from zosim.lowering import lower, lower_all
from zosim.program import Program
from zosim.program.contents import parameters_of
from zosim.program.program_set import ProgramSet
from zosim.program.validate import validate

INT4 = {"weights": "int4", "perturbation_bits": 4}
PLACEMENTS = {
    "resident": ("opt", {}),
    "offloaded, ahead": ("llama", OFFLOADED | {"perturbations": {"sampled_ahead": True}}),
    "counter, kept": ("gpt2", {"perturbations": {"rng": "counter", "kept": True}}),
    "copies in bfloat16": ("opt", {"weights": {"perturbation": "copies"}, "dtype": "bfloat16"}),
    "factors": ("opt", OFFLOADED | {"perturbations": {"distribution": "lozo", "rank": 3}}),
    "in bfloat16 on the host": (
        "opt",
        OFFLOADED | {"residency": {"blocks": "offloaded", "transfer_dtype": "bfloat16"}},
    ),
    "int4 along 4 bits": ("opt", {"low_bits": INT4}),
    "offloaded, int8": ("opt", OFFLOADED | {"low_bits": {"weights": "int8"}}),
}  # fmt: skip


def on_gpus(plan):
    names = tuple(f"gpu{rank}" for rank in range(plan.placement.world_size))
    return plan.model_copy(update={"placement": plan.placement.model_copy(update={"devices": names})})


def chunks_of(store):
    """Yield each tensor of parameters and perturbations that was placed, with where it begins in its buffer."""
    for (buffer, *_), placed in store._placed.items():
        tensors = [placed.flat, *placed.views, *(qvalues.memory for qvalues in placed.packed)]
        tensors += [piece for held in placed.held for piece in held.dump().values()]
        start = store._flat[buffer].data_ptr()
        yield from ((buffer, tensor.data_ptr() - start) for tensor in tensors if tensor.numel())


def numbers_of(plan, model, *, device="cpu"):
    """Return what three steps compute, and where the pieces of buffers began."""
    with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, device=device) as session:
        found = [session.step(batch).projected_gradients for batch in batches(3)]
        session.flush()
        return [*found, session.digest()], list(chunks_of(session.interpreter.store))


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_plan_on_gpus_has_pieces_at_multiples_of_256_and_the_same_numbers(placement):
    shape, axes = PLACEMENTS[placement]
    axes = dict(axes)
    dtype = axes.pop("dtype", "float32")
    found = {}
    for kind in ("cpu", "gpu"):
        model = model_of(shape, getattr(torch, dtype), num_hidden_layers=2)
        plan = plan_of(model, dtype=dtype, **axes)
        found[kind] = numbers_of(on_gpus(plan) if kind == "gpu" else plan, model)
    assert found["cpu"][0] == found["gpu"][0]
    assert len(found["cpu"][1]) == len(found["gpu"][1]) > 10
    assert all(begin % 256 == 0 for _, begin in found["gpu"][1])
    assert all(begin % 64 == 0 for _, begin in found["cpu"][1])
    assert any(begin % 256 for _, begin in found["cpu"][1])


def test_a_plan_on_cpus_has_the_program_that_it_had():
    plan = plan_of(model_of("opt"), **OFFLOADED)
    data = lower(plan).to_data()
    assert "alignment_bytes" not in data
    assert lower(on_gpus(plan)).to_data()["alignment_bytes"] == 256
    read = Program.from_data(lower(on_gpus(plan)).to_data(), "here")
    assert read == lower(on_gpus(plan))


@pytest.mark.crossed(quick=10, slow=4)
@pytest.mark.parametrize("number", range(40))
def test_parameters_and_perturbations_of_any_plan_on_gpus_start_at_multiples_of_256(number):
    plan = matrix.random_case_of_one_rank(number).plan()
    for program in lower_all(on_gpus(plan)).programs:
        validate(program)
        accesses = [*program.initial, *program.final]
        for _, item in program.instructions():
            accesses += [*item.reads, *item.writes]
        flat = [access for access in accesses if parameters_of(access.what) is not None]
        assert flat
        assert all(access.offset_bytes % 256 == 0 for access in flat)


def test_a_program_whose_pieces_start_elsewhere_is_refused():
    plan = plan_of(model_of("opt"), **OFFLOADED)
    data = lower(plan).to_data()
    with pytest.raises(ProgramError, match="not a multiple of the program's alignment of 256"):
        validate(Program.from_data(data | {"alignment_bytes": 256}, "edited"))
    for unit in (0, 32, 96):
        with pytest.raises(
            ProgramError, match=f"alignment_bytes={unit} must be a power of two of at least 64"
        ):
            validate(Program.from_data(data | {"alignment_bytes": unit}, "edited"))


@pytest.mark.slow
def test_shares_of_ranks_start_at_multiples_of_256_and_have_the_same_numbers():
    case, found = {"mesh": {"perturb": 2}, **SLICED}, {}
    for kind in ("cpu", "gpu"):
        plan = distributed.plan_for(case)
        plan = on_gpus(plan) if kind == "gpu" else plan
        models = [distributed.model_for(case, plan) for _ in range(2)]
        with simulated() as device:

            def rank(number, communicator, *, plan=plan, models=models, device=device):
                with (
                    seen_by(device),
                    Session(
                        plan, models[number], communicator=communicator, learning_rate=1e-2, device="cuda:0"
                    ) as session,
                ):
                    lines = distributed.lines_for(case, 3)
                    numbers = [session.step(batch).projected_gradients for batch in lines]
                    store, program = session.interpreter.store, session.program
                    shared = [
                        access
                        for _, item in program.instructions()
                        for access in (*item.reads, *item.writes)
                        if access.share and access.buffer in store._flat
                    ]
                    begins = [
                        store.raw(access).data_ptr() - store._flat[access.buffer].data_ptr()
                        for access in shared
                    ]
                    return [*numbers, session.digest()], begins

            found[kind] = on_all_ranks(plan, rank)
        assert device.findings == []
    for ours, theirs in zip(found["cpu"], found["gpu"], strict=True):
        assert ours[0] == theirs[0]
        assert theirs[1]
        assert all(begin % 256 == 0 for begin in theirs[1])


LOSSY = (*RESIDING, "--update", "delayed", "--transfer-dtype", "bfloat16", "--allow-lossy")
RESIDENT = ("--residency", "resident")


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize(
    ("more", "before", "after", "keeps_program"),
    [
        pytest.param(LOSSY, 64, 256, False, id="lossy"),
        pytest.param(RESIDING, 64, 256, True, id="offloaded, its own program"),
        pytest.param(RESIDING, 256, 64, False, id="offloaded", marks=pytest.mark.slow),
        pytest.param(RESIDENT, 64, 256, False, id="resident", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_where_tensors_start_elsewhere(
    more, before, after, keeps_program, tmp_path, monkeypatch
):
    """A run of a release that aligned tensors otherwise goes on with its program, or without it, to the same bits."""
    inputs, plan = saved_inputs(tmp_path), tmp_path / "plan.json"
    zosim.plan(str(inputs[0]), "a100-80gb-milan", batch=3, seq=9, dtype="float32").plan.save(plan)
    whole, run = tmp_path / "whole", tmp_path / "run"
    monkeypatch.setattr("zosim.lowering.buckets.GPU_ALIGNMENT_BYTES", before)
    assert command(*options(inputs, whole, plan, *more, "--device", "cpu", "--checkpoint-every", 5)) == 0
    shutil.copytree(whole, run)
    truncate(run, 7)
    if not keeps_program:
        (run / "program.json").unlink()
    monkeypatch.setattr("zosim.lowering.buckets.GPU_ALIGNMENT_BYTES", after)
    assert command("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    (program,) = ProgramSet.load(run / "program.json").programs
    assert program.alignment_bytes == (before if keeps_program else after)
    assert same(run, whole)
