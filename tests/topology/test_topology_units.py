"""Quantities: read, refused with the right hint, and written so that they read back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.units import (
    QuantityError,
    format_bandwidth,
    format_bytes,
    format_flops,
    format_seconds,
    parse_bytes,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("20GiB", "bytes", 20 * 2**30),
        ("31.5 GB/s", "bandwidth", 31.5e9),
        ("200 Gbit/s", "bandwidth", 25e9),
        ("2 us", "time", 2e-6),
        ("2 µs", "time", 2e-6),
        ("312 Tflop/s", "compute", 312e12),
        ("1248 TOPS", "compute", 1248e12),
        ("300 W", "power", 300),
        ("3200 MT/s", "transfer_rate", 3.2e9),
        ("2.45 GHz", "frequency", 2.45e9),
        ("80 %", "ratio", 0.8),
        ("0.8", "ratio", 0.8),
        ("1_000 B", "bytes", 1000),
    ],
)
def test_quantities_are_read_in_si_units(text, dimension, value):
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension", "hint"),
    [
        ("80 KB", "bytes", "kB or KiB"),
        ("200 Gb/s", "bandwidth", "Gbit/s"),
        ("31.5 GB", "bandwidth", "per second: GB/s"),
        ("31.5", "bandwidth", "31.5 GB/s"),
        ("fast", "bandwidth", "a number and a unit"),
        ("2 minutes", "time", "2 us"),
    ],
)
def test_refused_quantities_show_the_value_and_the_fix(text, dimension, hint):
    with pytest.raises(QuantityError) as caught:
        parse_quantity(text, dimension)
    assert hint in caught.value.hint
    assert text.split()[-1] in caught.value.message or "without a unit" in caught.value.message


@pytest.mark.parametrize("text", ["-1 GiB", "1e400 B"])
def test_a_size_is_neither_negative_nor_infinite(text):
    with pytest.raises(QuantityError, match="not a size"):
        parse_bytes(text)


@given(st.floats(min_value=1e-3, max_value=1e17))
def test_written_quantities_read_back_within_their_digits(value):
    # Three significant digits are off by at most half a unit of the third.
    assert parse_quantity(format_bandwidth(value), "bandwidth") == pytest.approx(value, rel=5e-3)
    assert parse_quantity(format_flops(value), "compute") == pytest.approx(value, rel=5e-4)


@given(st.integers(min_value=1, max_value=2**55))
def test_written_sizes_read_back(size_bytes):
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=5e-4, abs=1)


@given(st.floats(min_value=1e-8, max_value=1e6))
def test_written_durations_read_back(duration_s):
    assert parse_quantity(format_seconds(duration_s), "time") == pytest.approx(duration_s, rel=5e-3)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
        (format_bandwidth(math.inf), "unlimited B/s"),
        (format_seconds(90), "90 s"),
        (format_seconds(7200), "2 h"),
        (format_seconds(0.99999), "1 s"),
        (format_flops(19.5e12), "19.5 Tflop/s"),
    ],
)
def test_how_quantities_look(written, text):
    assert written == text
