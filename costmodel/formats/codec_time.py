"""Seconds that a codec takes on both sides of a boundary, and which encoding is fastest over a link.

The work of a codec is a count for each of its constants. Its time is the sum of counts times constants, and a set of
timed works determines the constants by least squares.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from costmodel.formats.codecs import (
    ENCODINGS,
    CodecSpec,
    Encoding,
    message_bytes,
    payload_bytes,
    run_length_bytes,
)
from costmodel.formats.symbols import SymbolStatistics
from costmodel.rates.profile import DeviceType
from topology.errors import ProfileError

CodecWork = Mapping[str, int]
"""How often each constant counts.

``quantize_s.<rounding>``, ``dequantize_s``
    Per element, from numbers to symbols of a byte and back.
``encode_s.<encoding>``, ``decode_s.<encoding>``
    Per element, from symbols to a payload and back; ``entropy-wide`` is the entropy coder on more than 4 bits.
``encode_kept_s.<encoding>``, ``decode_kept_s.<encoding>``
    Per symbol that is not the background, beyond that.
``byte_s``
    Per byte of a message put together or taken apart, with its checksum.
``encode_call_s``, ``decode_call_s``
    Per message, however small.
"""

_SPARSE: tuple[Encoding, ...] = ("index", "bitmap", "run-length")


def encode_work(
    spec: CodecSpec, shape: Sequence[int], element_bytes: int, stats: SymbolStatistics
) -> CodecWork:
    """Return the work of making a message.

    Choosing the smallest encoding takes entropy coding, where that may win, and looking at runs, where few symbols
    are kept; then the encoding itself, if it is another.
    """
    size = message_bytes(spec, shape, element_bytes, stats)
    work = Counter({"encode_call_s": 1, "byte_s": size})
    if spec.bits is None:
        return work
    work[f"quantize_s.{spec.rounding}"] = math.prod(shape)
    for encoding in _encodings_run(spec, stats):
        _add_symbols(work, "encode", encoding, stats)
    return work


def decode_work(
    spec: CodecSpec, shape: Sequence[int], element_bytes: int, stats: SymbolStatistics
) -> CodecWork:
    """Return the work of making a tensor of a message."""
    size = message_bytes(spec, shape, element_bytes, stats)
    work = Counter({"decode_call_s": 1, "byte_s": size})
    if spec.bits is None:
        return work
    work["dequantize_s"] = math.prod(shape)
    _add_symbols(work, "decode", _chosen(spec, stats), stats)
    return work


def _encodings_run(spec: CodecSpec, stats: SymbolStatistics) -> list[Encoding]:
    chosen = _chosen(spec, stats)
    if spec.encoding != "smallest":
        return [chosen]
    run: list[Encoding] = [chosen]
    # To choose by size takes coding, whose size nothing else tells, and finding runs.
    if chosen != "entropy":
        run.append("entropy")
    least_runs = run_length_bytes(stats.num_kept, stats.bits, 1)
    if chosen != "run-length" and least_runs < payload_bytes(chosen, stats):
        run.append("run-length")
    return run


def _chosen(spec: CodecSpec, stats: SymbolStatistics) -> Encoding:
    if spec.encoding != "smallest":
        return spec.encoding
    return min(ENCODINGS, key=lambda encoding: payload_bytes(encoding, stats))


def _add_symbols(work: Counter[str], side: str, encoding: Encoding, stats: SymbolStatistics) -> None:
    wide = "-wide" if encoding == "entropy" and stats.bits > 4 else ""
    work[f"{side}_s.{encoding}{wide}"] += stats.num_elements
    if encoding in _SPARSE:
        work[f"{side}_kept_s.{encoding}"] += stats.num_kept


@dataclass(frozen=True)
class CodecProfile:
    """What codecs take on one machine, with one thread."""

    source: str
    seconds: Mapping[str, float]  # by constant, see `CodecWork`

    def __post_init__(self) -> None:
        bad = {name: value for name, value in self.seconds.items() if not 0 <= value < math.inf}
        if bad:
            raise ProfileError(f"constants of codecs must be 0 or more and finite, not {bad}")

    def duration_s(self, work: CodecWork) -> float:
        """Return the seconds of `work`.

        Raises ProfileError if a constant is missing.
        """
        missing = sorted(set(work) - set(self.seconds))
        if missing:
            raise ProfileError(
                f"the codecs' profile lacks {missing}", hint="measure it again with this release"
            )
        return sum(count * self.seconds[name] for name, count in work.items())


@cache
def load_codec_profile() -> CodecProfile:
    """Return the constants that come with the package: one core of a shared x86-64 machine."""
    content = json.loads(files("costmodel").joinpath("data/codecs/x86-64-one-core.json").read_text("utf-8"))
    return CodecProfile(**content)


MEASURED = "codec_s."
"""Begins the names of the codecs' constants in the profile of a device on whose host they were measured."""


def codec_profile_of(values: Mapping[str, float]) -> CodecProfile:
    """Return the codecs' constants among those of a device's profile, and those that come with the package for the rest."""
    shipped = load_codec_profile()
    seconds_by_name = {
        name: values.get(MEASURED + name, seconds) for name, seconds in shipped.seconds.items()
    }
    return CodecProfile(shipped.source, seconds_by_name)


def codec_terms(work: CodecWork, values: Mapping[str, float], device_type: DeviceType) -> dict[str, float]:
    """Return the seconds of a codec's work: ``codec`` on one core of the host, and more where the tensor is on a GPU.

    An estimate for GPUs, not a measurement: the device makes symbols of numbers (``quantizing``: 4 bytes read, one
    written, at the element-wise bandwidth), a byte of each crosses the bus (``copying``), and the host writes them down.
    The message stays there. Plain numbers never leave the device: they are copied side by side (``packing``), and the
    receiver uses them where they arrive.
    """
    if device_type == "cpu":
        return {"codec": codec_profile_of(values).duration_s(work)}
    on_device = {name for name in work if name.startswith(("quantize_s", "dequantize_s"))}
    if not on_device:
        packed = work.get("byte_s", 0) if "encode_call_s" in work else 0
        return {"packing": 2 * packed / values["elementwise_bandwidth"]}
    num_symbols = sum(work[name] for name in on_device)
    on_host = {name: count for name, count in work.items() if name not in on_device}
    narrower = min(values["copy_d2h_bandwidth"], values["copy_h2d_bandwidth"])
    return {
        "codec": codec_profile_of(values).duration_s(on_host),
        "quantizing": 5 * num_symbols / values["elementwise_bandwidth"],
        "copying": num_symbols / narrower,
    }


def fit_codec_profile(measured: Sequence[tuple[CodecWork, float]], source: str) -> CodecProfile:
    """Return the constants, none negative, that come nearest to the measured seconds by relative error."""
    # Planning needs neither, and scipy takes a while to import.
    import numpy as np
    from scipy.optimize import nnls

    names = sorted({name for work, _ in measured for name in work})
    rows = np.array([[work.get(name, 0) / seconds for name in names] for work, seconds in measured])
    scale = rows.max(axis=0)  # counts differ by seven orders of magnitude
    solution, _ = nnls(rows / scale, np.ones(len(rows)))
    return CodecProfile(source, dict(zip(names, (float(x) for x in solution / scale), strict=True)))


@dataclass(frozen=True, slots=True)
class BoundaryLink:
    """What a tensor crosses: a link, between processors that take as long as `profile` says."""

    bandwidth_bytes_per_s: float
    profile: CodecProfile
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BoundaryTransfer:
    """What a tensor's way across a boundary takes."""

    spec: CodecSpec
    size_bytes: int
    encode_s: float
    transfer_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        """All three, one after the other: nothing overlaps within one tensor."""
        return self.encode_s + self.transfer_s + self.decode_s


def boundary_transfer(
    spec: CodecSpec, shape: Sequence[int], element_bytes: int, stats: SymbolStatistics, over: BoundaryLink
) -> BoundaryTransfer:
    """Return what sending a tensor over a link with this codec takes."""
    size = message_bytes(spec, shape, element_bytes, stats)
    encode, decode = (of(spec, shape, element_bytes, stats) for of in (encode_work, decode_work))
    return BoundaryTransfer(
        spec,
        size,
        over.profile.duration_s(encode),
        over.latency_s + size / over.bandwidth_bytes_per_s,
        over.profile.duration_s(decode),
    )


def fastest_transfer(
    spec: CodecSpec, shape: Sequence[int], element_bytes: int, stats: SymbolStatistics, over: BoundaryLink
) -> BoundaryTransfer:
    """Return the transfer with the encoding that is fastest for the numbers that `spec` makes.

    The values that arrive do not depend on the encoding. Plain numbers are not among the choices, since they do.
    """
    specs = (replace(spec, encoding=encoding) for encoding in ENCODINGS)
    transfers = [boundary_transfer(spec, shape, element_bytes, stats, over) for spec in specs]
    return min(transfers, key=lambda transfer: transfer.seconds)
