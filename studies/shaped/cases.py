"""What is predicted and measured over slow links: two small models with random weights, shared out in several ways.

The list was written down before any of it had been run; rows were added since, and those taken out that zosim no longer
runs. What the model says of a case comes from the machine's calibration and from the figures of the link
(:mod:`studies.shaped.links`), never from a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

from costmodel.formats import DType
from studies.prediction.cases import Shape

RATES = ("1gbit", "100mbit")
_RESIDENT: Mapping[str, Any] = MappingProxyType({"schedule": {"update": "immediate"}})
_OFFLOADED: Mapping[str, Any] = MappingProxyType(
    {"schedule": {"update": "delayed"}, "residency": {"blocks": "offloaded"}}
)


@dataclass(frozen=True)
class HostLayout:
    """Hosts, and ranks on each; and whether ranks are stages."""

    num_hosts: int
    ranks_per_host: int = 1
    are_stages: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.ranks_per_host

    @property
    def name(self) -> str:
        """Such as ``2x1``: hosts times ranks of each; ``2x1s`` of stages."""
        return f"{self.num_hosts}x{self.ranks_per_host}{'s' if self.are_stages else ''}"


TWO, FOUR, PAIRS = HostLayout(2), HostLayout(4), HostLayout(2, 2)
LAYOUTS = (TWO, FOUR, PAIRS)
STAGED = HostLayout(2, are_stages=True)
"""Measured and reported apart: its cases take as long as all others of two hosts."""

NETWORKS = (*LAYOUTS, STAGED)


_INSIDE_AT_4_BITS = MappingProxyType({"opt-128x4-v512": 0.375, "llama-192x6-v2000-untied": 0.13})
"""Kept of what leaves the MLP's activation in block 1, by model, as ``zosim probe`` finds it for weights and batch of a case."""


def _stages(
    traversal: str,
    *,
    inside: bool = False,
    codec: str = "none",
    perturbations: int = 1,
    difference: str = "central",
    densities: Mapping[str, float] = MappingProxyType({}),
) -> tuple[HostLayout, Mapping[str, int], Mapping[str, Any]]:
    """Return a strategy of two stages, split behind the second block or inside it."""
    split_point = "block.1.mlp" if inside else "block.1"
    split = {"split_points": [split_point], "residual_codec": codec, "codec": codec if inside else "none"}
    axes = {
        "schedule": {"traversal": traversal},
        "split": split,
        "estimator": {"num_perturbations": perturbations, "difference": difference},
        "densities": densities,
    }
    return STAGED, {"stage": 2}, MappingProxyType(axes)


STRATEGIES: Mapping[str, tuple[HostLayout, Mapping[str, int], Mapping[str, Any]]] = MappingProxyType(
    {
        "ddp": (TWO, {"data": 2}, _RESIDENT),
        "ddp, offloaded": (TWO, {"data": 2}, _OFFLOADED),
        "pertp": (TWO, {"perturb": 2}, _RESIDENT),
        "2d": (FOUR, {"data": 2, "perturb": 2}, _RESIDENT),
        "2d, two ranks a host": (PAIRS, {"data": 2, "perturb": 2}, _RESIDENT),
        "ddp, four hosts": (FOUR, {"data": 4}, _RESIDENT),
        "stages, blockwise": _stages("blockwise"),
        "stages, sweep": _stages("full"),
        "stages, sweep, inside": _stages("full", inside=True),
        "stages, sweep, q8:dense": _stages("full", codec="q8:dense"),
        "stages, sweep, inside, q4:dense": _stages("full", inside=True, codec="q4:dense"),
        "stages, sweep, inside, q4:entropy": _stages(
            "full", inside=True, codec="q4:entropy", densities=_INSIDE_AT_4_BITS
        ),
        "stages, 4 perturbations, sweep, forward, q4:dense": _stages(
            "full", codec="q4:dense", perturbations=4, difference="forward"
        ),
    }
)
"""Layout, mesh, and the axes of the plan that are set: of stages, ``split`` has the codecs, and split points if not even ones."""


@dataclass(frozen=True)
class NetworkSetting:
    """A model and a batch."""

    shape: Shape
    batch: int
    seq: int
    dtype: DType


SETTINGS = (
    NetworkSetting(Shape("opt", 128, 4, 512), 16, 128, "float32"),
    NetworkSetting(Shape("llama", 192, 6, 2000, tied=False), 16, 128, "bfloat16"),
)
"""Blocks of about 0.8 MB in their formats."""


@dataclass(frozen=True)
class ShapedCase:
    """One configuration on one network."""

    rate: str
    strategy: str
    setting: NetworkSetting

    @property
    def layout(self) -> HostLayout:
        """Its hosts and ranks."""
        return STRATEGIES[self.strategy][0]

    @property
    def mesh(self) -> Mapping[str, int]:
        """Sizes of the axes of more than one rank."""
        return STRATEGIES[self.strategy][1]

    @property
    def axes(self) -> Mapping[str, Any]:
        """Other axes of the plan."""
        return STRATEGIES[self.strategy][2]

    @property
    def name(self) -> str:
        """What tells it from others on the same network."""
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[self.setting.dtype]
        return f"{self.strategy}, {self.setting.shape.name} {self.setting.batch}x{self.setting.seq} {dtype}"


def all_cases() -> list[ShapedCase]:
    """Return the list."""
    return [ShapedCase(*row) for row in product(RATES, STRATEGIES, SETTINGS)]


def cases_of(rate: str, layout: HostLayout, words: str = "") -> list[ShapedCase]:
    """Return the cases of one network, of any rate, whose names have all of some words."""
    cases = [ShapedCase(rate, *row) for row in product(STRATEGIES, SETTINGS)]
    return [
        case for case in cases if case.layout == layout and all(word in case.name for word in words.split())
    ]
