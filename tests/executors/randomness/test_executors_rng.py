from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.randomness.counter import BLOCK_ELEMENTS, CounterKey, CounterSampler
from executors.randomness.rng import generator_on
from executors.randomness.samplers import SAMPLERS, Gaussian, Rademacher, sampler_named
from executors.randomness.sequential import SequentialSampler, sample_rows, skip_tensors
from executors.threads import SamplingThreads
from topology.errors import PlanError

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BLOCK = BLOCK_ELEMENTS["cpu"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gaussian_has_the_bits_of_the_reference_loop(dtype):
    shapes = [(3, 5), (7,), (40, 33), (16,), (5,)]
    torch.manual_seed(11)
    reference = [torch.normal(mean=0, std=1, size=shape, dtype=dtype) for shape in shapes]
    generator = generator_on(CPU, 11)
    arena = torch.zeros(4000, dtype=dtype)
    offset = 0
    for shape, wanted in zip(shapes, reference, strict=True):
        sampled = arena[offset : offset + math.prod(shape)]
        Gaussian().fill(sampled, generator)
        assert torch.equal(sampled.view(shape), wanted)
        offset += sampled.numel() + 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (2101, 33), (1000, 132)])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_kept_rows_and_the_state_after_equal_a_whole_draw(dtype, shape, sampler):
    whole, after = torch.empty(shape, dtype=dtype), torch.empty(21, dtype=dtype)
    generator = generator_on(CPU, 5)
    sampler.fill(whole, generator)
    sampler.fill(after, generator)
    rows = torch.tensor(sorted({0, 1, 3, shape[0] // 2, shape[0] - 1}))
    kept = torch.empty((len(rows), shape[1]), dtype=dtype)
    generator = generator_on(CPU, 5)
    sample_rows(kept, rows, shape[0], sampler, generator)
    assert torch.equal(kept, whole[rows])
    again = torch.empty_like(after)
    sampler.fill(again, generator)
    assert torch.equal(again, after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@settings(max_examples=30)
@given(numels=st.lists(st.integers(1, 400), min_size=1, max_size=6), num_marks=st.integers(1, 9))
def test_sequences_with_marks_have_the_bits_of_whole_draws(dtype, sampler, numels, num_marks):
    generator = generator_on(CPU, 3)
    whole = [torch.empty(numel, dtype=dtype) for numel in numels]
    for tensor in whole:
        sampler.fill(tensor, generator)
    threads = SamplingThreads(2)
    sequential = SequentialSampler(numels, sampler, num_marks, threads)
    marked, skipped = generator_on(CPU, 3), generator_on(CPU, 3)
    views = [torch.empty_like(tensor) for tensor in whole]
    states = sequential.fill(views, marked)
    assert all(map(torch.equal, views, whole))
    assert torch.equal(marked.get_state(), generator.get_state())
    assert all(map(torch.equal, sequential.skip(whole[0], skipped), states[:1]))
    assert torch.equal(skipped.get_state(), generator.get_state())
    again = [torch.empty_like(tensor) for tensor in whole]
    sequential.fill_again(again, states)
    threads.close()
    assert all(map(torch.equal, again, whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("numel", [7, 16, 100_003])
def test_a_scaled_draw_is_the_draw_rounded_once_more(dtype, sampler, numel):
    plain, scaled = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    sampler.fill(plain, generator_on(CPU, 4))
    sampler.fill_scaled(scaled, generator_on(CPU, 4), 3.7e-4)
    assert torch.equal(scaled, plain * 3.7e-4)


def test_skipping_leaves_the_state_of_drawing():
    numels = [9, 100_003, 16, 70_000]
    sampled, skipped = generator_on(CPU, 2), generator_on(CPU, 2)
    for numel in numels:
        torch.empty(numel).normal_(generator=sampled)
    skip_tensors(numels, torch.empty(0), Gaussian(), skipped)
    assert torch.equal(sampled.get_state(), skipped.get_state())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
def test_rademacher_is_plus_or_minus_one(dtype, numel):
    out = torch.full((numel,), 7.0, dtype=dtype)
    Rademacher().fill(out, generator_on(CPU, 1))
    assert set(out.tolist()) <= {1.0, -1.0}


@pytest.mark.parametrize("name", SAMPLERS)
def test_first_two_moments(name):
    sampler, count = sampler_named(name), 1 << 20
    out = torch.empty(count, dtype=torch.float64)
    sampler.fill(out, generator_on(CPU, 3))
    # Five standard errors; the variance of z² is 2 for normals and 0 for signs.
    assert abs(out.mean().item() - sampler.distribution.mean) < 5 / math.sqrt(count)
    assert abs((out**2).mean().item() - sampler.distribution.second_moment) < 5 * math.sqrt(2 / count)


def test_unknown_perturbation_is_refused():
    with pytest.raises(PlanError, match="unknown distribution 'cauchy'"):
        sampler_named("cauchy")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_counter_slices_equal_the_whole(dtype, sampler):
    block = BLOCK * sampler.distribution.block_factor
    numels = [5, 3 * block + 7, 100]
    counter, key = CounterSampler(numels, CPU), CounterKey.of(seed=9, step=4, perturbation=1)
    whole = torch.empty(numels[1], dtype=dtype)
    counter.fill(whole, 1, 0, key, sampler)
    ends = [(0, 3), (block - 1, block + 1), (17, 2 * block + 5), (3 * block + 2, 3 * block + 7)]
    for begin, end in [*ends, (block - 20, block - 5), (2 * block + 100, 2 * block + 101)]:
        part = torch.empty(end - begin, dtype=dtype)
        counter.fill(part, 1, begin, key, sampler)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("width", [48, 33, 7])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_counter_rows_and_threads_give_the_same_bits(sampler, width):
    num_rows = 2000
    numels = [10, width * num_rows]
    key = CounterKey.of(1, 2, 0)
    threads = SamplingThreads(3)
    alone, threaded = CounterSampler(numels, CPU), CounterSampler(numels, CPU, threads=threads)
    first, second = torch.empty(numels[1]), torch.empty(numels[1])
    alone.fill(first, 1, 0, key, sampler)
    threaded.fill(second, 1, 0, key, sampler)
    assert torch.equal(first, second)
    rows = torch.tensor([0, 5, 341, 342, num_rows - 1])
    kept = torch.empty(len(rows), width)
    for counter in (alone, threaded):
        counter.fill_rows(kept, rows, 1, key, sampler)
        assert torch.equal(kept, first.view(num_rows, width)[rows])
    threads.close()


@pytest.mark.parametrize("width", [16, 33, 3000, 40_000])
@pytest.mark.parametrize("at_once", [1, 20_000, 1 << 19])
def test_rows_in_and_across_blocks_are_those_of_the_whole_table(monkeypatch, width, at_once):
    monkeypatch.setattr("executors.randomness.counter.ROUNDED_AT_ONCE", at_once)
    num_rows = 200_000 // width
    threads, key = SamplingThreads(2), CounterKey.of(3, 1, 0)
    counter = CounterSampler([7, width * num_rows], CPU, threads=threads)
    whole = torch.empty(width * num_rows)
    counter.fill(whole, 1, 0, key, Gaussian())
    generator = torch.Generator().manual_seed(width)
    for share in (0.0, 0.02, 0.5, 1.0):
        rows = (torch.rand(num_rows, generator=generator) < share).nonzero().view(-1)
        kept = torch.full((len(rows), width), torch.nan)
        counter.fill_rows(kept, rows, 1, key, Gaussian())
        assert torch.equal(kept, whole.view(num_rows, width)[rows])
    threads.close()


def test_counter_streams_differ_in_every_part_of_the_key():
    counter = CounterSampler([100, 100], CPU)
    seen = []
    for key in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0)):
        for parameter in (0, 1):
            out = torch.empty(100)
            counter.fill(out, parameter, 0, CounterKey.of(*key), Gaussian())
            seen.append(tuple(out.tolist()))
    assert len(set(seen)) == len(seen)


def test_counter_seeds_of_one_perturbation_never_meet():
    key = CounterKey.of(123, 45, 0)
    seeds = key.seeds_of(0, 200_000)
    assert len(set(seeds)) == 200_000
    assert seeds[1234] == key.seed_of(1234)
