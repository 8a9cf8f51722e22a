from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
import typer
from typer.testing import CliRunner

from costmodel.formats.codecs import CodecSpec, codec_spec
from executors.boundary_probe import probe, probe_boundaries
from executors.models.model import SegmentedModel
from executors.models.spec import spec_of_model
from executors.models.split_points import SplitPoint, boundary_tensors, loss_through, split_points_of
from tests.support.tiny import CONFIGS, batches, model_of, plan_of
from topology.errors import PlanError
from zosim.lowering.split import expected_message_bytes
from zosim.planning.split_options import SplitOptions, read_densities
from zosim.plans import Plan, Split

KNOWN = ("opt", "gpt2", "llama")
NORM_BEHIND = "opt-projected"


def segmented_and_batch(name="opt", dtype=torch.float64):
    return SegmentedModel(model_of(name, dtype=dtype)), batches(1)[0]


@pytest.mark.parametrize("name", KNOWN)
def test_what_crosses_is_what_the_model_computes(name):
    model, batch = segmented_and_batch(name)
    with torch.no_grad():
        found = boundary_tensors(model, batch)
        states = model.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        ).hidden_states
    assert set(found) == set(split_points_of(model))
    inner = model.model.config.to_dict()
    width = inner.get("ffn_dim") or inner.get("intermediate_size") or 4 * inner["n_embd"]
    for i in range(len(model.blocks) - 1):  # the last state has been normalised
        assert torch.equal(found[SplitPoint(i)]["hidden"], states[i + 1])
        assert found[SplitPoint(i, inside=True)]["activation"].shape[-1] == width
    if name == "opt":
        assert bool((found[SplitPoint(0, inside=True)]["activation"] >= 0).all())


@pytest.mark.parametrize("name", KNOWN)
def test_both_tensors_inside_a_block_give_its_output(name):
    model, batch = segmented_and_batch(name)
    with torch.no_grad():
        found = boundary_tensors(model, batch)
        block = model.blocks[1]
        modules = dict(block.named_modules())
        linear = next(modules[path] for path in ("fc2", "mlp.c_proj", "mlp.down_proj") if path in modules)
        rebuilt = found[SplitPoint(1, inside=True)]["residual"] + linear(
            found[SplitPoint(1, inside=True)]["activation"]
        )
    torch.testing.assert_close(
        rebuilt, found[SplitPoint(1)]["hidden"], rtol=1e-12, atol=1e-12
    )  # float64, summed otherwise


@pytest.mark.parametrize("name", [*KNOWN, NORM_BEHIND])
def test_boundaries_that_change_nothing_change_no_loss_and_others_do(name):
    model, batch = segmented_and_batch(name)
    with torch.no_grad():
        whole = model.model(**batch).loss
        everywhere = {split_point: (lambda _name, tensor: tensor) for split_point in split_points_of(model)}
        assert torch.equal(loss_through(model, batch, everywhere), whole)
        for wanted in ("activation", "residual"):
            zeroed = {SplitPoint(1, inside=True): lambda n, t, wanted=wanted: t * 0 if n == wanted else t}
            assert abs(loss_through(model, batch, zeroed) - whole) > 1e-6


def test_the_probe_measures_every_boundary_and_leaves_the_model_as_it_was():
    model, batch = segmented_and_batch(dtype=torch.float32)
    before = [tensor.parameter.detach().clone() for tensor in model.tensors]
    report = probe_boundaries(model, [batch], [codec_spec("q4"), codec_spec("q8")], epsilon=1e-3)
    assert all(torch.equal(t.parameter, was) for t, was in zip(model.tensors, before, strict=True))
    assert len(report.tensors) == len(model.blocks) * 3 * 2
    assert len(report.losses) == len(split_points_of(model)) * 2
    by_bits = {
        row.codec[:2]: row
        for row in report.tensors
        if (row.split_point, row.tensor) == ("block.1.mlp", "activation")
    }
    four, eight = by_bits["q4"], by_bits["q8"]
    assert four.relative_error > eight.relative_error
    assert four.entropy_bits < eight.entropy_bits
    assert four.nonzero == eight.nonzero
    assert 0.2 < four.nonzero < 0.8  # a ReLU of random weights
    assert four.kept <= four.nonzero
    assert four.smallest_epsilon > eight.smallest_epsilon


def test_the_probe_refuses_what_measures_nothing():
    model, batch = segmented_and_batch()
    with pytest.raises(PlanError, match="is lossless"):
        probe_boundaries(model, [batch], [CodecSpec()], epsilon=1e-3)
    with pytest.raises(PlanError, match="epsilon=0"):
        probe_boundaries(model, [batch], [CodecSpec(4)], epsilon=0)


def test_the_command_reports_in_json(tmp_path):
    CONFIGS["opt"].save_pretrained(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"input_ids": [5, 6, 7, 8 + k], "labels": [5, 6, 7, 8]}) for k in range(4))
    )
    app = typer.Typer(add_completion=False)
    app.command()(probe)
    arguments = f"--model {tmp_path} --random-weights --data {data} --codec q2 --batch 2 --json".split()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {row["tensor"] for row in report["tensors"]} == {"hidden", "activation", "residual"}
    assert any("quantization adds" in (row["warning"] or "") for row in report["tensors"])


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize("name", [*KNOWN, "qwen3"])
@pytest.mark.parametrize("codec", ["q2", "q4", "q4:affine-zero:token", "q8"])
def test_a_plan_that_knows_the_probe_predicts_messages(name, codec, tmp_path):
    """Of both tensors inside a block, whatever their distribution: heavy tails of Llama's as well as a ReLU's."""
    model = SegmentedModel(model_of(name))
    (batch,) = batches(1, size=16, seq=24)
    report = probe_boundaries(model, [batch], [codec_spec(codec)], epsilon=1e-3)
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(asdict(report)))
    split_options = SplitOptions(densities=read_densities(path))
    for split_point in ("block.1.mlp", "block.1"):
        spec = spec_of_model(
            model_of(name), "tiny", split_blocks=(1,) if split_point.endswith(".mlp") else ()
        )
        whole = plan_of(model_of(name), size=16, seq=24)
        split = Split(
            split_points=(split_point,),
            codec=codec if split_point.endswith(".mlp") else "none",
            residual_codec=codec,
            densities=(split_options.symbols(split_point, codec_spec(codec), codec_spec(codec)),),
        )
        data = whole.model_dump(mode="json") | {
            "model": spec.model_dump(mode="json"),
            "split": split.model_dump(mode="json"),
        }
        plan = Plan.model_validate(data)
        made = sum(row.size_bytes for row in report.tensors if row.split_point == split_point)
        # Ends of words, and tables of symbols that do not occur.
        assert expected_message_bytes(plan, 0, 16) == pytest.approx(made, rel=0.02, abs=600)
