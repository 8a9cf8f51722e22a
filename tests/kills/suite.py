"""Kills runs, resumes them, and holds what comes of it against a run that nobody disturbed.

``python3 .ci/tasks.py kills --count 200 [--seed S] [--placement P ...]`` prints a line of JSON for each case, and at
the end how many strikes of each signal every placement took. Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.kills import processes
from tests.kills.cases import (
    BATCH,
    CHECKPOINT_EVERY,
    DIGEST_EVERY,
    EVALUATE_EVERY,
    PLACEMENTS,
    STEPS,
    TIMEOUT_S,
    Case,
    Strike,
    case_of,
    num_ranks,
)
from tests.kills.processes import Command, Surroundings, Waited, wait_until

ROOT = Path(__file__).parents[2]


class Suite:
    """Cases over one tiny model and one file of data, which it writes.

    - `folder`: For all files.
    - `new_python_every`: Of how many cases one is started as new Pythons; the others are forked from this process. 0: none.
    """

    def __init__(self, folder: Path, *, new_python_every: int = 1) -> None:
        self.folder = folder
        self._new_python_every = new_python_every
        self._undisturbed: dict[tuple[str, bool], Undisturbed] = {}
        write_inputs(folder)

    def arguments(self, placement: str, out: Path) -> list[str]:
        """Return the command of a placement."""
        words = [
            "run", "--model", self.folder / "opt", "--data", self.folder / "data.jsonl", "--steps", STEPS,
            "--batch", BATCH, "--lr", 1e-3, "--weight-decay", 0.1, "--threads", 1, "--no-tensorboard",
            "--digest-every", DIGEST_EVERY, "--checkpoint-every", CHECKPOINT_EVERY, "--eval-data",
            self.folder / "data.jsonl", "--eval-task", "perplexity", "--eval-examples", 4, "--eval-every", EVALUATE_EVERY, "--keep-best",
            "--timeout", TIMEOUT_S, "--out", out, *PLACEMENTS[placement].split(),
        ]  # fmt: skip
        return [*map(str, words), *([] if "--residency" in words else ["--residency", "resident"])]

    def undisturbed(self, placement: str, *, forked: bool) -> Undisturbed:
        """Return what a placement comes to if nobody disturbs it."""
        key = placement, forked
        if key not in self._undisturbed:
            folder = self.folder / "undisturbed" / ("forked" if forked else "new") / placement
            surroundings = Surroundings(folder)
            begin = time.monotonic()
            command = Command(
                self.arguments(placement, folder / "out"), surroundings, folder / "said", forked=forked
            )
            if command.wait() != 0 or surroundings.left():
                raise RuntimeError(f"{placement}, undisturbed: {command.output}\nleft: {surroundings.left()}")
            self._undisturbed[key] = Undisturbed(folder / "out", time.monotonic() - begin)
        return self._undisturbed[key]

    def run(self, case: Case) -> dict[str, Any]:
        """Run a case, and return what came of it; its folder stays if it failed."""
        forked = not self._new_python_every or case.number % self._new_python_every != 0
        folder = self.folder / f"case-{case.number}"
        begin = time.monotonic()
        attempt = Attempt(case, self, folder, forked=forked)
        attempt.run()
        row = {
            "case": case.number,
            "placement": case.placement,
            "processes": "forked" if forked else "new",
            "strikes": attempt.strikes,
            "ok": not attempt.failures,
            "failures": attempt.failures,
            "seconds": round(time.monotonic() - begin, 1),
        }
        if attempt.failures:
            row["folder"] = str(folder)
        else:
            shutil.rmtree(folder)
        return row


@dataclass(frozen=True)
class Undisturbed:
    """A run to compare with.

    - `seconds`: From its start to its end.
    """

    out: Path
    seconds: float

    @property
    def log_bytes(self) -> int:
        """Length of its log."""
        return (self.out / "steps.jsonl").stat().st_size


@dataclass
class Attempt:
    """One case as it is carried out.

    - `strikes`: Each strike in words, whether it came, and what the command did.
    """

    case: Case
    suite: Suite
    folder: Path
    forked: bool
    strikes: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Strike, resume, and compare."""
        self._surroundings = Surroundings(self.folder)
        self._whole = self.suite.undisturbed(self.case.placement, forked=self.forked)
        self._out = self.folder / "out"
        self._logged = b""
        try:
            for number, strike in enumerate(self.case.strikes):
                self._strike(number, strike)
            last = self._started(len(self.case.strikes), {})
            self._expect(last.wait() == 0, f"the last run ended with {last.status}: {_tail(last.output)}")
            self._check_reported(last)
            self._expect(not self._surroundings.left(), f"left at the end: {self._surroundings.left()}")
            self._compare()
        except Waited as error:
            self.failures.append(str(error))
            self._end()

    def _started(self, number: int, more: dict[str, str]) -> Command:
        resume = ["--resume"] if number else []
        arguments = [*self.suite.arguments(self.case.placement, self._out), *resume]
        log = self.folder / f"said-{number}"
        self._command = Command(arguments, self._surroundings, log, more, forked=self.forked)
        return self._command

    def _end(self) -> None:
        self._command.end()

    # -- a strike ----------------------------------------------------------------------------------------------

    def _strike(self, number: int, strike: Strike) -> None:
        handshake = self.folder / f"point-{number}"
        handshake.mkdir()
        command = self._started(number, strike.point.variables(handshake) if strike.point else {})
        self._wait_for_instant(command, strike, handshake)
        wait_until(
            lambda: command.pid_of(strike.target) is not None or command.status is not None, strike.target
        )
        came = command.status is None and command.send(strike.number, strike.target)
        if strike.signal == "SIGSTOP" and came and num_ranks(self.case.placement) == 1:
            self._let_go_on(command, strike)
        (handshake / "sent").touch()
        status = command.wait()
        self._look(command, strike, came=came, status=status)

    def _wait_for_instant(self, command: Command, strike: Strike, handshake: Path) -> None:
        begin, log, before = time.monotonic(), self._out / "steps.jsonl", len(self._logged)

        def is_reached() -> bool:
            if command.status is not None:
                return True
            if strike.point is not None:
                return (handshake / "reached").exists()
            if strike.log_part is not None:
                wanted = before + strike.log_part * (self._whole.log_bytes - before)
                return log.exists() and log.stat().st_size >= wanted > before
            assert strike.time_part is not None
            return time.monotonic() - begin >= strike.time_part * self._whole.seconds

        wait_until(is_reached, strike.when)

    def _let_go_on(self, command: Command, strike: Strike) -> None:
        """Let a lone process that was stopped go on, once it stands still: nobody waits for it, so nothing happens."""
        pid = command.pid_of(strike.target)
        assert pid is not None
        wait_until(
            lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "a process that stands still"
        )
        command.send(signal.SIGCONT, strike.target)

    def _look(self, command: Command, strike: Strike, *, came: bool, status: int) -> None:
        """Hold what the command did against what a strike may do."""
        output = command.output
        self._expect("Traceback" not in output, f"{strike.when}: a traceback: {_tail(output)}")
        self._expect(
            "sitecustomize" not in output, f"{strike.when}: it could not be aimed at: {_tail(output)}"
        )
        self._check_reported(command)
        allowed = self._allowed(strike) if came else {0}
        self._expect(
            status in allowed, f"{strike.when}: exit status {status}, not {allowed}: {_tail(output)}"
        )
        if came and strike.signal == "SIGSTOP" and num_ranks(self.case.placement) > 1:
            self._expect(
                strike.target in output, f"{strike.when}: {strike.target} is not named: {_tail(output)}"
            )
        is_dead = came and strike.signal == "SIGKILL" and strike.target in ("launcher", "group")
        left = self._surroundings.left()
        self._expect(is_dead or not left, f"{strike.when}: left after {strike.signal}: {left}")
        self.strikes.append(
            {
                "signal": strike.signal,
                "target": strike.target,
                "when": strike.when,
                "came": came,
                "exit_status": status,
                "steps_logged": self._num_logged(),
            }
        )

    def _allowed(self, strike: Strike) -> set[int]:
        """Return the exit statuses that a command may have after a strike that came; 0 if it was about to end."""
        if strike.signal == "SIGSTOP":
            return {0} if num_ranks(self.case.placement) == 1 else {2}
        at_once = {"SIGKILL": {-9}, "SIGTERM": {-15, 143}, "SIGINT": {130}}[strike.signal]
        return {0, 2} if strike.target.startswith("rank") else {0} | at_once

    # -- the log -----------------------------------------------------------------------------------------------

    def _num_logged(self) -> int:
        return len(_steps(self._log()))

    def _log(self) -> bytes:
        path = self._out / "steps.jsonl"
        return path.read_bytes() if path.exists() else b""

    def _check_reported(self, command: Command) -> None:
        """Hold what a command said, and what it left in the log, against the log before it."""
        output, log = command.output, self._log()
        before = len(_steps(self._logged))
        resumed = re.search(r"resuming after (\d+) steps", output)
        if resumed:
            self._expect(int(resumed[1]) == before, f"went on after {resumed[1]} steps, {before} were logged")
        kept = b"".join(_steps(self._logged))
        self._expect(log.startswith(kept), f"of {before} logged steps some were lost or written again")
        reported = [int(n) for n in re.findall(rf"^step +(\d+)/{STEPS} ", output, flags=re.MULTILINE)]
        lost = max(reported, default=0) - len(_steps(log))
        self._expect(lost <= 0, f"{lost} steps were told to the user and are not in the log")
        self._logged = log

    def _compare(self) -> None:
        """Hold the run against the undisturbed one."""
        out, whole = self._out, self._whole.out
        self._expect(not list(out.rglob("*.partial")), f"half files: {list(out.rglob('*.partial'))}")
        # Of a run that had all its steps when it died, its last process has measured none.
        names = [
            sorted(str(p.relative_to(d)) for p in d.rglob("*") if p.name != "timeline.json")
            for d in (out, whole)
        ]
        self._expect(names[0] == names[1], f"other files: {sorted(set(names[0]) ^ set(names[1]))}")
        for name in names[1]:
            if name.endswith(".safetensors") and (out / name).exists():
                same = (out / name).read_bytes() == (whole / name).read_bytes()
                self._expect(same, f"{name} is not that of the undisturbed run")
        for name in ("steps.jsonl", "metrics.jsonl", "digests.jsonl"):
            rows = [_timeless(d / name) for d in (out, whole)]
            self._expect(rows[0] == rows[1], f"{name} is not that of the undisturbed run")
        ends = [json.loads((d / "run.json").read_text()).get("finished", {}) for d in (out, whole)]
        for key in ("num_steps", "first_loss", "last_loss", "digest", "evaluation", "best_evaluation"):
            self._expect(ends[0].get(key) == ends[1].get(key), f"run.json: {key} is another")

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)


def _steps(log: bytes) -> list[bytes]:
    """Return the complete steps of a log, each with all its lines."""
    lines = [line for line in log.splitlines(keepends=True) if line.endswith(b"\n")]
    steps: dict[int, list[bytes]] = {}
    for line in lines:
        steps.setdefault(json.loads(line)["step"], []).append(line)
    perturbations = max(map(len, steps.values()), default=1)
    return [b"".join(lines) for lines in steps.values() if len(lines) == perturbations]


def _timeless(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in rows]


def _tail(output: str) -> str:
    return output[-2000:]


def write_inputs(folder: Path) -> None:
    """Write a tiny model, and lines of tokens, in a process of their own: it starts threads, commands are forked from this one."""
    writer = multiprocessing.get_context("fork").Process(target=_write_inputs, args=(folder,))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise RuntimeError(f"the inputs were not written: exit status {writer.exitcode}")


def _write_inputs(folder: Path) -> None:
    from tests.support.command import saved_lines, saved_model

    saved_lines(folder / "data.jsonl")
    saved_model("opt", folder)


def main(words: list[str] | None = None) -> int:
    """Run cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="tasks.py kills")
    parser.add_argument("--count", type=int, default=200, help="cases; 200 by default")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule; 0 by default")
    parser.add_argument("--first", type=int, default=0, help="number of the first case; 0 by default")
    parser.add_argument(
        "--placement", action="append", choices=PLACEMENTS, help="again for more; all by default"
    )
    parser.add_argument(
        "--new-python-every",
        type=int,
        default=4,
        metavar="N",
        help="start the processes of every N-th case as new Pythons, and fork those of the others; 4 by default, 0: none",
    )
    parser.add_argument("--list", action="store_true", help="print the schedule, and kill nothing")
    parser.add_argument(
        "--sweep", action="store_true", help="kill one `zosim sweep` --count times instead, and its workers"
    )
    given = parser.parse_args(words)
    if given.sweep:
        return _kill_sweep(given.count, given.seed)
    placements = tuple(given.placement or PLACEMENTS)
    cases = [case_of(given.seed, given.first + i, placements) for i in range(given.count)]
    if given.list:
        for case in cases:
            struck = "; ".join(f"{s.signal} to {s.target} at {s.when}" for s in case.strikes)
            print(f"{case.number:4}  {case.placement:24}{struck}")
        return 0
    # A shell that starts a command in the background has it, and all that it starts, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.take_own_shared_memory()
    processes.preload()
    folder = Path(tempfile.mkdtemp(prefix="zosim-kills-"))
    suite, rows = Suite(folder, new_python_every=given.new_python_every), []
    for case in cases:
        rows.append(suite.run(case))
        print(json.dumps(rows[-1]), flush=True)
    failed = [row for row in rows if not row["ok"]]
    print(summary(rows), file=sys.stderr)
    if failed:
        print(
            f"failed: {', '.join(str(row['case']) for row in failed)}; their files: {folder}", file=sys.stderr
        )
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _kill_sweep(count: int, seed: int) -> int:
    """Kill a sweep so often, and return 1 if its table is not that of one that nobody disturbed."""
    from tests.kills import sweeps

    with tempfile.TemporaryDirectory(prefix="zosim-kills-") as folder:
        num_came = sweeps.killed(Path(folder) / "killed", count, seed)
        tables = [sweeps.table_of(Path(folder) / "killed" / "grid.sqlite")]
        sweeps.killed(Path(folder) / "whole", 0)
        tables.append(sweeps.table_of(Path(folder) / "whole" / "grid.sqlite"))
    is_same = tables[0] == tables[1]
    print(f"{num_came} kills of a sweep; its table is {'' if is_same else 'not '}that of an undisturbed one")
    return 0 if is_same else 1


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a table: strikes that came, by placement and signal; cases; cases that failed."""
    signals = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")
    came: Counter[tuple[str, str]] = Counter()
    for row in rows:
        came.update((row["placement"], s["signal"]) for s in row["strikes"] if s["came"])
    lines = [f"{'placement':26}" + "".join(f"{name:>9}" for name in (*signals, "cases", "failed"))]
    groups = {name: [row for row in rows if row["placement"] == name] for name in PLACEMENTS}
    for name, own in groups.items():
        if own:
            counts = [*(came[name, s] for s in signals), len(own), sum(not row["ok"] for row in own)]
            lines.append(f"{name:26}" + "".join(f"{count:9}" for count in counts))
    totals = [sum(came[name, s] for name in PLACEMENTS) for s in signals]
    totals += [len(rows), sum(not row["ok"] for row in rows)]
    lines.append(f"{'all':26}" + "".join(f"{count:9}" for count in totals))
    missed = sum(not s["came"] for row in rows for s in row["strikes"])
    return "\n".join([*lines, f"{missed} strikes came too late: the run had ended"])
