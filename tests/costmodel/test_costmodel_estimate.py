from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import Attention, Matmul, Work, read_model_spec
from costmodel.devices.datasheet import datasheet_profile, in_bursts
from costmodel.estimate import device_s, estimate
from costmodel.models.forward import forward_work
from costmodel.param_passes import cast_work, copy_work, perturb_work, sampling_work
from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from topology import load_preset, preset_names
from topology.building import find_device
from topology.errors import ProfileError
from topology.hardware import assumed_machine

_FORMATS = {"matmul_rate": ".float32", "attention_rate": ".float32", "sampling_rate": ".normal.float32"}


def profile_of(kind: str = "cpu", num_threads: int = 2, **values: float) -> Profile:
    """A profile with rates of 1e9 and no overheads, apart from `values`."""
    constants = []
    for name, unit in CONSTANT_UNITS.items():
        value = values.get(name, 1e9 if unit.endswith("/s") else 0.0)
        full = name + _FORMATS.get(name, "")
        constants.append(
            Constant(name=full, value=value, low=value / 2, high=value * 2, unit=unit, source="a test")
        )
    return Profile(
        device_name="test",
        device_type=kind,
        num_threads=num_threads,
        num_cores=4,
        origin="datasheet",
        constants=tuple(constants),
    )


def test_a_product_takes_the_longer_of_multiplying_and_reading():
    product = Matmul(m=10, n=20, k=30)
    work = Work(matmuls=(product,))
    assert estimate(work, profile_of(memory_overlap=1)).seconds == pytest.approx(2 * 10 * 20 * 30 / 1e9)
    slow_memory = profile_of(memory_bandwidth=1e8, memory_overlap=1)
    assert estimate(work, slow_memory).seconds == pytest.approx((300 + 600 + 200) * 4 / 1e8)


def test_a_product_without_overlap_takes_both():
    work = Work(matmuls=(Matmul(m=10, n=20, k=30),))
    multiplying_s, moving_s = 2 * 10 * 20 * 30 / 1e9, (300 + 600 + 200) * 4 / 1e9
    assert estimate(work, profile_of()).seconds == pytest.approx(multiplying_s + moving_s)
    half = estimate(work, profile_of(memory_overlap=0.5)).seconds
    assert half == pytest.approx(multiplying_s + moving_s / 2)


def test_small_dimensions_reach_a_part_of_the_rate():
    work = Work(matmuls=(Matmul(m=8, n=8, k=8),))
    full = estimate(work, profile_of(memory_bandwidth=1e18)).seconds
    assert estimate(work, profile_of(memory_bandwidth=1e18, matmul_half_dim=8)).seconds == pytest.approx(
        8 * full
    )


def test_stored_scores_are_two_products_and_fused_ones_a_rate_of_their_own():
    fused = Attention(num=2, query=16, key=16, head_dim=4)
    stored = fused.model_copy(update={"materialised": True})
    profile = profile_of(attention_rate=2e9, memory_bandwidth=1e18, attention_score_rate=1e18)
    assert estimate(Work(attention=(fused,)), profile).seconds == pytest.approx(fused.flops / 2e9)
    assert estimate(Work(attention=(stored,)), profile).seconds == pytest.approx(stored.flops / 1e9)
    long_half = profile_of(attention_rate=2e9, attention_half_len=16, attention_score_rate=1e18)
    assert estimate(Work(attention=(fused,)), long_half).seconds == pytest.approx(fused.flops / 1e9)


def test_fused_attention_normalises_every_score_that_it_does_not_skip():
    profile = profile_of(attention_rate=1e18, attention_score_rate=1e6)
    fused = Attention(num=2, query=16, key=16, head_dim=4)
    assert estimate(Work(attention=(fused,)), profile).seconds == pytest.approx(512 / 1e6)
    causal = fused.model_copy(update={"causal_skip": True})
    assert estimate(Work(attention=(causal,)), profile).seconds == pytest.approx(256 / 1e6)


def test_each_dimension_of_a_product_has_a_half_of_its_own():
    own = Constant(
        name="matmul_half_dim.float32.k", value=30.0, low=30.0, high=30.0, unit="1", source="a test"
    )
    profile = profile_of(memory_bandwidth=1e18, matmul_half_dim=10)
    work = Work(matmuls=(Matmul(m=10, n=10, k=30),))
    assert estimate(work, profile).terms["matmul"] == pytest.approx(6000 / 1e9 * 4 * 4 / 3)
    assert estimate(work, profile.with_constants(own, origin="calibrated")).terms["matmul"] == pytest.approx(
        6000 / 1e9 * 4 * 2
    )


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@given(st.integers(1, 4096), st.integers(1, 100))
def test_products_listed_once_with_their_number_take_as_long_as_one_by_one(kind, m, num):
    values = {"product_s": 3e-6, "gather_s": 2e-6, "cache_bytes": 1e6, "memory_overlap": 0.5}
    profile = profile_of(kind, **values, memory_bandwidth=3e9)
    product = Matmul(m=m, n=300, k=200)
    listed = Work(matmuls=(product,) * num, num_kernels=num, elementwise_bytes=m * 300)
    counted = listed.model_copy(update={"matmuls": (product.model_copy(update={"num": num}),)})
    assert estimate(counted, profile).terms == pytest.approx(dict(estimate(listed, profile).terms), rel=1e-12)
    assert estimate(counted, profile).memory_bytes == estimate(listed, profile).memory_bytes


def test_threads_gather_for_products_attention_and_kernels_that_they_share():
    profile = profile_of(gather_s=1.0)
    product, attention = Matmul(m=1, n=1, k=1), Attention(num=1, query=1, key=1, head_dim=1)
    work = Work(matmuls=(product,) * 2, attention=(attention,), num_kernels=9, num_shared_kernels=4)
    assert estimate(work, profile).terms["gather"] == 7.0
    assert perturb_work(1 << 15).num_shared_kernels == 1
    assert perturb_work((1 << 15) - 1).num_shared_kernels == 0


def test_a_pair_of_formats_goes_before_the_format_that_is_read():
    pair = Constant(
        name="cast_rate.bfloat16.float32", value=2e9, low=2e9, high=2e9, unit="number/s", source="a test"
    )
    profile = profile_of().with_constants(pair, origin="calibrated")
    for target, rate in (("float32", 2e9), ("float8_e4m3", 1e9)):
        work = cast_work(1000, source="bfloat16", target=target)
        assert estimate(work, profile).terms["cast"] == pytest.approx(1000 / rate)


def test_what_fits_a_cache_moves_at_the_cache_bandwidth():
    profile = profile_of(cache_bytes=1000, param_pass_cache_bandwidth=1e10, elementwise_cache_bandwidth=1e10)
    assert estimate(Work(param_pass_bytes=500), profile).seconds == pytest.approx(500 / 1e10)
    assert estimate(Work(param_pass_bytes=3000), profile).seconds == pytest.approx(1000 / 1e10 + 2000 / 1e9)
    three_kernels = Work(elementwise_bytes=3000, num_kernels=3)
    assert estimate(three_kernels, profile).seconds == pytest.approx(3000 / 1e10)
    assert estimate(three_kernels, profile).memory_bytes == 0
    assert estimate(Work(param_pass_bytes=3000), profile).memory_bytes == 2000


def test_a_format_of_its_own_goes_before_the_one_for_all():
    own = Constant(
        name="param_pass_bandwidth.bfloat16", value=5e8, low=5e8, high=5e8, unit="byte/s", source="a test"
    )
    profile = profile_of().with_constants(own, origin="calibrated")
    assert estimate(perturb_work(100, dtype="bfloat16"), profile).seconds == pytest.approx(600 / 5e8)
    assert estimate(perturb_work(100), profile).seconds == pytest.approx(1200 / 1e9)


def test_a_cpu_adds_and_a_gpu_overlaps_launches_with_kernels():
    work = Work(param_pass_bytes=1000, num_kernels=3, calls=("block",))
    constants = {"dispatch_s": 1e-7, "call_s": 2e-7}
    assert estimate(work, profile_of("cpu", **constants)).seconds == pytest.approx(1e-6 + 5e-7)
    assert estimate(work, profile_of("gpu", **constants)).seconds == pytest.approx(1e-6)
    launch_bound = estimate(work, profile_of("gpu", dispatch_s=1e-6))
    assert launch_bound.seconds == pytest.approx(3e-6)
    assert launch_bound.limiter == "dispatch"
    assert launch_bound.cores == 1


def test_copies_have_a_latency_a_direction_and_a_core():
    profile = profile_of(copy_latency_s=1e-6, copy_d2h_bandwidth=5e8, copy_cores=1)
    assert estimate(copy_work(1000), profile).seconds == pytest.approx(2e-6)
    back = estimate(copy_work(1000), profile, direction="d2h")
    assert back.seconds == pytest.approx(3e-6)
    assert back.cores == pytest.approx(1)
    assert back.memory_bytes == 2000
    assert estimate(copy_work(1000), profile_of("gpu")).cores == 0


def test_draws_take_one_core_and_products_all_threads():
    profile = profile_of(num_threads=4)
    assert estimate(sampling_work(1000), profile).cores == pytest.approx(1)
    assert estimate(perturb_work(1000), profile).cores == pytest.approx(4)
    both = estimate(sampling_work(12_000) + perturb_work(1000), profile)  # 12 us on one core, 12 us on four
    assert both.cores == pytest.approx(2.5)
    assert both.limiter in {"sampling", "param_pass"}


def test_doing_nothing_takes_the_overhead_of_an_instruction():
    assert estimate(Work(), profile_of()).seconds == 0
    assert estimate(Work(), profile_of(instruction_s=1e-5)).seconds == pytest.approx(1e-5)


def test_a_format_without_a_rate_is_refused():
    work = Work(dtype="float16", matmuls=(Matmul(m=1, n=1, k=1),))
    with pytest.raises(ProfileError, match=r"no matmul_rate for float16(?s:.*)it has float32"):
        estimate(work, profile_of())


PROFILES = [
    datasheet_profile(load_preset(name), device.id)
    for name in preset_names()
    for device in load_preset(name).compute_devices[:1]
]
SPECS = [read_model_spec(name) for name in ("opt-125m", "llama-1m", "gpt2", "qwen3-0.6b")]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PROFILES),
    st.sampled_from(SPECS),
    st.sampled_from(["embed", "block.0", "head"]),
    st.integers(1, 8),
    st.integers(1, 200),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["eager", "sdpa", "flash"]),
)
def test_estimates_hold_their_invariants(profile, spec, segment, batch, seq, dtype, attention):
    work = forward_work(spec, segment, batch=batch, seq=seq, dtype=dtype, attention=attention)
    low, central, high = (estimate(work, profile, bound=bound) for bound in ("low", "central", "high"))
    assert low.seconds <= central.seconds <= high.seconds
    assert max(central.terms.values()) <= central.seconds * (1 + 1e-9) or profile.device_type == "gpu"
    assert central.seconds <= sum(central.terms.values()) * (1 + 1e-9)
    assert central.limiter in central.terms
    assert 0 <= central.cores <= max(profile.num_threads, 1) + 1e-9
    larger = forward_work(spec, segment, batch=batch + 1, seq=seq, dtype=dtype, attention=attention)
    # A kernel's own dimensions make larger products more efficient, never a whole pass shorter.
    assert estimate(larger, profile).seconds >= central.seconds * (1 - 1e-9)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.sampled_from(PROFILES))
def test_more_bytes_never_take_less_time(size, extra, profile):
    for field in ("param_pass_bytes", "elementwise_bytes", "copy_bytes", "num_normals", "allocation_bytes"):
        less, more = (estimate(Work(**{field: amount}), profile).seconds for amount in (size, size + extra))
        assert less <= more * (1 + 1e-12)


def test_a_large_half_precision_product_reaches_what_an_h200_is_known_for():
    profile = datasheet_profile(load_preset("h200-1x"), "gpu0")
    work = Work(dtype="bfloat16", matmuls=(Matmul(m=8192, n=8192, k=8192),))
    burst = in_bursts(profile)
    low, high = (work.flops / estimate(work, burst, bound=bound).seconds for bound in ("high", "low"))
    assert low < 790e12 < high  # measured elsewhere: about 790 Tflop/s
    # For longer than milliseconds its 700 W do not suffice; an H20, of the same die, has as many watts for a sixth of it.
    assert work.flops / estimate(work, profile).seconds < 0.9 * work.flops / estimate(work, burst).seconds
    frugal = datasheet_profile(load_preset("h20-4x-milan"), "gpu0")
    assert in_bursts(frugal) == frugal


def test_float32_reaches_what_lanes_allow_beside_loads():
    """Published: cuBLAS at 17.6 and 19.0 Tflop/s for 2048 and 2304 on an A100 of 19.5, and about 20 of 31.2 within reach of an A10."""
    work = Work(dtype="float32", matmuls=(Matmul(m=8192, n=8192, k=8192),))
    reached = [
        work.flops / estimate(work, datasheet_profile(assumed_machine(find_device(name)), "gpu0")).seconds
        for name in ("A100 80GB PCIe", "NVIDIA A10")
    ]
    assert reached == pytest.approx([18.3e12, 20.5e12], rel=0.1)


def test_attention_on_a_gpu_takes_what_papers_print():
    """FlashAttention 2's figures 4 and 5, at 16k tokens; FlashAttention 3's figures 5 and 6."""
    a100, h100 = (
        in_bursts(datasheet_profile(load_preset(name), "gpu0")) for name in ("a100-80gb-milan", "dgx-h100")
    )
    printed = (
        (a100, None, 64, False, 176e12), (a100, None, 128, False, 225e12), (a100, None, 128, True, 195e12),
        (h100, "fa2", 64, False, 325e12), (h100, "fa2", 128, False, 370e12),
        (h100, "fa3", 64, False, 497e12), (h100, "fa3", 128, False, 648e12), (h100, "fa3", 256, False, 756e12),
        (h100, "fa3", 128, True, 550e12),
    )  # fmt: skip
    for profile, kernel, head_dim, backward, rate in printed:
        part = Attention(num=32, query=16384, key=16384, head_dim=head_dim, kernel=kernel, backward=backward)
        work = Work(dtype="float16", attention=(part,))
        assert work.flops / device_s(estimate(work, profile), "gpu") == pytest.approx(rate, rel=0.15)


def test_a_causal_mask_saves_less_than_half_of_a_short_sequence():
    profile = datasheet_profile(load_preset("a100-80gb-milan"), "gpu0")
    saved = []
    for length in (512, 16384):
        whole = Attention(num=32, query=length, key=length, head_dim=64)
        works = [
            Work(dtype="float16", attention=(part,))
            for part in (whole, whole.model_copy(update={"causal_skip": True}))
        ]
        full_s, causal_s = (device_s(estimate(work, profile), "gpu") for work in works)
        saved.append(causal_s / full_s)
    assert saved[0] == pytest.approx(0.75)
    assert 0.5 < saved[1] < 0.51


def test_draws_cost_by_who_makes_them():
    profile = datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=4)
    alone, shared, skipped = (
        estimate(work, profile)
        for work in (
            sampling_work(10**7),
            sampling_work(10**7, is_shared=True),
            sampling_work(0, num_skipped=10**7),
        )
    )
    assert shared.seconds < alone.seconds / 2
    assert skipped.seconds < alone.seconds
    assert alone.cores == pytest.approx(1.0)
    assert shared.cores > 3
    assert (alone.limiter, shared.limiter, skipped.limiter) == ("sampling", "shared_sampling", "skip")
    jumps = [sampling_work(0, num_skipped=num, num_jumped=num) for num in (10**7, 10**9)]
    near, far = (estimate(work, profile).seconds for work in jumps)
    assert near == far < skipped.seconds
    kept = tuple(constant for constant in profile.constants if constant.name != "jump_s")
    without = Profile(**{**dict(profile), "constants": kept})
    assert estimate(jumps[0], without).seconds == pytest.approx(skipped.seconds)
    gpu = datasheet_profile(load_preset("h200-1x"), "gpu0")
    assert estimate(jumps[1], gpu).terms["skip"] == pytest.approx(100 * estimate(jumps[0], gpu).terms["skip"])
    seeded = sampling_work(10**7, is_shared=True, num_seeds=600)
    split = sampling_work(10**7, is_shared=True, num_split_sequences=1)
    assert estimate(seeded, profile).seconds > shared.seconds
    assert estimate(split, profile).seconds == pytest.approx(
        shared.seconds + profile.values()["split_s"], rel=1e-9
    )
    whole, narrow = (sampling_work(100, dtype=dtype, is_scaled=True) for dtype in ("float32", "bfloat16"))
    assert (whole.scratch_bytes, narrow.scratch_bytes) == (0, 400)
