"""The Python reference, from what packages offer: a line ``<!-- public names: PACKAGE -->`` becomes their documentation."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.config import Config


MARK = re.compile(r"^<!-- public names: ([\w.]+) -->$", re.MULTILINE)


def _directive(value: Any) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) else "autodata"


def _home(packages: list[str], value: Any) -> str | None:
    """Return the package that documents a name which several offer: the one that it is defined in, if that offers it."""
    for package in packages:
        module = importlib.import_module(package)
        if getattr(value, "__module__", "").startswith(package + ".") and value.__name__ in module.__all__:
            return package
    return None


def _lines(packages: list[str], package: str) -> Iterator[str]:
    """Yield a table of a package's names, then the documentation of each."""
    module = importlib.import_module(package)
    names = sorted((name for name in module.__all__ if not name.startswith("__")), key=str.lower)
    names = [name for name in names if _home(packages, getattr(module, name)) in (None, package)]
    yield from ("```{eval-rst}", f".. currentmodule:: {package}", "", ".. autosummary::", "")
    yield from (f"   {name}" for name in names)
    yield ""
    for name in names:
        directive = _directive(getattr(module, name))
        yield f".. {directive}:: {package}.{name}"
        if directive == "autoclass":
            yield "   :members:"
        yield ""
    yield "```"


def write_names(app: Sphinx, _docname: str, source: list[str]) -> None:
    """Put directives in the place of the marks."""
    source[0] = MARK.sub(lambda mark: "\n".join(_lines(app.config.public_packages, mark[1])), source[0])


def load_names(_app: Sphinx, config: Config) -> None:
    """Load all that is documented before autodoc does: autodoc would import it as type checkers read it."""
    for package in config.public_packages:
        module = importlib.import_module(package)
        for name in module.__all__:
            getattr(module, name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Rewrite pages as they are read."""
    app.add_config_value("public_packages", [], "env", types=frozenset({list}))
    app.connect("config-inited", load_names)
    app.connect("source-read", write_names)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
