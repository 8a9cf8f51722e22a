"""The task script: what it decides before anything is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``.ci/environment.py``."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    import environment as module

    return module


@pytest.fixture
def made(environment: ModuleType, tmp_path: Path) -> Any:
    """An environment in an empty directory."""
    one = environment.Environment()
    one.folder, one.stamp, one.python = tmp_path, tmp_path / "stamp.json", tmp_path / "bin" / "python"
    one.pip_log = tmp_path / "pip.log"
    return one


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
        (
            "ERROR: Could not find a version that satisfies the requirement typer==99.0 (from versions: 0.1)\nERROR: No matching",
            "has other versions, but not typer==99.0",
        ),
        ("SyntaxError", "pip could not install the project"),
    ],
)
def test_a_failed_installation_is_explained(
    environment: ModuleType, tmp_path: Path, log: str, words: str
) -> None:
    (tmp_path / "pip.log").write_text(log)
    assert words in environment._explained(tmp_path / "pip.log").message


def test_the_environment_is_made_once_and_again_when_its_inputs_change(
    environment: ModuleType, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(made, "_works", lambda: "create" in done)
    monkeypatch.setattr(environment, "_create", lambda _: done.append("create"))
    monkeypatch.setattr(environment, "_install", lambda _: done.append("install"))
    made.ensure()
    made.ensure()
    assert done == ["create", "install"]
    stamp = json.loads(made.stamp.read_text())
    made.stamp.write_text(json.dumps({**stamp, "sha256": "of another pyproject.toml"}))
    made.ensure()
    assert done == ["create", "install", "install"]


def test_a_lock_that_moves_is_installed(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment._specification(environment.Environment())
    moved = tmp_path / "requirements.txt"
    moved.write_text(environment.REQUIREMENTS["locked"].read_text() + "another==1.0\n")
    monkeypatch.setitem(environment.REQUIREMENTS, "locked", moved)
    assert environment._specification(environment.Environment()) != before


def test_an_interrupted_installation_is_taken_up_again(
    environment: ModuleType, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_works", lambda: True)
    monkeypatch.setattr(environment, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.ensure()
    installed: list[Any] = []
    monkeypatch.setattr(environment, "_install", installed.append)
    made.ensure()
    assert installed == [made]


def test_what_is_imported_is_compiled_and_a_file_of_another_python_is_no_error(
    environment: ModuleType, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path / "clone")
    made.folder, made.python = tmp_path / "tests" / ".venv", sys.executable
    installed = made.folder / "lib" / "site-packages"
    for name in (
        "one/a.py",
        "one/tests/a.py",
        "transformers/models/auto/a.py",
        "transformers/models/opt/a.py",
    ):
        (installed / name).parent.mkdir(parents=True)
        (installed / name).write_text("1")
    (installed / "old.py").write_text("print 1")
    environment._compile(made)
    compiled = {path.parents[1].relative_to(installed).as_posix() for path in installed.rglob("*.pyc")}
    assert compiled == {"one", "transformers/models/auto"}


@pytest.mark.parametrize("torch", [None, "2.11.0"])
def test_other_packages_are_installed_by_hash_and_torch_where_this_python_brings_none(
    environment: ModuleType, made: Any, monkeypatch: pytest.MonkeyPatch, torch: str | None
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "_pip", lambda _, *words: calls.append(tuple(map(str, words))))
    monkeypatch.setattr(environment, "_compile", lambda _: None)
    monkeypatch.setattr(environment, "_usable_torch", lambda *_, **__: torch)
    environment._install(made)
    hashed, *torches, project = calls
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(hashed)
    assert torches == ([] if torch else [("torch==" + environment.locked_torch(),)])
    assert project == ("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def test_the_newest_versions_are_taken_whatever_upper_bounds_say(environment: ModuleType) -> None:
    requested = environment._newest()
    assert requested[0] == "--upgrade"
    assert {"transformers>=5.21", "peft>=0.18", "setuptools>=77"} <= set(requested)
    assert not any(line.startswith("torch") for line in requested)


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_is_told_what_to_install(
    environment: ModuleType, made: Any, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    found = environment.importlib.util.find_spec
    monkeypatch.setattr(
        environment.importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(environment.SetupError, match=f"without its {module} module") as error:
        environment._create(made)
    assert "-venv" in error.value.hint


def test_a_small_disk_is_noticed_before_anything_is_downloaded(
    environment: ModuleType, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = environment.shutil.disk_usage(ROOT)._replace(free=400_000_000)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(environment.SetupError, match=r"0\.4 GB are free"):
        environment._create(made)


def test_without_a_task_the_tasks_are_listed() -> None:
    script = str(ROOT / ".ci" / "tasks.py")
    listed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    for task in ("demo", "test", "format", "lint", "types", "imports", "check", "docs", "lock", "clean"):
        assert f"\n  {task} " in listed
    unknown = subprocess.run([sys.executable, script, "tset"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 2
    assert "no task 'tset'" in unknown.stderr


def test_full_adds_the_slow_tests_to_all_or_to_those_named(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "task_list", raising=False)
    monkeypatch.delitem(sys.modules, "lock", raising=False)
    import task_list

    commands: list[list[str]] = []
    monkeypatch.setattr(task_list, "_tool", lambda command, *_: commands.append([*command]) or 0)
    for arguments in ([], ["--full"], ["tests/zosim"], ["--full", "tests/zosim"]):
        task_list.test(arguments)
    quick, full, *named = [command for command in commands if command[0] == "pytest"]
    assert full == [*quick, "--run-slow"]
    assert named == [["pytest", "tests/zosim"], ["pytest", "--run-slow", "tests/zosim"]]


def locked() -> list[dict[str, Any]]:
    return list(tomllib.loads((ROOT / "uv.lock").read_text())["package"])


AGAIN = "run `python3 .ci/tasks.py lock`, and commit what it writes"


def test_the_lock_was_made_from_what_the_project_asks_for() -> None:
    (project,) = (package for package in locked() if package["name"] == "zosim")
    requested = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = {None: requested["project"]["dependencies"]} | requested["project"]["optional-dependencies"]
    expected = {
        (extra, canonicalize_name(one.name), frozenset(map(str, one.specifier)))
        for extra, requirements in lines.items()
        for one in map(Requirement, requirements)
    }
    noted = set()
    for one in project["metadata"]["requires-dist"]:
        extra = re.search(r"extra == '(\w+)'", one.get("marker", ""))
        bounds = frozenset(filter(None, one.get("specifier", "").split(",")))
        noted.add((extra and extra[1], one["name"], bounds))
    assert noted == expected, AGAIN
    assert all(
        one.get("source", {}).get("registry", "") in ("", "https://pypi.org/simple") for one in locked()
    )


@pytest.mark.parametrize("name", ["requirements.txt", "pylock.toml", ".ci/requirements-lowest.txt"])
def test_what_is_exported_of_the_lock_is_of_the_same_requirements(environment: ModuleType, name: str) -> None:
    assert environment.digest_of_requirements() in (ROOT / name).read_text().splitlines()[0], AGAIN


def hashed_requirements(path: Path) -> dict[str, tuple[set[str], set[str]]]:
    """Versions and hashes by name."""
    text = re.sub(r"^ *#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, tuple[set[str], set[str]]] = {}
    for line in filter(None, text.splitlines()):
        one = Requirement(line.partition(" --hash")[0])
        versions, hashes = found.setdefault(one.name, (set(), set()))
        versions.update(str(bound).removeprefix("==") for bound in one.specifier)
        hashes.update(re.findall(r"--hash=(\S+)", line))
    return found


def test_the_requirements_are_the_locked_versions_by_the_locked_hashes(environment: ModuleType) -> None:
    of_lock: dict[str, tuple[set[str], set[str]]] = {}
    needs: dict[str, set[str]] = {}
    for package in locked():
        versions, hashes = of_lock.setdefault(package["name"], (set(), set()))
        versions.add(package.get("version", ""))
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        hashes.update(file["hash"] for file in files)
        lines = list(package.get("dependencies", []))
        if package["name"] == "zosim":
            extras = [*environment.EXTRAS, environment.DOCS]
            lines += [one for extra in extras for one in package["optional-dependencies"][extra]]
            lines += package["dev-dependencies"]["build"]
        needs.setdefault(package["name"], set()).update(one["name"] for one in lines)
    exported = hashed_requirements(ROOT / "requirements.txt")
    assert all(exported[name] == of_lock[name] for name in exported), AGAIN
    complete, waiting = set(), ["zosim"]
    while waiting:
        name = waiting.pop()
        if name not in complete:
            complete.add(name)
            waiting += needs[name]
    missing = complete - set(exported) - {"zosim", "torch", "triton"}
    assert all(name.startswith(("nvidia-", "cuda-")) for name in missing), missing


def test_the_lowest_versions_are_no_lower_than_what_the_project_asks_for(environment: ModuleType) -> None:
    lowest = hashed_requirements(ROOT / ".ci" / "requirements-lowest.txt")
    requested = environment.project()["project"]
    for one in map(Requirement, [*requested["dependencies"], *requested["optional-dependencies"]["run"]]):
        if one.name != "torch":
            (version,) = lowest[canonicalize_name(one.name)][0]
            assert one.specifier.contains(version), AGAIN
    (transformers,) = lowest["transformers"][0]
    assert f"transformers>={transformers.removesuffix('.0')}," in " ".join(
        requested["optional-dependencies"]["run"]
    )


@pytest.fixture
def here(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``.ci/here.py``, beside a Python whose packages the test names, by version."""
    monkeypatch.delitem(sys.modules, "here", raising=False)
    import here as module

    has = {
        "torch": "2.11.0+cu130",
        "pydantic": "2.10",
        "simpy": "4.1",
        "numpy": "2.1",
        "rich": "13.7",
        "typer": "0.26",
    }
    has |= {"scipy": "1.12", "psutil": "6.0", "pyyaml": "6.0", "networkx": "3.4", "transformers": "5.21"}
    has |= {"safetensors": "0.8", "tokenizers": "0.23"}
    monkeypatch.setattr(module, "_version_of", has.get)
    monkeypatch.setattr(module, "PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(module, "_IMPORTING", "")  # what is named has no code
    module.has = has  # type: ignore[attr-defined]
    return module


def test_what_this_python_lacks_is_said_at_once_and_how_to_bring_it(
    here: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    here.has["pydantic"] = "2.9"
    with pytest.raises(here.environment.SetupError) as raised:
        here.prepared(["--stop-after-s", "580"])
    assert "lacks pydantic>=2.10,<3, without" in raised.value.message
    assert "pip download --dest wheels 'pydantic>=2.10,<3'" in raised.value.hint
    here.has["pydantic"] = "2.10"
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
    for name in ("simpy-4.1.1", "torch-2.13.0", "markdown_it_py-3.0", "pydantic-2.10"):
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
