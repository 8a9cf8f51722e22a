from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.formats.codec_time import (
    BoundaryLink,
    CodecProfile,
    boundary_transfer,
    decode_work,
    encode_work,
    fastest_transfer,
    fit_codec_profile,
    load_codec_profile,
)
from costmodel.formats.codecs import (
    ENCODINGS,
    CodecSpec,
    codec_spec,
    expected_entropy_bytes,
    frequencies,
    message_bytes,
    most_bytes,
    num_groups,
    overhead_bytes,
    payload_bytes,
)
from costmodel.formats.symbols import (
    SymbolStatistics,
    TensorSymbols,
    activation_statistics,
    statistics_of_density,
)
from topology.errors import PlanError, ProfileError

SHAPE = (4, 512, 1024)
SPARSE = statistics_of_density(SHAPE, bits=4, density=0.05)


@pytest.mark.parametrize(
    "name", ["none", "q4", "q1:stochastic", "q8:channel:affine:dense", "q3:affine-zero:token"]
)
def test_a_name_says_the_codec(name):
    spec = codec_spec(name)
    assert codec_spec(spec.name) == spec


@pytest.mark.parametrize("name", ["", "4", "q", "q4:banana", "q4:token:channel", "none:token", "q9", "q0"])
def test_names_of_no_codec_are_refused(name):
    with pytest.raises(PlanError):
        codec_spec(name)


def test_sizes_by_hand():
    # 2 rows of 8 columns, 2 bits, 3 kept.
    stats = SymbolStatistics(16, 8, 2, 3, (13, 1, 1, 1))
    assert payload_bytes("dense", stats) == 4
    assert payload_bytes("bitmap", stats) == 2 + 1
    assert payload_bytes("index", stats) == 1 + math.ceil(3 * 3 / 8) + math.ceil(2 * 4 / 8)
    assert overhead_bytes(codec_spec("q2"), (2, 8), 2) == 40 + 16 + 4
    assert overhead_bytes(codec_spec("q2:affine-zero:token"), (2, 8), 4) == 56 + 2 * 5
    assert overhead_bytes(codec_spec("q2:affine:channel"), (2, 8), 8) == 56 + 8 * 16
    assert message_bytes(CodecSpec(), (2, 8), 2) == 56 + 32


def test_groups():
    assert [num_groups((3, 4, 5), scope) for scope in ("tensor", "token", "channel")] == [1, 12, 5]
    assert num_groups((), "token") == 1
    assert num_groups((0, 5), "channel") == 0


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=256))
def test_frequencies_fill_the_table_and_starve_no_symbol(counts):
    found = frequencies(counts)
    present = [count > 0 for count in counts]
    assert [unit > 0 for unit in found] == present
    if any(present):
        assert sum(found) == 2**16
        whole, total = 2**16 - sum(present), sum(counts)
        assert all(unit * total >= count * whole for unit, count in zip(found, counts, strict=True) if count)


@given(st.integers(1, 8), st.floats(0, 1), st.integers(0, 10**6))
def test_the_entropy_coder_is_near_the_entropy_and_within_its_bound(bits, density, num):
    stats = statistics_of_density((num,), bits=bits, density=density)
    size = expected_entropy_bytes(stats)
    table = max(1, 2**bits / 8) + 2 ** (bits + 1)
    assert size <= stats.entropy_bits * num / 8 + 0.0057 * num / 8 + table + 4
    assert size + 8 + overhead_bytes(CodecSpec(bits), (num,), 4) <= most_bytes(
        CodecSpec(bits, encoding="entropy"), (num,), 4
    )


def test_without_a_histogram_the_worst_is_assumed():
    flat = statistics_of_density(SHAPE, bits=4, density=0.05)
    kept = flat.num_kept
    peaked = SymbolStatistics(
        flat.num_elements, 1024, 4, kept, (flat.num_elements - kept, kept - 14, *(1 for _ in range(14)))
    )
    assert expected_entropy_bytes(peaked) < expected_entropy_bytes(flat)


def test_a_density_that_cannot_be_is_refused():
    with pytest.raises(PlanError, match=r"density=1\.5"):
        statistics_of_density((3,), bits=2, density=1.5)


def test_a_fast_link_gets_dense_symbols_and_a_slow_one_encoded_ones():
    profile = load_codec_profile()
    spec = codec_spec("q4")
    by_link = {
        bandwidth: fastest_transfer(spec, SHAPE, 4, SPARSE, BoundaryLink(bandwidth, profile))
        for bandwidth in (1e5, 1e8, 50e9)
    }
    assert by_link[50e9].spec.encoding == "dense"
    assert by_link[1e5].spec.encoding == "entropy"
    sizes = [by_link[bandwidth].size_bytes for bandwidth in sorted(by_link)]
    assert sizes == sorted(sizes)


def test_plain_numbers_are_fastest_on_a_very_fast_link():
    profile = load_codec_profile()

    def seconds(name, bandwidth):
        spec = codec_spec(name)
        found = boundary_transfer(spec, SHAPE, 2, SPARSE, BoundaryLink(bandwidth, profile))
        return found.seconds

    assert seconds("none", 50e9) < seconds("q4:dense", 50e9)
    assert seconds("none", 1e8) > seconds("q4:dense", 1e8)


@pytest.mark.parametrize("encoding", [*ENCODINGS, "smallest"])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.3, 1.0])
def test_every_codec_has_a_time(encoding, density):
    profile = load_codec_profile()
    for bits in (1, 4, 8):
        stats = statistics_of_density(SHAPE, bits=bits, density=density)
        spec = CodecSpec(bits, rounding="stochastic", encoding=encoding)
        assert profile.duration_s(encode_work(spec, SHAPE, 4, stats)) > 0
        assert profile.duration_s(decode_work(spec, SHAPE, 4, stats)) > 0


def test_choosing_takes_at_least_as_long_as_what_is_chosen():
    profile = load_codec_profile()
    chosen = min(ENCODINGS, key=lambda encoding: payload_bytes(encoding, SPARSE))
    times = [
        profile.duration_s(encode_work(CodecSpec(4, encoding=encoding), SHAPE, 4, SPARSE))
        for encoding in ("smallest", chosen)
    ]
    assert times[0] >= times[1]


def test_constants_are_found_again_from_their_times():
    true = CodecProfile("made up", {"byte_s": 2e-10, "decode_call_s": 3e-5, "dequantize_s": 1e-9})
    works = [{"byte_s": 10**6, "decode_call_s": 1}, {"decode_call_s": 1}, {"dequantize_s": 10**6}]
    found = fit_codec_profile([(work, true.duration_s(work)) for work in works], "fitted")
    assert found.seconds == pytest.approx(true.seconds, rel=1e-9)  # three equations, three unknowns


def test_a_profile_that_lacks_a_constant_says_which():
    with pytest.raises(ProfileError, match="dequantize_s"):
        CodecProfile("empty", {}).duration_s({"dequantize_s": 1})
    with pytest.raises(ProfileError, match="0 or more"):
        CodecProfile("wrong", {"byte_s": math.nan})


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("is_relu", [True, False])
def test_symbols_of_normal_activations_are_as_expected(bits, is_relu):
    """Counted in two million normals, rounded as the symmetric grid does."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((2000, 1000))
    values = np.maximum(values, 0) if is_relu else values
    symbols = np.rint(values * (2 ** (bits - 1) - 1) / np.abs(values).max())
    _, counts = np.unique(symbols, return_counts=True)
    entropy = float(-(counts / counts.sum() * np.log2(counts / counts.sum())).sum())
    density = float((symbols != 0).mean())
    found = activation_statistics(values.shape, bits=bits, known=TensorSymbols(density=density))
    assert found.density == pytest.approx(density, abs=1e-6)
    assert found.entropy_bits == pytest.approx(entropy, rel=0.05, abs=0.01)
    even = statistics_of_density(values.shape, bits=bits, density=density)
    assert found.entropy_bits <= even.entropy_bits * (1 + 1e-9)
    if not is_relu:
        alone = activation_statistics(values.shape, bits=bits)
        assert alone.entropy_bits == pytest.approx(entropy, rel=0.05, abs=0.02)


def test_statistics_count_every_element():
    for shape, bits, density in [
        ((3,), 4, 0.5),
        ((7, 9), 2, 1.0),
        ((5, 5), 8, 0.0),
        ((1,), 1, 1.0),
        ((64, 64), 3, 0.7),
    ]:
        found = activation_statistics(shape, bits=bits, known=TensorSymbols(density=density))
        assert sum(found.counts) == pytest.approx(math.prod(shape))
