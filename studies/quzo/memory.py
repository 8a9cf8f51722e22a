"""``python -m studies.quzo.memory``: what steps with weights in 16, 8 and 4 bits take at their peak, predicted and measured.

Blocks lie on the device, or on the host and pass through staging buffers. Every case is a session of a few steps of one shape with random
weights; the first ones are observed tensor by tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from costmodel.formats import FORMATS
from executors.formats import TORCH_DTYPES
from executors.runs.session import Session
from studies.speed.__main__ import SHAPES, model_of_shape, session_of
from zosim.console import stdout
from zosim.lowering import lower
from zosim.plans import ForwardPass, LowBits, Perturbations, Residency
from zosim.program.instructions import Space

_DTYPE = "bfloat16"
_NUM_STEPS = 2
_SPARSITY = 0.9
"""What an update touches is quickly moved then; it is no part of the peak."""

QUANTIZED: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"weights": "int8"},
    "int8, int8 inputs": {"weights": "int8", "activations": "int8-token"},
    "e4m3": {"weights": "float8_e4m3"},
    "int4 by groups of 64": {"weights": "int4", "scales": "group", "group_elements": 64},
}
PLACES: tuple[str, ...] = ("resident", "offloaded")


@dataclass(frozen=True)
class ComparedPeak:
    """Bytes of a device at the peak of a step."""

    # qvalues, blocks: keys of :data:`QUANTIZED`, and where blocks are.
    qvalues: str
    blocks: str
    predicted_bytes: int
    measured_bytes: int


def main(
    shape: Annotated[str, typer.Option(help="One of " + ", ".join(SHAPES) + ".")] = "125m",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int, typer.Option(min=2)] = 128,
    loss_chunk: Annotated[int, typer.Option(min=1, help="Tokens whose logits are there at once.")] = 16,
) -> None:
    """Run the cases one after the other, and print their peaks, and what these are of the first."""
    ends = sum(
        p.numel()
        for name, p in model_of_shape(shape, TORCH_DTYPES[_DTYPE]).named_parameters()
        if ".layers." not in name
    )
    stdout.print(
        f"OPT-{shape} shape, batch {batch} x {seq}, {_DTYPE} but for quantized values; embedding and head alone "
        f"{FORMATS[_DTYPE].bytes(ends) / 1e6:.1f} MB"
    )
    stdout.print("blocks     linear layers         predicted (MB)  measured (MB)   error  of bfloat16")
    for place in PLACES:
        whole = 0
        for peak in peaks(shape, place, batch=batch, seq=seq, loss_chunk=loss_chunk):
            whole = whole or peak.measured_bytes
            stdout.print(
                f"{peak.blocks:10} {peak.qvalues:21}{peak.predicted_bytes / 1e6:15.1f}{peak.measured_bytes / 1e6:15.1f}"
                f"{peak.predicted_bytes / peak.measured_bytes - 1:+8.1%}{peak.measured_bytes / whole:13.3f}"
            )


def peaks(shape: str, place: str, *, batch: int, seq: int, loss_chunk: int) -> Iterator[ComparedPeak]:
    """Yield the peaks of all formats with blocks in one place."""
    tokens = torch.randint(
        0, SHAPES[shape]["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(0)
    )
    data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    model = model_of_shape(shape, TORCH_DTYPES[_DTYPE])
    for name, fields in QUANTIZED.items():
        session = session_of(
            copy.deepcopy(model),
            data,
            _DTYPE,
            checksums=False,
            low_bits=LowBits.model_validate(fields | ({"sparsity": _SPARSITY} if fields else {})),
            perturbations=Perturbations(rng="counter", distribution="rademacher"),  # quickly drawn
            residency=Residency.model_validate({"blocks": place}),
            forward=ForwardPass(loss_chunk_tokens=loss_chunk),
        )
        with session:
            for _ in range(_NUM_STEPS):
                session.step(data)
            yield ComparedPeak(name, place, predicted_bytes(session), session.memory().device_bytes)


def predicted_bytes(session: Session) -> int:
    """Return the bytes of the buffers of a session's plan on its device, and of its largest workspace."""
    program = lower(session.plan)
    buffers = sum(buffer.size_bytes for buffer in program.buffers if buffer.space is Space.DEVICE)
    return buffers + max(instruction.work.workspace_bytes for _, instruction in program.instructions())


if __name__ == "__main__":
    typer.run(main)
