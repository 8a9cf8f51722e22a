"""Prefix tuning: virtual tokens that every block's attention sees, the only parameters that are then tuned.

Each block gets keys and values of ``N`` tokens that are nowhere in the sequence. They begin as what random real
tokens leave in a key-value cache, since random numbers would cost the model its abilities. As in the MeZO loop's
prefix tuning, the real tokens keep their positions, and every one of them sees the whole prefix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import Prefix
from executors.files import write_atomically
from executors.models.blocks import fills_masks, find_blocks
from executors.models.transformers_interface import AttentionArguments, attention_modules, cached_states
from executors.models.weight_files import write_tensors
from topology.errors import ModelError

WEIGHTS_NAME = "prefix.safetensors"
CONFIG_NAME = "prefix_config.json"
_TENSOR_NAMES = ("prefix_keys", "prefix_values")


def attach_prefix(model: nn.Module, prefix: Prefix) -> None:
    """Freeze a model, and put a prefix before the keys and values of each of its blocks.

    - `model`: changed in place, its weights on the CPU. Each attention module gets ``prefix_keys`` and ``prefix_values`` of shape
      (virtual tokens, key-value heads · head width), in its own format.
    - `prefix`: how many tokens, and the seed of those whose keys and values they begin as.

    Raises ModelError if the model cannot read so many tokens at once, or its blocks do not have one attention each.

    .. [1] X. Li, P. Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", 2021, arXiv:2101.00190.
    .. [2] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333,
       appendix. A prefix begins as keys and values of real tokens.
    """
    if fills_masks(model):
        raise ModelError(
            f"{type(model).__name__} is a masked model, but a prefix needs a causal one",
            hint="use LoRA adapters instead",
        )
    generator = torch.Generator().manual_seed(prefix.seed)
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if prefix.num_tokens > config.max_position_embeddings:
        raise ModelError(
            f"a prefix of {prefix.num_tokens} tokens exceeds the {config.max_position_embeddings} "
            f"positions of {type(model).__name__}"
        )
    tokens = torch.randint(0, config.vocab_size, (1, prefix.num_tokens), generator=generator)
    with torch.no_grad():
        states = cached_states(model.eval(), tokens)
    model.requires_grad_(False)
    for attention, (keys, values) in zip(_attentions(model), states, strict=True):
        _attach(attention, _in_rows(keys), _in_rows(values), keys.shape[1])


def load_prefix(model: nn.Module, directory: str | Path) -> None:
    """Freeze a model, and give it the prefix that :func:`save_prefix` wrote.

    Raises ModelError if there is none, or it is another model's.
    """
    import safetensors
    from safetensors.torch import load_file

    path = Path(directory) / WEIGHTS_NAME
    try:
        held = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"cannot read the prefix {path}: {error}") from error
    model.requires_grad_(False)
    paths = {id(module): name for name, module in model.named_modules()}
    for attention in _attentions(model):
        where = paths[id(attention)]
        keys, values = (held.get(f"{where}.{part}") for part in _TENSOR_NAMES)
        if keys is None or values is None or keys.shape[1] % _head_width(model):
            raise ModelError(
                f"the prefix {path} does not match {type(model).__name__}: nothing in it fits {where}"
            )
        like = next(attention.parameters())
        _attach(attention, keys.to(like), values.to(like), keys.shape[1] // _head_width(model))


def save_prefix(model: nn.Module, directory: str | Path, dtype: str | None = None) -> None:
    """Write a model's prefix as ``prefix.safetensors`` and ``prefix_config.json``."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parts = {n: p.detach() for n, p in model.named_parameters() if n.rpartition(".")[2] in _TENSOR_NAMES}
    config = model.config
    facts = {
        "num_virtual_tokens": next(iter(parts.values())).shape[0],
        "model_type": config.model_type,  # type: ignore[union-attr]
        "base_model_name_or_path": getattr(config, "_name_or_path", None),
        "shifts_positions": False,
    }
    write_atomically(directory / CONFIG_NAME, json.dumps(facts, indent=2) + "\n")
    write_tensors(parts, directory / WEIGHTS_NAME, dtype)


def _attentions(model: nn.Module) -> list[nn.Module]:
    """Return the attention of every block."""
    attentions = []
    for index, block in enumerate(find_blocks(model)):
        inside = attention_modules(block)
        if len(inside) != 1:
            raise ModelError(
                f"block {index} of {type(model).__name__} has {len(inside)} attention modules, but a prefix "
                "needs exactly one",
                hint="use LoRA adapters (--lora-rank), or tune all parameters",
            )
        attentions += inside
    return attentions


def _head_width(model: nn.Module) -> int:
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def _in_rows(states: Tensor) -> Tensor:
    """Return (1, heads, tokens, width) as (tokens, heads · width)."""
    return states[0].transpose(0, 1).flatten(1).contiguous()


def _attach(attention: nn.Module, keys: Tensor, values: Tensor, num_heads: int) -> None:
    for name, part in zip(_TENSOR_NAMES, (keys, values), strict=True):
        attention.register_parameter(name, nn.Parameter(part.detach().clone()))
    prepend = _Prepend(num_heads, AttentionArguments(attention))
    attention.register_forward_pre_hook(prepend, with_kwargs=True)
    attention.register_forward_hook(prepend.check, with_kwargs=True)


class _Prepend:
    """Makes an attention module read the prefix from its cache argument, and extends its mask to it."""

    def __init__(self, num_heads: int, arguments: AttentionArguments) -> None:
        self._num_heads = num_heads
        self._arguments = arguments

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = self._arguments.named(args, kwargs)
        cache = named.get(self._arguments.cache)
        past = 0 if cache is None else cache.get_seq_length(module.layer_idx)
        keys, values = self._heads(module.prefix_keys), self._heads(module.prefix_values)
        mask = _extended(
            named.get("attention_mask"), module.prefix_keys.shape[0], past, named["hidden_states"]
        )
        seen = {self._arguments.cache: _PrefixCache(keys, values, cache), "attention_mask": mask}
        return (), named | seen

    def check(self, module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any], _output: object) -> None:
        """Raise if the attention did not read the prefix."""
        if not kwargs[self._arguments.cache].was_read:
            raise ModelError(
                f"{type(module).__name__} ignores its prefix",
                hint="install a tested release of transformers: pyproject.toml lists them",
            )

    def _heads(self, part: Tensor) -> Tensor:
        """Return (tokens, heads · width) as (1, heads, tokens, width)."""
        num_tokens, width = part.shape
        return part.view(1, num_tokens, self._num_heads, width // self._num_heads).transpose(1, 2)


class _PrefixCache:
    """A key-value cache with a prefix before the states of `inner`, as far as attention modules use one."""

    def __init__(self, keys: Tensor, values: Tensor, inner: Any) -> None:
        self._prefix = keys, values
        self._inner = inner
        self.was_read = False

    def update(self, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values that the new tokens may see, the prefix first."""
        self.was_read = True
        if self._inner is not None:
            keys, values = self._inner.update(keys, values, *rest, **more)
        first, second = (
            torch.cat([prefix.to(states.dtype).expand(states.shape[0], -1, -1, -1), states], dim=2)
            for prefix, states in zip(self._prefix, (keys, values), strict=True)
        )
        return first, second


def _extended(mask: Tensor | None, num_tokens: int, past: int, hidden: Tensor) -> Tensor | None:
    """Return a mask under which every token also sees the prefix.

    Without a mask a fused kernel is called with a flag that attention is causal, which it takes to begin at the first key.
    """
    length = hidden.shape[1]
    if mask is not None:
        seen = torch.ones if mask.dtype == torch.bool else torch.zeros
        return torch.cat(
            [seen((*mask.shape[:-1], num_tokens), dtype=mask.dtype, device=mask.device), mask], -1
        )
    if length == 1:
        return None
    columns = num_tokens + past + length
    visible = torch.ones((length, columns), dtype=torch.bool, device=hidden.device)
    return visible.tril(num_tokens + past)[None, None]
