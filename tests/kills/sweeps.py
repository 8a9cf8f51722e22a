"""Sweeps that are killed at random, their workers or the whole command, until they are done: ``python -m tests.kills --sweep``."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
NUM_CONFIGURATIONS = 400
_GRID = f"model: opt-125m\nhardware: a6000-2x\nbatch: {list(range(1, NUM_CONFIGURATIONS + 1))}\n"


def product(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a figure at once, in place of a plan's: what is tested is what is kept. Each seventh fails."""
    time.sleep(0.002)
    batch = int(settings["batch"])
    if batch % 7 == 0:
        raise ValueError(f"{batch} is a multiple of 7")
    return {"tokens_per_s": batch * 1.5}


def table_of(output: Path) -> list[Any]:
    """Return all rows of a database of results."""
    from zosim.applications.sweep.results import Results  # a worker needs none of it

    with Results(output) as results:
        return list(results.rows())


def begun(folder: Path) -> subprocess.Popen[bytes]:
    """Start the sweep of a folder in a new Python."""
    file = folder / "grid.yaml"
    code = f"import zosim; from tests.kills.sweeps import product; zosim.sweep({str(file)!r}, workers=2, evaluate=product)"
    words = [sys.executable, "-c", code]
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)


def killed(folder: Path, count: int, seed: int = 0) -> int:
    """Kill the sweep of a folder so often, its command and its workers in turns, finish it, and return how many kills came.

    After each kill of the command no worker of it may live on, and rows that were there must be there still.
    """
    rng = random.Random(seed)
    folder.mkdir(exist_ok=True)
    (folder / "grid.yaml").write_text(_GRID)
    output, num_kept, num_came = folder / "grid.sqlite", 0, 0
    process = begun(folder)
    for number in range(count):
        workers = _workers(process)
        time.sleep(rng.random() * 0.3)
        hits_worker = number % 2 == 0
        victim = rng.choice(workers) if hits_worker and workers else psutil.Process(process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
            num_came += 1
        if victim.pid == process.pid:
            process.wait()
            psutil.wait_procs(workers, timeout=60)
            assert not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]
            rows = len(table_of(output)) if output.exists() else 0
            assert rows >= num_kept
            num_kept = 0 if rows == NUM_CONFIGURATIONS else rows
            if not num_kept:
                output.unlink(missing_ok=True)
            process = begun(folder)
    assert process.wait() == 0
    return num_came


def _workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the workers of a sweep as soon as it has some, or has ended."""
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children()
            workers = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
            if len(workers) > 1:
                return workers
        time.sleep(0.01)
    return []
