"""Time the planner on four searches, and print what it chose.

``python -m studies.scale.planning`` searches plans for OPT-13B on a DGX-1V and on 128 of them, 1024 GPUs, for OPT-175B on four DGX A100,
and for OPT-13B on two hosts, one with two RTX 4090 and one with two A100; with as many sequences a step as GPUs and every method open, stages
included. Times are seconds of a core, the median and the least of a few rounds in turns. The digest is of all that was decided: what was
chosen, its seconds to nine digits, and every other candidate with its own; equal digests are equal decisions.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator

from costmodel.models.configs import read_model_spec
from executors.turns import Way, in_turns
from topology.clusters import cluster
from topology.documents import catalogue, load_preset
from topology.graph import Topology
from topology.schema import Link, Node
from zosim.config import PlanConfig
from zosim.planning.planner import Candidate, Decision, choose
from zosim.planning.request import Hardware, Request
from zosim.plans import Weights


def _two_kinds() -> Topology:
    """Return two hosts on a network: one with two RTX 4090, one with two A100."""
    host, types = load_preset("rtx4090-2x"), catalogue().link_types
    nodes = (*host.nodes, Node(id="nic", type="nic", host="host0"), Node(id="network", type="network"))
    links = (
        *host.links,
        Link(source="numa0", target="nic", type=types["fabric"]),
        Link(source="nic", target="network", type=types["infiniband-hdr"]),
    )
    both = cluster(host.model_copy(update={"nodes": nodes, "links": links}), 2)
    other = {"spec": catalogue().devices["a100-80gb-pcie"]}
    changed = tuple(
        node.model_copy(update=other) if node.type == "gpu" and node.id.startswith("host1/") else node
        for node in both.nodes
    )
    return Topology(name="two-kinds", nodes=changed, links=both.links)


_SEARCHES: dict[str, tuple[str, Callable[[], Topology]]] = {
    "13b-8": ("opt-13b", lambda: load_preset("dgx-1v")),
    "175b-4x8": ("opt-175b", lambda: cluster(load_preset("dgx-a100"), 4)),
    "13b-1024": ("opt-13b", lambda: cluster(load_preset("dgx-1v"), 128)),
    "two-kinds": ("opt-13b", _two_kinds),
}


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
    model, topology_of = _SEARCHES[name]
    topology = topology_of()
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
