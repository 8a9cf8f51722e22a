"""What a codec costs as part of an instruction's work."""

import pytest

from costmodel.estimate import estimate
from costmodel.formats.codec_time import (
    BoundaryLink,
    boundary_transfer,
    decode_work,
    encode_work,
    load_codec_profile,
)
from costmodel.formats.codecs import codec_spec
from costmodel.formats.symbols import statistics_of_density
from costmodel.work import Work
from tests.support.builders import make_profile

SHAPE = (4, 64, 512)


def works(codec, density=0.1):
    spec = codec_spec(codec)
    stats = statistics_of_density(SHAPE, bits=spec.bits or 1, density=density)
    return [
        Work(codec_work=tuple(sorted(of(spec, SHAPE, 4, stats).items()))) for of in (encode_work, decode_work)
    ], boundary_transfer(spec, SHAPE, 4, stats, BoundaryLink(1e9, load_codec_profile()))


@pytest.mark.parametrize("codec", ["none", "q4", "q8:dense", "q2:index"])
def test_on_a_cpu_it_takes_what_the_measured_constants_say(codec):
    (encode, decode), way = works(codec)
    profile = make_profile("cpu", num_threads=8, num_cores=8)
    assert estimate(encode, profile).seconds == pytest.approx(way.encode_s)
    assert estimate(decode, profile).seconds == pytest.approx(way.decode_s)
    # One thread does it, whatever the others do.
    assert estimate(encode, profile).cores == pytest.approx(1.0)


def test_on_a_gpu_the_device_makes_symbols_that_cross_to_the_host():
    (encode, _), way = works("q4:dense")
    num = 4 * 64 * 512
    cost = estimate(encode, make_profile("gpu"))
    assert cost.terms["quantizing"] == pytest.approx(5 * num / 1e9)
    assert cost.terms["copying"] == pytest.approx(num / 1e9)
    on_host_s = way.encode_s - num * load_codec_profile().seconds["quantize_s.nearest"]
    assert cost.terms["codec"] == pytest.approx(on_host_s)


def test_plain_numbers_of_a_gpu_never_see_the_host():
    (encode, decode), way = works("none")
    profile = make_profile("gpu")
    assert estimate(encode, profile).terms["packing"] == pytest.approx(2 * way.size_bytes / 1e9)
    assert "codec" not in estimate(encode, profile).terms
    assert estimate(decode, profile).seconds == pytest.approx(0.0, abs=1e-5)


def test_works_add_up():
    (encode, _), way = works("q4")
    (plain, _), other = works("none")
    both = estimate(encode + plain, make_profile("cpu"))
    assert both.seconds == pytest.approx(way.encode_s + other.encode_s)
