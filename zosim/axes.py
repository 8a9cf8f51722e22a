"""The axes of a plan: what can be chosen of each, and what it means.

Axes are orthogonal; which values cannot stand together is in :mod:`zosim.contradictions`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from costmodel.codecs import codec_spec
from costmodel.model_spec import BACK, FRONT, block_index
from costmodel.symbols import CutSymbols, TensorSymbols
from costmodel.work import DTYPE_BYTES, DType
from topology.errors import PlanError

StorageDType = Literal["float64", "float32", "float16", "bfloat16"]
TransferDType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3"]

INSIDE = ".mlp"
"""Ends the name of a cut inside a block."""


class Axis(BaseModel):
    """Fields that are chosen together."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimator(Axis):
    """The zeroth-order estimate of the gradient.

    Attributes
    ----------
    direction : str
        Distribution of the perturbation ``z``.
    difference : str
        ``"central"``: ``g = (l(θ + εz) - l(θ - εz)) / 2ε``. ``"forward"``: ``g = (l(θ + εz) - l(θ)) / ε``.
    num_queries : int
        Directions per step; their updates are averaged.
    epsilon : float
        Smoothing radius ``ε``.
    rng : str
        ``"mezo"``: one torch generator walked in parameter order, the reference loop's stream.
        ``"counter"``: every (seed, step, query, parameter) keys its own stream, sliceable at any offset.
    order : str
        Order in which ``mezo`` walks parameters: ``"registration"`` (MeZO) or ``"execution"`` (ZO2).
    """

    direction: Literal["gaussian", "rademacher"] = "gaussian"
    difference: Literal["central", "forward"] = "central"
    num_queries: PositiveInt = 1
    epsilon: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    rng: Literal["mezo", "counter"] = "mezo"
    order: Literal["registration", "execution"] = "registration"


class Residency(Axis):
    """Where the blocks live between their uses.

    Attributes
    ----------
    blocks : str
        ``"resident"`` on the device, or ``"offloaded"`` to host memory.
    edges : str
        The same for embedding and head, which pass through one slot of their own.
    num_slots : int
        Device slots that offloaded blocks pass through. One slot serialises upload, compute and offload;
        three let all of them overlap.
    overlap : bool
        Whether copies run beside compute. Off, every copy waits for the compute before it and the other way
        round (ZO2's "no scheduler overlap" ablation).
    reuse_slots : bool
        Whether slots are allocated once. Off, each upload allocates its slot and each offload frees it
        (ZO2's "no reusable memory" ablation).
    transfers : str
        How several ranks share the host's copies. ``"private"``: every rank has a copy of its own and moves whole
        blocks. ``"shared"``: one copy per host; every rank uploads whole blocks and offloads its share of each.
        ``"sliced"``: as shared, and every rank uploads its share alone and gets the others from its peers
        (DistZO2's communication optimisation).
    share_group : str
        Ranks among whom blocks are shared out: those of one ``"host"``, or the whole ``"world"``.
    """

    blocks: Literal["resident", "offloaded"] = "resident"
    edges: Literal["resident", "offloaded"] = "resident"
    num_slots: PositiveInt = 3
    overlap: bool = True
    reuse_slots: bool = True
    transfers: Literal["private", "shared", "sliced"] = "private"
    share_group: Literal["host", "world"] = "host"


class Precision(Axis):
    """Formats that numbers are stored, computed and moved in.

    Attributes
    ----------
    storage : str
        Format of the weights that are perturbed and updated.
    compute : str
        Format of the matrix products. ``"tf32"`` reads and writes float32; another format than `storage`
        runs the forwards under autocast.
    transfer : str
        Format in which offloaded blocks are kept on the host and cross the bus. Narrower than `storage`
        loses precision at every offload, and is only planned when loss is allowed.
    """

    storage: StorageDType = "float32"
    compute: DType = "float32"
    transfer: TransferDType = "float32"

    @property
    def is_lossy(self) -> bool:
        """Whether the transfer format is another than the storage format."""
        return self.transfer != self.storage

    @property
    def narrows(self) -> bool:
        """Whether the transfer format takes fewer bytes than the storage format."""
        return DTYPE_BYTES[self.transfer] < DTYPE_BYTES[self.storage]

    @property
    def loses_updates(self) -> bool:
        """Whether weights are kept in a format that is too coarse for many updates, so that runs count those lost."""
        return self.narrows or DTYPE_BYTES[self.storage] < DTYPE_BYTES["float32"]


class Runtime(Axis):
    """How forwards are run.

    Attributes
    ----------
    traversal : str
        ``"sweep"`` perturbs all parameters, then runs the whole model (the reference loop: four draws of
        every direction). ``"blockwise"`` runs both signs of one segment before the next, so that one draw
        serves all three perturbations. ``"querywise"`` does so for one query after the other, so that the next stage
        can begin with the first while this one runs the second.
    update : str
        ``"immediate"`` after the projected gradient is known, or ``"delayed"`` until each segment's turn in
        the next step (ZO2's efficient update), with a flush at the end.
    attention : str
        Attention implementation.
    loss_chunk_tokens : int or None
        Tokens whose logits are alive at once; None for all.
    draw_ahead : bool
        Whether directions are drawn on a stream of their own, one block ahead of their use, for one more
        block-sized buffer. Where weights are copied, that stream writes the copies, too, and applies updates: what a
        forward finds is prepared while the one before runs.
    keep_directions : bool
        Whether every direction is drawn once in a step and kept until its update, for as many more bytes on the device
        as the trainable weights take, for each query. Off, a direction is drawn again whenever it is needed anew.
    weights : str
        How weights come to an evaluation point. ``"serial"``: one state of them walks from point to point where it lies,
        and back by one more perturbation, whose rounding leaves a drift (the reference loop). ``"copies"``: each point is
        written beside the weights, ``θ + (s·z)·ε`` for its own sign, and read there; only updates change ``θ``. It takes one
        more buffer of the largest segment; under ``"sweep"`` one of all that is trainable for each sign, so that both come
        of one draw.
    """

    traversal: Literal["sweep", "blockwise", "querywise"] = "blockwise"
    update: Literal["immediate", "delayed"] = "immediate"
    attention: Literal["eager", "sdpa"] = "sdpa"
    loss_chunk_tokens: PositiveInt | None = None
    draw_ahead: bool = False
    keep_directions: bool = False
    weights: Literal["serial", "copies"] = "serial"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of a rank on the mesh, counted from 0 along each axis."""

    data: int
    perturb: int
    stage: int = 0


class Mesh(Axis):
    """The ranks as a grid: how the forwards of one step are shared out.

    Attributes
    ----------
    data : int
        Shards of the batch. All see the same directions; what they exchange are losses (DistZO2's DDP).
    perturb : int
        Parts of a step's evaluation points: with 2 the two signs of one query (DistZO2's PertP), with more the
        queries too.
    stage : int
        Parts of the model, one after the other: see :class:`Split`. Neighbouring ranks are neighbouring stages.
    inner : str
        Of the other two axes, the one along which neighbours differ. Only where ranks are joined by unlike links does
        it matter.
    """

    data: PositiveInt = 1
    perturb: PositiveInt = 1
    stage: PositiveInt = 1
    inner: Literal["perturb", "data"] = "perturb"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.perturb * self.stage

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold one model between them, in the order of their stages."""
        firsts = range(0, self.world_size, self.stage)
        return tuple(tuple(range(first, first + self.stage)) for first in firsts)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of `rank`."""
        pipeline, stage = divmod(rank, self.stage)
        if self.inner == "perturb":
            data, perturb = divmod(pipeline, self.perturb)
        else:
            perturb, data = divmod(pipeline, self.data)
        return Coordinates(data, perturb, stage)

    def describe(self) -> str:
        """Return the axes of more than one rank, such as ``data=2,perturb=2``, the outer one first."""
        names = (*(("data", "perturb") if self.inner == "perturb" else ("perturb", "data")), "stage")
        return ",".join(f"{name}={size}" for name in names if (size := getattr(self, name)) > 1)


class Split(Axis):
    """Where the model is cut into stages, and how what crosses is encoded.

    With one stage, what crosses a cut is encoded and decoded where it is: the same numbers as with stages, from
    one process.

    Attributes
    ----------
    cuts : tuple of str
        One between neighbouring stages, in the model's order; any number of them with one stage. ``"block.5"`` is
        behind block 5: the hidden state crosses. ``"block.5.mlp"`` is inside it, at the input of the MLP's second
        linear: the activation and the residual stream cross. Such a block is two segments of the plan's model.
    codec : str
        Of MLP activations, as :func:`costmodel.codecs.codec_spec` reads it.
    residual_codec : str
        Of the residual stream, which is what crosses behind a block.
    densities : tuple of float or CutSymbols
        For each cut, what is known of the symbols that cross, on which sizes and times of sparse encodings depend: a
        number is the part of the activation's (behind a block, of the hidden state's) that is not the most frequent
        one. Empty takes all symbols to be equally frequent.
    """

    cuts: tuple[str, ...] = ()
    codec: str = "none"
    residual_codec: str = "none"
    densities: tuple[float | CutSymbols, ...] = ()

    @model_validator(mode="after")
    def _cuts_have_names(self) -> Split:
        check_cut_names(self.cuts)
        return self

    @property
    def is_lossy(self) -> bool:
        """Whether what arrives is another number than what was sent."""
        return not (codec_spec(self.codec).is_lossless and codec_spec(self.residual_codec).is_lossless)

    def symbols(self, cut: int) -> CutSymbols | None:
        """Return what is known of the symbols that cross cut number `cut`."""
        if not self.densities:
            return None
        known = self.densities[cut]
        return CutSymbols(first=TensorSymbols(density=known)) if isinstance(known, float) else known

    @property
    def cut_blocks(self) -> tuple[int, ...]:
        """Blocks that are cut inside."""
        return tuple(block_index(cut) for cut in self.cuts if cut.endswith(INSIDE))


_CUT_NAME = re.compile(r"block\.\d+(\.mlp)?", re.ASCII)


def check_cut_names(names: Iterable[str]) -> None:
    """Raise unless all are names of cuts, of whatever model.

    Raises
    ------
    PlanError
    """
    for name in names:
        if not _CUT_NAME.fullmatch(name):
            raise PlanError(
                f"{name!r} is the name of no cut",
                hint="block.5 is the cut behind block 5, block.5.mlp the one inside it",
            )


class Placement(Axis):
    """The hardware that one plan uses.

    Attributes
    ----------
    topology : str
        Name of the topology that it was planned for.
    devices : tuple of str
        Node of each rank's device, in rank order.
    hosts : tuple of str
        Host of each rank's device, in rank order; empty if all are on one.
    """

    topology: str
    devices: tuple[str, ...] = Field(min_length=1)
    hosts: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def ranks_by_host(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host, hosts in the order of their first rank."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts or ("",) * len(self.devices)):
            found.setdefault(host, []).append(rank)
        return tuple(map(tuple, found.values()))


def last_before(cut: str, segments: Container[str]) -> str:
    """Return the segment that a cut is behind; where a block is two segments, its end is that of the second."""
    if cut.endswith(INSIDE):
        return cut.removesuffix(INSIDE) + FRONT
    return cut + BACK if cut + BACK in segments else cut
