from __future__ import annotations

import json
from typing import get_args

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.formats.distributions import SamplingClass
from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile, load_profile
from topology import load_preset, preset_names
from topology.errors import ProfileError, TopologyError

PROFILE = datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=2)


@pytest.mark.parametrize("name", preset_names())
def test_every_processor_of_every_preset_has_a_profile(name):
    topology = load_preset(name)
    for node in topology.nodes:
        if node.type in {"gpu", "cpu"}:
            profile = datasheet_profile(topology, node.id)
            # Codecs are measured, or cost what comes with the package; so are ranks and the pace, or there is no slowing.
            absent = {
                "codec_s",
                "ranks_slowdown",
                "busy_latency_s",
                "busy_core_s",
                "reference_s",
                "slowdown",
                "slowdown_fraction",
            }
            # A GPU's generators count: they are seeded, shared and moved ahead in no time; its passes over quantized values take as bytes do.
            absent |= (
                {"jump_s", "split_s", "seed_s", "quant_rate"}
                if node.type == "gpu"
                else {"multiprocessors", "pin_bandwidth"}
            )
            # Not every device's power limits its products.
            absent |= {"burst"}
            kinds = {constant.quantity for constant in profile.constants}
            assert kinds - {"burst"} == set(CONSTANT_UNITS) - absent
            assert node.type == "gpu" or "burst" not in kinds
            assert all(constant.source for constant in profile.constants)


@pytest.mark.parametrize("sampling_class", get_args(SamplingClass))
@pytest.mark.parametrize(("hardware", "device"), [("cpu-laptop", "cpu0"), ("rtx3090-1x", "gpu0")])
def test_every_class_of_draws_has_a_rate_before_it_is_measured(sampling_class, hardware, device):
    values = datasheet_profile(load_preset(hardware), device).values()
    assert values[f"sampling_rate.{sampling_class}.float32"] > 0
    assert f"skip_fraction.{sampling_class}.float32" in values or "skip_fraction" in values


def test_threads_scale_compute_and_saturate_memory():
    one, four, eight = (
        datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=count).values()
        for count in (1, 4, 8)
    )
    assert four["matmul_rate.float32"] == pytest.approx(4 * one["matmul_rate.float32"])
    assert eight["memory_bandwidth"] < 8 * one["memory_bandwidth"]
    assert eight["sampling_rate.normal.float32"] == one["sampling_rate.normal.float32"]
    with pytest.raises(ValueError, match="num_threads=9 must lie between 1 and the 8 cores"):
        datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=9)
    with pytest.raises(TopologyError, match="not a processor"):
        datasheet_profile(load_preset("cpu-laptop"), "dram0")


def test_a_gpu_copies_over_its_route_and_computes_at_its_dense_peak():
    topology = load_preset("a100-80gb-milan")
    profile = datasheet_profile(topology, "gpu0")
    route = topology.route(topology.host_memory("gpu0").id, "gpu0")
    # What links reach of their nominal bandwidths is in the route already.
    assert profile.constant("copy_h2d_bandwidth").value == route.bandwidth_bytes_per_s
    assert profile.constant("matmul_rate.bfloat16").high < topology.device_spec("gpu0").peak_flop_per_s(
        "bf16"
    )
    assert profile.num_cores == 64


def test_formats_without_a_declared_peak_are_guessed_widely():
    constant = PROFILE.constant("matmul_rate.float16")
    assert "assumed" in constant.source
    assert constant.high / constant.low > 10


def test_ends_of_intervals_follow_what_makes_things_fast():
    rate = PROFILE.constant("matmul_rate.float32")
    latency = PROFILE.constant("dispatch_s")
    assert (rate.at("low"), rate.at("high")) == (rate.high, rate.low)
    assert (latency.at("low"), latency.at("high")) == (latency.low, latency.high)
    assert latency.low < latency.at("low", 0.5) < latency.value < latency.at("high", 0.5) < latency.high
    assert latency.at("high", 2.0) > latency.high
    decay = PROFILE.constant("allocator_slack")
    assert decay.at("high", 0.1) == decay.high


def test_a_profile_reads_back_as_written(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert load_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "is not a profile"),
        (lambda text: text.replace('"num_threads": 2', '"num_threads": 3'), "damaged or was edited"),
        (lambda text: text.replace('"version": 3', '"version": 1'), "has version 1"),
        (lambda text: json.dumps({"hello": 1}), "not a profile"),
        (lambda text: "[]", "not a profile"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ProfileError, match=message):
        load_profile(path)


def test_a_consistent_file_of_nonsense_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.model_copy(update={"constants": PROFILE.constants[1:3]}).save(path)
    with pytest.raises(ProfileError, match="constants missing"):
        load_profile(path)
    with pytest.raises(ProfileError, match="no profile at"):
        load_profile(tmp_path / "missing.json")
    with pytest.raises(ProfileError, match="cannot write the profile"):
        PROFILE.save(tmp_path / "no" / "profile.json")


def test_a_profile_of_another_device_is_refused():
    PROFILE.check_device(device_name=PROFILE.device_name, device_type="cpu")
    with pytest.raises(ProfileError, match=r"is for cpu .* not for gpu 'NVIDIA H200'"):
        PROFILE.check_device(device_name="NVIDIA H200", device_type="gpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": 3.0}, "is outside its interval"),
        ({"unit": "s"}, "expected 'byte/s'"),
        ({"low": 0.0}, "must be above 0, but is 0 byte/s"),
        ({"name": "warp_speed"}, "expected None"),
    ],
)
def test_constants_that_cannot_be_are_refused(fields, message):
    good = {
        "name": "memory_bandwidth",
        "value": 2.0,
        "low": 1.0,
        "high": 4.0,
        "unit": "byte/s",
        "source": "a test",
    }
    with pytest.raises(ValueError, match=message):
        Constant(**{**good, **fields})


def test_replacing_constants_forgets_what_was_cached():
    assert PROFILE.values()["dispatch_s"] > 0
    faster = PROFILE.constant("dispatch_s").model_copy(update={"value": 2e-6, "low": 1e-6})
    changed = PROFILE.with_constants(faster, origin="calibrated")
    assert changed.values()["dispatch_s"] == 2e-6
    assert isinstance(changed, Profile)
    with pytest.raises(ProfileError, match="no constant 'warp_speed'"):
        changed.constant("warp_speed")
