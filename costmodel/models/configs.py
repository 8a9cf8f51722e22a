"""Reading a model without its weights: a shipped size, a ``config.json``, or a saved ``ModelSpec``.

Only the raw JSON is read, so planning needs neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    field_validator,
    model_validator,
)

from costmodel.formats.stored_quantization import StoredQuantization, stored_quantization
from costmodel.models.families import FAMILIES, FamilyConfig
from costmodel.models.groups import ParameterEntry, group_parameters, split_blocks_inside
from costmodel.models.model_spec import ModelSpec, TrainableSubset, segments_of
from topology.errors import ModelError, UnknownFamily
from topology.limits import Extent, Seed
from topology.reading import read_json_object, shipped_yaml
from topology.validation import readable

CONFIG_NAME = "config.json"


class LoRA(BaseModel):
    """Low-rank adapters on named linears inside the blocks, over a frozen base.

    Attributes
    ----------
    rank : int
        Rows of A (``rank x inputs``) and columns of B (``outputs x rank``).
    target_modules : tuple of str
        Last components of module names, as PEFT matches them, such as ``("q_proj", "v_proj")``.
    alpha : float or None
        What an adapter adds is ``alpha / rank · B A x``; by default twice the rank, or its root where A is redrawn.
    seed : int
        Seed of A's initial numbers; B begins at zero.
    lazy_steps : int or None
        Number of steps after which A is sampled anew, of normals, and B, which alone is tuned then, begins at zero again. What they were
        stays beside the base as a closed increment. None: both are tuned, and nothing is sampled anew.
    max_rank : int or None
        Rank of all increments together, the open one included, that they are compacted to; by default 64, or four times the rank.

    References
    ----------
    .. [1] E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685, equation 3.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Extent
    target_modules: tuple[str, ...]
    alpha: PositiveFloat | None = None
    seed: Seed = 0
    lazy_steps: Extent | None = None
    max_rank: Extent | None = None

    @model_validator(mode="after")
    def _leaves_rank(self) -> Self:
        if self.lazy_steps is None and self.max_rank is not None:
            message = (
                f"max_rank={self.max_rank} needs several increments, but adapters have one unless A is "
                "sampled anew"
            )
            raise ModelError(message, hint="add --lora-lazy-steps, or leave --lora-max-rank out")
        if self.closed_rank < self.rank * (self.lazy_steps is not None):
            message = (
                f"max_rank={self.max_rank} leaves no rank for a closed increment next to the open one of "
                f"{self.rank}"
            )
            raise ModelError(message, hint=f"use {2 * self.rank} or more")
        return self

    @property
    def scale(self) -> float:
        """Factor of what an adapter adds, ``alpha / rank``."""
        usual = 2 * self.rank if self.lazy_steps is None else math.sqrt(self.rank)
        return (self.alpha or usual) / self.rank

    @property
    def closed_rank(self) -> int:
        """Rank that there is memory for beside the open increment."""
        if self.lazy_steps is None:
            return 0
        return (self.max_rank or max(64, 4 * self.rank)) - self.rank

    @field_validator("target_modules")
    @classmethod
    def _names_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            message = "LoRA needs at least one target module"
            raise ModelError(message, hint='such as ("q_proj", "v_proj")')
        return value


class Prefix(BaseModel):
    """Virtual tokens that every block's attention sees before the real ones: keys and values over a frozen base.

    Attributes
    ----------
    num_tokens : int
        Number of virtual tokens per block.
    seed : int
        Seed of the tokens whose keys and values it begins as.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_tokens: Extent
    seed: Seed = 0


Subset = Literal["matrices", "linears"]
"""Part of a model's own parameters: those of two dimensions, or of these the weights of the linears inside the blocks."""

Trainable = TrainableSubset | LoRA | Prefix


def shipped_models() -> tuple[str, ...]:
    """Return the names of the model sizes that come with the package, by family and size.

    Of some families nothing but sizes is known (:data:`~costmodel.models.families.FAMILIES` lists the others): `zosim validate`
    takes models of these sizes for them.
    """
    return tuple(_shipped())


def read_model_spec(
    source: str | Path, *, trainable: Trainable = "all", split_blocks: tuple[int, ...] = ()
) -> ModelSpec:
    """Return what is known of a model from its configuration.

    Parameters
    ----------
    source : str or Path
        A shipped size (``"opt-1.3b"``, ``"OPT-13B"``, ``"facebook/opt-13b"``), a directory that holds
        ``config.json``, a ``config.json``, or a JSON file written by ``ModelSpec.model_dump_json``.
    trainable : "all", "matrices", "linears", LoRA or Prefix
        What is perturbed and updated.
    split_blocks : tuple of int
        Index of each block that becomes two segments, split at the input of the MLP's second linear.

    Raises
    ------
    ModelError
        If there is no such model or file, if the file is damaged, if the family is unknown, or if there is no such
        block.

    Examples
    --------
    >>> spec = read_model_spec("opt-13b")
    >>> spec.num_blocks, spec.hidden_size, f"{spec.num_parameters / 1e9:.2f} B"
    (40, 5120, '12.85 B')
    """
    path = Path(source)
    if not path.exists():
        name = _shipped_name(str(source))
        return spec_of_config(_shipped()[name], name=name, trainable=trainable, split_blocks=split_blocks)
    path, loaded = read_config(path)
    if "param_groups" in loaded or "groups" in loaded:  # as earlier versions wrote it
        return _saved_spec(loaded, path, trainable, split_blocks)
    name = path.parent.name if path.name == CONFIG_NAME else path.stem
    return spec_of_config(
        loaded, name=name or str(path), trainable=trainable, split_blocks=split_blocks, source=str(path)
    )


def shipped_config(name: str) -> dict[str, Any]:
    """Return the configuration of a shipped size, in the form of a ``config.json``.

    Raises ModelError if no shipped size has that name.
    """
    return dict(_shipped()[_shipped_name(name)])


def stored_quantization_in(source: str | Path) -> StoredQuantization | None:
    """Return how the weights in a model directory are kept quantized; None where they are numbers, or `source` is no directory.

    Raises ModelError if the quantized values have no counterpart here.
    """
    if not (Path(source) / CONFIG_NAME).is_file():
        return None
    path, config = read_config(source)
    return stored_quantization(config, str(path))


def read_config(source: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return where a model's configuration is, and its fields.

    Parameters
    ----------
    source : str or Path
        A ``config.json``, or a directory that holds one.

    Raises
    ------
    ModelError
        If there is none, or it is damaged.
    """
    path = Path(source)
    inside = path / CONFIG_NAME if path.is_dir() else path
    if not inside.exists() or inside.suffix == ".gguf":
        gguf = [inside] if inside.exists() else [*path.glob("*.gguf")]
        if gguf:
            message, hint = f"{gguf[0]} is a file of llama.cpp, which zosim does not read", _FROM_GGUF
        elif (path / "model_index.json").exists():
            message = f"directory {source} is a pipeline of diffusers, not a language model"
            hint = "name the directory of a language model"
        else:
            message = f"directory {source} is not a model: it has no {CONFIG_NAME}"
            hint = "name the directory that `save_pretrained` of transformers wrote"
        raise ModelError(message, hint=hint)
    return inside, read_json_object(inside, "model's configuration", ModelError)


_FROM_GGUF = (
    "give the model that it was made from, or convert it: "
    "AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(NEW)"
)


def model_type_of(config: Mapping[str, Any], where: str) -> str:
    """Return the ``model_type`` of a configuration.

    Parameters
    ----------
    config : mapping
    where : str
        Where it was read, for messages.

    Raises
    ------
    ModelError
        If it has none.
    """
    if isinstance(model_type := config.get("model_type"), str):
        return model_type
    if isinstance(config.get("_class_name"), str):
        message = f"{where} describes a {config['_class_name']:.60} of diffusers, not a language model"
    elif model_type is None:
        message = f"{where} has no model_type"
    else:
        message = f"{where} has model_type {model_type!r:.60}, which is no family's name"
    raise ModelError(message, hint="name the directory or the config.json of a model of transformers")


@cache
def note_defaults(where: str, family: str, defaults: tuple[tuple[str, int], ...]) -> None:
    """Warn once that sizes which a configuration does not state are taken from its family's defaults.

    Parameters
    ----------
    where : str
        Where the configuration was read.
    family : str
        Its ``model_type``.
    defaults : tuple of (str, int)
        Name and value of each size.
    """
    if defaults:
        listed = ", ".join(f"{name} {value}" for name, value in defaults)
        _LOG.warning(
            "warning: %s does not state all sizes; defaults of %s are taken: %s", where, family, listed
        )


_LOG = logging.getLogger("zosim")


def spec_of_config(
    config: Mapping[str, Any],
    *,
    name: str,
    trainable: Trainable = "all",
    split_blocks: tuple[int, ...] = (),
    source: str | None = None,
) -> ModelSpec:
    """Return the :class:`ModelSpec` of a configuration given as a mapping.

    Parameters
    ----------
    config : mapping
        Content of a ``config.json`` of transformers.
    name : str
        Name of the model in plans and messages.
    trainable : "all", "matrices", "linears", LoRA or Prefix
        What is perturbed and updated.
    split_blocks : tuple of int
        Index of each block that becomes two segments, as in :func:`read_model_spec`.
    source : str, optional
        Where it was read, for messages.

    Raises
    ------
    UnknownFamily
        If the configuration alone does not tell the model's shape.
    ModelError
        If a field has a wrong type, is out of range or contradicts another, or LoRA targets match nothing.
    """
    config, whole = text_config(config), config
    family = checked_config(config, source or f"the configuration of {name}")
    if family is None:
        model_type = model_type_of(config, source or f"the configuration of {name}")
        raise UnknownFamily(
            f"model {name}: the parameters of model_type {model_type!r:.60} are not known",
            hint=f"with torch and transformers installed, count them once: {COUNTING}. Known types: "
            f"{', '.join(FAMILIES)}",
        )
    if source:
        note_defaults(source, family.family, family.default_sizes)
    shape, tensors = family.shape, list(family.tensors())
    lora = trainable if isinstance(trainable, LoRA) else None
    num_prefix_tokens = trainable.num_tokens if isinstance(trainable, Prefix) else 0
    adapters = [] if lora is None else _adapted_linears(tensors, lora, name)
    if num_prefix_tokens:
        entries = _with_prefixes(
            tensors, (num_prefix_tokens, shape["num_key_value_heads"] * shape["head_dim"])
        )
    else:
        entries = _entries(tensors, trainable)
    split = tuple(sorted(set(split_blocks)))
    if num_prefix_tokens and not (family.is_causal and shape.get("latent") is None):
        message = (
            f"model {name}: a prefix needs a causal model whose keys and values come from the hidden state"
        )
        raise ModelError(message, hint="tune all parameters, or use LoRA adapters")
    splits_inside = _splits_inside(tensors, shape, is_causal=family.is_causal)
    if split and not splits_inside:
        message = (
            f"model {name} cannot be split inside its blocks: they do not add the second linear of one "
            "MLP to the residual stream"
        )
        raise ModelError(message, hint="split it between its blocks")
    segments_of(shape["num_blocks"], split)
    # Sizes that are possible one by one may have a product that no dimension of a tensor has.
    with readable(f"a tensor of {source or name}", ModelError):
        param_groups = group_parameters(
            split_blocks_inside(entries, split, norm_after_mlp=family.sizes.get("norm_after_mlp", False))
        )
    return ModelSpec(
        name=name,
        family=family.family,
        **shape,
        splits_inside=splits_inside,
        text_of=str(whole["model_type"]) if whole is not config else "",
        adapter_rank=lora.rank + lora.closed_rank if lora else 0,
        adapter_shapes=tuple((inputs, outputs) for outputs, inputs in adapters),
        adapter_lazy_steps=(lora.lazy_steps or 0) if lora else 0,
        num_prefix_tokens=num_prefix_tokens,
        split_blocks=split,
        param_groups=param_groups,
        stored=stored_quantization(config, source or name),
        checkpoint_dtype=family.checkpoint_dtype,
    )


COUNTING = "python -m executors.models.spec MODEL spec.json, and give spec.json as the model; MODEL is a directory with config.json"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a multimodal model's text model, of other models their own.

    What the whole says of formats holds for the text model where that says nothing of its own.
    """
    inner = config.get("text_config")
    if _family_of(config) is not None or not isinstance(inner, Mapping) or _family_of(inner) is None:
        return config
    inherited = ("tie_word_embeddings", "dtype", "torch_dtype", "pad_token_id", "quantization_config")
    text = {name: config[name] for name in inherited if name in config} | dict(inner)
    # Transformers ties the table of the whole where either says so.
    return text | ({"tie_word_embeddings": True} if config.get("tie_word_embeddings") is True else {})


def checked_config(config: Mapping[str, Any], source: str) -> FamilyConfig | None:
    """Return the fields of a configuration that zosim reads, checked; None where its family is unknown.

    Raises ModelError if a field has a wrong type, is out of range, or contradicts another.

    - `source`: Where it was read, for messages.
    """
    family = _family_of(config)
    if family is None:
        return None
    with readable(source, ModelError, model=family):
        return family.model_validate(config)


def _family_of(config: Mapping[str, Any]) -> type[FamilyConfig] | None:
    model_type = config.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def _splits_inside(tensors: Iterable[ParameterEntry], shape: Mapping[str, Any], *, is_causal: bool) -> bool:
    """Whether blocks can be cut at the input of their MLP's second linear."""
    usual = {"residual": "serial", "norm_placement": "before", "experts": None, "scaled_residual": False}
    is_plain = is_causal and all(shape.get(name, value) == value for name, value in usual.items())
    names = {".".join(entry.name.split(".")[-3:-1]) for entry in tensors if entry.segments == ("block.0",)}
    modules = names | {name.rpartition(".")[2] for name in names}
    pairs = {"fc2": "fc1", "mlp.c_proj": "ln_2", "mlp.down_proj": "post_attention_layernorm"}
    return is_plain and any({second, other} <= modules for second, other in pairs.items())


def _is_in_block(entry: ParameterEntry) -> bool:
    return entry.segments[0].startswith("block.")


def _module_name(entry: ParameterEntry) -> str:
    """Last component of the name of the module that a parameter belongs to, by which PEFT matches targets."""
    return entry.name.split(".")[-2]


def _entries(tensors: Iterable[ParameterEntry], trainable: Trainable) -> Iterator[ParameterEntry]:
    """Yield the base's tensors, and behind the weights of linears that carry an adapter its factors."""
    lora = trainable if isinstance(trainable, LoRA) else None
    for tensor in tensors:
        if trainable == "linears":
            is_tuned = tensor.linear is not None and _is_in_block(tensor)
        else:
            is_tuned = trainable == "all" or (trainable == "matrices" and len(tensor.shape) == 2)
        yield tensor._replace(trainable=is_tuned)
        if lora is None or tensor.linear is None or not _is_in_block(tensor):
            continue
        if _module_name(tensor) in lora.target_modules:
            prefix = f"{tensor.name.removesuffix('.weight')}.lora_"
            outputs, inputs = tensor.linear
            closed = lora.closed_rank
            # Where A is drawn anew, B alone is tuned.
            factors: dict[str, tuple[tuple[int, ...], bool]] = {
                "A.weight": ((lora.rank, inputs), not closed),
                "B.weight": ((outputs, lora.rank), True),
            }
            if closed:
                factors["closed_A"] = (closed, inputs), False
                factors["closed_B"] = (outputs, closed), False
                factors["lost"] = (1,), False
            for name, (shape, is_tuned) in factors.items():
                yield ParameterEntry(prefix + name, tensor.segments, shape, is_tuned)


def _with_prefixes(tensors: Iterable[ParameterEntry], shape: tuple[int, int]) -> Iterator[ParameterEntry]:
    """Yield the frozen base, and before each block the keys and values that its attention gets."""
    previous = None
    for tensor in tensors:
        segment = tensor.segments[0]
        if _is_in_block(tensor) and segment != previous:
            for kind in ("keys", "values"):
                yield ParameterEntry(f"{segment}.prefix_{kind}", tensor.segments, shape)
        previous = segment
        yield tensor._replace(trainable=False)


def _adapted_linears(tensors: Iterable[ParameterEntry], lora: LoRA, name: str) -> list[tuple[int, int]]:
    """Return outputs and inputs of each linear of a block that carries an adapter."""
    by_block: dict[str, list[tuple[str, tuple[int, int]]]] = {}
    for entry in tensors:
        if _is_in_block(entry) and entry.linear:
            by_block.setdefault(entry.segments[0], []).append((_module_name(entry), entry.linear))
    names = [module for linears in by_block.values() for module, _ in linears]
    missing = [target for target in lora.target_modules if target not in names]
    if missing:
        message = f"model {name}: its blocks have no linear called {', '.join(missing)}"
        raise ModelError(message, hint="linears are " + ", ".join(dict.fromkeys(names)))
    adapted = [
        [linear for module, linear in linears if module in lora.target_modules]
        for linears in by_block.values()
    ]
    if any(linears != adapted[0] for linears in adapted):
        message = (
            f"model {name}: the linears called {', '.join(lora.target_modules)} differ between its blocks"
        )
        alike = dict.fromkeys(
            module for module in names if all(module in dict(linears) for linears in by_block.values())
        )
        raise ModelError(message, hint="all of its blocks have " + ", ".join(alike))
    return adapted[0]


def _saved_spec(
    loaded: dict[str, Any], path: Path, trainable: Trainable, split_blocks: tuple[int, ...]
) -> ModelSpec:
    with readable(f"the model specification {path}", ModelError, model=ModelSpec):
        spec = ModelSpec.model_validate(loaded)
    if split_blocks and spec.split_blocks != split_blocks:
        message = f"{path} is a saved model specification, whose split points are fixed"
        raise ModelError(message, hint="use the model's configuration")
    if trainable != "all":
        message = f"{path} is a saved model specification, whose trainable parameters are fixed"
        raise ModelError(
            message,
            hint="use a model specification with the adapters",
        )
    return spec


def _shipped_name(source: str) -> str:
    wanted = re.sub(r"[\s:]+", "-", source.strip().lower())
    names = _shipped_aliases()
    known_as = next((names[form] for form in _without_variants(wanted) if form in names), None)
    if known_as is not None:
        return known_as
    planned = [name for name, config in _shipped().items() if config["model_type"] in FAMILIES]
    close = difflib.get_close_matches(wanted.rsplit("/", 1)[-1], planned, n=3, cutoff=0.5)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:  # a name has one slash at most
        message = f"there is no model directory {source!r}"
        raise ModelError(
            message, hint=f"name a directory with {CONFIG_NAME}; {Path.cwd()} is where paths start"
        )
    sizes = {_shipped()[name]["model_type"]: name for name in reversed(planned)}
    nearest = difflib.get_close_matches(wanted, sizes, n=5, cutoff=0)
    families = ", ".join(f"{family} ({sizes[family]})" for family in nearest)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"the nearest families: {families}; in Python, costmodel.shipped_models() lists all"
    )
    raise ModelError(
        f"unknown model {source!r}: neither a built-in size nor a directory with {CONFIG_NAME}", hint=hint
    )


_VARIANTS = ("-hf", "-base", "-chat", "-instruct", "-it")
"""Ends of the names of models that have the sizes of those without: trained further, or in another file format."""


def _without_variants(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it as such ends are taken off."""
    yield name
    for end in _VARIANTS:
        if name.endswith(end):
            yield from _without_variants(name.removesuffix(end))


_OF_ONE_FAMILY = ("opt", "gpt2", "llama", "qwen2", "qwen3", "mistral", "roberta")
"""Files of sizes that are of one family each."""


@cache
def _family_files() -> tuple[dict[str, Any], ...]:
    """Read once, for sizes and for aliases: what YAML takes is a good part of what a model takes."""
    folder = resources.files("costmodel") / "data" / "models"
    files = (
        (folder / f"{family}.yaml").read_text(encoding="utf-8") for family in (*_OF_ONE_FAMILY, "others")
    )
    return tuple(map(shipped_yaml, files))


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return {
        name: {"model_type": data.get("family"), **data.get("common", {}), **size}
        for data in _family_files()
        for name, size in data["sizes"].items()
    }


@cache
def _shipped_aliases() -> dict[str, str]:
    aliases: dict[str, str] = {}
    for data in _family_files():
        names = {name: name for name in data["sizes"]} | data.get("aliases", {})
        for prefix in ("", *data["prefixes"]):
            aliases |= {prefix.lower() + alias: name for alias, name in names.items()}
    return aliases
