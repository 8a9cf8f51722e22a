"""The configurations of a sweep: read one by one, checked, and named by a hash of what decides their result."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from topology.errors import ZosimError
from topology.reading import parse_yaml, read_bytes, read_text
from topology.validation import did_you_mean
from zosim import api
from zosim.applications.validation.rows import SURPLUS, RowsError, table_rows
from zosim.config import HOST
from zosim.options import ConfigOption, options_of
from zosim.renamed import in_present_names

REQUIRED = ("model", "hardware")
"""Columns of every configuration."""

_FILES = ("profile", "densities")
"""Columns that name a file, whose content counts."""

_PACKAGES = ("topology", "costmodel", "zosim")
_CACHED_VALUES = 4096
_MAX_BYTES = 2**20
"""Of a grid, which lists values and not their products."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of a sweep."""

    settings: Mapping[str, Any]  # options of `zosim plan` by their names; what is left out has its default
    where: str  # file and row, for messages


def configurations(path: Path) -> Iterator[Configuration]:
    """Yield the configurations of a file, in order: the rows of a CSV file, or the products of a grid in YAML or JSON.

    Raises RowsError if the file cannot be read, or a row says something that is no configuration.
    """
    if path.suffix.lower() == ".csv":
        for row in table_rows(path, REQUIRED):
            if row[SURPLUS]:
                raise RowsError(
                    f"{row.where}: {row[SURPLUS]!r} is after the last column",
                    hint="quote values with commas",
                )
            yield Configuration({name: row[name] for name in row.fields if row[name]}, row.where)
        return
    count = itertools.count(1)
    for grid in _grids(path):
        for values in itertools.product(*grid.values()):
            settings = {name: value for name, value in zip(grid, values, strict=True) if value is not None}
            yield Configuration(settings, f"{path}, row {next(count)}")


def _grids(path: Path) -> list[dict[str, list[Any]]]:
    """Return the values of each option, one mapping for each product."""
    hint = "write a mapping from option to value or list of values, or a list of such mappings"
    text = read_text(path, "sweep", RowsError, hint=hint, max_bytes=_MAX_BYTES)
    value, _ = parse_yaml(text, str(path), RowsError, hint=hint)
    if value is None:
        raise RowsError(f"{path} is empty", hint=hint)
    grids = []
    listed = value if isinstance(value, list) and value else [value]
    for number, grid in enumerate(listed, start=1):
        if not isinstance(grid, dict) or not grid:
            raise RowsError(f"{path}: grid {number} is no mapping of options", hint=hint)
        lists = {str(name): v if isinstance(v, list) else [v] for name, v in grid.items()}
        wrong = next((n for n, v in lists.items() if any(isinstance(x, list | dict) for x in v)), None)
        if wrong is not None:
            raise RowsError(f"{path}: grid {number}: {wrong} holds lists in lists", hint=hint)
        missing = [name for name in REQUIRED if name not in lists]
        if missing:
            raise RowsError(f"{path}: grid {number} lacks {' and '.join(missing)}", hint=hint)
        grids.append(lists)
    return grids


def canonical(configuration: Configuration) -> dict[str, Any]:
    """Return a configuration in one form for all spellings: options as the config tree reads them, files by their content.

    Raises RowsError if there is no such option, or a value is none of it; the message names row and option.
    """
    fields: dict[str, Any] = {}
    for name, value in configuration.settings.items():
        try:
            fields |= _read(name, value)
        except ZosimError as error:
            raise RowsError(f"{configuration.where}: {name}: {error.message}", hint=error.hint) from None
    lacking = [name for name in REQUIRED if name not in fields]
    if lacking:
        raise RowsError(
            f"{configuration.where}: {' and '.join(lacking)} is empty", hint="give it in every row"
        )
    return fields


def key_of(inputs: Mapping[str, Any], version: str) -> str:
    """Return the name of a result: a hash of canonical inputs and of the version of what makes the result."""
    text = json.dumps([version, inputs], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def plan_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under present names, as :func:`zosim.plan` takes them; a table has texts alone."""
    options = in_present_names(dict(settings), [*_options(), *_arguments()])
    if "threads" in options:
        options["threads"] = int(options["threads"])
    return options


@lru_cache(_CACHED_VALUES)
def _read(name: str, value: str | float | bool) -> Mapping[str, Any]:
    """Return the canonical fields of one setting. A sweep has few values, each in many rows."""
    ((name, value),) = in_present_names({name: value}, [*_options(), *_arguments()]).items()
    if name in _options():
        option = _options()[name]
        return {".".join((*option.path, field)): v for field, v in _fields(option, value).items()}
    if name not in _arguments():
        raise RowsError(f"there is no option {name!r}", hint=did_you_mean(name, [*_arguments(), *_options()]))
    if name == "model":
        from costmodel.models.configs import read_model_spec

        return {name: _digest(read_model_spec(str(value)).model_dump_json().encode())}
    if name == "hardware":
        if value == HOST:
            raise RowsError(
                "host is another machine each time that it is looked at",
                hint="write it down once: zosim topology detect -o machine.yaml",
            )
        from topology.hardware import resolve

        return {name: _digest(resolve(str(value)).model_dump_json().encode())}
    if name in _FILES:
        return {name: _digest(read_bytes(str(value), name, RowsError))}
    if name == "threads" and not (str(value).isascii() and str(value).isdecimal() and int(value) > 0):
        raise RowsError(f"{value!r} must be a whole number of at least 1")
    return {name: int(value) if name == "threads" else str(value)}


def _fields(option: ConfigOption, value: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = to_jsonable_python(option.read(value))
    return fields


@cache
def _options() -> Mapping[str, ConfigOption]:
    return {option.name: option for option in options_of(api.PlanOptions)}


@cache
def _arguments() -> tuple[str, ...]:
    """Return the options of :func:`zosim.plan` that are no settings of a plan."""
    parameters = inspect.signature(api.plan).parameters.values()
    return tuple(one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def code_version() -> str:
    """Return a hash of what predictions are made of: all sources and data of the packages that plan."""
    root, digest = Path(__file__).parents[3], hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in (".py", ".yaml", ".json", ".csv"):
                content = file.read_bytes()
                digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()
