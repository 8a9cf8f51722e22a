"""Validation errors in words: the name of the thing, its value, the rule, and what was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from topology.errors import TopologyError, ZosimError

Location = tuple[int | str, ...]
MAX_ERRORS_SHOWN = 6
_MAX_SHOWN = 60
"""Characters of a value."""
_MAX_KNOWN, _MAX_COMPARED, _MAX_LISTED = 2_000, 100, 24
"""Names that one is compared with, characters of it (comparing takes their product), and names that are listed."""
_MAX_NEAREST = 5


class FrozenModel(BaseModel):
    """Base of the declarative types: immutable, and an unknown key is an error rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)


class RuleError(ValueError):
    """A broken rule inside a validator, with the fix that :func:`readable` prints.

    `location`: where inside the validated thing it stands, so that its line can be told.
    """

    def __init__(self, message: str, *, hint: str | None = None, location: Location = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self.location = location


def without_removed(
    fields: Mapping[str, Any],
    what: str,
    error: type[ZosimError],
    *,
    names: Mapping[str, object],
    values: Mapping[str, tuple[object, ...]],
) -> dict[str, Any]:
    """Return fields that an earlier version wrote without those that were removed since.

    - `what`: what they are fields of, for messages.
    - `names`: removed fields, and the value that says what holds now without them.
    - `values`: removed values of fields that stay.

    Raises ZosimError of class `error`, if a removed field has another value, or another field a removed one.

    >>> without_removed({"batch": 3, "reuse": True}, "plan", TopologyError, names={"reuse": True}, values={})
    {'batch': 3}
    """
    for name, value in fields.items():
        if value != names.get(name, value) or value in values.get(name, ()):
            raise error(
                f"{what}.{name}={value!r} was removed: this version has no equivalent",
                hint="make the plan without it, or use the version that wrote it",
            )
    return {name: value for name, value in fields.items() if name not in names}


def did_you_mean(value: str, known: Iterable[str]) -> str | None:
    """A hint naming the closest known name; if none is close, all of them, of many the nearest; None if none is known."""
    names = sorted(set(known))[:_MAX_KNOWN]
    value = value[:_MAX_COMPARED]
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(names) > _MAX_LISTED:
        listed = difflib.get_close_matches(value, names, n=_MAX_NEAREST, cutoff=0)
        return f"the nearest of {len(names)} names are {', '.join(listed)}"
    return f"known: {', '.join(names)}" if names else None


@contextmanager
def readable(
    what: str,
    cls: type[ZosimError] = TopologyError,
    *,
    locate: Callable[[Location], str | None] | None = None,
    model: type | None = None,
) -> Iterator[None]:
    """Context in which a pydantic ``ValidationError`` leaves as a readable error of the given class.

    - `locate`: turns a location into words, such as ``"line 12"``.
    - `model`: the validated class, used to suggest known keys for unknown ones; looked up by the error's title among the
      :class:`FrozenModel` classes if omitted.

    >>> class Point(FrozenModel):
    ...     x: int
    >>> with readable("point"):
    ...     Point.model_validate({"y": 1})
    Traceback (most recent call last):
    topology.errors.TopologyError: point is not valid (2 problems):
      x: missing
      y: unknown key, value 1
    <BLANKLINE>
    hint: known: x
    """
    try:
        yield
    except ValidationError as error:
        known_model = model or _model_by_name(error.title)
        found = error.errors(include_url=False)
        # A list whose items are wrong counts as empty, too: that says nothing more.
        details = [
            one
            for one in found
            if one["type"] != "too_short" or not any(one["loc"] == other["loc"][:-2] for other in found)
        ]
        named = details[:MAX_ERRORS_SHOWN]
        lines = [_describe(detail, locate, what) for detail in named]
        hints = [hint for detail in named if (hint := _hint(detail, known_model)) is not None]
        if len(details) > len(named):
            lines.append(f"and {len(details) - len(named)} more")
        if len(details) == 1:
            message = f"{what} is not valid: {lines[0]}"
        else:
            message = "\n  ".join([f"{what} is not valid ({len(details)} problems):", *lines])
        raise cls(message, hint="; ".join(dict.fromkeys(hints)) or None) from error


def _describe(detail: Any, locate: Callable[[Location], str | None] | None, what: str) -> str:
    """Name, broken rule, value (unless `what` ends with it) and place of one of pydantic's errors, in a line."""
    location: Location = detail["loc"]
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        # Pydantic puts validators' names and members of unions between those of fields.
        elif not (part.startswith("function-") or part.endswith("]")):
            name += f".{part}" if name else part
    error = detail.get("ctx", {}).get("error")
    match detail["type"]:
        case "missing":
            rule = "missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            rule = "unknown key"
        case "literal_error" | "enum":
            rule = f"must be one of {detail['ctx']['expected']}"
        case "value_error":
            rule = error.message if isinstance(error, ZosimError) else str(error)
        case _:
            rule = detail["msg"].replace("Input should", "must")
            rule = rule[:1].lower() + rule[1:]
    value = ""
    if detail["type"] not in {"missing", "value_error"} and not what.endswith(f" {detail['input']}"):
        given = repr(detail["input"])
        value = f", value {given if len(given) <= _MAX_SHOWN else given[: _MAX_SHOWN - 1] + '…'}"
    inside: Location = error.location if isinstance(error, RuleError) else ()
    where = locate((*location, *inside)) if locate else None
    return f"{name}{': ' if name else ''}{rule}{value}{f' ({where})' if where else ''}"


def _hint(detail: Any, model: type | None) -> str | None:
    match detail["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            *parents, key = detail["loc"]
            return did_you_mean(str(key), _keys_at(model, tuple(parents)))
        case "literal_error" | "enum":
            known = [part.strip(" '\"") for part in detail["ctx"]["expected"].replace(" or ", ",").split(",")]
            value = detail["input"]
            return did_you_mean(value, known) if isinstance(value, str) else None
        case "value_error":
            return getattr(detail["ctx"]["error"], "hint", None)
        case _:
            return None


def _model_by_name(name: str) -> type | None:
    pending: list[type[FrozenModel]] = [FrozenModel]
    for cls in pending:
        if cls.__name__ == name:
            return cls
        pending.extend(cls.__subclasses__())
    return None


def _keys_at(model: object, location: Location) -> set[str]:
    """Names of the fields that may stand at a location inside a model."""
    candidates: list[object] = [model]
    for part in location:
        candidates = [child for parent in candidates for child in _children(parent, part)]
    leaves = [leaf for candidate in candidates for leaf in _alternatives(candidate)]
    return {key for leaf in leaves for key in _field_types(leaf)}


def _children(parent: object, part: int | str) -> list[object]:
    children: list[object] = []
    for option in _alternatives(parent):
        fields = _field_types(option)
        if isinstance(part, str) and part in fields:
            children.append(fields[part])
        elif typing.get_origin(option) is not None and not fields:
            origin = typing.get_origin(option)
            is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
            children.append(typing.get_args(option)[-1 if is_mapping else 0])
        elif fields and getattr(option, "__name__", None) == part:
            # Pydantic names the member of a union that it tried.
            children.append(option)
    return children


def _alternatives(annotation: object) -> list[object]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin is typing.Union or isinstance(annotation, types.UnionType):
        return [leaf for option in typing.get_args(annotation) for leaf in _alternatives(option)]
    return [annotation]


def _field_types(annotation: object) -> dict[str, object]:
    if not isinstance(annotation, type):
        return {}
    if issubclass(annotation, BaseModel):
        return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
    if dataclasses.is_dataclass(annotation):
        return dict(typing.get_type_hints(annotation, include_extras=True))
    return {}
