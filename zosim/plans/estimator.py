"""The zeroth-order estimate of the gradient."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from topology.limits import Queries
from zosim.plans.axis import Axis


class Estimator(Axis):
    """The zeroth-order estimate of the gradient; :class:`~zosim.plans.Directions` says along what.

    Attributes
    ----------
    difference : str
        ``"central"``: ``g = (l(θ + εz) - l(θ - εz)) / 2ε``. ``"forward"``: ``g = (l(θ + εz) - l(θ)) / ε``.
    num_queries : int
        Directions per step; their updates are averaged.
    epsilon : float
        Smoothing radius ``ε``.
    """

    difference: Literal["central", "forward"] = "central"
    num_queries: Queries = 1
    epsilon: float = Field(default=1e-3, gt=0, allow_inf_nan=False)

    @property
    def num_points(self) -> int:
        """Points at which a step evaluates the loss."""
        return 2 * self.num_queries if self.difference == "central" else self.num_queries + 1
