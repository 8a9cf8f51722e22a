"""What the rest of a model's forward needs of all that ran before a stage boundary, learnt from one small forward.

A *call* is that of a module which reads weights: one before the blocks, or a block. Another stage lacks these weights. It runs
the model's own forward all the same, but takes the results of earlier calls from a message. Whatever the forward computes
between its calls needs no weights, so every stage computes it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from executors.models.recording_blocks import Call, Key, argument, arguments
from topology.errors import CodecError
from zosim.lowering.buckets import GPU_ALIGNMENT_BYTES, aligned


class Leaf(NamedTuple):
    """One of the tensors that a call made: the number of the call, and its own among them."""

    call: int
    number: int


@dataclass(frozen=True)
class CallForm:
    """What a call returns and leaves in the containers that it was given."""

    spec: TreeSpec  # structure of both
    entries: tuple[tuple[Key, Any], ...]  # argument and key of each entry of a container that it changes
    leaves: tuple[Any, ...]  # dtype and number of dimensions of each tensor; other values as they are

    @classmethod
    def of(cls, output: Any, call: Call, entries: Sequence[tuple[Key, Any]]) -> CallForm:
        """Return the form of a call that was watched."""
        leaves, spec = tree_flatten((output, [argument(call, key)[name] for key, name in entries]))
        forms = (_TensorForm(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, tuple(entries), tuple(forms))

    @property
    def tensors(self) -> list[_TensorForm]:
        """Forms of its tensors."""
        return [form for form in self.leaves if isinstance(form, _TensorForm)]

    def tensors_in(self, output: Any, call: Call) -> list[Tensor]:
        """Return the tensors that a call made."""
        made = (output, [argument(call, key)[name] for key, name in self.entries])
        return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]

    def answer(self, tensors: Sequence[Tensor], call: Call) -> Any:
        """Return what the call returns, given its tensors, and leave in its arguments what it leaves there."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(form, _TensorForm) else form for form in self.leaves]
        output, values = tree_unflatten(leaves, self.spec)
        for (key, name), value in zip(self.entries, values, strict=True):
            container = argument(call, key)
            if isinstance(container, MutableSequence) and name == len(container):
                container.append(value)
            else:
                container[name] = value
        return output


class _TensorForm(NamedTuple):
    dtype: torch.dtype
    num_dims: int


@dataclass
class ForwardCalls:
    """The calls of a model's forward, and which of their tensors are needed behind each."""

    front: list[nn.Module]  # modules before the blocks that read weights
    forms: list[CallForm] = field(default_factory=list)  # of each call
    # Number of each block's call; blocks that the forward leaves out have none.
    of_blocks: dict[int, int] = field(default_factory=dict)
    # What each call reads of earlier ones; behind them stands what loss and logits are made of.
    uses: list[set[Leaf]] = field(default_factory=list)
    changed: set[Leaf] = field(default_factory=set)  # what the forward writes into later, outside of calls
    # By the last call of each stage but the last, what goes on to the next.
    needed: dict[int, list[Leaf]] = field(default_factory=dict)

    @property
    def num_front(self) -> int:
        """Calls before the blocks."""
        return min(self.of_blocks.values())

    def last_call(self, block: int | None) -> int:
        """Return the number of the last call up to the end of a block; None is the end of the front."""
        calls = [call for own, call in self.of_blocks.items() if block is not None and own <= block]
        return max(calls, default=self.num_front - 1)

    def needed_behind(self, call: int) -> list[Leaf]:
        """Return the tensors of calls up to this one that later ones read."""
        return sorted({leaf for uses in self.uses[call + 1 :] for leaf in uses if leaf.call <= call})

    def overhead_bytes(self, call: int, num_tensors: int) -> int:
        """Return the most bytes of a message behind a call besides those of its tensors."""
        num_dims = sum(form.num_dims for one in self.forms[: call + 1] for form in one.tensors)
        return 8 * num_dims + (1 + num_tensors) * GPU_ALIGNMENT_BYTES

    def end_at(self, blocks: Iterable[int]) -> None:
        """Let stages end behind these blocks."""
        self.needed = {call: self.needed_behind(call) for call in sorted(map(self.last_call, blocks))}


class PassedTensors:
    """What the calls of one forward made that later stages need, and the shape of all that they made.

    - `boundaries`: of the model.
    - `device`: where the forward computes.
    """

    def __init__(self, boundaries: ForwardCalls, device: torch.device) -> None:
        self._boundaries, self._device = boundaries, device
        self._shapes: list[list[torch.Size]] = []
        self._kept: dict[Leaf, Tensor] = {}
        self._num_given = 0
        self._has_begun = False

    @classmethod
    def received(cls, boundaries: ForwardCalls, block: int, data: Tensor) -> tuple[PassedTensors, int]:
        """Return what a message says that left the stage which ends behind `block`, and the bytes of the message.

        Raises CodecError if it has another length than its header says.
        """
        passed, end = cls(boundaries, data.device), boundaries.last_call(block)
        forms = [form.tensors for form in boundaries.forms[: end + 1]]
        num_dims = sum(form.num_dims for call in forms for form in call)
        begin = aligned(8 * num_dims, GPU_ALIGNMENT_BYTES)
        if begin > data.numel():
            raise CodecError(f"a message of {data.numel()} bytes is shorter than its header", hint=_ONE_PLAN)
        dims = iter(data[: 8 * num_dims].view(torch.int64).tolist())
        passed._shapes = [
            [torch.Size([next(dims) for _ in range(form.num_dims)]) for form in call] for call in forms
        ]
        for leaf in boundaries.needed[end]:
            shape, dtype = passed._shapes[leaf.call][leaf.number], forms[leaf.call][leaf.number].dtype
            size = prod(shape) * dtype.itemsize
            if begin + size > data.numel() or min(shape, default=0) < 0:
                raise CodecError(
                    f"a message of {data.numel()} bytes has no tensor of shape {tuple(shape)}", hint=_ONE_PLAN
                )
            passed._kept[leaf] = data[begin : begin + size].view(dtype).view(shape)
            begin += aligned(size, GPU_ALIGNMENT_BYTES)
        passed._num_given = end + 1
        return passed, begin

    @property
    def is_received(self) -> bool:
        """Whether an earlier stage has begun the forward."""
        return self._num_given > 0

    def has_block(self, index: int) -> bool:
        """Whether an earlier stage has run a block."""
        return self._boundaries.of_blocks[index] < self._num_given

    def of_block(self, index: int, call: Call) -> Any:
        """Return what a block returned in an earlier stage."""
        return self._given(self._boundaries.of_blocks[index], call)

    def note_block(self, index: int, output: Any, call: Call) -> None:
        """Keep what later stages need of what a block has made."""
        self._note(self._boundaries.of_blocks[index], output, call)

    @contextmanager
    def front(self) -> Iterator[None]:
        """Keep what calls before the blocks make, or take it from the message, for the length of the block."""
        if self._has_begun:
            yield
            return
        self._has_begun = True
        number = -1

        def answer(output: Any) -> Any:
            nonlocal number
            number += 1
            if number >= self._boundaries.num_front:  # behind the blocks, all of which have been run
                return output
            if number < self._num_given:
                return self._given(number, _NOTHING)
            self._note(number, output, _NOTHING)
            return output

        with answering(self._boundaries.front, answer):
            yield

    def _given(self, number: int, call: Call) -> Any:
        """Return what a call of an earlier stage returned; of what nothing needs any more, the shape."""
        form, changed = self._boundaries.forms[number], self._boundaries.changed
        tensors = []
        for place, (one, shape) in enumerate(zip(form.tensors, self._shapes[number], strict=True)):
            leaf = Leaf(number, place)
            tensor = self._kept[leaf] if leaf in self._kept else _shaped(shape, one.dtype, self._device)
            # What the forward writes into goes on to the next stage as it was.
            tensors.append(tensor.clone() if leaf in changed else tensor)
        return form.answer(tensors, call)

    def _note(self, number: int, output: Any, call: Call) -> None:
        end = next((end for end in self._boundaries.needed if end >= number), None)
        if end is None:
            return
        tensors = self._boundaries.forms[number].tensors_in(output, call)
        self._shapes.append([tensor.shape for tensor in tensors])
        for place, tensor in enumerate(tensors):
            if (leaf := Leaf(number, place)) in self._boundaries.needed[end]:
                self._kept[leaf] = tensor.clone() if leaf in self._boundaries.changed else tensor

    def message(self, block: int) -> Tensor:
        """Return the bytes of what goes on from a stage that ends behind `block`: all shapes, then the tensors."""
        end = self._boundaries.last_call(block)
        tensors = [self._kept[leaf] for leaf in self._boundaries.needed[end]]
        dims = [dim for call in self._shapes[: end + 1] for shape in call for dim in shape]
        header = torch.tensor(dims, dtype=torch.int64, device=tensors[0].device)
        return torch.cat([_bytes_of(tensor) for tensor in (header, *tensors)])


_NOTHING: Call = ((), {})
_ONE_PLAN = "run both ranks on one release and one plan"


def _shaped(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaNs, or zeros, which are in the range of any index, in a shape that takes no memory."""
    value = torch.nan if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return nn.functional.pad(flat, (0, aligned(flat.numel(), GPU_ALIGNMENT_BYTES) - flat.numel()))


def front_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules outside the blocks that have weights of their own, and have no block within."""
    inside = {module for block in blocks for module in block.modules()}
    own = {*blocks}
    return [
        module
        for module in model.modules()
        if module not in inside
        and next(module.parameters(recurse=False), None) is not None
        and own.isdisjoint(module.modules())
    ]


@contextmanager
def answering(
    modules: Sequence[nn.Module], answer: Callable[[Any], Any], enter: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let `answer` change what the outermost of these modules return, for the length of the block."""
    depth = 0

    def begin(_module: nn.Module, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            enter()
        depth += 1

    def end(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal depth
        depth -= 1
        return output if depth else answer(output)

    hooks = [module.register_forward_pre_hook(begin) for module in modules]
    hooks += [module.register_forward_hook(end) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watched(
    model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], Any]
) -> tuple[ForwardCalls, Callable[[int], list[Tensor]]]:
    """Run a model's forward, and return its boundaries, and of a call the tensors that are needed behind it."""
    watch = _Watch(model, blocks)
    with watch.watching():
        output = run()
    boundaries = watch.boundaries
    boundaries.uses.append(watch.sources_of((output.logits, output.loss)))
    return boundaries, lambda call: [
        watch.made[leaf.call][leaf.number] for leaf in boundaries.needed_behind(call)
    ]


class _Watch(TorchDispatchMode):
    """Follows tensors of calls through a forward, by the memory that they are in; values do not matter."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._blocks = blocks
        self.boundaries = ForwardCalls(front_of(model, blocks))
        self.made: list[list[Tensor]] = []
        self._sources: dict[int, set[Leaf]] = {}
        self._kept: list[Tensor] = []  # or their memory would be another's
        self._call: set[Leaf] | None = None  # what the present call reads
        self._before: list[tuple[Key, Any, list[tuple[Any, Any]]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what runs for the length of the block."""
        hooks = []
        for index, block in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._begin_block, with_kwargs=True))
            hooks.append(block.register_forward_hook(self._ending(index), with_kwargs=True))
        try:
            with answering(self.boundaries.front, self._end_front, self._begin), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        read = self.sources_of((args, kwargs))
        if self._call is not None:
            self._call |= read
            return output
        if func._schema.is_mutable:
            self.boundaries.changed |= {leaf for leaf in read if self._is_in_arguments(leaf, args)}
        if read:
            self._follow(output, read)
        return output

    def sources_of(self, tree: Any) -> set[Leaf]:
        """Return the tensors of calls that those in a tree are made of."""
        sources: set[Leaf] = set()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                sources |= self._sources.get(_memory(leaf), set())
        return sources

    def _is_in_arguments(self, leaf: Leaf, args: Sequence[Any]) -> bool:
        return bool(args) and isinstance(args[0], Tensor) and _memory(args[0]) == _memory(self._made(leaf))

    def _made(self, leaf: Leaf) -> Tensor:
        return self.made[leaf.call][leaf.number]

    def _follow(self, tree: Any, sources: set[Leaf]) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._kept.append(leaf)
                memory = _memory(leaf)
                self._sources[memory] = self._sources.get(memory, set()) | sources

    def _begin(self) -> None:
        self._call = set()

    def _end_front(self, output: Any) -> Any:
        if self.boundaries.of_blocks:  # behind the first block nothing is a call but blocks
            self._follow(output, self._call or set())
            self._call = None
        else:
            self._end(output, ((), {}), ())
        return output

    def _begin_block(self, _block: nn.Module, args: Any, kwargs: Any) -> None:
        self._before = [
            (key, value, _entries(value))
            for key, value in arguments((args, kwargs))
            if isinstance(value, MutableMapping | MutableSequence)
        ]
        self._begin()

    def _ending(self, index: int) -> Callable[..., None]:
        def end(_block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            changed = [
                (key, name)
                for key, container, before in self._before
                for name, value in _entries(container)
                if not any(name == other and value is old for other, old in before)
            ]
            self.boundaries.of_blocks[index] = len(self.made)
            self._end(output, (args, kwargs), changed)

        return end

    def _end(self, output: Any, call: Call, entries: Sequence[tuple[Key, Any]]) -> None:
        form = CallForm.of(output, call, entries)
        number, made = len(self.made), form.tensors_in(output, call)
        self.boundaries.forms.append(form)
        self.boundaries.uses.append(self._call or set())
        self.made.append(made)
        self._call = None
        for place, tensor in enumerate(made):
            self._follow(tensor, {Leaf(number, place)})


def _entries(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, MutableMapping) else enumerate(container))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
