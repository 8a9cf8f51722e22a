"""Jumps of torch's CPU generator: its state many words ahead, without making the words between.

The Mersenne Twister is linear over GF(2), so every bit of its output obeys one recurrence, whose characteristic
polynomial ``φ`` has degree 19937. With ``p = x^n mod φ``, the word ``n`` ahead of any word ``w[0]`` is the exclusive or
of those ``w[i]`` for which the coefficient ``p_i`` is 1; and 624 words in a row are a state. Tempering is linear, too, so
all this holds for the words as torch gives them out.

.. [1] Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number
   Generators", INFORMS Journal on Computing 20(3), 2008.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Generator, Tensor

_DEGREE = 19937
_STATE_WORDS = 624
_PATTERN_BITS = 5
"""Coefficients that are looked up together."""

_LOOKUPS = 1024
"""Words are combined for so many lookups at a time, which stay in cache."""

_LEFT, _NEXT, _WORDS = 8, 16, 24
"""Bytes of a generator's state at which stand: words left before the next are made, the next word, and the words."""

_Words = NDArray[np.uint32]


def jumped(state: Tensor, num_raw: int) -> Tensor:
    """Return the state of a CPU generator after `num_raw` more 32-bit raw outputs.

    - `state`: as :meth:`torch.Generator.get_state` returns it; normals that a generator holds back stay with it.
    - `num_raw`: at least 1.
    """
    ahead = state.clone()
    content = ahead.numpy()
    content[_LEFT : _LEFT + 4].view(np.int32)[0] = _STATE_WORDS
    content[_NEXT : _NEXT + 8].view(np.uint64)[0] = 1
    # The word before the next one, too: the words of a state end before those that are made of them.
    content[_WORDS : _WORDS + 8 * _STATE_WORDS].view(np.uint64)[:] = _untempered(
        _raw_ahead(state, num_raw - 1)
    )
    return ahead


@cache
def can_jump() -> bool:
    """Whether jumps of this build's generators lead to where drawing normals does, a word for each."""
    sampled, ahead = (Generator().manual_seed(20_03) for _ in range(2))
    _next_raw(sampled, 1001)
    state = sampled.get_state()
    normals = torch.empty(40_000).normal_(generator=sampled)
    try:
        ahead.set_state(jumped(state, normals.numel()))
    except RuntimeError:
        return False
    return bool((_next_raw(sampled, 1000) == _next_raw(ahead, 1000)).all())


def _raw_ahead(state: Tensor, num_raw: int) -> _Words:
    """Return the 624 words that come `num_raw` later, tempered."""
    generator = Generator()
    generator.set_state(state)
    raw = _next_raw(generator, _DEGREE + _STATE_WORDS + _PATTERN_BITS)
    table = _combinations(raw)
    windows = as_strided(
        table, (len(table), table.shape[1] - _STATE_WORDS, _STATE_WORDS), (*table.strides, table.strides[1])
    )
    patterns = _patterns(num_raw)
    offsets = np.arange(len(patterns)) * _PATTERN_BITS
    raw = np.zeros(_STATE_WORDS, np.uint32)
    for begin in range(0, len(patterns), _LOOKUPS):
        part = slice(begin, begin + _LOOKUPS)
        raw ^= np.bitwise_xor.reduce(windows[patterns[part], offsets[part]], axis=0)
    return raw


def _next_raw(generator: Generator, num: int) -> _Words:
    """Return the next words as given out; a 64-bit number is two, the first on top."""
    numbers = torch.empty(-(-num // 2), dtype=torch.int64)
    numbers.random_(-(2**63), None, generator=generator)
    pairs = numbers.numpy().view(np.uint32).reshape(-1, 2)
    return pairs[:, ::-1].ravel()[:num]


def _combinations(raw: _Words) -> _Words:
    """Return a row for each pattern of coefficients: the words that it combines, from every word on."""
    length = raw.size - _PATTERN_BITS
    table = np.zeros((1 << _PATTERN_BITS, length), np.uint32)
    for bit in range(_PATTERN_BITS):
        half = 1 << bit
        np.bitwise_xor(table[:half], raw[bit : bit + length], out=table[half : 2 * half])
    return table


def _untempered(tempered: _Words) -> _Words:
    """Return the words of a state that are given out as `tempered`."""
    y = tempered ^ (tempered >> np.uint32(18))
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    before = y.copy()
    for _ in range(4):  # each round finds seven more bits, from below
        y = before ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    before = y.copy()
    for _ in range(2):  # each round finds eleven more bits, from above
        y = before ^ (y >> np.uint32(11))
    return y


# -- polynomials over GF(2): integers whose bits are the coefficients ----------------------------------------------


@lru_cache(maxsize=256)
def _patterns(num_raw: int) -> NDArray[np.intp]:
    """Return the coefficients of ``x^num_raw mod φ``, so many at a time as one number."""
    remainder = 1
    for bit in f"{num_raw:b}":
        remainder = _reduced(_squared(remainder) << int(bit))
    num = -(-_DEGREE // _PATTERN_BITS)
    bits = np.zeros(num * _PATTERN_BITS, np.intp)
    bits[:_DEGREE] = _bits_of(remainder, _DEGREE)
    patterns: NDArray[np.intp] = bits.reshape(num, -1) @ (1 << np.arange(_PATTERN_BITS))
    return patterns


def _squared(polynomial: int) -> int:
    bits = _bits_of(polynomial, max(1, polynomial.bit_length()))
    spread = np.zeros(2 * bits.size, np.uint8)
    spread[::2] = bits
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _bits_of(polynomial: int, num: int) -> NDArray[np.uint8]:
    content = np.frombuffer(polynomial.to_bytes(-(-num // 8), "little"), np.uint8)
    return np.unpackbits(content, bitorder="little")[:num]


def _reduced(polynomial: int) -> int:
    """Return the remainder of a division by ``φ``."""
    mask = (1 << _DEGREE) - 1
    while high := polynomial >> _DEGREE:
        polynomial &= mask
        for term in _characteristic_terms():
            polynomial ^= high << term
    return polynomial


@cache
def _characteristic_terms() -> tuple[int, ...]:
    """Return the powers in ``φ`` but for the highest: those of the shortest recurrence of an output bit.

    Berlekamp and Massey's algorithm; ``φ`` is irreducible, so any bit will do, and any seed.
    """
    bits = (_next_raw(Generator().manual_seed(1), 2 * _DEGREE) >> np.uint32(31)).tolist()
    current, before = 1, 1
    length, since, seen = 0, 1, 0
    for count, bit in enumerate(bits):
        seen = seen << 1 | bit
        if not (current & seen).bit_count() % 2:
            since += 1
        elif 2 * length > count:
            current ^= before << since
            since += 1
        else:
            current, before = current ^ before << since, current
            length, since = count + 1 - length, 1
    # A recurrence counts back from the newest word.
    return tuple(length - power for power in range(length, 0, -1) if current >> power & 1)
