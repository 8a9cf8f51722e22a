"""On what the hour is spent, and how its parts start other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from costmodel.rates.profile import Profile
from topology.errors import PlanError
from topology.graph import Topology
from topology.hardware import resolve
from zosim.hardware.profiles import profile_for

Content = dict[str, Any]
"""What a part leaves, as JSON has it."""


class Processes:
    """Starts programs of this environment."""

    def run(self, words: Sequence[str]) -> tuple[int, str]:
        """Run a program to its end, and return its exit status and the last lines that it printed."""
        done = subprocess.run(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, "\n".join(done.stdout.splitlines()[-15:])

    def zosim(self, *words: str) -> tuple[int, str]:
        """Run the command."""
        return self.run(["-c", "from zosim.cli import main; main()", *words])

    def killed_zosim(self, log: Path, num_lines: int, *words: str) -> None:
        """Start the command, and kill it without warning once `log` has so many lines, unless it ends before."""
        command = [sys.executable, "-c", "from zosim.cli import main; main()", *words]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while running.poll() is None:
            if log.exists() and len(log.read_bytes().splitlines()) >= num_lines:
                os.kill(running.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        running.wait()


@dataclass(frozen=True)
class Setting:
    """On what the hour is spent."""

    device: str = "cuda:0"  # as torch calls it
    hardware: str = "host"  # ``host``, which is detected, or a preset or a file that describes this machine
    folder: Path = Path("build/first_hour")  # where parts keep what they found
    # Whether only to see that every part runs: shapes are tiny, and times mean nothing.
    is_rehearsal: bool = False
    calibration_s: float = 60.0
    processes: Processes = field(default_factory=Processes)

    @property
    def topology(self) -> Topology:
        """The machine that the device is in."""
        return resolve(self.hardware)

    @property
    def node(self) -> str:
        """The node of :attr:`topology` that is the device. Raises PlanError if the topology has no such device."""
        gpus, index = self.topology.of_type("gpu"), torch.device(self.device).index or 0
        if index >= len(gpus):
            raise PlanError(
                f"{self.topology.name} has {len(gpus)} GPUs, so {self.device} does not exist in it",
                hint="describe the machine by a preset or a file: --hardware dgx-h100",
            )
        return gpus[index].id

    def profiles(self) -> dict[str, Profile]:
        """Return what to predict with: the data sheet, and the calibration where its part has been done."""
        profiles = {"data sheet": profile_for(self.topology, self.node)}
        if self.kept_profile.exists():
            profiles["calibrated"] = profile_for(self.topology, self.node, path=self.kept_profile)
        return profiles

    @property
    def kept_profile(self) -> Path:
        """Where the calibration's profile is kept."""
        return self.folder / "profile.json"
