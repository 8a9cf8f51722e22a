from __future__ import annotations

import json
import re

import pytest

from costmodel import (
    LoRA,
    ModelSpec,
    Prefix,
    group_parameters,
    read_model_spec,
    shipped_models,
    spec_of_config,
)
from costmodel.formats.stored_quantization import stored_quantization
from costmodel.models.configs import checked_config, shipped_config
from topology.errors import ModelError, UnknownFamily

PUBLISHED_COUNTS = {
    # num_parameters() of the published checkpoints, tied tensors once
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "llama-7b": 6_738_415_616,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "codellama-34b": 33_743_970_304,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "deepseek-llm-7b": 6_910_365_696,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    # Sizes that the Hub prints of the weights' files, tied tables once.
    "phi-1_5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "falcon-7b": 6_921_720_704,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "mpt-7b": 6_649_286_656,
    "stablelm-2-1_6b": 1_644_515_328,
    "stablelm-3b-4e1t": 2_795_443_200,
    "starcoder": 15_517_456_384,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "olmo-7b": 6_888_095_744,
    "olmo-2-7b": 7_298_617_344,
    "granite-3.1-8b": 8_170_848_256,
    "glm-4-9b": 9_399_951_360,
    "command-r": 34_980_831_232,
    "aya-23-8b": 8_028_033_024,
    # Mixtures: all digits follow from the configurations. Printed are 46.7 (mistral.ai, "Mixtral of experts"), 30.5 and 235 (model cards
    # of Qwen3), 14.3 (card of Qwen1.5-MoE), 6.9 (arXiv:2409.02060), 41.9 (the Hub's count), 236 and 15.7 (arXiv:2405.04434) billions.
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3.5-moe": 41_873_153_344,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    # Table 1 of "Pythia" (arXiv:2304.01373).
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    # "GPT-NeoX-20B" (arXiv:2204.06745), section 3: 20,554,567,680.
    "gpt-neox-20b": 20_554_567_680,
}
PRINTED_BILLIONS = {
    # Of models whose cards and reports print no more: DeepSeek-V3 (arXiv:2412.19437), gpt-oss (arXiv:2508.10925, table 1), Gemma 3
    # (arXiv:2503.19786, table 1: without the vision encoder's 417M), Mixtral 8x22B, Falcon (arXiv:2311.16867).
    "deepseek-v3": 671,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.01,
    "mixtral-8x22b": 141,
    "falcon-40b": 41.3,
    "mpt-30b": 30.0,
}


@pytest.mark.parametrize(("name", "billions"), PRINTED_BILLIONS.items())
def test_shipped_sizes_have_as_many_billions_as_are_printed(name, billions):
    assert read_model_spec(name).num_parameters == pytest.approx(1e9 * billions, rel=0.005)


@pytest.mark.parametrize(("name", "count"), PUBLISHED_COUNTS.items())
def test_shipped_sizes_have_the_published_number_of_parameters(name, count):
    assert read_model_spec(name).num_parameters == count


@pytest.mark.parametrize("name", [n for n in shipped_models() if n.startswith("opt") and n != "opt-350m"])
def test_opt_counts_agree_with_the_closed_form(name):
    # V h (tied table) + (P + 2) h + 2 h (final norm) + L (12 h^2 + 13 h)
    spec = read_model_spec(name)
    h, blocks = spec.hidden_size, spec.num_blocks
    expected = (spec.vocab_size + spec.max_positions + 2 + 2) * h + blocks * (12 * h * h + 13 * h)
    assert spec.num_parameters == expected == spec.num_trainable


@pytest.mark.parametrize(
    ("heads", "hidden", "layers", "name"),
    [
        (32, 2048, 24, "OPT-1.3B"),
        (32, 2560, 32, "OPT-2.7B"),
        (40, 5120, 40, "opt-13b"),
        (96, 12288, 96, "opt-175b"),
    ],
)
def test_opt_shapes_are_those_of_the_zo2_paper(heads, hidden, layers, name):
    spec = read_model_spec(name)
    assert (spec.num_heads, spec.hidden_size, spec.num_blocks) == (heads, hidden, layers)
    assert spec.max_positions == 2048


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("facebook/OPT-13B", "opt-13b"),
        ("openai-community/gpt2", "gpt2"),
        ("gpt2-small", "gpt2"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.1"),
        ("CodeLlama-34b-Instruct-hf", "codellama-34b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("FacebookAI/roberta-base", "roberta-base"),
    ],
)
def test_sizes_are_found_by_the_names_people_use(alias, name):
    assert read_model_spec(alias) == read_model_spec(name)


def test_a_size_of_a_family_that_is_not_read_says_so_and_what_to_do():
    with pytest.raises(
        UnknownFamily,
        match=r"model internlm2-7b: the parameters of model_type 'internlm2'(?s:.*)count them once",
    ):
        read_model_spec("internlm/internlm2-7b")
    assert shipped_config("internlm2-7b")["hidden_size"] == 4096


def test_no_name_is_suggested_that_would_be_refused_as_well():
    for wrong in (
        "internlm2-6b",
        "baichuan2-8b",
        "qwen-8b",
        "mixtral-8x8b",
        "deepseek-v4",
        "nothing-like-it",
    ):
        with pytest.raises(ModelError, match="unknown model") as raised:
            read_model_spec(wrong)
        listed = raised.value.hint.removeprefix("did you mean ").removesuffix("?")
        suggested = re.findall(r"\((.+?)\)", listed) or listed.split(" or ")
        assert 1 <= len(suggested) <= 5
        assert all(read_model_spec(name).num_parameters for name in suggested)


def test_of_a_multimodal_model_the_text_model_is_read_and_said_to_be_it():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
    spec = spec_of_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, name="seen")
    assert spec.param_groups == read_model_spec("gemma-3-4b").param_groups
    assert spec.describe() == "seen (its text model)"
    untied = spec_of_config(
        {
            "model_type": "llava",
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "text_config": {"model_type": "llama"},
        },
        name="l",
    )
    assert (untied.tied_head, untied.checkpoint_dtype, untied.text_of) == (False, "float16", "llava")


def test_a_configuration_file_a_directory_and_a_name_read_alike(tmp_path):
    directory = tmp_path / "opt-1m"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shipped_config("opt-1m")))
    assert (
        read_model_spec(directory) == read_model_spec(directory / "config.json") == read_model_spec("opt-1m")
    )


def test_a_saved_specification_reads_back(tmp_path):
    spec = read_model_spec("llama-1m")
    path = tmp_path / "model.json"
    path.write_text(spec.model_dump_json())
    assert read_model_spec(path) == spec
    with pytest.raises(ModelError, match="trainable parameters are fixed"):
        read_model_spec(path, trainable=LoRA(rank=4, target_modules=("q_proj",)))


def test_groups_are_named_in_registration_order():
    def names(spec: ModelSpec) -> list[str]:
        return [group.name for group in spec.param_groups if not group.name.startswith("block.")]

    assert names(read_model_spec("opt-1m")) == ["embed.tokens", "embed", "head"]
    assert [g.name for g in read_model_spec("opt-1m").param_groups][-1] == "block.3"
    assert names(read_model_spec("opt-350m")) == ["embed.tokens", "embed", "head", "embed.1"]
    assert [g.name for g in read_model_spec("gpt2").param_groups][-1] == "head"
    untied = spec_of_config({"model_type": "opt", "tie_word_embeddings": False}, name="untied")
    assert names(untied) == ["embed", "head", "head.1"]
    assert untied.param_group("embed").num_tensors == 2
    assert untied.param_group("head.1").num_parameters == 50272 * 768


def test_neighbours_of_the_same_segments_form_one_group():
    rows = [
        ("a", ("embed",), (3,), True),
        ("b", ("embed",), (5,), False),
        ("c", ("block.0",), (1, 7), True),
        ("d", ("embed",), (11,), True),
    ]
    first, block, second = group_parameters(rows)
    assert (first.name, first.num_parameters, first.num_trainable, first.num_tensors) == ("embed", 8, 3, 2)
    assert (first.num_trainable_tensors, first.largest_trainable_tensor) == (1, 3)
    assert (block.name, second.name) == ("block.0", "embed.1")
    assert (block.trainable_matrices, first.trainable_matrices) == (((1, 7),), ())


def test_lora_trains_two_narrow_matrices_per_target():
    base = read_model_spec("llama-3-8b")
    spec = read_model_spec("llama-3-8b", trainable=LoRA(rank=8, target_modules=("q_proj", "v_proj")))
    # q: 4096 -> 4096, v: 4096 -> 1024 (8 key-value heads of 128)
    per_block = 8 * (4096 + 4096) + 8 * (4096 + 1024)
    assert spec.num_trainable == 32 * per_block
    assert spec.num_parameters == base.num_parameters + spec.num_trainable
    assert spec.adapter_shapes == ((4096, 4096), (4096, 1024))
    assert spec.param_group("block.0").largest_trainable_tensor == 8 * 4096
    assert spec.param_group("embed").num_trainable == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "parameters of model_type 'mamba' are not known"),
        ({}, "has no model_type"),
        (
            {"model_type": "opt", "hidden_size": 100, "num_attention_heads": 12},
            "must be a multiple of num_heads=12",
        ),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads=5 must divide"),
        (
            {"model_type": "llama", "hidden_size": "wide"},
            "hidden_size: must be a valid integer, value 'wide'",
        ),
        (
            {"model_type": "llama", "hidden_size": True},
            "hidden_size: must be a valid integer, value True",
        ),
        (
            {"model_type": "opt", "num_hidden_layers": 10**9},
            "num_hidden_layers: .*less than or equal to 1024, value 10000",
        ),
        (
            {"model_type": "opt", "num_hidden_layers": None},
            "num_hidden_layers: must be a valid integer, value None",
        ),
        ({"model_type": "opt", "num_attention_heads": 0}, "num_attention_heads: .*greater than 0, value 0"),
        ({"model_type": "opt", "ffn_dim": [3072]}, "ffn_dim: must be a valid integer"),
        ({"model_type": "opt", "vocab_size": 10**30}, "vocab_size: .*less than or equal to 2147483648"),
        (
            {"model_type": "opt", "pad_token_id": 50272},
            "pad_token_id=50272 must be below vocab_size=50272",
        ),
        (
            {"model_type": "opt", "activation_function": "gelo"},
            "activation_function: must be one of(?s:.*)did you mean 'gelu'",
        ),
        ({"model_type": "opt", "torch_dtype": "float8"}, "torch_dtype: must be one of"),
        (
            {"model_type": "opt", "tie_word_embeddings": "yes"},
            "tie_word_embeddings: must be a valid boolean",
        ),
        ({"model_type": "opt", "dropout": float("nan")}, "dropout: must be "),
        (
            {"model_type": "opt", "quantization_config": {"bits": 4}},
            "quantization_config: quant_method None is none that is read",
        ),
        ({"model_type": "opt", "per_layer_config": {"0": {"ffn_dim": 1}}}, "per_layer_config"),
        ({"model_type": "llama", "rms_norm_eps": -1.0}, "rms_norm_eps: .*greater than 0"),
        ({"model_type": "llama", "head_dim": 33}, "head_dim=33 must be even"),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "yran"}},
            "'yran' must be one of(?s:.*)did you mean 'yarn'",
        ),
        ({"model_type": "llama", "rope_parameters": {"factor": -1}}, "factor=-1 must be a number above 0"),
        (
            {"model_type": "llama", "rope_parameters": [1]},
            "rope_parameters: must be a valid dictionary",
        ),
        ({"model_type": ["llama"]}, "which is no family's name"),
        ({"model_type": "gpt2", "n_layer": 0, "n_embd": "x"}, r"2 problems(?s:.*)n_embd(?s:.*)n_layer"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True is not supported"),
    ],
)
def test_configurations_that_cannot_be_are_refused(config, message):
    with pytest.raises(ModelError, match=message):
        spec_of_config(config, name="odd")


def test_gpt2_takes_sizes_under_the_names_that_transformers_takes_too():
    usual = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    own = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32}
    one, other = (spec_of_config({"model_type": "gpt2", **sizes}, name="small") for sizes in (usual, own))
    assert one == other


def test_unknown_families_are_pointed_to_the_executor():
    with pytest.raises(UnknownFamily, match=r"python -m executors\.models\.spec MODEL"):
        spec_of_config({"model_type": "mamba"}, name="odd")


def test_unknown_names_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"unknown model 'opt-1\.4b'(?s:.*)did you mean opt-1\.3b"):
        read_model_spec("opt-1.4b")
    damaged = tmp_path / "config.json"
    for text, reason in (
        ("{", "not a model's configuration: Expecting property name"),
        ("[1]", "holds no JSON object"),
        ("[" * 100_000, "nests more than"),
        ('{"hidden_size": ' + "9" * 5_000 + "}", "integer of 5000 digits"),
        ('{"model_type": "opt", "dropout": NaN}', "holds NaN"),
        (
            '{"model_type": "opt", "ffn_dim": 0}',
            r"config\.json is not valid: ffn_dim: .*greater than 0, value 0",
        ),
        ('{"groups": []}', "the model specification .*config.json is not valid"),
        ('{"groups": [], "num_blocks": 1000000000}', "num_blocks: .*less than or equal to 1024"),
    ):
        damaged.write_text(text)
        with pytest.raises(ModelError, match=reason):
            read_model_spec(tmp_path)
    with pytest.raises(ModelError, match=r"its blocks have no linear called c_attn(?s:.*)q_proj"):
        read_model_spec("opt-1m", trainable=LoRA(rank=1, target_modules=("c_attn",)))
    with pytest.raises(ModelError, match="at least one target"):
        LoRA(rank=1, target_modules=())


@pytest.mark.parametrize("twice", [False, True])
def test_weights_of_mlx_are_not_planned_as_numbers(twice):
    of_mlx = {"group_size": 64, "bits": 4}
    config = {"model_type": "llama", "quantization": of_mlx} | (
        {"quantization_config": of_mlx} if twice else {}
    )
    with pytest.raises(ModelError, match=r"quantization: weights of MLX in 4 bits are not read"):
        stored_quantization(config, "config.json")


def test_mistral_without_shared_heads_has_as_many_as_queries():
    config = checked_config({"model_type": "mistral", "num_key_value_heads": None}, "config.json")
    assert config.shape["num_key_value_heads"] == config.num_attention_heads == 32


def test_sizes_whose_product_no_tensor_has_are_refused_in_words() -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 200_000_000, "num_key_value_heads": 8, "head_dim": 100,
        "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 128,
    }  # fmt: skip
    with pytest.raises(ModelError, match=r"a tensor of large is not valid(.|\n)*value 20000000000"):
        spec_of_config(config, name="large")


def test_blocks_that_do_more_than_add_a_second_linear_are_not_split_inside():
    for name in ("opt-1m", "gpt2", "llama-1m", "qwen3-0.6b"):
        assert read_model_spec(name, split_blocks=(1,)).split_blocks == (1,)
    for name in ("phi-2", "gemma-2-2b", "mixtral-8x7b", "granite-3.1-8b", "roberta-1m", "starcoder2-3b"):
        assert not read_model_spec(name).splits_inside
        with pytest.raises(ModelError, match=r"cannot be split inside(?s:.*)between its blocks"):
            read_model_spec(name, split_blocks=(1,))


def test_adapters_are_refused_where_blocks_differ():
    attention = read_model_spec(
        "deepseek-v2-lite", trainable=LoRA(rank=2, target_modules=("q_proj", "o_proj"))
    )
    assert attention.num_trainable == 27 * 2 * (2048 + 3072 + 2048 + 2048)
    with pytest.raises(
        ModelError, match=r"differ between its blocks(?s:.*)all of its blocks have q_proj, kv_a_proj_with_mqa"
    ):
        read_model_spec("deepseek-v2-lite", trainable=LoRA(rank=2, target_modules=("gate_proj",)))


def test_a_prefix_needs_keys_and_values_of_the_hidden_state():
    for name in ("deepseek-v2-lite", "roberta-1m"):
        with pytest.raises(ModelError, match="a prefix needs a causal model"):
            read_model_spec(name, trainable=Prefix(num_tokens=4))


def test_specifications_of_earlier_versions_still_load(tmp_path):
    spec = read_model_spec("llama-1m")
    defaults = {name for name, field in ModelSpec.model_fields.items() if not field.is_required()}
    old = {
        name: value
        for name, value in spec.model_dump(mode="json").items()
        if name in _FIELDS_OF_OLD or name not in defaults
    }
    (tmp_path / "model.json").write_text(json.dumps(old))
    assert read_model_spec(tmp_path / "model.json") == spec


_FIELDS_OF_OLD = (
    "activation",
    "positions",
    "qk_norm",
    "fused_qkv",
    "final_norm",
    "is_causal",
    "checkpoint_dtype",
)


@pytest.mark.parametrize("path", ["./here", "/no/where", "~/model", "a/b/c"])
def test_a_path_that_is_not_there_gets_no_names_of_models(path: str) -> None:
    with pytest.raises(ModelError, match=f"there is no model directory '{path}'") as refused:
        read_model_spec(path)
    assert "nearest" not in str(refused.value)
