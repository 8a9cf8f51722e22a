from __future__ import annotations

import pytest
import torch

from executors.steps.arithmetic import ParamPass, gathered, projected_gradient

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[first.element_size()]
    return torch.equal(first.view(width), second.view(width))


def _awkward(dtype: torch.dtype, seed: int, *, limit: float = 1.0) -> torch.Tensor:
    """Numbers of every magnitude, subnormal and zero ones of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-14, 14) if dtype == torch.float16 else (-100, 100)
    random = torch.randn(4001, generator=generator, dtype=torch.float64)
    scaled = random * 2.0 ** torch.randint(low, high, (4001,), generator=generator)
    info = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        info.tiny,
        -info.tiny,
        info.smallest_normal / 2,
        info.smallest_normal * 3 / 4,
        1.0,
        -1.0,
    ]
    special += [info.max * limit, -info.max * limit]
    values = torch.cat([scaled, random * 1e-3, torch.tensor(special, dtype=torch.float64)])
    return values.to(dtype).nan_to_num(nan=0.0, posinf=info.max * limit, neginf=-info.max * limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, -2, -1, 2])
@pytest.mark.parametrize("epsilon", [1e-3, 3.7e-5, 1e-30])
def test_perturbation_has_the_bits_of_the_literal_expression(dtype, scale, epsilon):
    theta = _awkward(dtype, 0)
    z = _awkward(dtype, 1, limit=0.5)  # beyond, doubling overflows; a perturbation never comes near
    z = z[torch.randperm(z.numel(), generator=torch.Generator().manual_seed(2))]
    literal = theta + (scale * z) * epsilon
    for piece in (64, 1000, 1 << 16):
        shipped = theta.clone()
        ParamPass(piece).perturb(shipped, z, scale, epsilon)
        assert _same_bits(shipped, literal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1, -2, -1, 2])
@pytest.mark.parametrize("epsilon", [1e-3, 3.7e-5])
def test_a_perturbation_scaled_once_perturbs_with_the_same_bits(dtype, scale, epsilon):
    theta = _awkward(dtype, 0, limit=0.5)
    z = torch.randn(theta.numel(), generator=torch.Generator().manual_seed(1)).to(dtype)
    shipped = theta.clone()
    ParamPass().perturb_scaled(shipped, z * epsilon, scale)
    assert _same_bits(shipped, theta + (scale * z) * epsilon)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, -2, -1, 2])
@pytest.mark.parametrize("epsilon", [1e-3, 3.7e-5])
def test_signs_perturb_and_update_with_the_bits_of_the_literal_expressions(dtype, scale, epsilon):
    theta = _awkward(dtype, 0, limit=0.5)
    bits = torch.randint(2, (theta.numel(),), generator=torch.Generator().manual_seed(1))
    z = (2 * bits - 1).to(dtype)
    shipped = theta.clone()
    ParamPass().perturb_signs(shipped, z, scale, epsilon)
    assert _same_bits(shipped, theta + (scale * z) * epsilon)
    for gradient in (0.37, -1234.5, 0.0):
        shipped = theta.clone()
        ParamPass().update_signs(shipped, z, gradient=gradient, learning_rate=1e-4)
        assert _same_bits(shipped, theta - 1e-4 * (gradient * z))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.01])
@pytest.mark.parametrize("gradient", [0.37, -1234.5, 0.0])
def test_update_has_the_bits_of_the_literal_expression(dtype, weight_decay, gradient):
    theta, z = _awkward(dtype, 3), _awkward(dtype, 4)
    if weight_decay is None:
        literal = theta - 1e-4 * (gradient * z)
    else:
        literal = theta - 1e-4 * (gradient * z + weight_decay * theta)
    shipped = theta.clone()
    ParamPass(1000).update(shipped, z, gradient=gradient, learning_rate=1e-4, weight_decay=weight_decay)
    finite = torch.isfinite(literal)
    assert torch.equal(finite, torch.isfinite(shipped))
    assert _same_bits(shipped[finite], literal[finite])


def test_fused_addition_would_round_differently():
    z = torch.randn(100_000, generator=torch.Generator().manual_seed(5))
    theta = torch.randn(100_000, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert not torch.equal(theta.add(z.bfloat16(), alpha=1e-3), theta + z.bfloat16() * 1e-3)


def test_gathered_rows_follow_the_same_path_as_the_table():
    theta = torch.randn(50, 8, generator=torch.Generator().manual_seed(7))
    z = torch.randn(50, 8, generator=torch.Generator().manual_seed(8))
    table, param_pass = theta.clone(), ParamPass()
    for scale in (1, -2):
        param_pass.perturb(table.view(-1), z.view(-1), scale, 1e-3)
    rows = torch.tensor([3, 4, 40])
    assert torch.equal(gathered(theta[rows], z[rows], (1, -2), 1e-3), table[rows])


def test_projected_gradient_is_computed_in_the_format_of_the_losses():
    plus, minus = torch.tensor(2.3456789), torch.tensor(2.3451234)
    assert projected_gradient(plus, minus, 1e-3, central=True) == (plus - minus) / (2 * 1e-3)
    assert projected_gradient(plus, minus, 1e-3, central=False) == (plus - minus) / 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_qvalues_are_multiplied_as_one_pass_over_both_formats_does(dtype):
    """Every code of a byte, by factors of all sizes: as numbers of the parameters first, and at once."""
    z = torch.arange(-128, 128).to(torch.int8).repeat(3)
    theta = torch.randn(z.numel(), generator=torch.Generator().manual_seed(0)).to(dtype)
    factors = (10.0 ** torch.linspace(-12, 4, 60, dtype=torch.float64)).tolist()
    for factor in (*factors, -3.3e-6, 0.0, 1e-45):
        product = torch.mul(z, factor, out=torch.empty_like(theta))
        shipped = theta.clone()
        ParamPass(100).perturb(shipped, z, 1, factor)
        assert _same_bits(shipped, theta + product)
        ParamPass(100).update(shipped, z, gradient=factor, learning_rate=1e-3, weight_decay=None)
        assert _same_bits(shipped, theta + product - product * 1e-3)
