"""Starts the ranks of one host, and reports which one died and at which instruction.

The ranks find each other through a file in a directory that only this user may enter, and connect over the loopback. Nothing
of a launch listens beyond this host, and no other user can write what the ranks read.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from executors.files import naming
from executors.ranks.rank_info import (
    DIRECTORY_VARIABLE,
    PREFIX,
    Progress,
    RankInfo,
    is_launched,
    is_on_one_host,
    leave,
    note_path,
    rank_0_keeps_the_store,
    read_note,
)
from executors.ranks.stale_files import held_directory
from topology.errors import RunError, ZosimError, refusal_of_machine, refusing_ignored

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WAIT_HINT = "look at that rank's process and host; `--resume` continues from the log, and `--timeout` says how long to wait"
DEFAULT_TIMEOUT_S = 120.0
PROCESSES = multiprocessing.get_context("spawn")
"""Ranks are fresh processes: a copy of one that has threads, or a CUDA context, may hang."""

_SETTLE_S = 0.1
"""Between the end of the first rank that fails and the question which others have failed with it."""

_END_S = 3.0
"""For which a rank may take to end when it is asked to; one that is stopped does not hear it."""

_PR_SET_PDEATHSIG = 1
_SAFE_PATH = "PYTHONSAFEPATH"


def launch(function: Callable[..., Any], *arguments: object, world_size: int = 1) -> Any:
    """Run ``function(*arguments)`` in every rank and return what rank 0 returned.

    Parameters
    ----------
    function : callable
        Importable by name, as its arguments and its result must be picklable: they go through pipes between these
        processes. It finds its place with :meth:`RankInfo.here` and its peers with :func:`process_group`.
    world_size : int
        Ranks to start on this machine. Where torchrun has started this process already, nothing is started.

    Raises
    ------
    RunError
        If a rank failed; the message names it, why, and the last instruction that it noted.
    """
    if is_launched():
        return function(*arguments)
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(held_directory(PREFIX))
        except OSError as error:  # no directory for temporary files, or one that is full
            raise refusal_of_machine(error) or error from None
        stack.enter_context(_ended_by_signals())
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(world_size)]
        infos = [RankInfo(rank, rank, world_size) for rank in range(world_size)]
        ranks: list[BaseProcess] = [
            PROCESSES.Process(
                target=_rank, args=(info, str(directory), os.getpid(), sending, function, arguments)
            )
            for info, (_, sending) in zip(infos, pipes, strict=True)
        ]
        try:
            left_alone = _main_left_alone() if function.__module__ != "__main__" else nullcontext()
            with left_alone, _working_directory_left_out():
                for rank in ranks:
                    rank.start()
            # Each end of a pipe in one process only, so that it closes with the rank that sends.
            for _, sending in pipes:
                sending.close()
            return _result(ranks, [receiving for receiving, _ in pipes], directory)
        finally:
            _end(ranks)


def module_command(name: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment that run a module of zosim in a new Python that imports nothing from the working directory."""
    path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    return [sys.executable, "-P", "-m", name], {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def process_group(device_type: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[RankInfo]:
    """Join the ranks' process group for the length of the block: gloo, and NCCL between CUDA devices.

    Raises RunError if not all ranks come in time.
    """
    import torch
    import torch.distributed as dist

    from executors.devices import select_device
    from executors.ranks.accelerators import backends_of, own_accelerator, watchdog_settings
    from executors.ranks.gloo import shared_gloo
    from executors.ranks.missing_ranks import MissingRanks, answering

    info = RankInfo.here()
    missing, timeout = MissingRanks(info.rank, timeout_s), timedelta(seconds=timeout_s)
    if is_on_one_host():
        # Whatever the environment says: ranks of one host have nothing to say to others.
        loopback = _loopback_interface()
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    backend = shared_gloo()
    if device_type != "cpu":
        select_device(own_accelerator(device_type, info))
        os.environ |= watchdog_settings(timeout_s)
    store = _store(info, timeout)
    # Whoever comes late, or never, is named by those who came: the roll is called in the store, before there is a group.
    with answering(info.rank, store):
        with missing.joining():
            dist.init_process_group(
                backends_of(device_type, backend),
                rank=info.rank,
                world_size=info.world_size,
                store=store,
                timeout=timeout,
            )
        yield info
        # Nobody leaves while another still joins. After a failure others may be gone: this process takes no leave then.
        with missing.named(range(info.world_size), "ending together"):
            dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    leave()


def _store(info: RankInfo, timeout: timedelta) -> Store:
    """Return the store of all ranks: a file under our launcher, torchrun's TCP store, or a lone rank's own.

    Raises RunError if nothing answers where the environment says that the store is.
    """
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

    if DIRECTORY_VARIABLE in os.environ:
        store: Store = FileStore(str(Path(os.environ[DIRECTORY_VARIABLE]) / "store"), info.world_size)
    elif not is_launched():
        store = HashStore()
    else:
        host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
        is_kept_here = info.rank == 0 and rank_0_keeps_the_store()
        try:
            store = TCPStore(
                host,
                int(port),
                info.world_size,
                is_kept_here,
                timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(
                f"rank {info.rank} cannot join the {info.world_size} ranks: the store at MASTER_ADDR={host} "
                f"MASTER_PORT={port} is not available ({reason})",
                hint="all ranks need the same address and a free port there; check the rank or launcher that "
                "hosts the store",
            ) from error
    store.set_timeout(timeout)
    return PrefixStore("default_pg", store)


def _loopback_interface() -> str:
    """Return the name of the interface that has 127.0.0.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise RunError("no network interface of this host has the address 127.0.0.1, which its ranks need")


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep new processes from importing the caller's script, which may lack a ``__main__`` guard and launch again."""
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {
        name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__
    }
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


@contextmanager
def _working_directory_left_out() -> Iterator[None]:
    """Keep new Pythons from importing modules of the working directory before they get this process's path.

    They begin as ``python -c "from multiprocessing.spawn import ..."``, which finds a ``multiprocessing.py`` there first.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH) if before is None else os.environ.update({_SAFE_PATH: before})


@dataclass(frozen=True)
class _Failure:
    """Why a rank failed: a ZosimError with its hint, or the last line of a traceback, which is a bug."""

    message: str
    hint: str | None = None
    is_mistake: bool = False


def _result(ranks: Sequence[BaseProcess], receiving: Sequence[connection.Connection], directory: Path) -> Any:
    """Return the result of rank 0 once all ranks have ended without error.

    Raises ZosimError when the first rank fails.
    """
    running = {rank.sentinel: rank for rank in ranks}
    pipes = {pipe: number for number, pipe in enumerate(receiving)}
    sent: dict[int, Any] = {}

    def read() -> None:
        for pipe in connection.wait(list(pipes), timeout=0):
            assert isinstance(pipe, connection.Connection)
            with suppress(EOFError):
                sent[pipes[pipe]] = pipe.recv()
            del pipes[pipe]

    while running:
        # Pipes are read while ranks run: a full one would keep its rank from ending.
        ready = connection.wait([*running, *pipes])
        read()
        ended = [running.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)]
        for rank in ended:
            rank.join()
        if any(rank.exitcode for rank in ended):
            time.sleep(_SETTLE_S)
            read()
            codes = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode}
            failures = {
                number: reported for number, reported in sent.items() if isinstance(reported, _Failure)
            }
            raise _report(directory, codes, failures, world_size=len(ranks))
    return sent.get(0)


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End ranks that still run by SIGTERM, then by SIGKILL."""
    running = [rank for rank in ranks if rank.is_alive()]
    for rank in running:
        rank.terminate()
    end = time.monotonic() + _END_S
    for rank in running:
        rank.join(max(0.0, end - time.monotonic()))
        rank.kill()
        rank.join()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an exception does, so that its ranks end with it."""

    def leave_now(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    try:
        before = {number: signal.signal(number, leave_now) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not on the main thread, which alone may ask for signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rank(
    info: RankInfo,
    directory: str,
    launcher: int,
    sending: connection.Connection,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    """Run one rank: send errors that a user can mend to the launcher in place of a traceback, and do not outlive it."""
    die_with(launcher)
    # The launcher ends its ranks when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {
        DIRECTORY_VARIABLE: directory,
        "RANK": str(info.rank),
        "LOCAL_RANK": str(info.local_rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_WORLD_SIZE": str(info.world_size),
    }
    exit_code = 0
    try:
        with naming(path := note_path(Path(directory), "pid", info.rank)):
            path.write_text(str(os.getpid()))
        with refusing_ignored():
            result = function(*arguments)
        sending.send(None if info.rank else result)
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher says it
        refusal = error if isinstance(error, ZosimError) else refusal_of_machine(error)
        if refusal is None:
            traceback.print_exc()
            last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            sending.send(_Failure(last, is_mistake=True))
        else:
            sending.send(_Failure(refusal.message, refusal.hint))
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the end of the interpreter, which aborts where a thread still waits for others within torch.
    os._exit(exit_code)


def die_with(launcher: int) -> None:
    """Have the kernel end this process when its launcher is gone, where the kernel is Linux.

    An orphan would go on writing the log of a run that somebody resumes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # gone before the kernel was asked
            os._exit(1)


def _report(
    directory: Path, exit_codes: Mapping[int, int], failures: Mapping[int, _Failure], *, world_size: int
) -> ZosimError:
    """Return an error about the rank that failed first: one that was killed comes before those that waited for it."""
    rank = min(exit_codes, key=lambda rank: (exit_codes[rank] >= 0, rank))
    given_up, failure = read_note(note_path(directory, "given-up", rank)), failures.get(rank)
    if given_up is not None:
        return RunError(f"rank {given_up['by']} stopped: {given_up['why']}", hint=WAIT_HINT)
    left = Progress.read(note_path(directory, "progress", rank))
    who = left.of(rank) if world_size > 1 else "the run"
    at = f", last at {left.line}" if left.line else ""
    if failure is None:
        return _ended(f"{who} {{}}{at}", exit_codes[rank])
    if failure.is_mistake:
        return RunError(
            f"{who} failed{at}: {failure.message}",
            hint="a traceback above is a bug in zosim; please report it",
        )
    if world_size == 1:  # says itself what could not be done, perhaps after the last instruction
        return RunError(failure.message, hint=failure.hint)
    # What an instruction could not do begins with its name.
    at = "" if failure.message.startswith(left.line) else at
    return RunError(f"{who} stopped{at}: {failure.message}", hint=failure.hint)


def _ended(template: str, exit_code: int) -> RunError:
    """Return an error about a process that ended without a message. Exit codes above 128 stand for signals, too."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number not in {member.value for member in signal.Signals}:
        return RunError(
            template.format(f"ended with exit code {exit_code}"), hint="see what it printed before"
        )
    name = signal.Signals(number).name
    hint = (
        "if the system ran out of memory, its log names the process that it killed"
        if number == signal.SIGKILL
        else (
            f"the process received {name}, from a user or from a scheduler at a time limit; `--resume` "
            "continues from the log"
        )
        if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        else "please report it, with what it printed before"
    )
    return RunError(template.format(f"died ({name})"), hint=hint)
