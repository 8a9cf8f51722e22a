"""Weights, perturbations and activations in few bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from costmodel.formats import FORMATS, DType, QuantFormat, ScaleScope
from costmodel.formats.low_bits import Fit, QuantConfig
from costmodel.formats.roundings import EstimatorName, RoundedPerturbation
from costmodel.storage import DenseStorage, QuantizedStorage
from topology.errors import PlanError
from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan

KernelName = Literal["int_mm", "scaled_mm", "dequantize"]
"""What multiplies activations by quantized values: torch's product of int8 matrices, that of e4m3 ones, or a product with the weights made of
the quantized values."""

InputFormat = Literal["", "int8", "float8"]
"""What inputs are rounded to before they are multiplied; float8 is e4m3."""

_KERNELS: dict[InputFormat, KernelName] = {"": "dequantize", "int8": "int_mm", "float8": "scaled_mm"}

_FLOAT8_PERTURBATION_BITS = 5
"""Quantized values up to 15 are numbers of e4m3, which has four digits; those of 6 bits and more are not."""

_OF_WHOLE_ROWS = ("tensor", "channel")
"""Scales that a sum over a row's products can be multiplied by."""

_FLOAT8_MULTIPLE = 16
"""Inputs that a product of e4m3 matrices wants a multiple of."""


InputScales = Literal["", "token", "tensor"]
"""What shares a scale of inputs."""


class LowBits(Axis):
    """Matrices that are kept quantized of few bits, and trained there (QuZO): those of the blocks' linear layers.

    Token table, head, norms, biases and positions stay in :attr:`Weights.dtype`, as do scales. The quantized values are never moved to an evaluation
    point: forwards read them and the perturbation, and add ``ε·x·Ûᵀ`` to ``x·Wᵀ``, or multiply by ``W + ε·Û``. Updates are
    rounded at random onto the grid.
    """

    heading = "Precision"

    # Format of the quantized values; `"none"` for linear layers that are kept as all others.
    weights: Annotated[
        Literal["none", QuantFormat],
        Setting(
            "--weight-format",
            "Format in which the linear layers of blocks are quantized and trained.",
            "numbers",
        ),
    ] = "none"
    # What shares a scale.
    scales: Annotated[
        ScaleScope,
        Setting("--weight-scales", "Scope of a scale of quantized weights.", "numbers", expert=True),
    ] = "channel"
    # Neighbouring inputs that share one, under `scales="group"`.
    group_elements: Annotated[
        int,
        Field(ge=8, le=1 << 16, multiple_of=8),
        Setting(
            "--weight-group",
            "Number of neighbouring inputs that share a scale under --weight-scales group; a multiple of 8.",
            "numbers",
            expert=True,
        ),
    ] = 128
    # Whether scales span the largest weight, or are those with the least mean squared error.
    fit: Annotated[
        Fit,
        Setting(
            "--weight-fit",
            "Choice of scales: to span the largest weight (range), or to minimise the mean squared error.",
            "numbers",
            expert=True,
        ),
    ] = "range"
    # Whether the grid spans the least and the largest weight, not as much on both sides of 0.
    zero_point: Annotated[
        bool,
        Setting(
            "--zero-point",
            "Quantize with a zero point, so that the grid spans the smallest to the largest weight.",
            "numbers",
            expert=True,
        ),
    ] = False
    # Format of the A and B of adapters beside quantized values, with one scale for each; `"none"` for numbers. They are tuned on their
    # grids, as other quantized values are.
    adapters: Annotated[
        Literal["none", QuantFormat],
        Setting(
            "--adapter-format",
            "Format in which the A and B of adapters on quantized weights are quantized and trained.",
            "numbers",
            expert=True,
        ),
    ] = "none"
    # Bits that perturbations of all parameters are rounded to, at random, each in a byte.
    perturbation_bits: Annotated[
        int,
        Field(ge=2, le=8),
        Setting(
            "--perturbation-bits",
            "Number of bits that perturbations of quantized weights are rounded to.",
            "numbers",
            expert=True,
        ),
    ] = 8
    # What a projected gradient along the rounded perturbation `û₁` is multiplied by: `"q-rge1"` by `û₁`, `"q-rge2"` by another rounding
    # `û₂` of the same perturbation, `"normalised"` by `û₁` over its second moment.
    estimator: Annotated[
        EstimatorName,
        Setting(
            "--estimator",
            "Update perturbation of quantized weights: the rounded perturbation (q-rge1), another rounding "
            "of it (q-rge2), or the first over its second moment (normalised).",
            "numbers",
            expert=True,
            heading="Estimator and optimizer",
        ),
    ] = "normalised"
    # `"perturbation"`: the quantized updates by each perturbation is rounded at random by itself, as QuZO's equation 15 has it;
    # `"step"`: the sum of a step's, once.
    update_rounding: Annotated[
        Literal["perturbation", "step"],
        Setting(
            "--update-rounding",
            "Stochastic rounding of updates of quantized weights: for each perturbation, or once per step"
            " for their sum, which takes 32 bits per weight of one block.",
            "numbers",
            expert=True,
        ),
    ] = "perturbation"
    # Probability that a row of the perturbation of a quantized weight, an output channel, is 0 in a step. Others are `1/√(1 -
    # sparsity)` times as long, so that perturbations are as long on average.
    sparsity: Annotated[
        float,
        Field(ge=0, le=0.9999, allow_inf_nan=False),
        Setting(
            "--sparsity",
            "Fraction of output channels left unperturbed in a step, from 0 to 0.9999; the others are "
            "scaled up to keep the mean norm.",
            "numbers",
            expert=True,
            heading="Estimator and optimizer",
        ),
    ] = 0.0
    # Format of the inputs of quantized linear layers: `"none"`, or int8 or e4m3 with a scale for each token or one for all, as large as
    # the inputs of each product make it.
    activations: Annotated[
        Literal["none", "int8-token", "int8-tensor", "float8-token", "float8-tensor"],
        Setting(
            "--activation-format",
            "Format of the inputs of quantized linear layers, with a scale per token or per tensor.",
            "numbers",
            expert=True,
        ),
    ] = "none"
    # What multiplies, `product`; None for `"int_mm"` where activations are int8, `"scaled_mm"` where they are e4m3, else
    # `"dequantize"`.
    kernel: Annotated[
        KernelName | None,
        Setting(
            "--kernel",
            "Matmul kernel for quantized weights.",
            "numbers",
            usual="int_mm for int8 inputs, scaled_mm for float8 inputs, dequantize otherwise",
            expert=True,
        ),
    ] = None
    # Whether a run may dequantize where the device has no such kernel.
    fallback: Annotated[
        bool,
        Setting(
            "--kernel-fallback",
            "Dequantize the weights where the device lacks the kernel.",
            "numbers",
            expert=True,
        ),
    ] = False

    @property
    def quantizes_weights(self) -> bool:
        """Whether linear layers are kept quantized."""
        return self.weights != "none"

    @property
    def product(self) -> KernelName:
        """What multiplies activations by quantized values."""
        return self.kernel or _KERNELS[self.input_format]

    @property
    def input_format(self) -> InputFormat:
        """What the inputs of quantized linear layers are rounded to; empty where they are as they come."""
        return "" if self.activations == "none" else self.activations.partition("-")[0]  # type: ignore[return-value]

    @property
    def input_scales(self) -> InputScales:
        """What shares a scale of rounded inputs of quantized linear layers; empty where inputs are as they come."""
        return self.activations.partition("-")[2]  # type: ignore[return-value]

    @property
    def may_dequantize(self) -> bool:
        """Whether weights may be dequantized where another kernel was counted on."""
        return self.fallback or self.product == "dequantize"

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield the formats and the kernel."""
        if not self.quantizes_weights:
            return
        scale = f"group of {self.group_elements}" if self.scales == "group" else self.scales
        yield f"{self.weights} linears (a scale per {scale}), the rest {plan.weights.dtype}"
        if self.adapters != "none":
            yield f"{self.adapters} adapters"
        sparse = f" in {1 - self.sparsity:.2%} of the channels" if self.sparsity else ""
        yield f"{self.perturbation_bits}-bit perturbations{sparse}, {self.estimator}"
        activations = (
            "" if self.activations == "none" else f" of {self.activations.replace('-', ' per ')} inputs"
        )
        yield f"{self.product}{activations}"
        if self.update_rounding == "step":
            yield "updates rounded once a step"

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what quantized values do not do."""
        yield from self._conflicts_of_files(plan)
        if not self.quantizes_weights:
            declared = self.model_dump(exclude_defaults=True)
            if declared:
                yield (
                    f"{', '.join(f'low_bits.{name}' for name in declared)} need quantized weights",
                    f"add low_bits.weights={QuantFormat.__args__[0]}, for example",  # type: ignore[attr-defined]
                )
            return
        yield from self._conflicts_of_model(plan)
        yield from self._conflicts_of_adapters(plan)
        yield from self._conflicts_of_kernel()
        if self.product == "scaled_mm":
            yield from self._conflicts_of_float8(plan)
        if self.sparsity and not any(map(plan.storage.tuned, plan.model.param_groups)):
            yield (
                f"low_bits.sparsity={self.sparsity:g} applies to quantized weights that are tuned, but none is",
                "leave low_bits.sparsity out, or tune the linear layers",
            )
        if self.update_rounding == "step" and plan.estimator.num_perturbations == 1:
            yield (
                "low_bits.update_rounding=step sums the updates of several perturbations, but a step has one",
                "raise estimator.num_perturbations, or leave low_bits.update_rounding out",
            )
        if plan.schedule.traversal == "full" and not plan.perturbations.kept:
            yield (
                (
                    "schedule.traversal=full discards a perturbation before the forward that adds it to quantized "
                    "weights"
                ),
                "use schedule.traversal=blockwise, or perturbations.kept=True, which takes a byte per tuned parameter",
            )
        if plan.perturbations.kept and self.estimator == "q-rge2":
            yield (
                (
                    "low_bits.estimator=q-rge2 rounds each perturbation a second time for its update, but kept ones are rounded "
                    "once"
                ),
                "leave perturbations.kept out",
            )
        if not plan.perturbs_in_place and not (plan.perturbs_by_adapters and plan.model.tunes_left_factors):
            yield (
                (
                    f"weights.perturbation={plan.weights.perturbation} does not apply to quantized weights, which are read in "
                    "place"
                ),
                "use weights.perturbation=serial",
            )
        if plan.residency.transfer_dtype is not None:
            yield (
                (
                    f"residency.transfer_dtype={plan.residency.transfer_dtype} does not apply to quantized weights, which "
                    "are transferred as they are"
                ),
                "leave it out",
            )

    def _conflicts_of_files(self, plan: Plan) -> Iterator[Conflict]:
        """Yield how the quantized values in the files of a quantized model differ from those that the plan asks for."""
        if plan.model.stored is None:
            return
        for name, kept in plan.model.stored.fields.items():
            requested = getattr(self, name)
            if name != "activations" and requested != kept:
                yield (
                    f"{plan.model.name} is quantized with low_bits.{name}={kept}, but the plan has low_bits.{name}={requested}",
                    "leave the quantization options out, or use the model in 16 bits",
                )
                return

    def _conflicts_of_model(self, plan: Plan) -> Iterator[Conflict]:
        quant_config, groups = self.quant_config(plan.storage_dtype), plan.model.param_groups
        assert quant_config is not None
        linears = [one for group in groups for one in (*group.linears, *group.frozen_linears)]
        if not linears:
            yield (
                f"{plan.model.name} lists no linear layers to quantize",
                "make the ModelSpec again from the model's config.json",
            )
        try:
            quant_config.check(linears)
        except PlanError as error:
            yield error.message, error.hint or ""

    def _conflicts_of_adapters(self, plan: Plan) -> Iterator[Conflict]:
        if self.adapters == "none":
            return
        if not plan.model.adapter_rank:
            yield (
                f"low_bits.adapters={self.adapters} needs adapters",
                "add --lora-rank, or leave low_bits.adapters out",
            )
        if plan.model.tunes_left_factors:
            yield (
                (
                    f"low_bits.adapters={self.adapters} does not apply where A is sampled anew: B begins again as "
                    "zeros, unquantized"
                ),
                "leave --lora-lazy-steps or low_bits.adapters out",
            )

    def _conflicts_of_kernel(self) -> Iterator[Conflict]:
        is_float = FORMATS[self.weights].is_float
        if is_float and self.zero_point:
            yield (
                f"low_bits.zero_point does not apply to {self.weights}, whose values have a sign",
                "use an integer format for low_bits.weights, or leave low_bits.zero_point out",
            )
        if self.product != "int_mm":
            return
        if is_float:
            yield (
                f"low_bits.kernel=int_mm multiplies integers, but low_bits.weights={self.weights}",
                "use low_bits.kernel=dequantize",
            )
        if self.input_format != "int8":
            yield (
                f"low_bits.kernel=int_mm needs int8 activations, but low_bits.activations={self.activations}",
                "use low_bits.activations=int8-token",
            )
        if self.scales not in _OF_WHOLE_ROWS or self.zero_point:
            yield (
                "low_bits.kernel=int_mm needs one scale per row and no zero point",
                "use low_bits.scales=channel without low_bits.zero_point, or low_bits.kernel=dequantize",
            )

    def _conflicts_of_float8(self, plan: Plan) -> Iterator[Conflict]:
        if (
            self.weights != "float8_e4m3"
            or self.input_format != "float8"
            or self.scales not in _OF_WHOLE_ROWS
        ):
            yield (
                (
                    "low_bits.kernel=scaled_mm needs float8_e4m3 weights with a scale per row and float8 activations, "
                    f"but has low_bits.weights={self.weights} and low_bits.activations={self.activations}"
                ),
                "use low_bits.weights=float8_e4m3 and low_bits.activations=float8-token, or low_bits.kernel=dequantize",
            )
        if self.perturbation_bits > _FLOAT8_PERTURBATION_BITS:
            yield (
                f"low_bits.kernel=scaled_mm adds perturbations in float8_e4m3, which cannot hold low_bits.perturbation_bits={self.perturbation_bits}",
                f"use low_bits.perturbation_bits={_FLOAT8_PERTURBATION_BITS} or fewer",
            )
        storage = plan.storage
        matrices = (
            one
            for group in plan.model.param_groups
            for one, _ in (*storage.tuned(group), *storage.frozen(group))
        )
        odd = next((inputs for _, inputs in matrices if inputs % _FLOAT8_MULTIPLE), None)
        if odd is not None:
            yield (
                (
                    f"low_bits.kernel=scaled_mm needs a number of inputs that is a multiple of {_FLOAT8_MULTIPLE}, but a "
                    f"layer has {odd}"
                ),
                "use low_bits.kernel=dequantize",
            )

    def quant_config(self, storage: DType, *, is_full_range: bool = False) -> QuantConfig | None:
        """Return how matrices are kept that are quantized, beside parameters in format `storage`; None where none is."""
        if self.weights == "none":
            return None
        return QuantConfig(
            self.weights,
            self.scales,
            self.group_elements,
            self.zero_point,
            storage,
            is_full_range,
            self.fit,
            None if self.adapters == "none" else self.adapters,
        )

    def storage(self, plan: Plan) -> DenseStorage:
        """Return how parameters are stored, and perturbations beside them."""
        dtype, distribution = plan.weights.dtype, plan.perturbations.distribution
        # Quantized values that another tool made go on using their lowest number where they did.
        quant_config = self.quant_config(
            dtype, is_full_range=plan.model.stored is not None and plan.model.stored.full_range
        )
        if quant_config is None:
            return DenseStorage(dtype=dtype, distribution=distribution)
        perturbation = RoundedPerturbation(distribution, self.perturbation_bits, self.sparsity)
        return QuantizedStorage(
            dtype=dtype,
            distribution=distribution,
            quant_config=quant_config,
            perturbation=perturbation,
            update_rounding=int(self.estimator == "q-rge2"),
            update_divisor=perturbation.divisor(self.estimator),
            rounds_sums=self.update_rounding == "step",
            product=self.product,
            are_inputs_quantized=bool(self.input_scales),
        )
