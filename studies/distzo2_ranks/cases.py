"""Plans of several ranks on machines whose links are shared, or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import numpy as np

from costmodel.devices.datasheet import datasheet_profile
from costmodel.estimate import CopyDirection
from costmodel.models.configs import read_model_spec, spec_of_config
from proofs_checks.zo2.step_time import block_bytes, machine
from topology import Topology, load_preset
from topology.documents import catalogue
from topology.schema import Link, Node
from zosim.hardware.machine import Machine, Ring
from zosim.lowering import lower_all
from zosim.planning.predict import PlannedRun
from zosim.plans import Estimator, Mesh, Placement, Plan, Residency, Schedule, Weights
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World

_HALF = Weights(dtype="float16")
TRANSFERS = ("private", "shared", "sliced")


def apart() -> Topology:
    """Return a desktop with two GPUs, each with eight lanes of its own to the processor."""
    return load_preset("rtx4090-2x")


def behind_one_root() -> Topology:
    """Return the same desktop with both GPUs on a switch behind one root: eight lanes between them."""
    board = apart()
    lanes = catalogue().link_types["pcie4-x8"]
    kept = [link for link in board.links if not {"gpu0", "gpu1"} & {link.source, link.target}]
    joined = [Link(source="switch0", target=gpu, type=lanes) for gpu in ("gpu0", "gpu1")]
    return Topology(
        name="rtx4090-2x behind one root",
        description=board.description,
        nodes=(*board.nodes, Node(id="switch0", type="pcie_switch", host="host0")),
        links=(*kept, Link(source="root0", target="switch0", type=lanes), *joined),
    )


def offloaded(
    topology: Topology, num_ranks: int, *, transfers: str = "private", model: str = "opt-13b", batch: int = 1
) -> PlannedRun:
    """Return a model whose blocks all GPUs upload, the batch shared out among them."""
    return _planned(
        topology,
        Mesh(data=num_ranks),
        model,
        batch * num_ranks,
        residency=Residency.model_validate({"blocks": "offloaded", "transfers": transfers}),
        schedule=Schedule(update="delayed"),
        weights=_HALF,
    )


def perturbed(num_perturbations: int, num_ranks: int, *, model: str = "opt-125m") -> PlannedRun:
    """Return a step of this many directions, their evaluation points shared out among hosts without GPUs."""
    topology = load_preset("cpu-cluster-1gbit")
    mesh = Mesh(perturb=num_ranks)
    return _planned(
        topology, mesh, model, 1, seq=256, estimator=Estimator(num_perturbations=num_perturbations)
    )


def _planned(
    topology: Topology, mesh: Mesh, model: str, batch: int, *, seq: int = 512, **axes: object
) -> PlannedRun:
    nodes = [node.id for node in topology.compute_devices][: mesh.world_size]
    plan = Plan.model_validate(
        {
            "model": read_model_spec(model),
            "placement": Placement(
                topology=topology.name,
                devices=tuple(nodes),
                hosts=tuple(topology.host_of(node).id for node in nodes),
            ),
            "batch": batch,
            "seq": seq,
            "mesh": mesh,
        }
        | axes
    )
    return PlannedRun(plan, topology, datasheet_profile(topology, nodes[0]))


# -- pairs and shards --------------------------------------------------------------------------------------------


def squares(num_samples: int = 20_000, *, epsilon: float = 1e-3, seed: int = 0) -> tuple[float, float]:
    """Return the mean square of ``g·z``, over that of the gradient, for pairs that see one shard and for such that do not.

    Two shards with losses ``c_s·θ`` of unlike slopes, normal directions. One shard: ``g = c·z`` with the mean slope.
    The plus sign on the first and the minus sign on the second: ``g = (c₁·(θ + εz) - c₂·(θ - εz))/2ε``, in which the
    difference of the shards' losses at ``θ`` is divided by ``2ε``.
    """
    generator = np.random.default_rng(seed)
    slopes = generator.standard_normal((2, 8))
    theta = generator.standard_normal(8)
    z = generator.standard_normal((num_samples, 8))
    one = z @ slopes.mean(0)
    two = ((theta + epsilon * z) @ slopes[0] - (theta - epsilon * z) @ slopes[1]) / (2 * epsilon)
    gradient = float(slopes.mean(0) @ slopes.mean(0))
    first, second = (float(np.mean((g[:, None] * z) ** 2) * z.shape[1]) / gradient for g in (one, two))
    return first, second


# -- machines made up for the exercise ---------------------------------------------------------------------------

_NUM_STAGING_BUFFERS = 8
"""More blocks in flight than there are kinds of work: nothing waits for a staging buffer."""

_SHORT, _LONG = 16, 32
"""Blocks of two like models: a block's part of a step is their difference, the pipeline's filling apart."""


@dataclass(frozen=True)
class Board:
    """GPUs of one host, alike in everything."""

    num_gpus: int
    block_bytes: float  # of one block's weights
    compute_s: float  # one block's forwards on one GPU
    host_bytes_per_s: float  # from the host to a GPU, and as much back
    # Whether all GPUs are behind one root, whose bandwidth is `host_bytes_per_s` in each direction; else each has that
    # much of its own.
    one_root: bool
    peer_bytes_per_s: float  # from a GPU to the next one of a ring, at the same time for all of them


@cache
def block_seconds(board: Board, transfers: str) -> float:
    """Return the seconds that one more block adds to a simulated step of many blocks."""
    machines = _machines(board)
    short, long = (
        simulate_many(fold(World.of(lower_all(_plan(count, board, transfers)), machines))).step_time_s
        for count in (_SHORT, _LONG)
    )
    return (long - short) / (_LONG - _SHORT)


def board(num_gpus: int, upload: float, peers: float, *, one_root: bool = False) -> Board:
    """Return a board on which a whole block alone takes `upload` times as long to upload as to compute.

    `peers`: bandwidth between GPUs over that to the host.
    """
    compute_s = _compute_s()
    bandwidth = block_bytes() / (upload * compute_s)
    return Board(num_gpus, float(block_bytes()), compute_s, bandwidth, one_root, peers * bandwidth)


def _compute_s() -> float:
    """Return the seconds of one block's forwards: what a block adds where nothing is transferred."""
    instant = Board(1, float(block_bytes()), 0.0, 1e24, False, 1e24)
    return block_seconds(instant, "private")


def _machines(board: Board) -> list[Machine]:
    one = machine(board.host_bytes_per_s)
    rings = {name: Ring(0.0, board.peer_bytes_per_s, num_ranks=board.num_gpus) for name in ("host", "world")}
    machines = []
    for gpu in range(board.num_gpus):
        lane = "root" if board.one_root else f"root{gpu}"
        ways: dict[CopyDirection, tuple[str, ...]] = {"h2d": (f"{lane}:up",), "d2h": (f"{lane}:down",)}
        lanes = {name: board.host_bytes_per_s for way in ways.values() for name in way}
        capacities: Mapping[str, float] = MappingProxyType({**one.capacities, **lanes})
        machines.append(replace(one, capacities=capacities, routes=MappingProxyType(ways), rings=rings))
    return machines


def _plan(num_blocks: int, board: Board, transfers: str) -> Plan:
    config = {
        "model_type": "opt",
        "hidden_size": 512,
        "ffn_dim": 2048,
        "word_embed_proj_dim": 512,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return Plan(
        model=spec_of_config(config, name=f"{num_blocks} blocks"),
        placement=Placement(topology="made up", devices=tuple(f"gpu{i}" for i in range(board.num_gpus))),
        batch=board.num_gpus,
        seq=64,
        mesh=Mesh(data=board.num_gpus),
        residency=Residency.model_validate(
            {"blocks": "offloaded", "num_staging_buffers": _NUM_STAGING_BUFFERS, "transfers": transfers}
        ),
        schedule=Schedule(update="delayed"),
    )
