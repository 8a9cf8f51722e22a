"""A plan: one point in the space of placements, as data.

Every axis is a field. The strategies that papers name are points of this space (:data:`PRESETS`), not classes;
what an axis means is decided once, in :mod:`zosim.lowering`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from costmodel.model_spec import ModelSpec
from costmodel.work import DTYPE_BYTES, DType
from topology.errors import PlanError
from topology.validation import raise_readable

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
    """

    blocks: Literal["resident", "offloaded"] = "resident"
    edges: Literal["resident", "offloaded"] = "resident"
    num_slots: PositiveInt = 3
    overlap: bool = True
    reuse_slots: bool = True


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


class Runtime(_Axis):
    """How forwards are run.

    Attributes
    ----------
    traversal : str
        ``"sweep"`` perturbs all parameters, then runs the whole model (the reference loop: four draws of
        every direction). ``"blockwise"`` runs both signs of one segment before the next, so that one draw
        serves all three perturbations.
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
    """

    traversal: Literal["sweep", "blockwise"] = "blockwise"
    update: Literal["immediate", "delayed"] = "immediate"
    attention: Literal["eager", "sdpa"] = "sdpa"
    loss_chunk_tokens: PositiveInt | None = None
    draw_ahead: bool = False


class Placement(_Axis):
    """The hardware that one plan uses.

    Attributes
    ----------
    topology : str
        Name of the topology that it was planned for.
    devices : tuple of str
        Node of each rank's device, in rank order.
    """

    topology: str
    devices: tuple[str, ...] = Field(min_length=1)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)


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
    def method(self) -> str:
        """Name of the preset that this plan is a point of, or a description of the point."""
        point = (self.residency.blocks, self.runtime.update)
        return {
            ("resident", "immediate"): "mezo",
            ("resident", "delayed"): "mezo+delayed",
            ("offloaded", "delayed"): "zo2",
            ("offloaded", "immediate"): "zo2-no-efficient-update",
        }[point]

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
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise PlanError(
                f"no plan at {path}", hint="make one with `zosim plan ... -o plan.json`"
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanError(f"{path} is not a plan: {error}") from None
        if isinstance(data, dict) and data.get("version") != PLAN_VERSION:
            raise PlanError(
                f"{path} is a plan of version {data.get('version')!r}, this zosim reads {PLAN_VERSION}",
                hint="plan again with this version",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise_readable(error, f"plan {path}", PlanError)


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
    return found
