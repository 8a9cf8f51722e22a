"""Options that commands share: those made of the settings of fields, and a few of the planner's. Cheap to import."""

from __future__ import annotations

import builtins
import inspect
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import TypeAdapter

from topology.errors import PlanError
from topology.units import QuantityError, parse_bytes
from topology.validation import did_you_mean, readable
from zosim.plans import ANY, AXES, Plan
from zosim.plans.setting import Setting, SettingField, fields_of

METHOD_HELP = (
    "mezo keeps blocks on the device, zo2 offloads them; pertp, ddp and 2d share a step out among ranks, "
    "sparq cuts the model into stages; auto: whatever is fastest."
)
AllowLossy = Annotated[
    bool,
    typer.Option(
        "--allow-lossy",
        help="Consider plans that lose precision (narrower transfers, codecs; when planning, weights in few bits), and carry "
        "them out.",
    ),
]
MaxDeviceMemory = Annotated[
    str | None, typer.Option(help="What the planner may take, such as 20GiB; by default all of it.")
]
MaxHostMemory = Annotated[
    str | None, typer.Option(help="What the planner may take, such as 64GiB; by default all of it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def memory_limit(option: str, text: str | None) -> int | None:
    """Return the bytes that an option leaves to a plan; None without it, which is all that there is.

    Raises
    ------
    PlanError
        If the text is no size, or zero.
    """
    if text is None:
        return None
    try:
        size_bytes = parse_bytes(text)
    except QuantityError as error:
        raise PlanError(f"{option} {text}: {error.message}", hint=error.hint) from None
    if size_bytes == 0:
        raise PlanError(
            f"{option} {text} leaves no memory", hint="such as 20GiB; all of it without the option"
        )
    return size_bytes


Stated = dict[str, dict[str, Any]]
"""Values that options state, by section and field; what was left out is not there."""

PLAN_SECTIONS: Mapping[str, type] = {"plan": Plan, **AXES}
"""What has the settings of a plan: its axes, and itself with its batch."""


@dataclass(frozen=True)
class _Option:
    """One option of the command line.

    Attributes
    ----------
    section : str
    kind : type
        Class that has the field.
    setting : Setting
    field : SettingField or None
        None for an option that names all fields of its section.
    flag : str
    """

    section: str
    kind: type
    setting: Setting
    field: SettingField | None
    flag: str

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter that typer makes the option of; its value is None where it is left out."""
        typed = self._typed
        words: dict[str, Any] = {
            "help": self._help,
            "rich_help_panel": self.section.replace("_", " ").capitalize(),
        }
        names = f"{self.flag}/--no-{self.flag[2:]}" if typed is bool else self.flag
        if get_origin(typed) is Literal:
            # What is typed is checked with the field, whose refusal says what was probably meant.
            words |= {"parser": str, "metavar": f"<{'|'.join(get_args(typed))}>"}
        hidden = self.flag in self.setting.aliases
        option = typer.Option(names, show_default=False, hidden=hidden, **words)
        annotation = Annotated[typed | None, option]  # type: ignore[valid-type]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )

    @cached_property
    def _typed(self) -> Any:
        """The type that is typed, which is the field's without constraints and without None."""
        if self.setting.typed is not None:
            return self.setting.typed
        if self.field is None:
            return str
        typed = bare(self.field.annotation)
        values = (*get_args(typed), ANY) if self.setting.may_be_any else get_args(typed)
        return Literal[values] if get_origin(typed) is Literal else typed

    @property
    def _help(self) -> str:
        usual = self.setting.usual
        if self.setting.planned:
            usual = usual or "what the planner finds fastest"
        elif not usual and self.field is not None and self.field.default not in (None, (), ...):
            default = self.field.default
            usual = ("off", "on")[default] if isinstance(default, bool) else str(default)
        return f"{self.setting.help} By default {usual}." if usual else self.setting.help

    def state(self, typed: Any, stated: Stated) -> None:
        """Put what was typed where it belongs."""
        fields = stated.setdefault(self.section, {})
        if self.field is None:
            fields |= self.kind.parse(typed).model_dump(exclude_defaults=True)  # type: ignore[attr-defined]
            return
        value = typed if self.setting.parse is None else self.setting.parse(typed)
        if self.setting.may_be_any and value == ANY:
            fields[self.field.name] = ANY
        else:
            with readable(f"{self.flag} {typed}", PlanError):
                fields[self.field.name] = TypeAdapter(self.field.annotation).validate_python(value)


def bare(annotation: Any) -> Any:
    """Return a type without constraints and without None."""
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    inner = [part for part in get_args(annotation) if part is not type(None)]
    return bare(inner[0]) if type(None) in get_args(annotation) else annotation


def options_of(sections: Mapping[str, type]) -> list[_Option]:
    """Return the options of the settings of some classes, earlier spellings included."""
    options = []
    for section, kind in sections.items():
        whole: Setting | None = getattr(kind, "setting", None)
        settings = (
            [(whole, None)] if whole else [(field.setting, field) for field in fields_of(kind).values()]
        )
        options += [
            _Option(section, kind, setting, field, flag)
            for setting, field in settings
            for flag in ((setting.flag, *setting.aliases) if setting.flag else ())
        ]
    return options


def stated_in(settings: Mapping[str, object], sections: Mapping[str, type]) -> Stated:
    """Return settings that were given by the names of their options, such as ``keep_directions``, by section and field.

    Raises
    ------
    PlanError
        If there is no such setting, or a value is none of it.
    """
    options = {option.name: option for option in options_of(sections)}
    stated: Stated = {}
    for name, value in settings.items():
        if name not in options:
            raise PlanError(f"there is no setting {name!r}", hint=did_you_mean(name, tuple(options)))
        if value is not None:
            options[name].state(value, stated)
    return stated


def with_settings(
    sections: Mapping[str, type], like: Callable[..., Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of `sections`, and for what another function has an option for.

    The command takes them as ``**settings``, as a function of Python does (:func:`stated_in` reads both): by the names of
    the options, None for what was not typed.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = _parameters(command)
        parameters = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
        if like is not None:
            known = [one for one in _parameters(like) if get_origin(one.annotation) is Annotated]
            place = next((n for n, one in enumerate(parameters) if one.default is not one.empty), None)
            parameters[place:place] = map(_as_option, known)
        parameters += {option.name: option.parameter for option in options_of(sections)}.values()
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        command.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters; of their types, those that only a type checker knows are no option's."""
    known = ChainMap(getattr(function, "__globals__", {}), vars(builtins), defaultdict(lambda: Any))
    return list(inspect.signature(function, eval_str=True, locals=known).parameters.values())


def _as_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of a function as one of a command, where what may name a file is a path."""
    typed, option = get_args(parameter.annotation)
    typed = Path | None if Path in get_args(typed) else typed
    return parameter.replace(annotation=Annotated[typed, option])
