from __future__ import annotations

import math

import pytest
import torch

from executors.directions import DIRECTIONS, Gaussian, Rademacher, direction_named
from executors.rng import (
    COUNTER_BLOCK_ELEMENTS,
    CounterDraws,
    CounterKey,
    draw_rows,
    generator_on,
    walk_past,
)
from topology.errors import PlanError

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BLOCK = COUNTER_BLOCK_ELEMENTS["cpu"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gaussian_has_the_bits_of_the_reference_loop(dtype):
    shapes = [(3, 5), (7,), (40, 33), (16,), (5,)]
    torch.manual_seed(11)
    reference = [torch.normal(mean=0, std=1, size=shape, dtype=dtype) for shape in shapes]
    generator = generator_on(CPU, 11)
    arena = torch.zeros(4000, dtype=dtype)
    offset = 0
    for shape, wanted in zip(shapes, reference, strict=True):
        drawn = arena[offset : offset + math.prod(shape)]
        Gaussian().fill(drawn, generator)
        assert torch.equal(drawn.view(shape), wanted)
        offset += drawn.numel() + 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (2101, 33), (1000, 132)])
@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
def test_kept_rows_and_the_state_after_equal_a_whole_draw(dtype, shape, direction):
    whole, after = torch.empty(shape, dtype=dtype), torch.empty(21, dtype=dtype)
    generator = generator_on(CPU, 5)
    direction.fill(whole, generator)
    direction.fill(after, generator)
    rows = torch.tensor(sorted({0, 1, 3, shape[0] // 2, shape[0] - 1}))
    kept = torch.empty((len(rows), shape[1]), dtype=dtype)
    generator = generator_on(CPU, 5)
    draw_rows(kept, rows, shape[0], direction, generator)
    assert torch.equal(kept, whole[rows])
    again = torch.empty_like(after)
    direction.fill(again, generator)
    assert torch.equal(again, after)


def test_walking_past_leaves_the_state_of_drawing():
    numels = [9, 100_003, 16, 70_000]
    drawn, walked = generator_on(CPU, 2), generator_on(CPU, 2)
    for numel in numels:
        torch.empty(numel).normal_(generator=drawn)
    walk_past(numels, torch.empty(0), Gaussian(), walked)
    assert torch.equal(drawn.get_state(), walked.get_state())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
def test_rademacher_is_plus_or_minus_one(dtype, numel):
    out = torch.full((numel,), 7.0, dtype=dtype)
    Rademacher().fill(out, generator_on(CPU, 1))
    assert set(out.tolist()) <= {1.0, -1.0}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_first_two_moments(name):
    direction, count = direction_named(name), 1 << 20
    out = torch.empty(count, dtype=torch.float64)
    direction.fill(out, generator_on(CPU, 3))
    # Five standard errors; the variance of z² is 2 for normals and 0 for signs.
    assert abs(out.mean().item() - direction.mean) < 5 / math.sqrt(count)
    assert abs((out**2).mean().item() - direction.second_moment) < 5 * math.sqrt(2 / count)


def test_unknown_direction_is_refused():
    with pytest.raises(PlanError, match="no direction 'cauchy'"):
        direction_named("cauchy")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
def test_counter_slices_equal_the_whole(dtype, direction):
    numels = [5, 3 * BLOCK + 7, 100]
    draws, key = CounterDraws(numels, CPU), CounterKey.of(seed=9, step=4, query=1)
    whole = torch.empty(numels[1], dtype=dtype)
    draws.fill(whole, 1, 0, key, direction)
    for begin, end in [(0, 3), (BLOCK - 1, BLOCK + 1), (17, 2 * BLOCK + 5), (3 * BLOCK + 2, 3 * BLOCK + 7)]:
        part = torch.empty(end - begin, dtype=dtype)
        draws.fill(part, 1, begin, key, direction)
        assert torch.equal(part, whole[begin:end])


def test_counter_rows_and_threads_give_the_same_bits():
    width, num_rows = 48, 2000
    numels = [10, width * num_rows]
    key = CounterKey.of(1, 2, 0)
    alone, threaded = CounterDraws(numels, CPU), CounterDraws(numels, CPU, num_threads=2)
    first, second = torch.empty(numels[1]), torch.empty(numels[1])
    alone.fill(first, 1, 0, key, Gaussian())
    threaded.fill(second, 1, 0, key, Gaussian())
    threaded.close()
    assert torch.equal(first, second)
    rows = torch.tensor([0, 5, 341, 342, num_rows - 1])
    kept = torch.empty(len(rows), width)
    alone.fill_rows(kept, rows, 1, key, Gaussian())
    assert torch.equal(kept, first.view(num_rows, width)[rows])


def test_counter_streams_differ_in_every_part_of_the_key():
    draws = CounterDraws([100, 100], CPU)
    seen = []
    for key in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0)):
        for parameter in (0, 1):
            out = torch.empty(100)
            draws.fill(out, parameter, 0, CounterKey.of(*key), Gaussian())
            seen.append(tuple(out.tolist()))
    assert len(set(seen)) == len(seen)


def test_counter_seeds_of_one_direction_never_meet():
    key = CounterKey.of(123, 45, 0)
    assert len({key.seed_of(block) for block in range(200_000)}) == 200_000
