"""Exercises: a solution in a file of its own, tried by its study's ``check`` in a process that can do little else.

A teacher runs the code of many students. A solution may import `ALLOWED` and nothing more, so that it neither takes the answer from this
package nor reaches the machine. It runs in a process of its own with limits of time, memory and file size, where sockets, processes, writing files
and reading those of others are refused. This keeps mistakes and copied answers out. It is no prison: code that is written to attack the
grader belongs in a container.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from topology.errors import ZosimError
from topology.reading import read_text

ALLOWED = (
    "collections",
    "dataclasses",
    "fractions",
    "functools",
    "itertools",
    "math",
    "numpy",
    "statistics",
    "torch",
    "typing",
)
"""Modules that a solution may import."""

MAX_SECONDS = 600.0
"""Long, since a class may share the machine; a loop without an end is stopped by its processor time before."""
MAX_PROCESSOR_SECONDS = 120
MAX_MEMORY_BYTES = 8 * 2**30
"""Address space, of which torch reserves several times what it uses."""
MAX_FILE_BYTES = 0

_REACHES_OUT = frozenset(
    (
        "__import__",
        "breakpoint",
        "compile",
        "delattr",
        "eval",
        "exec",
        "getattr",
        "globals",
        "input",
        "locals",
        "open",
        "setattr",
        "vars",
    )
)
"""Names by which a solution would get around the list of modules."""
_MODULES_AND_FRAMES = frozenset(
    (
        "builtins",
        "cr_frame",
        "ctypes",
        "ctypeslib",
        "f_back",
        "f_globals",
        "gi_frame",
        "importlib",
        "inspect",
        "os",
        "sys",
        "tb_frame",
    )
)
"""Attributes that lead from an allowed module to others, such as ``dataclasses.sys``, and to the grader's own names."""
_OWN_METHODS = ("__init__", "__post_init__", "__call__")
"""Other special methods would let an answer say that it equals any number."""
_REFUSED_EVENTS = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "shutil.",
)
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Grade:
    """How a solution did."""

    passed: bool
    message: str  # what was seen, and where to look if it did not pass
    credit: float = 0.0  # share of the cases that were right before the first that was not
    # Position, the solution's value and the reference's, for exercises that draw one.
    curve: tuple[tuple[float, float, float], ...] = ()


def function_in(path: Path, name: str) -> Callable[..., Any]:
    """Return the function called `name` in a Python file.

    Raises ZosimError if there is no such file, it cannot be run, or it does not define the function.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ZosimError(f"{path} is not a Python file", hint="copy the exercise's stub.py and fill it in")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ZosimError(
            f"running {path} raised {type(error).__name__}: {error}", hint="correct it, then check again"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ZosimError(f"{path} has no function {name!r}", hint="keep the function name of the stub")
    return function  # type: ignore[no-any-return]


def tried(check: Callable[[Callable[..., Any]], Grade], solution: Callable[..., Any]) -> Grade:
    """Return the verdict on `solution`; an error that it raises is one."""
    try:
        return check(solution)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a student's code may raise anything
        return Grade(False, f"it raised {type(error).__name__}: {error}")


def plain(answer: object) -> object:
    """Return an answer with Python's lists and numbers for arrays, tensors and tuples."""
    if not isinstance(answer, list | tuple):
        return answer.tolist() if hasattr(answer, "tolist") else answer
    return [plain(each) for each in answer]


def grade(study: str, solution: Path, *, stub: str | None = None) -> Grade:
    """Return the verdict on a solution of a study's exercise, tried in a confined process.

    - `study`: its module under ``studies``.
    - `stub`: folder under ``studies`` whose stub the solution began as, if not the study's.

    Raises ZosimError if there is no such file, it is no Python, or it uses what a solution may not.
    """
    if not solution.is_file():
        raise ZosimError(
            f"there is no Python file {solution}", hint="copy the exercise's stub.py and fill it in"
        )
    stub = stub or study
    given = _imports(ast.parse((_ROOT / "studies" / stub / "stub.py").read_text(encoding="utf-8")))
    for line, used in _not_allowed(solution, {(module, name) for _, module, name in given}):
        raise ZosimError(
            f"{solution} line {line} uses {used}, which a solution may not",
            hint=f"a solution imports at most {', '.join(ALLOWED)}, and needs no file, process or network",
        )
    entry = "import sys; sys.path.insert(0, sys.argv[1]); from studies.exercises import _confined; _confined(*sys.argv[2:])"
    with tempfile.TemporaryDirectory(prefix="zosim-exercise-") as folder:
        # Isolated: no site of the user, no PYTHON* variables, no current directory on the path.
        command = [sys.executable, "-I", "-c", entry, str(_ROOT), study, stub, str(solution.resolve())]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Grade(False, f"it had not ended after {MAX_SECONDS:g} s: does a loop never end?")
    verdict = done.stdout.rpartition(_VERDICT)[2]
    if not verdict and -done.returncode in (signal.SIGKILL, getattr(signal, "SIGXCPU", None)):
        return Grade(
            False,
            f"it was stopped: does a loop never end (at most {MAX_PROCESSOR_SECONDS} s of a processor), or is memory short?",
        )
    if not verdict:
        why = done.stderr.strip().splitlines()
        return Grade(
            False,
            f"it ended with status {done.returncode} before there was a verdict"
            + (f", or {why[-1]}" if why else ""),
        )
    fields = json.loads(verdict)
    if "error" in fields:
        raise ZosimError(fields["error"], hint=fields["hint"])
    return Grade(**fields | {"curve": tuple(map(tuple, fields["curve"]))})


_VERDICT = "\nverdict: "


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of each import; an empty name for a module as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name, "") for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, "." * node.level + (node.module or ""), name.name) for name in node.names
            )


def _not_allowed(path: Path, given: Collection[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a solution that use what it may not, and what they use; `given` is what its stub imports."""
    try:
        tree = ast.parse(read_text(path, "solution", ZosimError))
    # A null byte is a ValueError in older Pythons, and nesting too deep ends in one of the last two.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = getattr(error, "msg", str(error)) or "it nests too deep"
        message = f"{path}{where} is no Python: {reason}"
        raise ZosimError(message, hint="run it with python to see where") from error
    for line, module, name in _imports(tree):
        # A future statement changes how the file is read and imports nothing.
        if module.partition(".")[0] not in (*ALLOWED, "__future__") and (module, name) not in given:
            yield line, f"the module {module}"
        elif _MODULES_AND_FRAMES & {*module.split("."), name}:
            yield line, f"{module}.{name}".rstrip(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in _REACHES_OUT or node.id.startswith("__")):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and (
            node.attr in _MODULES_AND_FRAMES or node.attr.startswith("__")
        ):
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.FunctionDef) and node.name.startswith("__") and node.name not in _OWN_METHODS
        ):
            yield node.lineno, node.name


def _confined(study: str, stub: str, solution: str) -> None:
    """Try a solution in this process, which is confined for good, and write the verdict to standard output."""
    # What a unit takes from a page's exercise is imported now: a confined process has no temporary files, which torch wants.
    import_module(f"studies.{stub.replace('/', '.')}.exercise")
    exercise = import_module(f"studies.{study}.exercise")
    written, sys.stdout = sys.stdout, sys.stderr
    _limit_resources()

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        reads = event == "open" and not _may_read(arguments[0], Path(solution))
        if writes or reads or event.startswith(_REFUSED_EVENTS):
            raise PermissionError(f"a solution may not use {event}")

    sys.addaudithook(refuse)
    before = _functions()
    try:
        function = function_in(Path(solution), exercise.FUNCTION)
        tried_it = tried(exercise.check, function)
        replaced = sorted(
            name for name, known in _functions().items() if before.get(name, known) is not known
        )
        if replaced:
            tried_it = Grade(False, f"it replaces {replaced[0]}, which the grader uses, too")
        verdict = asdict(tried_it) | {"curve": [] if replaced else _curve(exercise, function)}
    except ZosimError as error:
        verdict = {"error": error.message, "hint": error.hint}
    written.write(_VERDICT + json.dumps(verdict))
    written.flush()


def _functions() -> dict[str, Any]:
    """Return the functions and classes that the grader works with, by module and name; packages replace some of Python's own."""
    return {
        f"{module}.{name}": value
        for module, loaded in list(sys.modules.items())
        if module.partition(".")[0] in ("math", "numpy", "statistics", "studies", "torch")
        for name, value in list(getattr(loaded, "__dict__", {}).items())
        if callable(value)
    }


def _may_read(file: Any, solution: Path) -> bool:
    """Return whether a file is the solution or belongs to Python: not to the grader, the teacher or another student."""
    if isinstance(file, int):
        return True
    path = Path(os.fsdecode(file)).resolve()
    if path == solution:
        return True
    own = any(path.is_relative_to(_ROOT / folder) for folder in ("studies", "tests"))
    return not own and any(map(path.is_relative_to, (*filter(None, sys.path), "/proc", "/sys", "/dev")))


def _curve(exercise: Any, function: Callable[..., Any]) -> list[tuple[float, float, float]]:
    """Return what the exercise draws of a solution, as far as that has finite numbers."""
    if not hasattr(exercise, "curve"):
        return []
    try:
        rows = [(float(x), float(own), float(reference)) for x, own, reference in exercise.curve(function)]
    except (Exception, SystemExit):  # noqa: BLE001 - a student's code may raise anything
        return []
    return [row for row in rows if all(map(math.isfinite, row))]


def _limit_resources() -> None:
    try:
        import resource
    except ImportError:  # not on Windows, where the time limit remains
        return
    for limit, most in (
        (resource.RLIMIT_CPU, MAX_PROCESSOR_SECONDS),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
    ):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    import _posixsubprocess

    def refuse(*_: object) -> None:
        raise PermissionError("a solution may not start a process")

    # Spawned processes, such as workers of torch, begin here without an audit event, and would not be confined.
    vars(_posixsubprocess)["fork_exec"] = refuse
