"""How the forward passes are run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from costmodel.formats import DType
from topology.limits import Extent
from zosim.plans.setting import Axis, Conflict, Setting
from zosim.plans.weights import in_full

if TYPE_CHECKING:
    from zosim.plans import Plan


USUAL_NEW_TOKENS = 16
"""Tokens that a reward is of, where nobody says how many."""


class ForwardPass(Axis):
    """How a forward pass is run.

    Attributes
    ----------
    compute_dtype : str or None
        Format of the matrix products, :attr:`Plan.compute_dtype`; None for that of the weights. ``"tf32"`` reads and
        writes float32; another format runs the forwards under autocast.
    attention : str
        Implementation of attention.
    loss_chunk_tokens : int or None
        Number of tokens whose logits are alive at once; None for all.
    num_new_tokens : int or None
        Tokens that every sequence is continued by at each point, the most probable ones, for a reward of that text to be
        minimised in place of the loss. None for the loss of the sequences themselves.
    num_labels, num_tokens, num_shared, num_answers, num_attended : int or None
        Facts of a batch, for predictions of a forward that is packed (``weights=adapters``; others compute all of it): tokens of
        a sequence that have a label, of which alone it makes logits; tokens of a sequence on average, padding left out;
        tokens that all sequences begin with, and sequences that differ in the answer to their prompt alone, both of which it
        computes once; tokens that attention holds beside one on average, which are more than those of the mean sequence where
        lengths differ. None for all, for the sequence length, for none, for one, and for those of a sequence. No option sets them:
        a run counts them in its data.
    """

    heading = "Precision"

    compute_dtype: Annotated[
        Annotated[DType, BeforeValidator(in_full)] | None,
        Setting(
            "--compute-dtype",
            "Format of the matrix products.",
            changes="numbers",
            usual="--dtype",
            expert=True,
        ),
    ] = None
    attention: Annotated[
        Literal["eager", "sdpa"],
        Setting("--attention", "Implementation of attention.", changes="numbers", expert=True),
    ] = "sdpa"
    loss_chunk_tokens: Annotated[
        Extent | None,
        Setting(
            "--loss-chunk-tokens",
            "Number of tokens whose logits are held at once.",
            changes="numbers",
            planned=True,
            tried=tuple(2**power for power in range(5, 17)),
            usual="all tokens, or as many as are fastest and fit",
            aliases=("--loss-chunk",),
            expert=True,
            heading="Placement",
        ),
    ] = None

    num_new_tokens: Annotated[
        Extent | None,
        Setting(
            "--max-new-tokens",
            "Maximum number of tokens generated per prompt at each evaluation point, for --reward.",
            changes="numbers",
            usual=f"{USUAL_NEW_TOKENS} with --reward",
            heading="Model and data",
        ),
    ] = None
    # Facts of the data: a run counts them, and no option sets them.
    num_labels: Annotated[Extent | None, Setting(help="Number of labelled tokens per sequence.")] = None
    num_tokens: Annotated[Extent | None, Setting(help="Mean number of tokens per sequence.")] = None
    num_shared: Annotated[Extent | None, Setting(help="Number of tokens that all sequences begin with.")] = (
        None
    )
    num_answers: Annotated[
        Extent | None, Setting(help="Number of sequences that differ only in their answer.")
    ] = None
    num_attended: Annotated[Extent | None, Setting(help="Mean number of tokens that a token attends to.")] = (
        None
    )

    @property
    def has_facts(self) -> bool:
        """Whether anything is known of what batches hold."""
        return any((self.num_labels, self.num_tokens, self.num_shared, self.num_answers, self.num_attended))

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield how `plan` takes the loss, unless over all tokens at once."""
        del plan
        if self.loss_chunk_tokens:
            yield f"loss in chunks of {self.loss_chunk_tokens}"
        if self.num_new_tokens:
            yield f"a reward of {self.num_new_tokens} new tokens"

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what the products of `plan` cannot read."""
        if plan.compute_dtype == "tf32" and plan.weights.dtype != "float32":
            yield (
                f"forward.compute_dtype=tf32 needs float32 weights, but weights.dtype={plan.weights.dtype}",
                "use weights.dtype=float32",
            )
        if {plan.compute_dtype, plan.weights.dtype} == {"float16", "bfloat16"}:
            # Layer norms of a CPU do not mix them, nor does autocast where it joins tensors, on any device.
            yield (
                (
                    f"forward.compute_dtype={plan.compute_dtype} and weights.dtype={plan.weights.dtype} are two different 16-bit "
                    "formats"
                ),
                "use one of them for both, or weights.dtype=float32",
            )
        if self.num_new_tokens is not None:
            yield from self._conflicts_of_text(plan)
        if (self.num_shared or 0) >= (self.num_tokens or plan.seq) or (self.num_tokens or 0) > plan.seq:
            yield (
                (
                    f"{self.num_shared or 0} shared tokens are too many for sequences of "
                    f"{self.num_tokens or plan.seq} tokens on average, at most {plan.seq}"
                ),
                "the shared tokens must be fewer than those of a sequence",
            )

    def _conflicts_of_text(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what does not go with forwards of the whole model at one point, one for each token."""
        num_messages = len(plan.eval_points) * (self.num_new_tokens or 0)
        # Stages first: where blocks are and how they are visited is often the planner's choice, the mesh rarely is.
        for is_requested, what, remedy in (
            (
                bool(plan.split.split_points),
                "split points or stages, the first of which would wait for the last before every token",
                "share the step out otherwise: mesh.data=N or mesh.perturb=N",
            ),
            (
                plan.is_offloaded,
                f"offloaded blocks, which would cross the bus {num_messages} times a step",
                "use residency.blocks=resident; if the weights do not fit, add low_bits.weights=int4 and perturbations.kept=True",
            ),
            (
                plan.schedule.traversal != "full",
                f"schedule.traversal={plan.schedule.traversal}, which never has all blocks at one evaluation point",
                "use schedule.traversal=full",
            ),
            (
                plan.perturbs_by_adapters,
                "weights.perturbation=adapters",
                "use weights.perturbation=serial or copies",
            ),
            (not plan.model.is_causal, f"{plan.model.name}, which fills in masks", "use a causal model"),
            (self.loss_chunk_tokens is not None, "a loss in chunks", "leave forward.loss_chunk_tokens out"),
        ):
            if is_requested:
                yield (
                    f"forward.num_new_tokens={self.num_new_tokens}: text cannot be generated with {what}",
                    remedy,
                )
