"""Stand-ins for a model's blocks while its own forward runs, which record what it does around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from executors.models.packing import Packing

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""What each block is called with beside the hidden state."""


@dataclass
class StepCache:
    """What a step's segments share that does not depend on the weights.

    Attributes
    ----------
    calls : list
        What the blocks are called with beside the hidden state, recorded by the embed segment.
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
    """Raised by the last stand-in; carries the hidden state out of the forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class StandInState:
    """What the stand-ins do during the present forward."""

    calls: Calls | None = None
    hidden: Tensor | None = None
    returns_tuple: bool = False
    entered_head: bool = False


class StandIn(nn.Module):
    """Takes a block's place: looks like it, does not compute."""

    def __init__(self, block: nn.Module, role: StandInState, *, is_last: bool) -> None:
        super().__init__()
        # Not as a submodule: its parameters would be listed a second time.
        self.__dict__["_block"] = block
        self._role = role
        self._is_last = is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note the call, or hand on what the blocks left."""
        role = self._role
        if role.calls is not None:
            role.calls.append((args, kwargs))
            if self._is_last:
                raise Stop(hidden)
        elif self._is_last:
            assert role.hidden is not None
            role.entered_head = True
            hidden = role.hidden
        return (hidden,) if role.returns_tuple else hidden
