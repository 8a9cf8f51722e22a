"""Rings of NVLinks against a search that shares nothing with the integer program."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from topology import TopologyError, load_preset, loads
from topology.cli import app
from topology.rings import edge_disjoint_rings

DGX = load_preset("dgx-1v")
FIRST = [f"gpu{number}" for number in range(8)]


def physical_links(topology, gpu_ids):
    return Counter(
        {
            tuple(sorted((link.source, link.target))): link.count
            for link in topology.links
            if link.type.technology == "nvlink" and {link.source, link.target} <= set(gpu_ids)
        }
    )


def most_rings(links, gpu_ids):
    """Try every set of cycles, in the order of their GPUs: take one away, look at what is left."""
    first, *others = gpu_ids
    orders = [(first, *rest) for rest in itertools.permutations(others) if rest[0] <= rest[-1]]
    return _most(links, orders, 0)


def _most(links, orders, start):
    best = 0
    for number in range(start, len(orders)):
        edges = [tuple(sorted(pair)) for pair in itertools.pairwise((*orders[number], orders[number][0]))]
        # Two GPUs go there and back over the two directions of one link.
        used = Counter(set(edges)) if len(orders[number]) == 2 else Counter(edges)
        if all(links[edge] >= count for edge, count in used.items()):
            best = max(best, 1 + _most(links - used, orders, number))
    return best


@pytest.mark.parametrize("num_gpus", range(2, 9))
def test_the_first_gpus_of_a_dgx_1v(num_gpus):
    gpu_ids = FIRST[:num_gpus]
    found = edge_disjoint_rings(DGX, gpu_ids)
    links = physical_links(DGX, gpu_ids)
    assert len(found.rings) == most_rings(links, gpu_ids)
    used = Counter()
    for ring in found.rings:
        assert sorted(ring.gpu_ids) == gpu_ids
        pairs = itertools.pairwise((*ring.gpu_ids, ring.gpu_ids[0]))
        used.update({tuple(sorted(pair)) for pair in pairs})
    assert not used - links
    assert found.bandwidth_bytes_per_s == pytest.approx(len(found.rings) * 0.8 * 25e9)


def test_five_gpus_have_no_ring_and_eight_use_every_link():
    assert edge_disjoint_rings(DGX, FIRST[:5]).rings == ()
    # Six links a GPU, two to a ring.
    assert len(edge_disjoint_rings(DGX, FIRST).rings) == 3


def test_an_all_reduce_takes_the_sum_of_the_rings():
    eight = edge_disjoint_rings(DGX, FIRST)
    assert eight.all_reduce_s(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / (6 * 20e9))
    two = edge_disjoint_rings(DGX, FIRST[:2])
    assert two.all_reduce_s(1e9) == pytest.approx(1e9 / 20e9)
    with pytest.raises(TopologyError, match="no ring"):
        edge_disjoint_rings(DGX, FIRST[:5]).all_reduce_s(1e9)


def board(links):
    gpus = sorted({end for pair, _, _ in links for end in pair})
    nodes = "\n".join(f"  - {{id: {gpu}, type: gpu, host: h, spec: v100-32gb-sxm2}}" for gpu in gpus)
    joined = "\n".join(
        f"  - {{id: l{number}, source: {a}, target: {b}, count: {count}, type: {{technology: nvlink, "
        f'bandwidth: "{speed} GB/s"}}}}'
        for number, ((a, b), speed, count) in enumerate(links)
    )
    return loads(f"format: 1\nname: board\nnodes:\n  - {{id: h, type: host}}\n{nodes}\nlinks:\n{joined}\n")


def test_the_slowest_link_of_a_ring_counts_and_slow_links_are_kept_together():
    # Two triangles over doubled links: pairing fast with fast gives 30 + 10, mixing them 10 + 10.
    pairs = [("a", "b"), ("b", "c"), ("a", "c")]
    topology = board([(pair, speed, 1) for pair in pairs for speed in (30, 10)])
    found = edge_disjoint_rings(topology, ["a", "b", "c"])
    assert sorted(ring.bandwidth_bytes_per_s for ring in found.rings) == [10e9, 30e9]
    assert found.both_ways_bytes_per_s == 80e9


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2), min_size=10, max_size=10))
def test_random_boards_of_five(counts):
    pairs = list(itertools.combinations("abcde", 2))
    links = [(pair, 25, count) for pair, count in zip(pairs, counts, strict=True) if count]
    if {end for pair, _, _ in links for end in pair} != set("abcde"):
        return
    topology = board(links)
    found = edge_disjoint_rings(topology, list("abcde"))
    assert len(found.rings) == most_rings(physical_links(topology, "abcde"), list("abcde"))


@pytest.mark.parametrize(
    ("gpu_ids", "complaint"),
    [
        (["gpu0"], "two different GPUs"),
        (["gpu0", "gpu0"], "two different GPUs"),
        (["gpu0", "cpu0"], "'cpu0' is a cpu"),
        (["gpu0", "gpu99"], "no node 'gpu99'"),
    ],
)
def test_what_is_no_set_of_gpus_is_refused(gpu_ids, complaint):
    with pytest.raises(TopologyError, match=complaint):
        edge_disjoint_rings(DGX, gpu_ids)


def test_the_command():
    result = CliRunner().invoke(app, ["rings", "dgx-1v", "--json"])
    assert [item["num_rings"] for item in json.loads(result.stdout)] == [1, 1, 2, 0, 1, 2, 3]
    some = CliRunner().invoke(app, ["rings", "dgx-1v", "--gpus", "0-2,gpu3"])
    assert some.stdout.startswith("4 gpus (gpu0, gpu1, gpu2, gpu3): 2 rings, 40.0 GB/s, 80.0 both ways")
    assert isinstance(CliRunner().invoke(app, ["rings", "dgx-1v", "--gpus", "0-9"]).exception, TopologyError)
    assert isinstance(CliRunner().invoke(app, ["rings", "cpu-laptop"]).exception, TopologyError)
