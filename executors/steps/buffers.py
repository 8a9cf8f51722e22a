"""A program's buffers as memory, and the parameters that lie in them.

ParamGroupWeights and perturbations are flat tensors of their buffer's format; a group's tensors lie in them one after the other,
each aligned, frozen ones before trainable ones. What a forward makes (hidden states, losses) is kept as the tensor
that made it, under the name of its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from costmodel.formats import FORMATS
from executors.formats import TORCH_DTYPES, format_of
from executors.low_bits.packed import PackedValues, QValues, packed_shape_bytes
from executors.low_bits.stored import Along, Stored
from executors.models.model import SegmentedModel
from executors.models.parameters import NamedTensor, side_path_format
from topology.errors import ProgramError
from zosim.lowering.buckets import aligned, bucket_bytes
from zosim.program import Program
from zosim.program.contents import FrozenWeights, ParamGroupWeights, parameters_of
from zosim.program.instructions import Access, Buffer, Space
from zosim.program.operations import Forward, Perturb, Sample, Update

Trait = TypeVar("Trait")

Allocator = Callable[[Buffer, int, torch.dtype], Tensor]
"""Takes a buffer, a number of elements and their format, and returns zeroed memory in the buffer's space."""


@dataclass(frozen=True)
class ParamSection:
    """Parameters of one group that lie together: all its frozen ones, or all its trainable ones."""

    what: ParamGroupWeights | FrozenWeights
    tensors: tuple[NamedTensor, ...]
    segments: tuple[str, ...]  # segments that read it
    alignment_bytes: int  # of its first byte and of each tensor's, as the program has it

    def size_bytes(self, dtype: str) -> int:
        """Return the bytes that a program reserves for a perturbation of the section, or for the section as numbers."""
        num_elements = sum(t.num_elements for t in self.tensors)
        return bucket_bytes(num_elements, len(self.tensors), dtype, self.alignment_bytes)

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that a program reserves for the section as it is stored, its numbers in this format."""
        arrays = (array for tensor in self.tensors for array in tensor.arrays(dtype).values())
        sizes = [prod(shape) * kind.itemsize for shape, kind in arrays]
        return aligned(sum(sizes) + len(sizes) * (self.alignment_bytes - 1), self.alignment_bytes)

    @property
    def is_flat(self) -> bool:
        """Whether it is stored as one stretch of numbers."""
        return all(tensor.is_numbers for tensor in self.tensors)

    def offsets(self, dtype: str) -> list[int]:
        """Return the element at which each tensor starts, and one past the last."""
        step = FORMATS[dtype].num_elements(self.alignment_bytes)
        starts, offset = [], 0
        for tensor in self.tensors:
            offset = aligned(offset, step)
            starts.append(offset)
            offset += tensor.num_elements
        return [*starts, offset]

    def spans(self, dtype: str, granularity: int) -> list[tuple[int, int]]:
        """Return first element and length of what a CPU's generator fills at once as it fills one tensor after the other.

        `granularity`: neighbours without a gap are one stretch if the first ends at a multiple of it and the second is as long.
        """
        runs: list[tuple[int, int]] = []
        for begin, tensor in zip(self.offsets(dtype), self.tensors, strict=False):
            first, length = runs[-1] if runs else (0, 0)
            is_joined = runs and begin == first + length and length % granularity == 0
            if is_joined and tensor.num_elements >= granularity:
                runs[-1] = first, length + tensor.num_elements
            else:
                runs.append((begin, tensor.num_elements))
        return runs


@dataclass(frozen=True)
class PlacedSection:
    """A section at its position in a buffer, or a perturbation of it."""

    flat: Tensor  # its bytes as one tensor, from the first element to the last, gaps included
    # One per parameter, in the parameter's shape; of a quantized one, the bytes of its largest tensor.
    views: tuple[Tensor, ...]
    section: ParamSection
    held: tuple[Stored, ...] = ()  # what each parameter is; nothing of a perturbation
    # Of a perturbation of which several quantized values share a byte, those of each parameter, in place of `views`.
    packed: tuple[PackedValues, ...] = ()

    @property
    def qvalues(self) -> tuple[QValues, ...]:
        """Of a rounded perturbation, those of each parameter."""
        return self.packed or self.views

    def along(self, perturbations: Sequence[QValues]) -> Iterator[tuple[type[Stored], list[Along]]]:
        """Yield its parameters and their perturbations, those together that are stored alike."""
        for storage, indices in self._indices_by_type.items():
            yield storage, [Along(self.section.tensors[i], self.held[i], perturbations[i]) for i in indices]

    @cached_property
    def _indices_by_type(self) -> dict[type[Stored], list[int]]:
        kinds = list(map(type, self.held))
        return {kind: [i for i, other in enumerate(kinds) if other is kind] for kind in dict.fromkeys(kinds)}


class BufferStore:
    """All buffers of one rank.

    `positions`: this rank's position in each group that shares buffers out.

    Raises ProgramError if a group or a size of the program is not the model's; the message names the first difference.
    """

    def __init__(
        self,
        program: Program,
        forward_runner: SegmentedModel,
        allocate: Allocator,
        positions: Mapping[str, int] | None = None,
    ) -> None:
        self._program = program
        self._allocate = allocate
        self._positions = positions or {}
        self.sections = _sections_of(forward_runner, program.alignment_bytes)
        # Of a buffer that holds quantized weights beside numbers the program does not say the numbers' format.
        self._side_path_qvalues = side_path_format(forward_runner.tensors) or "uint8"
        self.held = frozenset(parameters_of(access.what) for access in program.initial)
        self._num_shares = self._shares()
        self._flat: dict[str, Tensor | None] = {}
        self._placed: dict[tuple[str, int, ParamGroupWeights | FrozenWeights], PlacedSection] = {}
        self.values: dict[tuple[str, int], Any] = {}
        self.peak_bytes: dict[tuple[Space, str], int] = {}
        self._check_program()
        started_empty = {op.buffer for _, i in program.instructions() if (op := i.op).type == "allocate"}
        for buffer in self._flat_buffers():
            self._flat[buffer.name] = None
            if buffer.name not in started_empty:
                self.allocate(buffer.name)

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, name: str) -> None:
        """Give a buffer its memory."""
        buffer = self._program.buffer(name)
        dtype = TORCH_DTYPES.get(buffer.dtype, torch.uint8)  # of narrower elements than a byte, bytes
        self._flat[name] = self._allocate(buffer, buffer.size_bytes // dtype.itemsize, dtype)
        # Peaks are taken here alone: memory grows nowhere else.
        for key, size in self.arena_bytes().items():
            self.peak_bytes[key] = max(size, self.peak_bytes.get(key, 0))

    def free(self, name: str) -> None:
        """Take a buffer's memory away, and forget what was placed in it, so that nothing keeps it alive."""
        self._flat[name] = None
        # A copy of the keys: other streams place other buffers meanwhile.
        for key in list(self._placed):
            if key[0] == name:
                del self._placed[key]

    def arena_bytes(self) -> dict[tuple[Space, str], int]:
        """Return the bytes of flat buffers that exist now, by space and role."""
        total: dict[tuple[Space, str], int] = {}
        for name, flat in list(self._flat.items()):
            buffer = self._program.buffer(name)
            size = 0 if flat is None else flat.numel() * flat.element_size()
            total[buffer.space, buffer.role] = total.get((buffer.space, buffer.role), 0) + size
        return total

    def raw(self, access: Access) -> Tensor:
        """Return an access as bytes: all of it, or this rank's share."""
        whole = self.whole(access)
        if not access.share:
            return whole
        size = self._program.share_bytes(access)
        # Shares are equal: the last may reach past the contents, into what aligns them.
        begin = size * self._positions.get(access.share, 0)
        return whole[begin : begin + size]

    def whole(self, access: Access) -> Tensor:
        """Return the bytes of an access, those that other ranks have a share in among them."""
        return self._memory(access.buffer).view(torch.uint8)[access.offset_bytes : access.end_bytes]

    def format_of(self, access: Access) -> str:
        """Return the format of the buffer that an access is to."""
        return self._program.buffer(access.buffer).dtype

    def placed(self, access: Access) -> PlacedSection:
        """Return the section that an access names, at its place."""
        section = self.section(access)
        key = (access.buffer, access.offset_bytes, section.what)
        placed = self._placed.get(key)
        # Two streams may read it for the first time at once: there is one all the same.
        return placed or self._placed.setdefault(key, self._place(access, section))

    def _memory(self, name: str) -> Tensor:
        flat = self._flat.get(name)
        if flat is None:
            raise ProgramError(
                f"buffer {name} is used when it is not allocated",
                hint="order its users between its allocate and its free",
            )
        return flat

    def _place(self, access: Access, section: ParamSection) -> PlacedSection:
        memory, dtype = self._memory(access.buffer), self._numbers_in(access)
        if self.is_weights(access):
            return _placed(memory.view(torch.uint8)[access.offset_bytes : access.end_bytes], section, dtype)
        if dtype not in TORCH_DTYPES:
            return _placed_packed(
                memory[access.offset_bytes : access.end_bytes], section, FORMATS[dtype].bits
            )
        begin = FORMATS[dtype].num_elements(access.offset_bytes)
        *starts, end = section.offsets(dtype)
        flat = memory[begin : begin + end]
        views = tuple(
            flat[start : start + tensor.num_elements].view(tensor.shape)
            for start, tensor in zip(starts, section.tensors, strict=True)
        )
        return PlacedSection(flat, views, section)

    def _numbers_in(self, access: Access) -> str:
        """Return the format of numbers in the buffer that an access is to."""
        dtype = self.format_of(access)
        return self._side_path_qvalues if dtype == "uint8" else dtype

    # -- names -------------------------------------------------------------------------------------------------

    def trainable(self, group: str) -> ParamSection:
        """Return the trainable parameters of a group."""
        return self.sections[ParamGroupWeights(group)]

    def section(self, access: Access) -> ParamSection:
        """Return the section that an access to weights or to a perturbation names."""
        what = parameters_of(access.what)
        assert what is not None
        return self.sections[what]

    def is_weights(self, access: Access) -> bool:
        """Whether an access touches parameters."""
        return isinstance(access.what, ParamGroupWeights | FrozenWeights) and self._is_flat(access)

    def _is_flat(self, access: Access) -> bool:
        return parameters_of(access.what) in self.sections

    def _flat_buffers(self) -> list[Buffer]:
        names = {access.buffer for _, access in self._accesses() if self._is_flat(access)}
        return [buffer for buffer in self._program.buffers if buffer.name in names]

    def _shares(self) -> dict[ParamGroupWeights | FrozenWeights, int]:
        """Return the number of equal shares of each section that ranks share out."""
        shared = [access for _, access in self._accesses() if access.share and self.is_weights(access)]
        return {self.section(access).what: self._program.process_groups[access.share] for access in shared}

    def _accesses(self) -> list[tuple[str, Access]]:
        accesses = [
            ("initial or final contents", access) for access in (*self._program.initial, *self._program.final)
        ]
        for phase, instruction in self._program.instructions():
            where = f"{phase}/{instruction.id}"
            accesses += [(where, access) for access in (*instruction.reads, *instruction.writes)]
        return accesses

    # -- agreement with the model ------------------------------------------------------------------------------

    def _check_program(self) -> None:
        for where, access in self._accesses():
            if self._is_flat(access):
                self._check_size(where, access)
        self._check_groups_known()
        self._check_covered()

    def _check_size(self, where: str, access: Access) -> None:
        section = self.section(access)
        buffer = self._program.buffer(access.buffer)
        wanted = section.size_bytes(buffer.dtype)
        if self.is_weights(access):
            # Formats of less than a byte hold perturbations alone: no size of weights fits them.
            dtype = TORCH_DTYPES.get(self._numbers_in(access))
            wanted = -1 if dtype is None else section.stored_bytes(dtype)
            wanted = aligned(wanted, section.alignment_bytes * self._num_shares.get(section.what, 1))
        if access.size_bytes != wanted or access.offset_bytes % section.alignment_bytes:
            raise ProgramError(
                f"program {self._program.name}: {where} names {access.size_bytes} bytes from byte "
                f"{access.offset_bytes} of {buffer.name} ({buffer.dtype}) for {access.what}, but the model's take "
                f"{wanted} bytes, aligned to {section.alignment_bytes}",
                hint="lower a plan of this model",
            )

    def _check_groups_known(self) -> None:
        groups = {what.param_group for what in self.sections}
        for phase, instruction in self._program.instructions():
            named = (
                instruction.op.param_group if isinstance(instruction.op, Sample | Perturb | Update) else None
            )
            if named is not None and named not in groups:
                raise ProgramError(
                    f"program {self._program.name}: {phase}/{instruction.id} names the parameter group {named!r}, "
                    "which the model does not have",
                    hint="the model's are " + ", ".join(sorted(groups)),
                )

    def _check_covered(self) -> None:
        run = {i.op.segment for _, i in self._program.instructions() if isinstance(i.op, Forward)}
        for what, section in self.sections.items():
            if section.tensors and run & set(section.segments) and what not in self.held:
                raise ProgramError(
                    f"program {self._program.name} does not state where {what} is at the start of the first step",
                    hint="lower a plan of this model",
                )


def _placed(memory: Tensor, section: ParamSection, dtype: str) -> PlacedSection:
    """Return a section at its place: every tensor that a parameter is stored as is aligned."""
    offset = 0

    def taken(shape: Sequence[int], kind: torch.dtype) -> Tensor:
        nonlocal offset
        begin = aligned(offset, section.alignment_bytes)
        offset = begin + prod(shape) * kind.itemsize
        return memory[begin:offset].view(kind).view(*shape)

    number_dtype = TORCH_DTYPES[dtype]
    held = tuple(
        tensor.stored_in([taken(*of) for of in tensor.arrays(number_dtype).values()])
        for tensor in section.tensors
    )
    views = tuple(next(iter(one.dump().values())) for one in held)
    flat = memory[:offset].view(number_dtype) if section.is_flat else memory
    return PlacedSection(flat, views, section, held)


def _placed_packed(memory: Tensor, section: ParamSection, bits: int) -> PlacedSection:
    """Return a perturbation of which several quantized values share a byte, every tensor's aligned."""
    packed, begin = [], 0
    for tensor in section.tensors:
        end = begin + packed_shape_bytes(tensor.shape, bits)
        packed.append(PackedValues(memory[begin:end], tensor.shape, bits))
        begin = aligned(end, section.alignment_bytes)
    return PlacedSection(memory, (), section, packed=tuple(packed))


def _sections_of(
    forward_runner: SegmentedModel, alignment_bytes: int
) -> dict[ParamGroupWeights | FrozenWeights, ParamSection]:
    sections: list[ParamSection] = []
    for group in forward_runner.param_groups:
        tensors = forward_runner.tensors_of(group.name)
        for what in (FrozenWeights(group.name), ParamGroupWeights(group.name)):
            kept = tuple(
                tensor for tensor in tensors if tensor.trainable == isinstance(what, ParamGroupWeights)
            )
            sections += [ParamSection(what, kept, group.segments, alignment_bytes)] if kept else []
    return {section.what: section for section in sections}


def runs_alike(placed: PlacedSection, trait: Callable[[NamedTensor], Trait]) -> list[tuple[int, int, Trait]]:
    """Return stretches (begin, end, trait) of a section whose parameters have a trait in common."""
    dtype = format_of(placed.flat.dtype)
    bounds = placed.section.offsets(dtype)
    runs: list[tuple[int, int, Trait]] = []
    for i, tensor in enumerate(placed.section.tensors):
        begin, end, of_tensor = bounds[i], bounds[i] + tensor.num_elements, trait(tensor)
        if runs and runs[-1][2] == of_tensor:
            runs[-1] = (runs[-1][0], end, of_tensor)
        else:
            runs.append((begin, end, of_tensor))
    return runs
