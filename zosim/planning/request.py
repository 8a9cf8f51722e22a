"""What is asked of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from costmodel.model_spec import ModelSpec
from costmodel.profile import Profile
from topology.errors import PlanError
from topology.graph import Topology
from topology.validation import readable
from zosim.hardware.profiles import Profiles
from zosim.planning.cuts import Cutting
from zosim.plans import ANY, AXES, Axis, LowBits, Mesh, Method, Placement

Blocks = Literal["resident", "offloaded"]
AnyAxis = TypeVar("AnyAxis", bound=Axis)
ASSUMED_SIZE = ", whose size is assumed"
HOW_TO_STATE_MEMORY = (
    "state yours with --memory and --memory-bandwidth of `zosim topology import`, or in the file that "
    "`zosim topology show NAME -o FILE` writes"
)

_BLOCKS: dict[Method, tuple[Blocks, ...]] = {"mezo": ("resident",), "zo2": ("offloaded",)}
_SHARED: tuple[Method, ...] = ("pertp", "ddp", "2d")
"""Methods that share the forwards out."""


@dataclass(frozen=True)
class Request:
    """What is asked of the planner.

    Attributes
    ----------
    model : ModelSpec
    topology : Topology
    hardware : str
        How `topology` was named, so that a plan can find it again.
    device : str
        Node that the first rank runs on.
    profile : Profile
        What operations cost there.
    batch, seq : int
    method : str
        ``"mezo"`` keeps all blocks on one device, ``"zo2"`` offloads them from one; ``"pertp"``, ``"ddp"`` and
        ``"2d"`` share the forwards of a step out among several, with blocks resident or offloaded; ``"auto"`` tries
        all of these. ``"sparq"`` cuts the model into stages, perhaps with the forwards shared out as well, which ``"auto"``
        tries, too, where several devices may be used.
    mesh : Mesh or None
        The only mesh to plan for; by default any that `method` names and `max_ranks` allows.
    max_ranks : int
        Devices that a plan may use. Several ranks may run on one CPU, on a GPU one.
    profiles : Profiles or None
        What operations cost on the other devices, or where ranks share one; by default what they cost on `device`.
    max_device_bytes, max_host_bytes : int or None
        Limits below what the hardware has.
    allow_lossy : bool
        Whether plans that lose precision (narrower transfers, codecs, weights in few bits) may be considered.
    cutting : Cutting
        Where a mesh of several stages may cut the model, and with which codecs.
    fixed : mapping
        Values of fields that every plan must have, by axis and name, such as ``{"weights": {"dtype": "float16"}}``. What the
        planner would choose gives way to them, which is how an ablation is asked for; what it does not choose, such as the
        estimator and the formats, has its defaults without them. :data:`~zosim.plans.ANY` in place of a value leaves the
        choice to the planner, although the numbers differ in roundings.
    """

    model: ModelSpec
    topology: Topology
    hardware: str
    device: str
    profile: Profile
    batch: int
    seq: int
    method: Method = "auto"
    mesh: Mesh | None = None
    max_ranks: int = 1
    profiles: Profiles | None = None
    max_device_bytes: int | None = None
    max_host_bytes: int | None = None
    allow_lossy: bool = False
    cutting: Cutting = field(default_factory=Cutting)
    fixed: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixed", with_stored_codes(self.fixed, self.model))
        self._refuse_missing_kernel()
        if self.mesh is not None and not self.admits(self.mesh):
            shape = self.mesh.describe() or "one rank"
            raise PlanError(
                f"--method {self.method} is no plan for {shape}",
                hint="leave one of the two out; pertp has several ranks along perturb, ddp along data, 2d along both, "
                "sparq several stages",
            )
        if self.cutting.cuts and self.method != "sparq" and (self.mesh is None or not self.mesh.is_staged):
            raise PlanError(
                f"--cut {', '.join(self.cutting.cuts)} without stages",
                hint=f"add --mesh stage={len(self.cutting.cuts) + 1}",
            )
        if self.max_ranks < 1:
            raise PlanError(f"--ranks {self.max_ranks} leaves no device", hint="use at least 1")

    def _refuse_missing_kernel(self) -> None:
        """Refuse products of e4m3 matrices on CPUs, and on GPUs whose data sheet has none, or count on others where that is allowed."""
        low_bits, spec = self.axis(LowBits), self.topology.device_spec(self.device)
        if low_bits.product != "scaled_mm" or (spec.kind == "gpu" and "fp8" in spec.peak_dense):
            return
        if not low_bits.may_dequantise:
            raise PlanError(
                f"{spec.name} has no product of e4m3 matrices"
                + (" (its data sheet states no peak of fp8)" if spec.kind == "gpu" else ""),
                hint="use --kernel dequantise, or --activation-format int8-token with an integer format",
            )
        fixed = {**self.fixed, "low_bits": {**self.fixed.get("low_bits", {}), "kernel": "dequantise"}}
        object.__setattr__(self, "fixed", fixed)

    def axis(self, kind: type[AnyAxis]) -> AnyAxis:
        """Return an axis with the fields that are fixed, and defaults.

        Raises
        ------
        PlanError
            If a field is unknown, or its value is.
        """
        name = next(name for name, axis in AXES.items() if axis is kind)
        with readable("what the plan is asked to fix", PlanError, model=kind):
            return kind.model_validate(without_any(self.fixed.get(name, {})))

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Where blocks may live between their uses."""
        return _BLOCKS.get(self.method, ("resident", "offloaded"))

    @property
    def seeks_stages(self) -> bool:
        """Whether meshes of several stages are to be found."""
        return self.mesh is None and self.max_ranks > 1 and self.method in ("auto", "sparq")

    def admits(self, mesh: Mesh) -> bool:
        """Whether `mesh` is one of the method's."""
        if self.method in ("auto", "sparq"):
            return self.method == "auto" or mesh.is_staged
        return not mesh.is_staged and mesh.shared_by == (self.method if self.method in _SHARED else "")

    def device_limit_bytes(self, device: str) -> int:
        """Return the memory that a rank may take on a device."""
        has = self.topology.device_spec(device).memory_bytes
        return has if self.max_device_bytes is None else min(has, self.max_device_bytes)

    def host_memories(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the memories that ranks on these devices of one host have: all of it, or of CPUs those next to them."""
        near = {self.topology.host_memory(device).id for device in devices}
        kinds = {self.topology.node(device).kind for device in devices}
        return tuple(
            memory.id
            for memory in self.topology.memories_of(devices[0])
            if memory.id in near or kinds == {"gpu"}
        )

    def host_limit_bytes(self, devices: tuple[str, ...]) -> int:
        """Return the memory that ranks on these devices of one host may take of it."""
        has = sum(self.topology.node(memory).memory_bytes for memory in self.host_memories(devices))
        return has if self.max_host_bytes is None else min(has, self.max_host_bytes)

    def about_host_memory(self, devices: tuple[str, ...]) -> str:
        """Return what the limit of a host's memory is made of, in words: its NUMA domains, and whether they are assumed."""
        memories = self.host_memories(devices)
        if self.max_host_bytes is not None and self.host_limit_bytes(devices) == self.max_host_bytes:
            return "--max-host-memory"
        sizes = [self.topology.node(memory).capacity for memory in memories]
        assumed = any(size is not None and size.basis == "assumed" for size in sizes)
        where = memories[0] if len(memories) == 1 else f"{len(memories)} NUMA domains"
        beyond = len(self.topology.memories_of(devices[0])) - len(memories)
        near = (
            ", those next to its processors"
            if beyond and len(memories) > 1
            else ", next to its processor"
            if beyond
            else ""
        )
        return f"{where}{near}{ASSUMED_SIZE if assumed else ''}"


def with_stored_codes(fixed: Mapping[str, Mapping[str, Any]], model: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return fields that are fixed, by axis, and beside them how a model that is quantised already keeps its weights."""
    filled = {axis: dict(fields) for axis, fields in fixed.items()}
    if model.stored is not None:
        filled["low_bits"] = {**model.stored.fields, **filled.get("low_bits", {})}
    return filled


def without_any(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields with a value of their own, which :data:`~zosim.plans.ANY` is not."""
    return {name: value for name, value in fields.items() if value != ANY}


def profiles_of(
    placement: Placement, profile: Profile, profiles: Profiles | None = None
) -> tuple[Profile, ...]:
    """Return what operations cost on every rank's device: as `profiles` say, or else `profile`."""
    if profiles is None:
        return (profile,) * placement.world_size
    sharing = Counter(placement.devices)
    return tuple(profiles.of(device, sharing[device]) for device in placement.devices)
