"""Probes beside live requests: events against queueing theory, and against a queue written out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from topology.errors import TrafficError
from zosim.applications.slack.serving import (
    POLICIES,
    Server,
    closed_mean_s,
    closed_steps_per_hour,
    poisson,
    recorded,
    serve,
)
from zosim.cli import app


@pytest.mark.crossed(quick=8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", [0.2, 0.7])
def test_events_agree_with_the_closed_form(policy, load):
    server = Server(0.005, 0.015, 1, 0.06, num_segments=4)
    rate = load / server.service_s(1)
    runs = [serve(server, poisson(rate, 400, seed), policy) for seed in range(8)]
    means, steps = ([getattr(run, name) for run in runs] for name in ("mean_s", "steps_per_hour"))
    for values, closed in (
        (means, closed_mean_s(server, rate, policy)),
        (steps, closed_steps_per_hour(server, rate, policy)),
    ):
        if closed is not None:
            error = np.std(values, ddof=1) / np.sqrt(len(values))
            # Four standard errors of independent runs; and a probe begun at either end of each.
            assert abs(np.mean(values) - closed) <= 4 * error + 1e-2 * closed


def test_waits_are_those_of_a_queue_by_hand():
    """Requests at 0, 10 and 13 ms, each 4 ms; probes of 6 ms, which begin whenever nobody waits."""
    server, arrivals = Server(0, 4, 1, 6, num_segments=2), np.array([0.0, 10.0, 13.0])
    # none: 0-4, 10-14, 14-18. whole: probe 4-10. parts: 4-7, 7-10. A request at an end comes first.
    assert serve(server, arrivals, "none").latencies_s.tolist() == [4, 4, 5]
    for policy in ("whole", "segments", "cancel"):
        served = serve(server, arrivals, policy)
        assert (served.latencies_s.tolist(), served.num_steps) == ([4, 4, 5], 1)
    late = np.array([0.0, 9.0, 13.0])
    assert serve(server, late, "whole").latencies_s.tolist() == [4, 5, 5]
    assert serve(server, late, "segments").latencies_s.tolist() == [4, 5, 5]
    cancelled = serve(server, late, "cancel")
    assert (cancelled.latencies_s.tolist(), cancelled.num_steps, cancelled.num_cancelled) == (
        [4, 4, 4],
        0,
        1,
    )
    assert serve(server, np.array([0.0, 8.0]), "segments").latencies_s.tolist() == [4, 6]
    assert serve(server, np.array([0.0, 6.5]), "segments").latencies_s.tolist() == [4, 4.5]


def queue_by_hand(server, arrivals, policy):
    """A queue of a dozen lines, without events: latencies, probes finished, probes lost."""
    now, taken, waiting, latencies, parts, lost = 0.0, 0, [], [], 0, 0
    while taken < len(arrivals) or waiting:
        while taken < len(arrivals) and arrivals[taken] <= now:
            waiting.append(arrivals[taken])
            taken += 1
        batch, waiting = waiting[: server.max_batch], waiting[server.max_batch :]
        if batch:
            now += server.batch_s + server.request_s * len(batch)
            latencies += [now - arrived for arrived in batch]
        elif policy == "none":
            now = arrivals[taken]
        elif policy == "cancel" and arrivals[taken] < now + server.step_s:
            now, lost = arrivals[taken], lost + 1
        else:
            now += server.step_s / (server.num_segments if policy == "segments" else 1)
            parts += 1 if policy == "segments" else server.num_segments
    return latencies, parts // server.num_segments, lost


@given(
    gaps=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    batch=st.integers(0, 4),
    each=st.integers(1, 8),
    largest=st.integers(1, 4),
    parts=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
)
def test_events_are_a_queue_written_out(gaps, batch, each, largest, parts, policy):
    """Whole numbers of seconds, so that what happens at one instant happens there in both."""
    server, arrivals = (
        Server(batch, each, largest, 6.0 * parts, num_segments=parts),
        np.cumsum(gaps, dtype=float),
    )
    served = serve(server, arrivals, policy)
    latencies, probes, lost = queue_by_hand(server, arrivals, policy)
    assert served.latencies_s.tolist() == latencies
    assert (served.num_steps, served.num_cancelled) == (probes, lost)


def cobham_wait_s(rates, services):
    """The mean wait of the first of two classes of Poisson jobs of fixed length, served without preemption (Cobham 1954)."""
    residual = sum(rate * service**2 for rate, service in zip(rates, services, strict=True)) / 2
    return residual / (1 - rates[0] * services[0])


def priority_queue_wait_s(rates, services, duration_s, seed):
    """The same measured: two classes, the first served before the second."""
    rng = np.random.default_rng(seed)
    jobs = [np.sort(rng.uniform(0, duration_s, rng.poisson(rate * duration_s))).tolist() for rate in rates]
    now, waits, heads = 0.0, [], [0, 0]
    while any(heads[kind] < len(jobs[kind]) for kind in (0, 1)):
        next_of = [jobs[kind][heads[kind]] if heads[kind] < len(jobs[kind]) else np.inf for kind in (0, 1)]
        kind = 0 if next_of[0] <= max(now, min(next_of)) else 1
        now = max(now, next_of[kind])
        waits += [now - next_of[0]] if kind == 0 else []
        now, heads[kind] = now + services[kind], heads[kind] + 1
    return np.mean(waits)


def test_the_closed_form_is_a_priority_queue_that_is_never_idle():
    """Probes that fill whatever requests leave are jobs of a lower class, at a load of all together that comes to 1."""
    server, rate = Server(0.005, 0.015, 1, 0.24, num_segments=4), 20.0
    load, part_s = rate * 0.02, 0.06
    rates, services = (rate, (1 - load) / part_s), (0.02, part_s)
    assert closed_mean_s(server, rate, "segments") - 0.02 == pytest.approx(cobham_wait_s(rates, services))
    assert closed_mean_s(server, rate, "none") - 0.02 == pytest.approx(cobham_wait_s((rate, 0.0), services))
    # Cobham's formula against a queue, where the classes together leave some time over.
    rates = (rate, 0.5 * rates[1])
    means = [priority_queue_wait_s(rates, services, 400, seed) for seed in range(8)]
    error = np.std(means, ddof=1) / np.sqrt(len(means))
    assert abs(np.mean(means) - cobham_wait_s(rates, services)) <= 4 * error
    # And the events of `zosim slack` against the same, at a load of 1.
    served = [serve(server, poisson(rate, 400, seed), "segments").mean_s - 0.02 for seed in range(8)]
    error = np.std(served, ddof=1) / np.sqrt(len(served))
    assert abs(np.mean(served) - cobham_wait_s((rate, (1 - load) / part_s), services)) <= 4 * error


def test_batches_take_all_that_wait():
    server = Server(2, 1, 3, 10)
    assert serve(server, np.zeros(4), "none").latencies_s.tolist() == [5, 5, 5, 8]
    assert closed_mean_s(server, 0.1, "none") is None


def test_bursts_have_the_rate_and_wait_longer():
    calm, bursts = (poisson(20, 500, 3, burst=burst) for burst in (1, 6))
    assert len(bursts) == pytest.approx(len(calm), rel=0.1)
    server = Server(0, 0.02, 1, 0.05)
    assert serve(server, bursts, "none").mean_s > 2 * serve(server, calm, "none").mean_s


def test_more_than_can_be_served_waits_for_ever():
    assert closed_mean_s(Server(0, 1, 1, 1), 1.0, "none") == float("inf")
    assert closed_steps_per_hour(Server(0, 1, 1, 1), 2.0, "whole") == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Time,tokens\n5,1\n3.5,2\n", [0, 1.5]),
        (
            "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9799600,4808\n2023-11-16 18:17:04.9799600,1\n",
            [0, 1],
        ),
    ],
)
def test_traces_are_read(tmp_path, text, wanted):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert recorded(path).tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no column of arrival times"),
        ("time\n", "no arrivals"),
        ("time\nsoon\n", "line 2: 'soon'"),
        ("time\ninf\n", "is not a finite time"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, says):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TrafficError, match=says):
        recorded(path)


def test_what_cannot_be_served_is_refused():
    with pytest.raises(TrafficError, match="invalid times or counts"):
        Server(0, 0, 1, 1)
    with pytest.raises(TrafficError, match="no arrivals"):
        poisson(-1, 10, 0)
    with pytest.raises(TrafficError, match="more than the maximum"):
        poisson(1e9, 1e9, 0)
    with pytest.raises(TrafficError, match="no arrivals"):
        serve(Server(0, 1, 1, 1), np.array([]), "none")


def test_the_command_says_which_policies_keep_the_objective():
    arguments = (
        "slack --request-ms 20 --step-ms 200 --segments 20 --rate 10 --duration 60 --p99-ms 100 --json"
    )
    result = CliRunner().invoke(app, arguments.split())
    policies = {row["policy"]: row for row in json.loads(result.stdout)["policies"]}
    assert not policies["whole"]["within_objective"]
    assert policies["segments"]["within_objective"]
    assert policies["segments"]["steps_per_hour"] > 2 * policies["cancel"]["steps_per_hour"]
    assert CliRunner().invoke(app, ["slack", "--request-ms", "20", "--rate", "10"]).exit_code != 0
    for objective in ("nan", "-1", "0"):
        refused = CliRunner().invoke(app, [*arguments.split(), "--p99-ms", objective])
        assert refused.exit_code == 2
        assert f"--p99-ms {objective} must be above 0" in refused.stderr
