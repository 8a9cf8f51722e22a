"""What help pages say of every command and option, and how they look."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from zosim import cli, help_pages, registry
from zosim.headings import COMMANDS as BY_HEADING
from zosim.headings import HEADINGS

RIDDLES = re.compile(r"(Of|Most|What|As|The same|Such|By|Which|They|It)\b")

VERBS = [
    "Check",
    "Choose",
    "Compare",
    "Count",
    "Describe",
    "Detect",
    "Draw",
    "Export",
    "Grade",
    "Import",
    "List",
    "Measure",
    "Plan",
    "Predict",
    "Rank",
    "Read",
    "Rebuild",
    "Repeat",
    "Save",
    "Serve",
    "Show",
    "Train",
    "Tune",
    "Write",
]

# What numbers of options are numbers of: a unit, or something that is counted.
UNITS = re.compile(
    r"\b(number|seconds|milliseconds|numbers|tokens|seed|rank|port|priority|fraction|epsilon|rate|decay|scale|divided|order|"
    r"increase|learning rate)\b",
    re.IGNORECASE,
)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command, groups included, with the words that name it."""
    pending = [(name, cli.build(name, registry.load(entry))) for name, entry in registry.registered().items()]
    while pending:
        path, command = pending.pop()
        yield path, command
        pending += [(f"{path} {name}", inner) for name, inner in getattr(command, "commands", {}).items()]


COMMANDS = dict(commands())
OPTIONS = {
    f"{path} {help_pages.names(parameter)}": (parameter, help_pages.types_of(command).get(parameter.name))
    for path, command in COMMANDS.items()
    for parameter in command.params
    if parameter.name != "help"
}


def test_every_command_stands_under_one_heading() -> None:
    listed = [name for names in BY_HEADING.values() for name in names]
    assert sorted(listed) == sorted(registry.registered())


def test_there_are_commands_and_options_to_look_at() -> None:
    assert {"plan", "run", "topology show", "evidence make"} <= set(COMMANDS)
    assert len(OPTIONS) > 300


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_a_command_says_what_to_do_in_a_line(path: str) -> None:
    first = (COMMANDS[path].help or "").strip().splitlines()[0]
    assert first.split()[0].rstrip(",") in VERBS
    assert first.endswith(".")
    assert len(first) <= 110


EXAMPLES = [
    line.strip()
    for command in COMMANDS.values()
    for line in (command.help or "").partition("For example:\n")[2].splitlines()
]


@pytest.mark.parametrize("example", [line for line in EXAMPLES if line.startswith("zosim ")])
def test_examples_are_command_lines_of_today(example: str) -> None:
    assert len(f"  {example}") <= 80
    _, *words = shlex.split(example)
    path = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS)
    COMMANDS[path].make_context(path, words[len(path.split()) :])


def test_every_option_says_what_it_sets() -> None:
    texts = {name: " ".join((option.help or "").split()) for name, (option, _) in OPTIONS.items()}
    assert [name for name, text in texts.items() if not text.endswith((".", '."'))] == []
    assert [text for text in texts.values() if RIDDLES.match(text)] == []
    assert [text for text in texts.values() if not text[:1].isupper()] == []
    assert [text for text in texts.values() if not text.isascii()] == []


def test_every_option_states_its_default_once_and_in_one_way() -> None:
    for name, (option, typed) in OPTIONS.items():
        text = help_pages.meaning(option, typed)
        assert "by default" not in text.lower(), name
        assert "default:" not in (option.help or "").lower(), name
        assert text.count("Default: ") + text.count("Required.") <= 1, name
        if option.default not in (None, False, "", ()) and not callable(option.default):
            assert text.count("Default: ") == 1, (name, option.default)


def test_numbers_have_a_unit_or_are_of_something() -> None:
    bare = [
        (name, option.help)
        for name, (option, typed) in OPTIONS.items()
        if {int, float} & {typed, *get_args(typed)} and not UNITS.search(option.help)
    ]
    assert bare == []


@pytest.mark.parametrize("name", ["plan", "run", "buy", "predict", "simulate"])
def test_options_stand_under_headings_in_the_order_in_which_people_decide(name: str, capsys) -> None:
    with pytest.raises(SystemExit):
        COMMANDS[name].main(["--help"], prog_name=f"zosim {name}")
    lines = capsys.readouterr().out.splitlines()
    headings = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    headings = [heading for heading in headings if heading not in ("For example", "Arguments")]
    assert headings == [heading for heading in (*HEADINGS, "Help") if heading in headings]
    assert "Output" in headings


def test_the_page_of_a_run_leaves_options_of_experts_to_help_all(capsys) -> None:
    shown = {}
    for word in ("--help", "--help-all", "--help"):
        with pytest.raises(SystemExit):
            COMMANDS["run"].main([word], prog_name="zosim run")
        shown[word] = capsys.readouterr().out
    assert all(option in shown["--help"] for option in ("--model", "--data", "--out", "--steps", "--lr"))
    assert "--weight-fit" not in shown["--help"]
    assert "--weight-fit" in shown["--help-all"]
    assert "--loss-chunk " not in shown["--help-all"]  # a synonym


PRINT_ALL = """
import sys
from zosim import cli, registry
pending = [([], cli.command())]
pending += [([name], cli.build(name, registry.load(entry))) for name, entry in registry.registered().items()]
while pending:
    path, command = pending.pop()
    pending += [([*path, name], inner) for name, inner in getattr(command, "commands", {}).items() if path]
    for word in ("--help", "--help-all"):
        if any(word in option.opts for option in command.get_params(command.make_context("x", [], resilient_parsing=True))):
            command.main([word], prog_name=" ".join(["zosim", *path]), standalone_mode=False)
"""


@pytest.mark.slow
def test_every_page_reads_in_a_narrow_pipe_of_ascii() -> None:
    variables = {
        **os.environ,
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
    }
    done = subprocess.run([sys.executable, "-c", PRINT_ALL], env=variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode("ascii").splitlines()
    assert sum(line.startswith("Usage: ") for line in lines) > len(COMMANDS)
    assert [line for line in lines if len(line) > 80] == []
    assert "\x1b" not in done.stdout.decode()
