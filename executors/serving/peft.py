"""Adapters as PEFT writes them, read for the base that they are to stand beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from executors.models.lora import PEFT_WEIGHTS, block_linears
from topology.errors import ModelError
from topology.reading import read_json_object, refuse_irregular
from topology.validation import readable

CONFIG_NAME = "adapter_config.json"
BASE_DIGEST = "base_digest"

_PREFIX = "base_model.model."


class _Config(BaseModel):
    """Fields of an ``adapter_config.json`` that change what an adapter adds."""

    model_config = ConfigDict(extra="ignore")

    peft_type: str
    r: PositiveInt
    lora_alpha: PositiveFloat
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, Any] = {}
    alpha_pattern: dict[str, Any] = {}


@dataclass(frozen=True)
class Adapter:
    """What stands beside the linears of a base.

    Attributes
    ----------
    factors : mapping of str to (torch.Tensor, torch.Tensor)
        By the path of the linear: ``A`` (rank, inputs), and ``B`` (outputs, rank) with the scale.
    facts : mapping of str to str
        What the file says about itself.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    facts: Mapping[str, str]

    @property
    def rank(self) -> int:
        """Largest rank of any pair."""
        return max(inner.shape[0] for inner, _ in self.factors.values())


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of every linear of a model's blocks, by its path."""
    paths = {id(module): path for path, module in model.named_modules()}
    return {paths[id(module)]: (inputs, outputs) for _, module, inputs, outputs in block_linears(model)}


def read_adapter(directory: str | Path, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Return an adapter for a base whose linears have `shapes`.

    Raises
    ------
    ModelError
        If there is none, its files are damaged, it is no plain LoRA, or it belongs beside another base.
    """
    import safetensors

    directory = Path(directory)
    refuse_irregular((directory / name for name in (CONFIG_NAME, PEFT_WEIGHTS)), ModelError, links=True)
    config = read_json_object(directory / CONFIG_NAME, "adapter's configuration", ModelError)
    with readable(str(directory / CONFIG_NAME), ModelError, model=_Config):
        stated = _Config.model_validate(config)
    if stated.peft_type != "LORA" or stated.use_dora or stated.bias != "none":
        raise ModelError(
            f"{directory} is an adapter of another kind (peft_type={stated.peft_type}, use_dora={stated.use_dora}, "
            f"bias={stated.bias})",
            hint="LoRA adapters without biases are served",
        )
    if stated.rank_pattern or stated.alpha_pattern:
        raise ModelError(
            f"{directory} has other ranks or alphas for some linears", hint="write it with one of each"
        )
    scale = stated.lora_alpha / (stated.r**0.5 if stated.use_rslora else stated.r)
    try:
        with safetensors.safe_open(directory / PEFT_WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            facts = dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{directory / PEFT_WEIGHTS} cannot be read: {error}") from error
    factors = {}
    for path in dict.fromkeys(name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors):
        pair = [tensors.get(f"{_PREFIX}{path}.lora_{part}.weight") for part in "AB"]
        inner, outer = pair
        if path not in shapes or inner is None or outer is None:
            raise ModelError(
                f"{directory} is an adapter of another base: this one has no linear {path!r}"
                if path not in shapes
                else f"{directory} lacks a factor of {path}",
                hint="linears here are such as " + ", ".join(list(shapes)[:2]),
            )
        inputs, outputs = shapes[path]
        if (inner.shape[-1], outer.shape[0], inner.shape[0]) != (inputs, outputs, outer.shape[-1]):
            raise ModelError(
                f"{directory} is an adapter of another base: its factors beside {path} are {tuple(outer.shape)} and "
                f"{tuple(inner.shape)}, the linear maps {inputs} numbers to {outputs}"
            )
        if inner.shape[0] != stated.r:
            raise ModelError(
                f"{directory / CONFIG_NAME} says r={stated.r}, the factors beside {path} have rank {inner.shape[0]}",
                hint="the two files belong to different adapters, or one is damaged: write both again",
            )
        scaled = outer * scale
        if not (inner.isfinite().all() and scaled.isfinite().all()):
            raise ModelError(
                f"{directory} has factors beside {path} that are not finite, times {scale:g} (lora_alpha={stated.lora_alpha:g})"
            )
        factors[path] = inner, scaled
    if not factors:
        raise ModelError(f"{directory} has no factors")
    return Adapter(factors, facts)
