"""``zosim plan``, ``lower``, ``simulate`` and ``compare``: thin over the planner and the simulator."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer
from pydantic import BaseModel, ValidationError

from costmodel.configs import read_model_spec
from costmodel.model_spec import ModelSpec
from topology.documents import resolve
from topology.errors import PlanError
from topology.units import format_seconds, parse_bytes
from topology.validation import did_you_mean, readable
from zosim import report
from zosim.compare import compare as compare_timelines
from zosim.console import emit, stderr
from zosim.plan import Estimator, Plan, Precision, Runtime, StorageDType, TransferDType
from zosim.planner import Request, choose
from zosim.predict import Subject
from zosim.profiles import profile_for
from zosim.program import Program
from zosim.simulate import simulate as simulate_program
from zosim.timeline import Timeline
from zosim.trace import save_trace

HOST = "host"
_Model = TypeVar("_Model", bound=BaseModel)
_DTYPE_ALIASES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3",
}


class MethodName(enum.StrEnum):
    """Named presets of the placement space."""

    AUTO = "auto"
    MEZO = "mezo"
    ZO2 = "zo2"


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
Threads = Annotated[int | None, typer.Option(help="Threads of a CPU's kernels; by default all cores.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A shipped size (opt-13b), a model directory, a config.json, or a saved ModelSpec."
        ),
    ],
    hardware: Annotated[str, typer.Option(help="A preset's name, a topology file, or host.")] = HOST,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    method: Annotated[
        MethodName, typer.Option(help="mezo stays on the device, zo2 offloads blocks.")
    ] = MethodName.AUTO,
    dtype: Annotated[str, typer.Option(help="Format of weights, products and transfers.")] = "float16",
    compute_dtype: Annotated[str | None, typer.Option(help="Format of the products, such as tf32.")] = None,
    transfer_dtype: Annotated[
        str | None, typer.Option(help="Format of offloaded blocks; narrower is lossy.")
    ] = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Consider plans that lose precision.")
    ] = False,
    max_device_memory: Annotated[
        str | None, typer.Option(help="Such as 20GiB; by default all of it.")
    ] = None,
    max_host_memory: Annotated[str | None, typer.Option(help="Such as 64GiB; by default all of it.")] = None,
    rng: Annotated[str, typer.Option(help="mezo or counter.")] = "mezo",
    order: Annotated[str, typer.Option(help="registration (MeZO) or execution (ZO2).")] = "registration",
    direction: Annotated[str, typer.Option(help="gaussian or rademacher.")] = "gaussian",
    difference: Annotated[str, typer.Option(help="central or forward.")] = "central",
    queries: Annotated[int, typer.Option(min=1, help="Directions per step.")] = 1,
    eps: Annotated[float, typer.Option(help="Smoothing radius.")] = 1e-3,
    attention: Annotated[str, typer.Option(help="eager or sdpa.")] = "sdpa",
    slots: Annotated[int | None, typer.Option(min=1, help="Fix the slots that blocks pass through.")] = None,
    overlap: Annotated[bool | None, typer.Option(help="Fix whether copies run beside compute.")] = None,
    reuse_slots: Annotated[bool | None, typer.Option(help="Fix whether slots are allocated once.")] = None,
    update: Annotated[str | None, typer.Option(help="Fix the update: immediate or delayed.")] = None,
    traversal: Annotated[str | None, typer.Option(help="Fix the traversal: sweep or blockwise.")] = None,
    edges: Annotated[str | None, typer.Option(help="Fix embedding and head: resident or offloaded.")] = None,
    draw_ahead: Annotated[bool | None, typer.Option(help="Fix whether directions are drawn ahead.")] = None,
    loss_chunk: Annotated[
        int | None, typer.Option(min=1, help="Fix the tokens whose logits live at once.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Node of the topology; by default its first GPU.")
    ] = None,
    threads: Threads = None,
    profile: ProfileFile = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the chosen plan here.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the fastest placement that fits, and say why."""
    topology = resolve(hardware)
    node = device or topology.compute_devices[0].id
    request = Request(
        model=model_spec(model),
        topology=topology,
        hardware=hardware,
        device=node,
        profile=profile_for(topology, node, path=profile, num_threads=threads, is_host=hardware == HOST),
        batch=batch,
        seq=seq,
        estimator=_axis(
            Estimator,
            direction=direction,
            difference=difference,
            num_queries=queries,
            epsilon=eps,
            rng=rng,
            order=order,
        ),
        precision=precision_of(dtype, compute_dtype, transfer_dtype),
        method=method.value,
        attention=_axis(Runtime, attention=attention).attention,
        max_device_bytes=None if max_device_memory is None else parse_bytes(max_device_memory),
        max_host_bytes=None if max_host_memory is None else parse_bytes(max_host_memory),
        allow_lossy=allow_lossy,
        fixed={
            "residency": _given(num_slots=slots, overlap=overlap, reuse_slots=reuse_slots, edges=edges),
            "runtime": _given(
                update=update, traversal=traversal, draw_ahead=draw_ahead, loss_chunk_tokens=loss_chunk
            ),
        },
    )
    decision = choose(request)
    if output is not None:
        decision.chosen.plan.save(output)
        stderr.print(f"wrote {output}")
    emit(report.decision_data(decision), json=as_json, text=report.decision_view(decision))


def lower(
    plan_file: PlanFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the program here.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Validate this program instead, perhaps edited by hand.")
    ] = None,
) -> None:
    """Write a plan's program, one instruction to a line, or check one that was edited."""
    loaded = Plan.load(plan_file)
    subject = _subject(loaded, None, None, None, check)
    program = subject.program
    if check is not None:
        stderr.print(f"{check} keeps both rules: {len(program.step)} instructions a step")
        return
    if output is None:
        typer.echo(program.to_json(), nl=False)
        return
    program.save(output)
    stderr.print(
        f"wrote {output}: {len(program.step)} instructions a step, {len(program.flush)} in the flush"
    )


def simulate(
    plan_file: PlanFile,
    hardware: Hardware = None,
    profile: ProfileFile = None,
    program: ProgramFile = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the run; by default until they repeat.")
    ] = None,
    threads: Threads = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (Perfetto opens it).")] = None,
    as_json: Json = False,
) -> None:
    """Predict a plan's step time and memory, event by event."""
    subject = _subject(Plan.load(plan_file), hardware, profile, threads, program)
    timeline = (
        subject.timeline
        if steps is None
        else simulate_program(subject.program, subject.machine, num_steps=steps)
    )
    if trace is not None:
        save_trace(timeline, trace, subject.program)
        stderr.print(f"wrote {trace}")
    prediction = subject.prediction
    data = report.prediction_data(prediction) | {
        "num_steps": timeline.num_steps,
        "makespan_s": timeline.makespan_s,
    }
    emit(data, json=as_json, text=report.prediction_view(subject, prediction))
    if steps is not None and not as_json:
        stderr.print(f"{steps} steps and the flush: {format_seconds(timeline.makespan_s)}")


def compare(
    plan_file: PlanFile,
    run: Annotated[Path, typer.Argument(help="Directory of a run of that plan.", show_default=False)],
    hardware: Hardware = None,
    profile: ProfileFile = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Hold a run against its prediction, instruction by instruction."""
    ran = run / "program.json"
    subject = _subject(Plan.load(plan_file), hardware, profile, threads, ran if ran.exists() else None)
    measured = Timeline.load(run / "timeline.json")
    comparison = compare_timelines(subject.timeline, measured, subject.program)
    emit(json.loads(comparison.to_json()), json=as_json, text=comparison)


def model_spec(source: str) -> ModelSpec:
    """Return the model that `source` names, or holds as a saved ModelSpec.

    Raises
    ------
    ModelError
        If it is neither.
    """
    path = Path(source)
    if path.suffix == ".json" and path.name != "config.json" and path.is_file():
        try:
            return ModelSpec.model_validate_json(path.read_text())
        except (ValidationError, UnicodeDecodeError):
            return read_model_spec(source)
    return read_model_spec(source)


def precision_of(dtype: str, compute: str | None = None, transfer: str | None = None) -> Precision:
    """Return the formats that options name.

    Raises
    ------
    PlanError
        If a name is unknown.
    """
    storage = _dtype("dtype", dtype, get_args(StorageDType))
    return _axis(
        Precision,
        storage=storage,
        compute=storage
        if compute is None
        else _dtype("compute-dtype", compute, (*get_args(StorageDType), "tf32")),
        transfer=storage if transfer is None else _dtype("transfer-dtype", transfer, get_args(TransferDType)),
    )


def _dtype(option: str, value: str, known: tuple[str, ...]) -> str:
    name = _DTYPE_ALIASES.get(value.lower(), value.lower())
    if name not in known:
        raise PlanError(f"--{option} {value} is no format that zosim knows", hint=did_you_mean(name, known))
    return name


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _axis(axis: type[_Model], **fields: object) -> _Model:
    """Return one axis of a plan from what options said."""
    with readable(f"option of {axis.__name__.lower()}", PlanError, model=axis):
        return axis.model_validate(fields)


def _subject(
    plan_: Plan,
    hardware: str | None,
    profile: Path | None,
    num_threads: int | None,
    program: Path | None,
) -> Subject:
    """Return a plan on the hardware that an option names, or that it was made for."""
    name = hardware or plan_.placement.topology
    topology = resolve(name)
    device = plan_.placement.devices[0]
    if device not in {node.id for node in topology.compute_devices}:
        devices = ", ".join(node.id for node in topology.compute_devices)
        raise PlanError(
            f"the plan runs on {device}, but {name} has no such device",
            hint=f"plan again for this hardware (its devices: {devices}), or name the one it was made for",
        )
    rates = profile_for(topology, device, path=profile, num_threads=num_threads, is_host=name == HOST)
    return Subject(plan_, topology, rates, None if program is None else Program.load(program))
