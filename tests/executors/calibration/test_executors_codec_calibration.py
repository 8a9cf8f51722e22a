"""Codecs' constants in a profile: measured, used by the cost model, and saved."""

from __future__ import annotations

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.formats.codec_time import (
    MEASURED,
    codec_profile_of,
    codec_terms,
    decode_work,
    encode_work,
    load_codec_profile,
)
from costmodel.formats.codecs import CodecSpec
from costmodel.formats.symbols import statistics_of_density
from costmodel.rates.profile import load_profile
from executors.calibration import codec_calibration
from executors.calibration.codec_calibration import codec_constants, with_codec_constants
from topology import load_preset

SHAPE = (4, 64, 512)
SPECS = [
    CodecSpec(4, encoding=encoding) for encoding in ("dense", "entropy", "bitmap", "run-length", "index")
]


@pytest.fixture
def sheet():
    topology = load_preset("cpu-laptop")
    return datasheet_profile(topology, topology.compute_devices[0].id)


def test_every_constant_is_measured_and_kept(monkeypatch, tmp_path, sheet):
    monkeypatch.setattr(codec_calibration, "NUM_ROWS", 16)
    profile = with_codec_constants(sheet, budget_s=1e-3)
    names = {constant.name for constant in profile.constants if constant.quantity == "codec_s"}
    assert names == {MEASURED + name for name in load_codec_profile().seconds}
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_what_was_measured_is_what_codecs_cost(sheet):
    """A machine on which everything takes three times what the shipped constants say."""
    stats = statistics_of_density(SHAPE, bits=4, density=0.2)
    shipped = load_codec_profile()
    works = [of(spec, SHAPE, 4, stats) for spec in (CodecSpec(), *SPECS) for of in (encode_work, decode_work)]
    constants = codec_constants([(work, 3 * shipped.duration_s(work)) for work in works])
    measured = sheet.with_constants(*constants, origin="calibrated")
    for work in works:
        before, after = (codec_terms(work, profile.values(), "cpu")["codec"] for profile in (sheet, measured))
        assert after == pytest.approx(3 * before, rel=1e-3)
        ends = [codec_terms(work, measured.values(bound), "cpu")["codec"] for bound in ("low", "high")]
        assert ends[0] < after < ends[1]
    # What was not measured comes with the package.
    assert codec_profile_of({}) == shipped
