"""The names in transformers that prefixes and packed forwards rely on: the one place to adapt when a release changes them.

Attention modules take the states that they attend to besides their own from a cache, under a name that has changed several
times. A release that knows a new name drops the old one with a warning, so the name is read from each module's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from topology.errors import ModelError

_CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What the cache has been called in transformers, the newest name first."""


def attention_modules(block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block that read a key-value cache."""
    return [module for module in block.modules() if hasattr(module, "layer_idx") and module is not block]


def cached_states(model: Any, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each block's keys and values of `tokens`, each of shape (sequences, heads, tokens, width)."""
    output = model(input_ids=tokens, use_cache=True)
    name = next(name for name in _CACHE_NAMES if name in output)
    return [(layer.keys, layer.values) for layer in output[name].layers]


class AttentionArguments:
    """The names under which an attention module takes its arguments.

    Raises ModelError if it takes a cache under no name that is known: one that it does not know would be ignored.
    """

    def __init__(self, attention: nn.Module) -> None:
        self._names = tuple(inspect.signature(attention.forward).parameters)
        known = [name for name in _CACHE_NAMES if name in self._names]
        if not known or not {"hidden_states", "attention_mask"} <= set(self._names):
            import transformers

            raise ModelError(
                f"{type(attention).__name__} of transformers {transformers.__version__} takes ({', '.join(self._names)}), "
                "but zosim needs hidden_states, attention_mask and a cache",
                hint="install a tested release of transformers: pyproject.toml lists them",
            )
        self.cache = known[0]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name."""
        return dict(zip(self._names, args, strict=False)) | kwargs


def attention_of(model_class: type[nn.Module], wanted: str) -> str:
    """Return the attention that a class of models is run with where `wanted` is asked for: eager, if it has no sdpa."""
    return wanted if wanted != "sdpa" or getattr(model_class, "_supports_sdpa", True) else "eager"


def register_attention(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Register `function` as an attention implementation for :func:`attention_by`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, function)


@contextmanager
def attention_by(model: nn.Module, name: str) -> Iterator[None]:
    """Compute a model's attention with a registered function for the length of the block.

    Keyword arguments of a block that neither it nor its attention knows reach the function.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual
