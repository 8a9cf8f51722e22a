"""The format of the weights, and how they come to an evaluation point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from costmodel.formats import StorageFormat, format_name
from costmodel.formats.distributions import DISTRIBUTIONS
from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


def in_full(name: object) -> object:
    """Return the name of a format without its abbreviation, such as ``float16`` for ``fp16``."""
    return format_name(name) if isinstance(name, str) else name


StorageDType = Annotated[StorageFormat, BeforeValidator(in_full)]


class Weights(Axis):
    """The weights that are perturbed and updated.

    Attributes
    ----------
    dtype : str
        Format that they are stored in. The products and the transfers have it, too, unless
        :class:`~zosim.plans.ForwardPass` and :class:`~zosim.plans.Residency` name one of their own.
    perturbation : str
        How weights come to an evaluation point. ``"serial"``: one state of them is moved from point to point in place,
        and back by one more perturbation, whose rounding leaves a drift (the reference loop). ``"copies"``: each point is
        written beside the weights, ``θ + (s·z)·ε`` for its own sign, and read there; only updates change ``θ``. It takes one
        more buffer of the largest segment; under ``"full"`` one of all that is trainable for each sign, so that both come
        of one draw. ``"adapters"``: the weights stay as they are, one forward has all points side by side, and linear layers
        add the factors of each point's perturbation to its part of the product. Numbers differ in roundings, so that the planner
        chooses none of them: a field that nobody set is the reference loop.

    References
    ----------
    .. [1] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333,
       algorithm 1. It perturbs in place.
    """

    heading = "Precision"

    dtype: Annotated[
        StorageDType,
        Setting(
            "--dtype",
            "Format of the weights, and of matrix products and transfers unless set separately.",
            changes="numbers",
            usual="the checkpoint's format where the GPU supports it; float32 on a CPU",
        ),
    ] = "float32"
    perturbation: Annotated[
        Literal["serial", "copies", "adapters"],
        Setting(
            "--weights",
            "How weights are perturbed: in place and back (serial, with MeZO's rounding drift), on a copy"
            " (copies), or as low-rank adapters with all perturbations batched in one forward (adapters).",
            changes="numbers",
            heading="Estimator and optimizer",
            expert=True,
        ),
    ] = "serial"

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield how weights of `plan` are perturbed, unless in place."""
        if self.perturbation == "copies":
            yield "copies written ahead" if plan.perturbations.sampled_ahead else "copies of weights"
        elif self.perturbation == "adapters":
            yield "all points in one forward, perturbations as adapters"

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what in `plan` cannot be perturbed by adapters, or batched in one forward."""
        if self.perturbation != "adapters":
            return
        if plan.model.tunes_left_factors:
            if plan.perturbations.rank is not None:
                complaint = f"adapters sample full perturbations of B, but perturbations.distribution={plan.perturbations.distribution} samples factors"
                yield complaint, "use perturbations.distribution=gaussian or rademacher"
        else:
            yield from self._not_beside_linears(plan)
        yield from self._not_together(plan)

    def _not_beside_linears(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what of a plan that tunes the base itself cannot stand beside its linears."""
        distribution = DISTRIBUTIONS[plan.perturbations.distribution]
        if not distribution.is_factored or distribution.is_resampled:
            complaint = f"weights.perturbation=adapters needs low-rank perturbations, but perturbations.distribution={plan.perturbations.distribution}"
            yield complaint, "use perturbations.distribution=lozo or factorised"
        num_linear = sum(outputs * inputs for g in plan.model.param_groups for outputs, inputs in g.linears)
        if num_linear != plan.model.num_trainable:
            complaint = (
                "weights.perturbation=adapters tunes only the linear layers of blocks, but "
                f"{plan.model.num_trainable - num_linear} of the {plan.model.num_trainable} trainable "
                f"parameters of {plan.model.name} are others"
            )
            yield complaint, "add --tune linears, or --lora-lazy-steps with adapters"
        if plan.low_bits.quantizes_weights:
            yield (
                "weights.perturbation=adapters does not support quantized weights that are tuned",
                "leave low_bits.weights out",
            )

    def _not_together(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what a forward of all points does not do."""
        for is_requested, what, remedy in (
            (
                plan.schedule.traversal != "blockwise",
                f"schedule.traversal={plan.schedule.traversal}",
                "use schedule.traversal=blockwise",
            ),
            (
                bool(plan.split.split_points),
                "split points, which pass on the hidden states of one evaluation point",
                "leave stages and split points out",
            ),
            (
                plan.perturbations.kept,
                "perturbations.kept=True, since factors are kept anyway",
                "leave perturbations.kept out",
            ),
            (
                plan.perturbations.sampled_ahead,
                "perturbations.sampled_ahead=True",
                "leave perturbations.sampled_ahead out",
            ),
            (
                plan.forward.loss_chunk_tokens is not None,
                "a loss in chunks: logits are made of labelled tokens alone",
                "leave forward.loss_chunk_tokens out",
            ),
        ):
            if is_requested:
                yield f"weights.perturbation=adapters does not support {what}", remedy
