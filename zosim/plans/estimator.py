"""The zeroth-order estimate of the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from topology.limits import NumPerturbations
from zosim.eval_points import Difference, eval_points_of_step
from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan

MAX_FORWARDS = 2**12
"""Of segments, by one rank in one step: to simulate so many takes some ten seconds."""


class Estimator(Axis):
    """The zeroth-order estimate of the gradient; :class:`~zosim.plans.Perturbations` says along what.

    Attributes
    ----------
    difference : str
        ``"central"``: ``g = (l(θ + εz) - l(θ - εz)) / 2ε``. ``"forward"``: ``g = (l(θ + εz) - l(θ)) / ε``. ``"residual"``: one
        point a perturbation, ``g = (l(θ + εz) - l')/ε`` with what that loss ``l'`` was in the step before; in the first, ``g = 0``.
    num_perturbations : int
        Perturbations per step; their updates are averaged.
    epsilon : float
        Smoothing radius ``ε``.

    References
    ----------
    .. [1] J. Spall, "Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient
       Approximation", IEEE Transactions on Automatic Control 37(3), 1992.
    .. [2] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333,
       algorithm 1.
    .. [3] Y. Zhang et al., "A New One-Point Residual-Feedback Oracle For Black-Box Learning and Control", 2020,
       arXiv:2006.10820: the residual difference.
    """

    heading = "Estimator and optimizer"

    difference: Annotated[
        Difference,
        Setting(
            "--difference",
            "Finite difference: central (losses at +eps and -eps), forward (+eps and the unperturbed "
            "loss), or residual (+eps and the loss of the previous step; one forward per perturbation).",
            changes="numbers",
            expert=True,
        ),
    ] = "central"
    num_perturbations: Annotated[
        NumPerturbations,
        Setting(
            "--num-perturbations",
            "Number of perturbations per step.",
            "numbers",
            recorded_as="num_perturbations",
        ),
    ] = 1
    epsilon: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False),
        Setting(
            "--eps",
            "Smoothing radius epsilon, the scale of each perturbation.",
            "numbers",
            recorded_as="epsilon",
            aliases=("--epsilon",),
        ),
    ] = 1e-3

    def summary(self, plan: Plan) -> Iterator[str]:  # noqa: ARG002 - others look at it
        """Yield that a perturbation of `plan` has one evaluation point."""
        if self.difference == "residual":
            yield "one evaluation point per perturbation"

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield an error if `plan` has more forwards of segments than its programs can be ordered with in minutes."""
        num_forwards = plan.mesh.most_eval_points(self.num_eval_points) * -(
            -len(plan.model.segments) // plan.mesh.stage
        )
        if num_forwards > MAX_FORWARDS:
            complaint = (
                f"{self.num_perturbations} perturbations of {len(plan.model.segments)} segments take "
                f"{num_forwards} segment forwards per step and rank, more than the maximum of {MAX_FORWARDS}"
            )
            yield (
                complaint,
                "use fewer perturbations per step, or more ranks along the mesh axis perturb",
            )

    @property
    def points_formula(self) -> str:
        """The number of points, of ``P`` perturbations."""
        return {"central": "2P", "forward": "(P + 1)", "residual": "P"}[self.difference]

    @property
    def num_moves(self) -> int:
        """Passes over weights that are perturbed in place, for each perturbation: to its points and back."""
        return 3 if self.difference == "central" else 2

    @property
    def num_eval_points(self) -> int:
        """Points at which a step evaluates the loss."""
        return len(eval_points_of_step(self.num_perturbations, self.difference))
