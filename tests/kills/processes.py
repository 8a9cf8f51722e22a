"""The processes of one command: started, found again, struck, and what they leave."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.context
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from tests.kills import points

MARK = "ZOSIM_KILL_CASE"
SHARED_MEMORY = Path("/dev/shm")


class Waited(Exception):  # noqa: N818 - reads as what happened
    """Something did not come about in time; a command that has not ended by then has failed its case."""


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a condition.

    Raises
    ------
    Waited
    """
    end = time.monotonic() + points.LONGEST_WAIT_S
    while not is_so():
        if time.monotonic() > end:
            raise Waited(f"waited {points.LONGEST_WAIT_S:.0f} s for {what}")
        time.sleep(0.0005)


class Surroundings:
    """Folders of one case for all that its processes leave outside of the run's directory.

    Where this process may (root on Linux), ``/dev/shm`` is an empty one that no other process sees; otherwise names
    count that tell a process id of ours.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._before = _shared_memory()
        self.pids: set[int] = set()

    def variables(self) -> dict[str, str]:
        """Return what processes of the case have in their environment."""
        kept = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        paths = [str(self._injected()), kept.get("PYTHONPATH", "")]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        return kept | threads | offline | {
            "TMPDIR": str(self.temporary), MARK: str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip

    def _injected(self) -> Path:
        """Return a folder that has every Python of the case stop at a point."""
        folder = self.folder / "injected"
        folder.mkdir(exist_ok=True)
        lines = [
            "import importlib.util, sys",
            f"spec = importlib.util.spec_from_file_location('zosim_kill_points', {points.__file__!r})",
            "points = sys.modules[spec.name] = importlib.util.module_from_spec(spec)",
            "spec.loader.exec_module(points)",
            "points.install()",
        ]
        (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
        return folder

    def left(self) -> list[str]:
        """Return what processes that have ended left: temporary files, shared memory, semaphores."""
        files = [str(path.relative_to(self.folder)) for path in sorted(self.temporary.iterdir())]
        now = _shared_memory()
        names = sorted(now - self._before)
        ours = names if IS_ALONE else [name for name in names if any(str(pid) in name for pid in self.pids)]
        return files + [str(SHARED_MEMORY / name) for name in ours]


def _shared_memory() -> set[str]:
    """Return the names in shared memory; semaphores are among them."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZOSIM_LAUNCH_DIRECTORY"}

IS_ALONE = False
"""Whether ``/dev/shm`` is this process's own; see :func:`take_own_shared_memory`."""


def take_own_shared_memory() -> None:
    """Give this process and its children an empty ``/dev/shm``, where the system lets it."""
    global IS_ALONE  # noqa: PLW0603 - it is a fact about the process
    if sys.platform != "linux" or os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return
    libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    IS_ALONE = libc.mount(b"tmpfs", str(SHARED_MEMORY).encode(), b"tmpfs", 0, None) == 0


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


class Command:
    """One ``zosim`` command with all processes that come of it, in a session of its own.

    - `log`: Of what it says.
    - `more`: Variables of its environment.
    - `forked`: Whether to fork it, and its ranks, from this process, which has imported everything; otherwise each is a new
      Python, as for a user.
    """

    def __init__(
        self,
        arguments: list[str],
        surroundings: Surroundings,
        log: Path,
        more: Mapping[str, str] | None = None,
        *,
        forked: bool,
    ) -> None:
        self._surroundings = surroundings
        self._log = log
        variables = surroundings.variables() | dict(more or {})
        self._status: int | None = None
        with log.open("wb") as output:
            if forked:
                self._popen = None
                self.pid = _forked(arguments, variables, output.fileno())
            else:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", "zosim", *arguments], env=variables, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
                self.pid = self._popen.pid

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._status is None and self._popen is not None:
            self._status = self._popen.poll()
        elif self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def processes(self) -> list[psutil.Process]:
        """Return those that live, the command's own first."""
        living = list(self._living())
        self._surroundings.pids |= {process.pid for process in living}
        return sorted(living, key=lambda process: process.pid != self.pid)

    def _living(self) -> Iterator[psutil.Process]:
        marked = f"{MARK}={self._surroundings.folder}\0".encode()
        for process in psutil.process_iter():
            try:
                session = os.getsid(process.pid)
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if (
                    session == self.pid or marked in environment
                ) and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (OSError, psutil.Error):
                continue

    def pid_of(self, target: str) -> int | None:
        """Return the process of a target; None if it is not there (yet)."""
        if not target.startswith("rank"):
            return self.pid
        for path in self._surroundings.temporary.glob(f"*/pid-{target.split()[1]}"):
            text = path.read_text()
            if text.isdecimal() and psutil.pid_exists(int(text)):
                return int(text)
        return None

    def send(self, number: signal.Signals, target: str) -> bool:
        """Send a signal; return whether somebody was there to receive it."""
        try:
            if target == "group":
                os.killpg(self.pid, number)
            elif (pid := self.pid_of(target)) is not None:
                os.kill(pid, number)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> int:
        """Wait until no process of it lives, and return its exit status.

        Raises
        ------
        Waited
        """
        wait_until(lambda: self.status is not None, f"the end of {self._log.name}")
        wait_until(self._is_gone, f"the end of all processes of {self._log.name}")
        assert self.status is not None
        return self.status

    def _is_gone(self) -> bool:
        is_gone = not self.processes()
        if not is_gone:
            time.sleep(0.05)
        return is_gone

    def end(self) -> None:
        """Kill whatever lives of it."""
        for process in self.processes():
            process.kill()
        if self.status is None:
            wait_until(lambda: self.status is not None, "the end of a killed command")


def _forked(arguments: list[str], variables: Mapping[str, str], output: int) -> int:
    """Return a process that runs a command as ``python -m zosim`` would, without importing anything again."""
    assert threading.active_count() == 1
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = None
        atexit._clear()
        # Of its launcher a rank that is forked would inherit what a new Python does not have.
        os.register_at_fork(after_in_child=_take_default_handlers)
        from executors.ranks import launch
        from zosim import cli

        launch.PROCESSES = multiprocessing.get_context("fork")
        points.install()
        sys.argv = ["zosim", *arguments]
        cli.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_default_handlers() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def preload() -> None:
    """Import what every command does, so that those that are forked need not."""
    import torch.distributed  # noqa: F401
    import transformers.models.opt.modeling_opt  # noqa: F401

    import executors.cli
    import executors.ranks.launch
    import executors.runs.overrides
    import executors.runs.run  # noqa: F401
