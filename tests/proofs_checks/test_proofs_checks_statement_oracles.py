"""Closed forms of what papers state, against samples and small cases; claims hold them against exact nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proofs_checks.oracles import evaluate

COUNT = 200_000


def close_on_average(samples, wanted, *, errors=5.5):
    """Within so many standard errors; each witness has a fixed seed."""
    assert abs(samples.mean() - wanted) <= errors * samples.std() / math.sqrt(len(samples)) + 1e-12


@pytest.fixture
def random():
    return np.random.default_rng(17)


def test_sharper_bounds_are_reached_and_below_the_printed_ones(random):
    u = random.standard_normal(COUNT)
    epsilon, smoothness = 0.3, 2.0
    bound = evaluate("sharp_smoothing_bounds", {"dimension": 1, "epsilon": epsilon, "smoothness": smoothness})
    close_on_average(smoothness * epsilon * np.abs(u), bound["gradient"])  # f' = L|x| at 0
    for d in (1, 3, 50):
        requested = {"dimension": d, "epsilon": epsilon, "smoothness": smoothness, "gradient_norm": 1.5}
        sharp, printed = (
            evaluate(name, requested) for name in ("sharp_smoothing_bounds", "smoothing_bounds")
        )
        assert all(sharp[kind] <= printed[kind] for kind in sharp)
        z = random.standard_normal((20_000, d))
        slope = np.ones(d) * 1.5 / math.sqrt(d)
        forward = z @ slope + epsilon / 2 * smoothness * (z**2).sum(1)  # c·x + L|x|²/2 at 0
        assert (forward**2 * (z**2).sum(1)).mean() <= 1.05 * sharp["mean_square"]


def test_gradients_of_a_cosine_keep_their_bounds(random):
    u = random.standard_normal(COUNT)
    for epsilon in (0.1, 0.8):
        damping = np.cos(epsilon * u).mean()
        own = evaluate(
            "smoothed_gradient_bounds",
            {"dimension": 1, "epsilon": epsilon, "smoothness": 1.0, "other_norm": damping},
        )
        assert own["square"] >= 1.0  # |∇f| = 1 where |∇f_ε| is the damping
        assert 2 * (1 - damping) <= own["excess"] * 1.01
        assert own["excess"] == pytest.approx(epsilon**2)


def test_errors_of_perturbations_shards_and_one_point(random):
    d, perturbations, shards, spread, epsilon, level = 3, 4, 2, 0.6, 0.5, 2.0
    slope = np.array([0.6, 0.0, -0.8])
    z = random.standard_normal((50_000, perturbations, d))
    noise = random.standard_normal((50_000, perturbations, shards, d)) * math.sqrt(spread / d)
    slopes = slope + noise.mean(2)
    estimates = ((z * slopes).sum(2)[..., None] * z).mean(1)
    requested = {"num_perturbations": perturbations, "dimension": d, "num_shards": shards, "spread": spread}
    close_on_average(((estimates - slope) ** 2).sum(1), evaluate("perturbation_error", requested))
    one = (level + epsilon * z[:, 0] @ slope)[:, None] / epsilon * z[:, 0]
    requested = {"level": level, "gradient_norm": 1.0, "dimension": d, "epsilon": epsilon}
    close_on_average(((one - slope) ** 2).sum(1), evaluate("one_point_error", requested))


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_moments_of_an_entry(random, rank):
    u, v, w = random.standard_normal((3, COUNT, rank))
    first, second = ((u * other).sum(1) / math.sqrt(rank) for other in (v, w))
    moments = evaluate("low_rank_entry_moments", {"rank": rank})
    close_on_average(first**2, moments["variance"])
    close_on_average(first**4, moments["fourth_moment"])
    close_on_average(first**2 * second**2, moments["row_product"])


def test_shares_and_speedups_by_hand():
    block, ranks, lane, link = 12.0, 4, 2.0, 8.0
    upload, exchange = block / ranks / lane, (ranks - 1) * block / ranks / link
    assert evaluate("exchange_share", {"num_ranks": ranks, "link_over_lane": link / lane}) == pytest.approx(
        exchange / upload
    )
    for transfer, forward in ((0.5, 1.0), (1.5, 1.0), (5.0, 1.0)):
        alone, pair = (max(transfer, points * forward) for points in (2, 1))
        assert evaluate("pair_speedup", {"transfer": transfer, "forward": forward}) == pytest.approx(
            alone / pair
        )


def test_a_rounded_square(random):
    step, place = 0.25, 0.31
    low = math.floor(place / step) * step
    arrived = low + step * (random.random(COUNT) < (place - low) / step)
    close_on_average(
        arrived**2 / 2 - place**2 / 2, evaluate("rounded_square_excess", {"step": step, "value": place})
    )
