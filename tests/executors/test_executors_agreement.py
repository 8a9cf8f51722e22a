from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.ranks.agreement import bit_sum, refuse_disagreement
from topology.errors import RunError

NAMES = ["block.0", "block.1", "embed"]


def refused(found):
    with pytest.raises(RunError) as caught:
        refuse_disagreement(found, NAMES, 10)
    return caught.value.message


def test_replicas_that_agree_are_let_through():
    refuse_disagreement([(1, 2, 3)] * 4, NAMES, 10)


def test_who_is_outvoted_is_named_with_what_differs():
    good, bad = (1, 2, 3), (1, 7, 3)
    said = refused([good, bad, good, good])
    assert said == "after 10 steps replicas differ: rank 1 differs from the other 3 in block.1"
    said = refused([good, bad, (0, 2, 3), good, good])
    assert said == "after 10 steps replicas differ: ranks 1 and 2 differ from the other 3 in block.0, block.1"


def test_of_two_neither_is_right():
    assert refused([(1, 2, 3), (1, 2, 4)]).endswith("ranks 0 and 1 differ in embed")


@given(st.binary(min_size=64, max_size=64), st.integers(0, 511))
def test_any_one_bit_changes_the_sum(content, bit):
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    changed = raw.clone()
    changed[bit // 8] ^= 1 << (bit % 8)
    assert bit_sum(raw) != bit_sum(changed)
