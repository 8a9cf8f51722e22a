"""The plan of ``zosim run``: read from a file or made here, with the typed options laid over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from costmodel.formats import FORMATS, default_dtype
from costmodel.memory import preflight_host
from costmodel.models.configs import CONFIG_NAME, Trainable, read_model_spec, stored_quantization_in
from costmodel.models.model_spec import ModelSpec
from executors.devices import accelerator_type, check_device, num_devices_of
from topology.errors import DoesNotFit, ModelError, PlanError, UnknownFamily, ZosimError
from topology.hardware import resolve as topology_named
from zosim.config import HOST, PlanConfig, merge
from zosim.lowering import lower_all
from zosim.planning.footprint import pinned_by
from zosim.planning.request import Hardware
from zosim.planning.resolve import even_split_points, laid_over, resolve, schedule_for, spread
from zosim.planning.split_options import SplitModel, SplitOptions
from zosim.plans import LowBits, Mesh, Placement, Plan, Split, Weights, fields_of
from zosim.program.instructions import Space
from zosim.program.program_set import ProgramSet

if TYPE_CHECKING:
    from topology.graph import Topology

_LEAST_RANKS = {"pertp": 2, "ddp": 2, "2d": 4, "sparq": 2}
"""Ranks that a method takes at least; on a CPU they share it."""


def plan_for(
    config: PlanConfig,
    base: Plan | None,
    split_model: SplitModel,
    *,
    device: str,
    num_threads: int | None,
    longest: Callable[[], int],
) -> Plan:
    """Return the plan to run.

    - `config`: what options set.
    - `base`: what options are laid over: of a file, or of a run that is gone on with.
    - `split_model`: returns the model at hand with some blocks split inside.
    - `device`: ``"cpu"`` or a CUDA device.
    - `num_threads`: of a CPU's kernels.
    - `longest`: returns the tokens of the longest example. It reads the data, which takes a while, and is called only where
      nothing else says how long sequences are.

    Raises PlanError if the options contradict each other, or lose precision without leave.
    """
    typed, search = config, config.search
    config = _with_mesh(config, _num_devices(device))
    if base is not None and not (search.given("method") or search.ranks):
        config = laid_over(base, config, split_model)
    else:
        config = _begun(config, base, split_model, device, longest)

    def hardware() -> Hardware:
        topology, node = host_node(device)
        most = max(_LEAST_RANKS[search.method], _num_devices(device)) if search.method in _LEAST_RANKS else 1
        return Hardware.of(topology, HOST, device=node, max_ranks=most, num_threads=num_threads)

    # Split points within one process are no matter of speed; and a codec is recorded as it was typed, not with its fastest encoding.
    searched = config.model_copy(update={"split": Split()}) if config.mesh.stage == 1 else config
    plan = resolve(
        config if config.placement else searched, hardware, SplitOptions.of(searched.split, split_model)
    )
    if config.placement is None and "split" in config.model_fields_set:
        plan = resolve(laid_over(plan, PlanConfig(split=config.split), split_model))
    _refuse_unasked_loss(plan, typed, base)
    return plan


def _begun(
    config: PlanConfig, base: Plan | None, split_model: SplitModel, device: str, longest: Callable[[], int]
) -> PlanConfig:
    """Return the config to plan from: a new one, or that of a plan whose numbers stay while it is placed anew."""
    model = split_model(())
    kept = PlanConfig(model=model, seq=config.seq or (longest() if base is None else base.seq))
    if base is None:
        config = merge(kept, config)
        if config.low_bits.given("weights") is None and model.stored is None:
            # What a run tunes, quantized values or numbers, is nothing that --allow-lossy alone says.
            config = merge(PlanConfig(low_bits=LowBits(weights="none")), config)
    else:
        config = merge(merge(kept, _numbers_of(base)), config)
    if config.mesh.stage > 1 and not config.split.split_points:
        # Split points that codecs go with decide numbers, which must not depend on how fast a machine is.
        split_points = even_split_points(model.num_blocks, config.mesh.stage, inside=model.splits_inside)
        config = merge(config, PlanConfig(split=Split(split_points=split_points)))
    is_named = config.residency.given("blocks") and not (config.search.given("method") or config.search.ranks)
    if not is_named:
        return config
    placement = Placement(topology=HOST, devices=("cpu0" if device == "cpu" else "gpu0",))
    known = PlanConfig(
        placement=placement, schedule=schedule_for(config), weights=_usual_weights(model, device)
    )
    return spread(merge(known, config), split_model)


def _numbers_of(plan: Plan) -> PlanConfig:
    """Return what the planner may not choose anew of a plan, but for what crosses its boundaries."""
    axes = {
        name: axis.model_construct(
            **{
                field.name: getattr(axis, field.name)
                for field in fields_of(type(axis)).values()
                if not field.setting.planned
            }
        )
        for name, axis in plan.axes.items()
        if name not in ("mesh", "placement", "split")
    }
    return PlanConfig(batch=plan.batch, **axes)  # type: ignore[arg-type]


def _with_mesh(config: PlanConfig, num_devices: int) -> PlanConfig:
    """Return a config with the mesh that its split points or the method of stages imply, where none is set."""
    search, split_points = config.search, config.split.split_points
    if "mesh" in config.model_fields_set or search.method not in ("auto", "sparq"):
        return config
    stages = (
        len(split_points) + 1
        if split_points
        else (search.ranks or max(2, num_devices)) * (search.method == "sparq")
    )
    return merge(config, PlanConfig(mesh=Mesh.parse(f"stage={stages}"))) if stages else config


def _usual_weights(model: ModelSpec, device: str) -> Weights:
    """Return the format of the weights where no option names one; on a CPU it is the plan's own default."""
    if device == "cpu":
        return Weights()
    try:
        topology, node = host_node(device)
    except PlanError:  # torch may find a device that cannot be detected: nothing is known of its units
        return Weights(dtype=model.checkpoint_dtype or "bfloat16")
    return Weights(dtype=default_dtype(model.checkpoint_dtype, topology.device_spec(node))[0])


def _refuse_unasked_loss(plan: Plan, config: PlanConfig, base: Plan | None) -> None:
    """Refuse codecs without a boundary, and formats that lose precision without ``--allow-lossy``. Raises PlanError."""
    split, allows = config.split, config.search.allow_lossy
    if plan.num_stages == 1 and not plan.split.is_lossy and split.split_points:
        raise PlanError(
            f"--split-points {','.join(split.split_points)} has no effect with one stage: no activation is sent, and no "
            "codec is used",
            hint="add --codec, or leave out --mesh",
        )
    if not plan.split_points and split.model_fields_set - {"split_points"}:
        raise PlanError(
            "codecs apply to activations sent between stages, but the plan has no split point",
            hint="add --mesh stage=2, or --mesh stage=1 --split-points block.N.mlp for one process",
        )
    # A plan file that is lossy was made with --allow-lossy: nobody need say it twice.
    known_to_lose = base is not None and base.split == plan.split
    if plan.split.is_lossy and not (allows or known_to_lose):
        raise PlanError(
            f"codec {plan.split.codec} (residual stream: {plan.split.residual_codec}) is lossy: it "
            "changes losses and updates",
            hint="add --allow-lossy to accept that; `zosim probe` measures the loss",
        )
    may_lose = allows or (base is not None and base.is_transfer_lossy)
    if plan.is_transfer_lossy and plan.is_offloaded and not may_lose:
        raise PlanError(
            f"--transfer-dtype {plan.transfer_dtype} is narrower than --dtype {plan.storage_dtype}, so "
            "every offload loses precision",
            hint="add --allow-lossy to accept that",
        )


def _num_devices(device: str) -> int:
    """Return the devices of a kind; ranks on a CPU share it."""
    return 1 if device == "cpu" else num_devices_of(device.partition(":")[0])


def planned_device(plan: Plan) -> str:
    """Return the torch device that a plan is for: the CPU, or the kind of accelerator that torch finds, else ``cuda``.

    It has a number where a plan of one rank for this machine names another GPU than the first.
    """
    placement = plan.placement
    first = placement.devices[0]
    device_type = "gpu" if placement.is_on_gpus else "cpu"
    if placement.topology != HOST:
        # A machine's own names need not say what its nodes are; where the plan was made elsewhere they have to.
        with suppress(ZosimError):
            device_type = next(
                (n.type for n in topology_named(placement.topology).nodes if n.id == first), device_type
            )
    if device_type != "gpu":
        return "cpu"
    accelerator = accelerator_type()
    number = first.rpartition("/")[2].removeprefix("gpu")
    is_other = placement.world_size == 1 and placement.topology == HOST and number.isdecimal() and int(number)
    return f"{accelerator}:{number}" if is_other else accelerator


def refuse_absent(device: str, why: str) -> None:
    """Refuse a device that nobody named on the command line, where torch finds none of its kind.

    `why`: what says that the run belongs there.

    Raises
    ------
    PlanError
    """
    device_type = device.partition(":")[0]
    if device_type != "cpu" and not num_devices_of(device_type):
        raise PlanError(
            f"{why}, but torch {torch.__version__} finds no {device_type} device here",
            hint="--device cpu runs it on the CPU; its predictions remain those of the planned hardware",
        )


def where_it_runs(plan: Plan, device: str) -> str:
    """Return the line that states on which device the ranks run, and for which they were planned."""
    devices, num_ranks = dict.fromkeys(plan.placement.devices), plan.placement.world_size
    named = list(devices)
    planned = " and ".join(named) if len(named) < 3 else f"{named[0]}..{named[-1]}"
    ranks = "" if num_ranks == 1 else f"{num_ranks} ranks, "
    return f"{ranks}on {device}, planned for {planned} of {plan.placement.topology}"


def host_node(device: str) -> tuple[Topology, str]:
    """Return this machine, and the node of it that stands for a torch device. Raises PlanError if there is none."""
    check_device(device)
    topology = topology_named(HOST)
    nodes = [node.id for node in topology.of_type("cpu" if device == "cpu" else "gpu")]
    index = int(device.partition(":")[2] or 0)
    if index >= len(nodes):
        named = ", ".join([f"{device.partition(':')[0]}:{number}" for number in range(len(nodes))])
        raise PlanError(
            f"this machine has no device {device}" + (f", only {named}" if named else ""),
            hint="use --device cpu; `zosim topology show host` lists the devices that are found",
        )
    return topology, nodes[index]


def spec_for(model: str, tuned: Trainable, split_blocks: tuple[int, ...] = (), **loading: Any) -> ModelSpec:
    """Return what the configuration tells of a model, or where that does not, the model itself.

    Raises ModelError if there is no such model, or it cannot be run.
    """
    try:
        return read_model_spec(model, trainable=tuned, split_blocks=split_blocks)
    except UnknownFamily:
        pass
    except ModelError:
        if Path(model).exists() or not loading.get("allow_download"):
            raise
    from executors.models.loading import load_model

    return _counted(load_model(model, **loading), tuned, split_blocks)


def counted_spec(source: str, tuned: Trainable, split_blocks: tuple[int, ...]) -> ModelSpec:
    """Return the specification of a model that is counted without its weights, for `zosim plan`.

    Raises ModelError if there is no such configuration, or its model cannot be run.
    """
    from executors.models.spec import without_weights

    path = Path(source)
    name = path.parent.name if path.name == CONFIG_NAME else path.stem if path.is_file() else path.name
    stored = stored_quantization_in(path.parent if path.is_file() else path)
    spec = _counted(without_weights(source), tuned, split_blocks, name)
    return spec.model_copy(update={"stored": stored})


def _counted(
    model: nn.Module, tuned: Trainable, split_blocks: tuple[int, ...], name: str | None = None
) -> ModelSpec:
    from executors.models.spec import spec_of_model
    from executors.runs.adapters import attach

    if tuned != "all":
        attach(model, tuned)
    return spec_of_model(model, name, split_blocks=split_blocks)


def refuse_too_large(
    plan: Plan, programs: ProgramSet | None, *, on_cpu: bool = True, random_weights: bool = False
) -> list[str]:
    """Return warnings about this host's memory, before anything is loaded.

    Raises DoesNotFit if the buffers of the ranks of one host cannot be had.
    """
    ranks = plan.placement.ranks_by_host[0]
    # What an edited program has buffers for need not be what the plan's batch takes.
    held = [_held(made, ranks, on_cpu=on_cpu) for made in (lower_all(plan), programs) if made is not None]
    once, size, pinned = max(held, key=lambda buffers: buffers[1])
    width = FORMATS[plan.storage_dtype].element_bytes
    # While they move into their buffers, the weights of one group stand twice. All ranks map them from the same files;
    # random ones every rank makes for itself.
    moving = len(ranks) * max(group.num_parameters for group in plan.model.param_groups) * 4
    making = (len(ranks) - 1) * width * plan.model.num_parameters if once and random_weights else 0
    findings = preflight_host(size + moving + making, pinned_bytes=0 if on_cpu else pinned)
    for finding in findings:
        if finding.severity == "error":
            raise DoesNotFit(finding.message, hint=finding.hint)
    return [str(finding) for finding in findings]


def _held(programs: ProgramSet, ranks: Sequence[int], *, on_cpu: bool) -> tuple[dict[str, int], int, int]:
    """Return the buffers that ranks of one host share, by name, the bytes of all that they hold in its memory, and what one pins.

    What a rank pins for itself is rounded up, as torch does it.
    """
    spaces = {Space.HOST, Space.DEVICE} if on_cpu else {Space.HOST}
    held = [b for rank in ranks for b in programs.program_of(rank).buffers if b.space in spaces]
    once = {b.name: b.size_bytes for b in held if b.shared}
    own = sum(b.size_bytes for b in held if not b.shared)
    if not on_cpu:
        each = [pinned_by(programs.program_of(rank)) for rank in ranks]
        shared = sum(once.values())
        return once, sum(each) - (len(each) - 1) * shared, max(each)
    return once, own + sum(once.values()), 0
