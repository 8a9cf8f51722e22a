"""What is asked of split points between stages, and SparQ's own rule for them; :mod:`zosim.planning.split_search` finds the best.

SparQ's rule for two stages of six blocks: the sparsest of the split points next to the middle.

>>> names = [f"block.{index}.mlp" for index in range(6)]
>>> densities = dict(zip(names, (0.01, 0.5, 0.2, 0.4, 0.3, 0.02), strict=True))
>>> sparsest_near_the_middle(names, densities, num_stages=2)
('block.2.mlp',)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from costmodel.formats.codecs import CodecSpec, codec_spec
from costmodel.formats.symbols import BoundarySymbols, TensorSymbols
from costmodel.models.configs import Trainable, read_model_spec
from costmodel.models.model_spec import ModelSpec, block_index
from topology.errors import PlanError, UnknownFamily, ZosimError
from topology.reading import read_json_object
from topology.renamed import with_present_names
from zosim.plans import INSIDE, Split, check_split_points
from zosim.registry import FUNCTIONS, load, registered

SplitModel = Callable[[tuple[int, ...]], ModelSpec]
"""Returns the model with these blocks split inside."""


RENAMED: Mapping[str, str] = {"tensors.cut": "split_point", "tensors.crossing": "tensor"}
"""Keys of a report of ``zosim probe --json`` that were renamed (:mod:`topology.renamed`)."""


@dataclass(frozen=True)
class Probed:
    """What ``zosim probe`` found of the tensors that cross one boundary."""

    split_point: str
    density: float  # of the first of them, the activation or the hidden state, before any codec
    # By tensor (`"activation"` and `"residual"`, or `"hidden"`) and codec, whatever the encoding.
    symbols: Mapping[tuple[str, str], TensorSymbols]

    def through(self, codec: CodecSpec, residual_codec: CodecSpec) -> BoundarySymbols:
        """Return what is known of what crosses through these codecs.

        Raises PlanError if a codec was not probed.
        """
        if not self.split_point.endswith(INSIDE):
            return BoundarySymbols(first=self._of("hidden", residual_codec))
        return BoundarySymbols(
            first=self._of("activation", codec), residual=self._of("residual", residual_codec)
        )

    def _of(self, tensor: str, spec: CodecSpec) -> TensorSymbols:
        # Plain numbers are sent in full.
        if spec.is_lossless:
            return TensorSymbols(density=1.0)
        # What a codec keeps depends on its grid; how it is written down does not change that.
        name = _without_encoding(spec)
        if (tensor, name) not in self.symbols:
            known = sorted({codec for _, codec in self.symbols})
            raise PlanError(
                f"split point {self.split_point}: the probe did not measure codec {name}, only {', '.join(known)}",
                hint=f"measure it: zosim probe --codec {name}",
            )
        return self.symbols[tensor, name]


def _without_encoding(spec: CodecSpec) -> str:
    return spec.name.rpartition(":")[0]


@dataclass(frozen=True)
class SplitOptions:
    """What is asked of split points."""

    split_points: tuple[str, ...] = ()  # the only ones to plan for; by default any
    codecs: tuple[str, str] = ("none", "none")  # for MLP activations and for the residual stream
    # Of what crosses each boundary, where it was measured; 1 for the others.
    densities: Mapping[str, float | Probed] = field(default_factory=dict)
    # How to split inside blocks; unless given, a model is split where it is split already, and between blocks.
    split_model: SplitModel | None = None

    @classmethod
    def of(
        cls,
        split: Split,
        split_model: SplitModel | None,
        densities: Mapping[str, float | Probed] | None = None,
    ) -> SplitOptions:
        """Return what a config asks of split points."""
        return cls(split.split_points, (split.codec, split.residual_codec), densities or {}, split_model)

    def __post_init__(self) -> None:
        for name in self.codecs:
            codec_spec(name)
        densities = {split_point: density_of(value) for split_point, value in self.densities.items()}
        wrong = {split_point: value for split_point, value in densities.items() if not 0 <= value <= 1}
        if wrong:
            raise PlanError(
                f"densities {wrong} must be from 0 to 1",
                hint="a density is the fraction of values that are not zero",
            )
        check_split_points((*self.split_points, *densities))

    def symbols(
        self, split_point: str, codec: CodecSpec, residual_codec: CodecSpec
    ) -> BoundarySymbols | None:
        """Return what is known of what crosses a boundary through these codecs; None where no split point was measured."""
        if not self.densities:
            return None
        known = self.densities.get(split_point, 1.0)
        if isinstance(known, Probed):
            return known.through(codec, residual_codec)
        return BoundarySymbols(first=TensorSymbols(density=known))

    @property
    def is_lossy(self) -> bool:
        """Whether a codec that is asked for changes numbers."""
        return not all(codec_spec(name).is_lossless for name in self.codecs)

    def split(self, model: ModelSpec, split_points: Sequence[str]) -> ModelSpec:
        """Return `model` with the blocks split that these split points are inside.

        Raises PlanError if it cannot be split there.
        """
        blocks = tuple(
            sorted(block_index(split_point) for split_point in split_points if split_point.endswith(INSIDE))
        )
        if blocks == model.split_blocks:
            return model
        if self.split_model is None:
            raise PlanError(
                f"{model.name} was saved with split points inside the blocks {list(model.split_blocks)}, but "
                f"the plan needs them inside {list(blocks)}",
                hint="give the model's name, its directory or its config.json",
            )
        return self.split_model(blocks)


def model_spec(source: str, tuned: Trainable = "all", split_blocks: tuple[int, ...] = ()) -> ModelSpec:
    """Return what is known of a model from its configuration, which of a family without a row torch counts, if it is installed.

    Parameters
    ----------
    source, tuned, split_blocks
        As of :func:`~costmodel.models.configs.read_model_spec`.

    Raises
    ------
    ModelError
        If there is no such model, its configuration is damaged, or nothing here knows its family.
    """
    try:
        return read_model_spec(source, trainable=tuned, split_blocks=split_blocks)
    except UnknownFamily as unknown:
        try:
            count = load(registered(FUNCTIONS)["count"])
        except (ModuleNotFoundError, KeyError):
            raise unknown from None
        counted: ModelSpec = count(source, tuned, split_blocks)
        return counted


def split_options_of(
    source: str, split: Split | None = None, densities: Path | None = None, tuned: Trainable = "all"
) -> SplitOptions:
    """Return where and how the model may be split, as far as a config sets it."""

    @cache
    def split_model(blocks: tuple[int, ...]) -> ModelSpec:
        return model_spec(source, tuned, blocks)

    path = Path(source)
    # A saved description has no configuration to split anew.
    is_saved = path.suffix == ".json" and path.name != "config.json" and path.is_file()
    known = {} if densities is None else read_densities(densities)
    return SplitOptions.of(split or Split(), None if is_saved else split_model, known)


def density_of(known: float | Probed) -> float:
    """Return the density of an activation, as it is known."""
    return known.density if isinstance(known, Probed) else known


def read_densities(path: Path) -> dict[str, float | Probed]:
    """Return what is known of what crosses each boundary: an object of densities, or a report of ``zosim probe --json``.

    Raises PlanError if the file is neither.
    """
    data = read_json_object(path, "file of densities", PlanError, hint=_DENSITIES_HINT)
    try:
        if "tensors" not in data:
            return {str(split_point): float(value) for split_point, value in data.items()}
        tensors: dict[str, dict[tuple[str, str], TensorSymbols]] = {}
        nonzero: dict[str, float] = {}
        for entry in with_present_names(data, RENAMED)["tensors"]:
            split_point, tensor, codec = entry["split_point"], entry["tensor"], codec_spec(entry["codec"])
            symbols = TensorSymbols(density=entry["kept"], entropy_bits=entry["entropy_bits"])
            tensors.setdefault(split_point, {})[tensor, _without_encoding(codec)] = symbols
            # A split point's density is that of its first tensor: the activation, or between blocks the hidden state.
            if tensor != "residual":
                nonzero[split_point] = float(entry["nonzero"])
        return {
            split_point: Probed(split_point, nonzero[split_point], symbols)
            for split_point, symbols in tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, ZosimError) as error:
        raise PlanError(f"{path} has no densities: {_reason(error)}", hint=_DENSITIES_HINT) from None


_DENSITIES_HINT = 'write one with `zosim probe --json`, or {"block.5.mlp": 0.1}'


def _reason(error: Exception) -> str:
    match error:
        case ZosimError():
            return error.message
        case ValidationError():
            return f"{error.error_count()} numbers of {error.title} are not what they should be"
        case KeyError():
            return f"{error} is missing"
        case _:
            return str(error)


def sparsest_near_the_middle(
    names: Sequence[str], densities: Mapping[str, float | Probed], num_stages: int
) -> tuple[str, ...]:
    """Return SparQ's own choice: of the splits inside blocks near each even share, the one with the least density.

    Near is within a sixth of the model to either side.
    """
    inside = [name for name in names if name.endswith(INSIDE)]
    # "Near the middle" is all that the paper says; a sixth to either side is this reading of it.
    reach = max(1, len(inside) // 6)
    chosen: list[str] = []
    for stage in range(1, num_stages):
        middle = stage * len(inside) // num_stages
        near = [name for name in inside[max(0, middle - reach) : middle + reach + 1] if name not in chosen]
        known = [name for name in near if name in densities]
        if not known:
            return ()
        chosen.append(min(known, key=lambda name: density_of(densities[name])))
    return tuple(sorted(chosen, key=inside.index))
