"""Updates as increments of one adapter: their algebra, what compacting loses, and a run's log as an adapter."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from executors.models.increments import AdapterState, Increments
from executors.runs.increments_of_run import write_adapter
from tests.support.command import loaded, train, zosim
from topology.errors import ModelError, RunError

STEPS = 7


def factors(generator, rank=2):
    return (torch.randn(side, rank, dtype=torch.float64, generator=generator) for side in (9, 7))


def increments_of(num, generator):
    increments = Increments()
    for _ in range(num):
        increments.add(*factors(generator), 0.5)
    return increments


def test_increments_add_up_in_any_order_and_a_probe_is_one_more():
    generator = torch.Generator().manual_seed(0)
    increments, (left, right) = increments_of(3, generator), factors(generator)
    whole = sum(a @ b.T for a, b in zip(increments.lefts, increments.rights, strict=True))
    turned = Increments(increments.lefts[::-1], increments.rights[::-1])
    for one in (increments, turned):
        a, b = one.joined((left, right, -1e-3))
        assert torch.allclose(a @ b.T, whole - 1e-3 * left @ right.T, rtol=0, atol=1e-12)
    assert increments.rank == 6  # the probe has left no trace


def test_updates_with_one_right_factor_are_one_increment():
    generator = torch.Generator().manual_seed(0)
    increments, (left, right) = Increments(), factors(generator)
    other, _ = factors(generator)
    increments.add(left, right, 2.0)
    increments.add(other, right, -1.0)
    assert (increments.rank, len(increments.lefts)) == (2, 1)
    assert torch.allclose(increments.lefts[0], 2 * left - other)


def test_compacting_loses_what_it_says_and_no_more_than_any_matrix_of_that_rank():
    generator = torch.Generator().manual_seed(0)
    increments = increments_of(3, generator)
    before = torch.matmul(*(f if i == 0 else f.T for i, f in enumerate(increments.joined())))
    increments.compact(4)
    left, right = increments.joined()
    lost = torch.linalg.matrix_norm(before - left @ right.T)
    assert increments.rank == 4
    assert increments.lost == pytest.approx(lost.item(), rel=1e-9)
    assert increments.lost == pytest.approx(torch.linalg.svdvals(before)[4:].norm().item(), rel=1e-9)
    assert increments.norm() == pytest.approx(torch.linalg.matrix_norm(left @ right.T).item(), rel=1e-9)


def test_a_bound_that_holds_nothing_but_the_present_window_is_refused():
    state = AdapterState(max_rank=2)
    with pytest.raises(ModelError, match="--max-rank 4"):
        state.close(2)


def trained(inputs, out, *more, steps=STEPS):
    assert train(*inputs, out, *more, steps=steps, batch=3, lr=1e-2, lazy_steps=3) == 0
    return out


def applied(model, folder):
    """The base with the adapter of a folder, as PEFT's formula has it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name in {name.rpartition(".lora_")[0] for name in tensors}:
            product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            named[name.removeprefix("base_model.model.") + ".weight"] += product * (
                config["lora_alpha"] / config["r"]
            )
    return model


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    "more",
    [
        ("--distribution", "lozo", "--weights", "adapters", "--residency", "offloaded"),
        ("--distribution", "factorised", "--rng", "counter", "--num-perturbations", 2),
        ("--distribution", "lozo-released", "--perturbation-rank", 3),
    ],
    ids=["adapters", "counter", "released"],
)
def test_the_adapter_of_a_log_is_what_the_run_did(inputs, tmp_path, more):
    out = trained(inputs, tmp_path / "run", "--tune", "linears", *more)
    result = write_adapter(out, inputs[0], tmp_path / "adapter")
    merged, tuned = applied(loaded(inputs[0]), tmp_path / "adapter"), loaded(out)
    for (name, parameter), same in zip(merged.named_parameters(), tuned.parameters(), strict=True):
        # Each of seven steps is rounded to a weight's 24 bits.
        assert torch.allclose(parameter, same, rtol=1e-6, atol=1e-6), name
    assert (result["num_steps"], result["num_matrices"]) == (STEPS, 18)
    assert result["relative_error"] == 0


def test_versions_stand_beside_each_other_and_are_compacted(inputs, tmp_path):
    flags = ("--tune", "linears", "--distribution", "lozo")
    out = trained(inputs, tmp_path / "run", *flags)
    assert zosim("adapter", out, "--model", inputs[0], "--steps", 4, "-o", tmp_path / "4") == 0
    shorter = trained(inputs, tmp_path / "shorter", *flags, steps=4)
    for parameter, same in zip(
        applied(loaded(inputs[0]), tmp_path / "4").parameters(), loaded(shorter).parameters(), strict=True
    ):
        assert torch.allclose(parameter, same, rtol=1e-6, atol=1e-6)
    result = write_adapter(out, inputs[0], tmp_path / "small", max_rank=4)
    assert result["rank"] == 4
    assert 0 < result["relative_error"] < 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--distribution", "lozo"), "more than the linear layers"),
        (("--distribution", "lozo", "--tune", "linears", "--weight-decay", 0.1), "used a weight decay"),
    ],
)
def test_what_is_no_adapter_is_refused(inputs, tmp_path, more, says):
    out = trained(inputs, tmp_path / "run", *more, steps=1)
    with pytest.raises(RunError, match=says):
        write_adapter(out, inputs[0], tmp_path / "adapter")
