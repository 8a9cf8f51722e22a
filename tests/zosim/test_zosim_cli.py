"""The command line's own duties: finding commands, failing readably, keeping the streams apart."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from topology.errors import PlanError, ZosimError
from zosim import cli, console, registry
from zosim.report import Bullets, Report, Table


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one call of the command."""
    command = typer.main.get_command(cli.app)
    with pytest.raises(SystemExit) as exit_info:
        command(arguments, prog_name="zosim")
    captured = capsys.readouterr()
    return exit_info.value.code or 0, captured.out, captured.err


PLUGIN = '''
"""Module of a plug-in."""
import typer

raise_at_import = {missing}
if raise_at_import:
    import {missing_name}

app = typer.Typer(help="A group of commands.")

@app.command()
def inner(count: int = 1) -> None:
    """Count."""
    print("inner", count)

def works() -> None:
    """Do the work.

    In more words.
    """
    print("done")

def mistake() -> None:
    """Fail as a user would."""
    from topology.errors import PlanError, ZosimError
    raise PlanError("batch=[0] must be positive", hint="use --batch 1, or install zosim[run]")

def bug() -> None:
    """Fail as we would."""
    raise ZeroDivisionError

def stopped() -> None:
    """Be interrupted."""
    raise KeyboardInterrupt

def wants_torch() -> None:
    """Import torch where there is none."""
    raise ModuleNotFoundError("no torch", name="torch.distributed")

def ignored() -> None:
    """Call a package that ignores what it is told."""
    import warnings
    warnings.warn("Using `cache=None`\\nand ignoring `past_key_values`.", FutureWarning)

def slow() -> None:
    """Call a package that warns of something else."""
    import warnings
    warnings.warn("this is slow", UserWarning)
    print("done")

def wants_unknown() -> None:
    """Import what no extra brings."""
    raise ModuleNotFoundError("no such thing", name="nonesuch")
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module whose objects are registered as subcommands."""
    name = "zosim_test_plugin"
    (tmp_path / f"{name}.py").write_text(PLUGIN.format(missing=False, missing_name="json"))
    monkeypatch.syspath_prepend(tmp_path)
    attributes = [
        "works",
        "mistake",
        "bug",
        "stopped",
        "wants_torch",
        "wants_unknown",
        "nothing",
        "ignored",
        "slow",
    ]
    entries = {attr: EntryPoint(attr, f"{name}:{attr}", registry.GROUP) for attr in attributes}
    entries["group"] = EntryPoint("group", f"{name}:app", registry.GROUP)
    entries["lost"] = EntryPoint("lost", "no_such_package.cli:run", registry.GROUP)
    monkeypatch.setattr(registry, "registered", lambda: entries)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_help_describes_every_command_and_imports_none(
    plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    for line in ("Do the work.", "A group of commands.", "Module of a plug-in.", "(not installed)"):
        assert line in out
    assert "In more words." not in out
    assert plugin not in sys.modules


def test_a_function_is_a_command(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["works"], capsys) == (0, "done\n", "")


def test_a_typer_is_a_group_even_with_one_command(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["group", "inner", "--count", "3"], capsys) == (0, "inner 3\n", "")


def test_a_users_mistake_is_a_message_and_exit_code_2(
    plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["mistake"], capsys)
    assert (code, out) == (2, "")
    assert err == "error: batch=[0] must be positive\n\nhint: use --batch 1, or install zosim[run]\n"


def test_our_own_mistake_keeps_its_traceback(plugin: str) -> None:
    with pytest.raises(ZeroDivisionError):
        typer.main.get_command(cli.app)(["bug"], prog_name="zosim")


def test_a_warning_that_something_is_ignored_is_an_error(
    plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as outside tests, where a warning stops nothing
        code, out, err = run(["ignored"], capsys)
        assert (code, out) == (2, "")
        assert "a package ignores an argument: Using `cache=None`" in err
        assert "hint: install the tested versions" in err
        assert run(["slow"], capsys)[:2] == (0, "done\n")


def test_an_interrupt_exits_with_130(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stopped"], capsys) == (130, "", "interrupted\n")


def test_missing_torch_names_the_extra_that_brings_it(
    plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["wants_torch"], capsys)
    assert code == 2
    assert "needs torch, which is not installed" in err
    assert "pip install -e '.[run]'" in err


def test_other_missing_modules_are_our_own_mistake(plugin: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no such thing"):
        typer.main.get_command(cli.app)(["wants_unknown"], prog_name="zosim")


@pytest.mark.parametrize(
    ("command", "reason"),
    [("lost", "there is no module no_such_package"), ("nothing", "has no 'nothing'")],
)
def test_a_registered_command_without_code_says_so(
    plugin: str, capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    code, _, err = run([command], capsys)
    assert code == 2
    assert reason in err


def test_a_module_that_cannot_import_something_else_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zosim_broken_plugin.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("broken", "zosim_broken_plugin:run", registry.GROUP)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        registry.load(entry)


def test_an_unknown_command_suggests_the_nearest(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["work"], capsys)
    assert (code, out) == (2, "")
    assert "works" in err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--nope"], "no such option: --nope", "`zosim --help` lists the commands"),
        (["simulate", "--trase", "t"], "no such option: --trase", "did you mean --trace?"),
        (["simulate", "--xyz"], "no such option: --xyz", "`zosim simulate --help` lists the options"),
        (["simulate"], "missing argument", "`zosim simulate --help` lists the options"),
        (
            ["buy", "--pay", "foo"],
            "invalid value for '--pay': 'foo' is not one of",
            "`zosim buy --help` lists the options",
        ),
    ],
)
def test_a_mistyped_command_line_is_an_error_of_one_shape(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert f"\n\nhint: {hint}" in err


def test_version_names_what_numbers_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--version"], capsys)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["zosim", "python", "torch", "transformers"]


@dataclass(frozen=True)
class Result:
    """Stand-in for what a command returns."""

    file: Path
    times_s: tuple[float, ...]


def test_emit_json_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit(Result(Path("plan [1].json"), (1.5, 1e-9)), json=True, text="not this")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"file": "plan [1].json", "times_s": [1.5, 1e-9]}
    assert captured.err == ""


def test_emit_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="PlanError"):
        console.emit({"what": PlanError("x")}, json=True)
    with pytest.raises(ValueError, match="JSON"):
        console.emit({"time_s": float("nan")}, json=True)


@pytest.mark.parametrize("columns", [None, 30, 60, 80, 250])
def test_what_is_piped_keeps_to_the_width_and_loses_nothing(columns, monkeypatch, capsys) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    path = "x[0]/" * 60  # longer words lose their middle
    rows = [[path, 1.0, "of words"], ["second", 2.0, "a sentence that is longer than thirty columns"]]
    shown = Report(
        "", Table(["name", "time_s", "why"], rows, numeric=["time_s"]), Bullets(["a bullet " * 20])
    )
    console.emit([], json=False, text=shown)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= (columns or 100)
    assert not any(line.endswith(" ") for line in lines)
    text = "".join("".join(lines).split())
    assert all(
        "".join(str(cell).split()) in text or columns in (None, 60, 80, 250) for row in rows for cell in row
    )
    for row in rows:
        for cell in row:
            assert all(word[:5] in text for word in str(cell).split())
    assert text.count("x[0]/") == 60
    assert text.count("abullet") == 20


def test_names_and_then_numbers_stay_whole_where_a_table_is_wide_enough(monkeypatch, capsys) -> None:
    headings = ["machine", "pay", "hours", "within limits"]
    row = ["Standard_ND96isr_H100_v5", "on-demand AWS us-east-1", "5.37 (4.38-6.9)", "perhaps"]
    for columns, whole in ((75, (row[0], row[2])), (60, row[:1])):
        monkeypatch.setenv("COLUMNS", str(columns))
        console.emit([], json=False, text=Table(headings, [row], numeric=["hours"], keeps_words=True))
        shown = capsys.readouterr().out
        assert all(cell in shown for cell in whole)
        assert all(word in shown.split() for cell in row for word in cell.split())


def test_a_narrow_table_is_records_of_whole_words(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    headings = ["machine", "devices", "hours", "placement"]
    console.emit(
        [], json=False, text=Table(headings, [["a100-80gb-milan", 1, "0.1", "offloaded, 3 buffers"]])
    )
    lines = capsys.readouterr().out.split("\n")
    assert "machine    a100-80gb-milan" in lines
    assert "placement  offloaded, 3 buffers" in lines


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    "command", [["study", "why_seeds_suffice"], ["buy", "--show-prices"], ["topology", "show", "dgx-1v"]]
)
def test_a_locale_of_ascii_gets_every_command_spelled(command) -> None:
    variables = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "zosim", *command], env=variables, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
    assert len(done.stdout) > 200


def test_a_source_tree_that_nobody_installed_has_its_commands(monkeypatch):
    installed = set(registry.registered())
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    assert {"plan", "run", "calibrate"} <= set(registry.registered())
    assert set(registry.registered()) == installed
    assert callable(registry.load(registry.registered(registry.FUNCTIONS)["run"]))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_an_error_end_between_words_on_a_terminal_alone(is_terminal, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(
        cli, "stderr", console.PlainConsole(file=written, width=40, force_terminal=is_terminal, no_color=True)
    )
    message = "no plan fits the memory of this device, which is too small"
    cli.report(ZosimError(message, hint="use another"))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert shown.split() == f"error: {message} hint: use another".split()
    assert (max(map(len, shown.splitlines())) <= 40) is is_terminal


def test_a_bar_in_a_notebook_is_text_that_is_drawn_again_once_a_second(monkeypatch, recwarn):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels of Jupyter do
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with runpy.run_path(console.__file__)["progress"]() as bar:
        bar.add_task("buying", total=3)
        assert bar.live.refresh_per_second == 1
    assert "buying" in sys.stderr.getvalue()
    assert not [str(warning.message) for warning in recwarn]
