"""Experts of a mixture: how many of them a batch of tokens visits, by which share of the visits each gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, model_validator

from costmodel.rates.profile import Bound
from topology.errors import ModelError
from topology.limits import ElementsOrNone, Extent

Shares = tuple[tuple[NonNegativeFloat, ...], ...]
"""A row for each block, empty where the block has no experts; or one row for all of them."""


class Experts(BaseModel):
    """Experts of a mixture, of which each token visits a few; every block has as many of its own.

    - `num_experts`, `num_per_token`: How many there are in a block, and how many of them a token visits.
    - `intermediate_size`: Width of one expert's gated MLP.
    - `shared_size`: Width of the MLP that all tokens go through besides, 0 where there is none.
    - `gates_shared`: Whether that MLP's output is scaled by a gate of its own (Qwen2-MoE).
    - `has_biases`: Whether experts have biases, which are picked for every visit.
    - `dense_blocks`: Blocks that have one MLP in place of experts.
    - `shares`: Share of the visits that each expert gets, by block; empty where nobody has measured it, which counts as even.
    - `share_errors`: Standard errors of `shares`; empty where they are not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: Extent
    num_per_token: Extent
    intermediate_size: Extent
    shared_size: ElementsOrNone = 0
    gates_shared: bool = False
    has_biases: bool = False
    dense_blocks: tuple[NonNegativeInt, ...] = ()
    shares: Shares = ()
    share_errors: Shares = ()

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        # They had one row, for all blocks.
        if isinstance(data, dict) and data.get("shares") and isinstance(data["shares"][0], int | float):
            return {**data, "shares": (data["shares"],)}
        return data

    @model_validator(mode="after")
    def _are_enough(self) -> Experts:
        if self.num_per_token > self.num_experts:
            message = f"num_experts_per_tok={self.num_per_token} exceeds the {self.num_experts} experts"
            raise ModelError(message, hint=f"use {self.num_experts} or less")
        for row in filter(None, (*self.shares, *self.share_errors)):
            if len(row) != self.num_experts:
                message = f"there are shares of {len(row)} experts, but the model has {self.num_experts}"
                raise ModelError(message, hint="give one share per expert")
        if any(row and not sum(row) for row in self.shares):
            raise ModelError("all shares of a block's experts are 0", hint="give at least one above 0")
        if self.share_errors and [*map(len, self.share_errors)] != [*map(len, self.shares)]:
            raise ModelError("share_errors does not match shares", hint="give one error for each share")
        return self

    def num_active(self, num_tokens: int, block: int = 0, *, num_resident: int = 0) -> float:
        """Return how many experts of a block so many tokens are expected to visit.

        Parameters
        ----------
        num_tokens : int
            Tokens of one forward.
        block : int
            The block.
        num_resident : int
            Experts that are not counted: those with the largest shares, as if a cache held them.

        Returns
        -------
        float
            From 0 to the number of experts.

        Notes
        -----
        Tokens choose ``k`` of ``E`` experts independently of each other, expert ``e`` with probability ``p_e``, which add up to
        ``k``. The number of experts that at least one of ``T`` tokens visits is expected to be ``Σ 1 - (1 - p_e)^T``; where all
        are as likely, ``E (1 - (1 - k/E)^T)``. Even shares visit the most. Tokens of one text choose alike, so a batch visits
        fewer.

        Examples
        --------
        >>> mixtral = Experts(num_experts=8, num_per_token=2, intermediate_size=14336)
        >>> mixtral.num_active(1), mixtral.num_active(4), round(mixtral.num_active(2048), 6)
        (2.0, 5.46875, 8.0)
        >>> mixtral.num_active(4, num_resident=6)
        1.3671875
        """
        return sum(1 - (1 - p) ** num_tokens for p, _ in [*self._probabilities(block)][num_resident:])

    def active_error(self, num_tokens: int, block: int = 0) -> float:
        """Return the standard error of :meth:`num_active` that comes of measuring shares on a sample; 0 where it is not known."""
        rows = [
            (p, num_tokens * (1 - p) ** (num_tokens - 1), error) for p, error in self._probabilities(block)
        ]
        # All shares grow together only where they are not shares: what is above the mean slope alone counts.
        mean_slope = sum(p * slope for p, slope, _ in rows) / self.num_per_token
        return sqrt(sum(((slope - mean_slope) * error) ** 2 for _, slope, error in rows))

    def most_uploads(self, num_tokens: int, *, num_resident: int = 0) -> int:
        """Return the most experts outside a cache of `num_resident` that so many tokens can visit."""
        return min(self.num_experts - num_resident, num_tokens * self.num_per_token)

    def bounding(self, bound: Bound) -> Experts:
        """Return these experts with their routing at one end of its interval.

        Parameters
        ----------
        bound : {"central", "low", "high"}
            ``low`` is the end at which a batch visits the fewest experts.

        Returns
        -------
        Experts
            With other `shares`.

        Notes
        -----
        Shares that nobody has measured are assumed to lie between even ones, which visit the most experts, and those of half of
        the experts alone, each of which then gets twice the mean: the largest capacity factor in [1]_. Measured shares ``p`` are
        ``m + s (p - m)``, where ``m`` is their mean, and ``s`` is 1 within 1.96 of its standard errors.

        References
        ----------
        .. [1] Fedus, Zoph and Shazeer, "Switch Transformers" (arXiv:2101.03961), table 1.

        Examples
        --------
        >>> mixtral = Experts(num_experts=8, num_per_token=2, intermediate_size=14336)
        >>> [round(mixtral.bounding(bound).num_active(2048)) for bound in ("low", "central", "high")]
        [4, 8, 8]
        """
        if not self.shares:
            half = max(self.num_per_token, -(-self.num_experts // 2))
            fewest = (1.0,) * half + (0.0,) * (self.num_experts - half)
            return self.model_copy(update={"shares": (fewest,)}) if bound == "low" else self
        sign = {"low": 1.96, "central": 0.0, "high": -1.96}[bound]
        rows = zip(self.shares, self.share_errors or ((),) * len(self.shares), strict=True)
        return self.model_copy(update={"shares": tuple(_spread(row, errors, sign) for row, errors in rows)})

    def _probabilities(self, block: int) -> Iterator[tuple[float, float]]:
        """Yield the probability that a token visits each expert, the largest first, and its standard error."""
        even = (1.0,) * self.num_experts
        row = self.shares[block if len(self.shares) > 1 else 0] if self.shares else even
        errors = self.share_errors[block if len(self.shares) > 1 else 0] if self.share_errors else ()
        ordered = sorted(zip(row or even, errors or (0.0,) * self.num_experts, strict=True), reverse=True)
        # No token visits an expert twice: what a large share has above 1 goes to the others.
        rest, left = sum(share for share, _ in ordered), float(self.num_per_token)
        for share, error in ordered:
            probability = min(1.0, left * share / rest) if rest else 0.0
            yield probability, min(self.num_per_token * error, 1.0)
            left, rest = left - probability, rest - share


def _spread(row: Sequence[float], errors: Sequence[float], num_errors: float) -> tuple[float, ...]:
    """Return shares that are further from their mean by so many standard errors of how far they are from it."""
    mean = sum(row) / max(1, len(row))
    offsets = [share - mean for share in row]
    if not errors or not any(offsets):
        return tuple(row)
    squares = sum(offset**2 for offset in offsets)
    error = sqrt(sum((offset * of) ** 2 for offset, of in zip(offsets, errors, strict=True))) / squares
    scale = max(0.0, 1 + num_errors * error)
    return tuple(max(0.0, mean + scale * offset) for offset in offsets)
