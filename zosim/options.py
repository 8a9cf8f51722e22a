"""What options of ``zosim plan``, ``lower``, ``simulate`` and ``compare`` say, as the types that they stand for."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer
from pydantic import BaseModel

from costmodel.configs import read_model_spec
from costmodel.formats import format_name
from costmodel.model_spec import ModelSpec
from topology.errors import PlanError
from topology.hardware import resolve
from topology.units import QuantityError, parse_bytes
from topology.validation import did_you_mean, readable
from zosim.hardware.profiles import Profiles
from zosim.planning.cuts import Cutting, read_densities
from zosim.planning.predict import Engine, Subject
from zosim.plans import Mesh, Plan, StorageDType, TransferDType
from zosim.program_set import ProgramSet

HOST = "host"
_Model = TypeVar("_Model", bound=BaseModel)
_MESH_AXES = ("data", "perturb", "stage")


class MethodName(enum.StrEnum):
    """Named presets of the placement space."""

    AUTO = "auto"
    MEZO = "mezo"
    ZO2 = "zo2"
    PERTP = "pertp"
    DDP = "ddp"
    TWO_D = "2d"
    SPARQ = "sparq"


class EngineName(enum.StrEnum):
    """What plays the events of a simulation."""

    LOCKSTEP = "lockstep"
    SIMPY = "simpy"


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
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def mesh_of(text: str) -> Mesh:
    """Return the mesh that a text such as ``data=2,perturb=2`` names, the outer axis first; stages are neighbours.

    Raises
    ------
    PlanError
        If an axis is unknown or named twice, or a size is no count.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in _MESH_AXES:
            hint = did_you_mean(name, _MESH_AXES)
            raise PlanError(f"--mesh {text}: {name!r} is no axis of a mesh", hint=hint)
        if name in sizes:
            raise PlanError(f"--mesh {text} names {name} twice", hint="such as data=2,perturb=2")
        if not size.isdecimal() or int(size) < 1:
            raise PlanError(
                f"--mesh {text}: {item.strip()!r} gives {name} no size", hint="such as data=2,perturb=2"
            )
        sizes[name] = int(size)
    inner = [name for name in sizes if name != "stage"][-1:] if {"data", "perturb"} <= set(sizes) else []
    return axis(Mesh, **sizes, **({"inner": inner[0]} if inner else {}))


def cutting_of(
    source: str,
    cuts: Sequence[str] = (),
    codec: str = "none",
    residual_codec: str = "none",
    densities: Path | None = None,
) -> Cutting:
    """Return where options let the model be cut."""

    @cache
    def cut_model(blocks: tuple[int, ...]) -> ModelSpec:
        return read_model_spec(source, cut_blocks=blocks)

    path = Path(source)
    is_saved = path.suffix == ".json" and path.name != "config.json" and path.is_file()
    return Cutting(
        tuple(part.strip() for item in cuts for part in item.split(",")),
        _codecs(codec),
        _codecs(residual_codec),
        {} if densities is None else read_densities(densities),
        None if is_saved else cut_model,
    )


def memory_limit(option: str, text: str | None) -> int | None:
    """Return the bytes that an option leaves to a plan; None without it, which is all that there is.

    Raises
    ------
    PlanError
        If the text is no size, or zero.
    """
    if text is None:
        return None
    try:
        size_bytes = parse_bytes(text)
    except QuantityError as error:
        raise PlanError(f"{option} {text}: {error.message}", hint=error.hint) from None
    if size_bytes == 0:
        raise PlanError(
            f"{option} {text} leaves no memory", hint="such as 20GiB; all of it without the option"
        )
    return size_bytes


def _codecs(text: str) -> tuple[str, ...]:
    """Return the codecs that a text lists; of plain numbers alone, which are always tried, none."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    return () if names == ("none",) else names


def dtype_named(option: str, value: str, known: tuple[str, ...] = get_args(StorageDType)) -> str:
    """Return the format that an option names, its aliases resolved.

    Raises
    ------
    PlanError
        If the name is unknown.
    """
    name = format_name(value)
    if name not in known:
        raise PlanError(f"--{option} {value} is no format that zosim knows", hint=did_you_mean(name, known))
    return name


def formats_of(
    dtype: str | None, compute_dtype: str | None, transfer_dtype: str | None
) -> dict[str, dict[str, object]]:
    """Return the formats that options name, by axis; without a name of their own products and transfers have the weights'.

    Raises
    ------
    PlanError
        If a name is unknown.
    """
    fixed: dict[str, dict[str, object]] = {}
    if dtype is not None:
        fixed = {
            "weights": {"dtype": dtype_named("dtype", dtype)},
            "forward": {"compute_dtype": None},
            "residency": {"transfer_dtype": None},
        }
    if compute_dtype is not None:
        known = (*get_args(StorageDType), "tf32")
        fixed["forward"] = {"compute_dtype": dtype_named("compute-dtype", compute_dtype, known)}
    if transfer_dtype is not None:
        named = dtype_named("transfer-dtype", transfer_dtype, get_args(TransferDType))
        fixed["residency"] = {"transfer_dtype": named}
    return fixed


def given(**options: object) -> dict[str, object]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


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
