"""Estimators and quantizers that are right pass, and each that is subtly wrong fails by the finding that is about its fault."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings

from executors.steps.arithmetic import ParamPass, projected_gradient
from proofs_checks.judging import judge_estimator, judge_quantizer
from proofs_checks.judging.strategies import numbers_to_round, points, radii, smooth_losses
from tests.support.command import zosim
from topology.errors import ZosimError

FEW = 10_000


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(theta, seed):
    return torch.randn(theta.shape, generator=generator(seed), dtype=theta.dtype)


def signs(theta, seed):
    return torch.randint(0, 2, theta.shape, generator=generator(seed)).double() * 2 - 1


def sphere(theta, seed):
    z = normal(theta, seed)
    return z / z.norm() * math.sqrt(len(theta))


def central(draw):
    def estimate(loss, theta, epsilon, seed):
        z = draw(theta, seed)
        return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon) * z

    return estimate


def forward(loss, theta, epsilon, seed):
    z = normal(theta, seed)
    return (loss(theta + epsilon * z) - loss(theta)) / epsilon * z


def in_place(loss, theta, epsilon, seed):
    """Perturb there and back, as the shipped step does, with what it ships."""
    param_pass = ParamPass()
    param_pass.perturb(theta, normal(theta, seed), 1, epsilon)
    plus = loss(theta)
    param_pass.perturb(theta, normal(theta, seed), -2, epsilon)
    minus = loss(theta)
    param_pass.perturb(theta, normal(theta, seed), 1, epsilon)
    return projected_gradient(plus, minus, epsilon, central=True) * normal(theta, seed)


def of_three(loss, theta, epsilon, seed):
    return sum(central(normal)(loss, theta, epsilon, 3 * seed + n) for n in range(3)) / 3


RIGHT = {
    "central, normals": (central(normal), {}),
    "forward, normals": (forward, {}),
    "central, signs": (central(signs), {"distribution": "signs"}),
    "central, sphere": (central(sphere), {"distribution": "sphere"}),
    "shipped": (in_place, {}),
    "three perturbations": (of_three, {"num_perturbations": 3}),
    "the gradient itself": (
        lambda loss, theta, epsilon, seed: torch.func.grad(loss)(theta),
        {"distribution": "any"},
    ),
}


@pytest.mark.crossed(quick=7, slow=3)
@pytest.mark.parametrize("name", RIGHT)
def test_right_estimators_pass(name):
    estimator, declared = RIGHT[name]
    judgement = judge_estimator(
        estimator, num_samples=3 * FEW if name == "forward, normals" else FEW, **declared
    )
    assert judgement.failed == (), judgement.lines()
    assert [finding.name for finding in judgement.unresolved if "bias" not in finding.name] == [], (
        judgement.lines()
    )
    assert judgement.false_alarms < 1e-8


def half(loss, theta, epsilon, seed):
    return 0.5 * central(normal)(loss, theta, epsilon, seed)


def other_distance(loss, theta, epsilon, seed):
    z = normal(theta, seed)
    return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * 1.01 * epsilon) * z


def other_perturbation(loss, theta, epsilon, seed):
    z = normal(theta, seed)
    return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon) * normal(theta, seed + 1)


def over_z(loss, theta, epsilon, seed):
    """SPSA as Spall wrote it, with normals, which it must not have: 1/z has no mean."""
    z = normal(theta, seed)
    return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon) / z


def skewed(loss, theta, epsilon, seed):
    """Along exponentials less their mean: unit variance, and a skew."""
    z = torch.empty_like(theta).exponential_(generator=generator(seed)) - 1
    return (loss(theta + epsilon * z) - loss(theta)) / epsilon * z


def global_numbers(loss, theta, epsilon, seed):
    torch.manual_seed(seed)
    z = torch.randn_like(theta)
    return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon) * z


def no_seed(loss, theta, epsilon, seed):
    return central(lambda t, _: torch.randn_like(t))(loss, theta, epsilon, seed)


def one_seed(loss, theta, epsilon, seed):
    return central(normal)(loss, theta, epsilon, 7)


def not_restored(loss, theta, epsilon, seed):
    z = normal(theta, seed)
    theta += epsilon * z
    plus = loss(theta)
    theta -= 2 * epsilon * z
    return (plus - loss(theta)) / (2 * epsilon) * z


def same_thrice(loss, theta, epsilon, seed):
    return sum(central(normal)(loss, theta, epsilon, seed) for _ in range(3)) / 3


def clipped(loss, theta, epsilon, seed):
    return central(normal)(loss, theta, epsilon, seed).clamp(-1, 1)


WRONG = {
    "half": (half, {}, "mean on a linear loss"),
    "distance 1 % too long": (other_distance, {}, "difference, distance and perturbation"),
    "updates along another perturbation": (other_perturbation, {}, "mean on a linear loss"),
    "over z": (over_z, {}, "second moment"),
    "takes torch's own numbers": (global_numbers, {}, "other numbers are left alone"),
    "no seed": (no_seed, {}, "replay"),
    "one seed": (one_seed, {}, "seeds matter"),
    "not restored": (not_restored, {}, "parameters are given back"),
    "one perturbation three times": (same_thrice, {"num_perturbations": 3}, "second moment"),
    "skewed": (skewed, {"distribution": "any"}, "no bias of first order in ε"),
    "clipped": (clipped, {}, "ranks' estimates add up"),
    "signs called normals": (central(signs), {}, "mean against the smoothed gradient"),
    "normals called signs": (central(normal), {"distribution": "signs"}, "second moment"),
}


@pytest.mark.crossed(quick=13, slow=2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_estimators_fail_by_what_is_wrong(name):
    estimator, declared, finding = WRONG[name]
    num_samples = {"skewed": 20_000, "signs called normals": 40_000, "normals called signs": FEW}.get(
        name, 2_000
    )
    judgement = judge_estimator(estimator, num_samples=num_samples, **declared)
    assert finding in [each.name for each in judgement.failed], judgement.lines()


def test_a_mean_that_few_samples_cannot_tell_is_not_said_to_hold():
    judgement = judge_estimator(over_z, distribution="any", num_samples=2_000)
    assert "mean on a linear loss" in [finding.name for finding in judgement.unresolved], judgement.lines()


def test_estimators_that_cannot_be_called_are_refused_in_words():
    with pytest.raises(ZosimError, match="raised TypeError"):
        judge_estimator(lambda loss: 1)
    with pytest.raises(ZosimError, match=r"shape \(3,\), but its input has shape \(6,\)"):
        judge_estimator(lambda loss, theta, epsilon, seed: theta[:3])
    with pytest.raises(ZosimError, match="dimension=1 must be from"):
        judge_estimator(forward, dimension=1)


# -- quantizers ------------------------------------------------------------------------------------------------


def scaled(numbers, levels=7):
    scale = numbers.abs().max() / levels
    return (numbers / scale, scale) if scale else (numbers, torch.tensor(1.0))


def stochastic(numbers, seed):
    x, scale = scaled(numbers)
    return torch.floor(x + torch.rand(x.shape, generator=generator(seed))).clamp(-7, 7) * scale


def nearest(numbers, _seed):
    x, scale = scaled(numbers)
    return torch.round(x) * scale


def in_groups(numbers, seed):
    return torch.cat([stochastic(part, 8 * seed + n) for n, part in enumerate(numbers.split(32))])


RIGHT_QUANTIZERS = {
    "stochastic": (stochastic, {}),
    "nearest": (nearest, {"rounding": "nearest"}),
    "in groups": (in_groups, {"group_size": 32}),
}


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("name", RIGHT_QUANTIZERS)
def test_right_quantizers_pass(name):
    quantizer, declared = RIGHT_QUANTIZERS[name]
    judgement = judge_quantizer(quantizer, num_samples=2_000, **declared)
    assert judgement.failed == (), judgement.lines()
    assert judgement.unresolved == (), judgement.lines()


def rounded_half_up(numbers, seed):
    return nearest(numbers, seed)


def one_number_for_all(numbers, seed):
    x, scale = scaled(numbers)
    return torch.floor(x + torch.rand(1, generator=generator(seed))).clamp(-7, 7) * scale


def slightly_down(numbers, seed):
    """By a hundredth of a step."""
    x, scale = scaled(numbers)
    return torch.floor(x - 0.01 + torch.rand(x.shape, generator=generator(seed))).clamp(-7, 7) * scale


def wraps(numbers, seed):
    """The largest number has a code that its sign bit takes."""
    x, scale = scaled(numbers, 8)
    qvalues = torch.floor(x + torch.rand(x.shape, generator=generator(seed)))
    return torch.where(qvalues > 7, qvalues - 16, qvalues) * scale


def too_far(numbers, seed):
    """To neighbours that are two steps away."""
    x, scale = scaled(numbers)
    rest = (x + torch.rand(x.shape, generator=generator(seed)) * 3 - 1).floor()
    return rest.clamp(-7, 7) * scale


def without_seed(numbers, _seed):
    x, scale = scaled(numbers)
    return torch.floor(x + torch.rand_like(x)).clamp(-7, 7) * scale


def divides_by_nothing(numbers, seed):
    scale = numbers.abs().max() / 7
    return torch.floor(numbers / scale + torch.rand(numbers.shape, generator=generator(seed))) * scale


def towards_zero(numbers, _seed):
    x, scale = scaled(numbers)
    return torch.trunc(x) * scale


def disordered(numbers, _seed):
    x, scale = scaled(numbers)
    qvalues = torch.round(x)
    return torch.where(qvalues == 3, 4, torch.where(qvalues == 4, 3, qvalues)) * scale


def too_large(numbers, _seed):
    x, scale = scaled(numbers)
    return torch.round(x) * scale * 1.001


WRONG_QUANTIZERS = {
    "nearest, said to be random": (rounded_half_up, {}, "seeds matter"),
    "one random number for all": (one_number_for_all, {}, "independent"),
    "a hundredth of a step down": (slightly_down, {}, "unbiased, over all numbers"),
    "wraps": (wraps, {}, "two neighbours"),
    "too far": (too_far, {}, "two neighbours"),
    "no seed": (without_seed, {}, "replay"),
    "divides by nothing": (divides_by_nothing, {}, "zeros, constants and extremes"),
    "towards zero": (towards_zero, {"rounding": "nearest"}, "nearest"),
    "two grid values exchanged": (disordered, {"rounding": "nearest"}, "ordered"),
    "a thousandth too large": (too_large, {"rounding": "nearest"}, "range"),
}


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("name", WRONG_QUANTIZERS)
def test_wrong_quantizers_fail_by_what_is_wrong(name):
    quantizer, declared, finding = WRONG_QUANTIZERS[name]
    judgement = judge_quantizer(quantizer, num_samples=2_000, **declared)
    assert finding in [each.name for each in judgement.failed], judgement.lines()


def test_roundings_that_few_seeds_cannot_tell_are_not_said_to_be_unbiased():
    judgement = judge_quantizer(stochastic, num_samples=256)
    assert [finding.name for finding in judgement.unresolved] == ["unbiased, number by number"], (
        judgement.lines()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounding": "up"}, "must be stochastic or nearest"),
        ({"group_size": 100}, "must divide the 256 numbers"),
        ({"group_size": 0}, "must divide the 256 numbers"),
        ({"num_samples": 3}, "must be from"),
    ],
)
def test_what_is_said_of_a_quantizer_is_checked(arguments, message):
    with pytest.raises(ZosimError, match=message):
        judge_quantizer(nearest, **arguments)


def test_judging_leaves_the_callers_own_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    judge_quantizer(nearest, rounding="nearest")
    judge_estimator(half, num_samples=512)
    assert torch.equal(torch.rand(4), expected)


def test_the_command_judges_a_function_beside_the_user(tmp_path, monkeypatch, capsys):
    (tmp_path / "judged_by_a_test.py").write_text(
        "import torch\n"
        "def spsa(loss, theta, epsilon, seed):\n"
        "    z = torch.randn(theta.shape, generator=torch.Generator().manual_seed(seed), dtype=theta.dtype)\n"
        "    return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / epsilon * z\n"
        "def same(numbers, seed):\n"
        "    return numbers\n"
    )
    monkeypatch.chdir(tmp_path)
    judged = ["check", "--estimator", "judged_by_a_test:spsa", "--samples", 1000, "--json"]
    assert zosim(*judged) == 1
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert "mean on a linear loss" in failed
    assert "difference, distance and perturbation" in failed
    assert zosim("check", "--quantizer", "judged_by_a_test:same", "--rounding", "nearest") == 0
    assert "HOLDS" in capsys.readouterr().out
    assert zosim("check", "--quantizer", "judged_by_a_test:other") == 2
    assert "cannot import" in capsys.readouterr().err


# -- strategies ------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(smooth_losses(3), points(3), points(3), radii())
def test_losses_have_the_gradients_and_constants_that_they_state(loss, theta, other, epsilon):
    measured = torch.func.grad(loss)(theta)
    assert torch.allclose(loss.gradient(theta), measured, atol=1e-9)
    change = float((loss.gradient(theta) - loss.gradient(other)).norm())
    assert change <= loss.gradient_lipschitz * float((theta - other).norm()) + 1e-9
    # By the definition of L, averaging over a ball of that size changes a gradient by no more than L·ε·√d.
    off = float((loss.smoothed_gradient(theta, epsilon) - loss.gradient(theta)).norm())
    assert off <= loss.gradient_lipschitz * epsilon * math.sqrt(3) + 1e-9
    assert off <= loss.hessian_lipschitz * epsilon**2 * 3 / 2 + 1e-9


@settings(max_examples=20)
@given(numbers_to_round())
def test_a_range_is_kept_whatever_is_rounded(numbers):
    rounded = nearest(numbers, 0)
    assert rounded.isfinite().all()
    assert rounded.abs().max() <= numbers.abs().max() * (1 + 1e-5)
