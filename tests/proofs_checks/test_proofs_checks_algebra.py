"""The lines between the lines of the papers' proofs, symbol by symbol; docs/theory says which claim each belongs to."""

from __future__ import annotations

import itertools

import pytest
import sympy
from sympy import Rational

d, T, M = sympy.symbols("d T M", positive=True, integer=True)
mu, eta, L, B, D, s2, eps, kappa = sympy.symbols("mu eta L B D sigma2 epsilon kappa", positive=True)


def same(left, right):
    return sympy.simplify(sympy.expand(left - right)) == 0


def grows(expression):
    """Whether a polynomial in d has no negative coefficient, so that it is not negative for d >= 1 (or d >= 0)."""
    return all(coefficient >= 0 for coefficient in sympy.Poly(sympy.expand(expression), d).all_coeffs())


# -- SparQ, lemmas ----------------------------------------------------------------------------------------------------


def norm_moment(power):
    """E‖u‖^(2·power) of a normal u in d dimensions."""
    return sympy.simplify(2**power * sympy.gamma(d / 2 + power) / sympy.gamma(d / 2))


def test_moments_of_a_normal_vector():
    assert same(sympy.gammasimp(norm_moment(1)), d)
    assert same(sympy.gammasimp(norm_moment(2)), d * (d + 2))
    assert same(sympy.gammasimp(norm_moment(3)), d * (d + 2) * (d + 4))


def test_equations_14_to_16_follow_from_moments():
    # (14): |f_μ - f| <= (L/2)μ²E‖u‖².
    assert same(L / 2 * mu**2 * d, mu**2 / 2 * L * d)
    # (15): (L/2)μE[‖u‖²|u₁|] and LμE‖u‖ <= Lμ√d are both below (μ/2)L(d + 3)^{3/2}, squared.
    assert grows((d + 3) ** 3 / 4 - d)
    # (16): (a + b)² <= 2a² + 2b² with a = (L/2)μ²‖u‖², b = μ∇f·u, times ‖u‖²/μ².
    assert same(
        2 * (L / 2 * mu**2) ** 2 * d * (d + 2) * (d + 4) / mu**2, mu**2 / 2 * L**2 * d * (d + 2) * (d + 4)
    )
    assert grows((d + 6) ** 3 - d * (d + 2) * (d + 4))
    assert grows(2 * (d + 4) - 2 * (d + 2))


def test_equations_17_to_19_follow_from_14_and_15():
    gap = (mu / 2 * L) ** 2 * (d + 3) ** 3
    assert same(2 * gap, mu**2 / 2 * L**2 * (d + 3) ** 3)
    a, b = sympy.symbols("a b", real=True)
    assert same(2 * (a - b) ** 2 + 2 * b**2 - a**2, (a - 2 * b) ** 2)
    assert same(2 * (mu**2 * L * d / 2), mu**2 * L * d)


def test_equation_24_as_printed_doubles_the_gradient():
    x, u = sympy.symbols("x u", real=True)
    moments = {0: 1, 1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 15}

    def mean(expression):
        return sum(c * moments[n] for (n,), c in sympy.Poly(sympy.expand(expression), u).terms())

    coefficients = sympy.symbols("c0:5")
    f = sum(c * x**n for n, c in enumerate(coefficients))
    smoothed = mean(f.subs(x, x + mu * u))
    printed = mean((f.subs(x, x + mu * u) - f.subs(x, x - mu * u)) / mu * u)
    assert same(printed, 2 * sympy.diff(smoothed, x))
    assert same(mean((f.subs(x, x + mu * u) - f) / mu * u), sympy.diff(smoothed, x))


# -- SparQ, theorem 1 ---------------------------------------------------------------------------------------------------

drift = mu**2 * L**2 * (d + 3) ** 3
distance_35 = Rational(3, 2) * drift + 3 * B
square_36 = mu**2 / 2 * L**2 * (d + 6) ** 3 + 2 * (d + 4) * (2 * B + s2)


def test_equation_35_adds_up_34():
    assert same(3 * drift / 4 + 3 * B + 3 * drift / 4, distance_35)


def test_equation_37_multiplies_out_36():
    G = sympy.symbols("G", positive=True)
    left = mu**2 / 2 * L**2 * (d + 6) ** 3 + 2 * (d + 4) * (2 * B + 2 * G + s2)
    assert same(left, square_36 + 4 * (d + 4) * G)


def left_39(split):
    return eta / 2 * (1 - 1 / (2 * split)) - 4 * (d + 4) * L * eta**2


def right_39(split):
    return (
        D
        + mu**2 * L * d
        + eta * split / 2 * T * distance_35
        + L * eta**2 * T * square_36
        + eta * (1 - 1 / (2 * split)) * T * drift / 4
    )


def test_equation_39_follows_from_38_with_18_and_19():
    S, kept = sympy.symbols("S kept", positive=True)
    # (38): η·kept·S_μ <= gap_μ + ... + 4(d + 4)Lη²S; S_μ >= S/2 - T·drift/4 and gap_μ <= D + μ²Ld.
    left = eta * kept * (S / 2 - T * drift / 4)
    right = (
        D + mu**2 * L * d + eta * eps / 2 * T * distance_35 + L * eta**2 * (T * square_36 + 4 * (d + 4) * S)
    )
    moved = sympy.expand((right - left) - (right_39(eps) - left_39(eps) * S)).subs(kept, 1 - 1 / (2 * eps))
    assert same(moved, 0)


CORRECT_40 = (
    4 * D
    + 4 * mu**2 * L * d
    + 3 * eta * T * drift
    + 6 * eta * T * B
    + L * eta**2 * T * (2 * mu**2 * L**2 * (d + 6) ** 3 + 8 * (d + 4) * (2 * B + s2))
    + eta * T * drift / 2
)
PRINTED_40 = CORRECT_40 - 3 * eta * T * drift + 3 * eta * drift - 6 * eta * T * B + 6 * T * B


def test_equation_40_does_not_follow_as_printed_and_does_with_its_factors():
    assert same(4 * right_39(1), CORRECT_40)
    assert not same(4 * right_39(1), PRINTED_40)
    assert same(4 * left_39(1), eta - 16 * (d + 4) * L * eta**2)


def test_equation_41_follows_from_the_corrected_40():
    assert same(4 * left_39(1).subs(eta, 1 / (32 * (d + 4) * L)), 1 / (64 * (d + 4) * L))
    wanted = (
        8 * D / (T * eta)
        + 8 * mu**2 * L * d / (T * eta)
        + 7 * drift
        + 12 * B
        + 4 * L * eta * (mu**2 * L**2 * (d + 6) ** 3 + 4 * (d + 4) * (2 * B + s2))
    )
    assert same(2 * CORRECT_40 / (eta * T), wanted)


@pytest.mark.parametrize(
    ("term", "order"),
    [
        (8 * D / (T * eta), sympy.sqrt(d / T)),
        (8 * mu**2 * L * d / (T * eta), T ** -Rational(3, 2) * d ** -Rational(1, 2)),
        (7 * drift, d / T),
        (12 * B, sympy.Integer(1)),
        (4 * L * eta * mu**2 * L**2 * (d + 6) ** 3, d ** Rational(1, 2) * T ** -Rational(3, 2)),
        (16 * L * eta * (d + 4) * s2, sympy.sqrt(d / T)),
    ],
    ids=str,
)
def test_equation_42_has_the_orders_of_its_terms(term, order):
    chosen = term.subs({eta: 1 / sympy.sqrt(T * d), mu: 1 / ((d + 6) * sympy.sqrt(T))})
    ratio = sympy.simplify(chosen / order)
    assert T not in ratio.free_symbols
    limit = sympy.limit(ratio, d, sympy.oo)
    assert limit.is_finite
    assert limit != 0


def test_theorem_2_has_half_of_what_theorem_1_gives_it():
    activation = sympy.symbols("a", positive=True)  # κ²L_S²Ψ
    assert same((12 * B).subs(B, 2 * M * activation), 24 * M * activation)
    assert same((3 * B).subs(B, 2 * M * activation), 6 * M * activation)  # (43) is right
    assert same((2 * B).subs(B, 2 * M * activation), 4 * M * activation)  # and so is the last term


def test_young_and_the_mean_give_29():
    a, b = sympy.symbols("a b", real=True)
    assert same(a**2 / (2 * eps) + eps * b**2 / 2 - a * b, (a - eps * b) ** 2 / (2 * eps))


# -- perturbations -----------------------------------------------------------------------------------------------------------


def wick(numbers):
    """E of a product of independent standard normals, given by name with repetitions."""
    result = sympy.Integer(1)
    for name in set(numbers):
        count = numbers.count(name)
        result *= 0 if count % 2 else sympy.factorial2(count - 1)
    return result


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_low_rank_perturbation_estimates_the_gradient(rank):
    for i, j, k, m in itertools.product(range(2), repeat=4):
        total = sum(
            wick([("u", i, a), ("v", j, a), ("u", k, b), ("v", m, b)])
            for a, b in itertools.product(range(rank), repeat=2)
        )
        assert total == (rank if (i, j) == (k, m) else 0)


def test_the_fourth_moment_of_an_entry():
    r = sympy.symbols("r", positive=True)
    assert same((9 * r + 3 * r * (r - 1)) / r**2, 3 + 6 / r)
    assert same((r * (r + 2)) / r**2, 1 + 2 / r)


def test_second_moments_in_a_ball_and_on_a_sphere():
    radius, t = sympy.symbols("R t", positive=True)
    ball = sympy.integrate(t ** (d + 1), (t, 0, radius)) / sympy.integrate(t ** (d - 1), (t, 0, radius))
    assert same(sympy.simplify(ball / d), radius**2 / (d + 2))


def test_signs_and_normals_need_uncorrelated_numbers_around_zero():
    m = sympy.symbols("m", real=True)
    assert same(1 + m**2 - (1 + m * m), 0)  # E u² = Var u + m²: the diagonal of I + mmᵀ


# -- QuZO ---------------------------------------------------------------------------------------------------------------------


def test_rounding_at_random_and_what_equation_5_leaves_in():
    u, s, z0, f, below = sympy.symbols("u s z0 f n", real=True)
    qvalue = below + f  # s·u
    mean = (1 - f) * (below + z0) + f * (below + 1 + z0)
    assert same(mean.subs(below, s * u - f), s * u + z0)
    variance = (1 - f) * below**2 + f * (below + 1) ** 2 - qvalue**2
    assert same(variance, f * (1 - f))
    assert same(((s * u + z0) - z0) / s, u)


def test_equation_12_needs_the_scale_squared():
    w, s, rate = sympy.symbols("w s rate", positive=True)
    loss = sympy.Function("loss")
    qvalue = sympy.symbols("c", positive=True)
    by_qvalue = sympy.diff(loss(s * qvalue), qvalue).doit().subs(qvalue, w / s)
    by_weight = sympy.diff(loss(w), w)
    assert sympy.simplify(by_qvalue - s * by_weight).doit() == 0
    step = s * (w / s - rate / s**2 * (s * by_weight))
    assert same(step, w - rate * by_weight)


def test_a_step_on_a_quadratic_and_the_best_rate():
    h = sympy.symbols("h", positive=True)
    factor = 1 - 2 * eta * h + eta**2 * h**2 * (d + 2)
    (best,) = sympy.solve(sympy.diff(factor, eta), eta)
    assert same(best, 1 / (h * (d + 2)))
    assert same(factor.subs(eta, best), (d + 1) / (d + 2))
    assert same(factor.subs(eta, 2 / (h * (d + 2))), 1)


def test_errors_of_perturbations_and_of_one_point():
    n, level, slope2 = sympy.symbols("n level slope2", positive=True)
    assert same(((d + 2) * slope2 - slope2) / n, (d + 1) * slope2 / n)
    # E[(L + εc·u)²‖u‖²]/ε² - |c|² = dL²/ε² + (d + 2)|c|² - |c|²
    assert same(
        (level**2 * d + eps**2 * (d + 2) * slope2) / eps**2 - slope2, d * level**2 / eps**2 + (d + 1) * slope2
    )


def test_rounding_at_random_has_twice_the_mean_squared_error():
    f = sympy.symbols("f", positive=True)
    random = sympy.integrate(f * (1 - f), (f, 0, 1))
    nearest = 2 * sympy.integrate(f**2, (f, 0, Rational(1, 2)))
    assert random == 2 * nearest


# -- transfers and adapters ---------------------------------------------------------------------------------------------------


def test_distzo2_equation_3_and_its_second_term():
    size, n, lane, link = sympy.symbols("M n B_P B_L", positive=True)
    time = size / (n * lane) + (n - 1) * size / (n * link)
    assert same(time.subs(link, lane), size / lane)
    assert same(((n - 1) * size / (n * link)) / (size / (n * lane)), (n - 1) * lane / link)


def test_increments_side_by_side_are_their_sum():
    base = sympy.MatrixSymbol("W", 3, 4).as_explicit()
    lefts = [sympy.MatrixSymbol(f"A{i}", 3, 2).as_explicit() for i in range(3)]
    rights = [sympy.MatrixSymbol(f"B{i}", 4, 2).as_explicit() for i in range(3)]
    summed = base + sum((a * b.T for a, b in zip(lefts, rights, strict=True)), sympy.zeros(3, 4))
    for order in itertools.permutations(range(3)):
        left = sympy.Matrix.hstack(*(lefts[i] for i in order))
        right = sympy.Matrix.hstack(*(rights[i] for i in order))
        assert (base + left * right.T - summed).applyfunc(sympy.expand) == sympy.zeros(3, 4)


def test_a_rounded_boundary_interpolates():
    a, f, s = sympy.symbols("a f s", positive=True)
    low, high = a - f * s, a + (1 - f) * s
    assert same(((1 - f) * low**2 + f * high**2) / 2, a**2 / 2 + f * (1 - f) * s**2 / 2)
    assert same((1 - f) * low + f * high, a)
