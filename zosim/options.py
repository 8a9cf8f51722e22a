"""What options of ``zosim plan``, ``lower``, ``simulate`` and ``compare`` say, as the types that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel

from costmodel.configs import Part, read_model_spec
from costmodel.model_spec import ModelSpec
from topology.errors import PlanError
from topology.validation import readable
from zosim.planning.cuts import Cutting, read_densities

HOST = "host"
_Model = TypeVar("_Model", bound=BaseModel)


PlanFile = Annotated[Path, typer.Argument(help="A plan written by `zosim plan -o`.", show_default=False)]
Hardware = Annotated[
    str | None, typer.Option(help="A preset's name, a topology file, or host; by default the plan's own.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Calibrated rates to predict with, from `zosim calibrate -o`."),
]
ProgramFile = Annotated[
    Path | None, typer.Option("--program", help="A program to use in place of what the plan is lowered to.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads of a CPU's kernels; by default all cores, shared out among its ranks."),
]


def cutting_of(
    source: str,
    cuts: Sequence[str] = (),
    codec: str = "none",
    residual_codec: str = "none",
    densities: Path | None = None,
    tuned: Part = "all",
) -> Cutting:
    """Return where options let the model be cut."""

    @cache
    def cut_model(blocks: tuple[int, ...]) -> ModelSpec:
        return read_model_spec(source, trainable=tuned, cut_blocks=blocks)

    path = Path(source)
    is_saved = path.suffix == ".json" and path.name != "config.json" and path.is_file()
    return Cutting(
        tuple(cuts),
        _codecs(codec),
        _codecs(residual_codec),
        {} if densities is None else read_densities(densities),
        None if is_saved else cut_model,
    )


def _codecs(text: str) -> tuple[str, ...]:
    """Return the codecs that a text lists; of plain numbers alone, which are always tried, none."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    return () if names == ("none",) else names


def axis(kind: type[_Model], **fields: object) -> _Model:
    """Return one axis of a plan from what options said."""
    with readable(f"option of {kind.__name__.lower()}", PlanError, model=kind):
        return kind.model_validate(fields)
