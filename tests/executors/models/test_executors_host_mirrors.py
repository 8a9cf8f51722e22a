"""Questions about a batch on an accelerator are answered on the host, and by nothing but what the device holds."""

from __future__ import annotations

import pytest
import torch

from executors.models.host_mirrors import HostMirrors, host_mirrors
from tests.support.simulated_cuda import simulated


@pytest.fixture
def device():
    with simulated() as device:
        yield device


@pytest.mark.parametrize("last", [0, 1])
def test_what_is_computed_of_a_batch_is_known_on_the_host(device, last):
    here = torch.tensor([[1, 1, 1], [1, 1, last]])
    there = here.to("cuda", non_blocking=True)
    with HostMirrors([(there, here)]):
        positions = there.cumsum(-1) - 1
        answers = [
            bool(there.sum() == there.numel()),
            bool((torch.diff(positions, dim=-1) != 1).any()),
            (positions[:, -1] * 2).tolist(),
            last in there[:, [-1, 0]],
            bool(torch.arange(3, device="cuda")[-1] == 2),
        ]
    assert answers == [last == 1, last == 0, [4, 2 + 2 * last], True, True]
    assert not device.synchronisations


def test_a_tensor_that_was_changed_is_asked_itself(device):
    here = torch.tensor([1, 1, 0])
    there = here.to("cuda", non_blocking=True)
    with HostMirrors([(there, here)]):
        there.view(-1)[2:].fill_(1)
        assert bool(there.all())
    assert device.synchronisations.total() == 1


@pytest.mark.parametrize("made", [torch.Tensor.double, torch.nonzero, lambda t: torch.randint_like(t, 9)])
def test_numbers_that_may_differ_between_devices_are_the_devices(device, made):
    here = torch.tensor([1, 1, 0])
    there = here.to("cuda", non_blocking=True)
    with HostMirrors([(there, here)]):
        before = device.synchronisations.total()
        made(there).sum().item()
        assert device.synchronisations.total() > before


def test_tensors_that_go_are_not_kept(device):
    here = torch.ones(1000, dtype=torch.long)
    there = here.to("cuda", non_blocking=True)
    with HostMirrors([(there, here)]):
        before = torch.cuda.memory_allocated()
        total = (there + 1).sum()
        assert torch.cuda.memory_allocated() - before == 512
        assert total.item() == 2000


def test_a_cpu_needs_none():
    batch = {"input_ids": torch.ones(2)}
    with host_mirrors(torch.device("cpu"), batch, batch):
        assert len(torch.overrides._get_current_function_mode_stack()) == 0
