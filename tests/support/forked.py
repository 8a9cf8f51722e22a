"""Processes that begin as copies of the test's own, which has imported torch.

A fresh process spends three seconds of a core on importing torch and transformers; a copy has them. It is a process
all the same, with memory, sockets, signals and an end of its own. That fresh processes work as well is seen by tests
that ask for ``fresh_ranks``, by those that run torchrun, and by the commands of the first tutorial.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile

import psutil

from executors.ranks import launch
from tests.support.waiting import HANG_S
from topology.detection import detect


def copy_ranks():
    """Start ranks as copies of this process from now on."""
    launch.PROCESSES = multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew():
    """Write to the files of this process, and heed signals, as if nothing had been put in their places."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


class Command:
    """A ``zosim`` command in a process of its own. It ends with the block, whatever happens, and its ranks with it."""

    def __init__(self, *arguments, **environment):
        self._arguments = [str(argument) for argument in arguments]
        self._environment = {name: str(value) for name, value in environment.items()}

    def __enter__(self):
        detect()  # what is measured of this machine, once a process, the copy then has
        self._stderr = tempfile.TemporaryFile("w+")
        self._process = multiprocessing.get_context("fork").Process(target=self._run)
        self._process.start()
        return self

    def __exit__(self, *error):
        if self.is_running:
            for process in [*psutil.Process(self.pid).children(recursive=True), self._process]:
                process.kill()
        self._process.join()
        self._stderr.close()

    def _run(self):
        from tests.support.command import zosim

        os.environ |= self._environment
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
            os.dup2(nowhere.fileno(), 1)
        os.dup2(self._stderr.fileno(), 2)
        sys.exit(zosim(*self._arguments))

    @property
    def pid(self):
        return self._process.pid

    @property
    def is_running(self):
        return self._process.is_alive()

    @property
    def exit_code(self):
        """Of a command that has ended; negative is the signal that ended it."""
        return self._process.exitcode

    @property
    def output(self):
        """What it has written to stderr."""
        return os.pread(self._stderr.fileno(), 1 << 24, 0).decode()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """Kill it, if it has not ended, and wait until it is gone."""
        self._process.kill()
        self.end()

    def end(self):
        """Wait until it has ended by itself, and return what it wrote to stderr."""
        self._process.join(HANG_S)
        assert not self.is_running, f"still running after {HANG_S:.0f} s:\n{self.output}"
        return self.output
