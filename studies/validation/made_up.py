"""Rows that nobody measured: what predictions say where no measurement can contradict them.

``python -m studies.validation.made_up [--hardware DIR]`` asks for kernels, copies and collectives over sizes, formats and machines, and counts
what no measurement would be needed to call wrong: an interval that does not hold its own prediction, a time that falls as
work grows, one that jumps where a size hardly changes, a kernel faster than its peak, a row without an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from topology.documents import catalogue, preset_names
from topology.schema import Dtype
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import Forecast, MeasuredRow
from zosim.console import stdout

_JUMP, _FALL = 2.0, 0.98
"""Times the growth of a size that a prediction may grow, and part of itself that it may fall to: ties between libraries' choices."""

_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (50257, 768), (8192, 28672))
_ROWS = (1, 16, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BYTES = tuple(2**power for power in range(6, 34))
_DTYPES: Mapping[str, Dtype] = {"float16": "fp16", "float32": "fp32", "int8": "int8"}
_HEADS = ((64, 32, 32), (80, 32, 32), (128, 32, 8), (256, 16, 16))


@dataclass
class Findings:
    """What was found over the rows asked so far."""

    measured_machines: MeasuredMachines
    num_rows: int = 0
    found: Counter[str] = field(default_factory=Counter)  # how often, by what

    def sweep(self, kind: str, hardware: str, column: str, sizes: Sequence[int], **cells: object) -> None:
        """Ask for a row of each size, in order."""
        reported = {size: self._ask(kind, hardware, {**cells, column: size}) for size in sizes}
        known = {size: forecast for size, forecast in reported.items() if forecast is not None}
        for smaller, larger in pairwise(known):
            grown = known[larger].predicted / known[smaller].predicted
            self.found[f"{kind}: falls"] += grown < _FALL
            # Scores grow with the square of a sequence's length.
            power = 2 if column == "seq" else 1
            self.found[f"{kind}: jumps"] += grown > _JUMP * (larger / smaller) ** power

    def _ask(self, kind: str, hardware: str, cells: Mapping[str, object]) -> Forecast | None:
        self.num_rows += 1
        texts = {name: str(value) for name, value in cells.items()}
        reported = outcome(
            MeasuredRow({"kind": kind, "hardware": hardware, **texts}, "made up"), self.measured_machines
        )
        if isinstance(reported, str):
            self.found[f"{kind}: no answer"] += 1
            return None
        self.found[f"{kind}: interval"] += not 0 < reported.low <= reported.predicted <= reported.high
        self.found[f"{kind}: above the peak"] += reported.predicted < self._least_s(kind, hardware, cells)
        return reported

    def _least_s(self, kind: str, hardware: str, cells: Mapping[str, object]) -> float:
        """Return the seconds of a product at its device's peak; 0 for other kinds, and where no peak is declared."""
        spec, dtype = self.measured_machines.of(hardware).device, _DTYPES.get(str(cells.get("dtype")))
        peak = None if dtype is None else spec.peak_dense.get(dtype)
        if kind != "matmul" or peak is None or spec.type == "cpu":
            return 0.0
        m, n, k = (int(str(cells[name])) for name in "mnk")
        return float(2 * m * n * k / peak.in_si("compute"))


def ask_all(measured_machines: MeasuredMachines, machines: Sequence[str]) -> Findings:
    """Return what predictions for these machines show."""
    requested = Findings(measured_machines)
    for hardware in machines:
        for dtype in ("float16", "float32", "int8"):
            for n, k in _SHAPES:
                requested.sweep("matmul", hardware, "m", _ROWS, dtype=dtype, n=n, k=k)
        for kind in ("attention", "attention_backward"):
            for head_dim, heads, kv_heads in _HEADS:
                shape = {"batch": 2, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
                for code in ("fa2", "fa3", "cudnn", "math"):
                    requested.sweep(
                        kind, hardware, "seq", _LENGTHS, dtype="float16", causal="true", code=code, **shape
                    )
        requested.sweep("elementwise", hardware, "bytes", _BYTES)
        requested.sweep("draw", hardware, "elements", _BYTES, dtype="float32")
        for direction in ("h2d", "d2h"):
            requested.sweep("copy", hardware, "bytes", _BYTES, direction=direction)
        num_devices = len(measured_machines.of(hardware).devices)
        for ranks in (ranks for ranks in (2, 3, 4, 8, 16, 64) if ranks <= num_devices):
            for kind in ("all_reduce", "all_gather"):
                requested.sweep(kind, hardware, "bytes", _BYTES, ranks=ranks)
        if num_devices > 1:
            requested.sweep("p2p", hardware, "bytes", _BYTES, ranks=2)
    return requested


def _machines(folder: Path | None) -> Iterator[str]:
    yield from preset_names()
    yield from (spec.id for spec in catalogue().devices.values() if spec.type == "gpu")
    if folder is not None:
        yield from sorted(path.name for path in folder.glob("*.yaml"))


def main(
    hardware: Annotated[
        Path | None, typer.Option(help="Folder of topology files that are asked, too.")
    ] = None,
    machine: Annotated[
        list[str], typer.Option(help="Only these presets, GPUs and files; may be repeated. By default all.")
    ] = [],  # noqa: B006 - typer copies it
) -> None:
    """Count what is wrong with predictions of made-up rows; exit status 1 if there is anything but jumps."""
    requested = ask_all(MeasuredMachines(hardware), machine or list(_machines(hardware)))
    stdout.print(f"{requested.num_rows} rows", markup=False)
    for what, count in requested.found.most_common():
        if count:
            stdout.print(f"{count:6d}  {what}", markup=False)
    if any(count and not what.endswith("jumps") for what, count in requested.found.items()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
