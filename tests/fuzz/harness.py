"""Cases run in worker processes, each under a limit of CPU time and of memory, and what came of them.

A worker is forked from a process that has imported everything and made all seeds. It runs case after case, and says
before each which one it is: one that takes it down, or hangs where Python's signals do not reach, is known by that.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import psutil

from tests.fuzz.cases import Case, Target
from topology.errors import ZosimError
from zosim.cli import report

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
CPU_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 3 * 2**30
"""Address space beyond what a worker begins with."""
WALL_LIMIT_S = 240.0
"""Without a sign of life; far more than a slow machine takes for ten seconds of CPU time."""

FINE = ("accepted", "refused")


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    - `kind`: ``accepted``, ``refused``, or a finding: ``traceback``, ``slow``, ``memory``, ``unclean`` (control characters in
      what was printed), ``crash``, ``hang``.
    - `where`: Of a finding, the exception and the innermost line of the project's own code: findings that agree in it are one.
    - `text`: The traceback.
    """

    kind: str
    where: str = ""
    cpu_s: float = 0.0
    text: str = ""


class _TooSlow(BaseException):
    """Raised by the timer."""


def run_case(target: Target, case: Case, folder: Path) -> Outcome:
    """Return what comes of a case, in this process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case.write(folder)
    os.chdir(folder)
    printed = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")  # as Python opens standard output and standard error
    ]
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        with redirect_stdout(printed[0]), redirect_stderr(printed[1]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcome = _called(target, case, folder)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooSlow as error:
        outcome = Outcome("slow", _where(error), text=_formatted(error))
    finally:
        os.chdir(ROOT)
    output = b"".join(stream.buffer.getvalue() for stream in printed).decode("utf-8", "replace")  # type: ignore[attr-defined]
    if outcome.kind in FINE and "memory is exhausted" in output:
        outcome = Outcome("memory", "refused for lack of memory", text=output)
    if outcome.kind in FINE and (bad := control_characters(output)):
        outcome = Outcome("unclean", f"{target.name}: {bad[0]!r}", text=output)
    return replace(outcome, cpu_s=time.process_time() - began)


def _called(target: Target, case: Case, folder: Path) -> Outcome:
    try:
        target.call(case, folder)
    except ZosimError as error:
        report(error)
        return Outcome("refused")
    except SystemExit as error:
        return Outcome("accepted" if error.code in (None, 0) else "refused")
    except MemoryError as error:
        return Outcome("memory", _where(error), text=_formatted(error))
    except Exception as error:  # noqa: BLE001 - every one is a finding
        return Outcome("traceback", _where(error), text=_formatted(error))
    return Outcome("accepted")


def control_characters(text: str) -> str:
    """Return the characters of a printed text that change how a terminal shows it, but for ends of lines."""
    return "".join(c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t\ufffd")


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f
        for f in frames
        if Path(f.filename).is_relative_to(ROOT) and "fuzz" not in f.filename and "/.venv/" not in f.filename
    ]
    last = ours[-1] if ours else frames[-1]
    name = Path(last.filename)
    shown = name.relative_to(ROOT) if name.is_relative_to(ROOT) else name.name
    return f"{type(error).__name__} in {shown}:{last.name}"


def _formatted(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    return text if len(text) < 12_000 else text[:4_000] + "\n...\n" + text[-8_000:]


def _on_timer(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlow


def _work(
    connection: Connection, folder: Path, targets: Sequence[Target], reload: Callable[[str, int], Case]
) -> None:
    """Take numbers of cases from a connection until there are none, and send what came of them."""
    signal.signal(signal.SIGPROF, _on_timer)
    sys.stdin = io.StringIO("")
    limit = psutil.Process().memory_info().vms + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    by_name = {target.name: target for target in targets}
    while (job := connection.recv()) is not None:
        name, number = job
        case = reload(name, number)
        connection.send(None)
        try:
            outcome = run_case(by_name[name], case, folder / "case")
        except _TooSlow as error:  # the timer went off in the last moment
            outcome = Outcome("slow", _where(error), CPU_LIMIT_S)
        connection.send(outcome)


def _memory_folder() -> str | None:
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None


class Worker:
    """A process that runs cases, started again when one takes it down.

    - `reload`: Returns the case of a target by its number.
    """

    def __init__(self, targets: Sequence[Target], reload: Callable[[str, int], Case]) -> None:
        self._targets, self._reload = targets, reload
        self._folder = Path(tempfile.mkdtemp(prefix="zosim-fuzz-", dir=_memory_folder()))
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_work, args=(other, self._folder, self._targets, self._reload), daemon=True
        )
        self._process.start()
        other.close()

    def begin(self, name: str, number: int) -> None:
        """Give the worker a case."""
        self._began_s, self._last_s = self._cpu_s(), time.monotonic()
        self._connection.send((name, number))

    def finished(self, wait_s: float) -> Outcome | None:
        """Return what came of the case, None if that is not known yet."""
        try:
            if not self._connection.poll(wait_s):
                return self._given_up()
            reported = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self._start()
            return Outcome("crash", f"exit code {code}")
        if reported is None:
            return self.finished(wait_s)
        return reported  # type: ignore[no-any-return]

    def _given_up(self) -> Outcome | None:
        cpu_s, waited_s = self._cpu_s() - self._began_s, time.monotonic() - self._last_s
        if cpu_s < CPU_LIMIT_S + 5 and waited_s < WALL_LIMIT_S:
            return None
        self._end()
        self._start()
        return Outcome("slow" if cpu_s >= CPU_LIMIT_S else "hang", "where no signal is heard", cpu_s)

    def _cpu_s(self) -> float:
        with suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def close(self) -> None:
        """End the process, and remove its files."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


@dataclass
class Report:
    """What came of many cases.

    - `counts`: Outcomes by target and kind.
    - `findings`: The first case of each finding, by target, kind and place.
    - `slowest`, `cpu_s`: CPU seconds by target: of the slowest case, and of all.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: dict[tuple[str, str, str], tuple[Case, Outcome]] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, target: str, case: Callable[[], Case], outcome: Outcome) -> bool:
        """Count an outcome; return whether it is a finding that was not known."""
        self.counts[target][outcome.kind] += 1
        self.slowest[target] = max(self.slowest[target], outcome.cpu_s)
        self.cpu_s[target] += outcome.cpu_s
        key = target, outcome.kind, outcome.where
        if outcome.kind in FINE or key in self.findings:
            return False
        self.findings[key] = case(), outcome
        return True

    @property
    def num_cases(self) -> int:
        """Cases that were run."""
        return sum(sum(counter.values()) for counter in self.counts.values())

    def lines(self) -> Iterator[str]:
        """Yield a table of outcomes by target."""
        kinds = [*FINE, "traceback", "slow", "memory", "unclean", "crash", "hang"]
        yield f"{'target':28}{'cases':>8}" + "".join(f"{kind:>10}" for kind in kinds) + "   slowest"
        for name, counter in sorted(self.counts.items()):
            numbers = "".join(f"{counter[kind]:10}" for kind in kinds)
            yield f"{name:28}{sum(counter.values()):8}{numbers}{self.slowest[name]:8.2f} s"
        totals = Counter[str]()
        for counter in self.counts.values():
            totals.update(counter)
        yield f"{'all':28}{self.num_cases:8}" + "".join(f"{totals[kind]:10}" for kind in kinds)


Job = tuple[str, int]


def run_jobs(
    targets: Sequence[Target],
    jobs: Iterator[Job],
    reload: Callable[[str, int], Case],
    found: Report | None = None,
    *,
    num_workers: int = 1,
    on_finding: Callable[[str, Case, Outcome], None] = lambda *_: None,
) -> Report:
    """Return what came of jobs, each a target's name and the number of a case.

    - `reload`: Returns the case of a job.
    - `found`: Filled while jobs end; by default a new one.
    - `on_finding`: Told the first case of each finding as it is found.
    """
    found = found or Report()
    workers = [Worker(targets, reload) for _ in range(num_workers)]
    running: dict[Worker, Job] = {}
    try:
        while True:
            for worker in workers:
                if worker not in running and (job := next(jobs, None)) is not None:
                    worker.begin(*job)
                    running[worker] = job
            if not running:
                return found
            for worker, job in list(running.items()):
                outcome = worker.finished(5.0 if len(running) == 1 else 0.01)
                if outcome is None:
                    continue
                del running[worker]
                if found.add(job[0], lambda job=job: reload(*job), outcome):
                    on_finding(job[0], reload(*job), outcome)
    finally:
        for worker in workers:
            worker.close()


def smaller(target: Target, case: Case, outcome: Outcome, *, num_trials: int = 120) -> Case:
    """Return a case with the same outcome and less in its files, as far as some trials lead."""
    for name in sorted(case.files):
        size = len(case.files[name]) // 2
        while size and num_trials:
            at = 0
            while at < len(case.files[name]) and num_trials:
                content = case.files[name]
                shorter = content[:at] + content[at + size :]
                candidate = replace(case, files={**case.files, name: shorter})
                num_trials -= 1
                if _comes_to(target, candidate, outcome):
                    case = candidate
                else:
                    at += size
            size //= 4
    return case


def _comes_to(target: Target, case: Case, outcome: Outcome) -> bool:
    """Whether a case has this outcome, in a process of its own."""
    worker = Worker([target], lambda _name, _number: case)
    try:
        worker.begin(target.name, 0)
        while (again := worker.finished(5.0)) is None:
            pass
    finally:
        worker.close()
    return (again.kind, again.where) == (outcome.kind, outcome.where)


def save(target: str, case: Case, outcome: Outcome) -> Path:
    """Write a finding to the corpus, and return its path."""
    text = case.to_json(target, f"{outcome.kind}: {outcome.where}")
    key = hashlib.sha256(f"{target} {outcome.kind} {outcome.where}".encode()).hexdigest()[:10]
    folder = CORPUS / re.sub(r"\W+", "-", target)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.kind}-{key}.json"
    path.write_text(text)
    return path


def stored(targets: Sequence[Target]) -> list[tuple[str, Path]]:
    """Return the cases of the corpus, as the names of their targets and their paths."""
    return [
        (target.name, path)
        for target in targets
        for path in sorted((CORPUS / re.sub(r"\W+", "-", target.name)).glob("*.json"))
    ]
