"""Which closed forms there are, what they take, and how one is asked for a value."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field, ValidationError, validate_call

from topology.errors import ZosimError
from topology.validation import did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**15, strict=True)]

_MODULES = (
    "perturbations",
    "estimates",
    "smoothing",
    "rounding",
    "boundaries",
    "bounds",
    "steps",
    "statements",
)


@dataclass(frozen=True)
class Oracle:
    """A closed form."""

    name: str
    function: Callable[..., Any]  # takes keyword arguments, returns a number, or numbers by name
    source: str  # paper and place, or book; and what it assumes

    @property
    def result(self) -> str:
        """The first line of its documentation: what comes back."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def documentation(self) -> str:
        """All of its documentation, with the formula."""
        return inspect.getdoc(self.function) or ""

    @property
    def parameters(self) -> dict[str, str]:
        """Type of each parameter, with its default if it has one."""
        hints = get_type_hints(self.function)
        return {
            name: _type_name(hints[name])
            + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
            for name, parameter in inspect.signature(self.function).parameters.items()
        }

    def to_data(self) -> dict[str, Any]:
        """Return what there is to know, for JSON."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "result": self.result,
            "source": self.source,
            "documentation": self.documentation,
        }


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


_ORACLES: dict[str, Oracle] = {}


Function = TypeVar("Function", bound=Callable[..., Any])


def oracle(source: str) -> Callable[[Function], Function]:
    """Return a decorator that puts a function among the oracles."""

    def registered(function: Function) -> Function:
        _ORACLES[function.__name__] = Oracle(function.__name__, function, source)
        return function

    return registered


@cache
def oracles() -> Mapping[str, Oracle]:
    """Return all of them by name."""
    for module in _MODULES:
        import_module(f"proofs_checks.oracles.{module}")
    return dict(sorted(_ORACLES.items()))


def oracle_named(name: str) -> Oracle:
    """Return the oracle called `name`. Raises ZosimError if there is none."""
    known = oracles()
    if name not in known:
        raise ZosimError(f"unknown oracle {name!r}", hint=did_you_mean(name, list(known)))
    return known[name]


def evaluate(name: str, parameters: Mapping[str, Any]) -> Any:
    """Return the value of an oracle: a number, or numbers by name.

    Raises ZosimError if there is no such oracle, or it does not take these parameters.

    >>> evaluate("energy", {"distribution": "gaussian", "dimension": 8})
    10.0
    """
    requested = oracle_named(name)
    signature = ", ".join(f"{key}: {kind}" for key, kind in requested.parameters.items())
    if not isinstance(parameters, Mapping):
        raise ZosimError(f"parameters of {name} must be a JSON object", hint=f"it takes {signature}")
    try:
        value = validate_call(requested.function)(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ZosimError(f"{name}: {where}: {first['msg']}", hint=f"it takes {signature}") from None
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise ZosimError(f"{name}: {error}", hint=f"it takes {signature}") from None
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ZosimError(
            f"{name} is not finite for these parameters", hint="use smaller parameters"
        ) from None
    return value
