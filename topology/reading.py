"""Files that nobody vouches for: the one place where bytes become text, and text becomes JSON or YAML values.

Readers of plans, programs, runs, logs, profiles and the rest call these functions and check what they get with their own
types. What no such file can hold is refused here, in words: text that is not UTF-8, integers of thousands of digits, nesting of
thousands of levels, keys that stand twice, infinity and NaN, YAML whose aliases multiply.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from topology.errors import ZosimError

MAX_JSON_BYTES = 256 * 2**20
MAX_YAML_BYTES = 8 * 2**20
_CHUNK_BYTES = 2**22
MAX_DEPTH = 64
"""Levels of lists and objects; documents of this project have fewer than twenty."""
MAX_DIGITS = 40
"""Of an integer: more than any count or seed has, and few enough to become a float."""
MAX_YAML_VALUES = 400_000
"""Scalars, lists and mappings of a YAML file, each alias counted with all that it stands for."""

_LOADER: Any = type("_PlainLoader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
# What readers know are mappings, lists and scalars: a set cannot even be a key of a cache.
_LOADER.yaml_constructors = {
    tag: constructor
    for tag, constructor in _LOADER.yaml_constructors.items()
    if not tag or tag.rpartition(":")[2] not in ("binary", "omap", "pairs", "set")
}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the others stand for bytes of a file's name


class _UnreadableError(ValueError):
    """Why a text is not what it should be."""


_TYPES = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def irregular(status: os.stat_result) -> str | None:
    """Return what something in a file system is where it is no regular file, such as ``"a link"``; None for a regular file."""
    return None if stat.S_ISREG(status.st_mode) else _TYPES.get(stat.S_IFMT(status.st_mode), "no file")


def refuse_irregular(
    paths: Iterable[str | Path], error: type[ZosimError], *, links: bool = False, hint: str | None = None
) -> None:
    """Raise for the first path that is there and is no regular file: a pipe has no end, and a link may lead anywhere.

    Files that a user names may be either. What lies in a directory that somebody else may have written is looked at first.

    `links`: whether a link to a regular file will do.

    Raises ZosimError of type `error`.
    """
    for path in paths:
        try:
            found = irregular(Path(path).stat(follow_symlinks=links))
        except (OSError, ValueError):  # it is not there, or whoever opens it says why it cannot be read
            continue
        if found is not None:
            raise error(f"{path} is {found}, not a regular file", hint=hint)


def read_bytes(
    path: str | Path,
    what: str,
    error: type[ZosimError],
    *,
    hint: str | None = None,
    max_bytes: int = MAX_JSON_BYTES,
) -> bytes:
    """Return the content of a file.

    `hint`: how to make such a file.

    Raises ZosimError of type `error`, if there is no such file, or it cannot be read or is too large.
    """
    content = bytearray()
    try:
        with Path(path).open("rb") as file:
            is_too_large = os.fstat(file.fileno()).st_size > max_bytes  # a pipe or a device has none
            # Python sets memory aside for all that a call may read, so that one call for the limit would take it whole.
            while not is_too_large and (chunk := file.read(_CHUNK_BYTES)):
                content += chunk
                is_too_large = len(content) > max_bytes
    except FileNotFoundError:
        raise error(f"no {what} at {path}", hint=hint) from None
    except OSError as problem:
        raise error(f"the {what} {path} cannot be read: {problem.strerror}", hint=hint) from problem
    except ValueError as problem:  # a zero byte in the name
        raise error(f"the {what} {str(path)!r} cannot be read: {problem}", hint=hint) from problem
    if is_too_large:
        raise error(f"{path} is not a {what}: it has more than {max_bytes // 2**20} MiB", hint=hint)
    return bytes(content)


def read_text(
    path: str | Path,
    what: str,
    error: type[ZosimError],
    *,
    hint: str | None = None,
    max_bytes: int = MAX_JSON_BYTES,
) -> str:
    """Return the text of a file; parameters as of :func:`read_bytes`.

    Raises ZosimError of type `error`, if it cannot be read, is too large, or is not UTF-8.
    """
    content = read_bytes(path, what, error, hint=hint, max_bytes=max_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        message = f"{path} is not a {what}: it is not UTF-8 text, {problem.reason} at byte {problem.start}"
        raise error(message, hint=hint) from None


def read_stdin(what: str, error: type[ZosimError], *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the text on standard input; parameters as of :func:`read_bytes`.

    Raises ZosimError of type `error`, if it is not text or is too large.
    """
    try:
        text = sys.stdin.read(max_bytes + 1)
    except UnicodeDecodeError as problem:
        raise error(
            f"standard input is not a {what}: it is not UTF-8 text, {problem.reason} at byte {problem.start}"
        ) from None
    if len(text) > max_bytes:
        raise error(f"standard input is not a {what}: it has more than {max_bytes // 2**20} MiB")
    return text


def read_json(path: str | Path, what: str, error: type[ZosimError], *, hint: str | None = None) -> Any:
    """Return the JSON value in a file; parameters as of :func:`read_bytes`.

    Raises ZosimError of type `error`, if the file cannot be read or is not JSON.
    """
    return parse_json(read_text(path, what, error, hint=hint), f"{path} is not a {what}", error, hint=hint)


def read_json_object(
    path: str | Path, what: str, error: type[ZosimError], *, hint: str | None = None
) -> dict[str, Any]:
    """Return the JSON object in a file; parameters as of :func:`read_bytes`.

    Raises ZosimError of type `error`, if the file cannot be read or holds no JSON object.
    """
    value = read_json(path, what, error, hint=hint)
    if not isinstance(value, dict):
        raise error(f"{path} is not a {what}: it holds no JSON object", hint=hint)
    return value


def parse_json(text: str, complaint: str, error: type[ZosimError], *, hint: str | None = None) -> Any:
    """Return the JSON value that a text holds.

    `complaint`: what the message begins with, such as ``"plan.json is not a plan"``.

    Raises ZosimError of type `error`, with the reason.

    >>> parse_json('{"a": 1, "a": 2}', "that is not a plan", ZosimError)
    Traceback (most recent call last):
    topology.errors.ZosimError: that is not a plan: the key 'a' stands twice in one object
    """
    try:
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _refuse_depth(value)
        if _SURROGATE.search(text) and _LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
            raise _UnreadableError("it holds half a character (a lone surrogate)")
    except json.JSONDecodeError as problem:
        is_one_line = "\n" not in text.strip()
        where = (
            f"at column {problem.colno}"
            if is_one_line
            else f"in line {problem.lineno}, column {problem.colno}"
        )
        reason = f"{problem.msg.removesuffix(' at')} {where}" if text.strip() else "it is empty"
        raise error(f"{complaint}: {reason}", hint=hint) from None
    except _UnreadableError as problem:
        raise error(f"{complaint}: {problem}", hint=hint) from None
    except RecursionError:
        raise error(f"{complaint}: {_TOO_DEEP}", hint=hint) from None
    return value


_TOO_DEEP = f"it nests more than {MAX_DEPTH} levels of lists and objects"


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _UnreadableError(f"it holds an integer of {len(text.lstrip('-'))} digits, {text[:12]}…")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _UnreadableError(f"{text[:20]} is too large for a number")
    return value


def _constant(text: str) -> NoReturn:
    raise _UnreadableError(f"it holds {text}, but numbers in JSON must be finite")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = _first_twice(key for key, _ in pairs)
        raise _UnreadableError(f"the key {twice!r} stands twice in one object")
    return value


def _first_twice(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = list(itertools.chain.from_iterable(below))
        if not level:
            return
    raise _UnreadableError(_TOO_DEEP)


def shipped_yaml(text: str) -> Any:
    """Return the plain data of a file that comes with a package; :func:`parse_yaml` is for untrusted files."""
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe one, libyaml's where it is there


def parse_yaml(
    text: str, what: str, error: type[ZosimError], *, hint: str | None = None
) -> tuple[Any, yaml.Node | None]:
    """Return the value that a YAML text holds, and the tree that knows its lines.

    - `what`: names the text in messages.
    - `hint`: for a text that is not YAML at all.

    Raises ZosimError of type `error`, if it is no YAML, holds what is no plain value, or multiplies.
    """
    try:
        if len(text) > MAX_YAML_BYTES:
            raise _UnreadableError(f"it has more than {MAX_YAML_BYTES // 2**20} MiB")
        _refuse_yaml_depth(text)
        loader = _LOADER(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None, None
            _refuse_multiplied(root)
            try:
                value = loader.construct_document(root)
            except (TypeError, LookupError, AttributeError, ArithmeticError) as problem:
                # Scalars with a tag that they do not suit, such as !!bool x, and keys that cannot be hashed.
                raise _UnreadableError(f"it holds what its tag does not allow: {problem}") from problem
        finally:
            loader.dispose()
        _refuse_numbers(value)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        message = f"{what} is not YAML{where}: {problem.problem or problem.context}"
        raise error(message, hint=hint) from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        reason = str(problem).partition("\n")[0]
        raise error(f"{what} is not YAML that can be read: {reason}", hint=hint) from problem
    return value, root


def _refuse_yaml_depth(text: str) -> None:
    """Refuse a text before a tree is made of it, which would take a call of C code for each level."""
    depth, num_values = 0, 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        num_values += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH:
            raise _UnreadableError(
                f"line {_line(event.start_mark)} is nested more than {MAX_DEPTH} levels deep"
            )
        if num_values > MAX_YAML_VALUES:
            raise _UnreadableError(f"it holds more than {MAX_YAML_VALUES} values")


def _refuse_multiplied(root: yaml.Node) -> None:
    """Refuse a tree with a key that stands twice, or whose aliases stand for themselves or for too much."""
    measured: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def size_and_depth(node: yaml.Node) -> tuple[int, int]:
        if id(node) in measured:
            return measured[id(node)]
        line = _line(node.start_mark)
        if id(node) in above:
            raise _UnreadableError(f"the anchor in line {line} refers to something that contains itself")
        if isinstance(node, yaml.MappingNode):
            keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(keys)) < len(keys):
                twice = _first_twice(value for _, value in keys)
                raise _UnreadableError(f"the key {twice!r} appears twice in the mapping of line {line}")
        above.add(id(node))
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(node.value)
        below = [size_and_depth(child) for child in children]
        above.remove(id(node))
        size = 1 + sum(size for size, _ in below)
        depth = 1 + max((depth for _, depth in below), default=0)
        if size > MAX_YAML_VALUES:
            raise _UnreadableError(
                f"with its aliases, line {line} expands to more than {MAX_YAML_VALUES} values"
            )
        if depth > MAX_DEPTH + 1:
            raise _UnreadableError(f"with its aliases, line {line} expands to more than {MAX_DEPTH} levels")
        measured[id(node)] = size, depth
        return size, depth

    size_and_depth(root)


def _line(mark: Any) -> int:
    return 0 if mark is None else int(mark.line) + 1


def _refuse_numbers(root: Any) -> None:
    """Refuse integers that do not become floats, which YAML writes with few characters."""
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise _UnreadableError(f"it holds an integer of more than {MAX_DIGITS} digits")
        if isinstance(value, Mapping):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
