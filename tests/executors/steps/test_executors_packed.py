"""Plain numbers that go from device to device, tried on a CPU as if it were a GPU."""

from __future__ import annotations

import pytest
import torch

from executors.ranks.messages import Packed, pack, stays_on, unpack
from tests.support.staged import Case, assert_equal
from topology.errors import CodecError


def test_only_gpus_reach_each_other_without_the_host() -> None:
    assert stays_on(torch.device("cuda:1"))
    assert not stays_on(torch.device("cpu"))


def test_packed_tensors_come_out_as_they_went_in() -> None:
    tensors = [torch.randn(2, 3, 5).bfloat16(), torch.randn(2, 3, 7), torch.randn(1, 3, 5).bfloat16()]
    tensors.append(torch.full((1, 3, 7), float("nan")))
    packed = pack(tensors)
    found = unpack(packed, [tuple(tensor.shape) for tensor in tensors])
    for sent, got in zip(tensors, found, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))
        # No copy is made.
        assert got.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("change", [-64, 64])
def test_a_message_of_another_length_is_refused(change: int) -> None:
    packed = pack([torch.ones(4, 9, 16)])
    data = torch.zeros(packed.num_bytes + change, dtype=torch.uint8)
    with pytest.raises(CodecError, match="bytes arrived for tensors of"):
        unpack(Packed(data, packed.formats), [(4, 9, 16)])


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    "case",
    [
        Case(("block.1",)),
        Case(("block.0.mlp", "block.1"), accumulate=2),
        Case(("block.1.mlp",), mesh=(("data", 2),)),
    ],
    ids=["between", "inside-in-parts", "data"],
)
def test_stages_whose_numbers_stay_on_devices_are_one_device(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setattr("executors.steps.ops.codec.stays_on", lambda _device: True)
    assert_equal(case)
