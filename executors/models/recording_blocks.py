"""Stand-ins for a model's blocks while its own forward runs, which record what it does around them.

How blocks are called is learnt by watching one small forward: which argument is the state that the block before
returned, and what else a block returns. Nothing is known of any family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
"""What each block is called with beside the state, in whose place None stands."""

Key = int | str
"""Position or name of an argument."""

Answer = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Takes a block's number and what it is called with."""


@dataclass
class StepCache:
    """What a step's segments share that does not depend on the weights."""

    # What the blocks are called with beside the states, recorded by the embed segment.
    calls: Calls = field(default_factory=list)
    packing: Packing | None = None  # the batch as one row of tokens, where it is packed
    # The batch's tensors on the host, where segments run elsewhere.
    host: Mapping[str, Tensor] = field(default_factory=dict)
    # Of tensors that blocks are called with, by identity: where graphs find their numbers.
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


class BlockStandIns:
    """Modules that take the places of a model's blocks for a while.

    Raises UnsplitError if it has no list of blocks.

    Attributes
    ----------
    path : str
        Path of the list of blocks in the model.
    blocks : list of torch.nn.Module
        The blocks themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.path, self._whole = block_list(model)
        owner, _, self._name = self.path.rpartition(".")
        self._owner = model.get_submodule(owner)
        self.blocks = list(self._whole)
        self._stand_ins = nn.ModuleList(
            _StandIn(block, partial(self._called, i)) for i, block in enumerate(self.blocks)
        )
        self._answer: Answer

    @contextmanager
    def replaced(self, answer: Answer) -> Iterator[None]:
        """Let `answer` be called in the blocks' place."""
        modules = self._owner._modules
        self._answer = answer
        modules[self._name] = self._stand_ins
        try:
            yield
        finally:
            modules[self._name] = self._whole
            del self._answer  # and what it holds of a batch

    def _called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._answer(index, args, kwargs)


class RecordedBlocks(BlockStandIns):
    """The list of a model's blocks, and how the model's forward calls them.

    `run`: runs the model's forward on a few tokens.

    Raises UnsplitError if the forward does more between blocks than to hand on the one tensor that they return.

    Attributes
    ----------
    key : int or str
        Of a block's arguments, the state.
    entered_head : bool
        Whether the present forward is past the blocks.
    """

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        super().__init__(model)
        self.entered_head = False
        self.key: Key = 0
        self._position = 0
        self._outputs: list[Any] = []
        self._watch(run)

    # -- forwards around the blocks ----------------------------------------------------------------------------

    @contextmanager
    def recording(self, calls: Calls, *, losing: bool = False) -> Iterator[None]:
        """Add to `calls` what blocks are called with, states and all, for the length of the model's forward, which ends behind them.

        `losing`: whether blocks return NaNs, to show what is made of what they return.
        """

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != len(calls):
                raise UnsplitError(self.model, f"block {index} ran where block {len(calls)} was due")
            calls.append((args, kwargs))
            if index == len(self.blocks) - 1:
                raise Stop
            state = self.state((args, kwargs))
            return self._returned(index, torch.full_like(state, torch.nan) if losing else state)

        with self.replaced(record):
            try:
                yield
            except Stop:
                return
        raise UnsplitError(
            self.model, f"its forward ended after block {len(calls) - 1} of {len(self.blocks)}"
        )

    @contextmanager
    def returning(self, state: Tensor) -> Iterator[None]:
        """Let the last block return `state`, whatever the blocks are given."""
        self.entered_head = False

        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.entered_head:
                raise UnsplitError(self.model, "its forward runs blocks more than once")
            if index < len(self.blocks) - 1:
                return self._returned(index, self.state((args, kwargs)))
            self.entered_head = True
            return self._returned(index, state)

        with self.replaced(answer):
            yield

    def state(self, call: Call) -> Tensor:
        """Return the state among a block's arguments."""
        state: Tensor = argument(call, self.key)
        return state

    def returned(self, output: Any) -> Tensor:
        """Return the state in what a block returned."""
        state: Tensor = output if isinstance(output, Tensor) else output[self._position]
        return state

    def _returned(self, index: int, state: Tensor) -> Any:
        """Return what a block with this state would return, the rest of it left out."""
        output = self._outputs[index]
        if output is None:  # a tensor alone
            return state
        leaves: list[Any] = [None] * len(output)
        leaves[self._position] = state
        return type(output)(leaves)

    # -- how blocks are called ---------------------------------------------------------------------------------

    def _watch(self, run: Callable[[], object]) -> None:
        """Run one forward, and note where the state is; of blocks of one class one is computed."""
        calls: Calls = []
        of_classes: dict[type[nn.Module], Any] = {}

        def watch(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != len(calls):
                raise UnsplitError(self.model, f"block {index} ran where block {len(calls)} was due")
            for value in (*args, *kwargs.values()):
                self._refuse_shared(value)
            calls.append((args, kwargs))
            kind = type(self.blocks[index])
            if kind not in of_classes:
                of_classes[kind] = self.blocks[index](*args, **kwargs)
            output = tree_map_only(Tensor, torch.clone, of_classes[kind])
            if not isinstance(output, Tensor | tuple | list) or type(output) not in (Tensor, tuple, list):
                raise UnsplitError(self.model, f"its blocks return a {type(output).__name__}")
            self._outputs.append(output)
            if index == len(self.blocks) - 1:
                raise Stop
            return output

        with self.replaced(watch), suppress(Stop):
            run()
        if len(calls) < len(self.blocks):
            raise UnsplitError(self.model, f"its forward runs {len(calls)} of its {len(self.blocks)} blocks")
        handed = [_handed(self._outputs[i], calls[i + 1]) for i in range(len(calls) - 1)]
        if not handed:  # a single block: its first tensor
            handed = [{next(key for key, value in arguments(calls[0]) if isinstance(value, Tensor)): 0}]
        if not handed[0] or any(other != handed[0] for other in handed):
            raise UnsplitError(
                self.model, "its forward does more between blocks than to hand on what they return"
            )
        if len(handed[0]) > 1:
            raise UnsplitError(self.model, "its blocks hand on more than one tensor")
        ((self.key, self._position),) = handed[0].items()
        # Their form is all that is wanted from now on: tensors of every block would stay on the device.
        self._outputs = [tree_map_only(Tensor, lambda _: None, output) for output in self._outputs]

    def _refuse_shared(self, value: Any) -> None:
        """Raise for an argument through which one block could leave something for another."""
        is_filled_later = isinstance(value, dict | list) and not value
        if is_filled_later or not all(
            leaf is None or isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)
        ):
            raise UnsplitError(self.model, f"its blocks share a {type(value).__name__}")


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


def _handed(output: Any, call: Call) -> dict[Key, int]:
    """Return which arguments of a call are leaves of what the block before returned, and which."""
    leaves = (output,) if isinstance(output, Tensor) else output
    positions = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {key: positions[id(value)] for key, value in arguments(call) if id(value) in positions}
