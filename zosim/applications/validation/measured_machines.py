"""The machine that a row was measured on, with what its devices do per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from costmodel.devices.datasheet import in_bursts
from costmodel.rates.profile import Bound, Profile
from topology.graph import Topology
from topology.hardware import resolve
from topology.schema import DeviceSpec
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable
from zosim.config import HOST
from zosim.hardware.profiles import Profiles


@dataclass(frozen=True)
class MeasuredMachine:
    """A machine that was measured, with a profile of each of its devices."""

    name: str
    topology: Topology
    profiles: Profiles

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Its GPUs, or its CPUs where it has none."""
        return tuple(node.id for node in self.topology.compute_devices)

    @property
    def device(self) -> DeviceSpec:
        """What is known of the first of them."""
        return self.topology.device_spec(self.devices[0])

    @cached_property
    def profile(self) -> Profile:
        """What operations cost on the first of them."""
        return self.profiles.of(self.devices[0])

    @property
    def multiplies_int8(self) -> bool:
        """Whether it has a rate for products of integers of 8 bits."""
        return "matmul_rate.int8" in self.profile.values()

    @cached_property
    def burst_profile(self) -> Profile:
        """The same for what is too short for the device's power limit."""
        return in_bursts(self.profile)

    def devices_of(self, row: MeasuredRow, count: int) -> tuple[str, ...]:
        """Return the first `count` devices.

        Raises Unpredictable if there are fewer.
        """
        if count > len(self.devices):
            raise Unpredictable(
                f"the row used {count} devices, but {row['hardware']} has {len(self.devices)}"
            )
        return self.devices[:count]


@dataclass(frozen=True)
class MeasuredMachines:
    """Machines that rows name, each read once."""

    folder: Path | None = None
    profile: Path | None = None
    _known: dict[str, MeasuredMachine] = field(default_factory=dict, compare=False, repr=False)

    def of(self, name: str) -> MeasuredMachine:
        """Return the machine of that name: a file of the folder, a preset, or ``host``.

        Raises TopologyError if there is none, or it is not valid.
        """
        if name not in self._known:
            path = None if self.folder is None else self.folder / name
            topology = resolve(str(path) if path is not None and path.is_file() else name)
            profiles = Profiles(topology, path=self.profile, is_host=name == HOST)
            self._known[name] = MeasuredMachine(name, topology, profiles)
        return self._known[name]

    def renewed(self) -> MeasuredMachines:
        """Return the same machines without what their devices were found to do: their profiles are made again."""
        known = {
            name: replace(measured_machine, profiles=replace(measured_machine.profiles, _of_devices={}))
            for name, measured_machine in self._known.items()
        }
        return replace(self, _known=known)


def bounded(seconds: Callable[[Bound], float]) -> Forecast:
    """Return a forecast from what a function says for the values of a profile's constants, and for either end of them."""
    ends: Sequence[Bound] = ("central", "low", "high")
    return Forecast(*(seconds(end) for end in ends))
