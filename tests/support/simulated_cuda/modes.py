"""What torch says of tensors, and what its kernels do to them, for as long as the device is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda.device import DEVICE, Device, Generator

_HOST = torch.device("cpu")

_READ_BY_HOST = {
    "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten._unique2", "aten.unique_dim",
    "aten.masked_select",
}  # fmt: skip
"""Kernels whose caller waits for what they computed: a number, or a size that depends on numbers."""

_WITHOUT_KERNEL = {
    "aten.empty", "aten.empty_strided", "aten.empty_like", "aten.new_empty", "aten.new_empty_strided", "aten.detach",
    "aten.alias", "aten.set_", "aten.is_pinned", "aten.lift_fresh", "aten.resize_",
}  # fmt: skip

_READ_WITHOUT_KERNEL = ("numpy", "tolist", "__array__")
"""Methods that read memory of the host, and call no kernel that could be seen."""

_TAKES_BOTH_DEVICES = {
    "aten.copy_", "aten._to_copy", "aten.index", "aten.index_put_", "aten.index_put", "aten._index_put_impl_",
}  # fmt: skip

_PRODUCTS = {
    "aten.mm", "aten.bmm", "aten.addmm", "aten.addmm_", "aten.baddbmm", "aten.baddbmm_", "aten.mv", "aten.addmv", "aten.dot",
    "aten._int_mm", "aten._scaled_mm", "aten._addmm_activation",
}  # fmt: skip
"""Kernels of cuBLAS, which may keep what they have not added up yet in its workspace."""

_MULTIPLES = {"aten._int_mm": 8, "aten._scaled_mm": 16}
"""What inner widths and columns of products of bytes are multiples of."""

DRAWING = ("normal_", "random_", "uniform_", "normal", "rand", "randn", "randint")
_TWO_AT_ONCE = ("random_", "randint")
"""Of a kernel that draws integers, each thread takes two numbers at a time; of others four."""


class Devices(TorchFunctionMode):
    """Answers for devices, and lets tensors be made, moved and drawn there."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, device = getattr(func, "__name__", ""), self._device
        if name == "__get__":
            return self._property(func, args, kwargs)
        if args and isinstance(args[0], Tensor):
            is_there = device.kind_of(args[0]) == "device"
            if func is torch.Tensor.get_device:
                return 0 if is_there else -1
            if func is torch.Tensor.is_pinned:
                return device.kind_of(args[0]) == "pinned"
            if func is torch.Tensor.numpy and is_there:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
            if name in _READ_WITHOUT_KERNEL and device.kind_of(args[0]) == "pinned":
                device.touch(args[0], name, writes=False, stream=None)
            if func is torch.Tensor.tolist and is_there:
                return self._moved(args[0], _HOST, None).tolist()
            if func is torch.Tensor.cpu:
                return self._moved(args[0], _HOST, None)
            if func is torch.Tensor.cuda:
                return self._moved(args[0], DEVICE, None)
            if func is torch.Tensor.to:
                return self._to(*args, **kwargs)
        if name in DRAWING and kwargs.get("generator") is None and self._is_sampled_there(args, kwargs):
            return drawn(device, func, args, {**kwargs, "generator": device.generator})
        return self._made(func, args, kwargs)

    def _property(self, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = getattr(func, "__self__", None)
        if wanted is torch.Tensor.device:
            return DEVICE if self._device.kind_of(args[0]) == "device" else func(*args, **kwargs)
        if wanted is torch.Tensor.is_cuda:
            return self._device.kind_of(args[0]) == "device"
        if wanted is torch.Tensor.is_cpu:
            return self._device.kind_of(args[0]) != "device"
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call what may make tensors, on the device that it names."""
        wanted = kwargs.get("device")
        device = _device(wanted) if wanted is not None else _HOST
        if device.type == "cuda":
            kwargs["device"] = _HOST
            if func is torch.tensor or func is torch.as_tensor:
                return self._moved(func(*args, **kwargs), DEVICE, None)
            return made_there(self._device, func, args, kwargs)
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            self._device.allocate(made, "pinned")
            return made
        return func(*args, **kwargs)

    def _is_sampled_there(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if kwargs.get("device") is not None:
            return _device(kwargs["device"]).type == "cuda"
        return any(self._device.kind_of(tensor) == "device" for tensor in _tensors(args[:1]))

    def _to(self, tensor: Tensor, *wanted: Any, device: Any = None, dtype: Any = None, **more: Any) -> Tensor:
        more |= zip(
            ("non_blocking", "copy"), (value for value in wanted if isinstance(value, bool)), strict=False
        )
        for value in wanted:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, bool):
                continue
            elif isinstance(value, str | int | torch.device):
                device = value
            elif isinstance(value, Tensor):
                device, dtype = value.device, value.dtype
        return self._moved(tensor, None if device is None else _device(device), dtype, **more)

    def _moved(
        self,
        tensor: Tensor,
        device: torch.device | None,
        dtype: torch.dtype | None,
        *,
        non_blocking: bool = False,
        copy: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        is_there = self._device.kind_of(tensor) == "device"
        if device is None or (device.type == "cuda") == is_there:
            if dtype in (None, tensor.dtype) and not copy:
                return tensor
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, memory_format=memory_format)
        if dtype not in (None, tensor.dtype):
            tensor = torch.ops.aten._to_copy.default(tensor, dtype=dtype)
        if device.type == "cuda":
            moved = made_there(self._device, torch.empty_like, (tensor,), {})
        else:
            moved = torch.empty(tensor.shape, dtype=tensor.dtype)
            if non_blocking:  # torch then takes pinned memory, and does not wait
                self._device.allocate(moved, "pinned")
        return moved.copy_(tensor, non_blocking=non_blocking)


class Kernels(TorchDispatchMode):
    """Sees every kernel with its operands: launches it on the current stream, and notes what it reads and writes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping what follows for its compiler, which takes longer than the kernel."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        operator = _operator(func)
        if operator.is_view:
            return func(*args, **kwargs)
        name, given = operator.name, _tensors((args, kwargs))
        if not (device.host.makes_on_device or any(device.kind_of(t) == "device" for t in given)):
            for tensor, writes in operator.operands(args, kwargs):
                if device.kind_of(tensor) == "pinned":
                    device.touch(tensor, name, writes=writes, stream=None)
            return func(*args, **kwargs)
        if name not in _WITHOUT_KERNEL:
            self._refuse_two_devices(name, given)
        if name in _MULTIPLES:
            _refuse_sizes(name, *args[:2])
        compute = partial(_divided, func) if _divides_by_a_number(name, args, kwargs) else func
        operands, graph = list(operator.operands(args, kwargs)), device.capturing()
        if name in _PRODUCTS:
            operands.append((device.workspace(), True))
        if graph is not None and name not in _WITHOUT_KERNEL:
            graph.keep(operands)
        result = compute(*args, **kwargs)
        made = self._made(result, given)
        if name in _WITHOUT_KERNEL:
            if graph is not None:
                graph.made(made)
            return result
        if graph is not None:
            if name in _READ_BY_HOST or (name == "aten.copy_" and self._holds_host(*args, **kwargs)):
                device.hold_host({}, "a number")
            graph.note(name, compute, args, kwargs, made, operands)
            return result
        stream = device.launch(_num_launches(name, args, made))
        for tensor, writes in operands:
            device.touch(tensor, name, writes=writes, stream=stream)
        for tensor in made:
            device.touch(tensor, name, writes=True, stream=stream)
        if name in _READ_BY_HOST:
            device.hold_host(stream.clock, "a number")
        elif name == "aten.copy_" and self._holds_host(*args, **kwargs):
            device.hold_host(stream.clock, "a copy")
        return result

    def _made(self, result: Any, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that a kernel made, which lie on the device from now on."""
        with torch._C.DisableTorchFunction():
            known = {tensor.untyped_storage()._cdata for tensor in given if tensor.layout == torch.strided}
            new = [tensor for tensor in _tensors(result) if tensor.layout == torch.strided]
            new = [tensor for tensor in new if tensor.untyped_storage()._cdata not in known]
        for tensor in new:
            self._device.allocate(tensor, "device")
        return new

    def _holds_host(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
        """Whether a copy returns after it has been made: of pageable memory whatever was asked for, but for a staged upload."""
        kinds = {self._device.kind_of(target), self._device.kind_of(source)}
        if kinds == {"device", "host"} and source.dim() and self._device.kind_of(source) == "host":
            self._device.pageable[self._device.host.instruction] += 1
        if kinds == {"device"}:
            return False
        return not non_blocking or self._device.kind_of(target) == "host"

    def _refuse_two_devices(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raise as a kernel does that is given memory of the host; numbers are passed by value."""
        if name in _TAKES_BOTH_DEVICES:
            return
        for tensor in tensors:
            if tensor.dim() > 0 and self._device.kind_of(tensor) != "device":
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                    f"({name}, {tuple(tensor.shape)})"
                )


def _refuse_sizes(name: str, left: Tensor, right: Tensor) -> None:
    """Raise as products of bytes do whose matrices have sizes that CUDA has no kernel for."""
    multiple = _MULTIPLES[name]
    if name == "aten._int_mm" and left.shape[0] <= 16:
        raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {left.shape[0]}")
    odd = [size for size in (left.shape[1], right.shape[1]) if size % multiple]
    if odd:
        raise RuntimeError(f"{name}: sizes need to be multiples of {multiple}, but got {odd[0]}")


_CHUNK_ELEMENTS, _MOST_CHUNKS = 65536, 320
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""What one launch of a kernel over lists of tensors takes, by how many lists it is given (torch's ``MultiTensorApply.cuh``)."""


def _num_launches(name: str, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Return how many kernels CUDA launches for an operation: over lists of tensors one for many, or one for each.

    One for each where shapes or strides differ between lists, or formats do; copies may change them all alike.
    """
    if not name.startswith("aten._foreach_"):
        return 1
    lists = [value for value in args if isinstance(value, list | tuple) and isinstance(value[0], Tensor)]
    formats = [{tensor.dtype for tensor in each} for each in lists]
    is_one_format = all(len(each) == 1 for each in formats) and (
        name == "aten._foreach_copy_"
        or (len(set.union(*formats)) == 1 and all(tensor.is_floating_point() for tensor in lists[0]))
    )
    layouts = [[(tensor.shape, tensor.stride()) for tensor in each] for each in lists]
    num_tensors = len(lists[0])
    if not is_one_format or any(each != layouts[0] for each in layouts):
        return num_tensors
    chunks = sum(-(-tensor.numel() // _CHUNK_ELEMENTS) for tensor in lists[0])
    return max(-(-num_tensors // _MOST_TENSORS[len(lists) + bool(made)]), -(-chunks // _MOST_CHUNKS))


def made_there(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func`, and let what it makes lie on the device."""
    before, device.host.makes_on_device = device.host.makes_on_device, True
    try:
        return func(*args, **kwargs)
    finally:
        device.host.makes_on_device = before


def drawn(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Sample on the device, from where its generator is."""
    name, generator = func.__name__, kwargs["generator"]
    assert isinstance(generator, Generator)
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    how = _num_sampled(name, args, kwargs), 2 if name in _TWO_AT_ONCE else 4
    graph = device.capturing()
    once = generator.for_a_draw(*how) if graph is None else generator.numbers(*how)
    if graph is not None:
        graph.draws(generator, *how)
    return made_there(device, func, args, kwargs | {"generator": once})


def _num_sampled(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    if name.endswith("_"):
        return int(args[0].numel())
    size = kwargs["size"] if "size" in kwargs else args[-1] if name == "randint" else args[0]
    return size if isinstance(size, int) else torch.Size(size).numel()


def _divides_by_a_number(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel is one that CUDA does otherwise than a CPU: it multiplies by the reciprocal, and loses a bit."""
    return (
        name == "aten.div" and not kwargs and isinstance(args[1], int | float) and args[0].is_floating_point()
    )


def _divided(_: Any, tensor: Tensor, divisor: float) -> Tensor:
    return tensor * _reciprocal(divisor, tensor.dtype)


def _reciprocal(number: float, dtype: torch.dtype) -> float:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return float(1 / torch.tensor(number, dtype=wide))


def _device(wanted: Any) -> torch.device:
    return torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)


@dataclass(frozen=True)
class _Operator:
    """What is asked of every call of an operator, read once from its schema.

    - `arguments`: Name of each, whether it is written, and whether what is written is read, too: it is changed in place.
    """

    name: str
    is_view: bool
    arguments: tuple[tuple[str, bool, bool], ...]

    def operands(self, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
        """Yield every tensor that a kernel is given, and whether it writes it; one that is changed in place is read first."""
        given = [*zip(self.arguments, args, strict=False)]
        if kwargs:
            given += [(argument, kwargs[argument[0]]) for argument in self.arguments if argument[0] in kwargs]
        for (_, writes, reads), value in given:
            for tensor in _tensors(value):
                if reads:
                    yield tensor, False
                yield tensor, writes


@cache
def _operator(func: Any) -> _Operator:
    schema, arguments = func._schema, []
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = writes and not schema.name.endswith("copy_") and not argument.kwarg_only
        arguments.append((argument.name, writes, reads))
    results = [result.alias_info for result in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in results)
    return _Operator(str(func.overloadpacket), is_view, tuple(arguments))


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results: lists, tuples and keywords of them, no more."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [tensor for part in tree for tensor in _tensors(part)] if isinstance(tree, list | tuple) else []
