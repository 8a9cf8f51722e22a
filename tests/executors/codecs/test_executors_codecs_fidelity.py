from __future__ import annotations

import pytest
import torch

from costmodel.formats.codecs import CodecSpec, codec_spec
from executors.codecs.fidelity import received, relative_error, visibility
from topology.errors import CodecError


def activations(epsilon, seed=0):
    """An activation after a ReLU at the two ends of a perturbation."""
    generator = torch.Generator().manual_seed(seed)
    before, slope = (torch.randn((64, 128), generator=generator, dtype=torch.float64) for _ in range(2))
    return tuple((before + sign * epsilon * slope).clamp(min=0) for sign in (1, -1))


def test_plain_numbers_lose_nothing_and_fewer_bits_lose_more():
    plus, _ = activations(1e-3)
    assert relative_error(plus, CodecSpec()) == 0
    assert received(plus, CodecSpec()) is plus
    errors = [relative_error(plus, CodecSpec(bits, "affine-zero")) for bits in (8, 4, 2, 1)]
    assert errors == sorted(errors)
    assert errors[-1] < 1
    assert relative_error(torch.zeros(3), CodecSpec(4)) == 0


@pytest.mark.parametrize(
    ("name", "shared", "exponent"),
    [("q4", True, 0.5), ("q4:stochastic", True, 0.5), ("q4:stochastic", False, 1.0)],
)
def test_noise_falls_as_the_law_says(name, shared, exponent):
    ratios = {
        epsilon: visibility(*activations(epsilon), codec_spec(name), epsilon=epsilon, shared_noise=shared)
        for epsilon in (1e-4, 1e-2)
    }
    near, far = ratios[1e-4], ratios[1e-2]
    assert near.exponent == exponent
    # Two decades of ε; the ratio rests on some hundred changed symbols at 1e-4, a few percent.
    assert near.noise_to_signal / far.noise_to_signal == pytest.approx(100**exponent, rel=0.2)
    assert near.smallest_epsilon == pytest.approx(far.smallest_epsilon, rel=0.4)
    assert near.changed < far.changed or not shared


def test_a_user_is_warned_where_the_noise_wins_and_not_elsewhere():
    spec = codec_spec("q4")
    seen = visibility(*activations(1e-4), spec, epsilon=1e-4)
    assert seen.warning is not None
    assert "ε=0.0001" in seen.warning
    wide = 2 * seen.smallest_epsilon
    assert visibility(*activations(wide), spec, epsilon=wide).warning is None


def test_equal_activations_are_refused():
    plus, _ = activations(1e-3)
    with pytest.raises(CodecError, match="are identical"):
        visibility(plus, plus, codec_spec("q4"), epsilon=1e-12)
