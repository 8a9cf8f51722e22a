"""``python -m studies.proof_against_code``: three statements read, and what running them says."""

from __future__ import annotations

from proofs_checks.oracles.estimates import quantized_estimate_factor
from proofs_checks.oracles.rounding import rounding_moments
from proofs_checks.oracles.smoothing import estimate_bias
from studies.proof_against_code.cases import EncodedBoundary


def in_a_limit() -> None:
    """Show how the bias of an estimate goes with ε."""
    for epsilon in (0.4, 0.2, 0.1):
        bias = estimate_bias("sine", 0.5, epsilon)
        print(f"sin at 0.5, ε = {epsilon:g}: bias {bias:.5f}, over ε² {bias / epsilon**2:.3f}")


def within_a_range() -> None:
    """Show what stochastic rounding is on average, within its levels and beyond."""
    for value in (0.3, 6.9, 9.0):
        moments = rounding_moments(value, bits=4, scale=1.0)
        print(
            f"x = {value:g} in 4 bits up to 7: mean {moments['mean']:g}, variance {moments['variance']:.2f}"
        )
    for limit in (6.0, 2.0, 1.0):
        factor = quantized_estimate_factor("q-rge2", 4, 7 / limit)
        print(f"perturbations clamped at ±{limit:g}: E[ĝ] = {factor:.3f}·∇f")


def not_at_all() -> None:
    """Show a boundary whose gradient is off where lemma 1 allows nothing."""
    boundary = EncodedBoundary.of(
        [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], [1.0, 0.4 / 7], bits=4
    )
    print(f"F∘S₂ = a·y: L₂ in y is {boundary.rest_smoothness:g}, κ = {boundary.kappa:.3f}")
    print(
        f"‖∇f - ∇f̂‖² = {boundary.gradient_error:.5f}, lemma 1 allows {boundary.allowed(boundary.rest_smoothness):g}"
    )
    print(
        f"with L₂ in activation and parameters, {boundary.joint_smoothness:g}, it allows {boundary.allowed(boundary.joint_smoothness):.5f}"
    )


def main() -> None:
    """Print all three."""
    for part in (in_a_limit, within_a_range, not_at_all):
        print(f"-- {part.__name__.replace('_', ' ')}")
        part()


if __name__ == "__main__":
    main()
