"""Shows a run: a line per step, a progress bar, and logs for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.progress import Progress, TaskID

from executors.runs.records import StepRecord
from topology.units import format_seconds
from zosim.console import progress, stderr

TENSORBOARD_NAME = "tensorboard"


class Reporter:
    """Prints the steps of one run as they happen; used as a context manager (`begin`: steps that are behind it already)."""

    def __init__(
        self,
        num_steps: int,
        *,
        begin: int,
        out: Path,
        tensorboard: bool,
        every: int = 1,
    ) -> None:
        self._num_steps = num_steps
        self._every = every
        self._width = len(str(num_steps))
        self._bar: Progress = progress()
        self._task: TaskID = self._bar.add_task("training", total=num_steps, completed=begin)
        self._writer = _tensorboard_writer(out / TENSORBOARD_NAME, begin) if tensorboard else None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def step(self, record: StepRecord, num_tokens: int) -> None:
        """Print one step, whose batch has `num_tokens` tokens."""
        if (record.step + 1) % self._every == 0 or record.step + 1 == self._num_steps:
            number = f"{record.step + 1:>{self._width}}/{self._num_steps}"
            gradients = " ".join(f"{g:>+11.4e}" for g in record.projected_gradients)
            stderr.print(
                f"step {number}  loss {record.loss:>9.5f}  g {gradients}  lr {record.learning_rate:>9.3e}  "
                f"{format_seconds(record.seconds):>9}  {num_tokens / record.seconds:>9,.0f} tokens/s",
                markup=False,
                soft_wrap=True,
            )
        self._bar.update(self._task, completed=record.step + 1)
        values = {
            "train/loss": record.loss,
            "train/projected_grad": record.projected_gradients[0],
            "train/learning_rate": record.learning_rate,
            "train/seconds": record.seconds,
        }
        self._scalars(record.step + 1, values)

    def evaluation(self, num_steps: int, metrics: Mapping[str, Any]) -> None:
        """Print one evaluation."""
        shown = "  ".join(
            f"{name} {value:.5g}" for name, value in metrics.items() if isinstance(value, float)
        )
        stderr.print(f"after {num_steps:>{self._width}} steps  {shown}", markup=False, soft_wrap=True)
        scalars = {f"eval/{name}": value for name, value in metrics.items() if isinstance(value, int | float)}
        self._scalars(num_steps, scalars)

    def _scalars(self, num_steps: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, num_steps)


def _tensorboard_writer(directory: Path, begin: int) -> Any:
    """Return a writer; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=begin + 1 if begin else None)
