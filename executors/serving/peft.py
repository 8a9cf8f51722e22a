"""Reads adapters that PEFT wrote, and checks that they fit the base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from executors.models.lora import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS, block_linears
from topology.errors import ModelError
from topology.reading import read_json_object, refuse_irregular
from topology.validation import readable

BASE_DIGEST = "base_digest"


class _Config(BaseModel):
    """Fields of an ``adapter_config.json`` that say what an adapter adds."""

    model_config = ConfigDict(extra="ignore")

    peft_type: str
    r: PositiveInt
    lora_alpha: PositiveFloat
    target_modules: list[str] | str
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, PositiveFloat] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None


WITHOUT_EFFECT = frozenset(
    {
        # Where it comes from, and how it was trained.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version"),
        *("revision", "task_type"),
        # What an initialisation was made with, which what was learnt has replaced; `init_lora_weights` says which.
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
        # How something is done that another field asks for.
        *("megatron_core", "qalora_group_size", "runtime_config"),
        # How the weight lies that an initialisation is made of; factors lie in one way.
        "fan_in_fan_out",
    }
)
"""Fields that change nothing of what a trained adapter of a kind that is served computes."""

REFUSED = {
    "alora_invocation_tokens": "starts at tokens that invoke it (aLoRA)",
    "arrow_config": "routes tokens between adapters (Arrow)",
    "bias": "changes biases",
    "ensure_weight_tying": "ties layers to each other",
    "kasa_config": "takes singular values out of the base (KaSA)",
    "layer_replication": "repeats layers of the base",
    "lora_bias": "adds biases to its factors",
    "megatron_config": "belongs beside layers of Megatron",
    "modules_to_save": "replaces whole modules of the base",
    "monteclora_config": "samples its factors (MonteCLoRA)",
    "target_parameters": "stands beside parameters that are no linear's weight",
    "trainable_token_indices": "changes rows of the embedding",
    "use_bdlora": "has factors of blocks (BD-LoRA)",
    "use_dora": "scales the columns of the base (DoRA)",
    "use_qalora": "pools its inputs (QA-LoRA)",
    "velora_config": "projects in another way (VeLoRA)",
}
"""Fields that make an adapter something else than a pair of factors beside each linear, where they say anything."""

_SERVED_INITIALISATIONS = ("gaussian", "orthogonal", "eva", "mica")
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of what an adapter was initialised as, with which PEFT changes the base when it loads the adapter."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank factors of linears of a base."""

    # By the path of the linear: ``A`` (rank, inputs), and ``B`` (outputs, rank) with the scale.
    factors: Mapping[str, tuple[Tensor, Tensor]]
    facts: Mapping[str, str]  # what the file says about itself

    @property
    def rank(self) -> int:
        """Largest rank of any pair."""
        return max(inner.shape[0] for inner, _ in self.factors.values())


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of every linear of a model's blocks, by its path."""
    paths = {id(module): path for path, module in model.named_modules()}
    return {paths[id(module)]: (inputs, outputs) for _, module, inputs, outputs in block_linears(model)}


def read_adapter(directory: str | Path, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Return an adapter for a base whose linears have `shapes`; raise unless it adds what PEFT would.

    Raises ModelError if there is none, its files are damaged, it is no plain LoRA, or it belongs beside another base.
    """
    import safetensors

    directory = Path(directory)
    refuse_irregular((directory / name for name in (PEFT_CONFIG, PEFT_WEIGHTS)), ModelError, links=True)
    config = read_json_object(directory / PEFT_CONFIG, "adapter's configuration", ModelError)
    with readable(str(directory / PEFT_CONFIG), ModelError, model=_Config):
        declared = _Config.model_validate(config)
    _refuse_other_adapters(directory, config, declared)
    try:
        with safetensors.safe_open(directory / PEFT_WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            facts = dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{directory / PEFT_WEIGHTS} cannot be read: {error}") from error
    factors = {}
    for path in dict.fromkeys(_path_of(name, directory) for name in tensors):
        inner, outer = (tensors.get(f"{PEFT_PREFIX}{path}.lora_{part}.weight") for part in "AB")
        if path not in shapes or inner is None or outer is None:
            raise ModelError(
                f"{directory} is an adapter of another base: this one has no linear {path!r}"
                if path not in shapes
                else f"{directory} lacks a factor of {path}",
                hint="linears here are such as " + ", ".join(list(shapes)[:2]),
            )
        if not _is_targeted(path, declared, directory):
            raise ModelError(
                f"{directory} has factors for {path}, which target_modules, exclude_modules or "
                f"layers_to_transform in its {PEFT_CONFIG} exclude, so that PEFT would ignore them",
                hint="the two files belong to different adapters, or one was edited; write both again",
            )
        if not (
            inner.is_floating_point()
            and outer.is_floating_point()
            and min(inner.element_size(), outer.element_size()) > 1
        ):
            raise ModelError(f"{directory} has factors beside {path} of {inner.dtype} and {outer.dtype}")
        rank = (declared.rank_pattern or {}).get(
            _pattern_of(declared.rank_pattern, path, directory), declared.r
        )
        alpha = (declared.alpha_pattern or {}).get(
            _pattern_of(declared.alpha_pattern, path, directory), declared.lora_alpha
        )
        inputs, outputs = shapes[path]
        if (inner.shape[-1], outer.shape[0], inner.shape[0]) != (inputs, outputs, outer.shape[-1]):
            raise ModelError(
                f"{directory} is an adapter of another base: its factors beside {path} are {tuple(outer.shape)} and "
                f"{tuple(inner.shape)}, the linear maps {inputs} numbers to {outputs}"
            )
        if inner.shape[0] != rank:
            raise ModelError(
                f"{directory / PEFT_CONFIG} says r={rank}, the factors beside {path} have rank {inner.shape[0]}",
                hint="the two files belong to different adapters, or one is damaged: write both again",
            )
        scale = alpha / (rank**0.5 if declared.use_rslora else rank)
        inner, scaled = inner.float(), outer.float() * scale  # PEFT computes with factors of float32, too
        if not (inner.isfinite().all() and scaled.isfinite().all()):
            raise ModelError(
                f"{directory} has factors beside {path} that are not finite, times {scale:g} (lora_alpha={alpha:g})"
            )
        factors[path] = inner, scaled
    if not factors:
        raise ModelError(f"{directory} has no factors")
    if declared.init_lora_weights is False and (
        missing := [
            path for path in shapes if path not in factors and _is_targeted(path, declared, directory)
        ]
    ):
        raise ModelError(
            f"{directory} lacks the factors beside {missing[0]}, which init_lora_weights=false fills with random numbers"
        )
    return Adapter(factors, facts)


def _refuse_other_adapters(directory: Path, config: Mapping[str, Any], declared: _Config) -> None:
    if declared.peft_type != "LORA":
        raise ModelError(
            f"{directory} is an adapter of another kind (peft_type={declared.peft_type})",
            hint="only LoRA adapters without biases are supported",
        )
    for name, value in config.items():
        if name in _Config.model_fields or name in WITHOUT_EFFECT or not value or value == "none":
            continue
        what = REFUSED.get(name, "is a field whose meaning is not known here")
        raise ModelError(
            f"{directory} is an adapter of another kind: {name}={str(value)[:80]} {what}",
            hint="merge it into its base with PEFT (merge_and_unload) and serve that, or train a plain LoRA",
        )
    initial = declared.init_lora_weights
    if not isinstance(initial, str) or initial.lower() in _SERVED_INITIALISATIONS:
        return
    if initial.lower().startswith(_CHANGE_THE_BASE):
        raise ModelError(
            f"{directory} was initialised as {initial} (init_lora_weights): PEFT changes the base when it loads the adapter, and other "
            "requests need the base as it is",
            hint="where it is trained, keep the adapter before its first step, and write it as a plain LoRA with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=DIRECTORY_OF_THE_FIRST); or merge it into its base and serve that",
        )
    raise ModelError(
        f"{directory} has an unknown initialisation: init_lora_weights={initial[:80]!r}",
        hint=f"supported: true, false, {', '.join(_SERVED_INITIALISATIONS)}",
    )


def _path_of(name: str, directory: Path) -> str:
    """Return the path of the linear that a tensor of the file belongs to."""
    path, separator, factor = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
    if not (separator and name.startswith(PEFT_PREFIX) and factor in ("A.weight", "B.weight")):
        raise ModelError(
            f"{directory / PEFT_WEIGHTS} contains {name[:120]!r}, which is not a factor of a linear",
            hint=f"factors must be called {PEFT_PREFIX}PATH.lora_A.weight and {PEFT_PREFIX}PATH.lora_B.weight",
        )
    return path


def _is_targeted(path: str, declared: _Config, directory: Path) -> bool:
    """Whether the configuration of an adapter selects a linear, by PEFT's rules."""
    if declared.exclude_modules and _matches(declared.exclude_modules, path, directory):
        return False
    if not _matches(declared.target_modules, path, directory):
        return False
    layers = declared.layers_to_transform
    if (
        layers is None
        or layers == []
        or isinstance(declared.target_modules, str)
        or path in declared.target_modules
    ):
        return True
    # The first number on the path, behind one of the names, or anywhere but at its beginning.
    names = declared.layers_pattern or []
    numbered = (
        int(number)
        for at, (name, number) in enumerate(pairwise(path.split(".")[:-1]))
        if number.isdecimal()
        and (name in ([names] if isinstance(names, str) else names) if names else at > 0)
    )
    return next(numbered, None) in ([layers] if isinstance(layers, int) else layers)


def _matches(names: list[str] | str, path: str, directory: Path) -> bool:
    if isinstance(names, str):
        return _tame(names, directory).fullmatch(path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _pattern_of(patterns: Mapping[str, Any] | None, path: str, directory: Path) -> str:
    """Return the first pattern that matches a path or its end behind a dot."""
    begins = [0, *(at + 1 for at, character in enumerate(path) if character == ".")]
    for pattern in patterns or ():
        compiled = _tame(pattern, directory)
        if any(compiled.fullmatch(path, begin) for begin in begins):
            return pattern
    return path


_QUANTIFIER = re.compile(r"[*+]\??|\{[^}]*\}\??|(?<!\()\?")


@lru_cache(256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern whose matching is fast: no repeated group, no backreference, few quantifiers; None for any other."""
    is_tame = len(pattern) <= 2000 and len(_QUANTIFIER.findall(pattern)) <= 4
    if not is_tame or re.search(r"\)[*+{]|\\\d|\(\?P=", pattern):
        return None
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None


def _tame(pattern: str, directory: Path) -> re.Pattern[str]:
    """Compile an untrusted regular expression; raise if matching might not end."""
    compiled = _compiled(pattern)
    if compiled is None:
        raise ModelError(
            f"{directory / PEFT_CONFIG} has an unsupported regular expression: {pattern[:80]!r}",
            hint="write names of modules: a list for target_modules, paths for rank_pattern and alpha_pattern",
        )
    return compiled
