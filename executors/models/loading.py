"""Loads models from a directory or by name, running no code of theirs.

A model directory may come from anybody. Its ``config.json`` is read once, by the reader and the types that the planner
uses, and what libraries are given is made from that. No code of the directory runs: neither modelling code that it names
(``auto_map``), nor pickled weights, nor templates. Whatever a library still objects to leaves as a ModelError.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from costmodel.memory import host_limits
from costmodel.models.configs import (
    CONFIG_NAME,
    checked_config,
    model_type_of,
    note_defaults,
    read_config,
    shipped_config,
    stored_quantization_in,
    text_config,
)
from costmodel.models.families import FAMILIES, SIZES
from executors.formats import SAFETENSORS_NAMES, TORCH_DTYPES, WEIGHTS_NAME
from executors.models.transformers_interface import attention_of
from topology.errors import ModelError, ZosimError
from topology.limits import Blocks, Extent
from topology.reading import read_json_object, refuse_irregular
from topology.units import format_bytes
from topology.validation import did_you_mean, readable

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WEIGHT_FORMATS = ("float64", "float32", "float16", "bfloat16")
_FLOATING = tuple(SAFETENSORS_NAMES[TORCH_DTYPES[name]] for name in _WEIGHT_FORMATS)


def load_model(
    source: str | Path,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    allow_download: bool = False,
    random_weights: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Return a language model in evaluation mode, on the CPU: causal, or masked where its configuration says so.

    Parameters
    ----------
    source : str or path
        Directory with ``config.json`` and safetensors, or a name that transformers knows.
    dtype : str
        Format of the weights.
    attention : str
        ``"eager"`` or ``"sdpa"``; families without the latter are given the former.
    allow_download : bool
        Whether a name may be looked up on the Hub; off, only what is in the local cache is read.
    random_weights : bool
        Build the architecture with random weights, reading the configuration alone; `source` may then be a size that
        comes with zosim, such as ``opt-125m``.
    seed : int
        Of the random weights.

    Raises
    ------
    ModelError
        If there is no such model or format, its configuration cannot be, it is larger than this machine's memory, its weights are
        pickled, damaged or incomplete, or its attention cannot be had.
    """
    if dtype not in _WEIGHT_FORMATS:
        raise ModelError(
            f"models have no weights in dtype={dtype}", hint=did_you_mean(dtype, _WEIGHT_FORMATS)
        )
    config = load_config(source, allow_download=allow_download, shipped=random_weights)
    if stored_quantization_in(source) is not None:
        raise ModelError(
            f"{source} is quantized, so a plan must say how it is kept in memory",
            hint="use `zosim plan` and `zosim run`, or the model in 16 bits",
        )
    auto = _auto_class(config)
    own = attention_of(model_class(config), attention)
    loading = {"dtype": TORCH_DTYPES[dtype], "attn_implementation": own, "trust_remote_code": False}
    with quietly_loading(source, allow_download=allow_download):
        # Without memory first: size and names are checked before any weight is read.
        with torch.device("meta"), naming_nulls(config):
            skeleton = auto.from_config(config, **loading)
        _refuse_too_large(source, skeleton)
        if random_weights:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random_model: nn.Module = auto.from_config(config, **loading)
            return random_model.eval()
        if Path(source).is_dir():
            _check_weights(Path(source), {name for name, _ in skeleton.named_parameters()})
        loaded: Any = auto.from_pretrained(
            str(source),
            config=config,
            local_files_only=not allow_download,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            key_mapping=_TEXT_NAMES,
            **loading,
        )
    model, report = loaded
    _refuse_incomplete(source, report)
    _refuse_untied(source, model, skeleton)
    return model.eval()  # type: ignore[no-any-return]


def model_class(config: Any) -> Any:
    """Return transformers' class of the language model that a configuration describes.

    Raises ModelError if it describes none.
    """
    classes = _auto_class(config)._model_mapping
    text = config.get_text_config()
    if type(config) not in classes and text is not config:
        raise ModelError(
            f"{config.model_type} is a model of more than texts, and transformers has no language model of its text model, {text.model_type}, alone",
            hint="use a language model, or a model whose text model is one, such as llava",
        )
    if type(config) not in classes:
        raise ModelError(
            f"a model of type {config.model_type} neither predicts the next token nor fills in masks",
            hint="zosim tunes language models: decoders such as llama, and masked encoders such as roberta",
        )
    return classes[type(config)]


def _auto_class(config: Any) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    family, causal = FAMILIES.get(config.model_type), transformers.AutoModelForCausalLM
    if family is not None:
        is_causal = family.is_causal
    else:
        declared = {*(config.architectures or ())} & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
        is_causal = not declared and type(config) in causal._model_mapping
    return causal if is_causal else transformers.AutoModelForMaskedLM


def load_config(source: str | Path, *, allow_download: bool = False, shipped: bool = False) -> Any:
    """Return the configuration of a model, as transformers knows it; of a model of texts and images, that of its text model.

    `shipped`: whether `source` may be a size that comes with zosim.

    Raises ModelError if there is no such model, or its configuration cannot be; the message names the field.
    """
    import transformers

    where, fields = _config_fields(source, allow_download=allow_download, shipped=shipped)
    inner = checked_config(text_config(fields), where)
    if fields.get("is_encoder_decoder") is True:
        raise ModelError(
            f"{where} describes an encoder-decoder, which is not supported",
            hint="zosim supports causal decoders and masked encoders",
        )
    if fields.get("num_key_value_heads", 0) is None and "num_attention_heads" in fields:
        # As many as of queries; some families' classes take no null.
        fields = fields | {"num_key_value_heads": fields["num_attention_heads"]}
    with quietly_loading(source, allow_download=allow_download):
        config = _config_class(fields, where)
        text = config.get_text_config()
        if getattr(text, "is_heterogeneous", False):
            raise ModelError(
                f"{where} gives layers of a {text.model_type} sizes of their own (per_layer_config), which is not supported",
                hint="use a model all of whose layers have the sizes that its configuration states once",
            )
        with readable(where, ModelError):
            _UsualSizes.model_validate(config)
            _UsualSizes.model_validate(text)
    given = fields.get(next((name for name, value in vars(config).items() if value is text), ""), fields)
    _look_at_sizes(text, given, where, is_checked=inner is not None)
    declared, own = fields.get("num_hidden_layers"), getattr(config, "num_hidden_layers", None)
    if (
        declared is not None
        and own not in (None, declared)
        and "num_hidden_layers" not in config.attribute_map
    ):
        raise ModelError(
            f"{where} has num_hidden_layers {declared}, but its other fields describe {own} layers",
            hint="correct the field that lists the types of layers",
        )
    if type(text) is type(config) or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    # The whole model's table is tied or not, whatever its text model's configuration says.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    _note_text_model(str(source), config.model_type, text.model_type)
    return text


@cache
def _note_text_model(source: str, model_type: str, text_type: str) -> None:
    """Say once which part of a model of texts and images is run."""
    logging.getLogger("zosim").warning(
        "%s is a %s: its text model, %s, is run", source, model_type, text_type
    )


def _look_at_sizes(config: Any, given: Any, where: str, *, is_checked: bool) -> None:
    """Raise for a size that is null, and note those that a file leaves to the family's defaults.

    `given`: the file's fields. `is_checked`: whether the planner's reader has noted them.
    """
    spelt, defaults = config.attribute_map, []
    for own in {spelt.get(name, name) for name in SIZES}:
        names = {own, *(name for name, of in spelt.items() if of == own)}
        if names & _NEEDED and getattr(config, own, 0) is None:
            message = f"{where} states no {own}"
            raise ModelError(
                message,
                hint=f"models of type {config.model_type} have no default for it: copy the whole file",
            )
        usual = getattr(type(config), own, None)
        is_default = isinstance(usual, int) and usual and getattr(config, own) == usual
        if is_default and not names & {*(given or ())} and not is_checked:
            defaults.append((own, usual))
    note_defaults(where, config.model_type, tuple(sorted(defaults)))


_NEEDED = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
_TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""What files of a model of texts and images call the weights of its text model, and what that calls them."""


def _config_fields(source: str | Path, *, allow_download: bool, shipped: bool) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    if path.is_dir():
        _refuse_irregular(path)
    if path.exists():
        where, fields = read_config(path)
        return str(where), fields
    where_named = f"{source}/{CONFIG_NAME}"
    if shipped:
        try:
            return where_named, shipped_config(str(source))
        except ModelError:
            pass  # a name that transformers may know
    from transformers import PreTrainedConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    with refusing(source, allow_download=allow_download):
        if find_adapter_config_file(str(source), local_files_only=not allow_download) is not None:
            raise _with_adapter(source)
        named, _ = PreTrainedConfig.get_config_dict(str(source), local_files_only=not allow_download)
        return where_named, dict(named)


_ADAPTER_NAME = "adapter_config.json"


def _refuse_irregular(directory: Path) -> None:
    """Raise for a directory with something other than files to read, or with an adapter, which transformers would load too.

    Links are followed: caches and users' own directories are made of them, and nothing is written there.
    """
    entries = [path for path in directory.iterdir() if path.suffix in _READ or not path.is_dir()]
    refuse_irregular(
        entries, ModelError, links=True, hint="a model directory must hold files, or links to files"
    )
    if (directory / _ADAPTER_NAME).exists():
        raise _with_adapter(directory)


def _with_adapter(source: str | Path) -> ModelError:
    return ModelError(
        f"{source} also holds an adapter ({_ADAPTER_NAME}), which transformers would load with the model",
        hint="give the directory of its base; if they share a directory, move the adapter's files away",
    )


_READ = {".json", ".safetensors", ".txt", ".model", ".jinja"}


def _config_class(fields: Mapping[str, Any], where: str) -> Any:
    """Return transformers' configuration from a file's fields, without those that do more than describe a model."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = model_type_of(fields, where)
    if model_type not in CONFIG_MAPPING:
        code = ", and brings code of its own, which zosim never runs" if "auto_map" in fields else ""
        listed = fields.get("architectures")
        named = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
        known_as = (kind for kind, made in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if made in named)
        hint = "use a model whose architecture is part of transformers"
        if (family := next(known_as, None)) is not None:
            hint = f'{min(named)} is what transformers calls {family}: set "model_type": "{family}" in a copy of the file'
        raise ModelError(
            f"{where} has model_type {model_type!r:.60}, which transformers does not know{code}", hint=hint
        )
    config_class = CONFIG_MAPPING[model_type]
    fields = {name: _with_floats(value) for name, value in fields.items()}
    own = (
        inspect.signature(config_class).parameters.keys()
        - inspect.signature(PreTrainedConfig).parameters.keys()
    )
    known = own | _DESCRIPTION | config_class.attribute_map.keys()
    if config_class.__post_init__ is not PreTrainedConfig.__post_init__:
        # Names of earlier releases, which the class itself looks for.
        read = {name for name in config_class.__post_init__.__code__.co_consts if isinstance(name, str)}
        known |= {name for name in read - _NO_DESCRIPTION if not name.startswith("_")}
    if model_type in FAMILIES:
        known |= FAMILIES[model_type].model_fields.keys()
        return config_class(**{name: value for name, value in fields.items() if name in known})
    # A field that is no description would take the place of a method, or have weights, code and formats looked for.
    return config_class(
        **{
            name: value
            for name, value in fields.items()
            if name in known
            or not (hasattr(config_class, name) or name.startswith("_") or name in _NO_DESCRIPTION)
        }
    )


def _with_floats(value: Any) -> Any:
    """Return a field with the numbers that JSON lacks, which transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, list):
        return [_with_floats(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _with_floats(entry) for name, entry in value.items()}


_DESCRIPTION = {
    "architectures", "dtype", "torch_dtype", "is_encoder_decoder", "transformers_version", "rope_scaling",
    "rope_theta", "partial_rotary_factor",
}  # fmt: skip
_NO_DESCRIPTION = {
    "auto_map", "quantization_config", "configuration_files", "fusion_config", "attn_implementation",
    "experts_implementation",
}  # fmt: skip


class _UsualSizes(BaseModel):
    """Usual sizes of a model of any family."""

    model_config = ConfigDict(from_attributes=True, strict=True)

    num_hidden_layers: Blocks | None = None
    hidden_size: Extent | None = None
    intermediate_size: Extent | list[Extent] | None = None
    num_attention_heads: Extent | None = None
    num_key_value_heads: Extent | None = None
    vocab_size: Extent | None = None
    max_position_embeddings: Extent | Literal[-1] | None = None
    architectures: list[str] | None = None


def _refuse_too_large(source: str | Path, skeleton: nn.Module) -> None:
    """Raise for a model whose weights exceed this machine's memory."""
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    limits = host_limits()
    if size_bytes > limits.available_bytes:
        raise ModelError(
            f"the model {source} has {format_bytes(size_bytes)} of weights, but "
            f"{format_bytes(limits.available_bytes)} of memory are available ({limits.limited_by})",
            hint="use a smaller model, or a narrower --dtype",
        )


def _check_weights(directory: Path, names: set[str]) -> None:
    """Raise for weight files that cannot be read, before transformers maps them.

    Raises ModelError if there are none, they are pickled, an index names what is not there, or a header is damaged.
    """
    files = _weight_files(directory)
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    kind = file.get_slice(name).get_dtype()
                    if name in names and kind not in _FLOATING:
                        raise ModelError(
                            f"{path}: {name} has type {kind}, but weights must be {', '.join(_FLOATING)}",
                            hint="use the model in float32, float16 or bfloat16; a quantized model needs a "
                            "quantization_config in its config.json",
                        )
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error


def opened_weights(directory: Path, weights_name: str = WEIGHTS_NAME) -> dict[str, Tensor]:
    """Return the tensors of a directory by name, memory-mapped: what is not read takes no memory.

    Raises ModelError if there are none, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(directory, weights_name):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
    return tensors


def _damaged(path: Path, error: BaseException) -> ModelError:
    return ModelError(
        f"{path} cannot be read: {one_line(error)}",
        hint="the file is damaged or incomplete; copy it again",
    )


def _weight_files(directory: Path, weights_name: str = WEIGHTS_NAME) -> list[Path]:
    if (directory / weights_name).is_file():
        return [directory / weights_name]
    index = directory / INDEX_NAME
    if not index.is_file():
        pickled = [name for name in _PICKLED if (directory / name).exists()]
        if pickled:
            raise ModelError(
                f"{directory} has its weights in {pickled[0]}, a pickle, which can run code when it is "
                "loaded",
                hint="if you trust it, convert it once: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) writes safetensors",
            )
        raise ModelError(
            f"{directory} has no weights: {weights_name} and {INDEX_NAME} are missing",
            hint="copy them there, or add --random-weights",
        )
    where = read_json_object(index, "weight index", ModelError).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelError(f"{index} has no weight_map", hint="it must map each tensor's name to its file")
    for name, file in where.items():
        # Plain names alone: an untrusted index must not lead out of its directory.
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index}: {name!r:.60} is listed in {file!r:.60}, which is not a .safetensors file next to "
                "it",
                hint="weights must be in .safetensors files next to their index",
            )
    files = sorted({directory / file for file in where.values()})
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(
            f"{index} lists {_some(missing)}, which is missing",
            hint="copy the missing files; the model is incomplete",
        )
    return files


@contextmanager
def refusing(source: str | Path, *, allow_download: bool = False) -> Iterator[None]:
    """Turn whatever a library raises while it reads untrusted files into a ModelError.

    transformers, huggingface_hub, safetensors and tokenizers raise exceptions of every kind for a damaged file, and new
    releases raise others. Our own errors and a want of memory pass as they are.
    """
    try:
        yield
    except (ZosimError, MemoryError, ModuleNotFoundError):
        raise
    except BaseException as error:
        # A panic in tokenizers' Rust code is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason, hint = (
            one_line(error),
            "check the file or field that the message names; a library wrote the message",
        )
        if isinstance(error, SafetensorError):
            hint = "the file is damaged or incomplete; copy it again"
        if not allow_download and not Path(source).exists():
            # Of a path that was mistyped the library reports a failed download.
            reason = "there is no such directory, and the cache of downloaded models has no such name"
            hint = (
                "name a directory written by save_pretrained, or add --allow-download for a model of the Hub"
            )
        raise ModelError(f"cannot load the model {source}: {reason}", hint=hint) from error


@contextmanager
def naming_nulls(config: Any) -> Iterator[None]:
    """Turn a failure to build a model into a ModelError that names what its configuration leaves open."""
    from transformers import PreTrainedConfig

    text = config.get_text_config()
    usual = {*dir(PreTrainedConfig), *vars(PreTrainedConfig())}
    nulls = [name for name, value in vars(text).items() if value is None and name not in usual]
    nulls = [name for name in nulls if not name.endswith("_token_id")]
    try:
        yield
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        if not nulls:
            raise
        raise ModelError(
            f"transformers cannot build this {text.model_type}: {one_line(error)}",
            hint=f"the configuration states no {', '.join(nulls)}, which may be needed",
        ) from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return what an exception says, as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def quietly_loading(source: str | Path, *, allow_download: bool = False) -> Iterator[None]:
    """As :func:`refusing`, with transformers' own reports switched off."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # models load in seconds, and steps have a bar of their own
    try:
        with refusing(source, allow_download=allow_download):
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def _refuse_incomplete(source: str | Path, loading_info: Mapping[str, Any]) -> None:
    """Raise where a file lacks weights that transformers would initialise at random."""
    wrong = [str(name) for name, *_ in loading_info["mismatched_keys"]]
    if wrong:
        raise ModelError(
            f"the weights in {source} do not match its config.json: {_some(wrong)} has another shape",
            hint="they belong to different models; copy both from one source",
        )
    missing = [str(name) for name in loading_info["missing_keys"]]
    if missing:
        raise ModelError(
            f"the weights in {source} are incomplete: {_some(missing)} is missing",
            hint="copy or convert the model again; otherwise these parameters would be random",
        )


def _refuse_untied(source: str | Path, model: nn.Module, skeleton: nn.Module) -> None:
    """Raise where a file has other numbers for weights that the configuration ties: transformers does not tie these."""
    names, tied = ({name for name, _ in one.named_parameters()} for one in (model, skeleton))
    if untied := sorted(names - tied):
        raise ModelError(
            f"config.json in {source} ties embeddings and head (tie_word_embeddings), and the files hold another {_some(untied)}",
            hint="set tie_word_embeddings to false there, or remove the tensor if the head is the table",
        )


def _some(names: Sequence[str]) -> str:
    names = sorted(names)
    return names[0] if len(names) == 1 else f"{names[0]} (one of {len(names)})"
