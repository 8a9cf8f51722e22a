"""A plan: one point in the space of placements, as data.

Every axis is a field. The strategies that papers name are points of this space (:attr:`Plan.method`), not classes;
what an axis means is decided once, in :mod:`zosim.lowering`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from costmodel.codecs import codec_spec
from costmodel.model_spec import BACK, FRONT, ModelSpec, block_index
from costmodel.symbols import CutSymbols, TensorSymbols
from costmodel.work import DTYPE_BYTES, DType
from topology.errors import PlanError
from topology.validation import raise_readable
from zosim.documents import read_document

PLAN_VERSION: Literal[1] = 1

StorageDType = Literal["float64", "float32", "float16", "bfloat16"]
TransferDType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3"]


class _Axis(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimator(_Axis):
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


class Residency(_Axis):
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


class Precision(_Axis):
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


class Runtime(_Axis):
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
        block-sized buffer.
    keep_directions : bool
        Whether every direction is drawn once in a step and kept until its update, for as many more bytes on the device
        as the trainable weights take, for each query. Off, a direction is drawn again whenever it is needed anew.
    restore : str
        How weights come back from a query's last point: by ``"arithmetic"``, one more perturbation, whose rounding
        leaves a drift (the reference loop); or from a ``"copy"`` that is made before the first, bit for bit, for one more
        buffer of the largest segment (under ``"sweep"``, of all that is trainable).
    """

    traversal: Literal["sweep", "blockwise", "querywise"] = "blockwise"
    update: Literal["immediate", "delayed"] = "immediate"
    attention: Literal["eager", "sdpa"] = "sdpa"
    loss_chunk_tokens: PositiveInt | None = None
    draw_ahead: bool = False
    keep_directions: bool = False
    restore: Literal["arithmetic", "copy"] = "arithmetic"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of a rank on the mesh, counted from 0 along each axis."""

    data: int
    perturb: int
    stage: int = 0


class Mesh(_Axis):
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


class Split(_Axis):
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


INSIDE = ".mlp"
"""Ends the name of a cut inside a block."""

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


class Placement(_Axis):
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
        hosts = self.hosts or ("",) * len(self.devices)
        return tuple(
            tuple(rank for rank, host in enumerate(hosts) if host == name) for name in dict.fromkeys(hosts)
        )


class Plan(_Axis):
    """What was chosen, complete enough to be simulated or run anywhere.

    Attributes
    ----------
    model : ModelSpec
    batch : int
        Sequences per step over all ranks.
    seq : int
        Tokens per sequence, padding included.
    """

    version: Literal[1] = PLAN_VERSION
    model: ModelSpec
    placement: Placement
    batch: PositiveInt
    seq: PositiveInt
    mesh: Mesh = Mesh()
    split: Split = Split()
    estimator: Estimator = Estimator()
    residency: Residency = Residency()
    precision: Precision = Precision()
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _axes_agree(self) -> Plan:
        for complaint, hint in _contradictions(self):
            raise PlanError(complaint, hint=hint)
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens whose loss one step sees, counted once although each is forwarded twice."""
        return self.batch * self.seq

    @property
    def points(self) -> tuple[str, ...]:
        """Evaluation points of one step, in the order in which a segment visits them."""
        queries = range(self.estimator.num_queries)
        if self.estimator.difference == "central":
            return tuple(f"q{query}{sign}" for query in queries for sign in "+-")
        return ("", *(f"q{query}+" for query in queries))

    def points_of(self, rank: int) -> tuple[str, ...]:
        """Return the evaluation points that `rank` forwards: neighbours, as evenly as can be."""
        part = self.mesh.coordinates(rank).perturb
        return tuple(self.points[i] for i in _share(len(self.points), self.mesh.perturb, part))

    def rows_of(self, rank: int) -> range:
        """Return the sequences of the batch that `rank` forwards: neighbours, as evenly as can be."""
        return _share(self.batch, self.mesh.data, self.mesh.coordinates(rank).data)

    def segments_of(self, rank: int) -> tuple[str, ...]:
        """Return the segments that `rank` runs, in execution order."""
        stage = self.mesh.coordinates(rank).stage
        segments = self.model.segments
        if self.mesh.stage == 1:
            return segments
        ends = [segments.index(_last_before(cut, segments)) + 1 for cut in self.split.cuts]
        return segments[([0, *ends])[stage] : ([*ends, len(segments)])[stage]]

    @property
    def coded_in_place(self) -> dict[str, int]:
        """Cuts, by number, at which a rank goes on itself, by the segment before each; none between stages."""
        if self.mesh.stage > 1:
            return {}
        return {_last_before(cut, self.model.segments): number for number, cut in enumerate(self.split.cuts)}

    @property
    def is_shared_out(self) -> bool:
        """Whether ranks share one host copy of the offloaded blocks."""
        return self.residency.transfers != "private" and self.placement.world_size > 1

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Groups of ranks that work together, by name: each a partition of all ranks."""
        return {
            "world": (tuple(range(self.placement.world_size)),),
            "host": self.placement.ranks_by_host,
            "pipeline": self.mesh.pipelines,
        }

    @property
    def method(self) -> str:
        """Name of the preset that this plan is a point of, or a description of the point."""
        point = (self.residency.blocks, self.runtime.update)
        alone = {
            ("resident", "immediate"): "mezo",
            ("resident", "delayed"): "mezo+delayed",
            ("offloaded", "delayed"): "zo2",
            ("offloaded", "immediate"): "zo2-no-efficient-update",
        }[point]
        axes = (self.mesh.data > 1, self.mesh.perturb > 1)
        shared = {(False, False): "", (True, False): "+ddp", (False, True): "+pertp", (True, True): "+2d"}[
            axes
        ]
        sliced = "+sliced" if self.residency.transfers == "sliced" else ""
        staged = "+stages" if self.mesh.stage > 1 else "+codec" if self.split.cuts else ""
        return alone + staged + shared + sliced

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`.

        Raises
        ------
        PlanError
            If the file is missing, is not JSON, is of another version, or contradicts itself.
        """
        data = read_document(
            path, "plan", PLAN_VERSION, PlanError, make="make one with `zosim plan ... -o plan.json`"
        )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise_readable(error, f"plan {path}", PlanError)


def _last_before(cut: str, segments: tuple[str, ...]) -> str:
    """Return the segment that a cut is behind; where a block is two segments, its end is that of the second."""
    if cut.endswith(INSIDE):
        return cut.removesuffix(INSIDE) + FRONT
    return cut + BACK if cut + BACK in segments else cut


def _share(count: int, num_parts: int, part: int) -> range:
    """Return a part of ``range(count)``, the first parts longer by one where they cannot be alike."""
    each, longer = divmod(count, num_parts)
    begin = part * each + min(part, longer)
    return range(begin, begin + each + (part < longer))


def _contradictions(plan: Plan) -> list[tuple[str, str]]:
    """Every reason why the axes of `plan` cannot stand together, with its remedy."""
    model, found = plan.model, []
    if plan.seq > model.max_positions:
        found.append(
            (
                f"seq={plan.seq} exceeds the {model.max_positions} positions of {model.name}",
                f"use --seq {model.max_positions} or less",
            )
        )
    if plan.residency.blocks == "offloaded" and plan.runtime.traversal == "sweep":
        found.append(
            (
                "traversal=sweep needs every block at once, but residency.blocks=offloaded",
                "use traversal=blockwise",
            )
        )
    if plan.runtime.traversal == "sweep" and plan.runtime.update == "delayed":
        found.append(
            (
                "update=delayed is fused into a segment's turn, which traversal=sweep does not have",
                "use traversal=blockwise or update=immediate",
            )
        )
    if plan.runtime.traversal == "querywise" and plan.runtime.update == "delayed":
        found.append(
            (
                "traversal=querywise visits a block once per query, so update=delayed has no one turn",
                "use update=immediate",
            )
        )
    if plan.runtime.traversal == "querywise" and plan.residency.blocks == "offloaded":
        found.append(
            ("traversal=querywise would upload every block once per query", "use traversal=blockwise")
        )
    if plan.residency.edges == "offloaded" and plan.residency.blocks == "resident":
        found.append(("edges=offloaded with blocks=resident saves little", "offload the blocks first"))
    if plan.residency.edges == "offloaded" and model.tied_head:
        found.append(
            (
                f"{model.name} ties its head to its token table, so edges=offloaded frees no memory",
                "use edges=resident",
            )
        )
    if DTYPE_BYTES[plan.precision.transfer] > DTYPE_BYTES[plan.precision.storage]:
        found.append(
            (
                f"transfer={plan.precision.transfer} is wider than storage={plan.precision.storage}",
                f"use transfer={plan.precision.storage}",
            )
        )
    if plan.precision.compute == "tf32" and plan.precision.storage != "float32":
        found.append(
            (f"compute=tf32 reads float32, but storage={plan.precision.storage}", "use storage=float32")
        )
    return found + _contradictions_of_ranks(plan)


def _contradictions_of_ranks(plan: Plan) -> list[tuple[str, str]]:
    """Every reason why mesh, placement and transfers cannot stand together, with its remedy."""
    mesh, placement, found = plan.mesh, plan.placement, []
    if mesh.world_size != placement.world_size:
        found.append(
            (
                f"data={mesh.data} x perturb={mesh.perturb} x stage={mesh.stage} needs {mesh.world_size} ranks, not "
                + str(placement.world_size),
                "name one device per rank, or change the mesh",
            )
        )
    if mesh.data > plan.batch:
        found.append(
            (
                f"a batch of {plan.batch} cannot be shared by data={mesh.data}: some rank would have none",
                f"use data={plan.batch} or less, or a larger batch",
            )
        )
    if mesh.perturb > len(plan.points):
        found.append(
            (
                f"perturb={mesh.perturb} shares out {len(plan.points)} evaluation points: some rank has none",
                f"use perturb={len(plan.points)} or less, or more queries",
            )
        )
    if placement.hosts and len(placement.hosts) != placement.world_size:
        found.append(
            (f"{len(placement.hosts)} hosts for {placement.world_size} devices", "name one per device")
        )
    if plan.residency.transfers != "private":
        found += _contradictions_of_shares(plan)
    return found + _contradictions_of_stages(plan)


def _contradictions_of_stages(plan: Plan) -> list[tuple[str, str]]:
    """Every reason why cuts and stages cannot stand together, with its remedy."""
    split, segments, found = plan.split, plan.model.segments, []
    if plan.mesh.stage > 1 and len(split.cuts) != plan.mesh.stage - 1:
        found.append(
            (f"stage={plan.mesh.stage} needs {plan.mesh.stage - 1} cuts, not {len(split.cuts)}", "see --cut")
        )
    unknown = [cut for cut in split.cuts if _last_before(cut, segments) not in segments[1:-1]]
    if unknown:
        inside = unknown[0].endswith(INSIDE)
        found.append(
            (
                f"there is no cut {unknown[0]!r} in {plan.model.name}",
                "read the model with that block cut"
                if inside
                else f"cuts are block.0.mlp to block.{plan.model.num_blocks - 1}",
            )
        )
    elif list(split.cuts) != sorted(
        set(split.cuts), key=lambda cut: segments.index(_last_before(cut, segments))
    ):
        found.append(
            (f"cuts {', '.join(split.cuts)} are not in the model's order", "sort them, name each once")
        )
    if split.densities and len(split.densities) != len(split.cuts):
        found.append((f"{len(split.densities)} densities for {len(split.cuts)} cuts", "give one per cut"))
    if any(isinstance(density, float) and not 0 <= density <= 1 for density in split.densities):
        found.append((f"densities={split.densities} must be from 0 to 1", "the part that is not zero"))
    for name in (split.codec, split.residual_codec):
        codec_spec(name)
    return found


def _contradictions_of_shares(plan: Plan) -> list[tuple[str, str]]:
    transfers, found = plan.residency.transfers, []
    if plan.residency.blocks == "resident":
        found.append((f"transfers={transfers}, but blocks=resident are not moved", "use blocks=offloaded"))
    if plan.placement.world_size == 1:
        found.append((f"transfers={transfers} needs several ranks", "use transfers=private"))
    if plan.mesh.stage > 1:
        found.append(
            (f"transfers={transfers} with stages, which hold unlike blocks", "use transfers=private")
        )
    if transfers == "shared" and plan.residency.share_group == "world" and len(plan.groups["host"]) > 1:
        found.append(("transfers=shared over several hosts, which share no memory", "use share_group=host"))
    if len({len(ranks) for ranks in plan.groups["host"]}) > 1:
        found.append(
            (f"transfers={transfers} with unlike numbers of ranks per host", "use as many on every host")
        )
    return found
