"""What sliced transfers take: the paper's two formulas against the simulator, and where they are only bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proofs_checks.claims import Checks, conditioned, corrected, counterexample
from proofs_checks.faults import all_slices, on_stream, sent_to_itself
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.zo2.step_time import NUM_BLOCKS, block_bytes, machine, model, seconds
from zosim.hardware.machine import Machine, Ring
from zosim.lowering import lower_all
from zosim.plans import Mesh, Placement, Plan, Residency, Schedule
from zosim.program.instructions import Stream
from zosim.program.program_set import ProgramSet
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World

NUM_STAGING_BUFFERS = 6
"""Enough that no staging buffer is waited for: upload, exchange, compute and offload of four blocks overlap."""

_RANKS = (2, 4)
_LINKS = (8.0, 2.0, 1.0, 0.5, 0.25)
"""Bandwidth between two devices over that between a device and its host."""
_TRANSFERS = (0.2, 1.0, 6.0)
"""Seconds to upload a whole block over those of its two forwards."""
_TOLERANCE = 2e-3
"""Buckets and shares are aligned, and a batch crosses the same lanes: a part in a thousand of a block."""


@dataclass(frozen=True)
class TransferParts:
    """Seconds of one block on one of `n` ranks, each with a lane of its own to the host."""

    upload: float
    exchange: float
    compute: float
    offload: float
    head: float

    @property
    def pipelined(self) -> float:
        """A step whose four kinds of work overlap block by block: the slowest N - 1 times, all once, the head."""
        slowest = max(self.upload, self.exchange, self.compute, self.offload)
        return self.upload + self.exchange + self.compute + (NUM_BLOCKS - 1) * slowest + self.head

    @property
    def paper(self) -> float:
        """Equations 3 and 4: upload and exchange one after the other, beside compute."""
        return NUM_BLOCKS * max(self.upload + self.exchange, self.compute)

    @property
    def fill(self) -> float:
        """What equation 4 leaves out: filling the pipeline, and the head."""
        return self.upload + self.exchange + self.compute + self.head


def programs(num_ranks: int, transfers: str) -> ProgramSet:
    """Return the offloaded programs of ranks that share the batch."""
    return lower_all(
        Plan(
            model=model(),
            placement=Placement(topology="none", devices=tuple(f"gpu{i}" for i in range(num_ranks))),
            batch=num_ranks,
            seq=64,
            mesh=Mesh(data=num_ranks),
            residency=Residency.model_validate(
                {"blocks": "offloaded", "num_staging_buffers": NUM_STAGING_BUFFERS, "transfers": transfers}
            ),
            schedule=Schedule(update="delayed"),
        )
    )


def machines(num_ranks: int, lane_bytes_per_s: float, link_bytes_per_s: float) -> Sequence[Machine]:
    """Return devices with a lane to the host and a link to the next device each, of nobody else's."""
    one = machine(lane_bytes_per_s)
    rings = {name: Ring(0.0, link_bytes_per_s, num_ranks=num_ranks) for name in ("host", "world")}
    return [replace(one, rings=rings) for _ in range(num_ranks)]


def simulated(num_ranks: int, transfers: str, whole: float, link: float) -> float:
    """Return the seconds of a periodic step where a whole block takes `whole` seconds over a lane."""
    lane = block_bytes() / whole
    return simulate_many(
        fold(World.of(programs(num_ranks, transfers), machines(num_ranks, lane, link * lane)))
    ).step_time_s


def parts_of(num_ranks: int, whole: float, link: float) -> TransferParts:
    """Return the parts of a sliced step, from sizes and bandwidths alone."""
    forwards = seconds(2, 0.0)
    share = whole / num_ranks
    return TransferParts(share, (num_ranks - 1) * share / link, forwards.block, share, forwards.head)


def check_sliced(context: Context) -> Outcome:
    """Compare simulated steps with the closed form of the pipeline, and both with the paper's two equations."""
    largest, details = 0.0, []
    compute = seconds(2, 0.0).block
    for num_ranks in _RANKS[: context.samples(2, 1)]:
        for link in _LINKS[:: context.samples(1, 2)]:
            errors, over = [], []
            for ratio in _TRANSFERS:
                parts = parts_of(num_ranks, ratio * compute, link)
                step_s = simulated(num_ranks, "sliced", ratio * compute, link)
                errors.append(abs(step_s / parts.pipelined - 1))
                over.append(parts.paper / (step_s - parts.fill + max(parts.upload, parts.exchange)))
                # Equation 4 bounds the step from above once the pipeline is filled.
                errors.append(max(0.0, step_s / (parts.paper + parts.fill) - 1))
            largest = max(largest, *errors)
            details.append(
                f"{num_ranks} ranks, links {link:g} times a lane: off by {max(errors):.1e}; equation 4 says up to "
                f"{max(over):.2f} times the filled pipeline's time"
            )
    return Outcome(largest, _TOLERANCE, "relative error of the pipeline's closed form", tuple(details))


def check_printed_sum(context: Context) -> Outcome:
    """Compare the simulated filled pipeline with half of what equation 4 says, where upload and exchange are alike.

    With ``g = u`` and ``c`` below both, the pipeline advances by a block every ``u``, and equation 4 says ``u + g``.
    """
    largest, details = 0.0, []
    compute = seconds(2, 0.0).block
    for num_ranks in _RANKS[: context.samples(2, 1)]:
        link = float(num_ranks - 1)  # (n - 1)M/nL = M/nB
        parts = parts_of(num_ranks, 6.0 * num_ranks * compute, link)
        step_s = simulated(num_ranks, "sliced", 6.0 * num_ranks * compute, link)
        ratio = (step_s - parts.fill + parts.upload) / parts.paper
        largest = max(largest, abs(ratio - 0.5))
        details.append(f"{num_ranks} ranks: the filled pipeline takes {ratio:.4f} of what equation 4 says")
    return Outcome(largest, _TOLERANCE, "distance of that part from one half", tuple(details))


def _is_no_slower(num_ranks: int, link: float) -> tuple[float, float]:
    """Return the simulated time of a sliced step over that of a whole one, and the closed forms' ratio."""
    compute = seconds(2, 0.0).block
    whole, sliced = (
        simulated(num_ranks, transfers, 6.0 * compute, link) for transfers in ("private", "sliced")
    )
    parts = parts_of(num_ranks, 6.0 * compute, link)
    expected = (
        parts.pipelined / replace(parts, upload=6.0 * compute, exchange=0.0, offload=6.0 * compute).pipelined
    )
    return sliced / whole, expected


def check_slow_links(context: Context) -> Outcome:
    """Compare sliced over whole uploads with the closed forms, above 1, where links are slower than lanes."""
    largest, details = 0.0, []
    for num_ranks in _RANKS[: context.samples(2, 1)]:
        for link in (link for link in _LINKS if link < (num_ranks - 1) / num_ranks):
            ratio, expected = _is_no_slower(num_ranks, link)
            largest = max(largest, abs(ratio / expected - 1) if expected > 1.1 else math.inf)
            details.append(f"{num_ranks} ranks, links {link:g} times a lane: sliced / whole = {ratio:.2f}")
    return Outcome(largest, 2 * _TOLERANCE, "relative error of the closed forms' ratio", tuple(details))


def check_no_worse(context: Context) -> Outcome:
    """Count links as fast as lanes or faster at which a sliced step takes longer than a whole one.

    Where transfers limit, a whole upload takes ``M/B`` a block and a sliced one ``max(1/n, (n-1)/n·B/L)·M/B``: slicing
    loses where links are slower than ``(n - 1)/n`` of a lane, and, by the filling of one more stage, just at it.
    """
    wrong, details = 0, []
    for num_ranks in _RANKS[: context.samples(2, 1)]:
        for link in (link for link in _LINKS if link >= 1):
            ratio, expected = _is_no_slower(num_ranks, link)
            wrong += ratio > 1 or abs(ratio / expected - 1) > 2 * _TOLERANCE
            details.append(f"{num_ranks} ranks, links {link:g} times a lane: sliced / whole = {ratio:.2f}")
    return Outcome(
        wrong, 0, "machines on which slicing loses, or gains other than the closed forms say", tuple(details)
    )


CHECKS: Checks = {
    "sliced-step-is-a-pipeline": (
        corrected(
            check_sliced,
            all_slices,
            on_stream("gather", Stream.H2D, "exchanges on the uploads' stream"),
            sent_to_itself,
        ),
        counterexample(check_printed_sum, all_slices),
    ),
    "slicing-can-lose": (
        conditioned(check_no_worse, all_slices),
        counterexample(check_slow_links, all_slices),
    ),
}
