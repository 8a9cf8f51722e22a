"""Which profile a prediction uses: the file named, else this machine's calibration, else the data sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from costmodel.devices.datasheet import datasheet_profile
from costmodel.rates.profile import Profile, load_profile
from topology.errors import ProfileError, TopologyError
from topology.graph import Topology
from zosim.cache import cache_directory
from zosim.console import stderr


def host_profile_path(device_name: str, num_threads: int) -> Path:
    """Return where the calibration of a device of this machine is kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return cache_directory() / "profiles" / f"{slug}-{num_threads}.json"


def undisturbed_host_profile(device_name: str, num_threads: int) -> Profile | None:
    """Return the kept calibration of a device of this machine if there is one that can be read and that nothing disturbed."""
    path = host_profile_path(device_name, num_threads)
    try:
        profile = load_profile(path) if path.exists() else None
    except ProfileError:
        return None
    return None if profile is None or profile.is_disturbed else profile


def save_host_profile(profile: Profile, *, keep_disturbed: bool = False) -> Path | None:
    """Keep the calibration of a device of this machine for later commands, and return where, or None if it is not kept.

    - `profile`: not kept if other processes disturbed too much of its calibration.
    - `keep_disturbed`: whether to keep it even then; never in place of one that nothing disturbed.
    """
    path = host_profile_path(profile.device_name, profile.num_threads)
    if profile.is_disturbed and (
        not keep_disturbed or undisturbed_host_profile(profile.device_name, profile.num_threads)
    ):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    profile.save(partial)
    partial.replace(path)
    return path


@dataclass(frozen=True)
class Profiles:
    """What operations cost on every device of a topology."""

    topology: Topology
    # path, num_threads, is_host: as for `profile_for`.
    path: str | Path | None = None
    num_threads: int | None = None
    is_host: bool = False
    before: Topology | None = None  # the machine before its figures changed, which calibrated rates are of
    # Those made before, also of other machines: equal ones are one object, so that machines with them are seen to be alike.
    known: dict[Profile, Profile] = field(default_factory=dict, compare=False, repr=False)
    _of_devices: dict[object, Profile] = field(default_factory=dict, compare=False, repr=False)

    def of(self, device: str, num_ranks: int = 1) -> Profile:
        """Return what operations cost on a device that `num_ranks` ranks share.

        Ranks on one CPU have a part of its cores each, unless the number of threads was named.

        Raises ProfileError or TopologyError as for :func:`profile_for`.
        """
        spec = self.topology.device_spec(device)
        threads = self.num_threads
        if spec.type == "cpu" and threads is None and num_ranks > 1:
            threads = max(1, spec.num_cores // num_ranks)
        key = (self.topology.isomorphic_hosts.representative(device), threads)
        if key not in self._of_devices:
            made = profile_for(
                self.before or self.topology,
                device,
                path=self.path,
                num_threads=threads,
                is_host=self.is_host,
            )
            if self.before is not None:
                made = _carried_over(made, self.before, self.topology, device)
            self._of_devices[key] = self.known.setdefault(made, made)
        return self._of_devices[key]

    def on(self, topology: Topology) -> Profiles:
        """Return what operations cost on the same machine with other figures."""
        return replace(self, topology=topology, before=self.before or self.topology, _of_devices={})


def _carried_over(profile: Profile, before: Topology, topology: Topology, device: str) -> Profile:
    """Return a profile of a device whose machine has changed: calibrated rates change as those of its data sheet do."""
    threads = None if profile.device_type == "gpu" else profile.num_threads
    then = datasheet_profile(topology, device, num_threads=threads)
    if profile.origin == "datasheet":
        return then
    sheet = {
        constant.name: constant
        for constant in datasheet_profile(before, device, num_threads=threads).constants
    }
    scaled = []
    for constant in profile.constants:
        was = sheet.get(constant.name)
        if was is None or not was.value:
            continue
        ratio = then.constant(constant.name).value / was.value
        ends = {name: getattr(constant, name) * ratio for name in ("low", "value", "high")}
        scaled.append(constant.model_copy(update=ends))
    return profile.with_constants(*scaled, origin=profile.origin)


def profile_for(
    topology: Topology,
    device: str,
    *,
    path: str | Path | None = None,
    num_threads: int | None = None,
    is_host: bool = False,
) -> Profile:
    """Return the profile to predict `device` with.

    `is_host`: whether `topology` is this machine, so that its own calibration may be used if there is one.

    Raises ProfileError if the file is damaged, or was made for another device.
    Raises TopologyError if there is no such device, or it has fewer cores than there are to be threads.
    """
    spec = topology.device_spec(device)
    if spec.type == "cpu" and (num_threads or 1) > spec.num_cores:
        raise TopologyError(
            f"--threads {num_threads} is more than the {spec.num_cores} cores of {device}",
            hint=f"use --threads {spec.num_cores} or less",
        )
    sheet = datasheet_profile(topology, device, num_threads=num_threads)
    if path is not None:
        profile = load_profile(path)
        profile.check_device(device_name=sheet.device_name, device_type=sheet.device_type)
        _warn_if_disturbed(profile)
        return profile
    kept = host_profile_path(sheet.device_name, sheet.num_threads)
    if not (is_host and kept.exists()):
        return sheet
    try:
        profile = load_profile(kept)
    except ProfileError as error:
        reason = error.message.splitlines()[0]
        stderr.print(
            f"predicting from data-sheet figures, because {reason}; `zosim calibrate` measures this machine"
        )
        return sheet
    _warn_if_disturbed(profile)
    return profile


def _warn_if_disturbed(profile: Profile) -> None:
    if profile.is_disturbed:
        stderr.print(
            f"predicting from a disturbed profile: other processes ran in {profile.disturbed_share:.0%} "
            "of its calibration, so steps may be much faster; calibrate again on an idle machine"
        )
