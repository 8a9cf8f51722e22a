"""``python -m tests.support.simulated_cuda.first_hour``: every part of a first hour on a device, on one that is simulated.

With ``--folder``, what has been done stays there, and is not done again; with ``--stop-after-s``, no part begins after so long.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from costmodel.rates import calibration
from executors.calibration import calibrating, probes, probing
from studies.first_hour.hour import contents_of, in_this_process, spend
from studies.first_hour.parts import parts_of
from studies.first_hour.report import write
from studies.first_hour.setting import Content, Processes, Setting
from studies.kept_results import MORE_TO_DO
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
    with (
        patch.object(calibration, "most_probable", partial(calibration.most_probable, max_nfev=1)),
        patch.object(calibrating, "with_codec_constants", lambda profile: profile),  # of the host
        patch.dict(probing.MEMORY_BYTES, accelerator=1 << 16),
        patch.dict(probing.CACHE_BYTES, accelerator=1 << 12),
        patch.dict(probes.MATMUL_SHAPES, accelerator=((8, 16, 32), (32, 32, 64))),
        patch.dict(probes.ATTENTION_SHAPES, accelerator=((2, 1, 16, 8),)),
        patch.object(probes, "INTEGER_SHAPES", ((32, 16, 64), (64, 64, 64))),
    ):
        yield


def rehearse(
    folder: Path, stop_after_s: float = float("inf")
) -> tuple[dict[str, Content], list[Finding], Path, bool]:
    """Return what every part found, what the device found of them, the report, and whether that is all."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    setting = Setting(
        hardware="a100-80gb-milan",
        folder=folder,
        is_rehearsal=True,
        calibration_s=0.1,
        processes=_OneProcess(),
    )

    def written() -> Path:
        todo = [part.title for part in parts_of(setting)]
        return write(contents_of(setting), folder, "python3 .ci/tasks.py gpu --simulated", todo=todo)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        written()

    with simulated() as device, small_probes():
        is_done = spend(setting, in_this_process(setting), stop_after_s=stop_after_s, say=say)
    return contents_of(setting), device.findings, written(), is_done


def main() -> int:
    """Rehearse, print the report, and return 1 if a part failed, 75 if there is more to do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stop-after-s", type=float, default=float("inf"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zosim-first-hour-") as temporary:
        contents, findings, path, is_done = rehearse(given.folder or Path(temporary), given.stop_after_s)
        print(path.read_text())
    failed = [
        name for name, content in contents.items() if "error" in content or content.get("is_right") is False
    ]
    for finding in findings:
        print(finding, file=sys.stderr)
    if not is_done:
        print("there is more to do: run the same command again", file=sys.stderr)
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed", file=sys.stderr)
    return 1 if failed or findings else 0 if is_done else MORE_TO_DO


if __name__ == "__main__":
    sys.exit(main())
