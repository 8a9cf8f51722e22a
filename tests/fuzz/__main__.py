"""``python -m tests.fuzz``: cases for a number, or for as long as is asked."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
for _variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_variable] = "1"
os.environ["MPLBACKEND"] = "Agg"

import topology.detection
from tests.fuzz import harness
from tests.fuzz.cases import Case, Target
from tests.fuzz.commands import refuse_missing_commands
from tests.fuzz.targets import all_targets


def main() -> int:
    """Run what the arguments ask for; exit with 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description="Break valid inputs, and see that every one is refused in words."
    )
    parser.add_argument("--minutes", type=float, help="go on for so long; by default the quick run")
    parser.add_argument("--cases", type=int, help="cases of each target")
    parser.add_argument(
        "--total",
        type=int,
        help="cases of all targets together: a tenth in equal numbers, the others in equal processor time",
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--target", action="append", default=[], help="only targets whose names begin so")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--corpus", action="store_true", help="only the cases that were found before")
    parser.add_argument("--keep", action="store_true", help="save what is found to the corpus")
    given = parser.parse_args()
    topology.detection.detect = functools.cache(topology.detection.detect)  # half a second each, otherwise
    refuse_missing_commands(all_targets())
    targets = [t for t in all_targets() if not given.target or t.name.startswith(tuple(given.target))]
    if given.corpus:
        found_before = {name for name, _ in harness.stored(targets)}
        targets = [target for target in targets if target.name in found_before]
    for target in targets:
        target.kept  # noqa: B018 - seeds are made before workers are forked
    gc.freeze()  # what is there lives to the end; workers need not look at it again and again
    gc.set_threshold(20_000, 20, 20)
    return 1 if _run(targets, given).findings else 0


def _run(targets: list[Target], given: argparse.Namespace) -> harness.Report:
    by_name = {target.name: target for target in targets}
    known = dict(enumerate(harness.stored(targets)))

    def reload(name: str, number: int) -> Case:
        if number >= 0:
            return by_name[name].case(number)
        return Case.of_json(known[-1 - number][1].read_text(), by_name[name].kept)

    def reported(name: str, case: Case, outcome: harness.Outcome) -> None:
        print(
            f"\n{outcome.kind} in {name}: {outcome.where}\n{' '.join(case.argv)}\n{outcome.text}",
            file=sys.stderr,
            flush=True,
        )
        if given.keep:
            least = harness.smaller(by_name[name], case, outcome)
            print(f"saved {harness.save(name, least, outcome)}", file=sys.stderr, flush=True)

    report = harness.Report()
    new = _numbers(targets, given) if given.total is None else _shared_out(targets, given, report)
    jobs = itertools.chain(((name, -1 - key) for key, (name, _) in known.items()), new)
    harness.run_jobs(targets, jobs, reload, report, num_workers=given.workers, on_finding=reported)
    print("\n".join(report.lines()))
    return report


def _numbers(targets: list[Target], given: argparse.Namespace) -> Iterator[harness.Job]:
    """Yield cases, all targets in turn."""
    if given.corpus:
        return
    ends = {target.name: given.first + (given.cases or target.quick) for target in targets}
    until = time.monotonic() + 60 * given.minutes if given.minutes else None
    for number in itertools.count(given.first):
        names = [t.name for t in targets if until is not None or number < ends[t.name]]
        for name in names:
            if until is not None and time.monotonic() > until:
                return
            yield name, number
        if not names:
            return


def _shared_out(
    targets: list[Target], given: argparse.Namespace, report: harness.Report
) -> Iterator[harness.Job]:
    """Yield `given.total` cases, most of them of the target that has had the least processor time.

    A command takes a thousand times as long as a reader: in equal numbers, readers would be tried too little.
    """
    least = given.total // (10 * len(targets))
    begun = dict.fromkeys((target.name for target in targets), 0)
    for number in range(given.total):
        if number < least * len(targets):
            name = targets[number % len(targets)].name
        else:
            name = min(begun, key=lambda name: report.cpu_s[name])
        yield name, given.first + begun[name]
        begun[name] += 1


if __name__ == "__main__":
    sys.exit(main())
