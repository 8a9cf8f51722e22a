"""Options of ``zosim plan``, ``lower``, ``simulate`` and ``compare``, and of the functions of these names: said once for both.

Cheap to import: a help page needs no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel

from costmodel.model_spec import Part
from topology.errors import PlanError
from topology.validation import readable
from zosim.engines import Engine
from zosim.plans import Method
from zosim.stated import METHOD_HELP

HOST = "host"
_Model = TypeVar("_Model", bound=BaseModel)

PlanFile = Annotated[Path, typer.Argument(help="A plan written by `zosim plan -o`.", show_default=False)]
_PROFILE = typer.Option("--profile", help="Calibrated rates to predict with, from `zosim calibrate -o`.")
ProfileFile = Annotated[Path | None, _PROFILE]
Hardware = Annotated[
    str | None, typer.Option(help="A preset's name, a topology file, or host; by default the plan's own.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads of a CPU's kernels; by default all cores, shared out among its ranks."),
]

PathOrText = Path | str | None
"""What names a file in Python; an option's text is a path."""

ModelName = Annotated[
    str,
    typer.Option(help="A shipped size (opt-13b), a model directory, a config.json, or a saved ModelSpec."),
]
HardwareName = Annotated[str, typer.Option(help="A preset's name, a topology file, or host.")]
MethodName = Annotated[Method, typer.Option(help=METHOD_HELP)]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="Most devices to use; by default all, or the one named.")
]
Densities = Annotated[
    PathOrText, typer.Option(help="Measured densities of the cuts, from `zosim probe --json`.")
]
DeviceName = Annotated[str | None, typer.Option(help="Node of the topology; by default its first GPU.")]
Tuned = Annotated[
    Part,
    typer.Option(help="All parameters, or matrices alone, or of these the linears of the blocks alone."),
]
Profile = Annotated[PathOrText, _PROFILE]
Programs = Annotated[
    PathOrText, typer.Option("--program", help="A program to use in place of what the plan is lowered to.")
]
OneProcess = Annotated[
    bool,
    typer.Option(
        "--one-process",
        help="As if one process of each host drove all its GPUs: one thread issues the copies of all. In runs every rank is a "
        "process.",
    ),
]
EngineName = Annotated[
    Engine,
    typer.Option(help="What plays the events: arrays over all ranks, or a simpy process for every stream."),
]
RankToCompare = Annotated[
    int | None, typer.Option(min=0, help="Rank to look at; by default the last to end its steps.")
]


def axis(kind: type[_Model], **fields: object) -> _Model:
    """Return one axis of a plan from what options said."""
    with readable(f"option of {kind.__name__.lower()}", PlanError, model=kind):
        return kind.model_validate(fields)
