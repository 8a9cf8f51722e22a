"""Draws of neighbours at once: as many calls as there are gaps, and the bits of one call for each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from executors.formats import TORCH_DTYPES
from executors.models.parameters import NamedTensor
from executors.randomness.rng import generator_on
from executors.randomness.samplers import SAMPLERS
from executors.steps.buffers import ParamSection

CPU = torch.device("cpu")
FORMATS = ("float32", "bfloat16", "float64")


def subgroup_of(numels: list[int], alignment_bytes: int = 64) -> ParamSection:
    tensors = [
        NamedTensor(str(number), nn.Parameter(torch.zeros(numel)), torch.Size([numel]), number, True)
        for number, numel in enumerate(numels)
    ]
    return ParamSection("group", tuple(tensors), ("block.0",), alignment_bytes)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@settings(max_examples=40)
@given(
    numels=st.lists(st.sampled_from([1, 7, 16, 31, 32, 64, 128, 130, 192, 1000]), min_size=1, max_size=7),
    alignment_bytes=st.sampled_from([64, 256]),
)
def test_stretches_have_the_bits_of_tensors_drawn_one_by_one(dtype, sampler, numels, alignment_bytes):
    part = subgroup_of(numels, alignment_bytes)
    *starts, end = part.offsets(dtype)
    one_by_one, at_once = (torch.zeros(end, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    generators = [generator_on(CPU, 5) for _ in range(2)]
    for start, numel in zip(starts, numels, strict=True):
        sampler.fill(one_by_one[start : start + numel], generators[0])
    spans = part.spans(dtype, sampler.distribution.granularity)
    for begin, length in spans:
        sampler.fill(at_once[begin : begin + length], generators[1])
    assert torch.equal(at_once, one_by_one)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
    assert sum(length for _, length in spans) == sum(numels)


def test_tensors_of_even_sizes_are_one_stretch_and_gaps_part_others():
    assert subgroup_of([64, 128, 64]).spans("float32", 16) == [(0, 256)]
    assert subgroup_of([64, 20, 64]).spans("float32", 16) == [(0, 84), (96, 64)]
    assert subgroup_of([64, 8, 64]).spans("float32", 16) == [(0, 64), (64, 8), (80, 64)]
    every = subgroup_of([64, 128]).spans("float32", 1 << 62)
    assert every == [(0, 64), (64, 128)]
