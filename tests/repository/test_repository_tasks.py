"""The task script: what it decides before anything is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``.ci/environment.py``, with its environment in an empty directory."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    import environment as module

    for name, path in {
        "VENV": "",
        "STAMP": "stamp.json",
        "PIP_LOG": "pip.log",
        "PYTHON": "bin/python",
    }.items():
        monkeypatch.setattr(module, name, tmp_path / path)
    return module


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.6.0", True), ("2.13.1+cu128", True), ("2.5.1", False), ("2.14.0", False), ("3.0", False)],
)
def test_a_torch_that_is_already_there_is_used_if_in_range(
    environment: ModuleType, version: str, *, fits: bool
) -> None:
    assert environment._is_in_range(version) is fits


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("OSError: [Errno 28] No space left on device: '/x'", "the disk is full"),
        (
            "WARNING: NewConnectionError(...)\nERROR: No matching distribution found for simpy>=4.1",
            "no package index could be reached",
        ),
        ("ERROR: No matching distribution found for torch<2.14,>=2.6", "no build for this Python"),
        ("SyntaxError", "pip could not install the project"),
    ],
)
def test_a_failed_installation_is_explained(environment: ModuleType, log: str, words: str) -> None:
    assert words in environment._explained(log).message


def test_the_environment_is_made_once_and_again_when_its_inputs_change(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(environment, "_works", lambda: "create" in done)
    monkeypatch.setattr(environment, "_create", lambda: done.append("create"))
    monkeypatch.setattr(environment, "_install", lambda extras: done.append(f"install {extras}"))
    environment.ensure()
    environment.ensure()
    assert [step.partition(" ")[0] for step in done] == ["create", "install"]
    stamp = json.loads(environment.STAMP.read_text())
    environment.STAMP.write_text(json.dumps({**stamp, "sha256": "of another pyproject.toml"}))
    environment.ensure()
    assert [step.partition(" ")[0] for step in done] == ["create", "install", "install"]


def test_an_interrupted_installation_is_taken_up_again(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(extras: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_works", lambda: True)
    monkeypatch.setattr(environment, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.ensure()
    installed: list[str] = []
    monkeypatch.setattr(environment, "_install", installed.append)
    environment.ensure()
    assert len(installed) == 1


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_is_told_what_to_install(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    found = environment.importlib.util.find_spec
    monkeypatch.setattr(
        environment.importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(environment.SetupError, match=f"without its {module} module") as error:
        environment._create()
    assert "-venv" in error.value.hint


def test_a_small_disk_is_noticed_before_anything_is_downloaded(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = environment.shutil.disk_usage(ROOT)._replace(free=400_000_000)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(environment.SetupError, match=r"0\.4 GB are free"):
        environment._create()


def test_without_a_task_the_tasks_are_listed() -> None:
    script = str(ROOT / ".ci" / "tasks.py")
    listed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    for task in ("demo", "test", "format", "lint", "types", "imports", "check", "docs", "clean"):
        assert f"\n  {task} " in listed
    unknown = subprocess.run([sys.executable, script, "tset"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 2
    assert "no task 'tset'" in unknown.stderr


def test_full_adds_the_slow_tests_to_all_or_to_those_named(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "task_list", raising=False)
    import task_list

    commands: list[list[str]] = []
    monkeypatch.setattr(task_list, "_tool", lambda command, *_: commands.append([*command]) or 0)
    for arguments in ([], ["--full"], ["tests/zosim"], ["--full", "tests/zosim"]):
        task_list.test(arguments)
    quick, full, *named = [command for command in commands if command[0] == "pytest"]
    assert full == [*quick, "--run-slow"]
    assert named == [["pytest", "tests/zosim"], ["pytest", "--run-slow", "tests/zosim"]]


@pytest.fixture
def here(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``.ci/here.py``, beside a Python whose packages the test names, by version."""
    monkeypatch.delitem(sys.modules, "here", raising=False)
    import here as module

    has = {
        "torch": "2.11.0+cu130",
        "pydantic": "2.9",
        "simpy": "4.1",
        "numpy": "2.1",
        "rich": "13.7",
        "typer": "0.12",
    }
    has |= {"scipy": "1.12", "psutil": "6.0", "pyyaml": "6.0", "networkx": "3.4", "transformers": "5.0"}
    has |= {"safetensors": "0.5", "tokenizers": "0.22"}
    monkeypatch.setattr(module, "_version_of", has.get)
    monkeypatch.setattr(module, "PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(module, "_IMPORTING", "")  # what is named has no code
    module.has = has  # type: ignore[attr-defined]
    return module


def test_what_this_python_lacks_is_said_at_once_and_how_to_bring_it(
    here: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    here.has["pydantic"] = "2.6"
    with pytest.raises(here.environment.SetupError) as raised:
        here.prepared(["--stop-after-s", "580"])
    assert "lacks pydantic>=2.7, without" in raised.value.message
    assert "pip download --dest wheels 'pydantic>=2.7'" in raised.value.hint
    here.has["pydantic"] = "2.7"
    here.has["nvidia-ml-py"] = "13.0"
    assert here.prepared(["--stop-after-s", "580"]) == ["--stop-after-s", "580"]
    assert capsys.readouterr().err == "== without pytest: the tests that need a device are left out\n"
    here.has["torch"] = "2.14.0"
    assert here.missing() == ["torch>=2.6,<2.14"]


def test_a_module_that_what_is_there_needs_is_named_before_anything_runs(
    here: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pydantic.py").write_text("import a_wheel_that_nobody_brought")
    monkeypatch.undo()
    monkeypatch.setattr(here, "PACKAGES", tmp_path)
    monkeypatch.setattr(here, "_FIRST_HOUR", "json")
    monkeypatch.setattr(here, "_requirements", lambda: ["pydantic>=2.7"])
    assert here.not_importable() == ["a_wheel_that_nobody_brought"]
    (tmp_path / "pydantic.py").write_text("raise ImportError('of another release')")
    with pytest.raises(here.environment.SetupError, match=r"cannot import what it has: .*of another release"):
        here.prepared([])


def test_wheels_of_a_folder_are_put_beside_the_tree_but_for_what_is_there(
    here: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del here.has["simpy"]
    for name in ("simpy-4.1.1", "torch-2.13.0", "markdown_it_py-3.0", "pydantic-2.9"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    commands: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        here.has["simpy"] = "4.1.1"
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(here.subprocess, "run", pip)
    monkeypatch.setattr(here, "not_importable", list)
    assert here.prepared(["--find-links", str(tmp_path), "--folder", "x"]) == ["--folder", "x"]
    (command,) = commands
    assert "--no-index" in command
    assert [Path(word).name.split("-")[0] for word in command if word.endswith(".whl")] == [
        "markdown_it_py",
        "simpy",
    ]
    with pytest.raises(here.environment.SetupError, match="is no folder"):
        here.prepared(["--find-links", str(tmp_path / "none")])
