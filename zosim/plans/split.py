"""Where the model is split, and how what crosses is encoded.

Behind a block the hidden state crosses; inside one the residual stream and an activation do, each with a codec of its own:

>>> Split(split_points=("block.1",), codec="q4", residual_codec="q8").codecs_in_use
{'residual stream': 'q8'}
>>> Split(split_points=("block.1.mlp",), codec="q4", residual_codec="q8").codecs_in_use
{'activation': 'q4', 'residual stream': 'q8'}
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import model_validator

from costmodel.formats.codecs import codec_spec
from costmodel.formats.symbols import BoundarySymbols, TensorSymbols
from costmodel.models.model_spec import BACK, FRONT, block_index
from topology.errors import PlanError
from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan

INSIDE = ".mlp"
"""Ends the name of a split point inside a block."""


def _listed(typed: Iterable[str]) -> tuple[str, ...]:
    """Return the names in texts that list them with commas."""
    return tuple(name for text in typed for part in text.split(",") if (name := part.strip()))


class Split(Axis):
    """Where the model is split into stages, and how what crosses is encoded.

    With one stage, what crosses a boundary is encoded and decoded where it is: the same numbers as with stages, from
    one process.

    Attributes
    ----------
    split_points : tuple of str
        One between neighbouring stages, in the model's order; any number of them with one stage. ``"block.5"`` is
        behind block 5: the hidden state crosses. ``"block.5.mlp"`` is inside it, at the input of the MLP's second
        linear: the activation and the residual stream cross. Such a block is two segments of the plan's model.
    codec : str
        Of MLP activations, as :func:`costmodel.formats.codecs.codec_spec` reads it.
    residual_codec : str
        Of the residual stream, which is what crosses behind a block.
    densities : tuple of float or BoundarySymbols
        For each split point, what is known of the symbols that cross, on which sizes and times of sparse encodings depend: a
        number is the part of the activation's (behind a block, of the hidden state's) that is not the most frequent
        one. Empty takes all symbols to be equally frequent.
    """

    heading = "Placement"

    split_points: Annotated[
        tuple[str, ...],
        Setting(
            "--split-points",
            "Split points between stages, in order, such as block.5 (after block 5) or block.5.mlp "
            "(inside it); repeat the option or separate with commas.",
            "numbers where codecs round",
            planned=True,
            typed=list[str],
            parse=_listed,
            expert=True,
        ),
    ] = ()
    codec: Annotated[
        str,
        Setting(
            "--codec",
            "Codec for MLP activations sent between stages, such as q4 or q4:affine-zero:token (lossy).",
            "numbers where codecs round",
            heading="Precision",
            expert=True,
        ),
    ] = "none"
    residual_codec: Annotated[
        str,
        Setting(
            "--residual-codec",
            "Codec for the residual stream sent between stages, such as q8 (lossy).",
            "numbers where codecs round",
            expert=True,
            heading="Precision",
        ),
    ] = "none"
    densities: Annotated[
        tuple[float | BoundarySymbols, ...],
        Setting(help="Densities measured by `zosim probe` and read by `zosim plan`."),
    ] = ()

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield the split points of `plan`, and their codecs."""
        del plan
        if self.split_points:
            yield f"split at {' and '.join(self.split_points)}"
            codecs = [name for name in map(_short, self.codecs_in_use.values()) if name != "none"]
            if codecs:
                yield f"{' and '.join(codecs)} (lossy)"

    @model_validator(mode="after")
    def _split_points_have_names(self) -> Split:
        check_split_points(self.split_points)
        return self

    @property
    def codecs_in_use(self) -> dict[str, str]:
        """Codec by what goes through it: the residual stream at every split point, an MLP's activation at those inside blocks."""
        used = {"activation": self.codec} if self.split_blocks else {}
        return used | {"residual stream": self.residual_codec} if self.split_points else {}

    @property
    def is_lossy(self) -> bool:
        """Whether what arrives is another number than what was sent."""
        return not (codec_spec(self.codec).is_lossless and codec_spec(self.residual_codec).is_lossless)

    def symbols(self, boundary: int) -> BoundarySymbols | None:
        """Return what is known of the symbols that cross boundary number `boundary`."""
        if not self.densities:
            return None
        known = self.densities[boundary]
        return BoundarySymbols(first=TensorSymbols(density=known)) if isinstance(known, float) else known

    @property
    def split_blocks(self) -> tuple[int, ...]:
        """Blocks that are split inside."""
        return tuple(
            block_index(split_point) for split_point in self.split_points if split_point.endswith(INSIDE)
        )

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield the split points that the model of `plan` does not have, and densities that are missing."""
        segments = plan.model.segments
        unknown = [
            split_point
            for split_point in self.split_points
            if last_before(split_point, segments) not in segments[1:-1]
        ]
        if unknown:
            inside = unknown[0].endswith(INSIDE)
            yield (
                f"{plan.model.name} has no split point {unknown[0]!r}",
                "read the model with a split point inside that block"
                if inside
                else f"split points: block.0.mlp to block.{plan.model.num_blocks - 1}",
            )
        elif list(self.split_points) != sorted(
            set(self.split_points), key=lambda split_point: segments.index(last_before(split_point, segments))
        ):
            yield (
                f"split points {', '.join(self.split_points)} must be in the model's order, each once",
                "sort them, and remove duplicates",
            )
        if self.densities and len(self.densities) != len(self.split_points):
            yield (
                f"{len(self.densities)} densities are given for {len(self.split_points)} split points",
                "give one density per split point",
            )
        if any(isinstance(density, float) and not 0 <= density <= 1 for density in self.densities):
            yield (
                f"split.densities={self.densities} must be from 0 to 1",
                "a density is the fraction of values that are not zero",
            )
        for name in (self.codec, self.residual_codec):
            codec_spec(name)


_SPLIT_POINT_NAME = re.compile(r"block\.\d+(\.mlp)?", re.ASCII)


def check_split_points(names: Iterable[str]) -> None:
    """Raise unless all are names of split points, of whatever model.

    Raises
    ------
    PlanError
    """
    for name in names:
        if not _SPLIT_POINT_NAME.fullmatch(name):
            raise PlanError(
                f"{name!r} is not the name of a split point",
                hint="block.5 is the split point after block 5, block.5.mlp the one inside it",
            )


def split_point_behind(segment: str) -> str:
    """Return the name of the split point that `segment` ends at."""
    if segment.endswith(FRONT):
        return segment.removesuffix(FRONT) + INSIDE
    return segment.removesuffix(BACK)


def last_before(split_point: str, segments: Container[str]) -> str:
    """Return the segment that a split point is behind; where a block is two segments, its end is that of the second."""
    if split_point.endswith(INSIDE):
        return split_point.removesuffix(INSIDE) + FRONT
    return split_point + BACK if split_point + BACK in segments else split_point


def _short(codec: str) -> str:
    """Return a codec's name without the words that go without saying."""
    usual = ("symmetric", "nearest", "tensor", "smallest")
    return ":".join(word for word in codec.split(":") if word not in usual)
