"""Placements of quantized weights: a format, perturbations, and where blocks are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

_Fields = Mapping[str, Mapping[str, Any]]

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

PERTURBATIONS: Mapping[str, _Fields] = {
    "8 bits": {"perturbations": {"rng": "counter"}},
    "walked": {"perturbations": {"rng": "mezo"}},
    "signs": {"perturbations": {"rng": "counter", "distribution": "rademacher"}},
    "4 bits": {"perturbations": {"rng": "counter"}, "low_bits": {"perturbation_bits": 4}},
    "2 bits": {"perturbations": {"rng": "counter"}, "low_bits": {"perturbation_bits": 2}},
    "q-rge2": {"perturbations": {"rng": "counter"}, "low_bits": {"estimator": "q-rge2"}},
    "95 % zeros": {"perturbations": {"rng": "counter"}, "low_bits": {"sparsity": 0.95}},
    "signs, 99 % zeros": {
        "perturbations": {"rng": "counter", "distribution": "rademacher"},
        "low_bits": {"sparsity": 0.99},
    },
    "80 % zeros, kept": {"perturbations": {"rng": "counter", "kept": True}, "low_bits": {"sparsity": 0.8}},
}
"""Perturbations, by what is said of them behind the format."""

PLACES: Mapping[str, _Fields] = {
    "delayed": {"schedule": {"update": "delayed"}},
    "immediate": {"schedule": {"update": "immediate"}},
    "offloaded": {"schedule": {"update": "delayed"}, "residency": {"blocks": "offloaded"}},
}
"""Where blocks are, and when they are updated."""


def quantized_axes(placement: str) -> dict[str, dict[str, Any]]:
    """Return the axes of a placement, whose name says format, perturbations and place with semicolons between.

    Examples
    --------
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
