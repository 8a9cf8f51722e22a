"""Options of commands: those made of the settings of a config tree, and those of functions and commands of the same names.

Cheap to import: a help page needs no more.
"""

from __future__ import annotations

import builtins
import inspect
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, TypeAdapter

from topology.errors import PlanError
from topology.validation import did_you_mean, readable
from zosim import renamed
from zosim.help_pages import EXPERT, SHOW_ALL
from zosim.plans.setting import Section, Setting, SettingField, fields_of
from zosim.simulators import Simulator

_Model = TypeVar("_Model", bound=BaseModel)
_Tree = TypeVar("_Tree", bound=Section)
_Function = TypeVar("_Function", bound=Callable[..., Any])

PlanFile = Annotated[Path, typer.Argument(help="Plan file, from `zosim plan -o`.", show_default=False)]
_PROFILE = typer.Option(
    "--profile",
    help="Profile of calibrated rates to predict with, from `zosim calibrate -o`.",
    rich_help_panel="Hardware",
)
ProfileFile = Annotated[Path | None, _PROFILE]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Hardware to use: a name that `zosim topology list` prints, such as dgx-h100; GPUs, such as '2x rtx4090'; a topology file; or host (this machine).",
        show_default="the plan's hardware",
        rich_help_panel="Hardware",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of CPU threads per rank.",
        show_default="all cores, divided among the ranks",
        rich_help_panel="Hardware",
    ),
]

PathOrText = Path | str | None
"""What names a file in Python; an option's text is a path."""

ModelName = Annotated[
    str,
    typer.Option(
        help="Model: a built-in size such as opt-13b, a model directory, a config.json, or a saved ModelSpec.",
        rich_help_panel="Model and data",
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        help="Hardware: a name that `zosim topology list` prints, such as dgx-h100; GPUs, such as '2x rtx4090'; a topology file; or host (this machine).",
        rich_help_panel="Hardware",
    ),
]
Densities = Annotated[
    PathOrText,
    typer.Option(
        help="Measured densities of the split points, from `zosim probe --json`.",
        rich_help_panel="Model and data",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help="Device of the topology to plan for, such as gpu0.",
        show_default="the fastest GPU",
        rich_help_panel="Hardware",
    ),
]
Profile = Annotated[PathOrText, _PROFILE]
Programs = Annotated[
    PathOrText,
    typer.Option(
        "--program",
        help="Program file to use in place of the plan's own, from `zosim lower -o`.",
        rich_help_panel="Run",
    ),
]
OneProcess = Annotated[
    bool,
    typer.Option(
        "--one-process",
        help="Simulate one process per host that drives all its GPUs from one thread; `zosim run` starts a"
        " process per rank.",
        rich_help_panel="Hardware",
    ),
]
SimulatorName = Annotated[
    Simulator,
    typer.Option(
        help="Simulator: arrays over all ranks (lockstep), or a simpy process per stream (simpy).",
        rich_help_panel="Run",
    ),
]
RankToCompare = Annotated[
    int | None, typer.Option(min=0, help="Rank to compare.", show_default="the rank that finishes last")
]

CompareDetails = Annotated[
    bool,
    typer.Option(
        "--details",
        help="Compare bytes over each link, memory of each rank, and instructions.",
        rich_help_panel="Output",
    ),
]


def _show_all(context: typer.Context, wanted: bool) -> None:
    """Show the help page with the options of experts, and end."""
    if wanted:
        context.meta[SHOW_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show this message with expert options, and exit.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.", rich_help_panel="Output")]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="HTML file to write a report with charts to.",
        rich_help_panel="Output",
    ),
]


def axis(section_type: type[_Model], **fields: object) -> _Model:
    """Return one axis of a plan from options."""
    with readable(f"option of {section_type.__name__.lower()}", PlanError, model=section_type):
        return section_type.model_validate(fields)


@dataclass(frozen=True)
class ConfigOption:
    """An option of the command line that sets a field of a config tree."""

    path: tuple[str, ...]  # where the section lies in the tree
    section_type: type[Section]  # class of the section
    setting: Setting
    field: SettingField | None  # none for an option that names all fields of its section
    flag: str

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter that typer makes the option of; its value is None where it is left out."""
        typed = self.typed
        heading = self.setting.heading or self.section_type.heading
        arguments: dict[str, Any] = {"help": self.setting.help, "show_default": self._default or False}
        arguments["rich_help_panel"] = f"{EXPERT}: {heading}" if self.is_expert else heading
        names = f"{self.flag}/--no-{self.flag[2:]}" if typed is bool else self.flag
        if get_origin(typed) is Literal:
            # What is typed is checked with the field, whose refusal says what was probably meant.
            arguments["parser"] = str
        hidden = self.is_expert or self.flag in self.setting.aliases
        option = typer.Option(names, hidden=hidden, **arguments)
        annotation = Annotated[typed | None, option]  # type: ignore[valid-type]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )

    @property
    def is_expert(self) -> bool:
        """Whether only the whole help page shows it."""
        return self.setting.expert and self.flag not in self.setting.aliases

    @cached_property
    def typed(self) -> Any:
        """The type that is typed, which is the field's without constraints and without None."""
        if self.setting.typed is not None:
            return self.setting.typed
        return str if self.field is None else bare(self.field.annotation)

    @property
    def _default(self) -> str:
        usual = self.setting.usual
        if self.setting.planned:
            usual = usual or "chosen by the planner"
        elif not usual and self.field is not None and self.field.default not in (None, (), "", ...):
            default = self.field.default
            usual = ("off", "on")[default] if isinstance(default, bool) else str(default)
        return usual

    def read(self, typed: Any) -> dict[str, Any]:
        """Return the fields of the section that a text, or a value in Python, sets.

        Raises PlanError if it is no value of the field.
        """
        if self.field is None:
            return dict(self.section_type.parse(typed))  # type: ignore[attr-defined]
        value = typed if self.setting.parse is None else self.setting.parse(typed)
        with readable(f"{self.flag} {typed}", PlanError):
            return {self.field.name: TypeAdapter(self.field.annotation).validate_python(value)}


def bare(annotation: Any) -> Any:
    """Return a type without constraints and without None."""
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    inner = [part for part in get_args(annotation) if part is not type(None)]
    return bare(inner[0]) if type(None) in get_args(annotation) else annotation


@cache
def options_of(tree: type[Section], path: tuple[str, ...] = ()) -> tuple[ConfigOption, ...]:
    """Return the options of the settings of a config tree, synonyms included."""
    whole: Setting | None = getattr(tree, "setting", None)
    known = {"": SettingField("", None, ..., whole)} if whole else fields_of(tree)
    options: list[ConfigOption] = []
    for field in known.values():
        flags = (field.setting.flag, *field.setting.aliases) if field.setting.flag else ()
        options += [
            ConfigOption(path, tree, field.setting, field if field.name else None, flag) for flag in flags
        ]
    for name, section_type in () if whole else _sections_of(tree).items():
        options += options_of(section_type, (*path, name))
    return tuple(options)


@cache
def _sections_of(tree: type[Section]) -> dict[str, type[Section]]:
    hints = {name: bare(hint) for name, hint in get_type_hints(tree).items() if name in tree.model_fields}
    return {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Section)
    }


def config_of(tree: type[_Tree], settings: dict[str, Any], only: Collection[str] = ()) -> _Tree:
    """Return the config that options state by their names, such as ``keep_perturbations``; None states nothing.

    `only`: the names that there are; by default all of the tree.

    Raises PlanError if there is no such option, or a value is none of it.
    """
    options = {option.name: option for option in options_of(tree) if not only or option.name in only}
    declared: dict[tuple[str, ...], dict[str, Any]] = defaultdict(dict)
    for name, value in settings.items():
        if name not in options:
            raise PlanError(f"there is no option {name!r}", hint=did_you_mean(name, tuple(options)))
        if value is not None:
            # A path is a name to options that take either, such as a model's.
            given = str(value) if isinstance(value, Path) else value
            declared[options[name].path] |= options[name].read(given)
    return _built(tree, (), declared)


def _built(
    tree: type[_Tree], path: tuple[str, ...], declared: dict[tuple[str, ...], dict[str, Any]]
) -> _Tree:
    """Return a section, and those below it, with fields that were checked one by one; together they are checked when complete."""
    below = {
        name: _built(section_type, (*path, name), declared)
        for name, section_type in _sections_of(tree).items()
        if any(where[: len(path) + 1] == (*path, name) for where in declared)
    }
    fields: dict[str, Any] = {**declared.get(path, {}), **below}
    return tree.model_construct(**fields)


def _usual(option: ConfigOption, usual: Section | None) -> ConfigOption:
    """Return an option whose default is that of a command's own, where `usual` sets its field."""
    section = usual
    for name in option.path if usual else ():
        section = getattr(section, name)
    value = None if section is None or option.field is None else section.given(option.field.name)
    if value is None or option.field is None:
        return option
    setting = replace(option.setting, usual="", planned=False)
    return replace(option, setting=setting, field=replace(option.field, default=value))


def with_settings(
    tree: type[Section] | None,
    like: Callable[..., Any] | None = None,
    only: Collection[str] = (),
    usual: Section | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of a config tree, and for what another function has an option for.

    Of the settings those in `only`, if any are named; what `usual` sets is the command's own default. The command takes them as ``**settings``, as a function of Python does (:func:`config_of` reads both): by the names of
    the options, None for what was not typed.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = _parameters(command)
        parameters = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
        if like is not None:
            known = [one for one in _parameters(like) if get_origin(one.annotation) is Annotated]
            index = next((n for n, one in enumerate(parameters) if one.default is not one.empty), None)
            parameters[index:index] = map(_as_option, known)
        known_options = [o for o in (options_of(tree) if tree else ()) if not only or o.name in only]
        parameters += {o.name: _usual(o, usual).parameter for o in known_options}.values()
        if any(option.is_expert for option in known_options):
            parameters.append(
                inspect.Parameter(
                    "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll
                )
            )
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        command.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]

        @wraps(command)
        def called(**given: Any) -> None:
            given.pop("help_all", None)  # done before the command is called; no setting
            command(**given)

        return called

    return decorate


def takes_earlier_names(
    tree: type[Section] | None = None, only: Collection[str] = ()
) -> Callable[[_Function], _Function]:
    """Let a function take the earlier spellings of its keywords (:mod:`zosim.renamed`), which include the settings of a config tree."""

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def called(*arguments: Any, **settings: Any) -> Any:
            if settings and (renamed.OPTIONS or renamed.VALUES):
                of_tree = {option.name for option in (options_of(tree) if tree else ())}
                known = {*inspect.signature(function).parameters, *(only or of_tree)}
                settings = renamed.in_present_names(settings, known)
            return function(*arguments, **settings)

        return cast("_Function", called)

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters; of their types, those that only a type checker knows are no option's."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    known = ChainMap(names, vars(builtins), defaultdict(lambda: Any))
    return list(inspect.signature(function, eval_str=True, locals=known).parameters.values())


def _as_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of a function as one of a command, where what may name a file is a path."""
    typed, option = get_args(parameter.annotation)
    typed = Path | None if Path in get_args(typed) else typed
    return parameter.replace(annotation=Annotated[typed, option])
