"""What options of ``zosim plan``, ``lower``, ``simulate`` and ``compare`` say, as the types that they stand for."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel

from costmodel.configs import Part, read_model_spec
from costmodel.model_spec import ModelSpec
from topology.errors import PlanError
from topology.hardware import resolve
from topology.validation import readable
from zosim.hardware.profiles import Profiles
from zosim.planning.cuts import Cutting, read_densities
from zosim.planning.predict import Engine, Subject
from zosim.plans import Plan
from zosim.program_set import ProgramSet

HOST = "host"
_Model = TypeVar("_Model", bound=BaseModel)


class EngineName(enum.StrEnum):
    """What plays the events of a simulation."""

    LOCKSTEP = "lockstep"
    SIMPY = "simpy"


class CodeName(enum.StrEnum):
    """Whose code does what a plan says."""

    OURS = "ours"
    PUBLISHED = "published"


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


def subject_of(
    plan: Plan,
    hardware: str | None = None,
    profile: Path | None = None,
    num_threads: int | None = None,
    program: Path | None = None,
    *,
    one_process: bool = False,
    engine: Engine = "lockstep",
) -> Subject:
    """Return a plan on the hardware that an option names, or that it was made for.

    Raises
    ------
    PlanError
        If that hardware has not the plan's devices.
    """
    name = hardware or plan.placement.topology
    topology = resolve(name)
    known = {node.id for node in topology.of_kind("gpu", "cpu")}
    missing = [device for device in plan.placement.devices if device not in known]
    if missing:
        devices = ", ".join(node.id for node in topology.compute_devices)
        raise PlanError(
            f"the plan runs on {missing[0]}, but {name} has no such device",
            hint=f"plan again for this hardware (its devices: {devices}), or name the one it was made for",
        )
    profiles = Profiles(topology, path=profile, num_threads=num_threads, is_host=name == HOST)
    first = plan.placement.devices[0]
    rates = profiles.of(first, plan.placement.devices.count(first))
    edited = None if program is None else ProgramSet.load(program)
    return Subject(plan, topology, rates, edited, profiles, one_process, engine)
