"""What is asked of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Literal, TypeVar, get_args

from costmodel.formats import default_dtype
from costmodel.rates.profile import Profile
from topology.errors import PlanError
from topology.graph import Topology
from topology.validation import readable
from zosim.config import HOST, PlanConfig, filled, merge
from zosim.hardware.profiles import Profiles
from zosim.planning.split_options import SplitOptions
from zosim.plans import AXES, Axis, LowBits, Mesh, Method, Placement, Weights, naming_options

_FEW_SPEEDS = 4
"""Of devices, any of which may be left out; of more only the slowest are."""
_PRECISIONS: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")

Speed = tuple[float, float, float, float, str]
"""Of a device, the larger the faster: peak, bandwidth of its memory and of its link, size of its memory; and its name."""


class DeviceChoice:
    """The devices of one type of a topology on which ranks may run: every choice up to devices that are alike.

    Devices are alike if their data sheets and their links to the host's memory are. The fastest come first, so that the first ranks,
    whose shares of a batch are the longer ones, have them. Where there are several kinds, ranks may be on those of any of them.

    - `device_type`: GPUs where there are any, or else processors.
    - `first`: a device that comes first however fast it is, before those that the file lists behind it.

    Attributes
    ----------
    by_host : dict of str to list of str
        Devices of each host: the host with the fastest first, and its fastest.

    Examples
    --------
    Two cards that are alike stay in the order of the file:

    >>> from topology import load_preset
    >>> choice = DeviceChoice(load_preset("rtx4090-2x"), "gpu")
    >>> choice.by_host, len(list(choice.selections()))
    ({'host0': ['gpu0', 'gpu1']}, 1)
    """

    def __init__(self, topology: Topology, device_type: str, first: str | None = None) -> None:
        devices = [node.id for node in topology.compute_devices] if device_type == "gpu" else []
        devices = devices or [node.id for node in topology.of_type("cpu")]
        isomorphic = topology.isomorphic_hosts
        known: dict[str, Speed] = {}
        for device in devices:
            alike = isomorphic.representative(device)
            if alike not in known:
                known[alike] = _speed(topology, alike)
        self._speeds = {device: known[isomorphic.representative(device)] for device in devices}
        # Sorting keeps the file's order among those that are alike.
        if first is None:
            devices.sort(key=self._speeds.__getitem__, reverse=True)
        else:
            begin = devices.index(first)
            devices = [*devices[begin:], *devices[:begin]]
        hosts: dict[str, list[str]] = {}
        for device in devices:
            hosts.setdefault(topology.host_of(device).id, []).append(device)
        if first is None:
            in_order = sorted(
                hosts, key=lambda host: [self._speeds[device] for device in hosts[host]], reverse=True
            )
            hosts = {host: hosts[host] for host in in_order}
        self.by_host = hosts
        self._has_first = first is not None

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are alike."""
        return len(set(self._speeds.values())) == 1

    def selections(self) -> Iterator[dict[str, list[str]]]:
        """Yield the devices that ranks may be on, by host: all, then those of some kinds alone, unless one has to be first."""
        if self._has_first:
            yield self.by_host
            return
        speeds = sorted(set(self._speeds.values()), reverse=True)
        for num_speeds in range(len(speeds), 0, -1):
            is_few = len(speeds) <= _FEW_SPEEDS
            for chosen in combinations(speeds, num_speeds) if is_few else [tuple(speeds[:num_speeds])]:
                kept = {
                    host: [device for device in devices if self._speeds[device] in chosen]
                    for host, devices in self.by_host.items()
                }
                yield {host: devices for host, devices in kept.items() if devices}


def _speed(topology: Topology, device: str) -> Speed:
    spec = topology.device_spec(device)
    peaks = [spec.peak_dense[dtype].in_si("compute") for dtype in _PRECISIONS if dtype in spec.peak_dense]
    link = topology.route(topology.host_memory(device).id, device).bandwidth_bytes_per_s
    return max(peaks, default=0.0), spec.memory_bandwidth_bytes_per_s, link, float(spec.memory_bytes), spec.id


Blocks = Literal["resident", "offloaded", "nvme"]
AnyAxis = TypeVar("AnyAxis", bound=Axis)
ASSUMED_SIZE = ", whose size is assumed"
HOW_TO_STATE_MEMORY = (
    "state yours with --memory and --memory-bandwidth of `zosim topology import`, or in the file that "
    "`zosim topology show NAME -o FILE` writes"
)

_BLOCKS: dict[Method, tuple[Blocks, ...]] = {"mezo": ("resident",), "zo2": ("offloaded", "nvme")}
_SHARED: tuple[Method, ...] = ("pertp", "ddp", "2d")
"""Methods that share the forwards out."""


@dataclass(frozen=True)
class Hardware:
    """The hardware that a plan may use, and how fast it is."""

    topology: Topology
    name: str
    device: str  # node that the first rank runs on
    profile: Profile
    # What operations cost on the other devices, or where ranks share one; by default what they cost on `device`.
    profiles: Profiles | None = None
    # Ranks that a plan may have where nobody says how many. Several may run on one CPU, on a GPU one.
    max_ranks: int = 1
    # Whether the first rank has to be on `device`; otherwise devices are chosen by what they are, and `device` is the fastest.
    is_device_named: bool = True

    @property
    def is_on_cpus(self) -> bool:
        """Whether ranks run on processors, which several may share."""
        return self.topology.node(self.device).type == "cpu"

    @cached_property
    def device_choice(self) -> DeviceChoice:
        """The devices that ranks may run on."""
        first = self.device if self.is_device_named else None
        return DeviceChoice(self.topology, self.topology.node(self.device).type, first)

    @classmethod
    def of(
        cls,
        topology: Topology,
        name: str,
        *,
        device: str | None = None,
        max_ranks: int | None = None,
        profile: str | Path | None = None,
        num_threads: int | None = None,
        is_calibrated: bool = True,
        known: dict[Profile, Profile] | None = None,
    ) -> Hardware:
        """Return a topology as hardware to plan for.

        - `device`: of the first rank; by default the fastest, and a rank may be on every device.
        - `max_ranks`: by default one for every device, or for the one that is named.
        - `profile`: calibrated rates; by default those of this machine's calibration, or of data sheets.
        - `is_calibrated`: whether this machine's own calibration counts, not its data sheets alone.
        - `known`: profiles of other machines, of which equal ones are shared; more are added.
        """
        is_host = name == HOST and is_calibrated
        shared = {} if known is None else known
        profiles = Profiles(topology, path=profile, num_threads=num_threads, is_host=is_host, known=shared)
        all_devices = topology.compute_devices
        fastest = next(iter(DeviceChoice(topology, all_devices[0].type).by_host.values()))[0]
        first = device or fastest
        return cls(
            topology,
            name,
            first,
            profiles.of(first),
            profiles,
            max_ranks or (1 if device is not None else len(all_devices)),
            device is not None,
        )


@dataclass(frozen=True)
class Request:
    """A config to be made a plan of, on some hardware: fields that are set stay, the planner chooses the others.

    Attributes
    ----------
    config : PlanConfig
        With its model.
    hardware : Hardware
        Machine, device and profile to plan for.
    split_options : SplitOptions
        Where a mesh of several stages may split the model, and with which codecs.
    notes : tuple of str
        What the config left open and was filled in, in words.
    """

    config: PlanConfig
    hardware: Hardware
    split_options: SplitOptions = field(default_factory=SplitOptions)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: PlanConfig, hardware: Hardware, split_options: SplitOptions) -> Request:
        """Return a request, with the format of the weights filled in where the config sets none.

        The format is the checkpoint's, if the device has units for it.

        Parameters
        ----------
        config : PlanConfig
            With its model.
        hardware : Hardware
            Machine, device and profile to plan for.
        split_options : SplitOptions
            Where a mesh of several stages may split the model.
        """
        if config.weights.given("dtype") is not None:
            return cls(config, hardware, split_options)
        device = hardware.topology.device_spec(hardware.device)
        dtype, why = default_dtype(config.spec.checkpoint_dtype, device)
        note = f"weights in {dtype} ({why}); --dtype sets another format"
        return cls(merge(PlanConfig(weights=Weights(dtype=dtype)), config), hardware, split_options, (note,))

    def __post_init__(self) -> None:
        # The class is frozen; a model that is quantized already decides how its weights are kept.
        object.__setattr__(self, "config", filled(self.config))
        self._refuse_missing_kernel()
        mesh, search = self.config.given("mesh"), self.config.search
        if mesh is not None and search.ranks not in (None, mesh.world_size):
            raise PlanError(
                f"--mesh {mesh.describe()} has {mesh.world_size} ranks, but --ranks is {search.ranks}",
                hint="leave --ranks out",
            )
        if mesh is not None and not self.admits(mesh):
            shape = mesh.describe() or "one rank"
            raise PlanError(
                f"--method {self.config.search.method} does not allow {shape}",
                hint="leave one of them out; pertp uses ranks along perturb, ddp along data, 2d along both, "
                "sparq along stage",
            )
        if (
            self.split_options.split_points
            and self.config.search.method != "sparq"
            and (mesh is None or not mesh.is_staged)
        ):
            raise PlanError(
                f"--split-points {', '.join(self.split_options.split_points)} needs several stages",
                hint=f"add --mesh stage={len(self.split_options.split_points) + 1}",
            )

    def over(self, config: PlanConfig) -> Request:
        """Return the request with another config laid over its own."""
        return replace(self, config=merge(self.config, config))

    @property
    def max_ranks(self) -> int:
        """Most ranks of a plan."""
        return self.config.search.ranks or self.hardware.max_ranks

    def _refuse_missing_kernel(self) -> None:
        """Refuse products of e4m3 matrices on CPUs, and on GPUs whose data sheet has none, or count on others where that is allowed."""
        low_bits, spec = self.axis(LowBits), self.hardware.topology.device_spec(self.hardware.device)
        if low_bits.product != "scaled_mm" or (spec.type == "gpu" and "fp8" in spec.peak_dense):
            return
        # Where that is allowed, weights are multiplied as numbers.
        if not low_bits.may_dequantize:
            raise PlanError(
                f"{spec.name} has no float8 matrix units"
                + ("(its data sheet has no fp8 peak)" if spec.type == "gpu" else ""),
                hint="use --kernel dequantize, or --activation-format int8-token with an integer format",
            )
        object.__setattr__(
            self, "config", merge(self.config, PlanConfig(low_bits=LowBits(kernel="dequantize")))
        )

    def axis(self, axis_type: type[AnyAxis]) -> AnyAxis:
        """Return an axis with the fields that are set, and defaults for the others.

        Parameters
        ----------
        axis_type : type
            Class of the axis, such as :class:`~zosim.plans.Residency`.

        Raises
        ------
        PlanError
            If they contradict each other.
        """
        name = next(name for name, axis in AXES.items() if axis is axis_type)
        with naming_options(), readable("the plan", PlanError, model=axis_type):
            axis: AnyAxis = getattr(self.config, name).complete()
        return axis

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Where blocks may live between their uses."""
        return _BLOCKS.get(self.config.search.method, get_args(Blocks))

    @property
    def seeks_stages(self) -> bool:
        """Whether meshes of several stages are to be found."""
        is_open = self.config.given("mesh") is None and self.max_ranks > 1
        return is_open and self.config.search.method in ("auto", "sparq")

    def admits(self, mesh: Mesh) -> bool:
        """Whether `mesh` is one of the method's."""
        method = self.config.search.method
        if method in ("auto", "sparq"):
            return method == "auto" or mesh.is_staged
        return not mesh.is_staged and mesh.shared_by == (method if method in _SHARED else "")

    def device_limit_bytes(self, device: str) -> int:
        """Return the memory that a rank may take on a device."""
        has, limit = (
            self.hardware.topology.device_spec(device).memory_bytes,
            self.config.search.max_device_bytes,
        )
        return has if limit is None else min(has, limit)

    def host_memories(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the memories that ranks on these devices of one host have: all of it, or of CPUs those next to them."""
        topology = self.hardware.topology
        near = {topology.host_memory(device).id for device in devices}
        # A GPU's copies reach all NUMA domains; ranks on CPUs are planned for the memory next to them.
        on_gpus = {topology.node(device).type for device in devices} == {"gpu"}
        listed = [memory.id for memory in topology.memories_of(devices[0])]
        return tuple(memory for memory in listed if on_gpus or memory in near)

    def host_limit_bytes(self, devices: tuple[str, ...]) -> int:
        """Return the memory that ranks on these devices of one host may take of it."""
        topology, limit = self.hardware.topology, self.config.search.max_host_bytes
        has = sum(topology.node(memory).memory_bytes for memory in self.host_memories(devices))
        return has if limit is None else min(has, limit)

    def disk_limit_bytes(self, devices: tuple[str, ...]) -> float:
        """Return what ranks on these devices of one host may keep on its drives: no limit where one does not say its capacity."""
        disks = self.hardware.topology.disks_of(devices[0])
        is_known = all(disk.capacity is not None for disk in disks)
        return sum(disk.memory_bytes for disk in disks) if is_known else inf

    def about_host_memory(self, devices: tuple[str, ...]) -> str:
        """Return what the limit of a host's memory is made of, in words: its NUMA domains, and whether they are assumed.

        Parameters
        ----------
        devices : tuple of str
            Ids of the devices of the plan.
        """
        topology, memories = self.hardware.topology, self.host_memories(devices)
        if self.config.search.max_host_bytes == self.host_limit_bytes(devices):
            return "--max-host-memory"
        sizes = [topology.node(memory).capacity for memory in memories]
        assumed = any(size is not None and size.basis == "assumed" for size in sizes)
        near, where = "", memories[0] if len(memories) == 1 else f"{len(memories)} NUMA domains"
        if len(topology.memories_of(devices[0])) > len(memories):
            near = ", next to its processor" if len(memories) == 1 else ", those next to its processors"
        return f"{where}{near}{ASSUMED_SIZE if assumed else ''}"


def profiles_of(
    placement: Placement, profile: Profile, profiles: Profiles | None = None
) -> tuple[Profile, ...]:
    """Return what operations cost on every rank's device: as `profiles` say, or else `profile`."""
    if profiles is None:
        return (profile,) * placement.world_size
    # Ranks on one CPU share its cores, which changes what an operation costs.
    sharing = Counter(placement.devices)
    return tuple(profiles.of(device, sharing[device]) for device in placement.devices)
