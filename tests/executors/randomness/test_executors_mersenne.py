"""Jumps of torch's CPU generator, and sequences that begin in the middle by one."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.randomness import mersenne, sequential
from executors.randomness.mersenne import can_jump, jumped
from executors.randomness.rng import generator_on
from executors.randomness.samplers import Gaussian, Rademacher
from executors.randomness.sequential import SequentialSampler
from executors.runs.session import Session
from executors.steps.ops import sample as sample_op
from executors.threads import SamplingThreads
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def words(generator, num):
    """Return 64-bit numbers, of which each is two words."""
    return torch.empty(num, dtype=torch.int64).random_(-(2**63), None, generator=generator)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    before=st.integers(0, 700),
    pairs=st.one_of(st.integers(1, 2000), st.integers(2000, 400_000)),
)
def test_a_jump_leads_to_where_drawing_does(seed, before, pairs):
    sampled, ahead = generator_on(CPU, seed), unset()
    words(sampled, before)
    ahead.set_state(jumped(sampled.get_state(), 2 * pairs))
    words(sampled, pairs)
    assert torch.equal(words(ahead, 1500), words(sampled, 1500))


def unset():
    return torch.Generator(device=CPU)


@pytest.mark.parametrize("num_raw", [1, 3, 623, 625, 19_937, 100_001])
def test_odd_numbers_of_words_are_jumped_over(num_raw):
    sampled, ahead = generator_on(CPU, 3), unset()
    ahead.set_state(jumped(sampled.get_state(), num_raw))
    torch.empty(num_raw, dtype=torch.int32).random_(generator=sampled)  # a word each
    assert torch.equal(words(ahead, 1000), words(sampled, 1000))


def test_jumps_add_up():
    once, twice = unset(), unset()
    state = generator_on(CPU, 4).get_state()
    once.set_state(jumped(state, 10**12 + 7))
    twice.set_state(jumped(jumped(state, 10**12), 7))
    assert torch.equal(words(once, 700), words(twice, 700))


def test_what_a_generator_holds_back_stays_with_it():
    """A single normal leaves its twin for the next draw."""
    generator, ahead = generator_on(CPU, 5), unset()
    torch.empty(1).normal_(generator=generator)
    ahead.set_state(jumped(generator.get_state(), 2000))
    twin = torch.empty(1).normal_(generator=generator)
    assert torch.equal(torch.empty(1).normal_(generator=ahead), twin)


def test_this_build_can_jump():
    assert can_jump()


@pytest.mark.parametrize("field", ["_LEFT", "_NEXT", "_WORDS"])
def test_a_state_of_another_build_is_noticed(monkeypatch, field):
    monkeypatch.setattr(mersenne, field, getattr(mersenne, field) + 8)
    assert not can_jump.__wrapped__()


def sampled_by(numels, dtype, generator):
    return [torch.empty(numel, dtype=dtype).normal_(generator=generator) for numel in numels]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("jumps", [True, False])
def test_sequences_of_several_threads_have_the_bits_of_one_draw(monkeypatch, jumps, num_threads, dtype):
    monkeypatch.setattr(sequential, "JUMP_RAW", 500)
    monkeypatch.setattr(sequential, "can_jump", lambda: jumps)
    threads, numels = SamplingThreads(num_threads), [1008, 16, 4096, 16, 3008]
    if dtype.itemsize > 2:
        numels += [17, 1003]
    generator = generator_on(CPU, 6)
    whole, after = sampled_by(numels, dtype, generator), sampled_by([100], dtype, generator)
    sampler = SequentialSampler(numels, Gaussian(), 8, threads)
    for factor in (None, 1e-3):
        generator, views = generator_on(CPU, 6), [torch.empty_like(tensor) for tensor in whole]
        states = sampler.fill(views, generator, factor)
        expected = whole if factor is None else [tensor * factor for tensor in whole]
        assert all(map(torch.equal, views, expected))
        assert torch.equal(*sampled_by([100], dtype, generator), *after)
        again = [torch.empty_like(tensor) for tensor in whole]
        sampler.fill_again(again, states, factor)
        assert all(map(torch.equal, again, expected))
    generator = generator_on(CPU, 6)
    sampler.skip(whole[0], generator)
    assert torch.equal(*sampled_by([100], dtype, generator), *after)
    threads.close()


@pytest.mark.parametrize("shape", [(500, 32), (400, 33)])
def test_rows_kept_by_several_threads_are_those_of_the_whole(monkeypatch, shape):
    monkeypatch.setattr(sequential, "JUMP_RAW", 500)
    threads, generator = SamplingThreads(2), generator_on(CPU, 7)
    table, after = torch.empty(shape).normal_(generator=generator), sampled_by([64], torch.float32, generator)
    for rows in ([], [0, shape[0] - 1], [3, 4, 249, 250, 251], list(range(shape[0]))):
        sampler, generator = SequentialSampler([table.numel()], Gaussian(), 8, threads), generator_on(CPU, 7)
        kept = torch.empty(len(rows), shape[1])
        sampler.rows(kept, torch.tensor(rows, dtype=torch.long), generator)
        assert torch.equal(kept, table[rows])
        assert torch.equal(*sampled_by([64], torch.float32, generator), *after)
    threads.close()


def test_draws_whose_words_cannot_be_counted_are_made_by_one(monkeypatch):
    monkeypatch.setattr(sequential, "JUMP_RAW", 16)
    monkeypatch.setattr(sequential, "jumped", None)
    threads = SamplingThreads(2)
    for numels, sampler in (([1000, 9], Gaussian()), ([4096], Rademacher())):
        whole, views = ([torch.empty(numel) for numel in numels] for _ in range(2))
        generator = generator_on(CPU, 8)
        for tensor in whole:
            sampler.fill(tensor, generator)
        SequentialSampler(numels, sampler, 8, threads).fill(views, generator_on(CPU, 8))
        assert all(map(torch.equal, views, whole))
    threads.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [16, 17, 31, 32, 1000, 4096])
def test_the_words_of_a_draw_are_counted(dtype, numel):
    sampled, ahead = generator_on(CPU, 9), unset()
    state = sampled.get_state()
    torch.empty(numel, dtype=dtype).normal_(generator=sampled)
    num_raw = Gaussian().num_raw(numel, dtype)
    if num_raw is None:  # narrow formats end in a way of their own
        assert numel % 16
        assert dtype.itemsize == 2
        return
    ahead.set_state(jumped(state, num_raw))
    assert torch.equal(words(ahead, 700), words(sampled, 700))


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("update", ["immediate", "delayed"])
@pytest.mark.parametrize(("name", "dtype"), [("opt", "float32"), ("llama-tied", "bfloat16")])
def test_steps_whose_draws_begin_by_jumps_equal_the_literal_loop(monkeypatch, name, dtype, update):
    monkeypatch.setattr(sequential, "JUMP_RAW", 64)
    monkeypatch.setattr(sample_op, "SHARED_SAMPLING_ELEMENTS", 64)
    starts = []
    monkeypatch.setattr(sequential, "jumped", lambda *start: starts.append(start[1]) or jumped(*start))
    reference = model_of(name, getattr(torch, dtype))
    model = copy.deepcopy(reference)
    loop = LiteralMezo(reference, epsilon=1e-3, weight_decay=0.1)
    plan = plan_of(model, dtype=dtype, schedule={"update": update})
    with Session(plan, model, learning_rate=1e-2, weight_decay=0.1, num_sampling_threads=2) as session:
        for batch in batches(3):
            record = session.step(batch)
            ((plus, minus, g),) = loop.step(batch, record.seeds, 1e-2)
            found = (record.losses_plus[0], record.losses_minus[0], record.projected_gradients[0])
            assert found == (plus, minus, g)
        session.flush()
    assert differing(reference, model) == []
    assert len(starts) >= 3 * 4  # the table and each block, in every step
