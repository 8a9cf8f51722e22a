"""What one operation has to do, in units that no machine appears in.

A :class:`Work` is counted once, when a plan is lowered; a cost model turns it into seconds on a given device.
Everything is additive: the work of two operations run one after the other is ``a + b``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from costmodel.formats import DType, TransferFormat
from costmodel.formats.distributions import SamplingClass
from costmodel.formats.quant_passes import QuantPass

_Counts = tuple[tuple[Any, int], ...]

ModelCode = Literal["batch", "embed", "block", "head"]

AttentionKernel = Literal["fa1", "fa2", "fa3", "cudnn"]
"""Fused kernels of attention on GPUs: FlashAttention's first version (its Triton form, too), 2 and 3, cuDNN's."""

SHARED_ELEMENTS = 1 << 15
"""Elements from which torch shares an element-wise kernel among a CPU's threads (its grain size)."""


class _FrozenCounts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Matmul(_FrozenCounts):
    """``num`` products of an ``m x k`` by a ``k x n`` matrix: ``2 m n k`` FLOPs each, in the work's format or its own.

    ``alive_bytes`` is what a segment holds while it is made, but for its output, where a trace counts it. It is no part of programs'
    files, nor of what makes two products the same.
    """

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    num: PositiveInt = 1
    format: str = ""
    alive_bytes: int = Field(default=0, exclude=True, repr=False)

    def __eq__(self, other: object) -> bool:
        """Compare what is multiplied."""
        return isinstance(other, Matmul) and self._multiplied == other._multiplied

    def __hash__(self) -> int:
        """Return the same for the same products."""
        return hash(self._multiplied)

    @property
    def _multiplied(self) -> tuple[int, int, int, int, str]:
        return self.m, self.n, self.k, self.num, self.format

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.m * self.n * self.k * self.num

    @property
    def elements(self) -> int:
        """Elements read and written when each operand crosses memory once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.num


class Attention(_FrozenCounts):
    """Scaled dot-product attention.

    Attributes
    ----------
    num : int
        Number of (sequence, head) pairs.
    query, key : int
        Number of query and of key positions per pair.
    head_dim : int
        Width of queries and keys.
    value_dim : int or None
        Width of values; that of queries and keys if None.
    materialised : bool
        Whether the score matrix is written out (the ``eager`` implementation); a fused kernel keeps it on chip.
    causal_skip : bool
        Whether the masked half is skipped; if not, FLOPs are those of the full square.
    kernel : str or None
        Fused kernel, where it is not the device's usual one.
    backward : bool
        Whether it is the backward pass, which makes the scores again: five products instead of two.
    sharing : int
        Number of query heads that read the same keys and values. Code that repeats these for every head before the
        kernel shares nothing.
    """

    num: PositiveInt
    query: PositiveInt
    key: PositiveInt
    head_dim: PositiveInt
    value_dim: PositiveInt | None = None
    materialised: bool = False
    causal_skip: bool = False
    kernel: AttentionKernel | None = None
    backward: bool = False
    sharing: PositiveInt = 1

    @property
    def elements(self) -> int:
        """Elements that a fused kernel reads and writes once: queries, keys, values and output, backwards their gradients too."""
        ends = self.num * self.query + self.num * self.key // self.sharing
        return ends * self._widths * (2 if self.backward else 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of both products (scores, and scores times values), of a backward's five."""
        # Backwards three of five products are as wide as queries, two as values.
        widths = self._widths + (2 * self.head_dim + (self.value_dim or self.head_dim)) * self.backward
        full = 2 * self.num * self.query * self.key * widths
        return full // 2 if self.causal_skip else full

    @property
    def _widths(self) -> int:
        return self.head_dim + (self.value_dim or self.head_dim)

    @property
    def score_elements(self) -> int:
        """Elements of the score matrix, whether or not it is ever stored."""
        return self.num * self.query * self.key


class Work(_FrozenCounts):
    """Additive work of one operation.

    Attributes
    ----------
    dtype : str
        Compute format of the matrix products, and of the parameters in passes over them.
    matmuls : tuple of Matmul
        Each launched as often as its ``num`` says.
    attention : tuple of Attention
        Attention kernels, each launched once.
    elementwise_bytes : int
        Bytes read plus written by element-wise and normalisation kernels (activations).
    param_pass_bytes : int
        Bytes read plus written by passes over parameters and perturbations (perturb, restore, update, casts).
    scratch_bytes : int
        Bytes that these passes read and write once more, in temporaries that stay near the processor.
    num_exponentials : int
        Exponentials in element-wise kernels, beside their bytes: softmax and activation functions. A hyperbolic
        tangent counts as several.
    num_normals : int
        Random numbers sampled.
    num_shared_normals : int
        Of these, those that all of a CPU's threads draw at once; one thread draws the others.
    num_shared_samplings : int
        Times that threads come together to draw.
    num_split_sequences : int
        Times that threads share the numbers of one generator, all but the first beginning with a jump of it.
    num_seeds : int
        Generators that are seeded on the way.
    num_skipped : int
        Random numbers that a generator passes over, because nobody needs them.
    num_jumped, num_jumps : int
        Of these, those that a CPU's generator gets past in jumps, which take the same however far they lead, and how
        many jumps these are.
    num_kept_rows : int
        Rows that are picked one by one out of numbers that are passed over.
    num_rounded : int
        Numbers rounded at random, each with a random number of its own.
    num_factor_flops : int
        Floating-point operations of factorisations of thin matrices in float64: orthogonal bases and singular values.
    num_casts : int
        Numbers rewritten in another format.
    cast_dtype, cast_target : str
        Formats that they are read and written in.
    sampling_dtype : str
        Format that they are drawn in (generators differ in speed by format).
    distribution : str
        What a number costs like, of :data:`costmodel.formats.distributions.SamplingClass`.
    num_kernels : int
        Operations dispatched to the device, the launch-bound part of small models.
    num_shared_kernels : int
        Of these, element-wise ones that a CPU's threads share. Products and attention are shared besides.
    calls : tuple of str
        Pieces of Python code that are entered: the model's own, ``"embed"``, ``"block"``, ``"head"``, and what takes a
        ``"batch"`` up. What that code does besides launching kernels takes the host's time.
    copy_bytes : int
        Bytes that cross the route between memories.
    disk_bytes : int
        Bytes that are read from a disk, or written to one.
    codec_work : tuple of (str, int)
        Work of a codec, a count for each constant of :data:`costmodel.formats.codec_time.CodecWork`.
    quant_passes : tuple of (str, int)
        Number of elements of passes over quantized values, by type of pass.
    link_bytes : int
        Bytes that one rank receives from the others of a group, and as many that it sends.
    num_allocations : int
        Calls to the device's allocator that cannot be served from a cache.
    allocation_bytes : int
        Bytes they ask for.
    workspace_bytes : int
        Device memory that is alive only while the operation runs. Adding works keeps the larger one.
    """

    dtype: DType = "float32"
    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    elementwise_bytes: NonNegativeInt = 0
    param_pass_bytes: NonNegativeInt = 0
    scratch_bytes: NonNegativeInt = 0
    num_exponentials: NonNegativeInt = 0
    num_normals: NonNegativeInt = 0
    num_shared_normals: NonNegativeInt = 0
    num_shared_samplings: NonNegativeInt = 0
    num_split_sequences: NonNegativeInt = 0
    num_seeds: NonNegativeInt = 0
    num_skipped: NonNegativeInt = 0
    num_jumped: NonNegativeInt = 0
    num_jumps: NonNegativeInt = 0
    num_kept_rows: NonNegativeInt = 0
    num_rounded: NonNegativeInt = 0
    num_factor_flops: NonNegativeInt = 0
    num_casts: NonNegativeInt = 0
    cast_dtype: TransferFormat = "float32"
    cast_target: TransferFormat = "float32"
    sampling_dtype: DType = "float32"
    distribution: SamplingClass = "normal"
    num_kernels: NonNegativeInt = 0
    num_shared_kernels: NonNegativeInt = 0
    calls: tuple[ModelCode, ...] = ()
    copy_bytes: NonNegativeInt = 0
    disk_bytes: NonNegativeInt = 0
    codec_work: tuple[tuple[str, NonNegativeInt], ...] = ()
    quant_passes: tuple[tuple[QuantPass, NonNegativeInt], ...] = ()
    link_bytes: NonNegativeInt = 0
    num_allocations: NonNegativeInt = 0
    allocation_bytes: NonNegativeInt = 0
    workspace_bytes: NonNegativeInt = Field(default=0)

    def __add__(self, other: Work) -> Work:
        """Work of both, one after the other.

        Raises
        ------
        ValueError
            If both multiply matrices in different formats, draw numbers of different kinds or rewrite them in
            different formats: one :class:`Work` states one of each.
        """
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        sampling = self if self._samples or not other._samples else other
        casting = self if self.num_casts or not other.num_casts else other
        formatted = max(self, other, key=lambda work: (work._multiplies, work.param_pass_bytes > 0))
        if self._samples and other._samples and _sampling_kind(self) != _sampling_kind(other):
            raise ValueError(f"cannot add draws of {_sampling_kind(self)} and of {_sampling_kind(other)}")
        if self._multiplies and other._multiplies and self.dtype != other.dtype:
            raise ValueError(f"cannot add matrix products in {self.dtype} and in {other.dtype}")
        if self.num_casts and other.num_casts and _cast_kind(self) != _cast_kind(other):
            raise ValueError(f"cannot add casts of {_cast_kind(self)} and of {_cast_kind(other)}")
        return Work(
            dtype=formatted.dtype,
            sampling_dtype=sampling.sampling_dtype,
            cast_dtype=casting.cast_dtype,
            cast_target=casting.cast_target,
            distribution=sampling.distribution,
            matmuls=self.matmuls + other.matmuls,
            attention=self.attention + other.attention,
            calls=self.calls + other.calls,
            codec_work=_added(self.codec_work, other.codec_work),
            quant_passes=_added(self.quant_passes, other.quant_passes),
            workspace_bytes=max(self.workspace_bytes, other.workspace_bytes),
            **sums,
        )

    def repeated(self, times: int) -> Work:
        """Return the same so many times, one after the other.

        Examples
        --------
        >>> Work(matmuls=(Matmul(m=2, n=3, k=4),), num_kernels=1, workspace_bytes=8).repeated(3).flops
        144
        """
        if not times:
            return Work(dtype=self.dtype)
        scaled: dict[str, object] = {name: times * getattr(self, name) for name in _SUMMED}
        scaled["matmuls"] = tuple(one.model_copy(update={"num": times * one.num}) for one in self.matmuls)
        scaled["attention"] = tuple(one.model_copy(update={"num": times * one.num}) for one in self.attention)
        scaled["calls"] = self.calls * times
        for name in ("codec_work", "quant_passes"):
            scaled[name] = tuple((of, times * count) for of, count in getattr(self, name))
        return self.model_copy(update=scaled)

    def one_in(self, num_steps: int) -> Work:
        """Return a step's share of work that is done once in several steps, its counts rounded.

        Parameters
        ----------
        num_steps : int
            Number of steps between two times that the work is done.

        Examples
        --------
        >>> Work(num_kernels=30, param_pass_bytes=99).one_in(4).num_kernels
        8
        """
        assert not any((self.matmuls, self.attention, self.calls, self.codec_work, self.quant_passes))
        return self.model_copy(update={name: round(getattr(self, name) / num_steps) for name in _SUMMED})

    @property
    def _multiplies(self) -> bool:
        return bool(self.matmuls or self.attention)

    @property
    def _samples(self) -> bool:
        return bool(self.num_normals or self.num_skipped)

    @property
    def num_products(self) -> int:
        """Matrix products launched."""
        return sum(op.num for op in self.matmuls)

    @property
    def flops(self) -> int:
        """All floating-point operations of matrix products and attention."""
        return sum(op.flops for op in self.matmuls) + sum(op.flops for op in self.attention)


_SUMMED = tuple(
    name for name, field in Work.model_fields.items() if field.default == 0 and name != "workspace_bytes"
)
"""Counts of which a sum has those of both."""


def _added(some: _Counts, others: _Counts) -> _Counts:
    return tuple(sorted((Counter(dict(some)) + Counter(dict(others))).items()))


def _cast_kind(work: Work) -> str:
    return f"{work.cast_dtype} to {work.cast_target}"


def _sampling_kind(work: Work) -> tuple[str, str]:
    return work.distribution, work.sampling_dtype
