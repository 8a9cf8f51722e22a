from __future__ import annotations

import torch

from costmodel.formats.codec_time import fit_codec_profile, load_codec_profile
from costmodel.formats.codecs import codec_spec
from executors.calibration import codec_probes
from executors.calibration.codec_probes import measure_codecs, stage_probes, whole_probes


def test_probes_determine_every_constant(monkeypatch):
    monkeypatch.setattr(codec_probes, "NUM_ROWS", 32)
    threads = torch.get_num_threads()
    measured = measure_codecs(budget_s=1e-3)
    assert torch.get_num_threads() == threads
    assert all(seconds > 0 for _, seconds in measured)
    profile = fit_codec_profile(measured, "a test")
    assert set(profile.seconds) == set(load_codec_profile().seconds)


def test_a_whole_codec_counts_constants_that_stages_have(monkeypatch):
    monkeypatch.setattr(codec_probes, "NUM_ROWS", 32)
    known = {name for probe in stage_probes() for name in probe.work}
    for name in ("none", "q4", "q4:stochastic:dense", "q8:token", "q2:run-length", "q2:bitmap", "q2:index"):
        for probe in whole_probes(codec_spec(name), 0.1):
            probe.run()
            assert set(probe.work) <= known
