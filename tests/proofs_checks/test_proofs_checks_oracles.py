"""Every closed form against a second witness: Monte Carlo, quadrature, enumeration, bits, or a simulation by hand."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np
import pytest
import typer
from scipy.integrate import quad
from typer.testing import CliRunner

from proofs_checks.cli import check
from proofs_checks.oracles import evaluate, oracles
from proofs_checks.pages import THEORY
from topology.errors import ZosimError

COUNT = 200_000
RANDOM = np.random.default_rng(5)


def close_on_average(samples, wanted, *, errors=5.5):
    """Within so many standard errors; each witness has a fixed seed."""
    deviation = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - wanted) <= errors * deviation + 1e-12


def rounded(x, bits, scale):
    cells = x * scale
    limit = 2 ** (bits - 1) - 1
    return (
        np.clip(np.floor(cells) + (RANDOM.random(x.shape) < cells - np.floor(cells)), -limit, limit) / scale
    )


def sampled(distribution, count=COUNT, *, dimension=5, rows=2, columns=3, rank=2, bits=3, scale=1.5):
    if distribution == "rademacher":
        return RANDOM.choice((-1.0, 1.0), (count, dimension))
    if distribution == "low-rank":
        left, right = (
            RANDOM.standard_normal((count, rows, rank)),
            RANDOM.standard_normal((count, columns, rank)),
        )
        return np.einsum("nik,njk->nij", left, right).reshape(count, -1) / math.sqrt(rank)
    z = RANDOM.standard_normal((count, dimension))
    if distribution == "sphere":
        return z * math.sqrt(dimension) / np.linalg.norm(z, axis=1, keepdims=True)
    return rounded(z, bits, scale) if distribution == "quantized-gaussian" else z


FAMILIES = {
    "gaussian": {"dimension": 5},
    "rademacher": {"dimension": 5},
    "sphere": {"dimension": 5},
    "low-rank": {"rows": 2, "columns": 3, "rank": 2},
    "quantized-gaussian": {"dimension": 5, "bits": 3, "scale": 1.5},
}


def perturbations():
    for name, parameters in FAMILIES.items():
        z = sampled(name)
        moments = evaluate("perturbation_moments", {"distribution": name, **parameters})
        close_on_average(z[:, 0] ** 2, moments["second_moment"])
        close_on_average(z[:, 0] ** 4, moments["fourth_moment"])
        along = z @ (np.arange(1, z.shape[1] + 1) / np.linalg.norm(np.arange(1, z.shape[1] + 1)))
        close_on_average(along**2 * (z**2).sum(1), moments["energy"])
        assert evaluate("energy", {"distribution": name, **parameters}) == moments["energy"]


def estimates():
    half = RANDOM.standard_normal((5, 5))
    hessian, gradient, epsilon = half + half.T, np.array([0.5, -1.0, 0.2, 0.7, 0.1]), 0.4
    facts = {
        "gradient_norm": float(np.linalg.norm(gradient)),
        "hessian_trace": float(np.trace(hessian)),
        "hessian_square": float((hessian**2).sum()),
        "hessian_diagonal_square": float((np.diag(hessian) ** 2).sum()),
        "epsilon": epsilon,
    }
    for name, difference in itertools.product(("gaussian", "rademacher", "sphere"), ("central", "forward")):
        mean = 0
        for _ in range(2):
            z = sampled(name)
            g = z @ gradient + (epsilon / 2 * np.einsum("ni,ij,nj->n", z, hessian, z)) * (
                difference == "forward"
            )
            mean = mean + g[:, None] * z / 2
        requested = {
            "distribution": name,
            "difference": difference,
            "dimension": 5,
            "num_perturbations": 2,
            **facts,
        }
        close_on_average((mean**2).sum(1), evaluate("estimate_moments", requested)["mean_square"])


def contraction():
    delta = RANDOM.standard_normal((COUNT, 4)) * 0 + np.array([1.0, 2.0, 0.0, -1.0])
    start = (delta[0] ** 2).sum()
    for _ in range(2):
        estimate = (
            sum((delta * z).sum(1)[:, None] * z for z in (sampled("gaussian", dimension=4) for _ in range(3)))
            / 3
        )
        delta = delta - 0.1 * estimate
    wanted = evaluate(
        "quadratic_contraction",
        {"dimension": 4, "learning_rate": 0.1, "num_perturbations": 3, "num_steps": 2},
    )
    close_on_average((delta**2).sum(1) / start, wanted)


def quantized_factors():
    u = RANDOM.standard_normal(COUNT)
    for bits, scale in ((2, 0.5), (4, 2.0)):
        first, second = rounded(u, bits, scale), rounded(u, bits, scale)
        for kind, product in (("q-rge1", first * first), ("q-rge2", first * second)):
            close_on_average(
                product, evaluate("quantized_estimate_factor", {"kind": kind, "bits": bits, "scale": scale})
            )


def shared_seed():
    u = RANDOM.standard_normal(COUNT)
    wanted = evaluate("shared_seed_mean", {"own_gradient": 0.3, "other_gradient": -1.1})
    close_on_average((0.3 * u - 1.1 * u) * u, wanted)


FUNCTIONS = {
    "linear": lambda t: t,
    "quadratic": lambda t: t**2 / 2,
    "cubic": lambda t: t**3 / 6,
    "quartic": lambda t: t**4 / 24,
    "exponential": np.exp,
    "sine": np.sin,
    "absolute": abs,
}


def over_normals(function, kinks=()):
    inside = [kink for kink in kinks if -12 < kink < 12]
    return quad(
        lambda x: function(x) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi), -12, 12, points=inside or None
    )[0]


def smoothing():
    t, w = 0.4, 0.7
    for name, function in FUNCTIONS.items():
        smooth = evaluate("smoothed_loss", {"loss": name, "t": t, "width": w})
        kinks = (-t / w, t / w)
        assert over_normals(lambda x, f=function: f(t + w * x), kinks) == pytest.approx(
            smooth["value"], rel=1e-8
        )
        slope = over_normals(lambda x, f=function: (f(t + w * x) - f(t - w * x)) / (2 * w) * x, kinks)
        assert slope == pytest.approx(smooth["derivative"], rel=1e-8)


def bias():
    for name in ("cubic", "quartic", "exponential", "sine"):
        function, t, w = FUNCTIONS[name], 0.4, 0.3
        mean = over_normals(lambda x, f=function: (f(0.4 + 0.3 * x) - f(0.4 - 0.3 * x)) / 0.6 * x)
        derivative = (function(t + 1e-5) - function(t - 1e-5)) / 2e-5
        wanted = evaluate("estimate_bias", {"loss": name, "t": t, "width": w})
        assert mean - derivative == pytest.approx(wanted, abs=1e-8)


def signs():
    a, epsilon, t = np.array([0.5, -0.3, 1.0]), 0.4, 0.2
    z = np.array(list(itertools.product((-1, 1), repeat=3)))
    g = (np.exp(t + epsilon * z @ a) - np.exp(t - epsilon * z @ a)) / (2 * epsilon)
    wanted = evaluate("rademacher_expected_gradient", {"a": a.tolist(), "t": t, "epsilon": epsilon})
    np.testing.assert_allclose((g[:, None] * z).mean(0), wanted, rtol=1e-12)


def bounds_of_smoothing():
    """A quadratic has a third of them in closed form: each is below its bound, the first is reached."""
    d, epsilon, smoothness = 6, 0.1, 2.0
    bound = evaluate(
        "smoothing_bounds",
        {"dimension": d, "epsilon": epsilon, "smoothness": smoothness, "gradient_norm": 1.0},
    )
    assert epsilon**2 / 2 * smoothness * d == pytest.approx(bound["value"])  # E f(θ + εz) - f(θ) of L|θ|²/2
    square = evaluate(
        "estimate_moments",
        {
            "distribution": "gaussian", "difference": "forward", "dimension": d, "gradient_norm": 1.0, "epsilon": epsilon,
            "hessian_trace": smoothness * d, "hessian_square": smoothness**2 * d,
        },
    )["mean_square"]  # fmt: skip
    assert square <= bound["mean_square"]
    assert bound["gradient"] > 0


def rounding():
    for value, kind in itertools.product((0.3, -1.7, 9.0, 2.0), ("stochastic", "nearest")):
        moments = evaluate("rounding_moments", {"value": value, "bits": 4, "scale": 2.0, "rounding": kind})
        x = np.full(COUNT, value)
        came = rounded(x, 4, 2.0) if kind == "stochastic" else np.clip(np.round(x * 2.0), -7, 7) / 2.0
        close_on_average(came, moments["mean"])
        close_on_average((came - value) ** 2, moments["mean_squared_error"])
        assert moments["variance"] + moments["bias"] ** 2 == pytest.approx(moments["mean_squared_error"])


def clamped():
    close_on_average(
        np.clip(RANDOM.standard_normal(COUNT), -1.5, 1.5) ** 2,
        evaluate("clamped_normal_square", {"limit": 1.5}),
    )


def drift():
    """A walk in float16, weight by weight, against the bound; and its growth against the model."""
    start = RANDOM.uniform(1.3, 1.7, 20_000).astype(np.float16)
    theta = start.copy()
    for step in range(25):
        z = RANDOM.standard_normal(len(theta)).astype(np.float16)
        before = theta.copy()
        for scale in (1, -2, 1):
            theta = theta + (z.astype(np.float32) * np.float32(scale * 0.05)).astype(np.float16)
        bound = [
            evaluate(
                "restore_drift_bound",
                {"weight": float(w), "perturbation": float(x), "epsilon": 0.05, "dtype": "float16"},
            )
            for w, x in zip(before[:200], z[:200], strict=True)
        ]
        # Products round in float16, too: the bound takes one of each sign that cancels.
        assert (np.abs(theta - before)[:200].astype(float) <= np.array(bound) * 1.01).all(), step
    model = evaluate("restore_drift_deviation", {"weight": 1.5, "num_steps": 25, "dtype": "float16"})
    measured = float((theta.astype(float) - start.astype(float)).std())
    assert measured == pytest.approx(model, rel=0.1)


def kept_updates():
    import torch

    for name in ("bfloat16", "float16", "float32"):
        weight = torch.tensor(1.5, dtype=getattr(torch, name))
        least = evaluate("smallest_kept_update", {"weight": 1.5, "dtype": name})
        assert (weight + torch.tensor(1.01 * least, dtype=weight.dtype)) != weight
        assert (weight + torch.tensor(0.99 * least, dtype=weight.dtype)) == weight


def contraction_of_nearest():
    for bits in (2, 3, 4, 8):
        x = RANDOM.standard_normal(64)
        step = np.abs(x).max() / (2 ** (bits - 1) - 1)
        error = ((x - np.round(x / step) * step) ** 2).sum() / (x**2).sum()
        requested = {
            "squares": float((x**2).sum()),
            "largest": float(np.abs(x).max()),
            "bits": bits,
            "numel": 64,
        }
        assert error <= evaluate("nearest_contraction", requested)["kappa_squared"] < 1


def expansion():
    x = RANDOM.standard_normal(COUNT)
    for step in (0.5, 2.0):
        cells = x / step
        up = RANDOM.random(COUNT) < cells - np.floor(cells)
        close_on_average(
            ((np.floor(cells) + up) * step - x) ** 2, evaluate("stochastic_expansion", {"step": step})
        )


def through_rounding():
    u = np.linspace(-9, 9, 400_001)
    weights = np.exp(-u * u / 2) * (u[1] - u[0]) / math.sqrt(2 * math.pi)
    for radius, place in ((0.2, 0.0), (0.2, 0.45), (0.6, 0.25), (0.499, 0.1), (0.501, 0.1)):
        mean = (weights * (np.round(place + radius * u) - np.round(place - radius * u)) * u).sum() / (
            2 * radius
        )
        assert mean == pytest.approx(
            evaluate("straight_through", {"radius_in_steps": radius, "value_in_steps": place}), abs=2e-3
        )


def noise_of_rounding():
    w, plus, minus = np.array([0.5, -2.0]), np.array([0.3, 1.6]), np.array([0.2, 1.7])
    for kind in ("independent", "shared"):
        uniform = RANDOM.random((COUNT, 2))
        others = uniform if kind == "shared" else RANDOM.random((COUNT, 2))
        high, low = (
            (np.floor(a / s) + (c < a / s - np.floor(a / s))) * s
            for a, s, c in ((plus, 0.5, uniform), (minus, 0.7, others))
        )
        g = (high - low) @ w / 0.2
        requested = {
            "weights": w.tolist(),
            "plus": plus.tolist(),
            "minus": minus.tolist(),
            "step_plus": 0.5,
            "step_minus": 0.7,
        }
        variance = evaluate("codec_gradient_variance", {**requested, "epsilon": 0.1, "random_numbers": kind})
        close_on_average((g - (plus - minus) @ w / 0.2) ** 2, variance)


def biased_compressor():
    """Keep each element with probability 3/4, unscaled: a quarter of the gradient is lost on average, however many are averaged."""
    g = np.array([3.0, -4.0])
    mean = (g * (RANDOM.random((COUNT, 2)) < 0.75)).mean(0)
    floor = evaluate("biased_compression_floor", {"bias": 0.25, "gradient_norm": 5.0})
    assert np.linalg.norm(mean - g) == pytest.approx(floor["error"], rel=0.02)
    assert (mean / g).mean() == pytest.approx(floor["factor"], rel=0.02)


def lemma():
    """Reached by a scalar chain: S₁ = C·x, rest ½La², gradients L·a·C, activation error κA."""
    c, smooth, kappa, size = 2.0, 3.0, 0.25, 1.5
    off = (smooth * kappa * size) ** 2 * (c**2 + 1)  # of x through S₁, and of the rest's own parameter, alike
    requested = {"first_gradient": c, "rest_smoothness": smooth, "kappa": kappa, "output_bound": size}
    assert evaluate("compressed_gradient_bound", requested) == pytest.approx(off)


def stationarity():
    """Above what gradient descent along (δ·z)z does on ½|θ - t|²; and its floor is 12 B."""
    d, horizon = 8, 1000
    limits = evaluate("sparq_admissible", {"dimension": d, "smoothness": 1.0, "horizon": horizon})
    requested = {"horizon": horizon, "dimension": d, "gap": 2.0, "smoothness": 1.0, **limits}
    mean = np.mean([
        4.0 * evaluate("quadratic_contraction", {"dimension": d, "learning_rate": limits["learning_rate"], "num_steps": t})
        for t in range(1, horizon)
    ])  # fmt: skip
    assert mean <= evaluate("sparq_stationarity_bound", requested)
    endless = {**requested, "horizon": 10**14, "radius": 0.0, "learning_rate": 1e-6, "compression": 0.5}
    assert evaluate("sparq_stationarity_bound", endless) == pytest.approx(6.0, rel=1e-2)


def messages():
    for perturbations, stages in ((1, 2), (3, 4)):
        for difference in ("forward", "central"):
            points = {(0, 0)} if difference == "forward" else set()
            for perturbation in range(perturbations):
                points |= (
                    {(perturbation, 1)}
                    if difference == "forward"
                    else {(perturbation, 1), (perturbation, -1)}
                )
            requested = {"num_perturbations": perturbations, "num_stages": stages, "difference": difference}
            wanted = evaluate("sparq_messages", requested)
            assert wanted["activations"] == len(points) * (stages - 1)
            assert wanted["scalars_printed"] == perturbations * (stages - 1)


def pipeline():
    """Upload, compute and offload of each block, by hand, against both closed forms, in the second of two steps."""
    for block, transfer in ((1.0, 0.3), (1.0, 1.0), (1.0, 2.5)):
        blocks, up, computed, down = 6, 0.0, 0.0, 0.0
        for _ in range(blocks):
            up += transfer
            computed = max(computed, up) + block
            down = max(down, computed) + transfer
        wanted = evaluate("zo2_step_seconds", {"num_blocks": blocks, "block": block, "transfer": transfer})
        assert computed == pytest.approx(wanted["overlapped"])
        assert blocks * (2 * transfer + block) == pytest.approx(wanted["serial"])


def sliced_pipeline():
    parts = {
        "num_blocks": 5,
        "num_ranks": 4,
        "block_bytes": 8.0,
        "lane_bytes_per_s": 1.0,
        "link_bytes_per_s": 2.0,
    }
    times = [2.0, 3.0, 0.7]  # upload, exchange, compute
    ends = [0.0] * 3
    for _ in range(5):
        for stage, time in enumerate(times):
            ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0.0) + time
    wanted = evaluate("distzo2_step_seconds", {**parts, "block_compute": 0.7})
    assert ends[-1] == pytest.approx(wanted["corrected"])
    assert wanted["printed"] == pytest.approx(5 * (2.0 + 3.0))


def break_even():
    for ranks in (2, 4, 8):
        edge = evaluate("slicing_break_even", {"num_ranks": ranks})
        parts = {
            "num_blocks": 1000,
            "num_ranks": ranks,
            "block_bytes": 1.0,
            "lane_bytes_per_s": 1.0,
            "block_compute": 0.0,
        }
        filled = [
            evaluate("distzo2_step_seconds", {**parts, "link_bytes_per_s": factor * edge})["filled"] / 1000
            for factor in (0.99, 1.01)
        ]
        assert filled[0] > 1.0 > filled[1]


def traffic():
    assert evaluate("zo2_traffic_bytes", {"num_blocks": 7, "block_bytes": 3.0}) == {
        "uploads": 21.0,
        "offloads": 21.0,
    }


def first_order():
    """GPipe's grid: forwards move down the diagonal, then backwards."""
    m, p, f, b = 5, 3, 1.0, 2.0
    ready = np.zeros((m + 1, p + 1))
    for i, s in itertools.product(range(1, m + 1), range(1, p + 1)):
        ready[i, s] = max(ready[i - 1, s], ready[i, s - 1]) + f
    back = np.full((m + 1, p + 2), ready[m, p])
    for i, s in itertools.product(range(1, m + 1), range(p, 0, -1)):
        back[i, s] = max(back[i - 1, s], back[i, s + 1]) + b
    requested = {"num_microbatches": m, "num_stages": p, "forward": f, "backward": b}
    assert evaluate("first_order_step", requested)["seconds"] == pytest.approx(back[m, 1])


def ridges():
    a, theta, epsilon = np.array([0.5, -0.4, 0.8, 0.1]), np.array([0.3, 0.2, 0.4, -0.5]), 0.6
    for name, difference in itertools.product(("cubic", "exponential", "sine"), ("central", "forward")):
        function = FUNCTIONS[name]
        mean = 0
        for _ in range(2):
            z = sampled("gaussian", dimension=4)
            other = function((theta - epsilon * z) @ a) if difference == "central" else function(theta @ a)
            g = (function((theta + epsilon * z) @ a) - other) / (
                2 * epsilon if difference == "central" else epsilon
            )
            mean = mean + g[:, None] * z / 2
        requested = {
            "loss": name,
            "t": float(theta @ a),
            "slope_norm": float(np.linalg.norm(a)),
            "epsilon": epsilon,
        }
        wanted = evaluate(
            "ridge_estimate_moments",
            {**requested, "dimension": 4, "difference": difference, "num_perturbations": 2},
        )
        close_on_average((mean**2).sum(1), wanted["mean_square"])
        close_on_average(mean @ a / np.linalg.norm(a), wanted["mean"])


def more_nodes():
    """Two nodes with the same bound of the gradient's error give theorem 1's terms."""
    requested = {
        "horizon": 50,
        "dimension": 3,
        "gap": 1.0,
        "learning_rate": 0.01,
        "radius": 0.1,
        "smoothness": 2.0,
        "sigma": 0.5,
    }
    both = evaluate(
        "sparq_multinode_bounds", {**requested, "num_nodes": 2, "kappa": 0.5, "output_bound": 2.0, "psi": 1.0}
    )
    assert both["lemma_5"] == pytest.approx(2 * 2 * 0.25 * 4)
    half = evaluate("sparq_stationarity_bound", {**requested, "compression": both["lemma_5"]})
    assert both["theorem_2_corrected"] == pytest.approx(half)
    assert both["theorem_2"] == pytest.approx(
        half - 6 * both["lemma_5"]
    )  # 12 M κ²L²Ψ is 6 times lemma 5's bound


WITNESSES = {
    "ridge_estimate_moments": ridges,
    "sparq_multinode_bounds": more_nodes,
    "perturbation_moments": perturbations,
    "energy": perturbations,
    "estimate_moments": estimates,
    "quadratic_contraction": contraction,
    "quantized_estimate_factor": quantized_factors,
    "shared_seed_mean": shared_seed,
    "smoothed_loss": smoothing,
    "estimate_bias": bias,
    "rademacher_expected_gradient": signs,
    "smoothing_bounds": bounds_of_smoothing,
    "rounding_moments": rounding,
    "clamped_normal_square": clamped,
    "restore_drift_bound": drift,
    "restore_drift_deviation": drift,
    "smallest_kept_update": kept_updates,
    "nearest_contraction": contraction_of_nearest,
    "stochastic_expansion": expansion,
    "straight_through": through_rounding,
    "codec_gradient_variance": noise_of_rounding,
    "biased_compression_floor": biased_compressor,
    "compressed_gradient_bound": lemma,
    "sparq_stationarity_bound": stationarity,
    "sparq_admissible": stationarity,
    "sparq_messages": messages,
    "zo2_step_seconds": pipeline,
    "zo2_traffic_bytes": traffic,
    "distzo2_step_seconds": sliced_pipeline,
    "slicing_break_even": break_even,
    "first_order_step": first_order,
}


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("witness", dict.fromkeys(WITNESSES.values()), ids=lambda witness: witness.__name__)
def test_a_second_witness_agrees(witness):
    witness()


def test_every_closed_form_has_a_witness_a_source_and_an_example():
    assert set(oracles()) <= set(WITNESSES) | OTHER_WITNESSES
    for oracle in oracles().values():
        assert oracle.source
        assert ">>>" in oracle.documentation, oracle.name
        assert oracle.parameters, oracle.name


REFERENCE = (THEORY / "oracles.md").read_text(encoding="utf-8")


def sections():
    """The reference's part on each oracle, by name."""
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", REFERENCE, re.MULTILINE | re.DOTALL))


def test_the_reference_has_every_oracle_with_its_parameters_and_a_value():
    described = sections()
    assert set(described) == set(oracles())
    for name, text in described.items():
        rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
        known = oracles()[name].parameters
        assert set(rows) == set(known), name
        assert {key for key in rows if "default" in rows[key]} == {
            key for key in known if " = " in known[key]
        }
        ((requested, shown),) = re.findall(
            rf"^\$ zosim check --oracle {name} --params '(.*)'\n(.*)$", text, re.MULTILINE
        )
        value = json.dumps(evaluate(name, json.loads(requested)))
        assert re.fullmatch(r"\d*".join(map(re.escape, shown.split("..."))), value), (name, value)


OTHER_WITNESSES = {
    "sharp_smoothing_bounds",
    "smoothed_gradient_bounds",
    "perturbation_error",
    "one_point_error",
    "low_rank_entry_moments",
    "exchange_share",
    "pair_speedup",
    "rounded_square_excess",
}
"""Closed forms whose witness is in test_proofs_checks_statement_oracles.py."""


@pytest.mark.parametrize(
    ("name", "parameters", "output"),
    [
        ("enrgy", {}, "unknown oracle 'enrgy'"),
        ("energy", {"distribution": "uniform"}, "energy: distribution:"),
        ("energy", {}, "energy: distribution:"),
        ("energy", {"distribution": "gaussian", "dimension": 0}, "energy: dimension:"),
        ("energy", {"distribution": "gaussian", "dimension": 2.5}, "energy: dimension:"),
        ("energy", {"distribution": "gaussian", "weight": 1}, "energy: weight:"),
        ("energy", [1], "must be a JSON object"),
        ("smoothed_loss", {"loss": "exponential", "t": 1e6, "width": 1.0}, "smoothed_loss:"),
        ("rademacher_expected_gradient", {"a": [700.0, 700.0], "t": 0.0, "epsilon": 1.0}, "is not finite"),
        (
            "estimate_moments",
            {"distribution": "low-rank", "difference": "forward", "epsilon": 1, "hessian_trace": 1},
            "no closed",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(name, parameters, output):
    with pytest.raises(ZosimError, match=output) as refused:
        evaluate(name, parameters)
    assert refused.value.hint


def invoke(*arguments):
    app = typer.Typer(add_completion=False)
    app.command()(check)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_lists_closed_forms_and_prints_a_value():
    listed = json.loads(invoke("--oracles", "--json").stdout)
    assert {item["name"] for item in listed} == set(oracles())
    assert "E[(a·z)²|z|²]" in invoke("--oracles").stdout
    answer = invoke("--oracle", "energy", "--params", '{"distribution": "gaussian", "dimension": 8}')
    assert json.loads(answer.stdout) == 10.0
