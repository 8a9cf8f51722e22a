"""Measured runs whose weights come from drives."""

from __future__ import annotations

from collections import defaultdict

import pytest

from topology import load_preset
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import MeasuredRow
from zosim.hardware.machine import Drives

ROW = {
    "kind": "nvme_streamed", "hardware": "rtx4090-1x-nvme", "code": "deepspeed-zero-inference", "model": "opt-13b",
    "dtype": "float16", "recipe": "weights-on-nvme", "batch": "4", "seq": "128", "generated_tokens": "8",
    "quantity": "generated_tokens_per_s",
}  # fmt: skip
BYTES = 2 * 12.85e9


def predicted(**cells):
    return outcome(MeasuredRow(defaultdict(str, ROW | cells), "row"), MeasuredMachines())


def test_each_pass_waits_for_all_weights_from_the_drive():
    slow, by_topology = predicted(storage_read="1e9"), predicted()
    drives = Drives.of(load_preset("rtx4090-1x-nvme"), "gpu0")
    assert slow.predicted == pytest.approx(4 / (BYTES / 0.92e9), rel=0.02)
    # The host's hooks, which do not wait for the drive, weigh more beside a faster one.
    assert by_topology.predicted == pytest.approx(drives.read_bytes_per_s / 1e9 * slow.predicted, rel=0.05)
    assert slow.low < slow.predicted < slow.high


def test_weights_in_host_memory_wait_for_the_bus_alone():
    assert predicted(recipe="weights-on-host").predicted > 2 * predicted().predicted


def test_states_of_training_are_read_and_written_beside_the_weights():
    step = {"recipe": "zero-infinity-nvme", "quantity": "tokens_per_s", "storage_read": "1e9"}
    drives = Drives.of(load_preset("rtx4090-1x-nvme"), "gpu0")
    times = drives.read_bytes_per_s / drives.write_bytes_per_s
    moved_s = BYTES / 2 * (2 * 2 + 16 + 18 * times) / 0.92e9
    assert predicted(**step).predicted == pytest.approx(4 * 128 / moved_s, rel=0.05)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"hardware": "rtx4090-2x"}, "the hardware has no drive"),
        ({"quantity": "storage_read"}, "must be one of generated_tokens_per_s"),
        ({"recipe": "mezo"}, "recipe 'mezo' must be one of"),
    ],
)
def test_what_is_not_predicted_gets_a_reason(cells, why):
    assert why in predicted(**cells)
