"""The plan of ``zosim run``: a file's, or one made on the spot, with the options that were given laid over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from costmodel.configs import Trainable, read_model_spec
from costmodel.formats import FORMATS, default_dtype
from costmodel.memory import preflight_host
from costmodel.model_spec import ModelSpec
from executors.devices import accelerator_kind, check_device, num_devices_of
from executors.ranks.mesh import fastest_plan, mesh_named, spread, uncut
from topology.errors import DoesNotFit, ModelError, PlanError, UnknownFamily, ZosimError
from topology.hardware import resolve
from topology.validation import readable
from zosim.hardware.profiles import Profiles
from zosim.instructions import Space
from zosim.lowering import lower_all
from zosim.planning.footprint import pinned_by
from zosim.planning.planner import Request, choose
from zosim.planning.request import with_stored_codes, without_any
from zosim.plans import ANY, AXES, Mesh, Method, Plan, Residency, Split, fields_of
from zosim.program_set import ProgramSet
from zosim.stated import Stated

if TYPE_CHECKING:
    from topology.graph import Topology

HOST = "host"

Longest = Callable[[], int]
"""Reads the data, which takes a while, and is called only where nothing else says how long sequences are."""

_FREE_AXES = tuple(name for name in AXES if name not in ("mesh", "placement", "split"))
"""Axes whose fields options state one by one."""

_SHARING = ("pertp", "ddp", "2d", "sparq")
"""Methods that share a step out among ranks, wherever blocks reside."""


@dataclass(frozen=True)
class Asked:
    """What the options stated.

    Attributes
    ----------
    stated : mapping
        Fields by section: of the plan, its axes among them, and of the run.
    method : str or None
    ranks : int or None
        How many there are to be, where the planner chooses their mesh.
    allow_lossy : bool
    max_device_bytes, max_host_bytes : int or None
        What a plan that is made on the spot may take.
    device : str
        ``"cpu"`` or a CUDA device.
    num_threads : int
    """

    stated: Stated = field(default_factory=dict)
    method: str | None = None
    ranks: int | None = None
    allow_lossy: bool = False
    max_device_bytes: int | None = None
    max_host_bytes: int | None = None
    device: str = "cpu"
    num_threads: int = 1

    def given(self, axis: str) -> dict[str, Any]:
        """Return the fields of an axis that are stated; formats follow that of the weights unless they are, too."""
        fields = dict(self.stated.get(axis, {}))
        follows = {"forward": "compute_dtype", "residency": "transfer_dtype"}.get(axis)
        if follows is not None and "dtype" in self.stated.get("weights", {}):
            fields.setdefault(follows, None)
        return fields

    @property
    def residency(self) -> str | None:
        """Where blocks are to reside."""
        return self.stated.get("residency", {}).get("blocks")

    @property
    def mesh(self) -> dict[str, Any] | None:
        """The mesh that is named."""
        return self.stated.get("mesh")

    @property
    def cuts(self) -> tuple[str, ...]:
        """Where the model is cut; empty for even cuts inside blocks."""
        return tuple(self.stated.get("split", {}).get("cuts", ()))

    @property
    def sizes(self) -> dict[str, int]:
        """Batch and sequence length, those that are stated."""
        return self.stated.get("plan", {})

    @property
    def placing(self) -> Method | None:
        """What decides where one rank's blocks reside: the planner's method, if it is one."""
        return None if self.method in _SHARING else cast("Method | None", self.method)

    @property
    def seeks_mesh(self) -> bool:
        """Whether the planner is to find the mesh of a number of ranks; of stages, there is but one."""
        return self.ranks is not None and self.mesh is None and not self.cuts and self.method != "sparq"

    @property
    def wanted_mesh(self) -> dict[str, Any] | None:
        """The mesh that the options name, or that the method means."""
        if self.mesh is not None:
            mesh = Mesh(**self.mesh)
            if self.ranks not in (None, mesh.world_size):
                raise PlanError(
                    f"--mesh {mesh.describe()} has {mesh.world_size} ranks, not {self.ranks}",
                    hint="leave --ranks out",
                )
            return self.mesh
        if self.seeks_mesh:
            return None
        if self.cuts and self.method in (None, "sparq"):
            return {"stage": len(self.cuts) + 1}
        num_devices = self.ranks or _num_devices(self.device)
        return mesh_named(self.method, num_devices) if self.method in _SHARING else None

    def wanted_cuts(self, num_blocks: int, base: Plan | None) -> tuple[str, ...]:
        """Return where the model is to be cut: where the options say, or the plan that they are laid over, or evenly.

        Parameters
        ----------
        num_blocks : int
        base : Plan, optional
        """
        mesh = self.wanted_mesh
        num_stages = base.mesh.stage if mesh is None and base is not None else (mesh or {}).get("stage", 1)
        if self.cuts:
            return self.cuts
        known = () if base is None else base.split.cuts
        if len(known) == num_stages - 1 or (num_stages == 1 and base is not None and base.split.is_lossy):
            return known
        return even_cuts(num_blocks, num_stages) if num_stages > 1 else ()


def plan_for(asked: Asked, model: ModelSpec, base: Plan | None, longest: Longest) -> Plan:
    """Return the plan to run.

    Parameters
    ----------
    asked : Asked
    model : ModelSpec
        Of the model at hand.
    base : Plan, optional
        What options are laid over.
    longest : callable
        Returns the tokens of the longest example, the sequence length of a plan that is made on the spot.

    Raises
    ------
    PlanError
        If the options contradict each other, or lose precision without leave.
    """
    if base is None:
        asked = replace(asked, stated=with_stored_codes(asked.stated, model))
        asked = replace(asked, stated=_with_dtype(asked, model))
    if asked.seeks_mesh or asked.placing is not None or (base is None and asked.residency is None):
        start = _planned(asked, model, base, longest)
    else:
        start = base or _named_placement(asked, model, longest)
        if ANY in asked.given("weights").values():
            raise PlanError(
                "--weights any leaves the choice to the planner, which does not make this plan",
                hint="say serial or copies, or add --method auto",
            )
    plan = _laid_over(start, asked, model)
    if plan.num_stages == 1 and not plan.split.is_lossy and asked.cuts:
        raise PlanError(
            f"--cut {','.join(asked.cuts)} with one stage changes nothing: nothing crosses, and no codec rounds",
            hint="add --codec, or leave out --mesh",
        )
    if not plan.cuts and _codecs(asked):
        raise PlanError(
            "codecs are for what crosses a cut, and the plan has none",
            hint="add --mesh stage=2, or --mesh stage=1 --cut block.N.mlp for one process",
        )
    known_to_lose = base is not None and base.split == plan.split
    if plan.split.is_lossy and not (asked.allow_lossy or known_to_lose):
        raise PlanError(
            f"codec {plan.split.codec} (residual stream: {plan.split.residual_codec}) changes what crosses a cut, and with "
            "it losses and updates",
            hint="add --allow-lossy if that is meant; `zosim probe` measures what is lost",
        )
    may_lose = asked.allow_lossy or (base is not None and base.is_transfer_lossy)
    if plan.is_transfer_lossy and plan.is_offloaded and not may_lose:
        raise PlanError(
            f"transfer format {plan.transfer_dtype} is narrower than storage format {plan.storage_dtype} "
            "and loses precision at every offload",
            hint="add --allow-lossy if that is meant",
        )
    return plan


def _with_dtype(asked: Asked, model: ModelSpec) -> Stated:
    """Return what is stated, and a format of the weights if none is; on a CPU that is the plan's own default."""
    if asked.device == "cpu":
        return asked.stated
    try:
        topology, node = host_node(asked.device)
    except PlanError:  # torch may find a device that cannot be detected: nothing is known of its units
        dtype = model.checkpoint_dtype or "bfloat16"
    else:
        dtype, _ = default_dtype(model.checkpoint_dtype, topology.device_spec(node))
    return {**asked.stated, "weights": {"dtype": dtype} | asked.stated.get("weights", {})}


def _laid_over(base: Plan, asked: Asked, model: ModelSpec) -> Plan:
    """Return `base` with every option that was given in place of its own field."""
    data = base.model_dump(mode="json")
    data["model"] = model.model_dump(mode="json")
    data |= asked.sizes
    if asked.residency is not None and asked.residency != base.residency.blocks:
        if asked.placing is not None:
            raise PlanError(
                f"--method {asked.method} places the blocks otherwise than --residency {asked.residency}",
                hint="one of the two is enough",
            )
        data["residency"] = {"transfer_dtype": base.residency.transfer_dtype}
        data["schedule"] = _schedule_beside(asked.residency, asked)
    for axis in _FREE_AXES:
        data[axis] = data[axis] | without_any(asked.given(axis))
    data["split"] |= _codecs(asked)
    cuts = asked.wanted_cuts(model.num_blocks, base)
    if list(cuts) != list(data["split"].get("cuts", ())):
        data["split"] |= {"cuts": cuts, "densities": ()}
    if (mesh := asked.wanted_mesh) is not None:
        spread(data, mesh)
    with readable("options of zosim run", PlanError, model=Plan):
        return Plan.model_validate(data)


def _codecs(asked: Asked) -> dict[str, Any]:
    return {name: value for name, value in asked.given("split").items() if name != "cuts"}


def _num_devices(device: str) -> int:
    """Return the devices of a kind; ranks on a CPU share it."""
    from executors.devices import num_devices_of

    return 1 if device == "cpu" else num_devices_of(device.partition(":")[0])


def _schedule_beside(residency: str, asked: Asked) -> dict[str, Any]:
    """Return how blocks are visited that reside there: an offloaded one is updated at its next visit, text is generated by all."""
    if asked.given("forward").get("num_new_tokens") and residency == "resident":
        return {"traversal": "sweep", "update": "immediate"}
    return {"traversal": "blockwise", "update": "delayed" if residency == "offloaded" else "immediate"}


def _named_placement(asked: Asked, model: ModelSpec, longest: Longest) -> Plan:
    """Return a plan whose residency was named."""
    node = "cpu0" if asked.device == "cpu" else "gpu0"
    residency = asked.residency or "resident"
    with readable("options of zosim run", PlanError, model=Plan):
        return Plan.model_validate(
            {
                "model": model.model_dump(mode="json"),
                "placement": {"topology": HOST, "devices": [node]},
                "batch": asked.sizes.get("batch", 1),
                "seq": asked.sizes.get("seq") or longest(),
                "residency": {"blocks": residency},
                "schedule": _schedule_beside(residency, asked),
                "low_bits": asked.given("low_bits") if model.stored is not None else {},
            }
        )


def _planned(asked: Asked, model: ModelSpec, base: Plan | None, longest: Longest) -> Plan:
    """Return the fastest plan that fits this machine and computes what was asked."""
    topology, node = host_node(asked.device)
    profiles = Profiles(topology, num_threads=asked.num_threads, is_host=True)
    kept = {} if base is None else base.model_dump(mode="json")
    fixed = {
        axis: {
            name: kept[axis][name]
            for name, field in fields_of(AXES[axis]).items()
            if kept and not field.setting.planned
        }
        | asked.given(axis)
        for axis in _FREE_AXES
    }
    if not asked.seeks_mesh:
        # Where one rank's blocks reside is the method's; options about their moving are laid over its plan.
        names = [name for name, field in fields_of(Residency).items() if not field.setting.planned]
        fixed["residency"] = {name: value for name, value in fixed["residency"].items() if name in names}
    # What a run tunes, codes or numbers, is nothing that --allow-lossy alone says.
    if model.stored is None:
        fixed["low_bits"].setdefault("weights", "none")
    with readable("options of zosim run", PlanError):
        request = Request(
            model=uncut(model),
            topology=topology,
            hardware=HOST,
            device=node,
            profile=profiles.of(node),
            profiles=profiles,
            batch=asked.sizes.get("batch") or kept.get("batch", 1),
            seq=asked.sizes.get("seq") or kept.get("seq") or longest(),
            method=cast("Method", asked.method or "auto") if asked.seeks_mesh else asked.placing or "auto",
            max_device_bytes=asked.max_device_bytes,
            max_host_bytes=asked.max_host_bytes,
            allow_lossy=asked.allow_lossy,
            fixed=fixed,
        )
        if not asked.seeks_mesh:
            return choose(request).chosen.plan
        return fastest_plan(request, asked.ranks or 1)


def planned_device(plan: Plan) -> str:
    """Return the torch device that a plan is for: the CPU, or the kind of accelerator that torch finds, else ``cuda``.

    It has a number where a plan of one rank for this machine names another GPU than the first.
    """
    placement = plan.placement
    first = placement.devices[0]
    kind = "gpu" if placement.is_on_gpus else "cpu"
    if placement.topology != HOST:
        # A machine's own names need not say what its nodes are; where the plan was made elsewhere they have to.
        with suppress(ZosimError):
            kind = next((n.kind for n in resolve(placement.topology).nodes if n.id == first), kind)
    if kind != "gpu":
        return "cpu"
    accelerator = accelerator_kind()
    number = first.rpartition("/")[2].removeprefix("gpu")
    is_other = placement.world_size == 1 and placement.topology == HOST and number.isdecimal() and int(number)
    return f"{accelerator}:{number}" if is_other else accelerator


def refuse_absent(device: str, why: str) -> None:
    """Refuse a device that nobody named on the command line, where torch finds none of its kind.

    Parameters
    ----------
    device : str
    why : str
        What says that the run belongs there.

    Raises
    ------
    PlanError
    """
    kind = device.partition(":")[0]
    if kind != "cpu" and not num_devices_of(kind):
        raise PlanError(
            f"{why}, and torch {torch.__version__} finds no {kind} device here",
            hint="--device cpu runs it on the CPU anyway; its predictions remain those of the hardware that it was planned for",
        )


def where_it_runs(plan: Plan, device: str) -> str:
    """Return in words on which device the ranks of a run are, and on which they were planned to be."""
    devices, num_ranks = dict.fromkeys(plan.placement.devices), plan.placement.world_size
    named = list(devices)
    planned = " and ".join(named) if len(named) < 3 else f"{named[0]}..{named[-1]}"
    ranks = "" if num_ranks == 1 else f"{num_ranks} ranks, "
    return f"{ranks}on {device}, planned for {planned} of {plan.placement.topology}"


def host_node(device: str) -> tuple[Topology, str]:
    """Return this machine, and the node of it that stands for a torch device.

    Raises
    ------
    PlanError
        If there is none.
    """
    check_device(device)
    topology = resolve(HOST)
    nodes = [node.id for node in topology.of_kind("cpu" if device == "cpu" else "gpu")]
    index = int(device.partition(":")[2] or 0)
    if index >= len(nodes):
        raise PlanError(f"there is no device {device}: this machine shows {len(nodes)} of that kind")
    return topology, nodes[index]


def spec_for(model: str, tuned: Trainable, asked: Asked, base: Plan | None, **loading: Any) -> ModelSpec:
    """Return what is known of a model, its blocks cut as is wanted."""
    spec = _spec_for(model, tuned, (), **loading)
    cuts = asked.wanted_cuts(spec.num_blocks, base)
    cut_blocks = Split(cuts=cuts).cut_blocks
    if not cuts and base is not None and base.directions.draws_by_halves:
        cut_blocks = base.model.cut_blocks
    return _spec_for(model, tuned, cut_blocks, **loading) if cut_blocks else spec


def even_cuts(num_blocks: int, num_stages: int) -> tuple[str, ...]:
    """Return cuts inside blocks, behind their activation functions, that part the blocks as evenly as can be.

    Examples
    --------
    >>> even_cuts(12, 3)
    ('block.3.mlp', 'block.7.mlp')
    """
    return tuple(f"block.{max(0, num_blocks * i // num_stages - 1)}.mlp" for i in range(1, num_stages))


def _spec_for(model: str, tuned: Trainable, cut_blocks: tuple[int, ...], **loading: Any) -> ModelSpec:
    """Return what the configuration tells of a model, or where that does not, the model itself.

    Raises
    ------
    ModelError
        If there is no such model, or it cannot be run.
    """
    try:
        return read_model_spec(model, trainable=tuned, cut_blocks=cut_blocks)
    except UnknownFamily:
        pass
    except ModelError:
        if Path(model).exists() or not loading.get("allow_download"):
            raise
    from executors.models.loading import load_model
    from executors.models.spec import spec_of_model
    from executors.runs.adapters import attach

    loaded = load_model(model, **loading)
    if tuned != "all":
        attach(loaded, tuned)
    return spec_of_model(loaded, cut_blocks=cut_blocks)


def refuse_too_large(
    plan: Plan, programs: ProgramSet | None, *, on_cpu: bool = True, random_weights: bool = False
) -> list[str]:
    """Return warnings about this host's memory, before anything is loaded.

    Raises
    ------
    DoesNotFit
        If the buffers of the ranks of one host cannot be had.
    """
    ranks = plan.placement.ranks_by_host[0]
    # What an edited program has buffers for need not be what the plan's batch takes.
    held = [_held(made, ranks, on_cpu=on_cpu) for made in (lower_all(plan), programs) if made is not None]
    once, size, pinned = max(held, key=lambda buffers: buffers[1])
    width = FORMATS[plan.storage_dtype].element_bytes
    # While they move into their buffers, the weights of one group stand twice. All ranks map them from the same files;
    # random ones every rank makes for itself.
    moving = len(ranks) * max(group.num_parameters for group in plan.model.groups) * 4
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
    held = [b for rank in ranks for b in programs.program_of(rank).buffers if on_cpu or b.space is Space.HOST]
    once = {b.name: b.size_bytes for b in held if b.shared}
    own = sum(b.size_bytes for b in held if not b.shared)
    if not on_cpu:
        each = [pinned_by(programs.program_of(rank)) for rank in ranks]
        shared = sum(once.values())
        return once, sum(each) - (len(each) - 1) * shared, max(each)
    return once, own + sum(once.values()), 0
