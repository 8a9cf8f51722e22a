"""What the codecs' constants are measured with: pairs of a stage of a codec and the work that it counts as."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from costmodel.formats.codec_time import CodecWork, decode_work, encode_work
from costmodel.formats.codecs import ENCODINGS, CodecSpec, Encoding
from costmodel.formats.symbols import SymbolStatistics
from executors.codecs.codec import codec_of, decode
from executors.codecs.encodings import BY_NAME, MessageLayout, Payload, Symbols
from executors.codecs.entropy import is_available
from executors.codecs.packing import Bytes
from executors.codecs.quantizing import dequantize, quantize
from executors.randomness.rng import generator_on

NUM_ROWS, NUM_COLUMNS = 4096, 2048
"""32 MB in float32, as a batch of activations is: above the caches, and in pages that are new at every call."""

DENSITIES = (0.02, 0.2, 0.6)
_LEAST_ROUNDS = 3

OnRound = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class CodecProbe:
    """Something to time."""

    name: str
    work: CodecWork  # what it counts as, see :data:`costmodel.formats.codec_time.CodecWork`
    run: Callable[[], object]


def stage_probes(num_rows: int | None = None) -> Iterator[CodecProbe]:
    """Yield probes of single stages, each of one or two constants, and of messages of a few bytes."""
    num_rows = num_rows or NUM_ROWS
    num = num_rows * NUM_COLUMNS
    values = _activations(0.2, num_rows)
    nearest, random = CodecSpec(4), CodecSpec(4, rounding="stochastic")
    generator = generator_on(torch.device("cpu"), 0)
    quantized = quantize(values, nearest)
    yield CodecProbe("quantize", {"quantize_s.nearest": num}, lambda: quantize(values, nearest))
    yield CodecProbe(
        "quantize at random", {"quantize_s.stochastic": num}, lambda: quantize(values, random, generator)
    )
    yield CodecProbe("dequantize", {"dequantize_s": num}, lambda: dequantize(quantized))
    for encoding in ENCODINGS:
        if encoding != "entropy" or is_available():
            yield from _encodings(encoding, num_rows)
    yield from _plain(num_rows)


def whole_probes(spec: CodecSpec, density: float) -> tuple[CodecProbe, CodecProbe]:
    """Return probes of a whole encode and of a whole decode, to hold predictions against."""
    values, codec = _activations(density, NUM_ROWS), codec_of(spec)
    generator = generator_on(torch.device("cpu"), 0)
    message = codec.encode(values, generator)
    stats = symbols_of(values, spec).statistics
    arguments = (spec, tuple(values.shape), values.dtype.itemsize, stats)
    name = f"{spec.name} {density:g} {values.dtype}"
    return (
        CodecProbe(f"encode {name}", encode_work(*arguments), lambda: codec.encode(values, generator)),
        CodecProbe(f"decode {name}", decode_work(*arguments), lambda: decode(message)),
    )


def symbols_of(values: torch.Tensor, spec: CodecSpec) -> Symbols:
    """Return the symbols that `spec`, rounding to the nearest, makes of `values`; of plain numbers, those of 8 bits."""
    requested = CodecSpec(spec.bits or 8, spec.grid, "nearest", spec.scope)
    symbols = quantize(values, requested).symbols.cpu().numpy().reshape(-1)
    return Symbols(symbols, values.shape[-1] if values.dim() else 1, requested.bits or 8)


def measure_codecs(
    *, budget_s: float = 10.0, probes: Sequence[CodecProbe] | None = None, on_round: OnRound | None = None
) -> list[tuple[CodecWork, float]]:
    """Return each probe's work and the least of its times, with one thread of torch's.

    All probes run once per round, and rounds repeat until the budget is spent; three are made whatever it is. The
    least of the times is what the machine does when nobody else uses it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chosen = list(stage_probes()) if probes is None else list(probes)
        best = [float("inf")] * len(chosen)
        began, num_rounds = time.perf_counter(), 0
        while num_rounds < _LEAST_ROUNDS or time.perf_counter() - began < budget_s:
            for i, probe in enumerate(chosen):
                begin = time.perf_counter()
                probe.run()
                best[i] = min(best[i], time.perf_counter() - begin)
            num_rounds += 1
            if on_round is not None:
                on_round(min(1.0, (time.perf_counter() - began) / budget_s))
    finally:
        torch.set_num_threads(threads)
    return [(probe.work, seconds) for probe, seconds in zip(chosen, best, strict=True)]


def _activations(density: float, num_rows: int) -> torch.Tensor:
    generator = generator_on(torch.device("cpu"), 1)
    kept = torch.rand((num_rows, NUM_COLUMNS), generator=generator) < density
    return torch.randn((num_rows, NUM_COLUMNS), generator=generator).abs_().add_(0.5).mul_(kept)


def _encodings(encoding: Encoding, num_rows: int) -> Iterator[CodecProbe]:
    for bits in (4, 8) if encoding == "entropy" else (4,):
        for density in DENSITIES:
            symbols = symbols_of(_activations(density, num_rows), CodecSpec(bits))
            stats = symbols.statistics
            layout = MessageLayout(stats.num_elements, NUM_COLUMNS, bits)
            payload = BY_NAME[encoding].encode(symbols)
            name = f"{encoding} {bits} bits {density:g}"
            encode = partial(_encode, encoding, symbols.values, bits)
            read = partial(BY_NAME[encoding].decode, payload, layout)
            yield CodecProbe(f"encode {name}", _symbol_work("encode", encoding, stats), encode)
            yield CodecProbe(f"decode {name}", _symbol_work("decode", encoding, stats), read)


def _encode(encoding: Encoding, values: Bytes, bits: int) -> Payload:
    # From the start, counting included: symbols remember what was asked of them.
    return BY_NAME[encoding].encode(Symbols(values, NUM_COLUMNS, bits))


def _symbol_work(side: str, encoding: Encoding, stats: SymbolStatistics) -> CodecWork:
    """Return what a whole message counts for its symbols alone."""
    spec = CodecSpec(stats.bits, encoding=encoding)
    of = encode_work if side == "encode" else decode_work
    whole = of(spec, (stats.num_rows, stats.num_columns), 4, stats)
    return {
        name: count for name, count in whole.items() if name.startswith((f"{side}_s.", f"{side}_kept_s."))
    }


def _plain(num_rows: int) -> Iterator[CodecProbe]:
    codec, spec = codec_of(CodecSpec()), CodecSpec()
    for values in (torch.ones(1), _activations(0.2, num_rows)):
        message, shape = codec.encode(values), tuple(values.shape)
        stats = SymbolStatistics(values.numel(), shape[-1], 8, values.numel())
        write, read = partial(codec.encode, values), partial(decode, message)
        yield CodecProbe(f"encode plain {shape}", encode_work(spec, shape, 4, stats), write)
        yield CodecProbe(f"decode plain {shape}", decode_work(spec, shape, 4, stats), read)
