"""Names in JSON and YAML files that an earlier version wrote, as this version spells them.

Each kind of file has a table of its own where it is loaded, such as ``RENAMED`` in :mod:`zosim.plans.upgrade`. A row is a path
from the top of the file and what its last key, or a value of it, is called now::

    RENAMED = {
        "directions": "perturbations",  # a key
        "perturbations.kept": "keep",  # a key below it, by the name that an earlier row has given it
        "schedule.traversal=sweep": "full",  # a value
        "order.*=sweep": "full",  # a value in a list
        "constants.name=draw.*": "sampling.*",  # what values begin with
        "nodes.*.kind": "type",  # * is any key; lists are looked through, so nodes may be one
        "**.kind=draw": "sample",  # ** is any depth
        "*.op[type:send].group": "process_group",  # of an op whose type is send
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

_Content = TypeVar("_Content")


def with_present_names(document: _Content, renamed: Mapping[str, str]) -> _Content:
    """Return a file's content with the names of this version.

    A key whose present name is there as well stays, so that the file is refused for it.

    - `document`: what JSON or YAML hold; it is not changed.
    - `renamed`: rows, applied in their order; see the module.

    >>> old = {"devices": [{"type": "gpu"}, {"type": "cpu"}], "order": "sweep"}
    >>> with_present_names(old, {"devices.kind": "type", "order=sweep": "full"})
    {'devices': [{'type': 'gpu'}, {'type': 'cpu'}], 'order': 'full'}
    """
    renaming: Any = document
    for row, present in renamed.items():
        path, is_value, value = row.partition("=")
        *parents, key = path.split(".")
        renaming = _renamed(renaming, parents, key, value if is_value else None, present)
    return cast("_Content", renaming)


def _renamed(part: Any, parents: Sequence[str], key: str, value: str | None, present: str) -> Any:
    if isinstance(part, list):
        items = [_renamed(item, parents, key, value, present) for item in part]
        is_of_values = value is not None and key == "*" and not parents
        return [_renamed_value(item, value, present) for item in items] if is_of_values else items
    if not isinstance(part, dict):
        return part
    first, *rest = parents or ("",)
    if first == "**":
        below = {name: _renamed(item, parents, key, value, present) for name, item in part.items()}
        return _renamed(below, rest, key, value, present)
    if first:
        wanted, _, condition = first.rstrip("]").partition("[")
        return {
            name: _renamed(item, rest, key, value, present)
            if wanted in (name, "*") and _meets(item, condition)
            else item
            for name, item in part.items()
        }
    if value is not None:
        return part | {key: _renamed_value(part[key], value, present)} if key in part else part
    if key not in part or present in part:
        return part
    return {present if name == key else name: item for name, item in part.items()}


def _meets(item: Any, condition: str) -> bool:
    field, _, value = condition.partition(":")
    return not condition or (isinstance(item, dict) and item.get(field) == value)


def _renamed_value(given: Any, value: str | None, present: str) -> Any:
    if value is not None and value.endswith("*") and isinstance(given, str) and given.startswith(value[:-1]):
        return present[:-1] + given[len(value) - 1 :]
    return present if given == value else given
