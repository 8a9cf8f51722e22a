"""``zosim study``: pages to read, scripts to run, exercises to try."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from studies.coursework import UNITS, Unit
from topology.errors import ZosimError
from topology.validation import did_you_mean
from zosim.console import emit, stdout
from zosim.help_pages import Group
from zosim.report import Report, Table

if TYPE_CHECKING:
    from studies.coursework.grading import Result
    from studies.exercises import Grade

_ROOT = Path(__file__).parent


class ReaderName(enum.StrEnum):
    """Whom an exercise is packed for."""

    STUDENT = "student"
    INSTRUCTOR = "instructor"


@dataclass(frozen=True)
class Study:
    """A folder of this package, or a module of it."""

    name: str
    topic: str  # one line
    has_exercise: bool = False
    unit: Unit | None = None  # the unit of the course that it is

    @property
    def page(self) -> Path | None:
        """The page to read, if there is one."""
        path = _ROOT / self.name / "page.md"
        return path if path.is_file() else None

    @property
    def script(self) -> str:
        """The command that runs its script."""
        return f"python -m studies.{'coursework.' if self.unit else ''}{self.name}"

    @property
    def text(self) -> str:
        """What to read: the page, the unit's script as text, or how to run the script."""
        if self.unit is not None:
            from studies.coursework.notebook import text

            return text(self.unit.lesson)
        return (
            f"{self.topic}\n\n$ {self.script}\n"
            if self.page is None
            else self.page.read_text(encoding="utf-8")
        )


STUDIES = (
    Study("coursework", "a course of eight units: which pages and exercises to take, and in which order"),
    *(Study(unit.name, unit.question, has_exercise=True, unit=unit) for unit in UNITS),
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


class StudyGroup(Group):
    """Commands about studies; a study's name alone shows it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``zosim study NAME`` as ``zosim study show NAME``, and no name as the list."""
        if all(word in ("--json", "--list") for word in args):
            args = ["list", *(word for word in args if word == "--json")]
        elif args[0] not in self.commands and not {"--help", "--help-all"} & {*args}:
            args = ["show", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    name="study",
    cls=StudyGroup,
    help="Read studies, work on units of the course, and grade solutions.",
    add_completion=False,
)
Name = Annotated[str, typer.Argument(help="Name of a study or of a unit of the course.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command("list")
def list_studies(json: Json = False) -> None:
    """List all studies and units, those of the course first."""
    rows = [(item.name, item.topic, item.script, "yes" if item.has_exercise else "") for item in STUDIES]
    shown = Table(("study", "topic", "script", "exercise"), rows)
    emit([_described(item) for item in STUDIES], json=json, text=shown)


@app.command()
def show(name: Name, json: Json = False) -> None:
    """Show a study to learn from."""
    chosen = _study_named(name)
    if json:
        emit(_described(chosen), json=True)
    elif stdout.is_terminal:
        from rich.markdown import Markdown

        stdout.print(Markdown(chosen.text))
    else:
        stdout.print(chosen.text, markup=False, soft_wrap=True, end="")


@app.command()
def check(
    name: Name,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Solution, solution.py; of a unit also answers.json. Or one folder with a file, or for a unit a folder, for each student.",
            show_default=False,
        ),
    ],
    figure: Annotated[
        Path | None,
        typer.Option(help="SVG file for the solution's curve beside the reference's.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Grade a solution (exit status 1 unless it has every point), or a folder of them."""
    chosen = _with_exercise(name)
    if len(files) == 1 and files[0].is_dir():
        (_check_class if chosen.unit is None else _check_course)(chosen, files[0], json=json)
    elif chosen.unit is None:
        from studies.exercises import grade

        if len(files) > 1:
            raise ZosimError(f"{chosen.name} takes one solution", hint="name one Python file, or one folder")
        verdict = grade(chosen.name, files[0])
        emit(verdict, json=json, text=f"{_verdict(verdict)}: {verdict.message}")
        _end(verdict.passed)
    else:
        from studies.coursework.grading import check as marked

        result = marked(chosen.unit, files)
        emit(result, json=json, text=_shown(result))
        if figure is not None and result.curve:
            from studies.coursework.grading import draw

            draw(chosen.unit, result.curve, figure)
        _end(result.passed)


@app.command()
def pack(
    name: Name,
    reader: Annotated[
        ReaderName,
        typer.Option("--for", help="Reader: a student, or an instructor, who gets the solution, too."),
    ] = ReaderName.STUDENT,
    student: Annotated[
        list[str] | None,
        typer.Option(
            help="Student whose numbers are asked about in a unit; repeat for a class.",
            show_default="anybody",
        ),
    ] = None,
) -> None:
    """Write an exercise or a unit as a zip for each reader."""
    from studies.packing import pack as packed

    chosen = _with_exercise(name)
    if student and chosen.unit is None:
        raise ZosimError(f"{chosen.name} has the same exercise for everybody", hint="leave --student out")
    for each in packed(chosen.name, chosen.unit, reader.value, student or [], Path()):
        stdout.print(each, markup=False, soft_wrap=True)


def _with_exercise(name: str) -> Study:
    chosen = _study_named(name)
    if not chosen.has_exercise:
        with_one = ", ".join(item.name for item in STUDIES if item.has_exercise)
        raise ZosimError(f"{chosen.name} has no exercise", hint=f"studies with an exercise: {with_one}")
    return chosen


def _end(passed: bool) -> None:
    if not passed:
        raise typer.Exit(1)


def _study_named(name: str) -> Study:
    for study in STUDIES:
        if study.name == name.replace("-", "_"):
            return study
    raise ZosimError(f"unknown study {name!r}", hint=did_you_mean(name, [study.name for study in STUDIES]))


def _described(item: Study) -> dict[str, str | bool | None]:
    return {
        "name": item.name,
        "topic": item.topic,
        "page": None if item.page is None else str(item.page),
        "script": item.script,
        "has_exercise": item.has_exercise,
    }


def _check_class(chosen: Study, folder: Path, *, json: bool) -> None:
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


def _check_course(chosen: Study, folder: Path, *, json: bool) -> None:
    """Show the points of each student, whose folder in `folder` has their name; what may not be handed in has none."""
    from studies.coursework.grading import check as marked

    assert chosen.unit is not None
    students = sorted(item for item in folder.iterdir() if item.is_dir())
    if not students:
        raise ZosimError(
            f"{folder} holds no folders",
            hint="put a folder for each student there, with answers.json and solution.py",
        )
    rows, results = [], []
    for own in students:
        files = [file for name in ("answers.json", "solution.py") if (file := own / name).is_file()]
        try:
            result = marked(chosen.unit, files, own.name)
            missed = "; ".join(
                f"{test.name}: {test.output}" for test in result.tests if test.score < test.max_score
            )
        except ZosimError as error:
            result, missed = marked(chosen.unit, [], own.name), error.message
        results.append(asdict(result) | {"seen": missed})
        rows.append((own.name, f"{result.score:g} of {result.max_score:g}", missed))
    emit(results, json=json, text=Table(("student", "points", "seen"), rows))


def _shown(result: Result) -> Report:
    """Return the points of each part, and the curve as numbers."""
    rows = [(test.name, f"{test.score:g} of {test.max_score:g}", test.output) for test in result.tests]
    parts = [
        Table(("part", "points", "seen"), [*rows, ("all", f"{result.score:g} of {result.max_score:g}", "")])
    ]
    if result.curve:
        points = [tuple(f"{value:.4g}" for value in row) for row in result.curve]
        parts.append(Table(("at", "yours", "reference"), points, numeric=("at", "yours", "reference")))
    return Report(f"Points of {result.student}", *parts)
