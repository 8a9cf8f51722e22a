"""The commands shown in README.md and in the pages of docs/ and studies/ do what is shown.

A block of commands is preceded by a comment that says how it is run:

``<!-- run -->``
    Every line that begins with ``$`` is run, in order, and must exit with 0.
``<!-- run: compare -->``
    The output must also be what the block shows; ``...`` stands for anything.
``<!-- run with: OLD -> NEW; OLD -> NEW -->``
    The same as ``run``, with these texts replaced: a small model in place of a large one, for example.
``<!-- run by: FILE -->``
    FILE, which CI runs, names the commands and runs them, or what they call; so they are not run again.
``<!-- not run: REASON -->``
    Left alone, for the reason given. Not in README.md.

A block of Python may be ``run``, too. The blocks of one page share a directory that starts out empty. Commands begin as
copies of one Python that has imported torch; those of one page are new Pythons, as a reader's are.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import HANG_S, wait_until
from tests.support.warm_python import serve, warm_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("studies/**/*.md"))]
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>(?:(?!-->).)*?) -->\n+)?```(?P<language>console|bash|sh|python)\n(?P<body>.*?)```",
    re.DOTALL,
)
RUN = re.compile(r"run$|run: |run with: ")
OF_NEW_PYTHONS = ROOT / "docs" / "tutorials" / "first-run.md"
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "COLUMNS": "110"}


@dataclass(frozen=True)
class Block:
    """Commands of a page, with the output that the page shows for each."""

    mark: str
    commands: tuple[tuple[str, str], ...]


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["mark"] or "", tuple(_commands_of(match))) for match in found]


def _commands_of(block: re.Match[str]) -> list[tuple[str, str]]:
    body = block["body"]
    if block["language"] == "python":
        return [(f"python - <<'END'\n{body}END\n", "...")]
    for replaced in (block["mark"] or "").removeprefix("run with: ").split("; "):
        old, arrow, new = replaced.partition(" -> ")
        assert not arrow or old in body, f"the block has no {old!r}"
        body = body.replace(old, new) if arrow else body
    return commands(body)


def commands(body: str) -> list[tuple[str, str]]:
    """Commands of a block, and the lines that follow each."""
    joined = body.replace("\\\n", " ")
    pieces = re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]
    return [(first, rest) for first, _, rest in (piece.partition("\n") for piece in pieces)]


def is_as_shown(shown: str, actual: str) -> bool:
    """Whether an output is the one shown, up to ``...`` and the amount of white space."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    return re.fullmatch(r"\s?.*\s?".join(parts), " ".join(actual.split()), re.DOTALL) is not None


def run(command: str, directory: Path, programs: Path) -> str:
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=directory,
        env={**ENVIRONMENT, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{shlex.quote(command)} exits with {result.returncode}:\n{result.stderr}"
    return result.stdout


def with_commands() -> list[Path]:
    return [page for page in PAGES if any(RUN.match(block.mark) for block in blocks(page))]


@pytest.fixture(scope="module")
def copies() -> Iterator[Path]:
    with warm_commands(ENVIRONMENT) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("page", with_commands(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_do_what_the_page_shows(page: Path, tmp_path: Path, copies: Path) -> None:
    programs = Path(sys.executable).parent if page == OF_NEW_PYTHONS else copies
    for block in blocks(page):
        for command, shown in block.commands if RUN.match(block.mark) else ():
            actual = run(command, tmp_path, programs)
            if block.mark == "run: compare":
                assert is_as_shown(shown, actual), (
                    f"$ {command}\n{actual}\n--- but {page.name} shows\n{shown}"
                )


def test_every_block_of_the_readme_is_run() -> None:
    by = "run by: "
    found = blocks(ROOT / "README.md")
    assert [
        block.mark for block in found if not RUN.match(block.mark) and not block.mark.startswith(by)
    ] == []
    assert len(found) == (ROOT / "README.md").read_text(encoding="utf-8").count("```") // 2
    for block in found:
        if block.mark.startswith(by):
            runner = (ROOT / block.mark.removeprefix(by)).read_text(encoding="utf-8")
            assert all(command in runner for command, _ in block.commands)


@pytest.mark.parametrize(
    ("shown", "actual", "expected"),
    [
        ("a 1\nb 2\n", "a   1\nb 2", True),
        ("a ...\nb 2\n", "a 17 s\nb 2\n", True),
        ("a 1\n", "a 2\n", False),
        ("", "surprise\n", False),
        ("...", "", True),
    ],
)
def test_the_comparison_itself(shown: str, actual: str, *, expected: bool) -> None:
    assert is_as_shown(shown, actual) is expected


def test_a_command_may_go_on_over_several_lines() -> None:
    assert commands("$ a \\\n  b\nout\n$ c\n") == [("a    b", "out\n"), ("c", "")]


def test_the_python_of_the_commands_ends_with_whoever_started_it(tmp_path: Path) -> None:
    ours, its = os.pipe()

    def begin() -> None:
        os.setsid()
        os.dup2(ours, 0)
        os.close(its)
        serve(str(tmp_path / "socket"))

    server = multiprocessing.get_context("fork").Process(target=begin)
    server.start()
    wait_until((tmp_path / "socket").exists, "the server")
    assert server.is_alive()
    os.close(its)  # as the kernel does for a process that is killed
    server.join(HANG_S)
    os.close(ours)
    assert server.exitcode == -signal.SIGKILL
