"""What is asked of cuts between stages, and SparQ's own rule for them; :mod:`zosim.planning.cut_search` finds the best."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costmodel.codecs import codec_spec
from costmodel.model_spec import ModelSpec, block_index
from topology.errors import PlanError

INSIDE = ".mlp"
CutModel = Callable[[tuple[int, ...]], ModelSpec]
"""Returns the model with these blocks cut inside."""


@dataclass(frozen=True)
class Cutting:
    """What is asked of cuts.

    Attributes
    ----------
    cuts : tuple of str
        The only ones to plan for; by default any.
    codecs, residual_codecs : tuple of str
        That may be used for MLP activations and for the residual stream; plain numbers are tried beside them.
    densities : mapping of str to float
        Of what crosses each cut, where they were measured; 1 for the others.
    cut_model : callable or None
        How to cut inside blocks; unless given, a model is cut where it is cut already, and between blocks.
    """

    cuts: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    residual_codecs: tuple[str, ...] = ()
    densities: Mapping[str, float] = field(default_factory=dict)
    cut_model: CutModel | None = None

    def __post_init__(self) -> None:
        for name in (*self.codecs, *self.residual_codecs):
            codec_spec(name)
        wrong = {cut: value for cut, value in self.densities.items() if not 0 <= value <= 1}
        if wrong:
            raise PlanError(f"densities must be from 0 to 1, not {wrong}", hint="the part that is not zero")

    @property
    def is_lossy(self) -> bool:
        """Whether a codec that is asked for changes numbers."""
        return any(not codec_spec(name).is_lossless for name in (*self.codecs, *self.residual_codecs))

    @property
    def choices(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Codecs of MLP activations and of the residual stream to try: those that may be used, or plain numbers."""
        return self.codecs or ("none",), self.residual_codecs or ("none",)

    def check_loss(self, *, allowed: bool) -> None:
        """Raise if a codec loses precision without leave.

        Raises
        ------
        PlanError
        """
        if self.is_lossy and not allowed:
            raise PlanError(
                f"codecs {', '.join(dict.fromkeys((*self.codecs, *self.residual_codecs)))} change what arrives at the "
                "next stage",
                hint="add --allow-lossy if that is meant",
            )

    def cut(self, model: ModelSpec, cuts: Sequence[str]) -> ModelSpec:
        """Return `model` with the blocks cut that these cuts are inside.

        Raises
        ------
        PlanError
            If it cannot be cut there.
        """
        blocks = tuple(sorted(block_index(cut) for cut in cuts if cut.endswith(INSIDE)))
        if blocks == model.cut_blocks:
            return model
        if self.cut_model is None:
            raise PlanError(
                f"the model {model.name} was saved with the blocks {list(model.cut_blocks)} cut inside, not "
                f"{list(blocks)}",
                hint="name a model, its directory or its config.json",
            )
        return self.cut_model(blocks)


def read_densities(path: Path) -> dict[str, float]:
    """Return the density of what crosses each cut: an object of them, or a report of ``zosim probe --json``.

    Raises
    ------
    PlanError
        If the file is neither.
    """
    try:
        data = json.loads(path.read_text())
        if "tensors" not in data:
            return {str(cut): float(value) for cut, value in data.items()}
        found: dict[str, float] = {}
        for entry in data["tensors"]:
            is_activation = entry["crossing"] != "residual"
            if is_activation or entry["cut"] not in found:
                found[entry["cut"]] = float(entry["kept"])
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} holds no densities: {error}",
            hint='write one with `zosim probe --json`, or {"block.5.mlp": 0.1}',
        ) from None


def sparsest_near_the_middle(
    names: Sequence[str], densities: Mapping[str, float], num_stages: int
) -> tuple[str, ...]:
    """Return SparQ's own choice: of the cuts inside blocks near each even share, the one with the least density.

    Near is within a sixth of the model to either side.
    """
    inside = [name for name in names if name.endswith(INSIDE)]
    reach = max(1, len(inside) // 6)
    chosen: list[str] = []
    for stage in range(1, num_stages):
        middle = stage * len(inside) // num_stages
        near = [name for name in inside[max(0, middle - reach) : middle + reach + 1] if name not in chosen]
        known = [name for name in near if name in densities]
        if not known:
            return ()
        chosen.append(min(known, key=lambda name: densities[name]))
    return tuple(sorted(chosen, key=inside.index))
