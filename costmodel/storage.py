"""How a plan stores parameters, in counts: what they take, what a forward at a point costs beside its products, and what an update costs.

These are the verbs of :mod:`executors.low_bits.stored` as a plan counts them. A storage says, too, in which format perturbations are drawn and
kept: what lies on a grid goes along perturbations that are rounded to one.
"""

# ruff: noqa: ARG002 - of numbers there is little to say, whatever is asked

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodel.formats import FORMATS, DType
from costmodel.formats.distributions import DISTRIBUTIONS, DistributionName
from costmodel.formats.low_bits import (
    Linear,
    QuantConfig,
    QuantizedMatrix,
    nonzero_rows_bytes,
    num_elements,
    quantized_forward_work,
    quantized_sampling_work,
    quantized_update_work,
    unpacking_work,
)
from costmodel.formats.roundings import RoundedPerturbation
from costmodel.models.model_spec import EMBED, HEAD, ParamGroup
from costmodel.work import Work


@dataclass(frozen=True, kw_only=True)
class DenseStorage:
    """All parameters are numbers of one format, as perturbations are.

    >>> from costmodel.models.configs import read_model_spec
    >>> block = read_model_spec("opt-125m").param_group("block.0")
    >>> int4 = QuantizedStorage(
    ...     dtype="bfloat16",
    ...     distribution="gaussian",
    ...     quant_config=QuantConfig("int4", dtype="bfloat16"),
    ...     perturbation=RoundedPerturbation("gaussian", 4),
    ... )
    >>> DenseStorage(dtype="bfloat16", distribution="gaussian").nbytes(block), int4.nbytes(block)
    (14175744, 3572736)
    """

    dtype: DType
    distribution: DistributionName  # of perturbations
    quant_config: QuantConfig | None = None  # how matrices are kept that are no numbers; None where none is
    # How perturbations are rounded; None where they are not.
    perturbation: RoundedPerturbation | None = None
    # Which rounding of a perturbation an update goes along: that of the forwards, or the next.
    update_rounding: int = 0
    update_divisor: float = 1.0  # what a projected gradient is divided by before it goes into an update

    # -- memory ------------------------------------------------------------------------------------------------

    def tuned(self, group: ParamGroup) -> list[QuantizedMatrix]:
        """Return the matrices of a group that are tuned and no numbers."""
        return []

    def frozen(self, group: ParamGroup) -> list[QuantizedMatrix]:
        """Return those that stay as they are and are no numbers."""
        return []

    @property
    def linear_format(self) -> str:
        """Format that the linear layers of blocks are kept in."""
        return self.dtype

    def nbytes(self, group: ParamGroup) -> int:
        """Return the bytes of a group's parameters."""
        matrices = [*self.tuned(group), *self.frozen(group)]
        size = FORMATS[self.dtype].bytes(group.num_parameters - num_elements(matrices))
        return size + sum(how.size_bytes([one]) for one, how in matrices)

    def num_numbers(self, group: ParamGroup) -> int:
        """Return how many of a group's tuned elements are numbers."""
        return group.num_trainable - num_elements(self.tuned(group))

    def buffer_format(self, param_groups: Iterable[ParamGroup], dtype: str) -> str:
        """Return the format of a buffer that these groups lie in, numbers of them in `dtype`: bytes where others are among them."""
        return "uint8" if any(self.tuned(group) or self.frozen(group) for group in param_groups) else dtype

    def pass_bytes(self, group: ParamGroup, perturbation_bytes: int) -> int:
        """Return the bytes of what passes over a group's numbers need once more, were they not made in chunks."""
        return perturbation_bytes

    def sum_bytes(self, group: ParamGroup) -> int:
        """Return the bytes of what a group changes by over several perturbations, where these are rounded together."""
        return 0

    # -- perturbations --------------------------------------------------------------------------------------------

    @property
    def perturbation_format(self) -> str:
        """Format that perturbations are kept in."""
        return self.dtype if self.perturbation is None else self.perturbation.kept_format

    @property
    def row_format(self) -> str:
        """Format that rows of perturbations are kept in, and that perturbations are added in: quantized values in a byte each."""
        return self.dtype if self.perturbation is None else "int8"

    @property
    def sampling_format(self) -> DType:
        """Format that perturbations are drawn in."""
        return self.dtype if self.perturbation is None else "float32"

    @property
    def keeps_signs(self) -> bool:
        """Whether all elements of a perturbation are 1 or -1 as it is kept."""
        return self._are_signs and self.perturbation is None

    @property
    def _are_signs(self) -> bool:
        return DISTRIBUTIONS[self.distribution].is_sign

    def keeps_scaled(self, epsilon: float) -> bool:
        """Whether ``(s·z)·ε`` is ``s·w`` to the last bit: no ``w`` may be subnormal. Signs are as fast without."""
        smallest = epsilon * DISTRIBUTIONS[self.distribution].smallest
        is_plain = self.perturbation is None and not self._are_signs
        return is_plain and smallest >= FORMATS[self.dtype].smallest_normal

    @property
    def bits(self) -> int:
        """Bits that perturbations are rounded to; 0 where they are not."""
        return 0 if self.perturbation is None else self.perturbation.bits

    @property
    def sparsity(self) -> float:
        """Share of the rows of matrices that a step's perturbation leaves alone."""
        return 0.0 if self.perturbation is None else self.perturbation.sparsity

    def num_rounded(self, num_elements: int) -> int:
        """Return how many of the elements of a perturbation are rounded at random: signs never are."""
        return 0 if self.perturbation is None or self._are_signs else num_elements

    def num_nonzero(self, group: ParamGroup) -> int:
        """Return the elements of a perturbation but for those in rows that a sparse one leaves alone."""
        return group.num_trainable - round(self.sparsity * num_elements(self.tuned(group)))

    def sparse(self, group: ParamGroup) -> list[Linear]:
        """Return the matrices of a group of which a perturbation leaves rows alone."""
        return [one for one, _ in self.tuned(group)] if self.sparsity else []

    def nonzero_rows_bytes(self, param_groups: Iterable[ParamGroup]) -> int:
        """Return the bytes of the numbers of the rows that a step's perturbations move, which stay from draw to update."""
        matrices = (one for group in param_groups for one in self.sparse(group))
        return nonzero_rows_bytes(matrices, 1 - self.sparsity)

    def rounding_work(
        self,
        num_elements: int,
        num_tensors: int,
        *,
        is_whole: bool,
        sparse: Sequence[Linear] = (),
        sequential_elements: int | None = None,
    ) -> Work:
        """Return what it takes besides to round a perturbation's numbers, of all its rows or of some; see :func:`quantized_sampling_work`."""
        if self.perturbation is None:
            return Work()
        return quantized_sampling_work(
            num_elements,
            is_sign=self._are_signs,
            num_tensors=num_tensors,
            sparse=sparse,
            sequential_elements=sequential_elements if is_whole else None,
            perturbation_format=self.perturbation_format if is_whole else self.row_format,
        )

    def with_taking_out(self, work: Work, num_elements: int, at_once: int) -> Work:
        """Return `work` with that of taking a perturbation out of bytes that several elements share, `at_once` of them at a time."""
        if self.perturbation_format == self.row_format:
            return work
        return work + unpacking_work(
            num_elements, self.perturbation_format, at_once=min(num_elements, at_once)
        )

    # -- a step ------------------------------------------------------------------------------------------------

    def has_side_path(self, group: ParamGroup) -> bool:
        """Whether a tuned group stays as it is at every point, and forwards add its perturbation."""
        return False

    def forward_work(
        self,
        work: Work,
        param_groups: Sequence[ParamGroup],
        *,
        has_side_path: bool,
        kept_bytes: int,
    ) -> Work:
        """Return the work of a segment's forward, from that with numbers; arguments as of :meth:`QuantizedStorage.forward_work`."""
        return work

    def update_work(self, group: ParamGroup, numbers: Work, *, is_summed: bool) -> Work:
        """Return the work of an update, from that of the group's numbers; `is_summed` where it waits for others of the step."""
        return numbers


@dataclass(frozen=True, kw_only=True)
class QuantizedStorage(DenseStorage):
    """Matrices are quantized values and scales, and perturbations of all that is tuned are rounded; other parameters are numbers."""

    quant_config: QuantConfig
    perturbation: RoundedPerturbation
    # Whether quantized values are updated once a step, by what its perturbations add up to.
    rounds_sums: bool = False
    product: str = "dequantize"  # what multiplies by quantized weights
    are_inputs_quantized: bool = False  # whether inputs are rounded before they are multiplied

    def tuned(self, group: ParamGroup) -> list[QuantizedMatrix]:
        """Return the matrices of layers that are tuned, or of adapters beside them."""
        return self.quant_config.tuned(group)

    def frozen(self, group: ParamGroup) -> list[QuantizedMatrix]:
        """Return the matrices of layers that stay as they are."""
        return self.quant_config.frozen(group)

    @property
    def linear_format(self) -> str:
        """Format of the quantized values."""
        return self.quant_config.format

    def pass_bytes(self, group: ParamGroup, perturbation_bytes: int) -> int:
        """Return the bytes of the numbers."""
        return FORMATS[self.dtype].bytes(self.num_numbers(group))

    def sum_bytes(self, group: ParamGroup) -> int:
        """Return the bytes of what quantized values change by."""
        return FORMATS["float32"].bytes(num_elements(self.tuned(group))) if self.rounds_sums else 0

    def has_side_path(self, group: ParamGroup) -> bool:
        """Whether a group stays as it is: those of blocks do, whatever of them is tuned."""
        return group.segments[0] not in (EMBED, HEAD)

    def forward_work(
        self,
        work: Work,
        param_groups: Sequence[ParamGroup],
        *,
        has_side_path: bool,
        kept_bytes: int,
    ) -> Work:
        """Return the work with products by quantized weights.

        - `param_groups`: The segment's.
        - `has_side_path`: Whether perturbations are added.
        - `kept_bytes`: What of the segment is alive beside a layer.
        """
        tuned = [matrix for group in param_groups for matrix in self.tuned(group)]
        frozen = [matrix for group in param_groups for matrix in self.frozen(group)]
        for matrices, has_side_path_here in ((tuned, has_side_path), (frozen, False)):
            if not matrices:
                continue
            linears, how = [one for one, _ in matrices], matrices[0][1]
            is_adapter = how != self.quant_config
            work = quantized_forward_work(
                work,
                linears,
                how,
                kernel="dequantize" if is_adapter else self.product,
                are_inputs_quantized=self.are_inputs_quantized and not is_adapter,
                has_side_path=has_side_path_here,
                nonzero_share=1 - self.sparsity,
                kept_bytes=kept_bytes,
                perturbation_format=self.perturbation_format if has_side_path_here else self.row_format,
            )
        # Numbers, such as norms and biases, are copied to the point.
        copied = sum(
            self.num_numbers(group)
            for group in param_groups
            if has_side_path and group.num_trainable and self.has_side_path(group)
        )
        size = work.workspace_bytes + FORMATS[self.dtype].bytes(copied)
        return work.model_copy(update={"workspace_bytes": size})

    def update_work(self, group: ParamGroup, numbers: Work, *, is_summed: bool) -> Work:
        """Return the work with quantized values that are updated, or are summed."""
        tuned = self.tuned(group)
        if not tuned:
            return numbers
        # Of linear layers all, or of adapters.
        linears, how = [one for one, _ in tuned], tuned[0][1]
        if is_summed:  # a perturbation of a byte an element, and the sum so far
            total, largest = num_elements(tuned), max(rows * columns for rows, columns in linears)
            summed = Work(dtype=numbers.dtype, param_pass_bytes=9 * total, num_kernels=len(linears))
            return numbers + summed + unpacking_work(total, self.perturbation_format, at_once=largest)
        # What queries add up to is rounded in all rows.
        share = 1.0 if self.rounds_sums else 1 - self.sparsity
        quantized = quantized_update_work(linears, how, share, perturbation_format=self.perturbation_format)
        return quantized + numbers  # in the format of the first
