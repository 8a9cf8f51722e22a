"""The ``zosim`` command: subcommands from every package, one way of failing.

Data goes to stdout and messages go to stderr, so that output can be piped. Exit codes: 0 done,
1 a check that was asked for did not hold (or our own mistake, with its traceback), 2 a mistake that the user can
mend, 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperCommand

from topology.errors import ZosimError, refusal_of_machine, refusing_ignored
from topology.printable import spell_what_cannot_be_written
from zosim import registry
from zosim.console import stderr, stdout
from zosim.help_pages import Command, Group

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# Which extra of the distribution brings a package that planning can do without.
EXTRA_OF_PACKAGE = {
    "torch": "run",
    "transformers": "run",
    "safetensors": "run",
    "tokenizers": "run",
    "pynvml": "gpu",
    "starlette": "serve",
    "uvicorn": "serve",
}

NEEDED_TO_RUN = tuple(package for package, extra in EXTRA_OF_PACKAGE.items() if extra == "run")

UsageError: Any = typer.BadParameter.__base__
"""What is wrong with a command line; typer may bring a click of its own."""


class CommandGroup(Group):
    """The root command, whose subcommands are imported when they are invoked and not before."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entries = registry.registered()
        for name in self._entries:
            self.add_command(TyperCommand(name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Stand-in that can be listed, since the help page must not import what it lists."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help is None:
            command.help = registry.summary(self._entries[cmd_name])
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Real command, imported now because it is about to run."""
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        return name, build(name, registry.load(self._entries[name])), rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the subcommand; a mistake among them is reported like any other."""
        try:
            return list(super().parse_args(ctx, args))
        except UsageError as error:
            report(misuse(error, ctx.command_path))
            raise typer.Exit(EXIT_USER_ERROR) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; what a user can mend ends in a message instead of a traceback."""
        try:
            with refusing_ignored():
                return super().invoke(ctx)
        except ZosimError as error:
            report(error)
        except ModuleNotFoundError as error:
            report(missing_extra(error))
        except (OSError, MemoryError) as error:
            refusal = refusal_of_machine(error)
            if refusal is None:
                raise
            report(refusal)
        except UsageError as error:
            report(misuse(error, f"{ctx.command_path} {ctx.invoked_subcommand or ''}".strip()))
        except KeyboardInterrupt:
            stderr.print("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise typer.Exit(EXIT_USER_ERROR)


def misuse(error: Any, path: str) -> ZosimError:
    """Return what is wrong with a command line, with where to look it up."""
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
        raise error
    path = path if error.ctx is None else error.ctx.command_path
    listed = "commands" if hasattr(getattr(error.ctx, "command", None), "commands") else "options"
    message = error.format_message().replace("Value error, ", "")  # pydantic's prefix, which typer keeps
    hint = f"`{path} --help` lists the {listed}"
    if known := getattr(error, "possibilities", None):
        # Compared without the dashes, which all options have in common.
        close = get_close_matches(error.option_name.lstrip("-"), [name.lstrip("-") for name in known], n=1)
        message, hint = error.message, f"did you mean --{close[0]}? {hint}" if close else hint
    return ZosimError(message[:1].lower() + message[1:].rstrip("."), hint=hint)


@cache
def build(name: str, registered: Any) -> Any:
    """Command object of a registered function, or group of a registered ``typer.Typer``; with help pages of our own."""
    if isinstance(registered, typer.Typer):
        _use_own_classes(registered)
        group = typer.main.get_group(registered)
        group.name = name
        return group
    single = typer.Typer(add_completion=False)
    single.command(name, cls=Command)(registered)
    return typer.main.get_command(single)


def _use_own_classes(group: typer.Typer) -> None:
    if not isinstance(group.info.cls, type):
        group.info.cls = Group
    for command in group.registered_commands:
        command.cls = Command if command.cls in (None, TyperCommand) else command.cls
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _use_own_classes(inner.typer_instance)


def missing_extra(error: ModuleNotFoundError) -> ZosimError:
    """Explanation of a package that an optional extra would have installed; other errors go on."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF_PACKAGE:
        raise error
    command = f"{sys.executable} -m pip install -e '.[{EXTRA_OF_PACKAGE[package]}]'"
    return ZosimError(
        f"this needs {package}, which is not installed",
        hint=f"in a clone of zosim: {command}\n      planning and simulating work without it",
    )


def refuse_without(*packages: str) -> None:
    """Raise for the first of some packages that is not installed, without the seconds that importing them takes.

    Raises
    ------
    ZosimError
    """
    for package in packages:
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise missing_extra(ModuleNotFoundError(name=package))


def report(error: ZosimError) -> None:
    """Print a user's mistake to stderr: ``error:``, a blank line, ``hint:``; on a terminal, lines end between words."""
    text = Text.assemble(("error:", "bold red"), f" {error.message}")
    if error.hint is not None:
        text.append_text(Text.assemble("\n\n", ("hint:", "bold cyan"), f" {error.hint}"))
    stderr.print(text, soft_wrap=not stderr.is_terminal)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _show_versions(wanted: bool) -> None:
    if not wanted:
        return
    stdout.print(f"zosim {_installed('zosim')}")
    stdout.print(f"python {platform.python_version()}")
    for package in ("torch", "transformers"):
        stdout.print(f"{package} {_installed(package)}")
    raise typer.Exit


app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def root(
    versions: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions, and exit."),
    ] = False,
) -> None:
    """Plan, simulate and run zeroth-order fine-tuning of large language models."""


@cache
def command() -> Any:
    """Root command, made once in a process: its options and those of its subcommands take a while to read."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line. Entry point of ``zosim`` and of ``python -m zosim``."""
    spell_what_cannot_be_written()
    command()(prog_name="zosim")
