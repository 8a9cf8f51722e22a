"""How the forward passes are run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from costmodel.formats import DType
from topology.limits import Extent
from zosim.plans.axis import Axis, Conflict

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
    """

    compute_dtype: DType | None = None
    attention: Literal["eager", "sdpa"] = "sdpa"
    loss_chunk_tokens: Extent | None = None

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what the products cannot read."""
        if plan.compute_dtype == "tf32" and plan.weights.dtype != "float32":
            yield f"compute_dtype=tf32 reads float32, but dtype={plan.weights.dtype}", "use dtype=float32"
