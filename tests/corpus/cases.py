"""The cases of the corpus: functions of nothing but the declared settings and a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from executors.runs.settings import RunConfig
from zosim.options import options_of

EXAMPLES: dict[str, tuple[str, ...]] = {
    "--batch": ("2", "4"),
    "--mesh": ("data=2", "perturb=2", "data=2,perturb=2", "stage=2", "perturb=2,stage=2"),
    "--split-points": ("block.0", "block.1.mlp"),
    "--codec": ("q4", "q8"),
    "--residual-codec": ("q8",),
    "--num-perturbations": ("2", "3"),
    "--eps": ("1e-2",),
    "--staging-buffers": ("1", "2"),
    "--weight-group": ("16",),
    "--perturbation-bits": ("4",),
    "--sparsity": ("0.5",),
    "--perturbation-rank": ("1", "2"),
    "--lazy-steps": ("2",),
    "--loss-chunk-tokens": ("4",),
    "--seed": ("5",),
    "--weight-decay": ("0.1",),
    "--accumulate": ("2",),
    "--digest-every": ("1",),
    "--checkpoint-every": ("1", "2"),
    "--lr": ("1e-3",),
    "--warmup": ("2",),
    "--lora-rank": ("2",),
    "--lora-targets": ("q_proj,v_proj",),
    "--lora-alpha": ("3.0",),
    "--lora-lazy-steps": ("2",),
    "--lora-max-rank": ("8",),
    "--prefix": ("3",),
}
"""Values of options whose type does not list them. What is in neither place (paths, addresses, limits in time) is not varied."""

LEFT_OUT = {
    "--resume",
    "--random-weights",
    "--allow-download",
    "--tensorboard",
    "--early-stop",
    "--keep-best",
    "--truncate",
}
"""Switches that are about where files come from and go to."""

TOGETHER = {
    "--perturbation-rank": ("--distribution", "lozo"),
    "--lazy-steps": ("--distribution", "lozo"),
    "--lora-targets": ("--lora-rank", "2"),
    "--lora-alpha": ("--lora-rank", "2"),
    "--lora-lazy-steps": ("--lora-rank", "2"),
    "--lora-max-rank": ("--lora-rank", "2", "--lora-lazy-steps", "2"),
    "--codec": ("--mesh", "stage=2", "--allow-lossy"),
    "--residual-codec": ("--mesh", "stage=2", "--codec", "q4", "--allow-lossy"),
    "--split-points": ("--mesh", "stage=2"),
    "--transfers": ("--mesh", "data=2", "--residency", "offloaded"),
    "--transfer-dtype": ("--residency", "offloaded", "--allow-lossy"),
    "--staging-buffers": ("--residency", "offloaded"),
    "--overlap": ("--residency", "offloaded"),
    "--sample-ahead": ("--residency", "offloaded"),
    "--weight-scales": ("--weight-format", "int8"),
    "--weight-group": ("--weight-format", "int8", "--weight-scales", "group"),
    "--weight-fit": ("--weight-format", "int8"),
    "--zero-point": ("--weight-format", "int8"),
    "--perturbation-bits": ("--weight-format", "int8"),
    "--estimator": ("--weight-format", "int8"),
    "--update-rounding": ("--weight-format", "int8", "--num-perturbations", "2"),
    "--activation-format": ("--weight-format", "int8"),
    "--kernel": ("--weight-format", "int8", "--activation-format", "int8-token"),
    "--adapter-format": ("--lora-rank", "2"),
}
"""What an option needs beside it to mean something."""

MODES = ("fresh", "resumed", "replayed")
SHAPES = ("opt", "llama", "gpt2")

PRESETS = ("a100-80gb-milan", "rtx4090-2x", "dgx-1v", "h20-4x-milan", "cpu-laptop", "a100-80gb-3x4")
MODELS = ("opt-1.3b", "opt-13b", "llama-3-8b", "gpt2-xl", "qwen3-0.6b")
METHODS = ("auto", "mezo", "zo2", "pertp", "ddp", "2d", "sparq")
REQUESTED = (
    (),
    ("--dtype", "float32"),
    ("--dtype", "float16", "--max-device-memory", "8GiB"),
    ("--weight-format", "int8", "--allow-lossy"),
    ("--num-perturbations", "2", "--weights", "copies"),
    ("--distribution", "lozo", "--perturbation-rank", "2", "--tune", "linears", "--weights", "adapters"),
)


@dataclass(frozen=True)
class RunCase:
    """A tiny run: the model's shape, how it comes to its end, and its options."""

    shape: str
    mode: str
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called in the corpus."""
        return " ".join((self.shape, self.mode, *self.options))


def run_cases(num_random: int, seed: int) -> Iterator[RunCase]:
    """Yield each value of each setting once, then random combinations of two to four."""
    values = list(setting_values())
    for number, option in enumerate(values):
        yield RunCase(SHAPES[number % len(SHAPES)], MODES[number % len(MODES)], option)
    rng = random.Random(seed)
    for _ in range(num_random):
        chosen = dict(
            itertools.chain.from_iterable(_pairs(option) for option in rng.sample(values, rng.randint(2, 4)))
        )
        words = tuple(word for flag, value in chosen.items() for word in (flag, value) if word)
        yield RunCase(rng.choice(SHAPES), rng.choice(MODES), words)


def setting_values() -> Iterator[tuple[str, ...]]:
    """Yield every value of every setting that is varied, as words of the command line with what it needs beside it."""
    for option in options_of(RunConfig):
        if option.flag in option.setting.aliases or option.flag in LEFT_OUT:
            continue
        typed = option.typed
        beside = TOGETHER.get(option.flag, ())
        if get_origin(typed) is Literal:
            yield from ((*beside, option.flag, value) for value in get_args(typed))
        elif typed is bool:
            yield from ((*beside, flag) for flag in (option.flag, f"--no-{option.flag[2:]}"))
        else:
            yield from ((*beside, option.flag, value) for value in EXAMPLES.get(option.flag, ()))


def _pairs(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield options with their values, "" for a switch."""
    for word, following in itertools.pairwise((*words, "--")):
        if word.startswith("--"):
            yield word, "" if following.startswith("--") else following


def request_cases(num_cases: int, seed: int) -> list[tuple[str, ...]]:
    """Return requests to the planner as words of the command line, drawn without repetition."""
    product = list(itertools.product(PRESETS, MODELS, METHODS, ("1", "4"), REQUESTED))
    return [
        (
            *f"--hardware {preset} --model {model} --method {method} --batch {batch} --seq 256".split(),
            *requested,
        )
        for preset, model, method, batch, requested in random.Random(seed).sample(product, num_cases)
    ]
