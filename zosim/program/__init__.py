"""What a rank does in one step, as data that a simulator can time and an executor can do.

A :class:`Program` is a step graph in three phases, ``prologue | step | flush``. The step repeats; a dependency
carries an *iteration distance*, so that "the offload of this block in the step before" is an edge like any other.
Both interpreters run the same instructions under the same rules:

* instructions of one stream run in the order listed, and one step's before the next step's;
* an instruction starts when every instruction that it is ``after`` has finished.

Nothing else orders anything, so whatever those rules leave unordered may really overlap.
:mod:`zosim.program.validate` refuses a program in which that would matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import TypeAdapter

from topology.errors import ProgramError
from topology.renamed import with_present_names
from topology.validation import readable
from zosim.documents import Document, DocumentType, json_by_lines
from zosim.program.instructions import PHASES, Access, Buffer, Instruction, Phase

PROGRAM_VERSION: Literal[2] = 2
RENAMED: Mapping[str, str] = {
    "**.coding": "codec_work",
    "**.code_passes": "quant_passes",
    "**.quant_passes.*=moves*": "updates*",
    "**.num_split_walks": "num_split_sequences",
    "buffers.role=directions": "perturbations",
    "buffers.role=staging": "transfer buffers",
    "buffers.role=slots": "staging buffers",
    "**.kind=draw": "sample",
    "*.op.query": "perturbation",
    "**.label=draw": "sample",
    "**.stream=draw": "sample",
    "**.draw_dtype": "sampling_dtype",
    "**.num_shared_draws": "num_shared_samplings",
    "**.what=cut.*": "boundary.*",
    "groups": "process_groups",
    "**.sweep_bytes": "param_pass_bytes",
    "*.op.point": "eval_point",
    "*.op.beside": "side_paths",
    "*.op.together": "batched_eval_points",
    "**.quant_passes.*=beside": "side_path",
    "**.codec_work.*=quantise_s*": "quantize_s*",
    "**.codec_work.*=dequantise_s": "dequantize_s",
    "*.after.group": "process_group",
    "*.op.kind": "type",
    "*.op[type:collective].group": "process_group",
    "*.op[type:send].group": "process_group",
    "*.op[type:recv].group": "process_group",
    "*.op.group": "param_group",
}
"""Fields, and types of operations, that were renamed of a program (:mod:`topology.renamed`)."""

ALIGNMENT_BYTES = 64
"""Tensors of a bucket start at multiples of this where nothing asks for more: misaligned weights change the bits of a product."""
OLDEST_VERSION = 1
"""Of the files that can be read. In version 1, what an operand holds stood in two fields, ``what`` and ``point``."""


PROGRAM_FILE = DocumentType(
    "program", PROGRAM_VERSION, OLDEST_VERSION, ProgramError, "write one with `zosim lower plan.json`"
)


@dataclass(frozen=True)
class Program(Document):
    """The step graph of one rank.

    Attributes
    ----------
    name : str
        For messages.
    buffers : tuple of Buffer
        Memory of the rank, by name.
    initial : tuple of Access
        What the buffers hold when the first step begins.
    final : tuple of Access
        What they must hold after the flush, in the frame of the step that would come next.
    prologue, step, flush : tuple of Instruction
        What runs once before the first step, in every step, and once after the last.
    process_groups : mapping of str to int
        Members of each group that the rank is one of.
    alignment_bytes : int
        Parameters and perturbations, and each tensor of them, start at multiples of this in their buffers.
    version : int
        Version of the file's layout.
    """

    name: str
    buffers: tuple[Buffer, ...]
    initial: tuple[Access, ...]
    final: tuple[Access, ...]
    step: tuple[Instruction, ...]
    prologue: tuple[Instruction, ...] = ()
    flush: tuple[Instruction, ...] = ()
    process_groups: Mapping[str, int] = field(default_factory=dict)
    alignment_bytes: int = ALIGNMENT_BYTES
    version: Literal[2] = PROGRAM_VERSION

    document = PROGRAM_FILE

    def share_bytes(self, access: Access) -> int:
        """Return the bytes that `access` really touches on one rank."""
        return access.size_bytes // self.process_groups[access.share] if access.share else access.size_bytes

    @cached_property
    def buffer_by_name(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    def buffer(self, name: str) -> Buffer:
        """Return the buffer called `name`.

        Raises
        ------
        ProgramError
            If there is none.
        """
        try:
            return self.buffer_by_name[name]
        except KeyError:
            raise ProgramError(
                f"program {self.name} uses buffer {name!r}, which it does not declare",
                hint="declare it under `buffers`, or correct the name",
            ) from None

    def instructions(self) -> Iterator[tuple[Phase, Instruction]]:
        """Yield every instruction once, with the phase that it stands in."""
        for phase in PHASES:
            for instruction in getattr(self, phase):
                yield phase, instruction

    def to_data(self) -> dict[str, Any]:
        """Return the program as what JSON can hold."""
        data = {"version": PROGRAM_VERSION, **_ADAPTER.dump_python(self, mode="json", exclude_defaults=True)}
        for phase in PHASES:
            for instruction, written in zip(getattr(self, phase), data.get(phase, ()), strict=False):
                written["op"] = {"type": instruction.op.type, **written["op"]}
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> Program:
        """Return the program that :meth:`to_data` made.

        Parameters
        ----------
        data : dict
            Content of the JSON file.
        where : str
            Name of the source in messages.
        """
        with readable(f"program {where}", ProgramError):
            upgraded = _upgraded(data) if data.get("version") == 1 else dict(data)
            return _ADAPTER.validate_python(with_present_names(upgraded, RENAMED))

    def to_json(self) -> str:
        """Return the program as JSON, one instruction to a line so that it can be edited by hand."""
        return json_by_lines(self.to_data())


def _upgraded(data: Any) -> Any:
    """Return a file of version 1 as one of this version."""
    if isinstance(data, list):
        return [_upgraded(item) for item in data]
    if not isinstance(data, dict):
        return data
    upgraded = {name: _upgraded(value) for name, value in data.items()}
    if "version" in upgraded:
        upgraded["version"] = PROGRAM_VERSION
    if "what" in upgraded and upgraded.get("point", ""):
        upgraded["what"] = f"{upgraded['what']}@{upgraded['point']}"
    if "what" in upgraded:
        upgraded.pop("point", None)
    return upgraded


_ADAPTER: TypeAdapter[Program] = TypeAdapter(Program)
