"""What is counted on a model without memory, against what is read from its configuration."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from costmodel import read_model_spec, spec_of_config
from costmodel.models.families import FAMILIES
from costmodel.models.forward import activation_bytes, forward_work
from executors.models.loading import load_config
from executors.models.model import SuspendedModel, in_segments
from executors.models.spec import spec_of_model, without_weights
from studies.families.tiny import tiny_model
from tests.costmodel.test_costmodel_forward_torch import LiveStorages
from tests.support.command import zosim
from tests.support.tiny_families import SHARED, TINY, skip_earlier_attention
from topology.errors import ModelError
from zosim.planning.split_options import model_spec


def _on_meta(family, fields):
    config = AutoConfig.for_model(family, **fields)
    is_causal = family not in FAMILIES or FAMILIES[family].is_causal
    auto = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
    with torch.device("meta"):
        model = auto.from_config(config)
        model.tie_weights()
    return model


@pytest.mark.parametrize("family", TINY)
def test_a_model_without_memory_is_counted_as_its_configuration_is_read(family):
    skip_earlier_attention(family)
    fields = {"pad_token_id": 1, **TINY[family]}
    model = _on_meta(family, fields)
    counted, read = spec_of_model(model, name="small"), spec_of_config(model.config.to_dict(), name="small")
    assert counted == read
    assert counted.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_mixture_of_an_unknown_family_is_counted_with_its_experts():
    fields = {**SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
              "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 12}  # fmt: skip
    assert "glm4_moe" not in FAMILIES
    spec = spec_of_model(_on_meta("glm4_moe", fields), name="small")
    assert spec.experts.model_dump(exclude={"shares", "share_errors", "gates_shared", "has_biases"}) == {
        "num_experts": 8, "num_per_token": 2, "intermediate_size": 24, "shared_size": 24, "dense_blocks": (0,)
    }  # fmt: skip
    assert not spec.splits_inside


@pytest.mark.slow
def test_the_way_out_that_the_hint_names_works(tmp_path):
    (tmp_path / "model").mkdir()
    config = AutoConfig.for_model("persimmon", **{**SHARED, "num_key_value_heads": None})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_dict()))
    target = tmp_path / "spec.json"
    command = [sys.executable, "-m", "executors.models.spec", str(tmp_path / "model"), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_model_spec(target) == model_spec(str(tmp_path / "model"))


PUBLISHED = {
    # All digits follow from the configurations, without layers that predict further tokens. Printed are 80 (card of Qwen3-Next), 106
    # (arXiv:2508.06471), 230 (card of MiniMax-M2) and 8.1 (arXiv:2504.03624) billions, and 1,170,340,608 (card of LFM2-1.2B).
    "qwen3-next-80b-a3b": (79_674_391_296, {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "vocab_size": 151936, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    }),
    "glm-4.5-air": (106_852_245_504, {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151552, "attention_bias": True,
    }),
    "minimax-m2": (228_689_748_992, {
        "model_type": "minimax_m2", "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "rotary_dim": 64,
    }),
    "nemotron-h-8b": (8_100_852_736, {
        "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "intermediate_size": 21504, "n_groups": 8,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
        "vocab_size": 131072,
    }),
    "lfm2-1.2b": (1_170_340_608, {
        "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "block_ff_dim": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536,
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_of_families_without_a_row_are_counted(tmp_path, name):
    num_parameters, fields = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert model_spec(str(tmp_path)).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "vit"}, "vit neither predicts the next token nor fills in masks"),
        ({"model_type": "dots3_note"}, "gives layers of a dots3_note_text sizes of their own"),
        ({"model_type": "qwen2_vl"}, "no language model of its text model, qwen2_vl_text, alone"),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {}}, 'set "model_type": "deepseek_v3"'),
        ({"model_type": "nemotron_h", "num_hidden_layers": 52}, "describe 4 layers"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "describes an encoder-decoder"),
        ({"model_type": "persimmon", "quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is none that is read"),
        ({"_class_name": "UNet2DConditionModel"}, "describes a UNet2DConditionModel of diffusers"),
        ({"model_type": "esm", "architectures": ["EsmForMaskedLM"]}, "states no vocab_size"),
        ({"model_type": "hunyuan_v1_dense", "num_hidden_layers": 2}, "states no head_dim, which may be needed"),
        ({"model_type": "glm4_moe", "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 8}, "exceeds the 4 experts"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_counted_says_why(tmp_path, fields, told):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError) as refused:
        model_spec(str(tmp_path))
    assert told in str(refused.value)


@pytest.mark.parametrize("given", [".", "config.json"])
def test_a_plan_counts_a_family_that_has_no_row(tmp_path, capsys, given):
    config = AutoConfig.for_model("persimmon", **{**SHARED, "num_key_value_heads": None})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    path = tmp_path / given
    assert zosim("plan", "--model", path, "--hardware", "cpu-laptop", "--seq", 16, "--tune", "linears") == 0
    assert tmp_path.name in capsys.readouterr().out
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = model_spec(str(path), tuned="linears")
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < spec.num_trainable < spec.num_parameters


def _grouped_flops(rows, weights, *args, out_shape=None, **kwargs):
    return 2 * rows[0] * rows[1] * weights[2]


@pytest.mark.parametrize("family", ["ctrl", "ernie4_5_moe", "lfm2", "zaya"])
def test_flops_of_a_family_without_a_row_are_those_of_its_linear_layers(family):
    assert family not in FAMILIES
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    tokens, spec = torch.randint(3, 90, (2, 30)), spec_of_model(model, "tiny")
    by_experts = {torch.ops.aten._grouped_mm: _grouped_flops}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=by_experts) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False)
    works = [
        forward_work(spec, segment, batch=2, seq=30, attention="eager", padded=True)
        for segment in spec.segments
    ]
    assert sum(work.flops for work in works) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_no_number_of_key_heads_means_as_many_as_of_queries(tmp_path):
    fields = {"model_type": "mistral", **SHARED, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_config(tmp_path).num_key_value_heads == SHARED["num_attention_heads"]


@pytest.mark.parametrize("family", ["falcon_mamba", "hy_v4", "prophetnet"])
def test_an_unknown_family_takes_the_memory_that_its_specification_says(family):
    model = tiny_model(family)
    spec = spec_of_model(model)
    tokens = torch.randint(3, 90, (3, 28))
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    known = [*model.parameters(), *model.buffers(), *given.values()]
    with torch.no_grad(), LiveStorages(known) as measured:
        model(**given, use_cache=False)
    works = [forward_work(spec, segment, batch=3, seq=28) for segment in spec.segments]
    handed = [activation_bytes(spec, batch=3, seq=28, segment=own) for own in spec.segments[:-1]] + [0]
    before = [0, *handed]
    peak = max(
        work.workspace_bytes + own + left for work, own, left in zip(works, handed, before, strict=False)
    )
    # A suspended forward has another beside it, which waits with what it holds between blocks.
    num_forwards = 2 if isinstance(in_segments(model), SuspendedModel) else 1
    assert measured.peak <= peak <= 1.1 * num_forwards * measured.peak


def test_the_head_of_an_unknown_family_holds_what_it_is_given_to_its_end():
    model = tiny_model("exaone4")
    segmented, spec = in_segments(model), spec_of_model(model)
    tokens = torch.randint(3, 90, (3, 28))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    state = torch.randn(3, 28, spec.hidden_size)
    known = [*model.parameters(), *model.buffers(), *batch.values(), state]
    with torch.no_grad(), LiveStorages(known) as measured:
        segmented.head(state, batch)
    workspace = forward_work(spec, "head", batch=3, seq=28).workspace_bytes
    mask_bytes = 3 * 28 * 28  # blocks had it
    assert measured.peak + mask_bytes - 24 * 3 * 28 <= workspace <= 1.2 * measured.peak


def test_sizes_that_are_not_stated_are_told_once(tmp_path, caplog):
    # A model of texts and images that states nothing of its text model, and may be asked to split inside its blocks.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blip-2"}))
    for _ in range(2):
        assert model_spec(str(tmp_path), split_blocks=(0,)).split_blocks == (0,)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "defaults of opt are taken: ffn_dim 3072, hidden_size 768" in said[0]


def test_masked_models_need_not_state_their_architecture(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "distilbert", "n_layers": 2, "dim": 48, "n_heads": 4})
    )
    assert not model_spec(str(tmp_path)).is_causal


@pytest.mark.parametrize("text", [{}, {"tie_word_embeddings": False}])
def test_a_text_model_is_tied_where_the_whole_is(tmp_path, text):
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    fields = {
        "model_type": "llava_next",
        "tie_word_embeddings": True,
        "text_config": {"model_type": "llama", **sizes, **text},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    counted = spec_of_model(without_weights(str(tmp_path)))
    assert counted.tied_head
    assert counted.num_parameters == model_spec(str(tmp_path)).num_parameters


@pytest.mark.parametrize(
    ("name", "told"),
    [("model.gguf", "is a file of llama.cpp"), ("model_index.json", "is a pipeline of diffusers")],
)
def test_directories_of_other_tools_are_named(tmp_path, name, told):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=told):
        model_spec(str(tmp_path))
