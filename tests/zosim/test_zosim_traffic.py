"""Finish times of flows against hand-worked cases and an exact second implementation."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support import traffic_reference
from topology.documents import load_preset
from topology.errors import TrafficError, ZosimError
from zosim.applications.traffic.command import read_scenario, scenario_on
from zosim.cli import app

GB = 10**9
# Sums and quotients of float64: what flow-level simulators agree to.
CLOSE = {"rel": 1e-9, "abs": 1e-12}


def flow(name, route, size, start=0):
    return {"id": name, "route": list(route), "bytes": size, "start": start}


def ends(links, flows):
    return list(read_scenario({"links": links, "flows": flows}).finish_times().values())


def test_a_shared_link_is_halved_until_the_smaller_flow_ends():
    assert ends({"a": GB}, [flow("x", "a", GB), flow("y", "a", 3 * GB)]) == [2.0, 4.0]


def test_uplinks_trunk_and_downlinks():
    links = {"u0": 10 * GB, "u1": 10 * GB, "u2": 4 * GB, "t": 12 * GB}
    links |= {"d0": 10 * GB, "d1": 3 * GB, "d2": 10 * GB}
    flows = [flow(number, [f"u{number}", "t", f"d{number}"], 12 * GB) for number in range(3)]
    # The second is held to 3 by its downlink, the third to 4 by its uplink, the first takes the trunk's other 5.
    assert ends(links, flows) == pytest.approx([2.4, 4.0, 3.0], **CLOSE)


def test_incast():
    flows = [flow(size, "a", size * GB) for size in range(1, 8)]
    assert ends({"a": GB}, flows) == pytest.approx([7, 13, 18, 22, 25, 27, 28], **CLOSE)


@pytest.mark.parametrize("num_links", [1, 2, 5, 40])
def test_parking_lot(num_links):
    # One flow over every link beside one flow per link: all have half of a link, and end together.
    links = {f"l{number}": GB for number in range(num_links)}
    flows = [flow("long", links, GB)] + [flow(name, [name], GB) for name in links]
    assert ends(links, flows) == pytest.approx([2.0] * (num_links + 1), **CLOSE)
    flows[0]["bytes"] = 2 * GB
    assert ends(links, flows) == pytest.approx([3.0] + [2.0] * num_links, **CLOSE)


def test_a_bus_is_one_link_that_both_directions_name_and_a_duplex_link_is_two():
    both = [flow("there", ["bus"], GB), flow("back", ["bus"], GB)]
    assert ends({"bus": GB}, both) == [2.0, 2.0]
    apart = [flow("there", ["up"], GB), flow("back", ["down"], GB)]
    assert ends({"up": GB, "down": GB}, apart) == [1.0, 1.0]


def test_nothing_to_carry_and_nowhere_to_go():
    flows = [flow("empty", "ab", 0, 1), flow("here", [], 5 * GB, 2), flow("beside", "a", GB)]
    assert ends({"a": {"bandwidth": GB, "latency": 0.25}, "b": GB}, flows) == [1.25, 2.0, 1.25]
    assert ends({"a": GB}, []) == []


def test_late_starts_and_simultaneous_ends():
    flows = [flow("first", "a", 2 * GB), flow("late", "a", GB, 1), flow("last", "a", GB, 3)]
    # Alone for 1 s, two halves until both end at 3, when the last begins.
    assert ends({"a": GB}, flows) == [3.0, 3.0, 4.0]


def test_latency_follows_the_transfer_and_occupies_nothing():
    links = {"a": {"bandwidth": GB, "latency": 0.5}, "b": {"bandwidth": 2 * GB, "latency": 0.125}}
    assert ends(links, [flow("x", "ab", GB), flow("y", "a", GB)]) == [2.625, 2.5]


def test_fifo_stores_and_forwards_whole_messages_in_order():
    links = {name: {"bandwidth": GB, "sharing": "fifo"} for name in "ab"}
    flows = [flow("x", "ab", GB), flow("y", "ab", 2 * GB), flow("z", "b", GB)]
    # x is on a until 1 and waits for z on b until then, too; y arrives at b at 3.
    assert ends(links, flows) == [2.0, 5.0, 1.0]
    links["a"]["latency"] = 0.5
    # The link takes the next message while the one before is still on its way.
    assert ends(links, flows) == [2.5, 5.5, 1.0]


def test_equal_arrivals_at_a_fifo_link_are_served_in_input_order_however_the_times_were_summed():
    links = {"q": {"bandwidth": GB, "sharing": "fifo"}, "a": {"bandwidth": GB, "sharing": "fifo"}}
    summed = flow("summed", "aq", GB // 10, 0.1 + 0.1)
    plain = flow("plain", "q", GB, 0.3)
    # 0.1 + 0.1 + 0.1 > 0.3 in binary.
    assert ends(links, [summed, plain]) == pytest.approx([0.4, 1.4], **CLOSE)
    assert ends(links, [plain, summed]) == pytest.approx([1.3, 1.4], **CLOSE)


def test_a_tiny_message_stays_behind_the_large_one_that_it_followed():
    # It leaves the first link 1e-10 s after the large one, two hours into the run: later, though hardly.
    links = {"a": {"bandwidth": GB, "sharing": "fifo"}, "b": {"bandwidth": GB, "sharing": "fifo"}}
    flows = [flow("tiny", "ab", 0.1, 1), flow("first", "a", 7000 * GB), flow("large", "ab", 10 * GB)]
    tiny, _, large = ends(links, flows)
    assert large == pytest.approx(7020.0, **CLOSE)
    assert tiny >= large


def test_an_empty_message_that_crosses_links_in_no_time_keeps_its_place_in_input_order():
    links = {name: {"bandwidth": GB, "sharing": "fifo"} for name in "ab"}
    empty, large = flow("empty", "ab", 0), flow("large", "b", 10 * GB)
    assert ends(links, [empty, large]) == [0.0, 10.0]
    assert ends(links, [large, empty]) == [10.0, 10.0]


def test_on_a_mixed_route_a_message_finishes_one_leg_before_the_next():
    links = {"a": GB, "b": 2 * GB, "q": {"bandwidth": GB, "sharing": "fifo"}, "c": 4 * GB}
    # a and b as a fluid: 1 s; q as a whole: 1 s; c: a quarter of a second.
    assert ends(links, [flow("x", "abqc", GB)]) == [2.25]


@st.composite
def scenarios(draw, max_flows=7, sharings=("maxmin",)):
    """Small networks of whole numbers, so that exact fractions stay short and ties are common."""
    names = [f"l{number}" for number in range(draw(st.integers(1, 5)))]
    links = {
        name: {
            "bandwidth": draw(st.sampled_from([1, 2, 3, 5, 8])),
            "latency": draw(st.sampled_from([0, 0, 0.5, 2])),
            "sharing": draw(st.sampled_from(sharings)),
        }
        for name in names
    }
    begin = draw(st.sampled_from([0, 0, 10**9]))
    flows = [
        flow(
            number,
            draw(st.lists(st.sampled_from(names), max_size=4)),
            # Messages of nothing pass several queues in one instant, where the order of arrival is nobody's.
            draw(st.integers(int("fifo" in sharings), 12)),
            begin + draw(st.sampled_from([0, 0, 0.25, 1, 3])),
        )
        for number in range(draw(st.integers(1, max_flows)))
    ]
    return {"links": links, "flows": flows}


def assert_exact(scenario):
    found = read_scenario(scenario).finish_times()
    for name, expected in traffic_reference.finish_times(scenario).items():
        assert found[name] == pytest.approx(float(expected), **CLOSE), name


@given(scenarios())
def test_max_min_finish_times_equal_exact_progressive_filling(scenario):
    assert_exact(scenario)


@given(scenarios(sharings=("fifo",)))
def test_fifo_finish_times_equal_exact_queues(scenario):
    assert_exact(scenario)


@given(scenarios(sharings=("fifo", "maxmin")))
def test_mixed_routes_equal_the_exact_simulation_of_their_parts(scenario):
    assert_exact(scenario)


@given(scenarios(), st.randoms(use_true_random=False))
def test_max_min_finish_times_do_not_depend_on_the_order_of_flows(scenario, shuffler):
    expected = read_scenario(scenario).finish_times()
    flows = list(scenario["flows"])
    shuffler.shuffle(flows)
    found = read_scenario({**scenario, "flows": flows}).finish_times()
    assert found == pytest.approx(expected, **CLOSE)


def tree(shuffler, num_flows):
    """A binary tree of 32 leaves whose links are duplex and narrower towards the leaves."""
    links = {f"{way}{node}": 1 << (6 - node.bit_length()) for node in range(2, 64) for way in ("up", "down")}

    def path(leaf, way):
        nodes = [leaf >> shift for shift in range(5)]
        return [f"{way}{node}" for node in nodes]

    flows = []
    for number in range(num_flows):
        a, b = shuffler.sample(range(32, 64), 2)
        up, down = path(a, "up"), path(b, "down")
        common = {name[2:] for name in up} & {name[4:] for name in down}
        route = [name for name in up if name[2:] not in common]
        route += [name for name in reversed(down) if name[4:] not in common]
        flows.append(flow(number, route, shuffler.randint(1, 50), shuffler.choice([0, 0, 1, 2.5])))
    return {"links": links, "flows": flows}


def random_graph(shuffler, num_flows):
    links = {f"l{number}": shuffler.randint(1, 9) for number in range(40)}
    flows = [
        flow(
            number,
            shuffler.sample(sorted(links), shuffler.randint(1, 5)),
            shuffler.randint(1, 40),
            shuffler.randint(0, 3),
        )
        for number in range(num_flows)
    ]
    return {"links": links, "flows": flows}


def _float_reference(scenario):
    """The exact reference with its fractions replaced by float64: fast enough for hundreds of flows."""
    links, flows = scenario["links"], {item["id"]: item for item in scenario["flows"]}
    left = {name: float(item["bytes"]) for name, item in flows.items()}
    now, finish = 0.0, {}
    while len(finish) < len(flows):
        running = {name: flows[name]["route"] for name in left if flows[name]["start"] <= now}
        found = _float_rates(running, links)
        later = [item["start"] - now for item in flows.values() if item["start"] > now]
        step = min([left[name] / rate for name, rate in found.items()] + later)
        now += step
        for name, rate in found.items():
            left[name] -= rate * step
            if left[name] <= 1e-12 * flows[name]["bytes"]:
                finish[name] = now
                del left[name]
    return finish


def _float_rates(routes, capacity):
    rate, room = {}, dict(capacity)
    users = {link: [name for name, route in routes.items() if link in route] for link in capacity}
    while len(rate) < len(routes):
        shares = {
            link: room[link] / count
            for link, names in users.items()
            if (count := sum(name not in rate for name in names))
        }
        link = min(shares, key=shares.get)
        for name in [name for name in users[link] if name not in rate]:
            rate[name] = shares[link]
            for passed in routes[name]:
                room[passed] -= shares[link]
    return rate


@pytest.mark.parametrize("build", [tree, random_graph])
def test_hundreds_of_flows_equal_the_textbooks_algorithm(build):
    scenario = build(random.Random(7), 150)
    found = read_scenario(scenario).finish_times()
    assert found == pytest.approx(_float_reference(scenario), **CLOSE)


def test_the_float_reference_equals_the_exact_one():
    scenario = random_graph(random.Random(3), 12)
    exact = traffic_reference.finish_times(scenario)
    assert _float_reference(scenario) == pytest.approx({k: float(v) for k, v in exact.items()}, **CLOSE)
    assert all(isinstance(value, Fraction) for value in exact.values())


@settings(max_examples=20)
@given(st.integers(1, 5), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_times_scale_with_sizes_and_bandwidths(seed, size, bandwidth):
    scenario = random_graph(random.Random(seed), 20)
    for item in scenario["flows"]:
        item["start"] = 0
    before = read_scenario(scenario).finish_times()
    scaled = {
        "links": {name: value * bandwidth for name, value in scenario["links"].items()},
        "flows": [{**item, "bytes": item["bytes"] * size} for item in scenario["flows"]],
    }
    after = read_scenario(scaled).finish_times()
    assert after == pytest.approx({name: end * size / bandwidth for name, end in before.items()}, rel=1e-9)


def test_flows_between_nodes_of_a_preset_share_its_resources():
    topology = load_preset("dgx-1v")
    route = topology.route("dram0", "gpu0")
    size = 1e9
    data = [
        {"id": f"to{number}", "source": "dram0", "destination": f"gpu{number}", "bytes": size, "start": 0}
        for number in (0, 1)
    ]
    alone = scenario_on(topology, {"flows": data[:1]}).finish_times()["to0"]
    assert alone == pytest.approx(size / route.bandwidth_bytes_per_s + route.latency_s, rel=1e-12)
    # Both GPUs sit behind one PCIe switch, whose uplink they halve.
    together = scenario_on(topology, {"flows": data}).finish_times()["to0"]
    assert together == pytest.approx(2 * size / route.bandwidth_bytes_per_s + route.latency_s, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"flows": [flow("x", ["b"], 1)]}, "flow 'x': its route names the unknown link 'b'"),
        ({"flows": [flow("x", "a", -1)]}, "flow 'x': bytes is -1"),
        ({"flows": [flow("x", "a", float("nan"))]}, "flow 'x': bytes is nan"),
        ({"flows": [flow("x", "a", 1, float("inf"))]}, "flow 'x': start is inf"),
        ({"flows": [flow("x", "a", 1, -2)]}, "flow 'x': start is -2"),
        ({"flows": [flow("x", "a", "1 GB")]}, "flow 'x': bytes is '1 GB', not a number"),
        ({"flows": [flow("x", "a", True)]}, "flow 'x': bytes is True, not a number"),
        ({"flows": [flow("x", "a", 10**400)]}, "flow 'x': bytes is 1000"),
        ({"flows": [flow("x", "a", 1), flow("x", "a", 1)]}, "two flows have the id 'x'"),
        ({"flows": [{"id": "x", "route": ["a"]}]}, "flow 'x': 'bytes' is missing"),
        ({"flows": [{"id": "x", "route": "a", "bytes": 1}]}, "flow 'x': route 'a' is no list"),
        ({"flows": [{"id": "x", "route": ["a"], "bytes": 1, "sise": 2}]}, "flow 'x': unknown key 'sise'"),
        ({"flows": [{"route": ["a"], "bytes": 1}]}, "flow number 0 has no id"),
        ({"flows": {}}, "flows must be a list"),
        ({"links": {"a": 0}}, "link 'a': bandwidth is 0"),
        ({"links": {"a": -1}}, "link 'a': bandwidth is -1"),
        ({"links": {"a": {"latency": 1}}}, "link 'a' has no bandwidth"),
        ({"links": {"a": {"bandwidth": 1, "latency": -1}}}, "link 'a': latency is -1"),
        ({"links": {"a": {"bandwidth": 1, "sharing": "fair"}}}, "link 'a': sharing is 'fair'"),
        ({"links": []}, "links must be a JSON object"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, complaint):
    with pytest.raises(TrafficError) as caught:
        read_scenario({"links": {"a": 1}, "flows": [flow("ok", "a", 1)]} | change)
    assert caught.value.message.startswith(complaint)


def test_times_that_no_float_holds_are_refused():
    scenario = read_scenario({"links": {"a": 1e-300}, "flows": [flow("x", "a", 1e300)]})
    with pytest.raises(TrafficError, match="longer than the largest number of seconds"):
        scenario.finish_times()


def test_an_unknown_node_is_named_with_its_flow():
    data = {"flows": [{"id": 7, "source": "gpu0", "destination": "gpu9", "bytes": 1}]}
    with pytest.raises(ZosimError, match=r"flow 7: .*'gpu9'"):
        scenario_on(load_preset("dgx-1v"), data)


def test_the_command_reads_and_writes_json(tmp_path):
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({"links": {"a": GB}, "flows": [flow("x", "a", GB)]}))
    runner = CliRunner()
    printed = runner.invoke(app, ["traffic", str(scenario)])
    assert json.loads(printed.stdout) == {"flows": [{"id": "x", "finish": 1.0}]}
    target = tmp_path / "ends.json"
    written = runner.invoke(app, ["traffic", str(scenario), "-o", str(target)])
    assert (written.exit_code, written.stdout) == (0, "")
    assert json.loads(target.read_text()) == {"flows": [{"id": "x", "finish": 1.0}]}
    flows = tmp_path / "flows.json"
    flows.write_text(json.dumps({"flows": [{"id": 1, "source": "gpu0", "destination": "gpu0", "bytes": 9}]}))
    on_preset = runner.invoke(app, ["traffic", "dgx-1v", str(flows), "--json"])
    assert json.loads(on_preset.stdout) == {"flows": [{"id": 1, "finish": 0.0}]}


@pytest.mark.parametrize(
    "text", ["9" * 5000, "{", '{"links": {"a": 1, "a": 2}, "flows": []}', "\udcff", "[]", "{}"]
)
def test_damaged_files_end_in_a_message(tmp_path, text):
    path = tmp_path / "scenario.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    result = CliRunner().invoke(app, ["traffic", str(path)])
    assert result.exit_code == 2
