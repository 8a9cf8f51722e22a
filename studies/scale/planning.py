"""Time the planner on three searches, and print what it chose.

``python -m studies.scale.planning`` searches plans for OPT-13B and OPT-175B on a DGX-1V and for OPT-13B on 128 of them,
1024 GPUs, with as many sequences a step as GPUs and every method open, stages included. Times are seconds of a core, the
median and the least of a few rounds in turns. The digest is of all that was decided: what was chosen, its
seconds to nine digits, and every other candidate with its own; equal digests are equal decisions.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator

from costmodel.models.configs import read_model_spec
from executors.turns import Way, in_turns
from topology.clusters import cluster
from topology.documents import load_preset
from zosim.config import PlanConfig
from zosim.planning.planner import Candidate, Decision, choose
from zosim.planning.request import Hardware, Request
from zosim.plans import Weights

_PRESET = "dgx-1v"
_SEARCHES = {"13b-8": ("opt-13b", 1), "175b-8": ("opt-175b", 1), "13b-1024": ("opt-13b", 128)}


def main() -> int:
    """Time the searches and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m studies.scale.planning", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--search", action="append", choices=_SEARCHES, help="by default all of them")
    options = parser.parse_args()
    decided: dict[str, Decision] = {}

    def way(name: str) -> Way:
        # A request of its own for each round: nothing about its topology is known yet.
        requests = [request_named(name) for _ in range(options.rounds)]
        return lambda number: decided.update({name: choose(requests[number])})

    ways = {name: way(name) for name in options.search or _SEARCHES}
    times = in_turns(ways, options.rounds, num_warm_rounds=0, clock=time.process_time)
    print(f"{'':10s}{'median s':>9s}{'least s':>9s}{'candidates':>11s}  {'digest':16s}  chosen")
    for name, own in times.items():
        decision = decided[name]
        print(
            f"{name:10s}{own.median_s:9.2f}{own.fastest_s:9.2f}{len(list(_candidates(decision))):11d}  "
            f"{digest(decision)}  {decision.chosen.describe()}, {decision.chosen.seconds:.4f} s"
        )
    return 0


def request_named(name: str) -> Request:
    """Return one of the searches, nothing about its topology known yet."""
    model, num_hosts = _SEARCHES[name]
    topology = load_preset(_PRESET)
    if num_hosts > 1:
        topology = cluster(topology, num_hosts)
    config = PlanConfig(
        model=read_model_spec(model), batch=len(topology.compute_devices), weights=Weights(dtype="float16")
    )
    return Request(config, Hardware.of(topology, topology.name))


def digest(decision: Decision) -> str:
    """Return what stands for all that was decided, candidates that were not chosen included."""
    words = hashlib.sha256()
    for candidate in _candidates(decision):
        words.update(candidate.plan.model_dump_json().encode())
        words.update(f"{candidate.seconds:.9g} {candidate.is_simulated} {candidate.missing}\n".encode())
    words.update("\n".join(decision.reasons).encode())
    return words.hexdigest()[:16]


def _candidates(decision: Decision) -> Iterator[Candidate]:
    yield decision.chosen
    yield from decision.others
    yield from decision.rejected


if __name__ == "__main__":
    sys.exit(main())
