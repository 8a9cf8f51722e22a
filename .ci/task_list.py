"""What each task does. Standard library only: this runs before anything is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import environment
import here
import lock as locking

ROOT = environment.ROOT
LOCKED = environment.Environment()
HERE = "--here"

STATIC_CHECKS: dict[str, list[str]] = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "imports": ["lint-imports", "--no-logo"],
}

BUILD_SITE = ["python", str(ROOT / ".ci" / "build_site.py")]

BESIDE_TESTS = {"types": STATIC_CHECKS["types"]}
BESIDE_ALL_TESTS = {**BESIDE_TESTS, "site": BUILD_SITE}


def demo(arguments: Sequence[str]) -> int:
    """Set up, then plan, simulate, run and compare on this machine (arguments go to `zosim demo`)."""
    return _tool(["zosim", "demo", *arguments])


def test(arguments: Sequence[str]) -> int:
    """Set up, then check all; `--full`: slow tests too, as CI; with other arguments pytest alone (`--set lowest|newest`)."""
    full = ["--run-slow"] if "--full" in arguments else []
    chosen = [argument for argument in arguments if argument != "--full"]
    if "--set" in chosen:
        return _test_with(chosen, full)
    if chosen:
        return _tool(["pytest", *full, *chosen])
    failed = [name for name in STATIC_CHECKS if name != "types" and _static(name) != 0]
    # Beside the tests: types, without a cache, as in a fresh clone, and with --full the site, each take one core for most of a minute.
    with ThreadPoolExecutor(1) as pool:
        commands = BESIDE_ALL_TESTS if full else BESIDE_TESTS
        beside = {name: pool.submit(_outcome, command) for name, command in commands.items()}
        if not _tests(full):
            failed.append("tests")
        for name, done in beside.items():
            code, text = done.result()
            _title(name)
            print(text, end="")
            if code != 0:
                failed.append(name)
    return _verdict(failed)


def _outcome(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a program of the environment."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        code = _tool(command, output)
        output.seek(0)
        return code, output.read()


def _tests(full: Sequence[str]) -> bool:
    """Whether all tests pass."""
    _title("tests, and the commands of the README")
    # Files stay together: many of them train one model for all their tests. The order is that of the folders, as the
    # files with few tests are the long ones, which must not come last. No limit in time: pyproject.toml has one for
    # a test that hangs. One worker more than there are cores: what tests wait for ranks that stand still comes to over a
    # minute, in which it works.
    num_workers = min(4, (os.cpu_count() or 1) + 1)
    parallel = ["-n", str(num_workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    return _tool(["pytest", *parallel, *full]) == 0


def _test_with(arguments: list[str], full: Sequence[str]) -> int:
    """Run pytest with another set of versions, and say which they are."""
    at = arguments.index("--set")
    versions = arguments[at + 1] if len(arguments) > at + 1 else ""
    if versions not in environment.REQUIREMENTS:
        print(f"error: --set {versions} is none of {', '.join(environment.REQUIREMENTS)}", file=sys.stderr)
        return 2
    chosen = environment.Environment(versions)
    chosen.ensure()
    # Old packages warn of the Python and of the packages that came after them, which is nothing that we could mend.
    quiet = (
        ["-W", "default::DeprecationWarning", "-W", "default::SyntaxWarning"] if versions == "lowest" else []
    )
    code = _tool(["pytest", *quiet, *full, *arguments[:at], *arguments[at + 2 :]], of=chosen)
    changes = [f"{name} {has} (locked: {locked})" for name, has, locked in environment.differences(chosen)]
    print(f"\n== {versions} versions: {', '.join(changes) or 'those that are locked'}")
    return code


def lock(arguments: Sequence[str]) -> int:
    """Write uv.lock, requirements.txt and pylock.toml anew (`lock --upgrade`: the newest within pyproject.toml's bounds)."""
    return locking.lock(arguments)


def check(_: Sequence[str]) -> int:
    """Format, lint, types and imports: what `test` does besides the tests."""
    return _verdict([name for name in STATIC_CHECKS if _static(name) != 0])


def format_(arguments: Sequence[str]) -> int:
    """Rewrite the sources in the project's format."""
    return _tool(["ruff", "format", *(arguments or ["."])])


def lint(arguments: Sequence[str]) -> int:
    """Ruff's lint rules (`lint --fix` repairs what it can)."""
    return _tool(["ruff", "check", *arguments, "."])


def types(_: Sequence[str]) -> int:
    """Check the types with mypy, strictly in the torch-free packages."""
    return _static("types")


def imports(_: Sequence[str]) -> int:
    """Check that imports point one way and that planning needs no torch."""
    return _static("imports")


def docs(_: Sequence[str]) -> int:
    """Write docs/reference/commands.md anew, build the site into build/site, then run the commands that pages show."""
    written = _tool(["python", str(ROOT / ".ci" / "commands_page.py")])
    return written or _tool(BUILD_SITE) or _tool(["pytest", "--run-slow", "tests/repository/test_readme.py"])


def fuzz(arguments: Sequence[str]) -> int:
    """Break valid inputs of every reader and command (`fuzz --minutes 30 --workers 2 --keep`)."""
    return _tool(["python", "-m", "tests.fuzz", *arguments])


def kills(arguments: Sequence[str]) -> int:
    """Kill runs at chosen and random instants, and resume them (`kills --count 200 --seed 0 --placement 2d`)."""
    return _tool(["python", "-m", "tests.kills", *arguments])


def freeze(arguments: Sequence[str]) -> int:
    """Write hashes of what runs, plans and claims come to: `freeze FILE` before a refactoring."""
    return _tool(["python", "-m", "tests.corpus", "freeze", *arguments])


def compare(arguments: Sequence[str]) -> int:
    """Print what differs from a frozen FILE: `compare FILE` after a refactoring (`--every 20`: a sample)."""
    return _tool(["python", "-m", "tests.corpus", "compare", *arguments])


def gpu(arguments: Sequence[str]) -> int:
    """Check a CUDA device: parity, tests, kills, calibration, speed (`--simulated`: rehearse; `--here`: install nothing)."""
    rest = [argument for argument in arguments if argument not in ("--simulated", HERE)]
    if _is_here(arguments):
        rest = here.prepared(rest)
    module = "tests.support.simulated_cuda.first_hour" if "--simulated" in arguments else "studies.first_hour"
    if not _is_here(arguments):
        return _tool(["python", "-m", module, *rest])
    # With the packages of this Python, where there is no index to install from: from the source tree alone.
    paths = [str(ROOT), str(here.PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *rest]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def _is_here(arguments: Sequence[str]) -> bool:
    """Whether to run with the packages of this Python: where there are wheels to add, there is no index."""
    return HERE in arguments or here.FIND_LINKS in arguments


def clean(_: Sequence[str]) -> int:
    """Remove the environments and every cache."""
    caches = [".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache", "build"]
    folders = [environment.Environment(versions).folder.name for versions in environment.REQUIREMENTS]
    for name in [*folders, *caches, "zosim.egg-info"]:
        shutil.rmtree(ROOT / name, ignore_errors=True)
    for folder in list(ROOT.rglob("__pycache__")):
        shutil.rmtree(folder, ignore_errors=True)
    return 0


TASKS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "test": test,
    "check": check,
    "format": format_,
    "lint": lint,
    "types": types,
    "imports": imports,
    "docs": docs,
    "fuzz": fuzz,
    "kills": kills,
    "freeze": freeze,
    "compare": compare,
    "gpu": gpu,
    "lock": lock,
    "clean": clean,
}


def main(arguments: Sequence[str]) -> int:
    """Run the named task in the project's environment; without a name, list the tasks."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    name, *rest = arguments
    if name not in TASKS:
        print(f"error: no task {name!r}\n\nhint: one of {', '.join(TASKS)}", file=sys.stderr)
        return 2
    try:
        needs_none = (
            name in ("clean", "lock")
            or (name == "gpu" and _is_here(rest))
            or (name == "test" and "--set" in rest)
        )
        if not needs_none:
            LOCKED.ensure()
        return TASKS[name](rest)
    except environment.SetupError as error:
        print(f"\nerror: {error.message}\n\nhint: {error.hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:9}{(task.__doc__ or '').splitlines()[0]}" for name, task in TASKS.items()]
    return "\n".join(["usage: python3 .ci/tasks.py TASK [ARGUMENTS]", "", *lines])


def _static(name: str) -> int:
    _title(name)
    return _tool(STATIC_CHECKS[name])


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _tool(command: Sequence[str], output: IO[str] | None = None, of: environment.Environment = LOCKED) -> int:
    """Exit code of a program of an environment, run at the top of the clone; what it says goes to a file, if one is given."""
    program, *arguments = command
    path = os.pathsep.join([str(of.bin), os.environ.get("PATH", "")])
    variables = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(of.folder)}
    # Some machines switch bytecode off. Every worker and every command of a test would compile all the sources then.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(of.bin / program), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=variables, stdout=output, stderr=output and subprocess.STDOUT, check=False
    ).returncode


def _verdict(failed: Sequence[str]) -> int:
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
