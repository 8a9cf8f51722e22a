"""``zosim study``: pages to read, scripts to run, exercises to try."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topology.errors import ZosimError
from topology.validation import did_you_mean
from zosim.console import emit, stdout
from zosim.report import Table

if TYPE_CHECKING:
    from studies.exercises import Grade

_ROOT = Path(__file__).parent


class ReaderName(enum.StrEnum):
    """Whom an exercise is packed for."""

    STUDENT = "student"
    INSTRUCTOR = "instructor"


@dataclass(frozen=True)
class Study:
    """A folder of this package, or a module of it.

    Attributes
    ----------
    name : str
        Its own.
    topic : str
        One line.
    has_exercise : bool
    """

    name: str
    topic: str
    has_exercise: bool = False

    @property
    def page(self) -> Path | None:
        """The page to read, if there is one."""
        path = _ROOT / self.name / "page.md"
        return path if path.is_file() else None

    @property
    def script(self) -> str:
        """The command that runs its script."""
        return f"python -m studies.{self.name}"


STUDIES = (
    Study("first_steps", "plan, simulate, run and compare, once each"),
    Study("why_seeds_suffice", "a run is its base weights, its seeds and its scalars", has_exercise=True),
    Study("reading_predictions", "what a predicted step says, and what it does not", has_exercise=True),
    Study("distzo2_ranks", "what several ranks share, and what each does again", has_exercise=True),
    Study("proof_against_code", "reading a proof against code, and breaking one", has_exercise=True),
    Study("where_to_split", "stages: what crosses, and what bits do to a gradient", has_exercise=True),
    Study("rounding", "how far a restore drifts, and which updates leave a trace, by format"),
    Study("prediction", "predicted against measured on this machine (minutes)"),
    Study("scale", "how long predicting a thousand GPUs takes, beside plain simpy (minutes)"),
    Study(
        "against_print", "held-out predictions against the published cells, beside three baselines (minutes)"
    ),
    Study("zo2", "the tables of ZO2 made again, with an audit (a minute)"),
    Study("distzo2", "the tables of DistZO2 made again, with an audit (a minute)"),
    Study("speed", "a step against the reference loop and against two forwards (minutes)"),
    Study("first_hour", "what a first hour on a CUDA device should check: python3 .ci/tasks.py gpu"),
    Study("shaped", "a command in every rank of hosts joined by slow links (as root)"),
    Study("sparq", "what SparQ's printed communication volumes are consistent with"),
    Study(
        "quzo",
        "rounding without bias: gradients along rounded perturbations; QuZO's tables (a minute)",
        has_exercise=True,
    ),
    Study(
        "families", "every family of language models that transformers knows, tried on tiny models (minutes)"
    ),
    Study("validation", "measurements of others beside predictions from data sheets, by group and source"),
    Study(
        "zoinfer",
        "a probe is a request: LoZO as a loop, as one batch of scoring, on a server",
        has_exercise=True,
    ),
)


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the study to show.",
            show_default="list all studies",
        ),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List all studies, and exit.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            help="Python file with a solution of the study's exercise, or a folder of such files, to test.",
            show_default=False,
        ),
    ] = None,
    pack: Annotated[
        ReaderName | None,
        typer.Option(
            "--pack",
            help="Write the exercise as a zip: for a student, or for an instructor with the solution.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Show a study to learn from, or test your solution of its exercise (exit status 1 if it fails)."""
    if name is None or list_only:
        _show_list(json=json)
        return
    chosen = _study_named(name)
    if (check is not None or pack is not None) and not chosen.has_exercise:
        with_one = ", ".join(item.name for item in STUDIES if item.has_exercise)
        raise ZosimError(f"{chosen.name} has no exercise", hint=f"studies with an exercise: {with_one}")
    if pack is not None:
        from studies.packing import pack as packed

        stdout.print(packed(chosen.name, pack.value, Path()), markup=False, soft_wrap=True)
    elif check is not None:
        _try(chosen, check, json=json)
    elif json:
        emit(_described(chosen), json=True)
    elif chosen.page is None:
        stdout.print(f"{chosen.topic}\n\n$ {chosen.script}", markup=False, soft_wrap=True)
    else:
        _show_page(chosen.page)


def _study_named(name: str) -> Study:
    for study in STUDIES:
        if study.name == name.replace("-", "_"):
            return study
    raise ZosimError(f"unknown study {name!r}", hint=did_you_mean(name, [study.name for study in STUDIES]))


def _show_list(*, json: bool) -> None:
    rows = [(item.name, item.topic, item.script, "yes" if item.has_exercise else "") for item in STUDIES]
    shown = Table(("study", "topic", "script", "exercise"), rows)
    emit([_described(item) for item in STUDIES], json=json, text=shown)


def _described(item: Study) -> dict[str, str | bool | None]:
    return {
        "name": item.name,
        "topic": item.topic,
        "page": None if item.page is None else str(item.page),
        "script": item.script,
        "has_exercise": item.has_exercise,
    }


def _show_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if stdout.is_terminal:
        from rich.markdown import Markdown

        stdout.print(Markdown(text))
    else:
        stdout.print(text, markup=False, soft_wrap=True, end="")


def _try(chosen: Study, solution: Path, *, json: bool) -> None:
    if solution.is_dir():
        _try_all(chosen, solution, json=json)
        return
    from studies.exercises import grade

    verdict = grade(chosen.name, solution)
    emit(verdict, json=json, text=f"{_verdict(verdict)}: {verdict.message}")
    if not verdict.passed:
        raise typer.Exit(1)


def _try_all(chosen: Study, folder: Path, *, json: bool) -> None:
    """Show the verdict on each file of a folder; what a solution may not do is a verdict, too."""
    from studies.exercises import Grade, grade

    files = sorted(folder.glob("*.py"))
    if not files:
        raise ZosimError(
            f"{folder} holds no Python file", hint="put a file for each student there, such as ada.py"
        )
    verdicts: dict[str, Grade] = {}
    for file in files:
        try:
            verdicts[file.stem] = grade(chosen.name, file)
        except ZosimError as error:
            verdicts[file.stem] = Grade(False, error.message)
    rows = [(student, _verdict(each), each.message) for student, each in verdicts.items()]
    shown = Table(("solution", "verdict", "seen"), rows)
    emit([{"solution": name, **asdict(each)} for name, each in verdicts.items()], json=json, text=shown)


def _verdict(grade: Grade) -> str:
    return "passed" if grade.passed else "not yet"
