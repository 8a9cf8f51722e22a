"""What calibration runs: pairs of something done on a device and the work that it counts as."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from costmodel.formats import CAST_PAIRS
from costmodel.formats.distributions import (
    COUNTER_BLOCK_ELEMENTS,
    DISTRIBUTIONS,
    JUMP_RAW,
    NUM_RNG_MARKS,
    SamplingClass,
)
from costmodel.param_passes import (
    allocation_work,
    cast_work,
    closing_work,
    copy_work,
    perturb_work,
    sampling_work,
    update_work,
)
from costmodel.work import SHARED_ELEMENTS, Attention, Matmul, Work
from executors.calibration.probing import (
    CACHE_BYTES,
    MEMORY_BYTES,
    Action,
    Probe,
    cold_copies,
    device_type_of,
    format_named,
    random_tensor,
)
from executors.devices import device_module
from executors.formats import TORCH_DTYPES
from executors.low_bits.exact_products import exact_sums
from executors.models.increments import Increments
from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.mersenne import can_jump, jumped
from executors.randomness.rng import generator_on
from executors.randomness.samplers import DistributionSampler, sampler_named
from executors.randomness.sequential import SequentialSampler, sample_rows
from executors.steps.arithmetic import ParamPass
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


MATMUL_SHAPES = {
    "cpu": (
        (16, 2048, 2048),
        (32, 1024, 256),
        (64, 64, 64),
        (64, 24000, 384),
        (128, 256, 128),
        (128, 1024, 256),
        (128, 8192, 256),
        (256, 768, 3072),
        (256, 3072, 768),
        (512, 128, 64),
        (1024, 3000, 64),
        (512, 512, 2048),
    ),
    "accelerator": (
        (1, 4096, 4096),
        (256, 256, 256),
        (1024, 1024, 1024),
        (2048, 2048, 8192),
        (4096, 4096, 4096),
        (8192, 8192, 4096),
    ),
}
"""(m, n, k) of products: one that mostly reads its weights, then from launch-bound to far past it; on a CPU also short
and long sums, and few and wide rows, as the logits of small models have them."""

ATTENTION_SHAPES = {
    "cpu": (
        (2, 4, 40, 64),
        (4, 4, 64, 32),
        (8, 2, 232, 32),
        (4, 6, 128, 64),
        (1, 8, 512, 64),
        (2, 4, 96, 128),
    ),
    "accelerator": ((4, 16, 512, 64), (4, 16, 2048, 128)),
}
"""(sequences, heads, tokens, head width)."""


def kernel_probes(device: torch.device, dtypes: Sequence[str]) -> Iterator[Probe]:
    """Yield probes of single kernels, copies and allocations; what goes on around them shows in whole steps."""
    for dtype in dtypes:
        yield from _matmuls(device, dtype)
        yield from _attentions(device, dtype)
        yield from _param_passes(device, dtype)
    yield from _integer_matmuls(device)
    yield from sampling_probes(device, dtypes)
    yield from _factorisations(device)
    yield from _elementwise(device)
    yield from _exponentials(device)
    yield from _dispatch(device)
    yield from _copies(device)
    yield from _contention(device, dtypes[0])
    yield from _allocations(device)


def _matmuls(device: torch.device, dtype: str) -> Iterator[Probe]:
    for m, n, k in MATMUL_SHAPES[device_type_of(device)]:
        x, out = random_tensor(device, dtype, m, k), random_tensor(device, dtype, m, n)
        # Weights are read from memory, as those of a model's next layer are; activations stay in cache.
        weights = cycle(cold_copies(lambda n=n, k=k: random_tensor(device, dtype, n, k), device))  # type: ignore[misc]

        def run(x: Tensor = x, weights: Iterator[Tensor] = weights, out: Tensor = out) -> None:
            torch.mm(x, next(weights).t(), out=out)

        work = Work(dtype=format_named(dtype), matmuls=(Matmul(m=m, n=n, k=k),), num_kernels=1)
        yield Probe(f"matmul {m}x{n}x{k} {dtype}", work, run)


INTEGER_SHAPES = ((32, 1024, 256), (64, 768, 768), (256, 768, 3072), (512, 3072, 768))
"""(m, n, k) of products of int8 matrices: as CUDA's kernel wants them, too, more than 16 rows and multiples of 8."""


def _integer_matmuls(device: torch.device) -> Iterator[Probe]:
    """Yield products as linear layers kept in int8 make them: rows of quantized values by quantized values, summed in int32."""
    generator = generator_on(device, 0)

    def qvalues(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)

    for m, n, k in INTEGER_SHAPES:
        x = qvalues(m, k)
        weights = cycle(cold_copies(lambda n=n, k=k: qvalues(n, k), device))  # type: ignore[misc]

        def run(x: Tensor = x, weights: Iterator[Tensor] = weights) -> None:
            exact_sums(x, next(weights))

        work = Work(
            matmuls=(Matmul(m=m, n=n, k=k, format="int8"),), elementwise_bytes=8 * m * n, num_kernels=2
        )
        yield Probe(f"matmul {m}x{n}x{k} int8", work, run)


def _attentions(device: torch.device, dtype: str) -> Iterator[Probe]:
    for batch, heads, tokens, width in ATTENTION_SHAPES[device_type_of(device)]:
        # As projections leave them: heads lie side by side in a token's row.
        made = (random_tensor(device, dtype, batch, tokens, heads, width) for _ in range(3))
        q, k, v = (tensor.transpose(1, 2) for tensor in made)

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        counted = Attention(num=batch * heads, query=tokens, key=tokens, head_dim=width, causal_skip=True)
        work = Work(dtype=format_named(dtype), attention=(counted,), num_kernels=1)
        yield Probe(f"attention {batch}x{heads}x{tokens}x{width} {dtype}", work, run)


def _param_passes(device: torch.device, dtype: str) -> Iterator[Probe]:
    param_pass = ParamPass()
    for location, size_bytes in (
        ("in memory", MEMORY_BYTES[device_type_of(device)] // 16),
        _locations(device)[1],
    ):
        num = size_bytes // TORCH_DTYPES[dtype].itemsize
        z = random_tensor(device, dtype, num)
        # A block's parameters come from memory, its perturbation has just been drawn.
        thetas = [random_tensor(device, dtype, num)]
        if location == "in memory":
            thetas = cold_copies(lambda num=num: random_tensor(device, dtype, num), device)  # type: ignore[misc]
        turns = cycle(thetas)

        # Back and forth, so that nothing grows however often it runs.
        signs = cycle((1, -1))

        def perturb(turns: Iterator[Tensor] = turns, z: Tensor = z, signs: Iterator[int] = signs) -> None:
            param_pass.perturb_scaled(next(turns), z, next(signs))

        def update(turns: Iterator[Tensor] = turns, z: Tensor = z, signs: Iterator[int] = signs) -> None:
            param_pass.update(next(turns), z, gradient=next(signs), learning_rate=1e-3, weight_decay=None)

        work = perturb_work(num, dtype=format_named(dtype))
        yield Probe(f"perturb {location} {dtype}", work, perturb)
        work = update_work(num, dtype=format_named(dtype), arithmetic="chunked")
        yield Probe(f"update {location} {dtype}", work, update)


def _factorisations(device: torch.device) -> Iterator[Probe]:
    """Yield what an interval's end does to the increments beside a linear layer."""
    for side, columns, kept in ((128, 66, 64), (768, 66, 64), (1024, 16, 14)):
        increments = [random_tensor(device, "float32", side, columns) for _ in range(2)]

        def run(increments: list[Tensor] = increments, kept: int = kept) -> None:
            Increments(increments[:1], increments[1:]).compact(kept)

        work = closing_work(side, side, rank=columns - kept, closed_rank=kept)
        yield Probe(f"factor {side}x{columns}", work.model_copy(update={"num_normals": 0}), run)


def _exponentials(device: torch.device) -> Iterator[Probe]:
    x = random_tensor(device, "float32", 128, MEMORY_BYTES[device_type_of(device)] >> 13)
    work = Work(
        elementwise_bytes=8 * x.numel(), num_exponentials=x.numel(), num_kernels=1, num_shared_kernels=1
    )
    yield Probe("softmax", work, lambda: functional.log_softmax(x, -1))


def _elementwise(device: torch.device) -> Iterator[Probe]:
    for location, size_bytes in _locations(device):
        x, out = (
            random_tensor(device, "float32", size_bytes // 4),
            random_tensor(device, "float32", size_bytes // 4),
        )

        def run(x: Tensor = x, out: Tensor = out) -> None:
            torch.clamp(x, min=0, out=out)

        shared = int(x.numel() >= SHARED_ELEMENTS)
        work = Work(elementwise_bytes=2 * size_bytes, num_kernels=1, num_shared_kernels=shared)
        yield Probe(f"elementwise {location}", work, run)


def _dispatch(device: torch.device) -> Iterator[Probe]:
    x, norm, bias = (random_tensor(device, "float32", 16) for _ in range(3))

    def run() -> None:
        y = functional.relu(x)
        y = functional.layer_norm(y + bias, (16,), norm, bias)
        y.add(x)

    yield Probe("dispatch", Work(num_kernels=4), run)


def _copies(device: torch.device) -> Iterator[Probe]:
    for size_bytes in (
        1 << 12,
        MEMORY_BYTES[device_type_of(device)] // 16,
        MEMORY_BYTES[device_type_of(device)],
    ):
        near, far = (
            _bytes(device, size_bytes),
            _bytes(torch.device("cpu"), size_bytes, pinned=device.type != "cpu"),
        )
        for direction, targets, sources in (("h2d", near, far), ("d2h", far, near)):
            run = _copier(cycle(targets), cycle(sources), device)
            name = f"copy {direction} {size_bytes} bytes"
            yield Probe(name, _copy_work(size_bytes, device), run, direction)  # type: ignore[arg-type]


def _bytes(device: torch.device, size_bytes: int, *, pinned: bool = False) -> list[Tensor]:
    """Return buffers to take turns with: what is copied next is cold, as the next block is."""

    def make() -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned).fill_(1)

    return cold_copies(make, device)


def _copy_work(size_bytes: int, device: torch.device) -> Work:
    """Return a copy's work; on a CPU it is no kernel of torch's, and would make those look cheap."""
    work = copy_work(size_bytes)
    return work.model_copy(update={"num_kernels": 0}) if device.type == "cpu" else work


def _copier(targets: Iterator[Tensor], sources: Iterator[Tensor], device: torch.device) -> Action:
    def by_torch() -> None:
        next(targets).copy_(next(sources), non_blocking=True)

    def by_hand() -> None:
        source = next(sources)
        ctypes.memmove(next(targets).data_ptr(), source.data_ptr(), source.numel())

    return by_hand if device.type == "cpu" else by_torch


def _contention(device: torch.device, dtype: str) -> Iterator[Probe]:
    """Yield a product and a copy, each while the other runs."""
    product = list(_matmuls(device, dtype))[-1]
    copy = list(_copies(device))[-1]
    yield replace(product, name=f"{product.name} beside a copy", concurrent=copy.run)
    yield replace(copy, name=f"{copy.name} beside a product", concurrent=product.run)


_SMALL_ALLOCATION = 1 << 14
"""Less than torch's threads share the filling of: getting them together would take longer than to allocate."""


def _allocations(device: torch.device) -> Iterator[Probe]:
    for size_bytes in (_SMALL_ALLOCATION, MEMORY_BYTES[device_type_of(device)]):

        def run(size_bytes: int = size_bytes) -> None:
            torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            if device.type != "cpu":
                device_module(device).empty_cache()

        yield Probe(f"allocate {size_bytes} bytes", allocation_work(size_bytes), run)


def _locations(device: torch.device) -> tuple[tuple[str, int], ...]:
    return ("in memory", MEMORY_BYTES[device_type_of(device)]), (
        "in cache",
        CACHE_BYTES[device_type_of(device)],
    )
