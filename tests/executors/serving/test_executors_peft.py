"""Adapters as PEFT reads them: the library itself loads what runs and ``zosim adapter`` write, and computes the same."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from costmodel.models.configs import LoRA, read_model_spec
from executors.low_bits.linear import quantized_layers
from executors.models.lora import save_adapters
from executors.runs.replay import load_base
from executors.runs.session import Session
from tests.support.command import loaded, saved_lines, saved_model, zosim
from tests.support.quantized import compressed
from tests.support.tiny import batches
from zosim.plans import LowBits, Placement, Plan

LORA = {"rank": 2, "alpha": 3.0, "seed": 5}
TARGETS = {
    "opt": ("q_proj", "fc2"),
    "llama": ("v_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "roberta": ("query", "dense"),
}
INT4 = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 16}


def with_peft(model, folder):
    """Let PEFT put the adapter in `folder` beside a model; nothing that it has may be missing there, nor be left over."""
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    assert not [str(one.message) for one in output if "adapter" in str(one.message)]
    return adapted


def base_of(name, folder):
    if name != "roberta":
        return loaded(folder)
    return AutoModelForMaskedLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def trained_adapters(folder, name, lora=LORA, num_steps=3, **low_bits):
    """Train adapters for some steps; return the session's model."""
    lora = LoRA(target_modules=TARGETS[name], **lora)
    spec = read_model_spec(folder, trainable=lora)
    if spec.stored is not None:
        low_bits = {**spec.stored.fields, **low_bits}
    place = Placement(topology="test", devices=("cpu0",))
    plan = Plan(model=spec, placement=place, batch=3, seq=9, low_bits=LowBits(**low_bits))
    session = Session(plan, load_base(str(folder), plan, adapters=lora), learning_rate=1e-2, seed=3)
    for batch in batches(num_steps):
        session.step(batch)
    session.flush()
    return session.model


LAZY = LORA | {"lazy_steps": 2, "max_rank": 4}
"""Seven steps are three windows that are closed, of which increments of rank 2 are left, and an open one."""


@pytest.mark.parametrize(
    ("name", "low_bits"),
    [("opt", {}), ("gpt2", {}), ("llama", {"weights": "int8"})],
    ids=["opt", "gpt2", "llama-int8"],
)
def test_peft_loads_the_adapter_of_windows_and_computes_their_logits(tmp_path, name, low_bits):
    base = saved_model(name, tmp_path)
    model = trained_adapters(base, name, LAZY, 7, **low_bits)
    save_adapters(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    theirs = base_of(name, base)
    if low_bits:
        qvalues = {n: layer.numbers(torch.float32) for n, layer in quantized_layers(model)}
        theirs.load_state_dict(qvalues, strict=False)
    inputs = {"input_ids": batches(1)[0]["input_ids"]}
    with torch.no_grad():
        plain = theirs(**inputs).logits
        adapted = with_peft(theirs, tmp_path / "adapter")(**inputs).logits
        assert torch.equal(adapted, model(**inputs).logits)
    assert (adapted - plain).abs().max() > 1e-3


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("name", "low_bits"),
    [
        ("opt", {}),
        ("llama", {}),
        ("gpt2", {}),
        ("roberta", {}),
        ("opt", {"weights": "int8"}),
        ("gpt2", {"weights": "int4"}),
        ("opt", {"weights": "int4", "adapters": "int8"}),
        ("gpt2", {"weights": "int8", "adapters": "float8_e4m3"}),
    ],
    ids=["opt", "llama", "gpt2", "roberta", "opt-int8", "gpt2-int4", "opt-int4-int8", "gpt2-int8-fp8"],
)
def test_peft_loads_the_adapters_of_a_run_and_computes_its_logits(tmp_path, name, low_bits):
    base = saved_model(name, tmp_path)
    model = trained_adapters(base, name, **low_bits)
    save_adapters(model, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for tensor in tensors.values())  # B has left zero
    theirs = base_of(name, base)
    if low_bits:
        # The base that the adapters stand beside is what its quantized values stand for.
        qvalues = {
            n: layer.numbers(torch.float32) for n, layer in quantized_layers(model) if "lora_" not in n
        }
        theirs.load_state_dict(qvalues, strict=False)
    inputs = {"input_ids": batches(1)[0]["input_ids"]}
    with torch.no_grad():
        plain = theirs(**inputs).logits
        adapted = with_peft(theirs, tmp_path / "adapter")(**inputs).logits
        assert torch.equal(adapted, model(**inputs).logits)
    assert not torch.equal(adapted, plain)


def run_command(base, lines, *options):
    """Return the command that tunes a model for four steps in this process."""
    inputs = f"run --model {base} --data {lines} --steps 4 --batch 3 --lr 1e-2 --residency resident"
    return (*inputs.split(), "--no-launch", "--no-tensorboard", *options)


def test_adapters_beside_a_base_that_another_tool_has_quantized(tmp_path):
    base, lines, out = tmp_path / "base", tmp_path / "lines.jsonl", tmp_path / "out"
    compressed("opt-untied", base, "pack-quantized", dtype=torch.float32, **INT4)
    saved_lines(lines)
    command = run_command(base, lines, "--lora-rank", 2, "--lora-targets", "q_proj,fc1", "--lora-alpha", 3)
    for seed in (5, 6):
        assert zosim(*command, "--seed", seed, "--out", f"{out}{seed}") == 0
    starts = [
        json.loads((tmp_path / f"out{seed}" / "run.json").read_text())["run"]["lora"]["seed"]
        for seed in (5, 6)
    ]
    assert starts == [5, 6]
    inputs = {"input_ids": batches(1)[0]["input_ids"]}
    theirs = loaded(base)
    with torch.no_grad():
        plain = theirs(**inputs).logits  # compressed-tensors makes numbers of its quantized values here
        adapted = with_peft(theirs, tmp_path / "out5" / "adapter")(**inputs).logits
        # What the run wrote whole has the products added to the numbers, which rounds otherwise than a second product.
        merged = loaded(tmp_path / "out5")(**inputs).logits
    assert (adapted - merged).abs().max() < 1e-5 * adapted.abs().max()
    assert (adapted - plain).abs().max() > 1e-3 * adapted.abs().max()


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_peft_loads_the_updates_of_a_log(tmp_path, name):
    base, lines, out = saved_model(name, tmp_path), tmp_path / "lines.jsonl", tmp_path / "out"
    saved_lines(lines)
    command = run_command(base, lines, "--tune", "linears", "--distribution", "lozo", "--lazy-steps", 2)
    assert zosim(*command, "--out", out) == 0
    assert zosim("adapter", out, "-o", tmp_path / "adapter") == 0
    inputs = {"input_ids": batches(1)[0]["input_ids"]}
    with torch.no_grad():
        plain, tuned = (loaded(folder)(**inputs).logits for folder in (base, out))
        adapted = with_peft(loaded(base), tmp_path / "adapter")(**inputs).logits
    # The run rounded every step to its weights; products beside them are rounded once.
    assert (adapted - tuned).abs().max() < 1e-5 * tuned.abs().max()
    assert (plain - tuned).abs().max() > 1e-3 * tuned.abs().max()
