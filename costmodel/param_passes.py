"""Work of what a zeroth-order step does to parameters: draw, perturb, update, cast, copy, allocate.

These are passes over memory. A pass reads or writes every element once; what differs between the ways of writing
``θ + s·ε·z`` down is how many passes it takes, and how it rounds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from costmodel.formats import COMPUTE_FORMATS, FORMATS, DType, TransferFormat
from costmodel.formats.distributions import SamplingClass
from costmodel.work import SHARED_ELEMENTS, Work

# Blocks are alike, so lowering asks for the same works again and again.
_remembered = lru_cache(maxsize=4096)
Arithmetic = Literal["fused", "scaled", "literal", "chunked"]
"""How a multiple of a perturbation is added to parameters.

``fused``
    ``θ.add_(z, alpha=s)``: read θ, read z, write θ.
``scaled``
    ``z.mul_(ε)`` once, then ``θ.add_(z)``: one more read and write of z.
``literal``
    ``θ = θ + (s·z)·ε`` with a temporary for each step, as the reference MeZO loop writes it.
``chunked``
    The roundings of ``literal`` in place, chunk by chunk: ``z·(s·ε)`` into scratch memory, then ``θ.add_``. What
    the executor does.
"""

_WATCH_KERNELS = 8
"""Two samples, whether they are equal, how often, and the sum so far, each element of which is looked up."""


@_remembered
def sampling_work(
    num_elements: int,
    *,
    dtype: DType = "float32",
    distribution: SamplingClass = "normal",
    num_tensors: int = 1,
    num_skipped: int = 0,
    num_kept_rows: int = 0,
    is_shared: bool = False,
    is_scaled: bool = False,
    num_split_sequences: int = 0,
    num_seeds: int = 0,
    num_jumped: int = 0,
    num_rounded: int = 0,
) -> Work:
    """Return the work of drawing a perturbation of `num_elements` into a buffer, one kernel per tensor.

    Parameters
    ----------
    num_elements : int
        Count of the numbers to sample. Writing them is part of it: a generator's rate is measured into memory.
    dtype : str
        Format of the numbers.
    distribution : str
        What a number costs like, of :data:`costmodel.formats.distributions.SamplingClass`.
    num_tensors : int
        Number of tensors they are spread over; each is a kernel of its own.
    num_skipped : int
        Count of numbers that the generator passes over besides.
    num_kept_rows : int
        Number of a table's rows that `num_elements` are, one sampled after the other.
    is_shared : bool
        Whether all of a CPU's threads draw at once.
    is_scaled : bool
        Whether the numbers are kept times a factor. A generator of float32 multiplies as it draws; numbers of
        narrower formats are read and written once more, chunk by chunk in cache.
    num_split_sequences, num_seeds : int
        Times that threads share one generator's numbers; generators that are seeded.
    num_jumped : int
        Of what is skipped, what a CPU's generator gets past in one jump.
    num_rounded : int
        Random numbers besides, to round by.
    """
    width = FORMATS[dtype].element_bytes
    return Work(
        dtype=dtype,
        num_normals=num_elements,
        num_shared_normals=num_elements if is_shared else 0,
        num_shared_samplings=int(is_shared),
        num_split_sequences=num_split_sequences,
        num_seeds=num_seeds,
        num_skipped=num_skipped,
        num_jumped=num_jumped,
        num_jumps=int(num_jumped > 0),
        sampling_dtype=dtype,
        distribution=distribution,
        num_kernels=num_tensors,
        num_kept_rows=num_kept_rows,
        num_rounded=num_rounded,
        scratch_bytes=2 * width * num_elements * (is_scaled and width < FORMATS["float32"].element_bytes),
    )


@_remembered
def perturb_work(
    num_elements: int,
    *,
    dtype: DType = "float32",
    perturbation_dtype: str | None = None,
    arithmetic: Arithmetic = "fused",
    num_tensors: int = 1,
    largest_tensor: int | None = None,
) -> Work:
    """Return the work of adding a multiple of a drawn perturbation to parameters (the draw not included).

    Parameters
    ----------
    num_elements : int
        Parameters perturbed.
    dtype, perturbation_dtype : str
        Formats of the parameters and of the perturbation (that of the parameters if not given).
    arithmetic : {"fused", "scaled", "literal"}
        See :data:`Arithmetic`.
    num_tensors : int
        Tensors they are spread over; each is a kernel of its own.
    largest_tensor : int, optional
        Elements of the largest of them, for the temporaries of ``literal``; all elements if not given.

    Examples
    --------
    >>> perturb_work(10).param_pass_bytes, perturb_work(10, arithmetic="literal").param_pass_bytes
    (120, 280)
    """
    theta, z = FORMATS[dtype].element_bytes, FORMATS[perturbation_dtype or dtype].element_bytes
    axpy_bytes = 2 * theta + z
    if arithmetic == "chunked":
        return Work(
            dtype=dtype,
            param_pass_bytes=num_elements * axpy_bytes,
            scratch_bytes=num_elements * 2 * theta,
            num_kernels=2,
            num_shared_kernels=_num_shared(num_elements, 2),
        )
    # Kernels for each tensor, and reads and writes of z beside those of θ += s·z.
    kernels, passes = {"fused": (1, 0), "scaled": (2, 2), "literal": (3, 4)}[arithmetic]
    largest = num_elements if largest_tensor is None else largest_tensor
    return Work(
        dtype=dtype,
        param_pass_bytes=num_elements * (axpy_bytes + passes * z),
        num_kernels=kernels * num_tensors,
        num_shared_kernels=_num_shared(num_elements, kernels * num_tensors),
        # The second temporary is made while the first is alive; then the sum while the second is.
        workspace_bytes=largest * (z + max(z, theta)) if arithmetic == "literal" else 0,
    )


@_remembered
def update_work(
    num_elements: int,
    *,
    dtype: DType = "float32",
    perturbation_dtype: str | None = None,
    arithmetic: Arithmetic = "fused",
    num_tensors: int = 1,
    largest_tensor: int | None = None,
    weight_decay: bool = False,
    is_watched: bool = False,
) -> Work:
    """Return the work of a step along a sampled perturbation: a perturbation's passes, and those of a weight decay.

    Parameters
    ----------
    num_elements : int
        Number of parameters updated.
    dtype, perturbation_dtype : str
        Formats of the parameters and of the perturbation (that of the parameters if not given).
    arithmetic : {"fused", "scaled", "literal"}
        See :data:`Arithmetic`.
    num_tensors : int
        Number of tensors they are spread over; each is a kernel of its own.
    largest_tensor : int, optional
        Number of elements of the largest of them; all elements if not given.
    weight_decay : bool
        Whether θ is scaled in place first (one read, one write, one kernel per tensor). The literal form makes a
        temporary of it and adds that to the step.
    is_watched : bool
        Whether a sample of the parameters is gathered before and after, to count lost updates.
    """
    theta = FORMATS[dtype].element_bytes
    step = perturb_work(
        num_elements,
        dtype=dtype,
        perturbation_dtype=perturbation_dtype,
        arithmetic=arithmetic,
        num_tensors=num_tensors,
        largest_tensor=largest_tensor,
    )
    if is_watched:
        step += Work(num_kernels=_WATCH_KERNELS)
    if arithmetic == "chunked":
        # p = g·z, (d = wd·θ, p + d,) η·p, θ - p: all but one read of z and θ and one write of θ is scratch.
        # Runs of tensors that decay and of those that do not take turns, at worst after every tensor.
        num_passes, num_kernels = (9, 5 * num_tensors) if weight_decay else (4, 3)
        changed = {
            "scratch_bytes": num_elements * theta * num_passes,
            "num_kernels": num_kernels + (_WATCH_KERNELS if is_watched else 0),
            "num_shared_kernels": _num_shared(num_elements, num_kernels),
        }
        return step.model_copy(update=changed)
    if not weight_decay:
        return step
    if arithmetic != "literal":
        decay_bytes = 2 * theta * num_elements
        return step + Work(dtype=dtype, param_pass_bytes=decay_bytes, num_kernels=num_tensors)
    largest = num_elements if largest_tensor is None else largest_tensor
    return step + Work(
        dtype=dtype,
        param_pass_bytes=5 * theta * num_elements,
        num_kernels=2 * num_tensors,
        workspace_bytes=3 * theta * largest,
    )


@_remembered
def cast_work(
    num_elements: int, *, source: TransferFormat, target: TransferFormat, num_tensors: int = 1
) -> Work:
    """Return the work of rewriting `num_elements` in another format: one read, one write.

    Parameters
    ----------
    num_elements : int
        Number of elements.
    source, target : str
        Formats that they are read and written in.
    num_tensors : int
        Number of tensors they are spread over; each is a kernel of its own.
    """
    # Of the two at least the weights' own is one that is computed in.
    computed: list[DType] = [name for name in COMPUTE_FORMATS if name in (source, target)]
    wider = max(sorted(computed, key=(source, target).index), key=lambda name: FORMATS[name].bits)
    return Work(
        dtype=wider,
        num_casts=num_elements,
        cast_dtype=source,
        cast_target=target,
        num_kernels=num_tensors,
        num_shared_kernels=_num_shared(num_elements, num_tensors),
    )


@_remembered
def copy_work(size_bytes: int) -> Work:
    """Return the work of copying one contiguous buffer between memories; the profile's latency covers its start.

    Parameters
    ----------
    size_bytes : int
        Size of the buffer in bytes.
    """
    return Work(copy_bytes=size_bytes)


@_remembered
def allocation_work(size_bytes: int, *, num_allocations: int = 1) -> Work:
    """Return the work of allocating device memory that no cache holds, first touch included.

    Parameters
    ----------
    size_bytes : int
        Size of the memory in bytes.
    num_allocations : int
        Number of calls to the allocator.
    """
    return Work(num_allocations=num_allocations, allocation_bytes=size_bytes)


_CLOSING_KERNELS = 30
"""Increments joined, two bases, the singular values between, two products, and what is written over: as many again are small."""


def closing_work(outputs: int, inputs: int, *, rank: int, closed_rank: int) -> Work:
    """Return the work of closing an increment beside a linear layer: compacted with the others, whose memory is full, and drawn anew.

    - `rank`: of the increment that was open.
    - `closed_rank`: of what all closed ones are compacted to.

    Of factors ``A`` and ``B`` with ``R`` columns a basis each, ``4 m R² - 4/3 R³`` operations with Householder's reflections; the
    singular values and vectors of the ``R x R`` matrix between, ``22 R³`` [1]_; products of bases and kept vectors, ``2 m R R'``.

    .. [1] Golub and Van Loan, "Matrix Computations", 4th edition, sections 5.2 and 8.6.

    >>> closing_work(4, 4, rank=1, closed_rank=1).num_factor_flops == 2 * (64 - 10) + 16 + 176 + 2 * 16
    True
    """
    joined = rank + closed_rank
    sides = [(side, min(side, joined)) for side in (outputs, inputs)]
    bases = sum(4 * side * joined * thin - 4 * thin**3 // 3 for side, thin in sides)
    between = 2 * sides[0][1] * sides[1][1] * joined + 22 * min(thin for _, thin in sides) ** 3
    products = sum(2 * side * thin * closed_rank for side, thin in sides)
    return Work(
        num_factor_flops=bases + between + products,
        # Three times read and written in float32, and in float64.
        param_pass_bytes=(outputs + inputs) * joined * 6 * (4 + 8),
        num_normals=rank * inputs,
        num_kernels=_CLOSING_KERNELS,
    )


def _num_shared(num_elements: int, num_kernels: int) -> int:
    """Return how many of the kernels of a pass over `num_elements` in parts a CPU's threads share: the larger ones."""
    return min(num_kernels, num_elements // SHARED_ELEMENTS)
