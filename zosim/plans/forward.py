"""How the forward passes are run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from costmodel.formats import DType
from topology.limits import Extent
from zosim.plans.axis import Axis, Conflict
from zosim.plans.setting import Setting
from zosim.plans.weights import in_full

if TYPE_CHECKING:
    from zosim.plans import Plan


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
        Tokens whose logits are alive at once; None for all.
    num_labels : int or None
        Tokens of a sequence that have a label, where few do: predictions of a forward that makes logits of these alone
        count them. None for all.
    """

    compute_dtype: Annotated[
        Annotated[DType, BeforeValidator(in_full)] | None,
        Setting(
            "--compute-dtype",
            "Format of the matrix products, such as tf32 or bfloat16.",
            changes="numbers",
            usual="--dtype",
        ),
    ] = None
    attention: Annotated[
        Literal["eager", "sdpa"], Setting("--attention", "Implementation of attention.", changes="numbers")
    ] = "sdpa"
    loss_chunk_tokens: Annotated[
        Extent | None,
        Setting(
            "--loss-chunk-tokens",
            "Tokens whose logits are alive at once.",
            changes="numbers",
            planned=True,
            usual="all, or as many as fit",
            aliases=("--loss-chunk",),
        ),
    ] = None

    num_labels: Annotated[
        Extent | None,
        Setting(
            "--labels-per-sequence",
            "Labelled tokens of a sequence, for predictions of --weights adapters.",
            usual="all",
        ),
    ] = None

    def words(self, plan: Plan) -> Iterator[str]:
        """Yield how the loss is taken, where it is not that of all tokens at once."""
        del plan
        if self.loss_chunk_tokens:
            yield f"loss in chunks of {self.loss_chunk_tokens}"

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what the products cannot read."""
        if plan.compute_dtype == "tf32" and plan.weights.dtype != "float32":
            yield f"compute_dtype=tf32 reads float32, but dtype={plan.weights.dtype}", "use dtype=float32"
