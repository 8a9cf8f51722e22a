"""Probes of random perturbations: drawn by one thread, by all, passed over, picked row by row; and of other formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from costmodel.formats import CAST_PAIRS
from costmodel.formats.distributions import (
    COUNTER_BLOCK_ELEMENTS,
    DISTRIBUTIONS,
    JUMP_RAW,
    NUM_RNG_MARKS,
    SamplingClass,
)
from costmodel.param_passes import cast_work, perturb_work, sampling_work
from executors.calibration.probing import MEMORY_BYTES, Probe, device_type_of, format_named, random_tensor
from executors.formats import TORCH_DTYPES
from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.mersenne import can_jump, jumped
from executors.randomness.rng import generator_on
from executors.randomness.samplers import DistributionSampler, sampler_named
from executors.randomness.sequential import SequentialSampler, sample_rows
from executors.threads import SamplingThreads


def sampling_probes(device: torch.device, dtypes: Sequence[str]) -> Iterator[Probe]:
    """Yield probes of draws and of conversions."""
    for dtype in dtypes:
        yield from _samplings(device, dtype)
        yield from _shared_samplings(device, dtype)
        yield from _skips(device, dtype)
    yield from _jumps(device)
    yield from _casts(device)
    yield from _kept_rows(device, dtypes[0])


def _samplings(device: torch.device, dtype: str) -> Iterator[Probe]:
    generator = generator_on(device, 1)
    num = MEMORY_BYTES[device_type_of(device)] // 16
    out = torch.empty(num, dtype=TORCH_DTYPES[dtype], device=device)
    for sampler in _one_of_each_class():
        sampling_class = sampler.distribution.sampling_class
        work = sampling_work(num, dtype=format_named(dtype), distribution=sampling_class)

        def run(sampler: DistributionSampler = sampler) -> None:
            sampler.fill(out, generator)

        yield Probe(f"draw {sampler.distribution.name} {dtype}", work, run)


def _shared_samplings(device: torch.device, dtype: str) -> Iterator[Probe]:
    """Yield draws by all threads at once, each with a pass by torch's own threads, which must gather again."""
    if device.type != "cpu":
        return
    threads, sampler = SamplingThreads(torch.get_num_threads()), sampler_named("gaussian")
    generator = generator_on(device, 1)
    key = CounterKey.of(1, 0, 0)
    for num in (1 << 17, MEMORY_BYTES["cpu"] // 32):
        z, theta = (torch.zeros(num, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
        counter = CounterSampler([num], device, threads=threads)
        sequential = SequentialSampler([num], sampler, NUM_RNG_MARKS, threads)
        states = sequential.fill([z], generator_on(device, 1))

        def by_blocks(z: Tensor = z, theta: Tensor = theta, counter: CounterSampler = counter) -> None:
            counter.fill_parameters([z], [0], key, sampler)
            torch.add(theta, z, out=theta)

        def from_marks(
            z: Tensor = z,
            theta: Tensor = theta,
            sequential: SequentialSampler = sequential,
            states: list[Tensor] = states,
        ) -> None:
            sequential.fill_again([z], states)
            torch.add(theta, z, out=theta)

        def by_several_threads(
            z: Tensor = z, theta: Tensor = theta, sequential: SequentialSampler = sequential
        ) -> None:
            sequential.fill([z], generator)
            torch.add(theta, z, out=theta)

        work = sampling_work(num, dtype=format_named(dtype), is_shared=True)
        work += perturb_work(num, dtype=format_named(dtype))
        name = f"draw by all, {num} from"
        seeded = work.model_copy(update={"num_seeds": num // COUNTER_BLOCK_ELEMENTS})
        yield Probe(f"{name} blocks {dtype}", seeded, by_blocks)
        yield Probe(f"{name} marks {dtype}", work, from_marks)
        if num >= 2 * JUMP_RAW:
            split = work.model_copy(update={"num_split_sequences": 1})
            yield Probe(f"{name} one generator {dtype}", split, by_several_threads)


def _one_of_each_class() -> list[DistributionSampler]:
    """Return how to draw one distribution of each kind whose rates are measured."""
    names = {declared.sampling_class: name for name, declared in reversed(DISTRIBUTIONS.items())}
    return [sampler_named(names[sampling_class]) for sampling_class in get_args(SamplingClass)]


def _skips(device: torch.device, dtype: str) -> Iterator[Probe]:
    generator, num = generator_on(device, 1), MEMORY_BYTES[device_type_of(device)] // 16
    like = torch.empty(0, dtype=TORCH_DTYPES[dtype], device=device)
    for sampler in _one_of_each_class():
        sampling_class = sampler.distribution.sampling_class
        work = sampling_work(0, dtype=format_named(dtype), distribution=sampling_class, num_skipped=num)

        def run(sampler: DistributionSampler = sampler) -> None:
            sampler.skip(num, like, generator)

        yield Probe(f"skip {sampler.distribution.name} {dtype}", work, run)


def _jumps(device: torch.device) -> Iterator[Probe]:
    if device.type != "cpu" or not can_jump():
        return
    state, num = generator_on(device, 1).get_state(), 2 * JUMP_RAW
    work = sampling_work(0, num_skipped=num, num_jumped=num)
    yield Probe(f"jump over {num}", work, lambda: jumped(state, num))


def _casts(device: torch.device) -> Iterator[Probe]:
    """Yield conversions as offloaded blocks of a narrower format meet them, there and back."""
    num = MEMORY_BYTES[device_type_of(device)] // 32
    for wider, narrower in CAST_PAIRS:
        for source, target in ((wider, narrower), (narrower, wider)):
            of, to = random_tensor(device, source, num), random_tensor(device, target, num)

            def run(of: Tensor = of, to: Tensor = to) -> None:
                to.copy_(of)

            yield Probe(f"cast {source} to {target}", cast_work(num, source=source, target=target), run)


def _kept_rows(device: torch.device, dtype: str) -> Iterator[Probe]:
    num_rows, width = 1024, 64
    rows = torch.arange(0, num_rows, 4, device=device)
    out = random_tensor(device, dtype, rows.numel(), width)
    sampler, generator = sampler_named("gaussian"), generator_on(device, 1)

    def run() -> None:
        sample_rows(out, rows, num_rows, sampler, generator)

    num_made = out.numel()
    work = sampling_work(
        num_made,
        dtype=format_named(dtype),
        num_skipped=num_rows * width - num_made,
        num_kept_rows=rows.numel(),
    )
    yield Probe(f"rows {rows.numel()} of {num_rows}", work, run)
