"""Readers of model directories, tokenizers, weights and data, as targets; seeds are made of tiny models when they are wanted."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from costmodel.models.configs import read_model_spec
from executors.datasets.data import Limits, check_lines, open_dataset
from executors.datasets.prompts import PromptTemplate, parse_label_words
from executors.models.loading import load_model
from executors.models.model import SegmentedModel
from executors.models.spec import spec_of_model
from executors.runs.inputs import tokenizer_for
from tests.fuzz import seeds
from tests.fuzz.cases import Case, Target
from tests.fuzz.mutations import NUMBERS, STRINGS, mutated, mutated_bytes
from zosim import cli

FAMILIES = ("opt", "opt-projected", "llama", "qwen3", "gpt2", "roberta")
OTHERS = {
    "gpt_neox": {"rotary_pct": 0.5},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "phi": {"partial_rotary_factor": 0.5},
    "bloom": {"n_layer": 2, "n_head": 2},
    "falcon": {"alibi": False},
}
"""Families that are read by building them."""

WORDS = (
    "auto_map", "quantization_config", "per_layer_config", "rope_scaling", "rope_theta", "rope_parameters", "torch_dtype", "dtype",
    "attn_implementation", "to_dict", "get_text_config", "text_config", "architectures", "layer_types", "sliding_window",
    "is_encoder_decoder", "configuration_files", "fusion_config", "extra_files", "return_dict", "output_hidden_states", "pad_token_id",
    "eos_token_id", "hidden_size", "num_hidden_layers", "n_layer", "head_dim", "base_model_tp_plan", "trust_remote_code", "tokenizer_class",
    "vocab_file", "tokenizer_file", "chat_template", "model_max_length", "added_tokens_decoder", "extra_special_tokens", "padding",
    "truncation", "normalizer", "pre_tokenizer", "decoder", "post_processor", "type",
)  # fmt: skip
VALUES = (
    "yarn", "longrope", "relu", "gelu_new", "prelu", "float8_e4m3fn", "bfloat16", "(a+)+$", "GPT2Tokenizer", "LlamaTokenizer",
    "evil.Evil", "kernels-community/flash-attn", {"AutoModelForCausalLM": "evil.Evil"}, {"quant_method": "bitsandbytes"},
    {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "dynamic"}, {"type": "Sequence", "normalizers": []},
    {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "p", "pad_to_multiple_of": None},
    {"0": {"hidden_size": 8}}, ["sliding_attention"], 0, 1, -1, 10**9, 0.5, True, None,
)  # fmt: skip


def _mutated_fields(generator: Random, case: Case) -> Case:
    """Return a case with a field of one of its JSON files added or replaced by what libraries give a meaning, or with any mutation."""
    name = generator.choice(sorted(case.files))
    if generator.random() < 0.6 or not name.endswith(".json"):
        return mutated(generator, case)
    document = json.loads(case.files[name])
    for _ in range(generator.choice((1, 1, 2))):
        document[generator.choice((*WORDS, *document))] = generator.choice(VALUES)
    return replace(case, files={**case.files, name: json.dumps(document).encode()})


@functools.cache
def _configurations() -> list[bytes]:
    """Configurations of every family, with the fields that transformers writes."""
    from tests.support.tiny import CONFIGS

    return [json.dumps(CONFIGS[name].to_dict(), default=str).encode() for name in FAMILIES]


@functools.cache
def _other_configurations() -> list[bytes]:
    from transformers import AutoConfig

    usual = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 96,
        "intermediate_size": 48,
    }
    made = [AutoConfig.for_model(name, **(usual | own)).to_dict() for name, own in OTHERS.items()]
    return [json.dumps(fields, default=str).encode() for fields in made]


def _built(folder: Path) -> None:
    model = load_model(folder / "model", random_weights=True)
    spec_of_model(model)
    SegmentedModel(model).loss_format()


def _loaded(folder: Path) -> None:
    model = load_model(folder / "model")
    spec_of_model(model)
    SegmentedModel(model).loss_format()


@functools.cache
def _saved(name: str, shard: str) -> dict[str, bytes]:
    """The files of a tiny model directory, in shards of a size at most."""
    from tests.support.tiny import model_of

    folder = seeds.folder() / f"{name}-{shard}"
    model_of(name).save_pretrained(folder, max_shard_size=shard)
    return {f"model/{path.name}": path.read_bytes() for path in folder.iterdir()}


def _weights() -> list[Case]:
    cases = []
    for name in ("opt", "llama", "gpt2", "roberta"):
        for shard in ("1GB", "40KB"):
            files = _saved(name, shard)
            broken = {n: content for n, content in files.items() if "safetensors" in n}
            cases.append(Case(broken, kept={n: c for n, c in files.items() if n not in broken}))
    return cases


TENSOR_TYPES = ("I32", "F8_E4M3", "BOOL", "U8", "F16", "BF16", "F64", "I64", "C64", "X", 3)


def _mutated_weights(generator: Random, case: Case) -> Case:
    """Return a case whose header of weights, index or weights are broken."""
    name = generator.choice(sorted(case.files))
    content = case.files[name]
    if name.endswith(".json"):
        return _mutated_fields(generator, case)
    if generator.random() < 0.3:
        return replace(case, files={**case.files, name: mutated_bytes(generator, content)})
    return replace(case, files={**case.files, name: _mutated_tensors(generator, content)})


def _mutated_tensors(generator: Random, content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    tensor = generator.choice([name for name in header if name != "__metadata__"])
    shape = header[tensor]["shape"]
    match generator.randrange(9):
        case 0:
            del header[tensor]
        case 1 | 2:
            header[tensor]["dtype"] = generator.choice(TENSOR_TYPES)
        case 3:
            header[tensor]["dtype"] = "I32"  # as wide as the float32 that it stands for
        case 4:
            header[tensor]["shape"] = generator.choice(([], [0], [-1], [2**62, 4], shape[::-1], [*shape, 1]))
        case 5:
            header[tensor]["data_offsets"] = generator.choice(([0, 0], [5, 1], [0, 2**64], [-1, 4], [1]))
        case 6:
            header[generator.choice((*STRINGS, tensor + "x", "lm_head.weight"))] = header.pop(tensor)
        case 7:
            body = generator.choice((b"\xff", b"\x7f\x80\x00\x00"[::-1])) * len(body)
            body = body[: len(content) - 8 - length]
        case _:
            header["__metadata__"] = _mutated_facts(generator, header.get("__metadata__"))
    written = json.dumps(header).encode("utf-8", "surrogatepass")
    written += b" " * (-len(written) % 8)
    size = (
        len(written) if generator.random() < 0.95 else generator.choice((0, 2**63, len(written) - 1, 10**8))
    )
    return struct.pack("<Q", size) + written + body


def _mutated_facts(generator: Random, facts: Any) -> Any:
    """Return what a file of weights says of itself, with one fact replaced, or something else altogether."""
    if not isinstance(facts, dict) or generator.random() < 0.3:
        return generator.choice(({"format": "tf"}, {"format": 3}, [], None))
    values = (*STRINGS, *map(str, NUMBERS), "9" * 5_000, 3, None)
    return {**facts, generator.choice([*facts, "x"]): generator.choice(values)}


@functools.cache
def _tokenizers() -> list[dict[str, bytes]]:
    """The files of tokenizers of every kind, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from executors.models.corpus import byte_tokenizer

    pairs = Tokenizer(models.BPE(unk_token="<unk>"))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    pairs.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    pairs.train_from_iterator(["some text that is good or bad. It was great, it was terrible."] * 3, trainer)
    pairs.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    pieces = ["[UNK]", "some", "text", "##s", "it", "was", "great", "."]
    words = Tokenizer(models.WordPiece({word: at for at, word in enumerate(pieces)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Punctuation()]
    )
    words.normalizer = normalizers.BertNormalizer()
    likely = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("some", -1.0), ("\u2581text", -1.5), ("\u2581", -2.0)], unk_id=0)
    )
    likely.pre_tokenizer = pre_tokenizers.Metaspace()
    made = [
        byte_tokenizer(),
        PreTrainedTokenizerFast(
            tokenizer_object=pairs,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            chat_template="{{ ''.__class__ }}",
        ),
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"),
        PreTrainedTokenizerFast(tokenizer_object=likely, unk_token="<unk>"),
    ]
    sets = []
    for number, tokenizer in enumerate(made):
        folder = seeds.folder() / f"tokenizer-{number}"
        tokenizer.save_pretrained(folder)
        sets.append({path.name: path.read_bytes() for path in folder.iterdir()})
    bpe = json.loads(sets[1]["tokenizer.json"])["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in bpe["merges"])
    kind = b'{"tokenizer_class": "GPT2Tokenizer"}'
    sets.append(
        {
            "vocab.json": json.dumps(bpe["vocab"]).encode(),
            "merges.txt": merges.encode(),
            "tokenizer_config.json": kind,
        }
    )
    return sets


TEXT_LINES = (
    b'{"text": "some text, it", "label": 0}\n{"text": "aaaaaaaaaaaaaaaaaaaaaaaaab \xc3\xa9", "label": 1}\n'
)


def _tokenizer_cases() -> list[Case]:
    config = _configurations()[0]
    return [
        Case(
            {f"model/{name}": content for name, content in files.items()},
            kept={"model/config.json": config, "text.jsonl": TEXT_LINES},
        )
        for files in _tokenizers()
    ]


def _encoded(folder: Path) -> None:
    tokenizer = tokenizer_for(str(folder / "model"), str(folder / "text.jsonl"))
    template = PromptTemplate("{text} It was {label}.", {"0": "bad", "1": "great"})
    dataset = open_dataset(
        folder / "text.jsonl", limits=Limits(1000, 32, True), template=template, tokenizer=tokenizer
    )
    assert tokenizer is not None
    for question in dataset.questions(range(len(dataset))):
        tokenizer.decode(question.candidates[0].input_ids, skip_special_tokens=True)


@functools.cache
def _tokenizer() -> Any:
    from executors.models.corpus import byte_tokenizer

    return byte_tokenizer()


def _token_lines(folder: Path) -> None:
    path = folder / "data.jsonl"
    check_lines(path, None)
    open_dataset(path, limits=Limits(96, 12, True)).longest()


def _text_lines(folder: Path) -> None:
    path, template = (
        folder / "data.jsonl",
        PromptTemplate("{text} It was {label}.", {"0": "bad", "1": "great"}),
    )
    check_lines(path, template)
    open_dataset(path, limits=Limits(300, 64, True), template=template, tokenizer=_tokenizer()).longest()


def _masked_lines(folder: Path) -> None:
    open_dataset(folder / "data.jsonl", limits=Limits(96, 12, True), fills_masks=True).check()


def _choice_lines(folder: Path) -> None:
    template = PromptTemplate("{text}: {label}")
    open_dataset(
        folder / "data.jsonl", limits=Limits(300, 64), template=template, tokenizer=_tokenizer()
    ).check()


TEMPLATES = ("{text} It was {label}.", "{text}", "{{}} {text} {label}", "{label}")
LABEL_WORDS = ("0=bad,1=great", "0=bad", "a=b,c=d,e=f")
BRACES = (
    "{text.__class__}", "{text[0]}", "{0}", "{}", "{", "}", "{{", "{text!r}", "{text:>99999999999}", "{label}{label}", "{ text}", "{__import__}",
    "{text:{label}}", "{choices}", "=", ",", "0=", "=x", "0=bad,0=bad", "0= ", "\N{BYTE ORDER MARK}",
)  # fmt: skip


def _mutated_template(generator: Random, case: Case) -> Case:
    words = [*case.argv]
    at = generator.randrange(len(words))
    at_letter = generator.randrange(len(words[at]) + 1)
    inserted = generator.choice((*BRACES, *STRINGS, *map(str, NUMBERS[:6])))
    words[at] = words[at][:at_letter] + inserted + words[at][at_letter + generator.randrange(3) :]
    return replace(case, argv=tuple(words))


def _templated(case: Case, folder: Path) -> None:
    text, labels = case.argv
    template = PromptTemplate(text, parse_label_words(labels))
    open_dataset(
        folder / "text.jsonl", limits=Limits(300, 4096, True), template=template, tokenizer=_tokenizer()
    ).check()


def _folder_target(
    name: str,
    cases: Callable[[], list[Case]],
    read: Callable[[Path], None],
    mutate: Callable[[Random, Case], Case],
    quick: int = 40,
) -> Target:
    def call(_case: Case, folder: Path) -> None:
        read(folder)

    return Target(name, cases, call, mutate, quick)


def _files(
    name: str, contents: Callable[[], list[bytes]], kept: Mapping[str, bytes] | None = None
) -> Callable[[], list[Case]]:
    return lambda: [Case({name: content}, kept=kept or {}) for content in contents()]


def _adapters(folder: Path) -> None:
    from executors.models.prefix import load_prefix
    from tests.support.tiny import model_of

    load_prefix(model_of("opt"), folder / "prefix")


@functools.cache
def _prefix() -> list[Case]:
    from costmodel.models.configs import Prefix
    from executors.models.prefix import attach_prefix, save_prefix
    from tests.support.tiny import model_of

    model = model_of("opt")
    attach_prefix(model, Prefix(num_tokens=3))
    folder = seeds.folder() / "prefix"
    save_prefix(model, folder, "float32")
    return [Case({f"prefix/{path.name}": path.read_bytes() for path in folder.iterdir()})]


def _checkpoint(folder: Path) -> None:
    import torch

    from executors.low_bits.linear import quantize_layers
    from executors.models.blocks import find_blocks
    from executors.runs.checkpoint import newest_checkpoint
    from executors.runs.history import read_history

    model = load_model(folder / "model")
    refusals: list[str] = []
    history = read_history(folder / "run")
    quantize_layers(
        find_blocks(model), history.plan.low_bits, torch.device("cpu"), history.plan.storage.quant_config
    )
    checkpoint = newest_checkpoint(history, model, refusals.append)
    if checkpoint is not None:
        checkpoint.load(model)
    print(*refusals)


def _checkpoints() -> list[Case]:
    name = f"run/{seeds.CHECKPOINT}"
    runs = (seeds.run_with_checkpoint(), seeds.quantized_run(), seeds.run_of_low_rank())
    return [Case({name: files[name]}, kept=seeds.model() | files) for files in runs]


MASKED_LINES = (
    b'{"input_ids": [5, 4, 7], "labels": [-100, 6, -100]}\n{"input_ids": [4, 9], "labels": [8, -100]}\n'
)
MESSAGE_SHAPE = 4, 12
"""Which a receiver knows."""


@functools.cache
def _messages() -> list[Case]:
    """Messages of codecs: every grid, scope and encoding, and plain numbers."""
    import torch

    from costmodel.formats.codecs import codec_spec
    from executors.codecs import codec_of

    numbers = torch.randn(*MESSAGE_SHAPE, generator=torch.Generator().manual_seed(1)).relu()
    names = ["none", "q8", "q1:affine:tensor:bitmap", "q4:affine-zero:token:index", "q4:channel:run-length"]
    names += ["q2:entropy", "q4:affine:dense"]
    encoded = [codec_of(codec_spec(name)).encode(numbers) for name in names]
    return [Case({"message": bytes(message.numpy())}) for message in encoded]


def _decoded(folder: Path) -> None:
    from executors.codecs import decode

    decode((folder / "message").read_bytes(), shape=MESSAGE_SHAPE)


def _mutated_message(generator: Random, case: Case) -> Case:
    """Return a message with bytes changed, seldom without a checksum and a length that fit."""
    from executors.codecs import container

    data = bytearray(case.files["message"])
    if generator.random() < 0.5:
        for _ in range(generator.choice((1, 1, 2, 4))):
            at = generator.randrange(len(data) if generator.random() < 0.3 else min(len(data), 64))
            data[at] = generator.choice((0, 1, 2, 127, 128, 255, data[at] ^ 1))
    else:
        data = bytearray(mutated_bytes(generator, bytes(data)))
    if len(data) >= container.PREAMBLE_BYTES and generator.random() < 0.9:
        fields = list(container._PREAMBLE.unpack(data[: container.PREAMBLE_BYTES]))
        fields[10] = len(data)
        data[: container.PREAMBLE_BYTES] = container._PREAMBLE.pack(*fields)
        checksum = container._checksum(np.frombuffer(data, np.uint8))
        struct.pack_into("<I", data, container._CHECKSUM_AT, checksum)
    return replace(case, files={"message": bytes(data)})


@functools.cache
def _quantized() -> list[Case]:
    """Directories that other tools quantized, in every layout that is read."""
    from tests.support.quantized import compressed, transposed_layout

    grouped = {"num_bits": 4, "strategy": "group", "group_size": 16}
    made: dict[str, Callable[[Path], object]] = {
        "packed": lambda to: compressed("llama-tied", to, "pack-quantized", symmetric=True, **grouped),
        "bytes": lambda to: compressed("llama", to, "naive-quantized", num_bits=8, symmetric=False, strategy="tensor"),
        "floats": lambda to: compressed("llama", to, "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
        "gptq": lambda to: transposed_layout("opt-untied", to, "gptq"),
        "awq": lambda to: transposed_layout("opt-untied", to, "awq"),
    }  # fmt: skip
    cases = []
    for name, make in made.items():
        folder = seeds.folder() / f"quantized-{name}"
        make(folder)
        files = {f"model/{path.name}": path.read_bytes() for path in folder.iterdir()}
        broken = {n: files[n] for n in ("model/config.json", "model/model.safetensors")}
        cases.append(Case(broken, kept=files | {"data.jsonl": seeds.data()}))
    return cases


def _tuned(_folder: Path) -> None:
    words = "run --model model --data data.jsonl --steps 1 --batch 2 --out out --no-launch --no-tensorboard --allow-lossy"
    cli.command().main(words.split(), prog_name="zosim")


MODEL_READERS: tuple[Target, ...] = (
    _folder_target("quantized model", _quantized, _tuned, _mutated_weights, 15),
    _folder_target("config planned", _files("model/config.json", _configurations), lambda folder: read_model_spec(folder / "model") and None, _mutated_fields, 80),
    _folder_target("config built", _files("model/config.json", _configurations), _built, _mutated_fields, 60),
    _folder_target("config of another family", _files("model/config.json", _other_configurations), _built, _mutated_fields, 30),
    _folder_target("weights", _weights, _loaded, _mutated_weights, 40),
    _folder_target("tokenizer", _tokenizer_cases, _encoded, _mutated_fields, 25),
    _folder_target("prefix", _prefix, _adapters, _mutated_weights, 20),
    _folder_target("checkpoint", _checkpoints, _checkpoint, _mutated_weights, 20),
    _folder_target("message of a codec", _messages, _decoded, _mutated_message, 40),
    _folder_target("data of tokens", _files("data.jsonl", lambda: [seeds.data()]), _token_lines, mutated, 60),
    _folder_target("data of masks", _files("data.jsonl", lambda: [MASKED_LINES]), _masked_lines, mutated, 20),
    _folder_target("data of text", _files("data.jsonl", lambda: [TEXT_LINES]), _text_lines, mutated, 60),
    _folder_target(
        "data of choices",
        _files("data.jsonl", lambda: [b'{"text": "Is it", "choices": ["yes", "no"], "label": 1}\n{"text": "2", "choices": ["a"], "label": "a"}\n']),
        _choice_lines,
        mutated,
        40,
    ),
    Target(
        "template",
        lambda: [Case(argv=(text, words), kept={"text.jsonl": TEXT_LINES}) for text in TEMPLATES for words in LABEL_WORDS],
        _templated,
        _mutated_template,
        60,
    ),
)  # fmt: skip
