"""Measurements of others: each row gets a prediction or a reason, and errors are counted group by group."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from costmodel.models.configs import shipped_config
from costmodel.models.families import FAMILIES
from costmodel.rates.profile import load_profile
from topology.clusters import cluster
from topology.documents import dump, load_preset, preset_names
from topology.errors import ZosimError
from zosim.applications.validation.learning import learned_from_rows
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.models import model_of
from zosim.applications.validation.predicting import PREDICTORS, outcome
from zosim.applications.validation.rows import (
    Forecast,
    MeasuredRow,
    RowsError,
    Verdicts,
    columns_of,
    joined,
    read_rows,
)
from zosim.cli import app

PRESET = "a100-80gb-milan"
MATMUL = {"kind": "matmul", "hardware": PRESET, "dtype": "float16", "m": "4096", "n": "8192", "k": "8192"}
TINY = json.dumps(
    {
        "model_type": "opt",
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "hidden_size": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
        "do_layer_norm_before": True,
    }
)
STEP = {"model": "tiny", "model_config": TINY, "batch": "4", "seq": "64", "dtype": "float16", "devices": "1"}
ROWS = {
    "matmul": MATMUL,
    "elementwise": {"dtype": "float16", "bytes": "200000000"},
    "attention": {"dtype": "float16", "batch": "2", "heads": "16", "seq": "2048", "head_dim": "128", "causal": "true"},
    "attention_backward": {"dtype": "float16", "batch": "2", "heads": "16", "seq": "2048", "head_dim": "128"},
    "draw": {"dtype": "float16", "elements": "100000000"},
    "copy": {"direction": "d2h", "bytes": "1000000000"},
    "p2p": {"hardware": "dgx-h100", "ranks": "2", "bytes": "1000000"},
    "all_reduce": {"hardware": "dgx-h100", "ranks": "8", "bytes": "1000000"},
    "all_gather": {"hardware": "dgx-h100", "ranks": "8", "bytes": "1000000"},
    "reduce_scatter": {"hardware": "dgx-h100", "ranks": "8", "bytes": "1000000"},
    "forward": STEP,
    "streamed_generation": {**STEP, "generated_tokens": "3"},
    "nvme_streamed": {
        **STEP, "hardware": "rtx4090-1x-nvme", "recipe": "weights-on-nvme", "generated_tokens": "3",
        "quantity": "generated_tokens_per_s",
    },
    "step": {**STEP, "method": "mezo", "code": "published"},
    "device_memory": {**STEP, "method": "zo2"},
    "host_memory": {**STEP, "method": "zo2"},
    "first_order_step": {**STEP, "hardware": "dgx-h100", "data_parallel": "2", "optimizer": "adam"},
    "first_order_memory": {**STEP, "optimizer": "adam"},
    "first_order_fits": {**STEP, "recipe": "adamw-bf16"},
    "first_order_throughput": {**STEP, "recipe": "adamw-bf16", "quantity": "tokens_per_s"},
    "moe_forward": {**STEP, "quantity": "tokens_per_s"},
}  # fmt: skip


LIKE_DEEPSEEK = {
    "model_type": "deepseek",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _row(kind: str, /, **changes: str) -> MeasuredRow:
    return MeasuredRow({"kind": kind, "hardware": PRESET, **ROWS[kind], **changes}, "here")


def _forecast(kind: str, /, **changes: str) -> Forecast:
    printed = outcome(_row(kind, **changes), MeasuredMachines())
    assert isinstance(printed, Forecast), printed
    return printed


@pytest.mark.parametrize("kind", list(PREDICTORS))
def test_every_kind_of_row_is_predicted_within_its_own_interval(kind: str) -> None:
    printed = _forecast(kind)
    assert (kind == "first_order_fits") <= (printed.low == 0)
    assert 0 <= printed.low <= printed.predicted <= printed.high < float("inf")


def test_what_a_row_does_not_say_is_assumed_and_named(tmp_path: Path) -> None:
    assert _forecast("matmul").assumed == ()
    silent = _forecast("matmul", dtype="")
    assert silent.assumed == ("dtype bfloat16",)
    assert silent.predicted == _forecast("matmul", dtype="bfloat16").predicted
    assert columns_of(silent)["why"] == "assumed: dtype bfloat16"
    assert _forecast("matmul", dtype="", hardware="dgx-1v").assumed == (
        "dtype float16",
    )  # Volta has no bfloat16
    assert _forecast("all_reduce", ranks="").predicted == _forecast("all_reduce", ranks="8").predicted
    assert _forecast("copy", direction="").predicted == _forecast("copy", direction="HtoD").predicted
    assert _forecast("step", method="", batch="").assumed == ("batch 1", "method mezo")
    assert _forecast("matmul", m="4096.0", n="8.192e3").predicted == _forecast("matmul").predicted


@pytest.mark.parametrize(
    "name", ["NVIDIA L4", "l40s", "mi300x", "8x a100-40gb-sxm", "2 x rtx-a6000", "GeForce RTX 3090"]
)
def test_gpus_are_hardware_by_their_names(name: str) -> None:
    assert _forecast("matmul", hardware=name).predicted > 0
    if name[0].isdigit():
        ranks = name[0]
        assert _forecast("all_reduce", hardware=name, ranks=ranks).predicted > 0


class _Blanked(MeasuredRow):
    """A row that refuses to say what was measured, and what is remarked on it."""

    def __getitem__(self, column: str) -> str:
        assert column not in ("measured", "unit", "note", "flag", "source", "where", "id", "group"), column
        return super().__getitem__(column)


@pytest.mark.parametrize("kind", list(PREDICTORS))
def test_a_row_does_not_need_what_was_measured_nor_remarks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zosim.applications.validation.predicting.MeasuredRow", _Blanked)
    assert outcome(_Blanked(_row(kind).fields, "here"), MeasuredMachines()) == _forecast(kind)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("matmul", {"m": "0"}, "m is '0'"),
        ("matmul", {"m": "many"}, "m is 'many'"),
        ("matmul", {"dtype": "int3"}, "int3"),
        ("matmul", {"hardware": "no-such-machine"}, "no-such-machine"),
        ("matmul", {"hardware": ""}, "hardware"),
        ("matmul", {"kind": "matmulx"}, "matmulx"),
        ("copy", {"direction": "up"}, "up"),
        ("all_reduce", {"ranks": "9"}, "9"),
        ("all_reduce", {"ranks": "1"}, "2 ranks"),
        ("step", {"model_config": "[1]"}, "JSON object"),
        ("step", {"model_config": "", "model": "opt-9z"}, "opt-9z"),
        ("step", {"method": "sgd"}, "sgd"),
        ("step", {"seq": "0"}, "seq is '0'"),
        ("first_order_step", {"data_parallel": "64"}, "64"),
        ("first_order_step", {"recompute": "selective"}, "selective"),
        ("attention", {"attention_kernel": "paged"}, "paged"),
        ("attention", {"kv_heads": "7"}, "kv_heads=7 does not divide heads=16"),
        ("copy", {"bytes": "1 GB"}, "bytes is '1 GB'; it must be a whole number above 0"),
        ("first_order_step", {"optimizer": "lion"}, "lion"),
        ("forward", {"model_config": json.dumps({**LIKE_DEEPSEEK, "n_routed_experts": 8})}, "experts"),
        ("forward", {"model_config": '{"model_type": "mamba", "hidden_size": 64}'}, "mamba"),
        ("forward", {"model_config": '{"model_type": "yi", "hidden_size": 64}'}, "heads"),
    ],
)
def test_what_cannot_be_predicted_says_why(kind: str, changes: dict[str, str], word: str) -> None:
    printed = outcome(_row(kind, **changes), MeasuredMachines())
    assert isinstance(printed, str)
    assert word in printed


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        ({"model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
          "num_attention_heads": 32}, 2.78),
        ({"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 32}, 3.82),
        ({"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
          "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}, 2.51),
        ({"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
          "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}, 9.24),
        ({"model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
          "num_attention_heads": 64}, 20.55),
        ({"model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048}, 6.05),
        ({"model_type": "bloom", "vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32}, 7.07),
        ({"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}, 6.92),
        ({"model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
          "num_kv_heads": 8, "new_decoder_architecture": True}, 41.3),
        ({"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4}, 6.65),
        ({"model_type": "starcoder2", "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
          "num_attention_heads": 24, "num_key_value_heads": 2}, 3.03),
        ({"model_type": "gpt_bigcode", "vocab_size": 49152, "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576}, 15.5),
        ({"model_type": "qwen", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 24,
          "num_attention_heads": 16, "kv_channels": 128}, 1.84),
        ({"model_type": "stablelm", "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 32}, 2.80),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_families_are_predicted_with_the_sizes_that_their_cards_print(
    config: dict[str, object], billions: float
) -> None:
    changes = {"model": "other", "model_config": json.dumps(config)}
    model = model_of(_row("forward", **changes))
    # Cards print three digits; positions, norms and biases are a part of what is left out or put in.
    assert model.num_parameters == pytest.approx(1e9 * billions, rel=0.015)
    family = config["model_type"]
    printed = _forecast("forward", **changes)
    assert printed.assumed == (
        () if family in FAMILIES else (f"model_type {family} as {model.family} of its sizes",)
    )
    assert _forecast("forward").assumed == ()


def _assert_has_parameters(name: str, billions: float) -> None:
    model = model_of(_row("forward", model=name, model_config=""))
    assert model.num_parameters == pytest.approx(1e9 * billions, rel=0.005)


@pytest.mark.crossed(quick=5)
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("phi-2", 2.780), ("microsoft/phi-1_5", 1.418), ("gemma-2b", 2.506), ("google/gemma-7b-it", 8.538), ("gemma-2-9b", 9.242),
        ("falcon-7b", 6.922), ("EleutherAI/pythia-6.9b", 6.857), ("gpt-neox-20b", 20.555), ("gpt-j-6b", 6.051), ("mpt-7b", 6.649),
        ("bloom-7b1", 7.069), ("Qwen-72B", 72.288), ("internlm2-20b", 19.861), ("phi-4", 14.660),
        ("mosaicml/mpt-30b", 29.97), ("tiiuae/falcon-40b", 41.30), ("bigscience/bloom", 176.25), ("EleutherAI/gpt-neo-2.7B", 2.651),
        ("baichuan-inc/Baichuan2-7B-Base", 7.506), ("internlm-20b", 20.09), ("stabilityai/stablelm-2-1_6b", 1.645),
        ("bigcode/starcoder2-7b", 7.174), ("starcoder2-15b", 15.957), ("allenai/OLMo-7B", 6.888),
        ("ibm-granite/granite-3.1-8b-base", 8.171), ("THUDM/glm-4-9b", 9.40), ("chatglm3-6b", 6.244), ("google/gemma-3-1b-it", 1.000),
        ("google/gemma-3-27b-it", 27.01), ("togethercomputer/RedPajama-INCITE-7B-Base", 6.857), ("c4ai-command-r-v01", 34.98),
    ],
)  # fmt: skip
def test_common_names_are_models_with_as_many_parameters_as_were_published(
    name: str, billions: float
) -> None:
    _assert_has_parameters(name, billions)
    is_like_another = shipped_config(name)["model_type"] not in FAMILIES
    assert is_like_another == any(
        "of its sizes" in printed for printed in _forecast("forward", model=name, model_config="").assumed
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("GPT-3 175B", 174.6), ("gpt3-6.7b", 6.66), ("cerebras/Cerebras-GPT-13B", 12.85), ("mt-nlg-530b", 530), ("gpt2-1.5b", 1.558),
        ("Llama 2 7B", 6.738), ("llama3.1:8b", 8.030), ("HuggingFaceH4/zephyr-7b-beta", 7.242), ("mistral-large", 122.6),
        ("openlm-research/open_llama_3b", 3.426), ("tiiuae/Falcon3-7B-Base", 7.456), ("upstage/SOLAR-10.7B-v1.0", 10.73),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7.616), ("Qwen/Qwen1.5-14B-Chat", 14.167), ("deepseek-coder-33b-instruct", 33.34),
    ],
)  # fmt: skip
def test_names_of_families_that_run_here_are_models_with_as_many_parameters_as_were_published(
    name: str, billions: float
) -> None:
    _assert_has_parameters(name, billions)


def test_a_mixture_takes_as_long_as_the_experts_that_its_tokens_visit() -> None:
    mixture, dense = (
        _forecast("forward", model=name, model_config="") for name in ("Mixtral-8x7B-v0.1", "mistral-7b-v0.1")
    )
    # Two experts of eight for every token: more than one MLP, far less than eight.
    assert 1.2 * dense.predicted < mixture.predicted < 8 * dense.predicted


def test_engines_of_experts_run_hooks_and_store_scores_of_latents() -> None:
    """ZeRO's hooks cost a module a third of a millisecond; DeepSeek-V2 has 160 experts of five in 59 of its 60 blocks."""
    row = {
        "model": "deepseek-ai/DeepSeek-V2",
        "model_config": "",
        "batch": "8",
        "seq": "512",
        "dtype": "bfloat16",
    }
    seconds = {
        code: 8 * 512 / _forecast("moe_forward", **row, code=code).predicted
        for code in ("flexgen", "deepspeed-zero-inference")
    }
    hooks_s = seconds["deepspeed-zero-inference"] - seconds["flexgen"]
    assert hooks_s == pytest.approx((60 * 12 + 59 * 160 * 5) * 0.012 / 36, rel=1e-3)
    many = {**row, "batch": "256"}
    rates = [_forecast("moe_forward", **many, code=code).predicted for code in ("moe-gen", "flexgen")]
    assert rates[0] < 0.9 * rates[1]


def test_a_gpu_without_units_for_bfloat16_multiplies_it_in_float32_and_stores_scores() -> None:
    """Published: half of float32's rate on a GTX 1080, and whole passes 4.3 to 4.7 times as long as in float16."""
    on_t4 = {
        dtype: _forecast("matmul", hardware="t4-1x", dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
    }
    times_s = {dtype: printed.predicted for dtype, printed in on_t4.items()}
    assert on_t4["bfloat16"].assumed == ("bfloat16 multiplied in float32",)
    assert not on_t4["float16"].assumed
    assert not on_t4["float32"].assumed
    assert times_s["bfloat16"] / times_s["float32"] == pytest.approx(2, rel=0.01)
    measured_s = 2 * 4096 * 8192 * 8192 / (0.41 * 8.1e12)  # the GTX 1080's part of the peak
    assert on_t4["bfloat16"].low < measured_s < on_t4["bfloat16"].high
    long = {"hardware": "t4-1x", "seq": "256", "batch": "64"}
    stored, fused = (
        _forecast("device_memory", **long, dtype=dtype, method="mezo").predicted
        for dtype in ("bfloat16", "float16")
    )
    assert (
        stored
        == _forecast(
            "device_memory", **long, dtype="float16", method="mezo", attention_kernel="eager"
        ).predicted
    )
    assert stored > fused


def test_floats_of_8_bits_need_units_for_them() -> None:
    assert "no units for floats of 8 bits" in str(outcome(_row("matmul", dtype="fp8"), MeasuredMachines()))
    half = _forecast("matmul", hardware="h100-80gb-pcie").predicted
    assert 1.4 < half / _forecast("matmul", hardware="h100-80gb-pcie", dtype="fp8").predicted <= 2


def test_integers_of_8_bits_are_multiplied_faster_where_there_are_units_for_them(tmp_path: Path) -> None:
    for name in ("t4", "a40", "rtx-a6000", "rtx3090", "l4", "rtx5090", "mi300x"):
        half, bytes_ = (_forecast("matmul", hardware=name, dtype=dtype) for dtype in ("float16", "int8"))
        assert half.predicted > 1.2 * bytes_.predicted
        assert bytes_.assumed == ()
    volta = _forecast("matmul", hardware="v100-32gb-sxm2", dtype="int8")
    assert volta.assumed == ("int8 multiplied as float16",)
    assert volta.predicted == _forecast("matmul", hardware="v100-32gb-sxm2").predicted
    # A topology file that leaves the peak out.
    machine = yaml.safe_load(dump(load_preset("t4-1x")))
    device = machine["devices"]["t4"]
    del device["peak_dense"]["int8"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(machine), encoding="utf-8")
    mine = outcome(_row("matmul", hardware="mine.yaml", dtype="int8"), MeasuredMachines(folder=tmp_path))
    assert isinstance(mine, Forecast)
    assert mine.predicted == _forecast("matmul", hardware="t4", dtype="int8").predicted


def test_hosts_with_fewer_ranks_let_fewer_rings_through(tmp_path: Path) -> None:
    """Twelve of sixteen GPUs: the second host has four adapters for four GPUs, half of what eight have."""
    (tmp_path / "two.yaml").write_text(dump(cluster(load_preset("dgx-h100"), 2)), encoding="utf-8")
    times = {}
    for ranks in (8, 12, 16):
        row = _row("all_reduce", hardware="two.yaml", ranks=str(ranks), bytes="1073741824")
        printed = outcome(row, MeasuredMachines(folder=tmp_path))
        assert isinstance(printed, Forecast), printed
        times[ranks] = printed.predicted
    assert times[8] < times[16] < times[12] < 2.1 * times[16]


def test_formats_and_optimizers_go_by_the_names_that_others_use() -> None:
    assert _forecast("matmul", dtype="torch.float16") == _forecast("matmul")
    assert _forecast("first_order_step", dtype="amp_bf16") == _forecast("first_order_step", dtype="bf16")
    hopper = {"hardware": "dgx-h100"}
    assert _forecast("matmul", dtype="float8_e5m2", **hopper) == _forecast("matmul", dtype="fp8", **hopper)
    assert (
        _forecast("matmul", dtype="fp8", **hopper).predicted
        < _forecast("matmul", dtype="int8", **hopper).predicted
        < _forecast("matmul", **hopper).predicted
    )
    assert _forecast("first_order_step", optimizer="AdamW") == _forecast(
        "first_order_step", optimizer="fused_adam"
    )
    assert _forecast("first_order_step", optimizer="AdamW") == _forecast("first_order_step")


@pytest.mark.parametrize("kind", ["step", "first_order_step"])
def test_steps_in_tf32_keep_float32_and_multiply_faster(kind: str) -> None:
    large = {"model": "opt-1.3b", "model_config": "", "batch": "16", "seq": "512"}
    half, tf32, wide = (
        _forecast(kind, dtype=dtype, **large).predicted for dtype in ("float16", "tf32", "float32")
    )
    assert half < tf32 < wide


def test_the_command_writes_the_columns_of_the_rows_and_four_more(tmp_path: Path) -> None:
    rows = [
        {"id": "a", **MATMUL, "measured": "0.0025", "flag": "", "note": "kept, as it is"},
        {"id": "b", **MATMUL, "kind": "sorting", "measured": "1", "flag": "", "note": ""},
        {"id": "c", **MATMUL, "measured": "1e-9", "flag": "another clock", "note": ""},
        {"id": "d", **MATMUL, "measured": "", "flag": "", "note": ""},
    ]
    given, written = tmp_path / "rows.csv", tmp_path / "out.csv"
    with given.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    done = CliRunner().invoke(app, ["validate", str(given), "-o", str(written), "--json"])
    assert done.exit_code == 0, done.output
    with written.open(newline="") as file:
        out = list(csv.DictReader(file))
    assert [list(row) for row in out] == [[*rows[0], "predicted", "low", "high", "why"]] * 4
    assert [row["note"] for row in out] == [row["note"] for row in rows]
    assert [bool(row["why"]) for row in out] == [False, True, False, False]
    assert out[0]["predicted"] == out[2]["predicted"] == out[3]["predicted"]
    data = json.loads(done.stdout)
    error = float(out[0]["predicted"]) / 0.0025 - 1
    (matmul, sorting) = data["groups"]
    assert (matmul["rows"], matmul["blank"], sorting["blank"]) == (1, 0, 1)
    assert matmul["signed"] == pytest.approx(error, abs=1e-5)
    assert matmul["median"] == pytest.approx(abs(error), abs=1e-5)


def test_a_row_joins_what_was_measured_and_what_is_predicted() -> None:
    row = _row("matmul", group="products", measured="2", source="somebody")
    joined_row = joined(row, Forecast(3, 2.5, 4))
    assert (joined_row.group, joined_row.provenance, joined_row.error) == ("products", "somebody", 0.5)
    assert joined(row, "why not").predicted is None
    flagged = _row("matmul", measured="what a spreadsheet says of errors", flag="doubtful")
    assert not joined(flagged, Forecast(3, 2.5, 4)).is_counted


def test_a_run_out_of_memory_is_a_measurement_of_0() -> None:
    fits = {"kind": "first_order_fits", "hardware": PRESET}
    rows = [MeasuredRow({**fits, "measured": measured}, "row") for measured in ("1", "0", "0", "")]
    forecasts = [Forecast(predicted, 0, 1) for predicted in (0.9, 0.1, 0.8, 0.9)]
    verdicts = Verdicts.of(zip(rows, forecasts, strict=True))
    assert verdicts == Verdicts(num=3, num_right=2, num_wrongly_fitting=1)
    with pytest.raises(RowsError, match="measured is '0'"):
        assert MeasuredRow({**MATMUL, "measured": "0"}, "row").measured


@pytest.mark.parametrize("text", ["", "kind\nmatmul\n", "id,measured\n"])
def test_a_file_without_the_columns_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ZosimError, match="lacks columns"):
        read_rows(path)


def test_a_row_that_no_machine_could_run_does_not_take_the_others_along() -> None:
    printed = outcome(_row("matmul", m=str(10**17), n=str(10**17), k=str(10**17)), MeasuredMachines())
    assert isinstance(printed, str | Forecast)
    printed = outcome(_row("attention", heads=str(10**17), seq=str(10**17)), MeasuredMachines())
    assert isinstance(printed, str | Forecast)


def test_only_bytes_matter_to_a_pass_over_memory() -> None:
    assert _forecast("elementwise", dtype="") == _forecast("elementwise", dtype="float32")


def test_code_has_quirks_of_its_own() -> None:
    """Sharding, recomputation and a host that takes milliseconds a block are the measured code's, not the machine's."""
    base = {"data_parallel": "2", "num_micro_batches": "2"}
    plain = _forecast("first_order_step", **base)
    assert _forecast("first_order_step", **base, recompute="full").predicted > plain.predicted
    slow = _forecast("first_order_step", **base, code="megatron-deepspeed")
    # Two blocks there and back in each of two microbatches: the host alone takes 0.9 ms a visit.
    assert slow.predicted > 2 * 2 * 2 * 0.9e-3 > plain.predicted
    assert _forecast("forward", code="tensorrt-llm").predicted < _forecast("forward").predicted


def test_names_are_known_however_they_are_written() -> None:
    hopper = {"hardware": "h200-1x", "dtype": "bf16"}
    assert _forecast("attention", **hopper, code="FA3") == _forecast("attention", **hopper, code="fa3")
    stored = _forecast("attention", attention_kernel="eager")
    assert _forecast("attention", code="math") == _forecast("attention", attention_kernel="Eager") == stored
    assert _forecast("step", method="MeZO").predicted == _forecast("step", method="mezo").predicted
    full, yes, none = (
        _forecast("first_order_step", recompute=printed).predicted for printed in ("full", "True", "")
    )
    assert full == yes > none


def test_sharding_in_stages_is_a_code_by_its_name_and_unknown_code_is_named() -> None:
    """ZeRO's third stage keeps a share of weights and moments, and moves weights every pass."""
    many = {"model": "opt-1.3b", "model_config": "", "data_parallel": "8", "batch": "8"}
    whole, shared = (
        (
            _forecast("first_order_step", **many, hardware="dgx-a100", code=code),
            _forecast("first_order_memory", **many, hardware="dgx-a100", code=code),
        )
        for code in ("axolotl", "DeepSpeed-ZeRO3")
    )
    assert "code axolotl does as torch does" in whole[0].assumed
    assert not shared[0].assumed
    assert shared[1].predicted < 0.5 * whole[1].predicted


def test_a_step_that_no_device_has_room_for_says_so() -> None:
    large = _forecast("step", model="opt-175b", model_config="")
    assert "memory for 333" in large.assumed[-1]
    assert "on a device of 80 GiB" in large.assumed[-1]
    assert not _forecast("step").assumed


def test_many_generated_tokens_are_summed_from_some_of_them() -> None:
    """Few are all computed; of many the sum grows with their number, and a token's time lies between the first's and the last's."""
    seconds = {
        n: _forecast("streamed_generation", generated_tokens=str(n)).predicted
        for n in (17, 18, 19, 40, 100_000)
    }
    last = seconds[18] - seconds[17]
    assert seconds[19] - seconds[18] == pytest.approx(last, rel=0.02)
    assert (seconds[40] - seconds[18]) / 22 == pytest.approx(last, rel=0.1)
    assert seconds[100_000] > 99_000 * last


def test_memory_that_the_framework_counts_has_no_context() -> None:
    whole, counted = (
        _forecast("device_memory", quantity=what) for what in ("device memory", "allocated device memory")
    )
    assert whole.predicted - counted.predicted > 0.5e9
    assert counted.low < counted.predicted < counted.high


def test_a_cpu_multiplies_float16_as_its_code_does() -> None:
    shape = {"hardware": "cpu-laptop", "seq": "64"}
    torch, llama_cpp = (_forecast("forward", **shape, code=code) for code in ("torch", "llama.cpp"))
    assert llama_cpp.predicted < torch.predicted


def test_published_code_passes_over_parameters_more_often(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = f"plan --model opt-125m --hardware {PRESET} --seq 128 --dtype float16 -o {plan}".split()
    assert CliRunner().invoke(app, [*made, "--method", "mezo"]).exit_code == 0
    ours, published = (
        json.loads(CliRunner().invoke(app, ["simulate", str(plan), "--json", *code]).stdout)
        for code in ((), ("--code", "published"))
    )
    assert published["step_time_s"] > 1.1 * ours["step_time_s"]


GPU_PRESETS = [
    name for name in preset_names() if load_preset(name).compute_devices[0].type == "gpu"
]  # fmt: skip


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_no_kernel_beats_the_peak_or_the_memory_of_its_device(name: str) -> None:
    topology = load_preset(name)
    spec = topology.device_spec(topology.compute_devices[0].id)
    measured_machines, memory = MeasuredMachines(), spec.memory_bandwidth_bytes_per_s
    peak = spec.peak_flop_per_s("fp16")

    def least_s(kind: str, **cells: object) -> float:
        row = MeasuredRow(
            {"kind": kind, "hardware": name, "dtype": "float16", **{k: str(v) for k, v in cells.items()}},
            "here",
        )
        printed = outcome(row, measured_machines)
        assert isinstance(printed, Forecast), printed
        assert printed.low <= printed.predicted <= printed.high
        return printed.predicted

    for m in (1, 100, 128, 130, 512, 8192):
        n, k = 11008, 4096
        seconds = least_s("matmul", m=m, n=n, k=k)
        assert seconds > 2 * m * n * k / peak
        assert seconds > 2 * (m * k + k * n + m * n - _CACHED) / memory
    for head_dim, heads in ((32, 64), (80, 32), (128, 16), (256, 8)):
        for seq in (128, 1024, 8192):
            for code in ("", "fa2", "fa3", "cudnn"):
                shape = {
                    "batch": 32768 // seq,
                    "heads": heads,
                    "seq": seq,
                    "head_dim": head_dim,
                    "causal": "true",
                }
                seconds = least_s("attention", code=code, attention_kernel="fused", **shape)
                tokens = 32768 * heads * head_dim
                assert seconds > 2 * tokens * seq / peak
                assert seconds > 4 * 2 * tokens / memory
    assert least_s("elementwise", bytes=2**32) > 2**32 / memory


_CACHED = 50 * 2**20
"""Elements that the largest cache of a preset's GPU keeps at most."""


def test_a_table_of_kernels_teaches_a_profile_and_says_what_by_whom(tmp_path: Path) -> None:
    """Products that take a third longer than said, by one source, and copies at half the rate, by another."""
    measured_machines, lines = MeasuredMachines(), []
    for m, n in ((4096, 4096), (8192, 8192), (8192, 4096), (2048, 8192)):
        cells = {**MATMUL, "m": str(m), "n": str(n), "source": "one"}
        lines.append(cells | {"measured": str(1.33 * _forecast("matmul", **cells).predicted)})
    for size in (1 << 28, 1 << 30):
        cells = {"kind": "copy", "hardware": PRESET, "direction": "h2d", "bytes": str(size), "source": "two"}
        lines.append(cells | {"measured": str(2 * _forecast("copy", **cells).predicted)})
    lines.append({**MATMUL, "hardware": "h200-1x", "measured": "0.001", "source": "three"})
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for cells in lines for name in cells}))
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(ZosimError, match="several devices"):
        learned_from_rows(path)
    with pytest.raises(ZosimError, match="no measured kernel or copy of dgx-1v"):
        learned_from_rows(path, "dgx-1v")
    profile, report, lessons = learned_from_rows(path, PRESET)
    before = measured_machines.of(PRESET).profile
    printed = {lesson.name: lesson for lesson in lessons}
    rate, copying = "matmul_rate.float16", "copy_h2d_bandwidth"
    assert profile.constant(rate).value == pytest.approx(before.constant(rate).value / 1.33, rel=0.05)
    assert profile.constant(copying).value == pytest.approx(before.constant(copying).value / 2, rel=0.05)
    assert printed[rate].source == "one (4)"
    assert printed[copying].source == "two (2)"
    assert "one (4)" in profile.constant(rate).source
    assert profile.constant("dispatch_s") == before.constant("dispatch_s")
    assert report.median_error < 0.05


def test_calibrate_learns_from_rows_and_prints_who_taught_what(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"copy,{PRESET},h2d,{size},{size / 20e9},a forum" for size in (1 << 27, 1 << 30)]
    path.write_text("kind,hardware,direction,bytes,measured,source\n" + "\n".join(lines) + "\n")
    done = CliRunner().invoke(
        app, ["calibrate", "--evidence", str(path), "-o", str(tmp_path / "p.json"), "--json"]
    )
    assert done.exit_code == 0, done.output
    (lesson,) = json.loads(done.stdout)["lessons"]
    assert (lesson["name"], lesson["sources"]) == ("copy_h2d_bandwidth", {"a forum": 2})
    assert load_profile(tmp_path / "p.json").constant("copy_h2d_bandwidth").value == pytest.approx(
        20e9, rel=0.05
    )
    for options, words in (
        (["--hardware", PRESET], "--hardware needs --evidence"),
        (["--evidence", str(path), "--evidence", str(path)], "only one CSV file"),
    ):
        refused = CliRunner().invoke(app, ["calibrate", *options])
        assert refused.exit_code == 2
        assert words in refused.output
