"""Options and their values that were renamed: the earlier spelling works for one release, unseen on help pages, and warns.

The tables hold for every command and for the keywords of every function of zosim that has the option of the present name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from zosim.console import stderr

OPTIONS: tuple[tuple[str, str], ...] = (
    ("--slots", "--staging-buffers"),
    ("--parts", "--segments"),
    ("--direction", "--distribution"),
    ("--direction-bits", "--perturbation-bits"),
    ("--direction-rank", "--perturbation-rank"),
    ("--draw-ahead", "--sample-ahead"),
    ("--cut", "--split-points"),
    ("--keep-directions", "--keep-perturbations"),
    ("--engine", "--simulator"),
    ("--engine", "--server"),
    ("--queries", "--num-perturbations"),
    ("--probe-ms", "--step-ms"),
    ("--html", "--report"),
)
"""Earlier and present spelling of an option, as ``("--queries", "--num-perturbations")``.

Of several rows with one earlier spelling, that one holds whose present spelling the command has.
"""

VALUES: tuple[tuple[str, str, str], ...] = (
    ("--save-as", "codes", "compressed-tensors"),
    ("--save-as", "zosim-codes", "zosim"),
    ("--update-rounding", "query", "perturbation"),
    ("--traversal", "sweep", "full"),
    ("--kernel", "dequantise", "dequantize"),
)
"""Option by its present spelling, and earlier and present spelling of a value, as ``("--traversal", "sweep", "full")``."""

GONE_SOON = "the old spelling goes in the next release"


def present_option(spelled: str, known: Collection[str]) -> str:
    """Return an option in its present spelling, of those that a command has; one that was not renamed as it is.

    >>> present_option("--batch", {"--batch"})
    '--batch'
    """
    if spelled in known:
        return spelled
    for prefix in ("--", "--no-"):
        for earlier, now in OPTIONS:
            renamed = prefix + now[2:]
            if spelled == prefix + earlier[2:] and renamed in known:
                return renamed
    return spelled


def present_value(option: str, value: Any) -> Any:
    """Return an option's value in its present spelling; one that was not renamed as it is."""
    return next((now for named, earlier, now in VALUES if (named, earlier) == (option, value)), value)


def in_present_spelling(arguments: Sequence[str], parameters: Iterable[Any]) -> Iterator[str]:
    """Yield a command line with its options and their values in present spelling, and warn of each earlier one."""
    takes_value = {
        name: not (parameter.is_flag or parameter.count)
        for parameter in parameters
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    words = iter(arguments)
    for word in words:
        if word == "--":
            yield word
            break
        spelled, equals, value = word.partition("=")
        option = present_option(spelled, takes_value) if word.startswith("--") else spelled
        if option != spelled:
            _warn(f"{spelled} is now {option}")
        yield option + equals + (_present_value(option, value) if equals else "")
        if takes_value.get(option) and not equals:
            yield from (_present_value(option, value) for value in [next(words, None)] if value is not None)
    yield from words


def _present_value(option: str, value: str) -> str:
    now = present_value(option, value)
    if now != value:
        _warn(f"{option} {value} is now {option} {now}")
    return str(now)


def _warn(what: str) -> None:
    """Print a warning, by the first of several ranks only."""
    if os.environ.get("RANK", "0") == "0":
        stderr.print(f"warning: {what}; {GONE_SOON}", soft_wrap=True)


def in_present_names(settings: dict[str, Any], known: Collection[str], stacklevel: int = 2) -> dict[str, Any]:
    """Return a function's keywords and their values in present spellings, and warn of each earlier one.

    - `known`: keywords that the function has.
    - `stacklevel`: as of :func:`warnings.warn`, counted from the caller of this function.
    """
    options = {_option(name) for name in known}
    now = {}
    for spelled, given in settings.items():
        option = present_option(_option(spelled), options)
        name, value = option[2:].replace("-", "_"), given
        if name in settings:
            name = spelled  # who gives both means neither
        if name != spelled:
            message = f"{spelled}= is now {name}=; {GONE_SOON}"
            warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)
        if isinstance(given, str) and (value := present_value(option, given)) != given:
            message = f"{name}={given!r} is now {name}={value!r}; {GONE_SOON}"
            warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)
        now[name] = value
    return now


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
