"""The package's face: every name it promises is there, whatever was imported before."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import zosim


def test_every_promised_name_is_there() -> None:
    for module in pkgutil.iter_modules(zosim.__path__, "zosim."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in zosim.__all__:
        assert getattr(zosim, name) is not None
        assert not hasattr(getattr(zosim, name), "__path__")
    assert callable(zosim.lower)
    assert callable(zosim.choose)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'backward'"):
        zosim.backward  # noqa: B018
