"""What a device does per second: named constants with intervals and sources, kept in a checked JSON file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from topology.checksummed import save_checksummed, without_digest
from topology.errors import ProfileError
from topology.limits import Ranks
from topology.reading import read_json_object
from topology.renamed import with_present_names
from topology.validation import readable

Bound = Literal["central", "low", "high"]
"""Which end of a duration is wanted: ``low`` the shortest that the intervals allow, ``high`` the longest."""

DeviceType = Literal["cpu", "gpu"]

_VERSION = 3
RENAMED: Mapping[str, str] = {
    "constants.name=code_rate.*": "quant_rate.*",
    "constants.name=quant_rate.moves*": "quant_rate.updates*",
    "constants.name=draw_rate.*": "sampling_rate.*",
    "constants.name=shared_draw_part*": "shared_sampling_fraction*",
    "constants.name=pace_part.draws": "slowdown_fraction.sampling",
    "constants.name=pace_part.*": "slowdown_fraction.*",
    "constants.name=shared_sampling_part*": "shared_sampling_fraction*",
    "constants.name=skip_part*": "skip_fraction*",
    "constants.name=slowdown_part.*": "slowdown_fraction.*",
    "constants.name=pace_s": "reference_s",
    "constants.name=pace": "slowdown",
    "constants.name=sweep_*": "param_pass_*",
    "constants.name=quant_rate.beside*": "quant_rate.side_path*",
    "constants.name=codec_s.quantise_s*": "codec_s.quantize_s*",
    "constants.name=codec_s.dequantise_s": "codec_s.dequantize_s",
    "device_kind": "device_type",
}
"""Fields, and names of constants, that were renamed of a profile (:mod:`topology.renamed`)."""


CONSTANT_UNITS: dict[str, str] = {
    "matmul_rate": "flop/s",
    "matmul_half_dim": "1",
    "attention_rate": "flop/s",
    "attention_half_len": "1",
    "attention_diagonal_len": "1",
    "attention_score_rate": "number/s",
    "memory_bandwidth": "byte/s",
    "memory_overlap": "1",
    "multiprocessors": "1",
    "burst": "1",
    "elementwise_bandwidth": "byte/s",
    "elementwise_cache_bandwidth": "byte/s",
    "param_pass_bandwidth": "byte/s",
    "param_pass_cache_bandwidth": "byte/s",
    "scratch_bandwidth": "byte/s",
    "cache_bytes": "byte",
    "quant_rate": "number/s",
    "exponential_rate": "number/s",
    "factor_rate": "flop/s",
    "sampling_rate": "number/s",
    "shared_sampling_fraction": "1",
    "sharing_s": "s",
    "split_s": "s",
    "seed_s": "s",
    "skip_fraction": "1",
    "jump_s": "s",
    "kept_row_s": "s",
    "cast_rate": "number/s",
    "kernel_s": "s",
    "dispatch_s": "s",
    "gather_s": "s",
    "product_s": "s",
    "call_s": "s",
    "copy_h2d_bandwidth": "byte/s",
    "copy_d2h_bandwidth": "byte/s",
    "copy_cache_bandwidth": "byte/s",
    "copy_latency_s": "s",
    "pin_bandwidth": "byte/s",
    "copy_cores": "core",
    "ranks_slowdown": "1",
    "reference_s": "s",
    "slowdown": "1",
    "slowdown_fraction": "1",
    "message_s": "s",
    "busy_latency_s": "s",
    "busy_core_s": "s",
    "loopback_bandwidth": "byte/s",
    "codec_s": "s",
    "allocation_s": "s",
    "allocation_s_per_byte": "s/byte",
    "instruction_s": "s",
    "step_s": "s",
    "context_bytes": "byte",
    "allocator_slack": "1",
    "allocation_granularity": "byte",
}
"""Unit of every constant by the part of its name before the first dot; the rest says format and distribution.

``matmul_rate.<dtype>``, ``attention_rate.<dtype>``
    Rates of large matrix products and of fused attention. Where there is none for int8, a device multiplies integers as the
    numbers that it computes in.
``matmul_half_dim[.<dtype>[.<m|n|k>]]``
    A dimension of this size halves the rate of a product: its efficiency is ``Π d / (d + half)`` over m, n, k.
``attention_half_len[.<dtype>]``, ``attention_score_rate[.<dtype>]``
    A sequence of this length halves the rate of fused attention; scores per second that it normalises besides. They and
    the rate may have ones of their own for a kernel and for backwards: ``[.<fa1|fa2|fa3|cudnn>][.backward]`` behind.
``attention_diagonal_len``
    Positions that a causal kernel computes for a query in vain, because tiles are computed whole: of no more queries than a tile all.
``memory_bandwidth[.output]``, ``memory_overlap``
    Of matrix products reading their operands and writing what comes out, and the part of that time that passes while they
    multiply: all of it on a GPU, none on a CPU, whose libraries copy operands into panels first.
``multiprocessors``
    Of a GPU, which make the tiles of a product in waves; ``kernel_s.product`` is what starting and ending one takes besides.
``burst[.<dtype>]``
    How many times as fast products and attention are while they are too short for the device's power limit to slow its clocks.
``elementwise_*``, ``param_pass_*[.<dtype>]``
    Of activations and of parameters, each from memory and from cache; ``cache_bytes`` says what the cache holds.
    Passes over parameters differ by format where arithmetic, not memory, limits them, as half precision on a CPU does.
``scratch_bandwidth[.<dtype>]``
    Of temporaries between the passes of one perturbation or update: cached chunks on a CPU, memory on a GPU.
``quant_rate.<pass>[.<dtype>]``
    Elements per second of the passes over quantized values of :data:`costmodel.formats.quant_passes.PASSES`, as all of a CPU's threads share them.
``exponential_rate``
    Exponentials per second, beyond the time that reading and writing takes.
``factor_rate``
    Of factorisations of thin matrices in float64, as increments are compacted with.
``sampling_rate.<distribution>.<dtype>``
    Random numbers written per second, by one thread of a CPU.
``shared_sampling_fraction[.<distribution>.<dtype>]``, ``sharing_s``
    Part of that time that a number takes where all of a CPU's threads draw at once; what it takes to get them
    together and apart.
``split_s``, ``seed_s``
    Time until all of them draw from the middle of one generator's numbers; time to seed a generator.
``skip_fraction[.<distribution>.<dtype>]``, ``jump_s``, ``kept_row_s``
    Part of a number's time that passing over it takes; time of a jump, however far; time per row that is picked out of a
    table's numbers.
``cast_rate[.<dtype>[.<dtype>]]``
    Numbers rewritten per second from the first format in the second.
``kernel_s``
    What a device takes for any kernel, however small: start, tail and the gap before the next.
``gather_s``
    What it takes to get a CPU's threads together for one kernel, and apart.
``dispatch_s``, ``product_s[.<dtype>]``, ``call_s.<batch|embed|block|head|collective>``, ``instruction_s``, ``step_s``
    Host time per kernel; per matrix product besides; per batch taken up, segment of model code entered and collective called.
    Then per instruction of a program, to issue it, to begin and to end it; and per training step.
``copy_*``
    Host to device and back, the first ``cache_bytes`` of each copy at the cache's bandwidth; on a CPU a copy is a thread that takes ``copy_cores`` cores.
``pin_bandwidth``
    At which new memory of the host is pinned for a GPU's copies, before the first step.
``ranks_slowdown``
    How many times as long work takes where every core of a host has a rank of one thread, which meets the others now and
    then: they share caches and memory, and wait for the slowest. Operations of one process that leave each other a core count
    the same.
``reference_s``, ``slowdown``, ``slowdown_fraction.<type of work>``
    What a reference computation takes at full speed, and how many times as long it took at the speed that the rates are for.
    The third is the part of that slowing that a type of work sees: see :mod:`costmodel.rates.slowdown`.
``message_s``, ``loopback_bandwidth``, ``busy_latency_s``, ``busy_core_s``
    Of exchanges among ranks: time of a small message besides a link's latency, and what passes per second between
    two CPU ranks of one host; what a message within a host takes besides while all its cores compute, and what their work loses to it.
``allocation_s``, ``allocation_s_per_byte``
    Of a call that the allocator's cache cannot serve, page faults included.
``codec_s.<constant>``
    Of codecs, per value, byte or message on one core: see :data:`costmodel.formats.codec_time.CodecWork`.
``context_bytes``, ``allocator_slack``, ``allocation_granularity``
    Memory the runtime takes, fraction lost to fragmentation, and the size that tensors are rounded up to.
"""


_OPTIONAL_CONSTANTS = frozenset(
    {
        "codec_s",
        "quant_rate",
        "factor_rate",
        "ranks_slowdown",
        "busy_latency_s",
        "busy_core_s",
        "jump_s",
        "split_s",
        "seed_s",
        "reference_s",
        "slowdown",
        "slowdown_fraction",
        "attention_diagonal_len",
        "burst",
        "multiprocessors",
        "pin_bandwidth",
    }
)
"""What a profile may lack. Codecs then have the constants that come with the package, and passes over quantized values take as
long as their bytes. Ranks do not slow each other down, and their messages wait for no core. Generators do not jump, and
are shared and seeded in no time. There is one speed; a causal mask halves attention; power limits nothing; and the
efficiency of products is smooth. Pinning and compacting have no predicted time."""

_MEMORY_CONSTANTS = frozenset({"context_bytes", "allocator_slack", "allocation_granularity"})
_UNTRIED_CONSTANTS = frozenset(
    {"ranks_slowdown", "busy_latency_s", "busy_core_s", "message_s", "loopback_bandwidth", "codec_s"}
)
"""What no step of one rank tells of, and so not how wide intervals have to be."""


MOST_DISTURBED = 0.25
"""Largest share of a calibration that others may have disturbed: more, and its profile says more of them than of the machine."""

_SLOWEST, _LARGEST = 1e-3, 1e24
"""No device computes or moves less in a second, or more; durations stay finite."""


class Constant(BaseModel):
    """One measured or published number.

    Attributes
    ----------
    name : str
        One of :data:`CONSTANT_UNITS`, with its formats after dots.
    value, low, high : float
        The number and its interval, in `unit`; ``0 <= low <= value <= high``.
    unit : str
        Unit of the three, such as ``"bytes/s"``.
    source : str
        Where it comes from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    unit: str
    source: str

    @model_validator(mode="after")
    def _is_a_known_interval(self) -> Constant:
        if not (self.low <= self.value <= self.high and math.isfinite(self.high)):
            raise ValueError(f"{self.name}: {self.value} is outside its interval [{self.low}, {self.high}]")
        expected = CONSTANT_UNITS.get(self.quantity)
        if self.unit != expected:
            raise ValueError(f"{self.name}: unit {self.unit!r}, expected {expected!r}")
        if self.is_rate and self.low < _SLOWEST:
            raise ValueError(f"{self.name}: a rate must be above 0, but is {self.low:g} {self.unit}")
        if self.high > _LARGEST:
            raise ValueError(f"{self.name}: {self.high:g} {self.unit} exceeds the maximum of {_LARGEST:g}")
        return self

    @property
    def quantity(self) -> str:
        """Name without formats."""
        return self.name.split(".", 1)[0]

    @property
    def is_rate(self) -> bool:
        """Whether more of it makes things faster."""
        return self.unit.endswith("/s")

    def at(self, bound: Bound, scale: float = 1.0) -> float:
        """Return one end of the interval, or a number on the way there.

        Parameters
        ----------
        bound : {"central", "low", "high"}
            End that makes durations shortest (``low``) or longest (``high``).
        scale : float
            Share of the way towards that end, on a scale of factors: 0 is the value, 1 the end. Sizes of memory, and what
            only several ranks meet, always go the whole way.
        """
        if bound == "central":
            return self.value
        shortest, longest = (
            (self.high, self.low) if self.is_rate or self.quantity == "cache_bytes" else (self.low, self.high)
        )
        end = shortest if bound == "low" else longest
        if scale == 1.0 or self.quantity in _MEMORY_CONSTANTS | _UNTRIED_CONSTANTS:
            return end
        if self.value > 0 and end > 0:
            return self.value * math.exp(scale * math.log(end / self.value))
        return max(0.0, self.value + scale * (end - self.value))


class Profile(BaseModel):
    """Everything that turns work into seconds on one device.

    Attributes
    ----------
    format, version
        Type of the file and number of its layout.
    device_name : str
        Product name, as its driver or the operating system gives it.
    device_type : {"cpu", "gpu"}
        Type of the processor.
    num_threads : int
        Threads that a CPU's kernels use; 1 for a GPU, whose kernels one host thread launches.
    num_cores : int
        Cores of the host that its threads and copy threads share.
    origin : {"datasheet", "calibrated"}
        Whether rates come from data sheets, or from measurements of `zosim calibrate`.
    interval_scale : float
        How much of their intervals the constants leave at once in the low and the high end of a prediction. They do not all
        lie at one end together; calibration finds the part that would have held its whole steps 90 times in 100.
    disturbed_share : float
        Share of the operations or of the whole steps of the calibration, whichever is larger, that other processes disturbed.
    constants : tuple of Constant
        Rates, latencies and sizes, each with its interval.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["zosim-profile"] = "zosim-profile"
    version: Literal[3] = 3
    device_name: str
    device_type: DeviceType
    num_threads: Ranks
    num_cores: Ranks
    origin: Literal["datasheet", "calibrated"]
    interval_scale: PositiveFloat = 1.0
    disturbed_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    constants: tuple[Constant, ...]

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        return with_present_names(data, RENAMED)

    @model_validator(mode="after")
    def _is_complete(self) -> Profile:
        names = [constant.name for constant in self.constants]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        missing = sorted(
            set(CONSTANT_UNITS) - _OPTIONAL_CONSTANTS - {constant.quantity for constant in self.constants}
        )
        if twice or missing:
            raise ValueError(f"constants given twice: {twice}, constants missing: {missing}")
        return self

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes disturbed so much of the calibration that predictions should not rely on it."""
        return self.disturbed_share > MOST_DISTURBED

    @cached_property
    def _by_name(self) -> dict[str, Constant]:
        return {constant.name: constant for constant in self.constants}

    @cached_property
    def _values(self) -> dict[Bound, dict[str, float]]:
        bounds: tuple[Bound, ...] = ("central", "low", "high")
        return {bound: {c.name: c.at(bound, self.interval_scale) for c in self.constants} for bound in bounds}

    def values(self, bound: Bound = "central") -> Mapping[str, float]:
        """Return every constant's value by name, at one end of its interval.

        Parameters
        ----------
        bound : {"central", "low", "high"}
            End of the intervals; the values themselves if ``central``.
        """
        return self._values[bound]

    def constant(self, name: str) -> Constant:
        """Return the constant called `name`.

        Raises
        ------
        ProfileError
            If the profile does not hold it.
        """
        try:
            return self._by_name[name]
        except KeyError:
            message = f"the profile of {self.device_name} has no constant {name!r}"
            raise ProfileError(message, hint="constants are " + ", ".join(self._by_name)) from None

    def with_constants(self, *constants: Constant, origin: Literal["datasheet", "calibrated"]) -> Profile:
        """Return a profile in which `constants` replace those of the same names, or are added.

        Parameters
        ----------
        *constants : Constant
            New constants.
        origin : {"datasheet", "calibrated"}
            Origin of the new profile.
        """
        merged = self._by_name | {constant.name: constant for constant in constants}
        # Not model_copy, which would take the cached values along.
        return Profile(**{**dict(self), "constants": tuple(merged.values()), "origin": origin})

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, with a digest that :func:`load_profile` checks.

        Parameters
        ----------
        path : str or Path
            File to write.

        Raises
        ------
        ProfileError
            If the file cannot be written.
        """
        save_checksummed(self.model_dump(mode="json"), path, "profile", ProfileError)

    def check_device(self, *, device_name: str, device_type: DeviceType) -> None:
        """Refuse a profile of another device.

        Parameters
        ----------
        device_name : str
            Product name of the device at hand.
        device_type : {"cpu", "gpu"}
            Type of that device.

        Raises
        ------
        ProfileError
            If it was made for a device of another name or kind.
        """
        if (self.device_name, self.device_type) != (device_name, device_type):
            message = (
                f"the profile is for {self.device_type} {self.device_name!r}, not for {device_type} "
                f"{device_name!r}"
            )
            raise ProfileError(message, hint="calibrate on this device, or plan without the profile")


def load_profile(path: str | Path) -> Profile:
    """Return the profile that a file holds.

    Parameters
    ----------
    path : str or Path
        JSON file, from `zosim calibrate -o` or :meth:`Profile.save`.

    Raises
    ------
    ProfileError
        If the file is unreadable, damaged, of another format or version, or was edited.
    """
    hint = "calibrate again to write a new one"
    content = read_json_object(path, "profile", ProfileError, hint=hint)
    if content.get("format") != "zosim-profile":
        message = f"{path} is not a profile: its format is {content.get('format')!r}"
        raise ProfileError(message, hint="make one with `zosim calibrate -o FILE`")
    if content.get("version") != _VERSION:
        message = (
            f"the profile {path} has version {content.get('version')!r}, but this zosim reads version "
            f"{_VERSION}"
        )
        raise ProfileError(message, hint=hint)
    content, is_unchanged = without_digest(content)
    if not is_unchanged:
        message = f"the profile {path} is damaged or was edited: its digest does not match its content"
        raise ProfileError(message, hint="calibrate again, or restore the file")
    with readable(f"the profile {path}", ProfileError, model=Profile):
        return Profile.model_validate(content)
