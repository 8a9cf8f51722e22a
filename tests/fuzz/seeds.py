"""Valid documents of every kind, made once by the code that writes them."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from importlib import resources
from pathlib import Path

from costmodel.devices.datasheet import datasheet_profile
from costmodel.devices.prices import shipped_prices_text
from costmodel.models.configs import spec_of_config
from studies.published.rows import shipped_rows, write_rows
from topology.documents import dump, load_preset
from zosim.cli import main
from zosim.planning.predict import PlannedRun
from zosim.plans import Plan

TESTS = Path(__file__).parents[1]
FIXTURES = TESTS / "topology" / "fixtures"
PRESET = "rtx4090-2x"

CONFIG = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 256,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 64,
}


def zosim(*argv: object) -> None:
    """Run one command in this process; it must succeed."""
    before = sys.argv
    sys.argv = ["zosim", *map(str, argv)]
    output, code = io.StringIO(), None
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main()
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv = before
    assert not code, (argv, output.getvalue())


@functools.cache
def folder() -> Path:
    """A folder that lasts as long as this process."""
    kept = tempfile.TemporaryDirectory(prefix="zosim-seeds-")
    folder.kept = kept  # type: ignore[attr-defined]
    return Path(kept.name)


def _made(name: str, *argv: object) -> bytes:
    path = folder() / name
    if not path.exists():
        zosim(*argv, "-o", path)
    return path.read_bytes()


@functools.cache
def model_spec() -> bytes:
    """A saved ModelSpec."""
    return spec_of_config(CONFIG, name="tiny").model_dump_json().encode()


def config() -> bytes:
    """A model's configuration."""
    return json.dumps(CONFIG).encode()


@functools.cache
def plan(*options: str, name: str = "plan.json") -> bytes:
    """A plan of a small model on two GPUs."""
    (folder() / "spec.json").write_bytes(model_spec())
    words = f"plan --model {folder()}/spec.json --hardware {PRESET} --batch 2 --seq 32"
    return _made(name, *words.split(), *options)


def plan_of_ranks() -> bytes:
    """A plan of two ranks that slice blocks."""
    return plan("--mesh", "data=2", "--residency", "offloaded", "--transfers", "sliced", name="ranks.json")


def plan_of_stages() -> bytes:
    """A plan of two stages with a codec."""
    return plan("--mesh", "stage=2", "--codec", "q4", "--allow-lossy", name="stages.json")


def quantized_plan() -> bytes:
    """A plan of quantized weights."""
    qvalues = ("--weight-format", "int4", "--weight-scales", "group", "--weight-group", "16", "--allow-lossy")
    return plan(*qvalues, name="quantized.json")


def plan_of_adapters() -> bytes:
    """A plan whose points are adapters beside the linears."""
    (folder() / "config.json").write_bytes(config())
    adapters = ("--weights", "adapters", "--distribution", "lozo", "--tune", "linears", "--mesh", "data=2")
    shape = ("--hardware", PRESET, "--batch", 2, "--seq", 32)
    return _made("adapters.json", "plan", "--model", folder() / "config.json", *shape, *adapters)


def programs(of: bytes = b"", name: str = "program.json") -> bytes:
    """The programs that a plan is lowered to."""
    path = folder() / f"of-{name}"
    path.write_bytes(of or plan())
    return _made(name, "lower", path)


@functools.cache
def planned() -> PlannedRun:
    """A plan on its hardware."""
    plan()
    preset = load_preset(PRESET)
    return PlannedRun(Plan.load(folder() / "plan.json"), preset, datasheet_profile(preset, "gpu0"))


@functools.cache
def timeline() -> bytes:
    """A simulated timeline."""
    return planned().timeline.to_json().encode()


@functools.cache
def profile() -> bytes:
    """A profile of the preset's GPU."""
    path = folder() / "profile.json"
    planned().profile.save(path)
    return path.read_bytes()


def topologies() -> list[bytes]:
    """Presets, and one that defines its own devices."""
    presets = resources.files("topology") / "data" / "presets"
    texts = [
        (presets / f"{name}.yaml").read_bytes()
        for name in ("cpu-laptop", "rtx4090-2x", "dgx-1v", "cpu-cluster-1gbit")
    ]
    return [*texts, dump(load_preset("rtx4090-2x")).encode()]


def prices() -> bytes:
    """The price table that ships."""
    return shipped_prices_text().encode()


@functools.cache
def rows() -> bytes:
    """A few published rows of each table."""
    kept, counted = [], dict[tuple[str, str], int]()
    for row in shipped_rows():
        key = row.where.rpartition(":")[0], row["table"]
        counted[key] = counted.get(key, 0) + 1
        kept += [row] if counted[key] <= 2 else []
    write_rows(folder() / "rows.csv", kept, [{} for _ in kept])
    return (folder() / "rows.csv").read_bytes()


_STEP = {"model": "opt-125m", "batch": "4", "seq": "64", "devices": "1", "method": "zo2", "optimizer": "adam"}
MEASURED = {
    "matmul": {"m": "4096", "n": "8192", "k": "8192"},
    "elementwise": {"bytes": "200000000"},
    "attention": {"batch": "2", "heads": "16", "seq": "2048", "head_dim": "128", "causal": "true"},
    "attention_backward": {"batch": "2", "heads": "16", "seq": "2048", "head_dim": "128"},
    "draw": {"elements": "100000000"},
    "copy": {"direction": "d2h", "bytes": "1000000000"},
    "p2p": {"ranks": "2", "bytes": "1000000"},
    "all_reduce": {"ranks": "2", "bytes": "1000000"},
    "forward": _STEP,
    "streamed_generation": {**_STEP, "generated_tokens": "3"},
    "step": {**_STEP, "code": "published"},
    "device_memory": _STEP,
    "first_order_step": {**_STEP, "data_parallel": "2"},
    "host_memory": {**_STEP, "model": "tiny", "model_config": json.dumps(CONFIG)},
}


def measured_rows(*kinds: str) -> bytes:
    """A measurement of each of these kinds."""
    rows = [
        {"kind": kind, "hardware": PRESET, "dtype": "float16", "measured": "0.01", **MEASURED[kind]}
        for kind in kinds
    ]
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


@functools.cache
def model() -> dict[str, bytes]:
    """The files of a tiny model directory."""
    from tests.support.command import saved_model

    saved = saved_model("opt", folder())
    return {f"model/{path.name}": path.read_bytes() for path in saved.iterdir()}


@functools.cache
def data() -> bytes:
    """Lines of tokens."""
    from tests.support.command import saved_lines

    saved_lines(folder() / "data.jsonl")
    return (folder() / "data.jsonl").read_bytes()


RUN_FILES = (
    "run.json",
    "steps.jsonl",
    "digests.jsonl",
    "metrics.jsonl",
    "plan.json",
    "program.json",
    "timeline.json",
)
CHECKPOINT = "checkpoints/step-00000004.safetensors"
"""Of a run with ``--checkpoint-every 2``, its newest."""


@functools.cache
def run(*options: str) -> dict[str, bytes]:
    """The readable files of a run of four steps, of `model` on `data`, as paths below ``run``."""
    out = folder() / f"run{''.join(options)}"
    model(), data()
    before = Path.cwd()
    os.chdir(folder())  # so that the run names its model and data as cases have them
    try:
        (folder() / "model").exists() or (folder() / "opt").rename(folder() / "model")
        zosim(
            "run", "--model", "model", "--data", "data.jsonl", "--steps", 4, "--batch", 2, "--no-launch", "--no-tensorboard",
            "--digest-every", 2, "--eval-data", "data.jsonl", "--residency", "offloaded", "--out", out, *options,
        )  # fmt: skip
    finally:
        os.chdir(before)
    names = (*RUN_FILES, CHECKPOINT)
    return {f"run/{name}": (out / name).read_bytes() for name in names if (out / name).exists()}


def run_with_checkpoint() -> dict[str, bytes]:
    """The readable files of a run and its newest checkpoint."""
    return run("--checkpoint-every", "2")


def run_of_low_rank() -> dict[str, bytes]:
    """The readable files of a run along perturbations of low rank, and its newest checkpoint."""
    return run("--distribution", "lozo", "--tune", "linears", "--checkpoint-every", "2")


def run_of_adapters() -> dict[str, bytes]:
    """The readable files of a run over adapters beside the linears, and its newest checkpoint."""
    kind = ("--weights", "adapters", "--distribution", "lozo", "--lazy-steps", "3", "--tune", "linears")
    return run(*kind, "--checkpoint-every", "2")


def quantized_run() -> dict[str, bytes]:
    """The readable files of a run whose weights are quantized with zero points, and its newest checkpoint."""
    return run("--weight-format", "int4", "--zero-point", "--allow-lossy", "--checkpoint-every", "2")


@functools.cache
def evidence() -> bytes:
    """A run as evidence."""
    for name, content in run().items():
        path = folder() / "evidence-of" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return _made("evidence.json", "evidence", "make", folder() / "evidence-of" / "run")


def densities() -> bytes:
    """Densities of split points."""
    return json.dumps({"block.0.mlp": 0.1, "block.1.mlp": 0.5, "block.2": 1.0}).encode()


@functools.cache
def answers_of_a_unit() -> dict[str, bytes]:
    """What a student hands in of the unit `memory`, before anything is filled in."""
    from studies.coursework import UNITS
    from studies.coursework.grading import answers_text

    unit = next(each for each in UNITS if each.name == "memory")
    stub = TESTS.parent / "studies" / unit.stub / "stub.py"
    return {"answers.json": answers_text(unit, "ada").encode(), "solution.py": stub.read_bytes()}
