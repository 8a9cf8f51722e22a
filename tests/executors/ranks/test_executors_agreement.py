"""What is made of the reports of several ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.runs.agreement import Disagreement, RankReport, StepInputs, refuse_disagreement
from executors.steps.checksums import Disturbance, bit_sum

GOOD = {"block.0": 1, "block.1": 2, "embed": 3}


def refused(reports, members=None):
    with pytest.raises(Disagreement) as caught:
        refuse_disagreement(reports, 7, 10, members)
    assert caught.value.num_agreed_steps == 7
    return caught.value.message.removeprefix("after 10 steps, and not yet after 7, ")


def holding(**changed):
    return RankReport(GOOD | changed)


def test_replicas_that_agree_are_let_through():
    refuse_disagreement([RankReport(GOOD)] * 4, 7, 10)


def test_who_is_outvoted_is_named_with_what_differs():
    good, bad = holding(), holding(**{"block.1": 7})
    output = refused([good, bad, good, good])
    assert output == "replicas differ: rank 1 differs from the other 3 in block.1"
    output = refused([good, bad, holding(**{"block.0": 0}), good, good])
    assert output == "replicas differ: ranks 1 and 2 differ from the other 3 in block.0, block.1"


def test_of_two_neither_is_right():
    assert refused([holding(), holding(embed=4)]) == "replicas differ: ranks 0 and 1 differ in embed"


def test_stages_are_compared_with_those_that_hold_the_same():
    first, last = RankReport({"block.0": 1}), RankReport({"block.1": 2})
    refuse_disagreement([first, last, first, last], 7, 10)
    output = refused([first, last, first, RankReport({"block.1": 3})])
    assert output == "replicas differ: ranks 1 and 3 differ in block.1"


def test_the_earliest_disturbance_is_named_with_the_owner_of_the_share():
    late = Disturbance(9, "step/block.0/update[q0]", "block.0")
    early = Disturbance(8, "step/block.1/update[q0]", "block.1", "host", 1)
    reports = [RankReport(GOOD, [late]), RankReport(GOOD, [early]), RankReport(GOOD, [early])]
    output = refused(reports, {"host": (0, 2)}.get)
    assert output == (
        "ranks 1 and 2 found other bits in block.1 (the share of rank 2) than were left there, in step 8, "
        "step/block.1/update[q0]"
    )


def noted(num_steps, *, odd_step=-1, **odd):
    inputs = StepInputs()
    for step in range(num_steps):
        numbers = {"learning_rate": 0.1, "epsilon": 1e-3} | (odd if step == odd_step else {})
        inputs.note(step, {"input_ids": torch.tensor([[step]])}, **numbers)
    return RankReport(GOOD, (), inputs.history, inputs.latest)


def test_the_first_step_with_another_input_is_named():
    good, bad = noted(9), noted(9, odd_step=4, learning_rate=0.2)
    output = refused([good, good, bad])
    assert output == "ranks did other steps: rank 2 differs from the other 2 in the learning rate of step 4"
    nan = [noted(9, odd_step=4, learning_rate=float("nan")) for _ in range(2)]
    refuse_disagreement(nan, 7, 10)


def test_inputs_of_steps_that_are_no_longer_kept_are_compared_too():
    output = refused([noted(1500), noted(1500, odd_step=3, epsilon=1.0)])
    assert output == "ranks did other steps: ranks 0 and 1 differ"


@given(st.binary(min_size=64, max_size=64), st.integers(0, 511))
def test_any_one_bit_changes_the_sum(content, bit):
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    changed = raw.clone()
    changed[bit // 8] ^= 1 << (bit % 8)
    assert bit_sum(raw).tolist() != bit_sum(changed).tolist()
    assert (bit_sum(raw, 4) != bit_sum(changed, 4)).nonzero().tolist() == [[bit // 128]]


@given(st.sampled_from([64, 4096, 1 << 14, (1 << 14) + 64, (1 << 17) + 320, 3 << 17]), st.data())
def test_two_words_that_change_places_change_the_sum(num, data):
    """Of few words, of many in chunks of rows, and of what does not fill a row."""
    words = torch.randint(-(2**63), 2**63 - 1, (num,), generator=torch.Generator().manual_seed(num))
    near = [0, 1, min(255, num - 1), min(256, num - 1), num // 2, num - 1]
    places = st.sampled_from(near) | st.integers(0, num - 1)
    first, second = data.draw(places), data.draw(places)
    changed = words.clone()
    changed[first], changed[second] = words[second], words[first]
    for shares in (1, 4):
        sums = [bit_sum(each.view(torch.uint8), shares) for each in (words, changed)]
        is_same = first == second
        assert torch.equal(*sums) == is_same
        assert (sums[0].sum() == sums[1].sum()) == is_same


def test_sums_of_a_device_are_those_of_the_host(monkeypatch):
    words = torch.randint(-(2**63), 2**63 - 1, ((1 << 19) + 64,)).view(torch.uint8)
    of_host = bit_sum(words)
    monkeypatch.setattr("executors.steps.checksums._ROWS", 1 << 30)  # as a device does: no pieces
    assert torch.equal(bit_sum(words), of_host)
