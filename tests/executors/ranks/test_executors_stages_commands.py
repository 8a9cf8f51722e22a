"""``zosim run`` on stages, as processes: weights, losses and digests of one device, for every family of models.

Without a codec the device is whole; with one, it encodes and decodes at the same cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from executors.runs.runlog import read_header
from tests.support.command import saved_lines, saved_model
from tests.support.runs import digests_of, numbers_of, train
from zosim.plans import Plan

pytestmark = pytest.mark.dist

UNTIED = {"tie_word_embeddings": False}
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama-tied", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", UNTIED),
}
INSIDE, BETWEEN = "block.1.mlp", "block.0"
THREE = "block.0,block.1.mlp"


@dataclass(frozen=True)
class Asked:
    """A model, its cuts, codecs and what else is asked of a run."""

    model: str
    cuts: str
    codecs: tuple[str, ...] = ()
    more: tuple[object, ...] = ()

    @property
    def num_stages(self) -> int:
        return self.cuts.count(",") + 2

    @property
    def one_device(self):
        if not self.codecs:
            return "--mesh", "data=1"
        return "--mesh", "stage=1", "--cut", self.cuts, *self.codecs, "--allow-lossy"

    @property
    def on_stages(self):
        asked = ("--mesh", f"stage={self.num_stages}", "--cut", self.cuts, *self.codecs)
        return (*asked, "--allow-lossy") if self.codecs else asked


Q4 = ("--codec", "q4", "--residual-codec", "q8:affine:token")
RANDOM = ("--codec", "q2:stochastic", "--residual-codec", "q8:stochastic:entropy")
COUNTER, FORWARD = ("--rng", "counter"), ("--difference", "forward")
QUERIES = ("--queries", 3)
COPIES = ("--weights", "copies", "--draw-ahead")

QUICK = {
    "llama-inside-none": Asked("llama", INSIDE, more=(*COUNTER, *FORWARD, *QUERIES)),
    "gpt2-untied-three-coded": Asked("gpt2-untied", THREE, Q4),
}
SLOW = {
    f"{model}-{cut}-{codec}-{rng}-{difference}": Asked(
        model,
        {"inside": INSIDE, "between": BETWEEN, "three": THREE}[cut],
        {"none": (), "q4": Q4, "random": RANDOM}[codec],
        (*(COUNTER if rng == "counter" else ()), *(FORWARD if difference == "forward" else ()), *more),
    )
    for model, cut, codec, rng, difference, more in [
        ("llama", "three", "random", "mezo", "forward", QUERIES),
        ("llama-tied", "three", "none", "counter", "central", ("--traversal", "sweep")),
        ("qwen3", "between", "none", "counter", "forward", QUERIES),
        ("qwen3-tied", "inside", "random", "counter", "forward", ("--traversal", "sweep", *QUERIES)),
        ("gpt2", "three", "none", "mezo", "central", ("--accumulate", 2)),
        ("gpt2-untied", "three", "none", "counter", "central", ("--residency", "offloaded")),
        ("llama-tied", "three", "q4", "mezo", "central", ("--traversal", "sweep", *COPIES, *QUERIES)),
    ]
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    saved_lines(path)
    return path


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(
    "asked",
    [
        *(pytest.param(asked, id=name) for name, asked in QUICK.items()),
        *(pytest.param(asked, id=name, marks=pytest.mark.slow) for name, asked in SLOW.items()),
    ],
)
def test_stages_as_processes_are_one_device(asked, data, tmp_path):
    name, changed = MODELS[asked.model]
    inputs = saved_model(name, tmp_path, **changed), data
    alone, staged = tmp_path / "alone", tmp_path / "staged"
    assert train(inputs, alone, *asked.more, *asked.one_device, "--no-launch") == 0
    assert train(inputs, staged, *asked.more, *asked.on_stages) == 0
    assert Plan.load(alone / "plan.json").mesh.world_size == 1
    plan = Plan.load(staged / "plan.json")
    assert (plan.mesh.stage, plan.split.cuts) == (asked.num_stages, tuple(asked.cuts.split(",")))
    assert (staged / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    assert (staged / "model.safetensors").read_bytes() != (inputs[0] / "model.safetensors").read_bytes()
    assert numbers_of(staged) == numbers_of(alone)
    assert digests_of(staged) == digests_of(alone)
    if asked.codecs:
        first, second = read_header(alone)["finished"], read_header(staged)["finished"]
        assert first["messages"] == second["messages"]
