"""Model directories and data from an untrusted source: refused in words that name the file, and no code of theirs runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executors.datasets import data as data_module
from executors.datasets.data import Limits, LineFile, check_lines, open_dataset
from executors.datasets.prompts import PromptTemplate
from executors.models.loading import INDEX_NAME, WEIGHTS_NAME, load_config, load_model
from executors.models.mapped import own_format
from executors.models.model import SegmentedModel
from executors.models.spec import spec_of_model
from executors.runs.inputs import tokenizer_for
from studies.families.tiny import tiny_model
from tests.support.tiny import CONFIGS, model_of
from topology.errors import DataError, ModelError

EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model_of("opt").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    model_of("opt").save_pretrained(tmp_path / "model", max_shard_size="40KB")
    assert (tmp_path / "model" / INDEX_NAME).is_file()
    return tmp_path / "model"


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 10**9}, r"config\.json is not valid: num_hidden_layers"),
        ({"hidden_size": "32"}, r"config\.json is not valid: hidden_size: .*value '32'"),
        ({"vocab_size": 2**31, "hidden_size": 2**12, "ffn_dim": 8, "num_attention_heads": 2}, "of weights, .* available"),
        ({"use_cache": "maybe"}, "use_cache"),
        ({"model_type": "evil"}, "has model_type 'evil', which transformers does not know"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}, "brings code of its own, which zosim never runs"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"dtype": "load"}, "dtype: must be one of"),
    ],
)  # fmt: skip
def test_configurations_are_refused_before_anything_is_built(
    directory: Path, fields: dict[str, Any], reason: str
) -> None:
    changed(directory / "config.json", **fields)
    with pytest.raises(ModelError, match=reason):
        load_model(directory, random_weights=True)
    with pytest.raises(ModelError, match=reason):
        load_model(directory)


def test_fields_that_are_no_description_have_no_effect(directory: Path) -> None:
    fields = {
        "to_dict": 1,
        "get_text_config": 2,
        "return_dict": False,
        "output_hidden_states": True,
        "text_config": 5,
    }
    fields |= {
        "auto_map": {"AutoModelForCausalLM": "evil.Evil"},
        "extra_files": ["../x"],
        "attn_implementation": "a/b",
    }
    changed(directory / "config.json", **fields)
    model = load_model(directory)
    assert spec_of_model(model).num_blocks == 3
    assert SegmentedModel(model).loss_format() == torch.float32
    assert not hasattr(load_config(directory), "auto_map")


def test_code_of_a_directory_is_never_run(directory: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (directory / "evil.py").write_text(EVIL.format(marker=str(marker)))
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    changed(directory / "config.json", auto_map=names)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "EvilTokenizer", "auto_map": names})
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n')
    load_model(directory)
    with pytest.raises(ModelError, match="its tokenizer"):
        tokenizer_for(str(directory), str(lines))
    changed(directory / "config.json", model_type="evil")
    with pytest.raises(ModelError, match="never runs"):
        load_model(directory)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("../outside.safetensors", "weights must be in .safetensors files next to their index"),
        ("/etc/passwd", "weights must be in"),
        ("..", "weights must be in"),
        ("weights.bin", "weights must be in"),
        (["a"], "weights must be in"),
        ("gone.safetensors", "lists gone.safetensors, which is missing"),
    ],
)
def test_an_index_names_files_beside_itself(shards: Path, target: Any, reason: str) -> None:
    index = json.loads((shards / INDEX_NAME).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = target
    (shards / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=reason):
        load_model(shards)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[1]", "[" * 9000, ""])
def test_a_broken_index_is_named(shards: Path, text: str) -> None:
    (shards / INDEX_NAME).write_text(text)
    with pytest.raises(ModelError, match="index"):
        load_model(shards)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 3000])
def test_truncated_weights_are_named(directory: Path, length: int) -> None:
    path = directory / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read(?s:.*)copy it again"):
        load_model(directory)
    assert own_format(directory) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_numbers_are_named(directory: Path, dtype: torch.dtype) -> None:
    path = directory / WEIGHTS_NAME
    tensors = load_file(path)
    name = "model.decoder.layers.1.fc1.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"{name} has type"):
        load_model(directory)


def test_missing_and_misshapen_tensors_are_named(directory: Path) -> None:
    path = directory / WEIGHTS_NAME
    tensors = load_file(path)
    name = "model.decoder.layers.1.fc1.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=f"incomplete: {name} is missing"):
        load_model(directory)
    save_file(tensors | {name: tensors[name].T.contiguous()}, path)
    with pytest.raises(ModelError, match=f"{name} has another shape"):
        load_model(directory)


def test_a_head_beside_a_tied_table_is_named(tmp_path: Path) -> None:
    model_of("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, tmp_path / WEIGHTS_NAME)
    load_model(tmp_path)  # the same numbers
    save_file(tensors | {"lm_head.weight": table + 1}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(
        ModelError, match=r"hold another lm_head\.weight(?s:.*)set tie_word_embeddings to false"
    ):
        load_model(tmp_path)
    changed(tmp_path / "config.json", tie_word_embeddings=False)
    assert torch.equal(load_model(tmp_path).get_output_embeddings().weight, table + 1)


@pytest.mark.parametrize("family", ["gemma3", "got_ocr2"])
def test_of_a_model_of_texts_and_images_the_text_model_is_run(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert "its text model" in caplog.text
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert not any("vision" in name for name, _ in loaded.named_parameters())


def test_pipes_folders_and_loops_in_place_of_weights_are_not_waited_for(directory: Path) -> None:
    path = directory / WEIGHTS_NAME
    for make in (os.mkfifo, Path.mkdir, lambda at: at.symlink_to(at)):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(ModelError, match=r"has no weights|not a regular file"):
            load_model(directory)
        assert own_format(directory) is None


def test_weights_that_are_not_numbers_load(directory: Path) -> None:
    path = directory / WEIGHTS_NAME
    save_file({name: torch.full_like(value, torch.nan) for name, value in load_file(path).items()}, path)
    SegmentedModel(load_model(directory))


def test_patterns_that_never_end_are_tried_apart(
    directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(\w+\s?)*$x"), "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a valid tokenizer"):
        tokenizer_for(str(directory), str(lines))
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "tokenizer_config.json",
            '{"tokenizer_class": 3}',
            r"tokenizer_config\.json is not valid: tokenizer_class",
        ),
        ("tokenizer_config.json", "[" * 9000, r"tokenizer_config\.json is not a tokenizer configuration"),
        (
            "tokenizer.json",
            '{"model": {"type": "BPE"}}',
            r"tokenizer\.json is not a valid tokenizer",
        ),
        ("added_tokens.json", "[1]", "holds no JSON object"),
    ],
)
def test_tokenizer_files_are_named(
    directory: Path, tmp_path: Path, name: str, content: str, reason: str
) -> None:
    (directory / name).write_text(content)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n')
    with pytest.raises(ModelError, match=reason):
        tokenizer_for(str(directory), str(lines))


def test_a_pipe_of_data_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="is a pipe or a device, not a regular file"):
        LineFile.index(pipe)
    with pytest.raises(DataError, match="is a pipe or a device, not a regular file"):
        check_lines(pipe, None)


def test_a_line_without_end_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "MAX_LINE_BYTES", 2**20)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"input_ids": [1, 2]}\n' + b" " * 2**20 + b"1\n")
    with pytest.raises(DataError, match="line 2 has more than 1 MiB"):
        LineFile.index(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"input_ids": [' + "9" * 5000 + "]}",
        '{"input_ids": [1, 9999999999999999999999]}',
        "[" * 100_000,
        '{"input_ids": [1, NaN]}',
        '{"input_ids": [1, 2], "input_ids": [3, 4]}',
        '{"input_ids": [true, 1]}',
        '{"input_ids": [1, 96]}',
        '{"input_ids": [1, 2], "labels": [1]}',
        '{"input_ids": [1, 2], "labels": [1, -1]}',
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match="line 1"):
        open_dataset(path, limits=Limits(96, 32))


@pytest.mark.parametrize(
    "text", ["{text.__class__}", "{text[0]}", "{text!r}", "{text:>999999999}", "{0}", "{}", "{", "{a}}"]
)
def test_templates_reach_no_attribute(text: str) -> None:
    with pytest.raises(DataError, match="template"):
        PromptTemplate(text)


def test_configurations_of_other_families_are_checked_by_their_usual_names(tmp_path: Path) -> None:
    fields = CONFIGS["llama"].to_dict() | {"model_type": "gpt_neox", "rope_parameters": None}
    for changes in ({"num_hidden_layers": 10**7}, {"vocab_size": 2**40}, {"hidden_size": -32}):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes, default=str))
        with pytest.raises(ModelError, match=next(iter(changes))):
            load_model(tmp_path, random_weights=True)


@pytest.mark.parametrize("family", ["gemma2", "mamba", "bamba", "gemma3n_text", "whisper", "xlnet"])
def test_families_load_from_what_transformers_writes_of_them(family: str, tmp_path: Path) -> None:
    """Without sdpa, with infinities, sizes by layer, attributes of another name, and no longest sequence."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, attention="sdpa")
    given = {"input_ids": torch.arange(3, 12)[None], "use_cache": False}
    with torch.no_grad():
        assert torch.equal(loaded(**given).logits, model(**given).logits)
