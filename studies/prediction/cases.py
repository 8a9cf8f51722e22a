"""What is predicted and measured: small models with random weights under many placements.

The tuning list may be looked at while the cost model is being improved. The held-out list is drawn at random from
the same ranges by a seed, and is only ever reported.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from costmodel.formats import DType

_Fields = Mapping[str, Mapping[str, Any]]
_Axes = dict[str, dict[str, Any]]


def _offloaded(update: str = "delayed", **residency: Any) -> _Axes:
    return {"schedule": {"update": update}, "residency": {"blocks": "offloaded", **residency}}


_DELAYED: _Axes = {"schedule": {"update": "delayed"}}
_IMMEDIATE: _Axes = {"schedule": {"update": "immediate"}}
_COUNTER: _Axes = {"perturbations": {"rng": "counter"}}
_AHEAD: _Axes = {"perturbations": {"sampled_ahead": True}}

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "W8A8": {"weights": "int8", "activations": "int8-token"},
    "W8A8 by tensor": {"weights": "int8", "scales": "tensor", "activations": "int8-tensor"},
    "int8": {"weights": "int8"},
    "int8, zero points": {"weights": "int8", "zero_point": True},
    "int6": {"weights": "int6"},
    "int4": {"weights": "int4"},
    "int4 by groups": {"weights": "int4", "scales": "group", "group_elements": 32},
    "W4A8": {"weights": "int4", "activations": "int8-token"},
    "int2 by groups": {"weights": "int2", "scales": "group", "group_elements": 32},
    "e4m3": {"weights": "float8_e4m3"},
    "e5m2": {"weights": "float8_e5m2"},
    "e2m1 by groups": {"weights": "float4_e2m1", "scales": "group", "group_elements": 32},
}
"""Formats of weights and of what they are multiplied by."""

_COUNTED_SIGNS: _Axes = {"perturbations": {"rng": "counter", "distribution": "rademacher"}}
PERTURBATIONS: Mapping[str, _Fields] = {
    "8 bits": _COUNTER,
    "walked": {"perturbations": {"rng": "mezo"}},
    "signs": _COUNTED_SIGNS,
    "4 bits": _COUNTER | {"low_bits": {"perturbation_bits": 4}},
    "2 bits": _COUNTER | {"low_bits": {"perturbation_bits": 2}},
    "q-rge2": _COUNTER | {"low_bits": {"estimator": "q-rge2"}},
    "95 % zeros": _COUNTER | {"low_bits": {"sparsity": 0.95}},
    "signs, 99 % zeros": _COUNTED_SIGNS | {"low_bits": {"sparsity": 0.99}},
    "80 % zeros, kept": {"perturbations": {"rng": "counter", "kept": True}, "low_bits": {"sparsity": 0.8}},
}
"""Perturbations, by what is said of them behind the format."""

PLACES: Mapping[str, _Fields] = {"delayed": _DELAYED, "immediate": _IMMEDIATE, "offloaded": _offloaded()}
"""Where blocks are, and when they are updated."""


def quantized_axes(placement: str) -> dict[str, dict[str, Any]]:
    """Return the axes of a placement, whose name says format, perturbations and place with semicolons between.

    >>> quantized_axes("int4; signs; offloaded")["residency"]
    {'blocks': 'offloaded'}
    """
    weights, perturbations, place = placement.split("; ")
    axes: dict[str, dict[str, Any]] = {"low_bits": dict(FORMATS[weights])}
    for fields in (PERTURBATIONS[perturbations], PLACES[place]):
        for axis, values in fields.items():
            axes[axis] = axes.get(axis, {}) | dict(values)
    return axes


def quantized_placements(generator: random.Random) -> Iterator[str]:
    """Yield random placements without end: each format, each kind of perturbations and each place equally often."""
    shuffled = (_shuffled(generator, list(names)) for names in (FORMATS, PERTURBATIONS, PLACES))
    return map("; ".join, zip(*shuffled, strict=True))


def _shuffled(generator: random.Random, names: list[str]) -> Iterator[str]:
    while True:
        generator.shuffle(names)
        yield from names


PLACEMENTS: Mapping[str, _Fields] = {
    "sweep": {"schedule": {"traversal": "full"}},
    "blockwise": _IMMEDIATE,
    "delayed": _DELAYED,
    "delayed, counter": _DELAYED | _COUNTER,
    "delayed, rademacher": _DELAYED | {"perturbations": {"distribution": "rademacher"}},
    "delayed, draw ahead": _DELAYED | _AHEAD,
    "delayed, forward difference": _DELAYED | {"estimator": {"difference": "forward"}},
    "offloaded, 1 staging buffer": _offloaded(num_staging_buffers=1),
    "offloaded, 2 staging buffers": _offloaded(num_staging_buffers=2),
    "offloaded, 3 staging buffers": _offloaded(num_staging_buffers=3),
    "offloaded, no overlap": _offloaded(overlap=False),
    "offloaded, no reuse": _offloaded(reuse_staging_buffers=False),
    "offloaded, immediate": _offloaded("immediate"),
    "offloaded, lossy": _offloaded(transfer_dtype="narrower"),
    "offloaded, draw ahead": _offloaded() | _AHEAD,
    "offloaded, counter": _offloaded() | _COUNTER,
}
"""Axes of the plan that each placement sets; the others keep their defaults."""

RANK_PLACEMENTS: Mapping[str, _Fields] = {
    "pertp": _IMMEDIATE | {"mesh": {"perturb": 2}},
    "ddp": _IMMEDIATE | {"mesh": {"data": 2}},
    "pertp, delayed": _DELAYED | {"mesh": {"perturb": 2}},
    "ddp, offloaded": _offloaded() | {"mesh": {"data": 2}},
    "pertp, shared": _offloaded(transfers="shared") | {"mesh": {"perturb": 2}},
    "pertp, sliced": _offloaded(transfers="sliced") | {"mesh": {"perturb": 2}},
    "ddp, sliced": _offloaded(transfers="sliced") | {"mesh": {"data": 2}},
    "2d": _IMMEDIATE | {"mesh": {"data": 2, "perturb": 2}},
}
"""The same for placements of several ranks, of one thread each."""

CHOICES: Mapping[str, int] = {
    "sweep": 2,
    "blockwise": 2,
    "delayed": 2,
    "offloaded, immediate": 2,
    "offloaded, 1 staging buffer": 2,
    "offloaded, 2 staging buffers": 2,
    "offloaded, 3 staging buffers": 2,
    "pertp": 1,
    "pertp, delayed": 1,
    "pertp, sliced": 1,
    "ddp": 1,
    "ddp, offloaded": 1,
}
"""Placements to choose from, with their threads per rank: all take two cores, and compute the same."""

REPEATED = "delayed"
"""The one of them that is measured twice, in sessions of its own: how far apart are two measurements of one plan?"""

DEVELOPMENT_WIDTHS, DEVELOPMENT_VOCABULARIES = (
    (64, 128, 256, 320, 448, 576, 704),
    (500, 2000, 8000, 20000, 40000),
)


@dataclass(frozen=True)
class Shape:
    """A model with random weights."""

    family: str
    hidden: int
    num_blocks: int
    vocab: int
    tied: bool = True

    @property
    def num_heads(self) -> int:
        """Attention heads, 64 wide where the hidden state is wide enough."""
        return max(2, self.hidden // 64)

    @property
    def name(self) -> str:
        """Family and sizes."""
        tied = "" if self.tied else "-untied"
        return f"{self.family}-{self.hidden}x{self.num_blocks}-v{self.vocab}{tied}"

    @property
    def num_block_parameters(self) -> int:
        """Parameters of the blocks, up to norms and biases."""
        return 12 * self.hidden**2 * self.num_blocks

    @property
    def num_parameters(self) -> int:
        """Parameters, up to norms, biases and positions."""
        return self.num_block_parameters + self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Case:
    """One configuration."""

    shape: Shape
    batch: int
    seq: int
    dtype: DType
    num_threads: int
    placement: str

    @property
    def axes(self) -> Mapping[str, Mapping[str, Any]]:
        """What its placement sets."""
        return (
            PLACEMENTS.get(self.placement)
            or RANK_PLACEMENTS.get(self.placement)
            or quantized_axes(self.placement)
        )

    @property
    def num_ranks(self) -> int:
        """Ranks that share a step out."""
        mesh = self.axes.get("mesh", {})
        return int(mesh.get("data", 1) * mesh.get("perturb", 1))

    @property
    def name(self) -> str:
        """Everything that tells it from others."""
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]
        return (
            f"{self.shape.name} {self.batch}x{self.seq} {dtype} "
            f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}, {self.placement}"
        )

    @property
    def rough_step_s(self) -> float:
        """Order of magnitude of a step on a small machine, to keep lists short: draws and products alone."""
        tokens = self.batch * self.seq
        products = 4 * tokens * (self.shape.num_block_parameters + self.shape.vocab * self.shape.hidden)
        num_passes = 4 if self.placement == "sweep" else 2
        return products / 60e9 + num_passes * self.shape.num_parameters / 0.35e9


def tuning_cases() -> list[Case]:
    """Return the list that the cost model may be improved on."""
    small, medium = Shape("opt", 128, 4, 512), Shape("opt", 256, 4, 8000)
    wide = Shape("gpt2", 512, 3, 10000)
    llama = Shape("llama", 256, 4, 4000, tied=False)
    large = Shape("opt", 768, 3, 16000)
    rows = [
        (small, 4, 64, "float32", 2, "delayed"),
        (small, 4, 64, "bfloat16", 1, "offloaded, 3 staging buffers"),
        (small, 8, 128, "float32", 1, "sweep"),
        (small, 2, 32, "float32", 2, "offloaded, no overlap"),
        (medium, 2, 96, "float32", 2, "sweep"),
        (medium, 2, 96, "float32", 2, "offloaded, 3 staging buffers"),
        (medium, 2, 96, "float32", 1, "offloaded, 1 staging buffer"),
        (medium, 4, 128, "bfloat16", 2, "delayed"),
        (medium, 1, 64, "float32", 1, "delayed, draw ahead"),
        (medium, 4, 48, "float32", 2, "offloaded, lossy"),
        (llama, 2, 128, "float32", 2, "blockwise"),
        (llama, 4, 64, "bfloat16", 2, "offloaded, 2 staging buffers"),
        (llama, 1, 200, "float32", 1, "delayed, counter"),
        (llama, 3, 80, "float32", 2, "offloaded, draw ahead"),
        (wide, 2, 64, "float32", 2, "delayed"),
        (wide, 2, 64, "float32", 2, "offloaded, 2 staging buffers"),
        (wide, 1, 160, "bfloat16", 1, "sweep"),
        (wide, 4, 96, "float32", 1, "offloaded, no reuse"),
        (wide, 2, 64, "float32", 2, "delayed, rademacher"),
        (large, 1, 96, "float32", 2, "offloaded, 3 staging buffers"),
        (large, 2, 64, "float32", 1, "blockwise"),
        (large, 2, 64, "bfloat16", 2, "offloaded, immediate"),
        (large, 1, 64, "float32", 2, "delayed, forward difference"),
        (large, 2, 32, "float32", 2, "offloaded, counter"),
    ]
    return [Case(*row) for row in rows]  # type: ignore[arg-type]


def held_out_cases(num_cases: int = 24, *, seed: int = 20261121, longest_step_s: float = 0.8) -> list[Case]:
    """Return random cases, each placement equally often, none of them on the tuning list."""
    generator = random.Random(seed)
    seen = set(tuning_cases())
    names = list(PLACEMENTS)
    cases: list[Case] = []
    for case in _random_cases(generator, names):
        if case not in seen and case.rough_step_s <= longest_step_s:
            seen.add(case)
            cases.append(case)
            names.remove(case.placement)
            names.extend(PLACEMENTS if not names else ())
        if len(cases) == num_cases:
            return cases
    raise AssertionError


def rank_cases(num_cases: int = 10, *, seed: int = 20261121, longest_step_s: float = 0.5) -> list[Case]:
    """Return random cases of several ranks of a thread each, the placements in turn."""
    fitting = (case for case in fitting_cases(random.Random(seed), longest_step_s) if case.batch % 2 == 0)
    names = list(RANK_PLACEMENTS)
    return [
        replace(next(fitting), placement=names[number % len(names)], num_threads=1)
        for number in range(num_cases)
    ]


def development_cases(
    num_cases: int, num_threads: int, *, seed: int = 7001, longest_step_s: float = 0.22
) -> list[Case]:
    """Return random cases that the cost model is improved on, of other widths, vocabularies and seeds than the held-out list.

    Whatever is looked at while constants or formulas change comes from here or from :func:`tuning_cases`.
    """
    generator = random.Random(seed)
    names = list(PLACEMENTS)
    cases: list[Case] = []
    while len(cases) < num_cases:
        shape = Shape(
            generator.choice(["opt", "gpt2", "llama"]),
            generator.choice(DEVELOPMENT_WIDTHS),
            generator.randint(2, 10),
            generator.choice(DEVELOPMENT_VOCABULARIES),
            generator.random() < 0.6,
        )
        batch, seq = generator.randint(1, 8), generator.randrange(32, 249, 8)
        dtype: DType = generator.choice(["float32", "bfloat16"])
        case = Case(shape, batch, seq, dtype, num_threads, generator.choice(names))
        if case.rough_step_s <= longest_step_s:
            names.remove(case.placement)
            names.extend(PLACEMENTS if not names else ())
            cases.append(case)
    return cases


def quantized_cases(num_cases: int = 24, *, seed: int = 20261124, longest_step_s: float = 0.5) -> list[Case]:
    """Return random cases whose weights are quantized, each format and each kind of perturbations equally often."""
    generator = random.Random(seed)
    names = quantized_placements(generator)
    return [
        replace(next(fitting_cases(generator, longest_step_s)), placement=next(names))
        for _ in range(num_cases)
    ]


def quantized_tuning_cases() -> list[Case]:
    """Return the list that predictions of steps with quantized weights may be improved on, of other widths and vocabularies."""
    generator = random.Random(7101)
    names = quantized_placements(generator)
    cases = development_cases(12, 1, seed=7102) + development_cases(12, 2, seed=7103)
    return [replace(case, placement=next(names)) for case in cases]


def choice_cases(num: int = 4, *, seed: int = 20261122, longest_step_s: float = 0.15) -> list[list[Case]]:
    """Return random configurations, each under all placements that there are to choose from."""
    fitting = (case for case in fitting_cases(random.Random(seed), longest_step_s) if case.batch % 2 == 0)
    return [
        [replace(case, placement=placement, num_threads=threads) for placement, threads in CHOICES.items()]
        for case in (next(fitting) for _ in range(num))
    ]


def fitting_cases(generator: random.Random, longest_step_s: float) -> Iterator[Case]:
    """Yield random cases whose step takes at most about so long."""
    return (case for case in _random_cases(generator, [*PLACEMENTS]) if case.rough_step_s <= longest_step_s)


def _random_cases(generator: random.Random, names: list[str]) -> Iterator[Case]:
    while True:
        shape = Shape(
            generator.choice(["opt", "gpt2", "llama"]),
            generator.choice([64, 128, 192, 256, 384, 512, 640, 768]),
            generator.randint(2, 12),
            generator.choice([300, 1000, 5000, 12000, 32000, 50257]),
            generator.random() < 0.6,
        )
        batch, seq = generator.randint(1, 8), generator.randrange(32, 257, 8)
        dtype: DType = generator.choice(["float32", "float32", "bfloat16"])
        yield Case(shape, batch, seq, dtype, generator.choice([1, 2]), generator.choice(names))
