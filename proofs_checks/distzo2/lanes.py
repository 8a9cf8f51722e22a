"""What equation 3 of DistZO2 allows four ranks that copy a quarter each; its page holds the printed speedups against 4."""

from __future__ import annotations

from proofs_checks.claims import Checks, counterexample
from proofs_checks.exact import exceeds
from proofs_checks.oracles.statements import exchange_share
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import planted


def check_four_lanes(_context: Context) -> Outcome:
    """Compare the speedup of equation 3 with 4, at links up to a million times as fast as a lane."""
    # t/(t/n + (n - 1)/n·bytes/NVLink) with t = bytes/PCIe.
    allowed = max(4 / (1 + exchange_share(4, quotient)) for quotient in (10.0, 100.0, 1e6))
    return exceeds(4.0, allowed, what="4 against n/(1 + (n - 1)B_PCIe/B_NVLink)")


@planted("proofs_checks.oracles.statements:exchange_share", "an exchange that is free beyond n")
def free_beyond_n(_shipped, num_ranks, link_over_lane):
    return (1 - num_ranks) / link_over_lane


CHECKS: Checks = {"distzo2-slices-beyond-four-lanes": counterexample(check_four_lanes, free_beyond_n)}
