"""Starts the ranks under torch's own launcher, and says in a sentence which one died and at what.

Every rank keeps a line with the instruction that it is running in a small file that is mapped into memory, so that
the line is there even when the process is killed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from topology.errors import RunError, ZosimError, refusal_of_machine

_PROGRESS_BYTES = 256
WAIT_HINT = "look at that rank's process and host; `--resume` goes on from the log, and `--timeout` says how long to wait"
_DIRECTORY_VARIABLE = "ZOSIM_LAUNCH_DIRECTORY"
DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RankInfo:
    """Place of this process among the ranks.

    Attributes
    ----------
    rank, local_rank, world_size : int
    """

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def here(cls) -> RankInfo:
        """Return what torch's launcher told this process; a lone rank if there is no launcher."""
        read = {name: int(os.environ.get(name, default)) for name, default in _ENVIRONMENT.items()}
        return cls(read["RANK"], read["LOCAL_RANK"], read["WORLD_SIZE"])


_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


class Progress:
    """The line that says what a rank is doing.

    Parameters
    ----------
    path : path
        Of a file of fixed size, overwritten in place.
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("w+b") as file:
            file.truncate(_PROGRESS_BYTES)
            self._memory = mmap.mmap(file.fileno(), _PROGRESS_BYTES)

    def note(self, text: str) -> None:
        """Replace the line."""
        self._memory[:] = text.encode()[:_PROGRESS_BYTES].ljust(_PROGRESS_BYTES, b"\0")

    @staticmethod
    def read(path: str | Path) -> str:
        """Return the line that a process left, or "" where there is none."""
        try:
            return Path(path).read_bytes().rstrip(b"\0").decode(errors="replace")
        except OSError:
            return ""


def progress_of_this_rank() -> Progress | None:
    """Return this rank's progress line, where :func:`launch` started it."""
    directory = launch_directory()
    return Progress(_progress_path(directory, RankInfo.here().rank)) if directory else None


def last_words(rank: int) -> str:
    """Return the line of a rank that the same launcher started on this host, or ""."""
    directory = launch_directory()
    return Progress.read(_progress_path(directory, rank)) if directory else ""


def launch_directory() -> Path | None:
    """Return a directory that the ranks of this host share for as long as their launcher lives; None for a rank alone."""
    directory = os.environ.get(_DIRECTORY_VARIABLE)
    if directory:
        return Path(directory)
    if not is_launched():
        return None
    # The ranks of a host have one parent: torchrun.
    shared = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getppid()}-{os.environ['MASTER_PORT']}"
    shared.mkdir(exist_ok=True)
    return shared


def give_up(ranks: Sequence[int], why: str) -> None:
    """End ranks of this launch that this one waited for in vain, and leave word of it.

    One that is stopped does not end when its launcher asks it to, and one that is killed cannot say why.
    """
    if _DIRECTORY_VARIABLE not in os.environ:
        return
    directory, own = Path(os.environ[_DIRECTORY_VARIABLE]), RankInfo.here().rank
    for rank in ranks:
        _given_up_path(directory, rank).write_text(json.dumps({"by": own, "why": why}))
        with suppress(OSError, ValueError):
            os.kill(int(_pid_path(directory, rank).read_text()), signal.SIGKILL)


def is_launched() -> bool:
    """Whether a launcher, torchrun or ours, has started this process as one of several."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def launch(function: Callable[..., Any], *arguments: object, world_size: int = 1) -> Any:
    """Run ``function(*arguments)`` in every rank and return what rank 0 returned.

    Parameters
    ----------
    function : callable
        Importable by name, as its arguments and its result must be picklable. It finds its place with
        :meth:`RankInfo.here` and its peers with :func:`process_group`.
    world_size : int
        Ranks to start on this machine. Where torchrun has started this process already, nothing is started.

    Raises
    ------
    RunError
        If a rank failed; the message names it, why, and the last instruction that it noted.
    """
    if is_launched():
        return function(*arguments)
    _remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as directory:
        return _launch(Path(directory), function, arguments, world_size)


def _remove_leftovers() -> None:
    """Remove what launchers that were killed could not."""
    for folder, prefix in ((Path(tempfile.gettempdir()), _PREFIX), (_SEMAPHORES, f"sem.{_PREFIX}")):
        for left in folder.glob(f"{prefix}*"):
            owner = left.name.removeprefix(prefix).partition("-")[0]
            if not owner.isdecimal() or psutil.pid_exists(int(owner)):
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


@contextmanager
def _own_semaphores() -> Iterator[None]:
    """Give the semaphores of torch's launcher names by which those of one that was killed are known."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config["semprefix"]
    config["semprefix"] = f"/{_PREFIX}{os.getpid()}"
    try:
        yield
    finally:
        config["semprefix"] = before


_PREFIX = "zosim-launch-"
_SEMAPHORES = Path("/dev/shm")
"""Where Linux has them, as files."""


@contextmanager
def process_group(device_type: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[RankInfo]:
    """Join the ranks' process group for the length of the block: gloo, and NCCL between CUDA devices.

    Parameters
    ----------
    device_type : str
    timeout_s : float
        After which a rank that waits for another gives up.

    Raises
    ------
    RunError
        If not all ranks come in time.
    """
    import torch
    import torch.distributed as dist

    info = RankInfo.here()
    if "MASTER_ADDR" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(info.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend, rank=info.rank, world_size=info.world_size, timeout=timedelta(seconds=timeout_s)
        )
    except dist.DistError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {info.rank} could not join the others of {info.world_size} ranks ({reason})",
            hint="look at the ranks that have ended; all need the same MASTER_ADDR and MASTER_PORT, and `--timeout` "
            "says how long to wait",
        ) from error
    yield info
    # Nobody leaves while another still joins. After a failure others may be gone: this process takes no leave then.
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


def _launch(
    directory: Path, function: Callable[..., Any], arguments: tuple[object, ...], world_size: int
) -> Any:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=directory.name,
        # As `torchrun --standalone`: a store on a free port of this machine.
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    with _environment(directory), _quiet_launcher(), _own_semaphores():
        try:
            results = elastic_launch(config, _entry)(function, arguments, str(directory))
        except ChildFailedError as error:
            raise _report(directory, error) from None
    return results[0]


def _entry(function: Callable[..., Any], arguments: tuple[object, ...], directory: str) -> Any:
    """Run in a rank: leave what a user can mend as a file in place of a traceback, and do not outlive the launcher."""
    _die_with_parent()
    _pid_path(Path(directory), RankInfo.here().rank).write_text(str(os.getpid()))
    try:
        return function(*arguments)
    except Exception as error:
        failure = error if isinstance(error, ZosimError) else refusal_of_machine(error)
        if failure is None:
            traceback.print_exc()
            raise
        said = {"message": failure.message, "hint": failure.hint}
        _failure_path(Path(directory), RankInfo.here().rank).write_text(json.dumps(said))
        sys.stderr.flush()
        sys.exit(1)


def _die_with_parent() -> None:
    """Have the kernel end this process when its launcher is gone, where the kernel is Linux.

    An orphan would go on writing the log of a run that somebody resumes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _report(directory: Path, error: Any) -> ZosimError:
    """Return what happened to the rank that failed first; one that was killed comes before those who missed it."""
    rank, failure = min(
        error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp, item[0])
    )
    given_up = _given_up_path(directory, rank)
    if given_up.exists():
        word = json.loads(given_up.read_text())
        return RunError(f"rank {word['by']} stopped: {word['why']}", hint=WAIT_HINT)
    doing = Progress.read(_progress_path(directory, rank))
    at = f", last at {doing}" if doing else ""
    told = _failure_path(directory, rank)
    if told.exists():
        said = json.loads(told.read_text())
        return RunError(f"rank {rank} stopped{at}: {said['message']}", hint=said["hint"])
    if failure.exitcode < 0:
        return RunError(
            f"rank {rank} died ({failure.signal_name()}){at}",
            hint="where the system was short of memory, its log names the process that it killed",
        )
    reason = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
    reason = reason.strip().splitlines()[-1] if reason.strip() else f"exit code {failure.exitcode}"
    return RunError(
        f"rank {rank} failed{at}: {reason}", hint="a traceback above is a mistake of ours; please report it"
    )


def _progress_path(directory: Path, rank: int) -> Path:
    return directory / f"progress-{rank}"


def _pid_path(directory: Path, rank: int) -> Path:
    return directory / f"pid-{rank}"


def _given_up_path(directory: Path, rank: int) -> Path:
    return directory / f"given-up-{rank}"


def _failure_path(directory: Path, rank: int) -> Path:
    return directory / f"failure-{rank}.json"


@contextmanager
def _environment(directory: Path) -> Iterator[None]:
    """Tell the ranks where to leave their lines, and keep gloo on loopback."""
    wanted = {
        _DIRECTORY_VARIABLE: str(directory),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    # Without this the launcher sets one thread per rank and says so at length.
    wanted |= {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]} if "OMP_NUM_THREADS" in os.environ else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's own account of a failure: ours is shorter."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
