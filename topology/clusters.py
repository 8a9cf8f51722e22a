"""Many hosts like one: a cluster from the description of a single machine."""

from __future__ import annotations

from topology.errors import TopologyError
from topology.graph import Topology
from topology.schema import Link, Node


def cluster(topology: Topology, num_hosts: int, *, name: str | None = None) -> Topology:
    """Return `num_hosts` copies of a one-host machine on the network that it is linked to.

    Nodes and links of copy ``i`` are named ``host{i}/...``; network nodes keep their names and are there once. All
    hosts reach each other at the bandwidth of their adapters: the network itself never limits.

    - `topology`: a single host, with a network node if there is to be more than one.
    - `name`: by default the machine's name and the number of hosts.

    Raises TopologyError if the machine is not a single host, or has no network to join copies with.

    >>> from topology.documents import load_preset
    >>> two = cluster(load_preset("dgx-1v"), 2)
    >>> [node.id for node in two.compute_devices][7:9]
    ['host0/gpu7', 'host1/gpu0']
    """
    if num_hosts < 1 or len(topology.hosts) != 1:
        message = f"cannot copy {topology.name!r} {num_hosts} times: it has {len(topology.hosts)} hosts"
        raise TopologyError(message, hint="copy a machine with one host, at least once")
    shared = {node.id for node in topology.of_type("network")}
    if num_hosts > 1 and not shared:
        message = f"{topology.name!r} has no network to connect its copies"
        raise TopologyError(message, hint="add a nic and a network node, and link them")
    only = topology.hosts[0].id

    def named(host: int, node_id: str) -> str:
        if node_id in shared:
            return node_id
        return f"host{host}" if node_id == only else f"host{host}/{node_id}"

    nodes: list[Node] = [node for node in topology.nodes if node.id in shared]
    links: list[Link] = []
    for host in range(num_hosts):
        nodes += [
            node.model_copy(
                update={
                    "id": named(host, node.id),
                    "host": None if node.host is None else named(host, node.host),
                }
            )
            for node in topology.nodes
            if node.id not in shared
        ]
        links += [
            link.model_copy(
                update={
                    "id": f"host{host}/{link.id}",
                    "source": named(host, link.source),
                    "target": named(host, link.target),
                }
            )
            for link in topology.links
        ]
    return Topology(
        name=name or f"{topology.name} x {num_hosts}",
        description=f"{num_hosts} hosts: {topology.description}",
        nodes=tuple(nodes),
        links=tuple(links),
        measured=tuple(
            entry.model_copy(
                update={"source": named(host, entry.source), "target": named(host, entry.target)}
            )
            for host in range(num_hosts)
            for entry in topology.measured
        ),
    )
