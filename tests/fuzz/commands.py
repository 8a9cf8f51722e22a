"""Every command, as a target: its options and arguments are changed as its own declarations allow, and its files, too."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tests.fuzz import seeds
from tests.fuzz.cases import Case, Target
from tests.fuzz.mutations import STRINGS, mutated, with_new_digest
from topology.errors import ZosimError
from zosim import cli, registry

WORDS = (
    "data=2", "stage=2", "data=2,perturb=2", "data=0", "data=999999", "stage=99", "20GiB", "0", "1e30GiB", "1,2", "3d", "1e-30h", "5000 USD",
    "1e300", "block.0", "block.1.mlp", "block.99", "q4", "q4:affine-zero:token", "none,q8", "float16", "tf32", "mezo", "counter",
    "gaussian", "resident", "offloaded", "sliced", "delayed", "full", "copies", "cpu0", "gpu0", "gpu1", "cuda:7", "cpu:9", "rtx4090-2x",
    "cpu-laptop", "host", "plan.json", "run", ".", "missing.json", "0-1", "0-999999999", "{text} {label}", "0=a,1=b", "q_proj", "accuracy",
    "os:system", "1f1b", "gpt2", "opt-125m", "rtx4090-2x,cpu-laptop", "shipped",
)  # fmt: skip
INTEGERS = (0, 1, -1, 2, 3, 4, 8, 64, 1000, 10**6, 10**9, 2**31, 2**63, 2**64, 10**18, 10**30)
FLOATS = ("0", "-1", "1e-3", "1e-320", "1e308", "1e999", "nan", "inf", "-inf", "0.5", "1e9", "x")


@dataclass(frozen=True)
class Option:
    """What a command's declaration says of an option."""

    names: tuple[str, ...]
    kind: Any
    is_flag: bool
    is_multiple: bool


@cache
def options_of(path: tuple[str, ...]) -> tuple[Option, ...]:
    """Return the options of a command, by its words."""
    name, *below = path
    registered = registry.load(registry.registered()[name])
    command: Any = cli.build(name, registered)
    function = registered
    for word in below:
        command = command.commands[word]
        function = {
            info.name or info.callback.__name__: info.callback for info in registered.registered_commands
        }[word]
    kinds = {name: _plain(kind) for name, kind in get_type_hints(function).items()}
    return tuple(
        Option((*p.opts, *p.secondary_opts), kinds[p.name], kinds[p.name] is bool, p.multiple)
        for p in command.params
        if p.param_type_name == "option" and p.name in kinds
    )


def _plain(kind: Any) -> Any:
    """Return a type without the None, or the list, around it."""
    if get_origin(kind) is Literal:
        return kind
    inside = [part for part in get_args(kind) if part is not type(None)]
    return _plain(inside[0]) if inside else kind


def words_of(path: tuple[str, ...], argv: Sequence[str]) -> list[list[str]]:
    """Return arguments in pieces: an option with its value, or an argument."""
    takes_value = {name for option in options_of(path) if not option.is_flag for name in option.names}
    pieces: list[list[str]] = []
    for word in argv:
        if pieces and len(pieces[-1]) == 1 and pieces[-1][0] in takes_value:
            pieces[-1].append(word)
        else:
            pieces.append([word])
    return pieces


def mutated_argv(generator: Random, path: tuple[str, ...], argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of a command with some dropped, added or given other values."""
    pieces = words_of(path, argv[len(path) :])
    options = options_of(path)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        at = generator.randrange(len(pieces)) if pieces else 0
        match generator.randrange(9):
            case 0 if pieces:
                del pieces[at]
            case 1 if pieces:
                pieces[at] = [*pieces[at][:-1], _word(generator)]
            case 2 if pieces:
                pieces.insert(at, [_word(generator)])
            case _ if options:
                option = generator.choice(options)
                name = generator.choice(option.names)
                given = [name] if option.is_flag else [name, _value(generator, option.kind)]
                pieces = [piece for piece in pieces if piece[0] not in option.names or option.is_multiple]
                pieces.append(given)
    return (*path, *(word for piece in pieces for word in piece))


def _value(generator: Random, kind: Any) -> str:
    """Return a value of an option's type, valid or nearly so."""
    if generator.random() < 0.08:
        return _word(generator)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return str(generator.choice(list(kind)).value)
    if get_origin(kind) is Literal:
        return str(generator.choice(get_args(kind)))
    if kind is int:
        return str(generator.choice(INTEGERS))
    return generator.choice(FLOATS) if kind is float else _word(generator)


def _word(generator: Random) -> str:
    word = generator.choice((*WORDS, *WORDS, *STRINGS, *map(str, INTEGERS), *FLOATS))
    return word.replace("\0", "0")  # no argument holds one


def command(
    words: str,
    arguments: str | Sequence[str],
    files: Callable[[], Mapping[str, bytes]],
    *,
    kept: Callable[[], Mapping[str, bytes]] = dict,
    checksummed: bool = False,
    stop: Callable[[], None] = lambda: None,
    quick: int = 12,
) -> Target:
    """Return a command as a target.

    - `words`: The command, such as ``"topology show"``; what stands in brackets tells targets of one command apart.
    - `arguments`: What it is called with, to begin from; each of several makes a seed.
    - `files`, `kept`: Return its files, those that are broken and those that are not.
    - `checksummed`: Whether files state a digest, which is made to fit.
    - `stop`: Called before the first case: takes the minutes of work out of a command, so that what reads its options and
      files is left.
    """
    path = tuple(words.partition("(")[0].split())

    def make_seeds() -> list[Case]:
        stop()
        lines = [arguments] if isinstance(arguments, str) else arguments
        return [Case(files(), (*path, *line.split()), kept()) for line in lines]

    def mutate(generator: Random, case: Case) -> Case:
        if not case.files or generator.random() < 0.6:
            case = replace(case, argv=mutated_argv(generator, path, case.argv))
            if generator.random() < 0.7:
                return case
        if not case.files:
            return case
        return (with_new_digest if checksummed else mutated)(generator, case)

    def call(case: Case, _folder: Path) -> None:
        cli.command().main(list(case.argv), prog_name="zosim")

    return Target(f"zosim {words}", make_seeds, call, mutate, quick)


MOST_STEPS = 8


class StoppedError(ZosimError):
    """In place of minutes of work."""


def _refuse(*_: object, **__: object) -> Iterator[Any]:
    raise StoppedError("the work is left out here")


def _no_demo() -> None:
    import executors.demo

    executors.demo.Stages.run = _refuse  # type: ignore[method-assign, assignment]


def _no_claims() -> None:
    import proofs_checks.cli

    proofs_checks.cli._run_all = proofs_checks.cli._try_matrix = _refuse  # type: ignore[assignment]


def _no_solution() -> None:
    """A solution is read, and not tried."""
    import studies.exercises

    verdict = {"passed": False, "message": "not tried", "curve": [[0.0, 1.0, 1.0]]}
    done = SimpleNamespace(stdout="\nverdict: " + json.dumps(verdict), stderr="", returncode=0)
    studies.exercises.subprocess = SimpleNamespace(  # type: ignore[assignment]
        run=lambda *_args, **_options: done, TimeoutExpired=TimeoutError
    )


def _no_measuring() -> None:
    import executors.calibration.calibrating

    executors.calibration.calibrating.calibrated = _refuse  # type: ignore[assignment]


def _no_workers() -> None:
    import zosim.applications.sweep.sweeping

    zosim.applications.sweep.sweeping.outcomes = _refuse  # type: ignore[assignment]


def _few_steps_of_one_rank() -> None:
    """One process stays one, since several are started by what is tested elsewhere; a billion steps are real work."""
    import executors.ranks.launch
    from executors.runs.session import Session

    executors.ranks.launch.launch = _refuse  # type: ignore[assignment]
    step = Session.begin_step

    @wraps(step)
    def one_of_a_few(session: Session, *arguments: Any, **more: Any) -> Any:
        if session.num_steps >= MOST_STEPS:
            raise StoppedError(f"steps after the first {MOST_STEPS} are left out here")
        return step(session, *arguments, **more)

    if not hasattr(step, "__wrapped__"):
        Session.begin_step = one_of_a_few  # type: ignore[method-assign]


def _few_batches() -> None:
    """Thousands of batches are real work, too."""
    import executors.boundary_probe

    batches = executors.boundary_probe._batches

    @wraps(batches)
    def a_few(model: Any, source: str, data: str, size: int, num: int, *more: Any) -> Any:
        return batches(model, source, data, min(size, MOST_STEPS), min(num, MOST_STEPS), *more)

    if not hasattr(batches, "__wrapped__"):
        executors.boundary_probe._batches = a_few


def _model_and_data() -> dict[str, bytes]:
    return {**seeds.model(), "data.jsonl": seeds.data()}


def _reported(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what a run says of itself, of all its files."""
    return {
        name: content
        for name, content in files.items()
        if name.endswith(("run.json", ".jsonl", "program.json"))
    }


def _run_files() -> dict[str, bytes]:
    return _reported(seeds.run())


_RUN = "--model model --data data.jsonl --steps 2 --batch 2 --out out --no-launch --no-tensorboard"

_LOW_RANK = (
    "--weights adapters --distribution lozo --checkpoint-every 1",
    "--weights adapters --distribution factorised --perturbation-rank 3 --num-perturbations 2",
    "--distribution lozo --perturbation-rank 1 --lazy-steps 1 --residency offloaded",
    "--distribution lozo-released --lazy-steps 2 --weight-decay 0.1",
    "--distribution factorised --rng counter --weights copies",
)
_QUANTIZED = (
    "--weight-format int8",
    "--weight-format int4 --weight-scales tensor --zero-point --estimator q-rge2",
    "--weight-format float8_e4m3 --weight-scales tensor --estimator q-rge1 --residency offloaded --transfers private",
    "--weight-format int8 --activation-format int8-token --kernel dequantize --kernel-fallback --checkpoint-every 1",
    "--weight-format int3 --perturbation-bits 3 --num-perturbations 2 --difference forward --rng counter",
)
"""Kinds of runs that work, as options beside others."""
_PLANNED_QUANTIZED = (
    "",
    *(f"{words} --weight-group 16" for words in _QUANTIZED if "checkpoint" not in words),
)


def _resumed(kind: str, files: Callable[[], Mapping[str, bytes]]) -> Target:
    """Return a run of a kind as a target, which goes on from what is broken."""
    return command(
        f"run (resume, {kind})",
        "--resume --out run --steps 5 --no-launch --no-tensorboard",
        lambda: _reported(files()),
        kept=lambda: _model_and_data() | {n: c for n, c in files().items() if n.endswith(".safetensors")},
        checksummed=True,
        stop=_few_steps_of_one_rank,
        quick=5,
    )


def _replayed(kind: str, files: Callable[[], Mapping[str, bytes]]) -> Target:
    """Return a replay from a broken checkpoint as a target."""
    path = f"run/{seeds.CHECKPOINT}"
    return command(
        f"replay ({kind})",
        "run --model model --checkpoints -o weights",
        lambda: {path: files()[path]},
        kept=lambda: {**seeds.model(), **files()},
        quick=6,
    )


def _xml() -> dict[str, bytes]:
    return {"nccl.xml": (seeds.FIXTURES / "nccl_a100x4.xml").read_bytes()}


_BUY = "--model spec.json --batch 1 --seq 32 --steps 100 --machines rtx4090-2x,cpu-laptop --count 1,2 --simulate 1"


def _validate(what: str, *kinds: str) -> Target:
    return command(
        f"validate ({what})", "rows.csv -o p.csv", lambda: {"rows.csv": seeds.measured_rows(*kinds)}, quick=8
    )


COMMANDS: tuple[Target, ...] = (
    command("topology list", "", dict, quick=3),
    command("topology show", "machine.yaml", lambda: {"machine.yaml": seeds.topologies()[4]}, quick=10),
    command("topology validate", "machine.yaml", lambda: {"machine.yaml": seeds.topologies()[2]}),
    command("topology detect", "", dict, quick=3),
    command(
        "topology draw", "machine.yaml -o a.svg", lambda: {"machine.yaml": seeds.topologies()[1]}, quick=6
    ),
    command("topology rings", "machine.yaml", lambda: {"machine.yaml": seeds.topologies()[2]}),
    command("topology import", "nccl.xml", _xml),
    command(
        "plan",
        "--model spec.json --hardware rtx4090-2x --batch 2 --seq 32 --densities densities.json -o plan.json",
        lambda: {"spec.json": seeds.model_spec(), "densities.json": seeds.densities()},
        quick=10,
    ),
    command(
        "plan (quantized values)",
        [
            f"--model spec.json --hardware rtx4090-2x --batch 2 --seq 32 --allow-lossy {words}"
            for words in _PLANNED_QUANTIZED
        ],
        lambda: {"spec.json": seeds.model_spec()},
        quick=5,
    ),
    command(
        "plan (adapters)",
        "--model config.json --hardware rtx4090-2x --batch 2 --seq 32 --mesh data=2 "
        "--weights adapters --distribution lozo --tune linears",
        lambda: {"config.json": seeds.config()},
        quick=5,
    ),
    command("lower", "plan.json -o program.json", lambda: {"plan.json": seeds.plan_of_ranks()}, quick=10),
    command(
        "lower (check)",
        "plan.json --check p.json",
        lambda: {"plan.json": seeds.plan(), "p.json": seeds.programs()},
        quick=10,
    ),
    command(
        "simulate (quantized values)",
        "plan.json --trace t.json",
        lambda: {"plan.json": seeds.quantized_plan()},
        quick=5,
    ),
    command(
        "simulate (adapters)", "plan.json --json", lambda: {"plan.json": seeds.plan_of_adapters()}, quick=5
    ),
    command(
        "simulate",
        "plan.json --profile profile.json --trace t.json",
        lambda: {"plan.json": seeds.plan(), "profile.json": seeds.profile()},
        checksummed=True,
        quick=10,
    ),
    command(
        "simulate (first order)",
        "plan.json --first-order sgd --microbatches 2",
        lambda: {"plan.json": seeds.plan_of_stages()},
        quick=15,
    ),
    command(
        "compare", "run", lambda: {n: c for n, c in seeds.run().items() if not n.endswith("l")}, quick=10
    ),
    command(
        "report",
        ("plan.json -o page.html", "run plan.json -o page.html"),
        lambda: {"plan.json": seeds.plan(), **_run_files()},
        quick=6,
    ),
    command(
        "buy",
        _BUY + " --prices prices.yaml",
        lambda: {"spec.json": seeds.model_spec(), "prices.yaml": seeds.prices()},
        quick=15,
    ),
    command(
        "whatif",
        (
            "plan.json --set gpu0.speed=0.5 --set pcie.bandwidth=8GB/s --drop gpu1 --derive none",
            "plan.json --drop gpu1 --max-device-memory 20GiB --derive none --json",
        ),
        lambda: {"plan.json": seeds.plan_of_ranks()},
        quick=6,
    ),
    command(
        "sweep",
        ("rows.csv -o out.sqlite --table out.csv", "grid.yaml -o out.sqlite --shard 1/2 --merge out.sqlite"),
        lambda: {
            "rows.csv": b"model,hardware,batch,seq\nopt-125m,rtx4090-2x,1,32\nspec.json,cpu-laptop,2,\n",
            "grid.yaml": b"model: opt-125m\nhardware: [rtx4090-2x, cpu-laptop]\nbatch: [1, 2]\n",
            "spec.json": seeds.model_spec(),
        },
        stop=_no_workers,
        quick=8,
    ),
    command(
        "slack",
        "--request-ms 5 --step-ms 40 --segments 4 --trace arrivals.csv --json",
        lambda: {"arrivals.csv": b"timestamp,tokens\n0.0,3\n0.5,9\n1.25,2\n2.0,4\n"},
        quick=8,
    ),
    command(
        "slack (plan)",
        "--request-ms 5 --plan plan.json --rate 3 --p99-ms 90 --duration 20",
        lambda: {"plan.json": seeds.plan()},
        quick=6,
    ),
    command("evidence make", "run -o e.json", seeds.run),
    command("evidence check", "evidence.json", lambda: {"evidence.json": seeds.evidence()}, checksummed=True),
    command("predict", "rows.csv -o p.csv", lambda: {"rows.csv": seeds.rows()}, quick=6),
    command(
        "run",
        "--model model --data data.jsonl --steps 2 --batch 2 --out out --no-launch --no-tensorboard",
        lambda: {"data.jsonl": seeds.data()},
        kept=seeds.model,
        stop=_few_steps_of_one_rank,
        quick=10,
    ),
    command(
        "run (low rank)",
        [f"{_RUN} --tune linears {words}" for words in _LOW_RANK],
        dict,
        kept=_model_and_data,
        stop=_few_steps_of_one_rank,
        quick=8,
    ),
    command(
        "run (quantized values)",
        [f"{_RUN} --allow-lossy {words}" for words in _QUANTIZED],
        dict,
        kept=_model_and_data,
        stop=_few_steps_of_one_rank,
        quick=8,
    ),
    _resumed("quantized", seeds.quantized_run),
    _resumed("low rank", seeds.run_of_low_rank),
    _resumed("adapters", seeds.run_of_adapters),
    command(
        "run (plan)",
        "plan.json --model model --data data.jsonl --steps 2 --out out --no-launch --no-tensorboard",
        lambda: {"plan.json": seeds.run()["run/plan.json"]},
        kept=_model_and_data,
        stop=_few_steps_of_one_rank,
        quick=10,
    ),
    command(
        "run (resume)",
        "--resume --out run --steps 5 --no-launch --no-tensorboard",
        _run_files,
        kept=_model_and_data,
        checksummed=True,
        stop=_few_steps_of_one_rank,
        quick=15,
    ),
    command(
        "run (program)",
        "plan.json --program program.json --model model --data data.jsonl --steps 2 --out out --no-launch --no-tensorboard",
        lambda: {name: seeds.run()[f"run/{name}"] for name in ("plan.json", "program.json")},
        kept=_model_and_data,
        stop=_few_steps_of_one_rank,
        quick=8,
    ),
    command(
        "replay", "run --model model -o weights", _run_files, kept=seeds.model, checksummed=True, quick=10
    ),
    command(
        "adapter",
        "run --model model -o adapter --max-rank 4",
        lambda: _reported(seeds.run_of_low_rank()),
        kept=seeds.model,
        checksummed=True,
        quick=8,
    ),
    _replayed("checkpoint", seeds.run_with_checkpoint),
    _replayed("quantized checkpoint", seeds.quantized_run),
    _replayed("checkpoint of low rank", seeds.run_of_low_rank),
    command("demo", "--out demo --steps 4", dict, stop=_no_demo, quick=4),
    command(
        "calibrate",
        "--rows rows.csv -o profile.json",
        lambda: {"rows.csv": seeds.rows()},
        stop=_no_measuring,
        quick=5,
    ),
    command(
        "calibrate (evidence)",
        "--evidence e.json -o p.json",
        lambda: {"e.json": seeds.evidence()},
        checksummed=True,
        stop=_no_measuring,
    ),
    command(
        "probe",
        "--model model --data data.jsonl",
        lambda: {"data.jsonl": seeds.data()},
        kept=seeds.model,
        stop=_few_batches,
    ),
    command("check", "--quick", dict, stop=_no_claims, quick=4),
    command("study list", "--json", dict, quick=2),
    command("study show", "first_steps", dict, quick=4),
    command(
        "study check",
        "memory answers.json solution.py --figure curve.svg",
        seeds.answers_of_a_unit,
        stop=_no_solution,
        quick=8,
    ),
    command("study pack", "memory --for student --student ada", dict, quick=4),
    _validate("kernels", "matmul", "elementwise", "attention", "attention_backward", "draw"),
    _validate("links", "copy", "p2p", "all_reduce"),
    _validate("passes", "forward", "streamed_generation"),
    _validate("steps", "step", "device_memory", "first_order_step"),
    _validate("configuration", "host_memory"),
)


def refuse_missing_commands(targets: Sequence[Target]) -> None:
    """End the process if a command of ``zosim`` is none of the targets."""
    paths = set[str]()
    for name, entry in registry.registered().items():
        built: Any = cli.build(name, registry.load(entry))
        paths |= {f"zosim {name} {below}" for below in getattr(built, "commands", ())} or {f"zosim {name}"}
    if missing := paths - {target.name.partition(" (")[0] for target in targets}:
        sys.exit(f"no target of tests.fuzz.commands breaks what these read: {', '.join(sorted(missing))}")
