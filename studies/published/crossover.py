"""``python -m studies.published.crossover``: where MeZO overtakes fine-tuning, as its paper printed it and as zosim predicts it.

The paper gives seconds a step of both on A100 of 80 GB. Fine-tuning takes as many devices as its memory needs, sharded with FSDP.
What joined the devices is not printed: the bandwidth is learnt from the steps of 13B, and predicts those of 30B and 66B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from costmodel.estimate import estimate
from costmodel.models.configs import read_model_spec
from costmodel.models.recipes import recipe_of
from costmodel.models.training import TrainingRun
from zosim.applications.first_order.recipes import pass_works
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.rows import MeasuredRow
from zosim.applications.validation.steps import step
from zosim.console import stdout
from zosim.report import Bullets, Report, Table

HARDWARE = "a100-80gb-milan"
SEQ = 430
"""Tokens of a MultiRC example: 400 on average, padded to the longest of a batch."""
TIMES_AS_MANY_STEPS = 20_000 / 625
_BATCH, _ZEROTH_BATCH = 8, 16
_EXCHANGES, _WIDTH = 3, 4
"""A step gathers weights twice and shares gradients out once, in float32."""


@dataclass(frozen=True)
class Size:
    """A size of OPT in the paper's table 23: seconds a step, and devices, of both methods."""

    model: str
    zeroth_s: float
    zeroth_devices: int
    first_s: float
    first_devices: int

    @property
    def wall_clock(self) -> float:
        """Printed time of MeZO over that of fine-tuning."""
        return TIMES_AS_MANY_STEPS * self.zeroth_s / self.first_s

    @property
    def gpu_hours(self) -> float:
        """Printed GPU-hours of MeZO over those of fine-tuning."""
        return self.wall_clock * self.zeroth_devices / self.first_devices

    @cached_property
    def predicted_zeroth_s(self) -> float:
        """Seconds of a MeZO step; devices of a naive pipeline work one after the other, as one would."""
        cells = {
            "kind": "step",
            "hardware": HARDWARE,
            "model": self.model,
            "method": "mezo",
            "code": "published",
        }
        cells |= {"batch": str(_ZEROTH_BATCH), "seq": str(SEQ), "dtype": "float16"}
        return step(MeasuredRow(cells, self.model), _machines.of(HARDWARE)).predicted

    @cached_property
    def computing_s(self) -> float:
        """Predicted seconds that a fine-tuning step computes on each device."""
        batch = max(1, _BATCH // self.first_devices)
        run = TrainingRun(
            read_model_spec(self.model),
            recipe_of("adamw-fp32-master"),
            batch,
            SEQ,
            dtype="float16",
            attention="eager",
        )
        profile = _machines.of(HARDWARE).profile
        return sum(estimate(work, profile).seconds for work in pass_works(run))

    @property
    def exchanged_bytes(self) -> float:
        """Bytes that a device exchanges in a fine-tuning step."""
        whole = _EXCHANGES * _WIDTH * read_model_spec(self.model).num_parameters
        return whole * (self.first_devices - 1) / self.first_devices

    def predicted_first_s(self, bandwidth: float) -> float:
        """Return the seconds of a fine-tuning step over links of a bandwidth."""
        return self.computing_s + self.exchanged_bytes / bandwidth


_machines = MeasuredMachines()
SIZES = (
    Size("opt-1.3b", 0.815, 1, 0.784, 1),
    Size("opt-2.7b", 1.400, 1, 1.326, 1),
    Size("opt-13b", 2.702, 1, 13.638, 4),
    Size("opt-30b", 5.896, 1, 45.608, 8),
    Size("opt-66b", 12.438, 4, 84.098, 20),
)
TAUGHT_BY = SIZES[2]


def learnt_bandwidth() -> float:
    """Return the bytes a second that explain the printed fine-tuning step of 13B."""
    return TAUGHT_BY.exchanged_bytes / (TAUGHT_BY.first_s - TAUGHT_BY.computing_s)


def report() -> Report:
    """Return the table of printed and predicted quotients, and why they cross."""
    bandwidth = learnt_bandwidth()
    rows = []
    for size in SIZES:
        first_s = size.predicted_first_s(bandwidth)
        wall_clock = TIMES_AS_MANY_STEPS * size.predicted_zeroth_s / first_s
        gpu_hours = wall_clock * size.zeroth_devices / size.first_devices
        rows.append(
            (
                size.model,
                f"{size.zeroth_devices} / {size.first_devices}",
                f"{size.wall_clock:.3g}",
                f"{wall_clock:.3g}",
                f"{size.gpu_hours:.3g}",
                f"{gpu_hours:.3g}",
                f"{1 - size.computing_s / first_s:.0%}",
            )
        )
    columns = (
        "model", "devices", "wall-clock, printed", "predicted", "GPU-hours, printed", "predicted ", "exchanges",
    )  # fmt: skip
    remarks = Bullets(
        [
            f"MeZO over fine-tuning, with {TIMES_AS_MANY_STEPS:.0f} times as many steps",
            f"bandwidth learnt from {TAUGHT_BY.model}: {bandwidth / 1e9:.1f} GB/s for each device",
            "exchanges: their share of a predicted fine-tuning step",
        ]
    )
    return Report("", Table(columns, rows, numeric=columns[1:]), remarks)


if __name__ == "__main__":
    stdout.print(report())
