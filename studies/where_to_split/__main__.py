"""``python -m studies.where_to_split``: what crosses a boundary, and what bits do to a projected gradient."""

from __future__ import annotations

from dataclasses import replace

from studies.sparq.training_epsilon import read_seen
from studies.where_to_split.cases import BoundaryCase, forward_bytes, same_numbers, slopes

USUAL = BoundaryCase(768, 3072, 32, 256, True, 32, 32, 5, "forward")
"""A block of OPT-125M, a batch of 32, five directions."""


def places() -> None:
    """Show what crosses inside a block and between blocks."""
    for words, inside in (("inside a block", True), ("between blocks", False)):
        sizes = []
        for activation, residual in ((32, 32), (4, 32), (4, 4)):
            made = replace(USUAL, inside=inside, activation_bits=activation, residual_bits=residual)
            sizes.append(f"{forward_bytes(made) / 1e6:.0f} MB")
        print(
            f"{words}: {sizes[0]} a step plain, {sizes[1]} with 4-bit activations, {sizes[2]} with all in 4 bits"
        )


def points() -> None:
    """Show what the two estimators send."""
    for difference in ("forward", "central"):
        size = forward_bytes(replace(USUAL, difference=difference))
        print(
            f"{difference} difference, P = {USUAL.num_perturbations}: {size / forward_bytes(USUAL):.2f} times the bytes"
        )


def numbers() -> None:
    """Show what stages that draw the same numbers estimate."""
    own, same = same_numbers()
    print(f"gradient 1 beside another stage's -2: own numbers {own:.2f}, the same numbers {same:.2f}")


def radius() -> None:
    """Show what is left of a gradient behind a rounded activation."""
    for size in (0.1, 0.2, 0.5, 1.0):
        nearest = ", ".join(f"{slopes(size, place, stochastic=False)[0]:.2f}" for place in (0.0, 0.25, 0.45))
        mean, deviation = slopes(size, 0.25, stochastic=True)
        print(
            f"radius {size:g} steps: nearest {nearest} of 1; stochastic {mean:.2f} with deviation {deviation:.1f}"
        )


def measured() -> None:
    """Show what was measured on the embedded model."""
    for row in read_seen():
        if row.noise == "nearest" and row.epsilon == 1e-3:
            print(
                f"{row.split_point}, {row.codec}: off by {row.relative_error:.2f} of g, correlation {row.correlation:.2f}"
            )


def main() -> None:
    """Print all five."""
    for title, part in (
        ("places", places),
        ("points", points),
        ("numbers", numbers),
        ("radius", radius),
        ("measured", measured),
    ):
        print(f"-- {title}")
        part()


if __name__ == "__main__":
    main()
