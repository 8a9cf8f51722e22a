"""Formats of numbers: what they are called, what they take, and what they can hold.

Here alone a format is declared; :mod:`executors.formats` says what torch calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from topology.errors import PlanError
from topology.schema import DeviceSpec, Dtype

DType = Literal["float64", "float32", "tf32", "float16", "bfloat16", "float8_e4m3"]
"""Formats that matrix products and passes over parameters are modelled in."""

COMPUTE_FORMATS: tuple[DType, ...] = get_args(DType)

TransferFormat = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3"]
"""Formats that offloaded blocks are kept in on the host, and cross the bus in."""

StorageFormat = Literal["float64", "float32", "float16", "bfloat16"]
"""Formats that weights are stored and updated in, where they are not quantized."""

CAST_FORMATS: tuple[DType | TransferFormat, ...] = tuple(
    dict.fromkeys((*COMPUTE_FORMATS, *get_args(TransferFormat)))
)
"""All that something is cast from or to."""

CAST_PAIRS: tuple[tuple[TransferFormat, TransferFormat], ...] = (
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float8_e4m3"),
)
"""Formats of which both casts, there and back, have rates of their own on CPUs."""

QuantFormat = Literal[
    "int8",
    "int7",
    "int6",
    "int5",
    "int4",
    "int3",
    "int2",
    "float8_e4m3",
    "float8_e5m2",
    "float4_e2m1",
]
"""Formats that weights can be kept in besides those that are computed in."""

ScaleScope = Literal["tensor", "channel", "group"]
"""What shares a scale: a matrix, an output channel of it, or some neighbouring inputs of an output channel."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of numbers as memory holds them.

    Attributes
    ----------
    name : str
        Name that plans and profiles use, such as ``"bfloat16"``.
    bits : int
        Bits per element.
    is_float : bool
        Whether elements have an exponent.
    smallest_normal : float
        Smallest positive number that a float format holds with all its digits.
    peak : str
        What data sheets call the rate of products in it.
    aliases : tuple of str
        Other names that a user may write.

    Examples
    --------
    >>> FORMATS["bfloat16"].bytes(1000), FORMATS["int4"].bytes(1000)
    (2000, 500)
    """

    name: str
    bits: int
    is_float: bool = True
    smallest_normal: float = 0.0
    peak: Dtype | None = None
    aliases: tuple[str, ...] = ()

    def bytes(self, num_elements: int) -> int:
        """Return the size of packed elements in bytes, without scales.

        Parameters
        ----------
        num_elements : int
            Number of elements.
        """
        return -(-num_elements * self.bits // 8)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element, in formats whose elements stand by themselves.

        Raises
        ------
        PlanError
            If elements are narrower than a byte.
        """
        if self.bits % 8:
            raise PlanError(
                f"{self.name} is a storage format, in which nothing is computed",
                hint="compute in one of " + ", ".join(COMPUTE_FORMATS),
            )
        return self.bits // 8

    def num_elements(self, size_bytes: int) -> int:
        """Return how many elements fit into a buffer.

        Parameters
        ----------
        size_bytes : int
            Size of the buffer in bytes.

        Raises
        ------
        PlanError
            If elements are narrower than a byte.
        """
        return size_bytes // self.element_bytes


FORMATS: dict[str, Format] = {
    declared.name: declared
    for declared in (
        Format("float64", 64, smallest_normal=2.0**-1022, peak="fp64", aliases=("fp64", "double")),
        Format("float32", 32, smallest_normal=2.0**-126, peak="fp32", aliases=("fp32", "float")),
        # A format of products: what they read and write is float32.
        Format("tf32", 32, smallest_normal=2.0**-126, peak="tf32"),
        Format("float16", 16, smallest_normal=2.0**-14, peak="fp16", aliases=("fp16", "half")),
        Format("bfloat16", 16, smallest_normal=2.0**-126, peak="bf16", aliases=("bf16",)),
        Format("float8_e4m3", 8, smallest_normal=2.0**-6, peak="fp8", aliases=("fp8",)),
        Format("float8_e5m2", 8, smallest_normal=2.0**-14, peak="fp8"),
        Format("float4_e2m1", 4, smallest_normal=1.0, aliases=("fp4",)),
        Format("int8", 8, is_float=False, peak="int8"),
        Format("int4", 4, is_float=False, peak="int4"),
        *(Format(f"int{bits}", bits, is_float=False) for bits in (7, 6, 5, 3, 2)),
        Format("int64", 64, is_float=False),
        Format("uint8", 8, is_float=False),
    )
}
"""All formats by name: of weights and what is computed from them, of a batch's token numbers, and plain bytes."""


def format_name(text: str) -> str:
    """Return the name of the format that a user calls `text`; `text` in lower case where none is called so."""
    wanted = text.lower()
    return next((name for name, declared in FORMATS.items() if wanted in declared.aliases), wanted)


def default_dtype(checkpoint: StorageFormat | None, device: DeviceSpec) -> tuple[StorageFormat, str]:
    """Return the format of the weights where nobody names one, and the reason in words.

    On a CPU it is float32. On a GPU it is the checkpoint's own, unless that has 16 bits and the GPU has no units for it: torch would
    compute in float32 then. A checkpoint that states none gets bfloat16 where the GPU has units for it, else float32.

    `checkpoint`: format of the weights in the model's files.

    >>> from topology.building import require_device
    >>> default_dtype("float16", require_device("a100-80gb-sxm", "gpu", "the example"))
    ('float16', 'the checkpoint is in float16')
    >>> default_dtype("bfloat16", require_device("t4", "gpu", "the example"))
    ('float32', 'the checkpoint is in bfloat16, and Tesla T4 has no units for bfloat16')
    """
    if device.type == "cpu":
        return "float32", "in which CPUs compute"
    wanted = checkpoint or "bfloat16"
    says = "the checkpoint states no format" if checkpoint is None else f"the checkpoint is in {checkpoint}"
    if FORMATS[wanted].bits > 16 or FORMATS[wanted].peak in device.peak_dense:
        return wanted, says
    return "float32", f"{says}, and {device.name} has no units for {wanted}"
