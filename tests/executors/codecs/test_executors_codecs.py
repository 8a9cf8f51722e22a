from __future__ import annotations

import itertools
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costmodel.formats.codecs import (
    ENCODINGS,
    CodecSpec,
    codec_spec,
    message_bytes,
    overhead_bytes,
    payload_bytes,
    run_length_bytes,
)
from executors.codecs import (
    Plain,
    codec_of,
    decode,
    decode_quantized,
    dequantize,
    encode_quantized,
    encoding_of,
    quantize,
)
from executors.codecs.container import Header, assemble
from executors.codecs.encodings import BY_NAME, Symbols
from executors.codecs.packing import pack, pack_wide, unpack, unpack_wide
from topology.errors import CodecError

GRIDS, ROUNDINGS, SCOPES = (
    ("symmetric", "affine-zero", "affine"),
    ("nearest", "stochastic"),
    ("tensor", "token", "channel"),
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SPECS = [
    CodecSpec(bits, grid, rounding, scope)
    for bits, grid, rounding, scope in itertools.product((1, 2, 4, 8), GRIDS, ROUNDINGS, SCOPES)
]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def activations(*shape, density=0.2, seed=0):
    """Positive where they are not zero, as after a ReLU."""
    generator = seeded(seed)
    kept = torch.rand(shape, generator=generator) < density
    return torch.randn(shape, generator=generator).abs() * kept


specs = st.builds(
    CodecSpec, st.integers(1, 8), st.sampled_from(GRIDS), st.sampled_from(ROUNDINGS), st.sampled_from(SCOPES)
)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(shapes, specs, st.sampled_from((*ENCODINGS, "smallest")), st.sampled_from(DTYPES), st.integers(0, 9))
def test_what_is_decoded_is_what_was_quantized_in_every_encoding(shape, spec, encoding, dtype, seed):
    spec = CodecSpec(spec.bits, spec.grid, spec.rounding, spec.scope, encoding)
    tensor = activations(*shape, density=seed / 9, seed=seed).to(dtype)
    quantized = quantize(tensor, spec, seeded(1))
    message = codec_of(spec).encode(tensor, seeded(1))
    decoded = decode(message, shape=shape)
    assert (decoded.dtype, decoded.shape) == (dtype, tensor.shape)
    assert torch.equal(decoded, dequantize(quantized))
    assert len(message) <= codec_of(spec).bytes_max(shape, dtype)


@given(st.integers(1, 8), st.integers(0, 300), st.integers(0, 5))
def test_packing_takes_exactly_the_bits(width, num, seed):
    symbols = np.random.default_rng(seed).integers(0, 2**width, num).astype(np.uint8)
    packed = pack(symbols, width)
    assert len(packed) == -(-num * width // 8)
    as_number = int.from_bytes(packed.tobytes(), "little")  # another way to read the same bits
    assert [as_number >> width * i & (1 << width) - 1 for i in range(num)] == symbols.tolist()
    assert (unpack(packed, num, width) == symbols).all()


@given(st.integers(0, 40), st.integers(0, 60), st.integers(0, 5))
def test_wide_numbers_survive_packing(width, num, seed):
    numbers = np.random.default_rng(seed).integers(0, 2**width, num)
    packed = pack_wide(numbers, width)
    assert len(packed) == -(-num * width // 8)
    assert (unpack_wide(packed, num, width) == numbers).all()


@given(shapes, st.integers(1, 8), st.integers(0, 9))
def test_sizes_are_as_predicted(shape, bits, seed):
    tensor = activations(*shape, density=seed / 9, seed=seed)
    quantized = quantize(tensor, CodecSpec(bits, "affine-zero"))
    symbols = Symbols(quantized.symbols.numpy().reshape(-1), shape[-1] if shape else 1, bits)
    for encoding in ("dense", "index", "bitmap", "entropy"):
        spec = CodecSpec(bits, "affine-zero", encoding=encoding)
        predicted = message_bytes(spec, shape, 4, symbols.statistics)
        slack = 8 if encoding == "entropy" else 0  # the coder's last state
        assert predicted <= len(codec_of(spec).encode(tensor)) <= predicted + slack
    runs = BY_NAME["run-length"]
    payload = runs.encode(symbols)
    assert len(payload.body) == runs.size_bytes(symbols)
    assert len(payload.body) == run_length_bytes(payload.num_items, bits, payload.gap_bits)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_run_lengths_of_independent_zeros_are_as_expected(density):
    tensor = activations(512, 512, density=density)
    symbols = Symbols(quantize(tensor, CodecSpec(4)).symbols.numpy().reshape(-1), 512, 4)
    counted = BY_NAME["run-length"].size_bytes(symbols)
    # The number of tokens is a sum over k runs: 4 standard errors of k = density·2^18 at least, and a byte or two.
    assert payload_bytes("run-length", symbols.statistics) == pytest.approx(
        counted, rel=4 / (density * 2**18) ** 0.5
    )


@given(shapes, st.integers(1, 8), st.integers(0, 9), st.booleans())
def test_the_smallest_is_the_smallest(shape, bits, seed, clustered):
    tensor = activations(*shape, density=seed / 9, seed=seed)
    if clustered and tensor.dim():
        tensor[: len(tensor) // 2] = 0
    sizes = {
        encoding: len(codec_of(CodecSpec(bits, "affine-zero", encoding=encoding)).encode(tensor))
        for encoding in ENCODINGS
    }
    assert len(codec_of(CodecSpec(bits, "affine-zero")).encode(tensor)) == min(sizes.values())


def test_most_encodings_are_the_smallest_somewhere():
    """All but value and index: wherever few symbols are kept, runs say where in fewer bits."""
    cases = {
        "dense": torch.arange(16.0).repeat(4),  # nothing to gain, and a table costs
        "entropy": activations(64, 512),
        "run-length": torch.zeros(40000).index_fill_(0, torch.tensor([0, 20000]), 1.0),
        "bitmap": torch.tensor([1.0, 0, 0, 0, 2, 0, 0, 3, 0, 0, 0, 0, 0, 4, 0, 0]),
    }
    for name, case in cases.items():
        assert encoding_of(codec_of(CodecSpec(4, "affine-zero")).encode(case)) == name


@pytest.mark.parametrize(("bits", "density"), list(itertools.product((1, 2, 4, 8), (0.003, 0.05, 0.3, 1.0))))
def test_the_smallest_is_within_15_percent_of_the_entropy(bits, density):
    tensor = activations(128, 1024, density=density)
    quantized = quantize(tensor, CodecSpec(bits, "affine-zero"))
    message = encode_quantized(quantized)
    stats = Symbols(quantized.symbols.numpy().reshape(-1), 1024, bits).statistics
    entropy_bytes = stats.entropy_bits * stats.num_elements / 8
    # Besides the header and the table of 2^b frequencies, which a real activation makes small.
    fixed = overhead_bytes(quantized.spec, quantized.shape, 4) + 2**bits / 8 + 2 ** (bits + 1) + 8
    assert len(message) <= 1.01 * entropy_bytes + fixed


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_values_come_back_within_a_step_and_zero_stays_zero(spec):
    tensor = torch.randn((12, 40), generator=seeded())
    if spec.grid == "affine-zero" and spec.bits == 1:
        tensor.abs_()
    tensor[3], tensor[:, 5] = 0, 0
    quantized = quantize(tensor, spec, seeded(1))
    step = (2 if spec.bits == 1 and spec.grid == "symmetric" else 1) * quantized.parameters[
        -1 if spec.grid == "affine" else 0
    ]
    off = (dequantize(quantized) - tensor).abs()
    most = step / 2 if spec.rounding == "nearest" else step
    signs = spec.bits == 1 and spec.grid == "symmetric" and spec.rounding == "nearest"
    if not signs:  # two values at the mean magnitude do not reach the largest
        assert bool((off <= most * 1.0001).all())
    if spec.grid == "affine-zero" or (spec.grid == "symmetric" and spec.bits > 1):
        assert bool((dequantize(quantized)[tensor == 0] == 0).all())


def test_a_grid_without_zero_moves_zeros_but_keeps_them_one_symbol():
    tensor = activations(32, 64) - 0.17 * (
        activations(32, 64, seed=1) > 0
    )  # zeros, and a few below, as after GELU
    quantized = quantize(tensor, codec_spec("q4:affine"))
    came_back = dequantize(quantized)[tensor == 0]
    assert (came_back != 0).all()
    assert came_back.unique().numel() == 1
    stats = Symbols(quantized.symbols.numpy().reshape(-1), 64, 4).statistics
    assert stats.density < 0.5


def test_symbols_of_zeros_are_zero_whatever_their_group():
    tensor = activations(20, 30) * torch.linspace(-1, 1, 20)[:, None]
    quantized = quantize(tensor, codec_spec("q4:affine-zero:token"))
    assert quantized.parameters[1].unique().numel() > 1
    assert bool((quantized.symbols[tensor == 0] == 0).all())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_extreme_tensors_come_back_finite(spec):
    for dtype in DTYPES:
        largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
        cases = [
            torch.zeros(3, 4),
            torch.ones(()),
            torch.full((2, 3), 2.5),
            torch.empty(0, 4),
            torch.empty(4, 0),
            torch.tensor([[1e-3, 1e4, 0.0]]),
            torch.tensor([[tiny / 8, 0.0, tiny]], dtype=torch.float64),
            torch.tensor([[0.0, largest / 4, largest / 2]], dtype=torch.float64),
        ]
        for case in cases:
            tensor = case.to(dtype)
            decoded = decode(codec_of(spec).encode(tensor, seeded()))
            assert bool(torch.isfinite(decoded).all())
            assert decoded.shape == tensor.shape
            if not bool(tensor.any()):
                assert torch.equal(decoded, tensor)


def test_the_largest_numbers_stay_finite_where_zero_is_on_the_grid():
    largest = torch.finfo(torch.float32).max
    tensor = torch.tensor([-largest / 3, 0.0, largest])
    for name in ("q4", "q4:affine-zero", "q2:affine-zero", "q3:affine-zero:token"):
        assert bool(torch.isfinite(decode(codec_of(codec_spec(name)).encode(tensor))).all())
    with pytest.raises(CodecError, match="too far apart"):
        codec_of(codec_spec("q4:affine")).encode(tensor)


def test_plain_messages_carry_every_bit_pattern():
    for dtype in DTYPES:
        tensor = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-7, -3.5]).to(dtype).reshape(2, 3).t()
        message = Plain().encode(tensor)
        assert len(message) == Plain().bytes_max(tensor.shape, dtype) == 56 + 6 * dtype.itemsize
        assert decode(message).contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))


def test_values_without_a_code_are_refused_by_name():
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.ones(3, 4)
        tensor[1, 2] = bad
        for spec in SPECS:
            with pytest.raises(CodecError, match="1 of 12 values are infinite or NaN"):
                codec_of(spec).encode(tensor, seeded())
    with pytest.raises(CodecError, match="both signs"):
        codec_of(codec_spec("q1:affine-zero")).encode(torch.tensor([-1.0, 1.0]))
    with pytest.raises(CodecError, match="rounds at random"):
        codec_of(codec_spec("q4:stochastic")).encode(torch.ones(2))
    with pytest.raises(CodecError, match="int64"):
        codec_of(codec_spec("q4")).encode(torch.ones(2, dtype=torch.int64))


def test_stochastic_messages_depend_on_the_generator_alone():
    codec, tensor = codec_of(codec_spec("q4:stochastic")), torch.randn((300, 600), generator=seeded())
    assert torch.equal(codec.encode(tensor, seeded(1)), codec.encode(tensor, seeded(1)))
    assert not torch.equal(codec.encode(tensor, seeded(1)), codec.encode(tensor, seeded(2)))


def messages():
    tensor = activations(6, 50)
    for encoding in ENCODINGS:
        yield encoding, codec_of(CodecSpec(4, "affine-zero", scope="token", encoding=encoding)).encode(tensor)
    yield "none", Plain().encode(tensor)


@pytest.mark.parametrize(
    ("name", "message"), list(messages()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_message_that_is_cut_off_or_damaged_is_refused(name, message):
    for length in range(len(message)):
        with pytest.raises(CodecError, match="truncated"):
            decode(message[:length])
    for place in range(4, len(message)):
        damaged = message.clone()
        damaged[place] ^= 16
        with pytest.raises(CodecError, match=r"damaged|version|truncated"):
            decode(damaged)
    longer = torch.cat([message, torch.full((9,), 255, dtype=torch.uint8)])
    assert torch.equal(decode(longer), decode(message))
    assert torch.equal(decode(bytes(message.numpy())), decode(message))


def resealed(message, offset, data):
    """Return a message with other bytes at `offset` and a checksum that is right for them."""
    changed = bytearray(message.numpy().tobytes())
    changed[offset : offset + len(data)] = data
    checksum = zlib.crc32(changed[36:], zlib.crc32(changed[:32]))
    changed[32:36] = struct.pack("<I", checksum)
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "message"), list(messages()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_message_that_contradicts_itself_is_refused_even_with_a_right_checksum(name, message):
    # Each: dtype, bits, grid, scope, encoding, number of dimensions, items, first dimension.
    for offset, data in (
        (5, b"\x09"), (6, b"\x09"), (7, b"\x05"), (8, b"\x07"), (9, b"\x0c"), (12, b"\x40"),
        (24, b"\xff" * 8), (40, struct.pack("<Q", 7)), (40, struct.pack("<Q", 2**40)), (48, struct.pack("<Q", 1)),
    ):  # fmt: skip
        if (name, offset) in {("none", 24), ("dense", 24)}:
            continue  # says the same as the shape, and is not read
        with pytest.raises(CodecError):
            decode(resealed(message, offset, data))


@given(st.data())
def test_no_bytes_at_all_hang_or_crash_the_decoder(data):
    _, message = data.draw(st.sampled_from(list(messages())))
    offset = data.draw(st.integers(4, len(message) - 1))
    changed = (
        resealed(message, offset, data.draw(st.binary(min_size=1, max_size=4)))
        if offset < 32 or offset >= 36
        else message
    )
    try:
        decoded = decode(changed[: len(message)])
    except CodecError:
        return
    assert decoded.dtype in DTYPES


def test_other_shapes_and_kinds_of_messages_are_refused():
    message = codec_of(codec_spec("q4")).encode(activations(6, 50))
    with pytest.raises(CodecError, match=r"shape \(6, 50\), but \(3, 100\) was expected"):
        decode(message, shape=(3, 100))
    with pytest.raises(CodecError, match="begins with"):
        decode(b"GIF89a" + bytes(60))
    with pytest.raises(CodecError, match="uint8"):
        decode(torch.zeros(60))
    with pytest.raises(CodecError, match="no symbols"):
        decode_quantized(Plain().encode(torch.ones(2)))


def test_a_message_has_the_documented_bytes():
    message = codec_of(codec_spec("q4:dense")).encode(torch.tensor([[7.0, -7.0, 0.0]]))
    expected = (
        b"ZOCD" + bytes([1, 1, 4, 0, 0, 1, 0, 0, 2, 0, 0, 0])
        + struct.pack("<QQ", 62, 3) + message[32:36].numpy().tobytes() + bytes(4)
        + struct.pack("<QQ", 1, 3)  # shape
        + struct.pack("<f", 1.0)  # step
        + bytes([0x97, 0x00])  # 7, -7 as 9, and 0, four bits each from the lowest
    )  # fmt: skip
    assert bytes(message.numpy()) == expected


def test_without_the_entropy_coder_messages_are_made_otherwise_and_refused_by_name(monkeypatch):
    tensor = activations(64, 512)
    encoded = codec_of(codec_spec("q4:entropy")).encode(tensor)
    monkeypatch.setattr("executors.codecs.encodings.is_available", lambda: False)
    monkeypatch.setitem(__import__("sys").modules, "constriction", None)
    assert encoding_of(codec_of(codec_spec("q4")).encode(tensor)) != "entropy"
    for action in (lambda: decode(encoded), lambda: codec_of(codec_spec("q4:entropy")).encode(tensor)):
        with pytest.raises(CodecError, match="constriction"):
            action()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (1, 0, 4)])
@pytest.mark.parametrize("spec", [CodecSpec(), CodecSpec(4)], ids=["plain", "q4"])
def test_tensors_without_elements_go_and_come(shape, spec):
    message = codec_of(spec).encode(torch.empty(shape))
    assert decode(message).shape == shape
    assert decode(message, shape=shape).dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 2**63), (2**63, 0), (2**32, 0, 2**32), (2**64 - 1,)])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_message_of_a_shape_that_no_tensor_has_is_refused(shape, bits):
    message = torch.from_numpy(assemble(Header(torch.float32, shape, bits, 0, 0, int(bits > 0)), []))
    with pytest.raises(CodecError, match="impossible tensor shape"):
        decode(message)
