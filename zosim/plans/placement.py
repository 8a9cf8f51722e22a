"""The devices that a plan runs on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from topology.errors import PlanError
from zosim.plans.setting import Axis, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


class Placement(Axis):
    """The hardware that one plan uses.

    Attributes
    ----------
    topology : str
        Name of the topology that it was planned for.
    devices : tuple of str
        Node of each rank's device, in rank order.
    hosts : tuple of str
        Host of each rank's device, in rank order; empty if all are on one.
    """

    topology: Annotated[str, Field(max_length=4096), Setting(help="Set by --hardware.")]
    devices: Annotated[tuple[str, ...], Field(min_length=1), Setting(help="Set by --device and --ranks.")]
    hosts: Annotated[tuple[str, ...], Setting(help="Set by the topology.")] = ()

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield the number of hosts of `plan`, and its devices if they are not the first ones."""
        del plan
        if self.world_size == 1:
            return
        hosts, devices = len(self.ranks_by_host), self.devices
        if hosts > 1:
            yield f"{hosts} hosts"
        if len(set(devices)) == 1:
            yield f"all on {devices[0]}"
        elif hosts == 1:
            yield (
                f"on {devices[0]}..{devices[-1]}" if len(devices) > 2 else f"on {devices[0]} and {devices[1]}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def is_on_gpus(self) -> bool:
        """Whether the devices are GPUs by their names, ``gpu0`` or ``node1/gpu0``; all of a plan are of one kind."""
        return self.devices[0].rpartition("/")[2].startswith("gpu")

    @property
    def ranks_by_host(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host, hosts in the order of their first rank."""
        return _ranks_by_host(self.hosts or ("",) * len(self.devices))

    @model_validator(mode="after")
    def _every_device_has_its_host(self) -> Placement:
        if self.hosts and len(self.hosts) != self.world_size:
            raise PlanError(
                f"{len(self.hosts)} hosts are given for {self.world_size} devices",
                hint="give one host per device",
            )
        return self


# Asked for again and again, of a thousand ranks. Not kept by the model, whose copies with other fields would have it.
@lru_cache(64)
def _ranks_by_host(hosts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return tuple(map(tuple, by_host.values()))
