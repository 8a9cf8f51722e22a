"""Adapters whose A is drawn anew: what is learnt adds up, is closed before the redraw, and lasts through resuming and replay."""

from __future__ import annotations

import copy
import json
import os
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from costmodel.models.configs import LoRA
from costmodel.param_passes import closing_work
from executors.low_bits import linear
from executors.models.increments import Increments
from executors.models.lora import joined_factors
from executors.runs import lazy_intervals
from executors.runs.adapters import attach
from executors.runs.lazy_intervals import LazyIntervals, lazy_intervals_of, rounded_up
from executors.runs.session import Session
from tests.support.builders import unshared
from tests.support.command import loaded, rows_of, run_words, zosim
from tests.support.distributed import OFFLOADED
from tests.support.forked import Command
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import ModelError, PlanError
from zosim.lowering import lower
from zosim.simulators.simulate import simulate

LAZY = LoRA(rank=2, target_modules=("q_proj", "fc2"), seed=3, lazy_steps=3, max_rank=16)
TIGHT = LAZY.model_copy(update={"max_rank": 4})
TOGETHER = {"weights": {"perturbation": "adapters"}}
STEPS, RATE = 8, 0.3


def carrying(lora=LAZY, dtype=torch.float64, name="opt", **changed):
    model = model_of(name, dtype, num_hidden_layers=2, **changed)
    attach(model, lora)
    return model


def carriers(model):
    return [module for module in model.modules() if hasattr(module, "lora_used")]


def trained(base, axes, steps=range(STEPS), dtype="float64"):
    model = copy.deepcopy(base)
    plan = plan_of(model, dtype=dtype, **axes)
    with Session(plan, model, learning_rate=RATE, seed=5, loss_dtype="fp64") as session:
        session.start_at(steps.start)
        records = [session.step(batches(STEPS)[step]) for step in steps]
        session.flush()
    return model, records


def test_a_window_adds_up_along_its_own_factor_and_all_windows_stay():
    """B's sums, step by step, as the seeds and the logged coefficients say; the base is not touched."""
    base = carrying()
    model, records = trained(base, {})
    moved = [torch.zeros_like(module.weight) for module in carriers(model)]
    stepped, inner = copy.deepcopy(base), None
    for record in records:
        if record.step % LAZY.lazy_steps == 0:
            intervals = lazy_intervals_of(stepped)
            intervals.draw(record.step // LAZY.lazy_steps)
            inner = [module.lora_A.weight.detach().clone() for module in carriers(stepped)]
        generator = torch.Generator().manual_seed(record.seeds[0])
        for name, parameter in stepped.named_parameters():
            if not parameter.requires_grad:
                continue
            z = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            number = [n for n, m in stepped.named_modules() if hasattr(m, "lora_used")].index(
                name.removesuffix(".lora_B.weight")
            )
            step = -RATE * record.projected_gradients[0] * z
            moved[number] += (step @ inner[number]) / LAZY.rank**0.5
    for module, wanted, before in zip(carriers(model), moved, carriers(base), strict=True):
        right, left = joined_factors(module)
        assert torch.allclose(left @ right, wanted, rtol=0, atol=1e-12)
        assert right.shape[0] == 2 * 3  # two closed increments and the open one
        assert torch.equal(module.weight, before.weight)
    assert max(wanted.abs().max() for wanted in moved) > 1e-2


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(
    ("name", "axes", "low_bits"),
    [
        ("opt", {}, None),
        ("opt", {"estimator": {"num_perturbations": 2}, **OFFLOADED}, None),
        ("llama", {"perturbations": {"rng": "counter"}}, {"weights": "int8"}),
        ("opt", {"perturbations": {"distribution": "rademacher"}}, {"weights": "int4"}),
    ],
    ids=["plain", "queries-offloaded", "int8", "int4-signs"],
)
def test_all_points_in_one_forward_are_the_points_one_by_one(name, axes, low_bits):
    lora = LAZY.model_copy(update={"target_modules": ("q_proj", "v_proj")})
    dtype = torch.float32 if low_bits else torch.float64
    base = carrying(lora, dtype, name)
    axes = axes | ({"low_bits": low_bits} if low_bits else {})
    one, other = (
        trained(base, {**axes, **way}, range(5), dtype=str(dtype).removeprefix("torch."))
        for way in ({}, TOGETHER)
    )
    # A loss of 5 in float32 is rounded to 3e-7, its difference over 2·ε of 2e-3 to 3e-4.
    tolerance = 5e-3 if low_bits else 1e-9
    for record, same in zip(one[1], other[1], strict=True):
        assert record.projected_gradients == pytest.approx(same.projected_gradients, abs=tolerance)
    if low_bits:
        qvalues = [
            [layer.quantized.qvalues for _, layer in linear.quantized_layers(model)]
            for model, _ in (one, other)
        ]
        assert len(qvalues[0]) > 0
        assert all(torch.equal(*pair) for pair in zip(*qvalues, strict=True))


def test_increments_are_compacted_at_the_bound_and_say_what_that_lost():
    base = carrying(TIGHT)
    model, _ = trained(base, {})
    full, _ = trained(carrying(), {}, range(4))
    short, _ = trained(base, {}, range(4))
    for module, same in zip(carriers(full), carriers(short), strict=True):  # nothing is lost before the bound
        for one, other in zip(joined_factors(module), joined_factors(same), strict=True):
            assert torch.equal(one, other)
    intervals = lazy_intervals_of(model)
    assert intervals.rank == 4
    assert 0 < intervals.relative_error < 1
    assert lazy_intervals_of(short).relative_error == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_what_compacting_lost_is_never_told_too_small(dtype):
    bounds = torch.logspace(-9, 2, 400, dtype=torch.float64)
    held = torch.stack([rounded_up(bound, dtype).double() for bound in bounds])
    assert (held >= bounds).all()
    info = torch.finfo(dtype)
    assert (held <= bounds * (1 + 2 * info.eps) + 2 * info.tiny * info.eps).all()


def test_left_factors_alone_are_tuned():
    both = model_of("opt")
    attach(both, LoRA(rank=2, target_modules=LAZY.target_modules))
    assert not plan_of(both).model.tunes_left_factors
    assert plan_of(carrying(dtype=torch.float32)).model.tunes_left_factors


@pytest.mark.parametrize("axes", [{}, TOGETHER, {"estimator": {"num_perturbations": 2}}])
def test_plans_know_the_share_of_a_step_in_closing_windows(axes):
    """Once in a window, for each linear, from what all increments have room for to what the closed ones have."""
    widths = {"q_proj": (32, 32), "fc2": (32, 52)}  # outputs, inputs
    once = 2 * sum(closing_work(*pair, rank=2, closed_rank=14).num_factor_flops for pair in widths.values())
    machine, times = unshared(factor_rate=1e6), {}
    for lazy_steps in (1, 50):
        lora = LAZY.model_copy(update={"lazy_steps": lazy_steps, "target_modules": tuple(widths)})
        program = lower(plan_of(carrying(lora, torch.float32), **axes))
        counted = sum(item.work.num_factor_flops for item in program.step)
        assert counted == pytest.approx(once / lazy_steps, abs=1)  # of each block to the next whole number
        times[lazy_steps] = simulate(program, machine).step_time_s
    assert times[1] - times[50] > 0.9 * once * (1 - 1 / 50) / 1e6
    both_tuned = LoRA(rank=16, target_modules=tuple(widths))
    assert not any(i.work.num_factor_flops for i in lower(plan_of(carrying(both_tuned))).step)


def test_what_cannot_be_is_refused():
    with pytest.raises(ModelError, match="4 or more"):
        LoRA(rank=2, target_modules=("q_proj",), lazy_steps=3, max_rank=3)
    with pytest.raises(ModelError, match="--lora-lazy-steps"):
        LoRA(rank=2, target_modules=("q_proj",), max_rank=8)
    with pytest.raises(PlanError, match="perturbations of B"):
        plan_of(carrying(), dtype="float64", perturbations={"distribution": "lozo"}, **TOGETHER)


def command_of(inputs, out, steps, *more):
    lora = {"lora_rank": 2, "lora_targets": "q_proj,v_proj", "lora_lazy_steps": 3, "lora_max_rank": 4}
    options = {"steps": steps, "batch": 3, "lr": 0.3, "weights": "adapters", "checkpoint_every": 2}
    return run_words(*inputs, out, *more, **options, **lora)


def run(inputs, out, steps, *more):
    return zosim(*command_of(inputs, out, steps, *more))


@pytest.fixture(scope="module")
def whole_run(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(inputs, out, 8) == 0
    return out


@pytest.mark.crossed(quick=5)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="begins as a copy of this process")
@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [
        (lazy_intervals, "close_increment", 1),
        (lazy_intervals, "close_increment", 9),
        (LazyIntervals, "draw", 2),
        (Increments, "compact", 8),
        (Session, "begin_step", 5),
    ],
    ids=["first-increment", "increments-of-the-second", "drawn-not-saved", "compacted", "within"],
)
def test_a_run_that_is_killed_in_a_change_of_windows_goes_on_to_the_same_bits(
    inputs, whole_run, tmp_path, monkeypatch, owner, name, nth
):
    """Two linears in each of three blocks are closed before the fourth and the seventh step."""
    whole, interrupted = whole_run, tmp_path / "interrupted"
    done, calls = getattr(owner, name), []

    def dying(*arguments, **options):
        outcome = done(*arguments, **options)
        calls.append(name)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying)
        with Command(*command_of(inputs, interrupted, 8)) as killed:
            killed.end()
            assert killed.exit_code == -signal.SIGKILL
    assert len(rows_of(interrupted)) < 8
    assert run(inputs, interrupted, 8, "--resume") == 0
    assert [row["loss_plus"] for row in rows_of(interrupted)] == [row["loss_plus"] for row in rows_of(whole)]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (interrupted / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.slow
def test_a_run_is_resumed_replayed_and_written_for_a_server(inputs, whole_run, tmp_path):
    whole, interrupted = whole_run, tmp_path / "interrupted"
    assert run(inputs, interrupted, 5) == 0
    assert run(inputs, interrupted, 8, "--resume") == 0
    assert [row["loss_plus"] for row in rows_of(interrupted)] == [row["loss_plus"] for row in rows_of(whole)]
    assert zosim("replay", whole, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert zosim("adapter", whole, "--model", inputs[0], "-o", tmp_path / "of-five", "--steps", 5) == 0
    assert run(inputs, tmp_path / "five", 5) == 0
    of_five, five = (
        folder / "adapter_model.safetensors" for folder in (tmp_path / "of-five", tmp_path / "five/adapter")
    )
    for name, tensor in load_file(five).items():
        assert torch.equal(tensor, load_file(of_five)[name])
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (interrupted / name).read_bytes() == (whole / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == (whole / name).read_bytes()
    with safe_open(whole / "adapter/adapter_model.safetensors", framework="pt") as file:
        assert 0 < float(file.metadata()["relative_error"]) < 1
        module = "model.decoder.layers.0.self_attn.q_proj"
        pair = [file.get_tensor(f"base_model.model.{module}.lora_{part}.weight") for part in "BA"]
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    merged, base = (dict(loaded(folder).named_parameters()) for folder in (whole, inputs[0]))
    moved = merged[f"{module}.weight"] - base[f"{module}.weight"]
    assert torch.allclose(moved, pair[0] @ pair[1], atol=1e-6)
    assert moved.abs().max() > 1e-3
