"""A model's own forward that is suspended wherever it calls a block.

It runs in a thread of its own, which waits at every block until that has been run. Whatever the forward does around its
blocks, tensors that they share and those that it keeps from before them included, is then the model's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from executors.models.blocks import UnsplitError
from executors.models.boundaries import PassedTensors
from executors.models.recording_blocks import BlockStandIns, Call, Stop


class SuspendedForward:
    """A forward that goes on as its blocks are run, one after the other.

    - `stand_ins`: of the model.
    - `forward`: runs it.
    - `device`: where it computes.
    - `passed`: what goes from stage to stage, where there are several.

    The thread and its caller never run at the same time. A forward that nobody holds any longer ends.
    """

    def __init__(
        self,
        stand_ins: BlockStandIns,
        forward: Callable[[], Any],
        device: torch.device,
        passed: PassedTensors | None = None,
    ) -> None:
        self._stand_ins, self._device, self._passed = stand_ins, device, passed
        self._resumed: SimpleQueue[Any] = SimpleQueue()
        self._reached: SimpleQueue[Any] = SimpleQueue()
        self._due: tuple[int, Call] | None = None
        self._output: Any = None
        self._result: Any = None
        self._is_over = False
        weakref.finalize(self, self._resumed.put, None).atexit = False
        # A new thread has none of these, and memory would be observed without what the forward makes.
        modes = [
            torch.set_grad_enabled(torch.is_grad_enabled()),
            *_get_current_function_mode_stack(),
            *_get_current_dispatch_mode_stack(),
        ]
        Thread(target=_run, args=(forward, self._resumed, self._reached, modes), daemon=True).start()
        # One that is resumed may run to its end at once, for which weights may not be here yet.
        if passed is None or not passed.is_received:
            self._go_on()

    def message(self, block: int) -> Tensor:
        """Return the bytes of what later stages need of what has run up to the end of `block`."""
        assert self._passed is not None
        return self._passed.message(block)

    def run_block(self, index: int) -> None:
        """Run block `index`, which the forward calls next."""
        self._go_on()
        number, (args, kwargs) = self._due or (None, ((), {}))
        if number != index:
            raise UnsplitError(self._stand_ins.model, f"block {number} ran where block {index} was due")
        self._output = self._stand_ins.blocks[index](*args, **kwargs)
        if self._passed is not None:
            self._passed.note_block(index, self._output, (args, kwargs))
        self._due = None

    def finish(self) -> Any:
        """Return what the forward returns behind its blocks, once."""
        assert not self._is_over
        self._go_on()
        if self._due is not None:
            raise UnsplitError(self._stand_ins.model, "its forward runs blocks more than once")
        # Its logits would stay alive through the forward of the next evaluation point.
        result, self._result, self._is_over = self._result, None, True
        return result

    def _go_on(self) -> None:
        """Let the forward run to its next block, or to its end."""
        if self._due is not None or self._result is not None:
            return
        # The thread must not hold the forward itself.
        resumed, reached, passed = self._resumed, self._reached, self._passed

        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if passed is not None and passed.has_block(index):
                return passed.of_block(index, (args, kwargs))
            reached.put((index, (args, kwargs)))
            del args, kwargs  # not kept while the block runs
            return _taken(resumed)

        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with nullcontext() if passed is None else passed.front(), self._stand_ins.replaced(answer):
            resumed.put((stream, self._output))
            self._output = None
            outcome = reached.get()
        if isinstance(outcome, BaseException):
            raise outcome
        index, value = outcome
        if index is None:
            self._result = value
        else:
            self._due = outcome


def _taken(resumed: SimpleQueue[Any]) -> Any:
    """Wait until the forward is to go on, and return what the block returned."""
    if (given := resumed.get()) is None:
        raise Stop
    stream, output = given
    if stream is not None:
        torch.cuda.set_stream(stream)
    return output


def _run(
    forward: Callable[[], Any],
    resumed: SimpleQueue[Any],
    reached: SimpleQueue[Any],
    modes: Sequence[AbstractContextManager[Any]],
) -> None:
    try:
        _taken(resumed)
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            reached.put((None, forward()))
    except Stop:
        return
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        reached.put(error)
