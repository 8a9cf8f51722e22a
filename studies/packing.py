"""An exercise as a zip: what a student gets, or what an instructor gets besides."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

from topology.errors import ZosimError

Reader = Literal["student", "instructor"]

_ROOT = Path(__file__).parent
# Solutions are in a clone alone, and not in what a student installs.
_SOLUTIONS = _ROOT.parent / "tests" / "support" / "solved"
# Fixed, so that the same exercise has the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
_STUDENT = """Exercise {name}

1. Read page.md; `zosim study {name}` shows it, too.
2. Copy stub.py to mine.py and fill it in.
3. zosim study {name} --check mine.py

A solution imports what stub.py imports, numpy, torch and a few modules of Python. It needs no file, process or network.
It runs on a laptop without a GPU.
"""
_INSTRUCTOR = """
For the instructor

solution.py has a right solution, `right`, and usual mistakes, WRONG, each with a part of the hint that it gets.
To grade a class, put the submissions in a folder, a file for each student:

    zosim study {name} --check submissions --json > grades.json

Each runs in a process of its own, one after the other, with limits of time and memory, and without sockets and written files.
This is no prison: grade code of people whom you do not trust in a container.
"""


def pack(study: str, reader: Reader, folder: Path) -> Path:
    """Write an exercise for a reader into a folder and return the zip's path.

    Raises
    ------
    ZosimError
        If the solution is wanted and not there, or the file cannot be written.
    """
    files = {
        "README.txt": _STUDENT.format(name=study),
        "page.md": (_ROOT / study / "page.md").read_text(encoding="utf-8"),
        "stub.py": (_ROOT / study / "stub.py").read_text(encoding="utf-8"),
    }
    if reader == "instructor":
        solution = _SOLUTIONS / f"{study}.py"
        if not solution.is_file():
            raise ZosimError(
                f"the solution of {study} is not installed", hint="pack for instructors in a clone of zosim"
            )
        files["README.txt"] += _INSTRUCTOR.format(name=study)
        files["solution.py"] = solution.read_text(encoding="utf-8")
    path = folder / f"{study}-{reader}.zip"
    try:
        with zipfile.ZipFile(path, "w") as packed:
            for name, text in files.items():
                packed.writestr(zipfile.ZipInfo(f"{study}/{name}", _DATE), text, zipfile.ZIP_DEFLATED)
    except OSError as error:
        message = f"cannot write {str(path)!r}: {error.strerror}"
        raise ZosimError(message, hint="change to a directory that you may write to") from error
    return path
