"""Stand-ins for a model's blocks while its own forward runs, which record what it does around them.

How blocks are called is learnt by watching one small forward: which arguments are the states that the block before
returned, and what else a block returns. Nothing is known of any family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from executors.models.blocks import UnsplitError, block_list
from executors.models.packing import Packing

Call = tuple[tuple[Any, ...], dict[str, Any]]
Calls = list[Call]
"""What each block is called with beside the states, in whose places None stands."""

Key = int | str
"""Position or name of an argument."""

States = tuple[Any, ...]
"""What a block hands to the next."""


@dataclass
class StepCache:
    """What a step's segments share that does not depend on the weights.

    Attributes
    ----------
    calls : list
        What the blocks are called with beside the states, recorded by the embed segment.
    packing : Packing or None
        The batch as one row of tokens, where it is packed.
    host : mapping
        The batch's tensors on the host, where segments run elsewhere.
    placed : dict
        Of tensors that blocks are called with, by identity: where graphs find their numbers.
    """

    calls: Calls = field(default_factory=list)
    packing: Packing | None = None
    host: Mapping[str, Tensor] = field(default_factory=dict)
    placed: dict[int, Tensor] = field(default_factory=dict)


class Stop(Exception):  # noqa: N818 - not an error: the forward has done what it was asked for
    """Raised by the last stand-in: the rest of the forward is not wanted."""


class _StandIn(nn.Module):
    """Takes a block's place: looks like it, does not compute."""

    def __init__(self, block: nn.Module, called: Callable[..., Any]) -> None:
        super().__init__()
        # Not as a submodule: its parameters would be listed a second time.
        self.__dict__["_block"] = block
        self._called = called

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(args, kwargs)


class RecordedBlocks:
    """The list of a model's blocks, and how the model's forward calls them.

    Parameters
    ----------
    model : torch.nn.Module
    run : callable
        Runs the model's forward on a few tokens.

    Attributes
    ----------
    path : str
        Path of the list in the model.
    keys : tuple
        Of a block's arguments, those that are states.
    entered_head : bool
        Whether the present forward is past the blocks.

    Raises
    ------
    UnsplitError
        If the forward does more between blocks than to hand on what they return.
    """

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        self._model = model
        self.path, self._whole = block_list(model)
        owner, _, self._name = self.path.rpartition(".")
        self._owner = model.get_submodule(owner)
        self.blocks = list(self._whole)
        self._stand_ins = nn.ModuleList(
            _StandIn(block, partial(self._called, i)) for i, block in enumerate(self.blocks)
        )
        self._answer: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
        self.entered_head = False
        self.keys: tuple[Key, ...] = ()
        self._positions: tuple[int, ...] = ()
        self._outputs: list[Any] = []
        self._watch(run)

    # -- forwards around the blocks ----------------------------------------------------------------------------

    @contextmanager
    def recording(self, calls: Calls, *, losing: bool = False) -> Iterator[None]:
        """Add to `calls` what blocks are called with, states and all, for the length of the model's forward, which ends behind them.

        Parameters
        ----------
        losing : bool
            Whether blocks return NaNs, to show what is made of what they return.
        """

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != len(calls):
                raise UnsplitError(self._model, f"block {index} ran where block {len(calls)} was due")
            calls.append((args, kwargs))
            if index == len(self.blocks) - 1:
                raise Stop
            states = self.states((args, kwargs))
            if losing:
                states = tree_map_only(Tensor, lambda state: torch.full_like(state, torch.nan), states)
            return self._returned(index, states)

        with self._replaced(record):
            try:
                yield
            except Stop:
                return
        raise UnsplitError(
            self._model, f"its forward ended behind block {len(calls) - 1} of {len(self.blocks)}"
        )

    @contextmanager
    def returning(self, states: States) -> Iterator[None]:
        """Let the last block return `states`, whatever the blocks are given."""

        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.entered_head:
                raise UnsplitError(self._model, "its forward runs blocks more than once")
            if index < len(self.blocks) - 1:
                return self._returned(index, self.states((args, kwargs)))
            self.entered_head = True
            return self._returned(index, states)

        with self._replaced(answer):
            yield

    def states(self, call: Call) -> States:
        """Return the states among a block's arguments."""
        return tuple(argument(call, key) for key in self.keys)

    def returned(self, output: Any) -> States:
        """Return the states in what a block returned."""
        leaves = _listed(output)
        return tuple(leaves[position] for position in self._positions)

    def _returned(self, index: int, states: States) -> Any:
        """Return what a block with these states would return, the rest of it left out."""
        output = self._outputs[index]
        if output is None:  # a tensor alone
            return states[0]
        leaves: list[Any] = [None] * len(output)
        for position, state in zip(self._positions, states, strict=True):
            leaves[position] = state
        return type(output)(leaves)

    @contextmanager
    def _replaced(self, answer: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        modules = self._owner._modules
        self._answer, self.entered_head = answer, False
        modules[self._name] = self._stand_ins
        try:
            yield
        finally:
            modules[self._name] = self._whole
            del self._answer  # and what it holds of a batch

    def _called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._answer(index, args, kwargs)

    # -- how blocks are called ---------------------------------------------------------------------------------

    def _watch(self, run: Callable[[], object]) -> None:
        """Run one forward, and note where states are; of blocks of one class one is computed."""
        calls: Calls = []
        of_classes: dict[type[nn.Module], Any] = {}

        def watch(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != len(calls):
                raise UnsplitError(self._model, f"block {index} ran where block {len(calls)} was due")
            for value in (*args, *kwargs.values()):
                self._refuse_shared(value)
            calls.append((args, kwargs))
            kind = type(self.blocks[index])
            if kind not in of_classes:
                of_classes[kind] = self.blocks[index](*args, **kwargs)
            output = tree_map_only(Tensor, torch.clone, of_classes[kind])
            if not isinstance(output, Tensor | tuple | list) or type(output) not in (Tensor, tuple, list):
                raise UnsplitError(self._model, f"its blocks return a {type(output).__name__}")
            self._outputs.append(output)
            if index == len(self.blocks) - 1:
                raise Stop
            return output

        with self._replaced(watch), suppress(Stop):
            run()
        if len(calls) < len(self.blocks):
            raise UnsplitError(self._model, f"its forward runs {len(calls)} of its {len(self.blocks)} blocks")
        handed = [_handed(self._outputs[i], calls[i + 1]) for i in range(len(calls) - 1)]
        if not handed:  # a single block: its first tensor
            handed = [{next(key for key, value in arguments(calls[0]) if isinstance(value, Tensor)): 0}]
        if not handed[0] or any(other != handed[0] for other in handed):
            raise UnsplitError(
                self._model, "its forward does more between blocks than to hand on what they return"
            )
        self.keys, self._positions = tuple(handed[0]), tuple(handed[0].values())
        # Their form is all that is wanted from now on: tensors of every block would stay on the device.
        self._outputs = [tree_map_only(Tensor, lambda _: None, output) for output in self._outputs]

    def _refuse_shared(self, value: Any) -> None:
        """Raise for an argument through which one block could leave something for another."""
        is_filled_later = isinstance(value, dict | list) and not value
        if is_filled_later or not all(
            leaf is None or isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)
        ):
            raise UnsplitError(self._model, f"its blocks share a {type(value).__name__}")


_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size, Enum)


def arguments(call: Call) -> Iterator[tuple[Key, Any]]:
    """Yield the arguments of a call, each with its position or name."""
    yield from enumerate(call[0])
    yield from call[1].items()


def argument(call: Call, key: Key) -> Any:
    """Return an argument of a call; None where it has none."""
    args, kwargs = call
    if isinstance(key, str):
        return kwargs.get(key)
    return args[key] if key < len(args) else None


def with_arguments(call: Call, values: Iterable[tuple[Key, Any]]) -> Call:
    """Return a call with other arguments in some places."""
    args, kwargs = list(call[0]), dict(call[1])
    for key, value in values:
        if isinstance(key, int) and key < len(args):
            args[key] = value
        elif isinstance(key, str) and key in kwargs:
            kwargs[key] = value
    return tuple(args), kwargs


def _listed(output: Any) -> Sequence[Any]:
    return (output,) if isinstance(output, Tensor) else output


def _handed(output: Any, call: Call) -> dict[Key, int]:
    """Return which arguments of a call are leaves of what the block before returned, and which."""
    positions = {id(leaf): i for i, leaf in enumerate(_listed(output)) if isinstance(leaf, Tensor)}
    return {key: positions[id(value)] for key, value in arguments(call) if id(value) in positions}
