"""What QuZO's removed bias can change at 8 bits; the claim's page holds the points of table 18 against it."""

from __future__ import annotations

import math

from costmodel.formats.roundings import Moments, RoundedPerturbation
from proofs_checks.claims import Checks, counterexample
from proofs_checks.exact import equal, exceeds
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import planted
from proofs_checks.quzo.statements import enumerated_moments


def check_bias_is_small(_context: Context) -> Outcome:
    """Compare what one rounding used twice changes in mean and square of an estimate, 8 bits, with a thousandth.

    The mean is ``E[Q²]`` of the gradient, so that steps of learning rate η are steps of ``vη``: along a perturbation of curvature 1 they are
    ``e^{-t}`` and ``e^{-vt}`` of the start, which are never farther apart than ``(1 - v)/ve``.
    """
    own = RoundedPerturbation("gaussian", 8)
    squares = enumerated_moments(own)[0]
    apart = max(abs(math.exp(-t / 100) - math.exp(-squares * t / 100)) for t in range(1000))
    square = own.moments.cross_fourth / own.moments.fourth
    return everything_holds(
        {
            "E[Q²] of what runs": equal(own.moments.second, squares, what="moment", tolerance=1e-7),
            "mean": exceeds(5e-4, abs(squares - 1), what="5e-4 against |E[Q²] - 1|"),
            "square": equal(square, 1.0, what="E[Q₁²Q₂²]/E[Q⁴]", tolerance=1e-3),
            "runs": exceeds(
                1e-4, apart, what="1e-4 of the distance to the minimum against the most between both"
            ),
        }
    )


@planted("costmodel.formats.roundings:moments_of", "a second moment that forgets the tails")
def without_tails(shipped, distribution, levels):
    tail, _, _ = distribution.partial_moments(levels[-1], math.inf)
    forgotten = 2 * tail * levels[-1] ** 2, 2 * tail * levels[-1] ** 4
    found = shipped(distribution, levels)
    return Moments(*(moment - lost for moment, lost in zip(found, 2 * forgotten, strict=True)))


CHECKS: Checks = {"quzo-bias-explains-no-points": counterexample(check_bias_is_small, without_tails)}
