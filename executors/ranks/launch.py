"""Starts the ranks under torch's own launcher, and says in a sentence which one died and at what."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from executors.ranks.notes import (
    DIRECTORY_VARIABLE,
    PREFIX,
    Progress,
    RankInfo,
    failure_path,
    given_up_path,
    is_launched,
    leave,
    pid_path,
    progress_path,
    read_note,
    remove_leftovers,
)
from topology.errors import RunError, ZosimError, refusal_of_machine

WAIT_HINT = "look at that rank's process and host; `--resume` goes on from the log, and `--timeout` says how long to wait"
DEFAULT_TIMEOUT_S = 120.0


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
    remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as directory:
        return _launch(Path(directory), function, arguments, world_size)


@contextmanager
def _own_semaphores() -> Iterator[None]:
    """Give the semaphores of torch's launcher names by which those of one that was killed are known."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config["semprefix"]
    config["semprefix"] = f"/{PREFIX}{os.getpid()}"
    try:
        yield
    finally:
        config["semprefix"] = before


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
    leave()


def _launch(
    directory: Path, function: Callable[..., Any], arguments: tuple[object, ...], world_size: int
) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
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
        # By default it makes a directory of its own, and leaves it.
        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "logs")),
    )
    with _environment(directory), _quiet_launcher(), _own_semaphores():
        try:
            results = elastic_launch(config, _entry)(function, arguments, str(directory), os.getpid())
        except ChildFailedError as error:
            raise _report(directory, error) from None
    return results[0]


def _entry(function: Callable[..., Any], arguments: tuple[object, ...], directory: str, launcher: int) -> Any:
    """Run in a rank: leave what a user can mend as a file in place of a traceback, and do not outlive the launcher."""
    _die_with(launcher)
    pid_path(Path(directory), RankInfo.here().rank).write_text(str(os.getpid()))
    try:
        return function(*arguments)
    except Exception as error:
        failure = error if isinstance(error, ZosimError) else refusal_of_machine(error)
        if failure is None:
            traceback.print_exc()
            raise
        said = {"message": failure.message, "hint": failure.hint}
        failure_path(Path(directory), RankInfo.here().rank).write_text(json.dumps(said))
        sys.stderr.flush()
        sys.exit(1)


def _die_with(launcher: int) -> None:
    """Have the kernel end this process when its launcher is gone, where the kernel is Linux.

    An orphan would go on writing the log of a run that somebody resumes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # gone before the kernel was asked
            os._exit(1)


_PR_SET_PDEATHSIG = 1


def _report(directory: Path, error: Any) -> ZosimError:
    """Return what happened to the rank that failed first; one that was killed comes before those who missed it."""
    rank, failure = min(
        error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp, item[0])
    )
    given_up, told = read_note(given_up_path(directory, rank)), read_note(failure_path(directory, rank))
    if given_up is not None:
        return RunError(f"rank {given_up['by']} stopped: {given_up['why']}", hint=WAIT_HINT)
    left = Progress.read(progress_path(directory, rank))
    who, at = left.of(rank), f", last at {left.line}" if left.line else ""
    if told is not None:
        # What an instruction could not do begins with its name.
        at = "" if told["message"].startswith(left.line) else at
        return RunError(f"{who} stopped{at}: {told['message']}", hint=told["hint"])
    if failure.exitcode < 0:
        return RunError(
            f"{who} died ({failure.signal_name()}){at}",
            hint="where the system was short of memory, its log names the process that it killed",
        )
    reason = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
    reason = reason.strip().splitlines()[-1] if reason.strip() else f"exit code {failure.exitcode}"
    return RunError(
        f"{who} failed{at}: {reason}", hint="a traceback above is a mistake of ours; please report it"
    )


@contextmanager
def _environment(directory: Path) -> Iterator[None]:
    """Tell the ranks where to leave their lines, and keep gloo on loopback."""
    wanted = {
        DIRECTORY_VARIABLE: str(directory),
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
