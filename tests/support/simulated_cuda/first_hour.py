"""``python -m tests.support.simulated_cuda.first_hour [FOLDER]``: every part of a first hour on a device, on one that is simulated.

With a folder, what has been done stays there, and is not done again.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from costmodel import calibration
from executors.calibration import calibrating, probes, probing
from studies.first_hour.hour import contents_of, in_this_process, spend
from studies.first_hour.report import write
from studies.first_hour.setting import Content, Processes, Setting
from tests.support.simulated_cuda import simulated
from tests.support.simulated_cuda.device import Finding
from zosim import cli


class _OneProcess(Processes):
    """Does what others would do here, where the device is."""

    def run(self, words: Sequence[str]) -> tuple[int, str]:
        """Make sure that there is what would be run."""
        return int(not Path(words[-1]).exists()), words[-1]

    def zosim(self, *words: str) -> tuple[int, str]:
        try:
            cli.command()(list(words), prog_name="zosim")
        except SystemExit as exit_:
            return int(exit_.code or 0), ""
        return 0, ""

    def killed_zosim(self, log: Path, num_lines: int, *words: str) -> None:
        """Run to the line at which it would have been killed."""
        last = words.index("--steps") + 1
        self.zosim(*words[:last], str(num_lines), *words[last + 1 :])


@contextmanager
def small_probes() -> Iterator[None]:
    """Let what a device is calibrated with be as little as a CPU does at once, and the fit a first guess."""
    least_squares = calibration.least_squares
    with (
        patch.object(calibration, "least_squares", partial(least_squares, max_nfev=1)),
        patch.object(calibrating, "with_codec_constants", lambda profile: profile),  # of the host
        patch.dict(probing.MEMORY_BYTES, accelerator=1 << 16),
        patch.dict(probing.CACHE_BYTES, accelerator=1 << 12),
        patch.dict(probes.MATMUL_SHAPES, accelerator=((8, 16, 32), (32, 32, 64))),
        patch.dict(probes.ATTENTION_SHAPES, accelerator=((2, 1, 16, 8),)),
        patch.object(probes, "INTEGER_SHAPES", ((32, 16, 64), (64, 64, 64))),
    ):
        yield


def rehearse(folder: Path) -> tuple[dict[str, Content], list[Finding], Path]:
    """Return what every part found, what the device found of them, and the report."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    setting = Setting(
        hardware="a100-80gb-milan",
        folder=folder,
        is_rehearsal=True,
        calibration_s=0.1,
        processes=_OneProcess(),
    )
    with simulated() as device, small_probes():
        spend(
            setting,
            in_this_process(setting),
            stop_after_s=float("inf"),
            say=lambda text: print(text, file=sys.stderr),
        )
        contents = contents_of(setting)
    return contents, device.findings, write(contents, folder, "python3 .ci/tasks.py gpu --simulated")


def main() -> int:
    """Rehearse, print the report, and return 1 if a part failed."""
    with tempfile.TemporaryDirectory(prefix="zosim-first-hour-") as temporary:
        contents, findings, path = rehearse(Path(sys.argv[1] if sys.argv[1:] else temporary))
        print(path.read_text())
    failed = [
        name for name, content in contents.items() if "error" in content or content.get("is_right") is False
    ]
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"failed: {', '.join(failed)}" if failed else "every part ran", file=sys.stderr)
    return 1 if failed or findings else 0


if __name__ == "__main__":
    sys.exit(main())
