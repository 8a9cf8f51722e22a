"""A tiny model and data for it on disk, and a run that was never interrupted: made once, and only read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directory of a model, and a file of lines."""
    from tests.support.recorded import saved_inputs

    return saved_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def whole(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody disturbed."""
    from tests.support.recorded import whole_run

    return whole_run(inputs, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    return Path(shutil.copytree(whole, tmp_path / "run"))
