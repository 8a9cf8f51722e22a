"""Every reader, as a target. To add one, write a :class:`Target` and list it in ``READERS``.

Commands are in :mod:`tests.fuzz.commands`; readers of model directories, tokenizers and data in
:mod:`tests.fuzz.model_targets`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from costmodel.devices.prices import load_prices
from costmodel.models.configs import read_model_spec
from costmodel.rates.profile import load_profile
from executors.runs.history import read_history
from executors.runs.jsonlines import read_lines
from executors.runs.programs import recorded_programs
from executors.runs.runlog import read_header
from proofs_checks.oracles import evaluate, oracles
from studies.published.fitted_profile import load_published_profile
from studies.published.rows import read_rows
from tests.fuzz import seeds
from tests.fuzz.cases import Case, Target
from tests.fuzz.commands import COMMANDS
from tests.fuzz.model_targets import MODEL_READERS
from tests.fuzz.mutations import mutated, with_new_digest
from tests.fuzz.serving import SERVING
from topology import from_hwloc_xml, from_nccl_xml, from_nvidia_smi_topo, from_rocm_smi_topo
from topology.documents import dump, load
from topology.errors import ZosimError
from topology.lint import lint
from topology.reading import parse_json
from zosim.applications.evidence.file import Evidence
from zosim.planning.split_options import read_densities
from zosim.plans import Plan
from zosim.program.program_set import ProgramSet
from zosim.program.validate_set import validate_set
from zosim.timeline import Timeline


def reader(
    name: str,
    file: str,
    documents: Callable[[], list[bytes]],
    read: Callable[[Path], Any],
    mutate: Callable[[Random, Case], Case] = mutated,
    quick: int = 12,
) -> Target:
    """Return the target of a reader of one file."""

    def call(_case: Case, folder: Path) -> None:
        read(folder / file)

    return Target(name, lambda: [Case({file: content}) for content in documents()], call, mutate, quick)


def run_reader(name: str, read: Callable[[Path], Any], changed: tuple[str, ...], quick: int = 15) -> Target:
    """Return the target of what reads some of the files of a run's directory, stated digests made to fit."""

    def call(_case: Case, folder: Path) -> None:
        read(folder / "run")

    def of_run(files: Mapping[str, bytes]) -> Case:
        return Case({path: files[path] for path in changed}, kept=files)

    adapters = ("--lora-rank", "2", "--lora-targets", "q_proj")
    runs = (
        seeds.run,
        lambda: seeds.run(*adapters),
        seeds.quantized_run,
        seeds.run_of_low_rank,
        seeds.run_of_adapters,
    )
    return Target(name, lambda: [of_run(make()) for make in runs], call, with_new_digest, quick)


def _topology(path: Path) -> None:
    topology = load(path)
    lint(topology)
    load_again = path.with_name("again.yaml")
    load_again.write_text(dump(topology), encoding="utf-8")
    load(load_again)


def _programs(path: Path) -> None:
    programs = ProgramSet.load(path)
    validate_set(programs)
    programs.to_json()


def _plan(path: Path) -> None:
    plan = Plan.load(path)
    plan.model_dump_json()
    Plan.model_validate(plan.model_dump(mode="json"))


def _timeline(path: Path) -> None:
    timeline = Timeline.load(path)
    timeline.to_json()


def _recorded(run: Path) -> None:
    recorded_programs(run, read_header(run))


def _history(run: Path) -> None:
    history = read_history(run)
    history.plan  # noqa: B018
    history.digest(history.num_steps)


def _fixtures(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [(seeds.FIXTURES / name).read_bytes() for name in names]


def _published_profile() -> list[bytes]:
    folder = Path(__file__).parents[2] / "studies" / "published" / "data"
    return [(folder / "default_profile.json").read_bytes()]


def _smi(path: Path) -> None:
    from_nvidia_smi_topo(path.read_text("utf-8", "replace"), gpu="a100-sxm4-80gb", memory="512 GiB")


def _rocm(path: Path) -> None:
    from_rocm_smi_topo(path.read_text("utf-8", "replace"))


def _cloud(path: Path) -> None:
    from_nccl_xml(path, gpu="a100-80gb-sxm")


def _oracles() -> list[Case]:
    """Every closed form, with a value of each of its parameters' types."""
    values = {"int": 3, "float": 0.5, "list[float]": [0.5, -0.25], "bool": True}
    cases = []
    for item in oracles().values():
        kinds = {name: kind.partition(" = ")[0] for name, kind in item.parameters.items()}
        parameters = {
            name: values.get(kind, kind.split(" | ", maxsplit=1)[0]) for name, kind in kinds.items()
        }
        cases.append(Case({"params.json": json.dumps(parameters).encode()}, (item.name,)))
    return cases


def _evaluated(case: Case, folder: Path) -> None:
    text = (folder / "params.json").read_text("utf-8", "replace")
    json.dumps(evaluate(case.argv[0], parse_json(text, "--params is no JSON", ZosimError)), allow_nan=False)


READERS: tuple[Target, ...] = (
    Target("oracle", _oracles, _evaluated, mutated, 20),
    reader("topology", "machine.yaml", seeds.topologies, _topology, quick=15),
    reader("hwloc", "machine.xml", _fixtures("hwloc_workstation.xml", "hwloc_nvswitch.xml"), from_hwloc_xml),
    reader(
        "nccl",
        "machine.xml",
        _fixtures("nccl_a100x4.xml", "nccl_vm_h100x2.xml", "nccl_gb200x4.xml"),
        from_nccl_xml,
    ),
    reader("nccl of a cloud", "machine.xml", _fixtures("nccl_cloud_a100x8.xml"), _cloud),
    reader(
        "smi",
        "matrix.txt",
        _fixtures("dgx1v_topo.txt", "pcie_tree_topo.txt", "vm_topo.txt", "gb200_topo.txt"),
        _smi,
    ),
    reader("rocm", "matrix.txt", _fixtures("rocm_mi300x8_topo.txt"), _rocm),
    reader("prices", "prices.yaml", lambda: [seeds.prices()], load_prices, quick=15),
    reader("model spec", "spec.json", lambda: [seeds.model_spec()], lambda path: read_model_spec(str(path))),
    reader("profile", "profile.json", lambda: [seeds.profile()], load_profile, with_new_digest, quick=15),
    reader("published profile", "profile.json", _published_profile, load_published_profile, with_new_digest),
    reader("rows", "rows.csv", lambda: [seeds.rows()], read_rows),
    reader(
        "plan",
        "plan.json",
        lambda: [
            seeds.plan(),
            seeds.plan_of_ranks(),
            seeds.plan_of_stages(),
            seeds.quantized_plan(),
            seeds.plan_of_adapters(),
        ],
        _plan,
        quick=15,
    ),
    reader(
        "programs",
        "program.json",
        lambda: [
            seeds.programs(),
            seeds.programs(seeds.plan_of_ranks(), "sliced.json"),
            seeds.programs(seeds.quantized_plan(), "of-quantized.json"),
            seeds.programs(seeds.plan_of_adapters(), "of-adapters.json"),
        ],
        _programs,
        quick=20,
    ),
    reader("timeline", "timeline.json", lambda: [seeds.timeline()], _timeline, quick=15),
    reader("densities", "densities.json", lambda: [seeds.densities()], read_densities),
    reader("evidence", "evidence.json", lambda: [seeds.evidence()], Evidence.load, with_new_digest, quick=15),
    reader("json lines", "log.jsonl", lambda: [seeds.run()["run/steps.jsonl"]], read_lines),
    run_reader("run header", read_header, ("run/run.json",)),
    run_reader("run history", _history, ("run/run.json", "run/steps.jsonl", "run/digests.jsonl"), quick=20),
    run_reader("run programs", _recorded, ("run/run.json", "run/program.json")),
)


def all_targets() -> tuple[Target, ...]:
    """Return every target, those of model directories and of serving included."""
    return (*READERS, *MODEL_READERS, *SERVING, *COMMANDS)
