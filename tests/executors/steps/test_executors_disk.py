"""Blocks on a drive: the bits of blocks on the device, no file left, and refusals that say what to do."""

from __future__ import annotations

import errno
import os
from functools import cache

import pytest
import torch

from executors.runs.session import Session
from executors.steps import disk
from tests.support.simulated_cuda import simulated
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import DoesNotFit, MachineError, RunError
from zosim.lowering import lower
from zosim.plans import Residency
from zosim.program.instructions import Buffer, Space

BUFFER = Buffer("disk.block.0", Space.DISK, 5000, "weights", "uint8")


@cache
def plan_with(update, **residency):
    return plan_of(model_of("opt"), schedule={"update": update}, residency=residency)


def digest_of(plan, **options):
    with Session(
        plan, model_of("opt"), learning_rate=1e-2, weight_decay=0.1, checksums=True, **options
    ) as session:
        for batch in batches(3):
            session.step(batch)
        session.verify()
        return session.digest()


@pytest.mark.parametrize(
    ("update", "residency"),
    [("delayed", {"num_staging_buffers": 2}), ("immediate", {"num_disk_blocks": 1})],
)
def test_blocks_on_a_drive_find_the_bits_of_blocks_on_the_device(update, residency, tmp_path):
    plan = plan_with(update, blocks="nvme", **residency)
    assert digest_of(plan, disk_directory=tmp_path) == digest_of(plan_with(update))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("update", "residency"),
    [
        ("delayed", {"blocks": "offloaded", "num_staging_buffers": 2}),
        ("immediate", {"blocks": "nvme", "num_disk_blocks": 1}),
    ],
)
def test_blocks_that_stay_among_others_that_move_find_the_same_bits(update, residency, tmp_path):
    plan = plan_with(update, num_resident_blocks=1, **residency)
    homes = [access.buffer for access in lower(plan).final if access.buffer.split(".")[1] == "block"]
    places = {home.split(".")[0] for home in homes}
    assert places == {"device", "host"} | ({"disk"} if residency["blocks"] == "nvme" else set())
    assert digest_of(plan, disk_directory=tmp_path) == digest_of(plan_with(update))


def test_nothing_races_on_a_device_with_blocks_on_a_drive():
    found = []
    for residency in ({"blocks": "nvme", "num_disk_blocks": 2}, {"blocks": "resident"}):
        with simulated() as device:
            found.append(digest_of(plan_with("delayed", **residency), device="cuda:0"))
        assert device.findings == []
    assert found[0] == found[1]


def test_checksums_notice_what_else_writes_to_the_drive():
    with Session(plan_with("delayed", blocks="nvme"), model_of("opt"), checksums=True) as session:
        first, second = batches(2)
        session.step(first)
        session.interpreter.backend.drain()
        store = session.interpreter.store
        store.placed(session.program.final[-1]).views[0].view(-1)[0] += 1
        session.step(second)
        with pytest.raises(RunError, match=session.program.final[-1].what.param_group):
            session.verify()


def test_long_transfers_take_several_calls(monkeypatch, tmp_path):
    file = disk.DiskFile([BUFFER], tmp_path)
    mapped, held = file.tensor(BUFFER, 5000, torch.uint8), torch.arange(5000).to(torch.uint8)
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, parts, at, whole=whole: whole(fd, [parts[0][:999]], at))
    file.write(mapped, held)
    assert torch.equal(mapped, held)
    back = torch.zeros_like(held)
    file.read(back, mapped)
    file.close()
    assert torch.equal(back, held)


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_drive_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    huge = Buffer("disk.block.0", Space.DISK, 2**50, "weights", "uint8")
    with pytest.raises(DoesNotFit, match=r"blocks on the drive take 1 PiB, but .* of free space") as raised:
        disk.DiskFile([huge], tmp_path)
    assert "--disk-dir" in raised.value.hint
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(MachineError, match=f"{tmp_path}: No space left"):
        disk.DiskFile([BUFFER], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_or_read_only_is_refused(monkeypatch, tmp_path):
    with pytest.raises(MachineError, match="gone: No such file") as raised:
        disk.DiskFile([BUFFER], tmp_path / "gone")
    assert "--disk-dir" in raised.value.hint
    monkeypatch.setattr(disk.tempfile, "TemporaryFile", lambda **_: failing(errno.EROFS)())
    with pytest.raises(MachineError, match="Read-only"):
        disk.DiskFile([BUFFER], tmp_path)


def test_disk_blocks_are_of_plans_that_have_a_drive():
    with pytest.raises(Exception, match="needs blocks on a drive"):
        plan_with("delayed", blocks="offloaded", num_disk_blocks=1)
    with pytest.raises(Exception, match="exceeds the 3 blocks"):
        plan_with("delayed", blocks="nvme", num_disk_blocks=4)
    assert Residency(blocks="nvme").on_disk(2, 3) == 2
