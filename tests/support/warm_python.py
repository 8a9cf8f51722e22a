"""``zosim`` and ``python`` commands that begin as copies of one Python, which has imported torch and transformers.

Importing takes seven seconds of a core in each new Python, and again in each rank that it starts. A copy is a process all
the same, with the directory, environment, files and exit status of the caller.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Sends what it was called with to the server, and ends as the command does. A large message may need several sends.
CLIENT = """#!{python} -SI
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
call = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [b"\\0"], [0, 1, 2])
server.sendall(call)
server.shutdown(socket.SHUT_WR)
sys.exit((server.recv(1) or b"\\1")[0])
"""


@contextmanager
def warm_commands(environment: dict[str, str]) -> Iterator[Path]:
    """Start the server with this environment; give the folder whose ``zosim`` and ``python`` ask it."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder, "socket"))
        commands = Path(folder, "bin")
        commands.mkdir()
        for name in ("zosim", "python"):
            (commands / name).write_text(CLIENT.format(python=sys.executable, address=address))
            (commands / name).chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, address],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield commands
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def serve(address: str) -> None:
    """Answer each caller with a copy of this process, which keeps the exit status of the command until it has one.

    It ends, and what it started with it, when its standard input does: whoever started it is gone, even if killed.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([0, listener], [], [])
            if 0 in ready:
                os.killpg(0, signal.SIGKILL)
            caller, _ = listener.accept()
            if os.fork() == 0:
                break
            caller.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    # Ends without taking all that was imported apart, which is half a second of a core.
    command = multiprocessing.get_context("fork").Process(target=run_command, args=(caller,))
    command.start()
    command.join()
    code = command.exitcode or 0
    caller.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def run_command(caller: socket.socket) -> None:
    """Take the caller's place, and do what a new Python would with its words."""
    _, files, _, _ = socket.recv_fds(caller, 1, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    with caller.makefile("rb") as received:
        name, arguments, directory, environment = json.load(received)
    caller.close()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # Those of before know whether another file could seek.
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "rww"[i], closefd=False) for i in range(3))
    sys.argv[:] = [name, *arguments]
    if name == "zosim":
        from zosim.cli import main

        main()
        return
    sys.path[0] = str(Path.cwd())
    which, *rest = arguments
    if which == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        assert which in ("-", "-c"), arguments
        code = sys.stdin.read() if which == "-" else rest.pop(0)
        sys.argv[:] = [which, *rest]
        exec(compile(code, "<stdin>", "exec"), {"__name__": "__main__"})


PRELOADED = (
    "executors.cli",
    "executors.models.pretrain",
    "executors.runs.run",
    "proofs_checks.cli",
    "zosim.applications",
    "zosim.commands",
)


if __name__ == "__main__":
    from tests.support.forked import copy_ranks

    for module in PRELOADED:
        importlib.import_module(module)
    copy_ranks()
    gc.collect()
    gc.freeze()
    serve(sys.argv[1])
