"""A plan: one point in the space of placements, as data.

Every axis is a class in a module of its own, which says what its values mean and what contradicts them; every choice is
a field. The strategies that papers name are points of this space (:attr:`Plan.method`), not classes; what an axis does
to a step is decided once, in :mod:`zosim.lowering`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from costmodel.formats import FORMATS, DType
from costmodel.models.components import AttentionImpl
from costmodel.models.model_spec import ModelSpec
from costmodel.storage import DenseStorage
from topology.errors import PlanError
from topology.limits import Extent
from topology.validation import readable
from zosim.documents import Document, DocumentType
from zosim.eval_points import EvalPoint, eval_points_of_step
from zosim.plans.estimator import Estimator
from zosim.plans.forward import ForwardPass
from zosim.plans.low_bits import LowBits
from zosim.plans.mesh import Coordinates, Mesh, share
from zosim.plans.perturbations import Perturbations
from zosim.plans.placement import Placement
from zosim.plans.residency import Residency, TransferDType
from zosim.plans.schedule import Schedule
from zosim.plans.setting import Axis, Section, Setting, fields_of, is_decisive
from zosim.plans.split import INSIDE, Split, check_split_points, last_before, split_point_behind
from zosim.plans.upgrade import PLAN_VERSION, upgrade
from zosim.plans.weights import StorageDType, Weights

__all__ = [
    "AXES",
    "INSIDE",
    "PLAN_VERSION",
    "Axis",
    "Coordinates",
    "Estimator",
    "ForwardPass",
    "LowBits",
    "Mesh",
    "Method",
    "Perturbations",
    "Placement",
    "Plan",
    "Residency",
    "Schedule",
    "Section",
    "Setting",
    "Split",
    "StorageDType",
    "TransferDType",
    "Weights",
    "check_split_points",
    "fields_of",
    "in_options",
    "is_decisive",
    "last_before",
    "naming_options",
    "split_point_behind",
    "upgrade",
]


Method = Literal["auto", "mezo", "zo2", "pertp", "ddp", "2d", "sparq"]
"""Presets that papers name, each a part of the space of plans; ``"auto"`` is all of it."""


class Plan(Axis, Document):
    """What was chosen, complete enough to be simulated or run anywhere.

    Attributes
    ----------
    version : int
        Version of the file's layout.
    model : ModelSpec
        Model to tune.
    batch : int
        Number of sequences per step over all ranks.
    seq : int
        Number of tokens per sequence, padding included.
    mesh, placement, split, estimator, residency, schedule, weights, low_bits, perturbations, forward : Axis
        The axes; each class describes its fields.
    """

    document: ClassVar = DocumentType(
        "plan", PLAN_VERSION, 1, PlanError, "make one with `zosim plan ... -o plan.json`"
    )

    version: Literal[2] = PLAN_VERSION
    model: ModelSpec
    batch: Extent
    seq: Extent
    mesh: Mesh = Mesh()
    placement: Placement
    split: Split = Split()
    estimator: Estimator = Estimator()
    residency: Residency = Residency()
    schedule: Schedule = Schedule()
    weights: Weights = Weights()
    low_bits: LowBits = LowBits()
    perturbations: Perturbations = Perturbations()
    forward: ForwardPass = ForwardPass()

    @model_validator(mode="before")
    @classmethod
    def _in_one_spelling(cls, data: Any) -> Any:
        return _without_usual_formats(upgrade(data)) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _axes_agree(self) -> Plan:
        if self.seq > self.model.max_positions:
            complaint = (
                f"seq={self.seq} exceeds the {self.model.max_positions} positions of {self.model.name}"
            )
            raise PlanError(complaint, hint=f"use seq={self.model.max_positions} or less")
        for complaint, hint in chain.from_iterable(axis.conflicts(self) for axis in self.axes.values()):
            raise PlanError(complaint, hint=hint)
        return self

    @property
    def axes(self) -> dict[str, Axis]:
        """The axes by name."""
        return {name: getattr(self, name) for name in AXES}

    def identity(self) -> dict[str, Any]:
        """Return what decides a run's losses and weights, by name: two plans that agree in it compute the same."""
        fields: dict[str, Any] = {"batch": self.batch}
        for axis in self.axes.values():
            for field in fields_of(type(axis)).values():
                if is_decisive(
                    field, transfers_round=self.is_transfer_lossy, codecs_round=self.split.is_lossy
                ):
                    fields[field.identity] = axis.model_dump(mode="json", include={field.name})[field.name]
        fields["compute_dtype"] = self.compute_dtype
        return fields

    def describe(self) -> str:
        """Return the plan in a few words, axis by axis where it differs from plain MeZO."""
        return ", ".join(
            (self.method, *(words for axis in self.axes.values() for words in axis.summary(self)))
        )

    @property
    def storage_dtype(self) -> StorageDType:
        """Format that the weights are stored in."""
        return self.weights.dtype

    @property
    def compute_dtype(self) -> DType:
        """Format of the matrix products."""
        return self.forward.compute_dtype or self.weights.dtype

    @property
    def attention(self) -> AttentionImpl:
        """How attention is computed: with scores stored, too, where torch's fused kernels do not fit the model."""
        stores = self.model.stores_scores
        has_none = stores == "always" or (stores == "cpu" and not self.placement.is_on_gpus)
        return "eager" if has_none and self.forward.attention == "sdpa" else self.forward.attention

    @property
    def transfer_dtype(self) -> TransferDType:
        """Format in which offloaded blocks are kept on the host and cross the bus."""
        return self.residency.transfer_dtype or self.weights.dtype

    @property
    def is_transfer_lossy(self) -> bool:
        """Whether offloaded blocks are kept in another format than the weights."""
        return self.transfer_dtype != self.weights.dtype

    @property
    def storage(self) -> DenseStorage:
        """How parameters are stored, and perturbations beside them."""
        return self.low_bits.storage(self)

    @property
    def loses_updates(self) -> bool:
        """Whether weights are kept in a format that is too coarse for many updates, so that runs count those lost."""
        width = FORMATS[self.weights.dtype].element_bytes
        return FORMATS[self.transfer_dtype].element_bytes < width or width < FORMATS["float32"].element_bytes

    @property
    def tokens_per_step(self) -> int:
        """Tokens whose loss one step sees, counted once although each is forwarded twice."""
        return self.batch * self.seq

    @property
    def eval_points(self) -> tuple[EvalPoint, ...]:
        """Evaluation points of one step, in the order in which a segment visits them."""
        return eval_points_of_step(self.estimator.num_perturbations, self.estimator.difference)

    def eval_points_of(self, rank: int) -> tuple[EvalPoint, ...]:
        """Return the evaluation points that `rank` forwards: neighbours, as evenly as can be."""
        part = self.mesh.coordinates(rank).perturb
        return tuple(self.eval_points[i] for i in share(len(self.eval_points), self.mesh.perturb, part))

    def rows_of(self, rank: int) -> range:
        """Return the sequences of the batch that `rank` forwards: neighbours, as many as its shard has."""
        return self.mesh.rows_of(self.mesh.coordinates(rank).data, self.batch)

    def segments_of(self, rank: int) -> tuple[str, ...]:
        """Return the segments that `rank` runs, in execution order."""
        stage = self.mesh.coordinates(rank).stage
        segments = self.model.segments
        if self.mesh.stage == 1:
            return segments
        ends = [
            segments.index(last_before(split_point, segments)) + 1 for split_point in self.split.split_points
        ]
        return segments[([0, *ends])[stage] : ([*ends, len(segments)])[stage]]

    @property
    def num_batch_shards(self) -> int:
        """Parts of the batch that ranks forward beside each other."""
        return self.mesh.data

    @property
    def split_points(self) -> tuple[str, ...]:
        """Where the model is split, in its order."""
        return self.split.split_points

    @property
    def num_stages(self) -> int:
        """Parts of the model, each with a rank of its own in every pipeline."""
        return self.mesh.stage

    @property
    def encoded_in_place(self) -> dict[str, int]:
        """Number of each split point within one stage, by the segment before it: the same rank encodes and decodes what crosses.

        Empty where split points part stages.
        """
        if self.mesh.stage > 1:
            return {}
        return {
            last_before(split_point, self.model.segments): number
            for number, split_point in enumerate(self.split.split_points)
        }

    @property
    def linear_format(self) -> str:
        """Format that the linear layers of blocks are kept in."""
        return self.storage.linear_format

    @property
    def perturbs_in_place(self) -> bool:
        """Whether one state of the weights is moved from point to point."""
        return self.weights.perturbation == "serial"

    @property
    def perturbs_by_adapters(self) -> bool:
        """Whether weights stay as they are, and points are factors beside them."""
        return self.weights.perturbation == "adapters"

    @property
    def is_full_pass(self) -> bool:
        """Whether all parameters are at one evaluation point together, rather than those of a block."""
        return self.schedule.traversal == "full"

    @property
    def copies_overlap(self) -> bool:
        """Whether blocks are copied while others are computed with."""
        return self.residency.overlap

    @property
    def is_offloaded(self) -> bool:
        """Whether blocks live on the host or its drive, and pass through staging buffers of the device."""
        return self.residency.blocks != "resident"

    @property
    def copies_blocks_twice(self) -> bool:
        """Whether offloaded blocks come up a second time in a step, to be updated."""
        return self.is_offloaded and self.schedule.update == "immediate"

    @property
    def uses_disks(self) -> bool:
        """Whether blocks live on a drive, and come by way of host memory."""
        return self.residency.blocks == "nvme"

    @property
    def is_sliced(self) -> bool:
        """Whether ranks get parts of blocks from each other."""
        return self.residency.transfers == "sliced"

    @property
    def num_shares(self) -> int:
        """Ranks of a host, among whom a block is shared out; 1 where none is."""
        return len(self.placement.ranks_by_host[0]) if self.is_shared_out else 1

    @property
    def is_shared_out(self) -> bool:
        """Whether the ranks of a host share one copy of the offloaded blocks."""
        return self.residency.transfers != "private" and self.placement.world_size > 1

    @property
    def process_groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Groups of ranks that work together, by name: each a partition of all ranks."""
        return {
            "world": (tuple(range(self.placement.world_size)),),
            "host": self.placement.ranks_by_host,
            "pipeline": self.mesh.pipelines,
        }

    @property
    def method(self) -> str:
        """Name of the preset that this plan is a point of, or a description of the point."""
        combination = (self.is_offloaded, self.schedule.update)
        alone = {
            (False, "immediate"): "mezo",
            (False, "delayed"): "mezo+delayed",
            (True, "delayed"): "zo2",
            (True, "immediate"): "zo2-no-efficient-update",
        }[combination]
        alone += "+nvme" if self.uses_disks else ""
        shared = f"+{self.mesh.shared_by}" if self.mesh.shared_by else ""
        sliced = "+sliced" if self.residency.transfers == "sliced" else ""
        staged = "+stages" if self.mesh.is_staged else "+codec" if self.split.split_points else ""
        return alone + staged + shared + sliced

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_data(cls, data: dict[str, Any], where: str) -> Plan:
        """Return the plan that a JSON object describes.

        Parameters
        ----------
        data : dict
            Content of the JSON file.
        where : str
            Name of the source in messages.

        Raises
        ------
        ZosimError
            If a field is missing or wrong, or fields contradict each other.
        """
        with readable(f"plan {where}", PlanError):
            return cls.model_validate(data)


AXES: Mapping[str, type[Axis]] = {
    name: axis_type
    for name, field in Plan.model_fields.items()
    if isinstance(axis_type := field.annotation, type) and issubclass(axis_type, Axis)
}
"""Axes by the names of the fields that hold them."""

_FIELD = re.compile(rf"\b({'|'.join(AXES)})\.(\w+)(?:=([\w.+-]*\w))?")


def in_options(text: str) -> str:
    """Return a text with fields of a plan spelled as the options that set them, for who typed options.

    >>> in_options("residency.transfers=sliced needs several ranks, such as mesh.data=2")
    '--transfers sliced needs several ranks, such as --mesh data=2'
    >>> in_options("leave perturbations.kept out, or residency.overlap=False")
    'leave --keep-perturbations out, or --no-overlap'
    """
    return re.sub(r"\b(batch|seq)=", r"--\1 ", _FIELD.sub(_option, text))


@contextmanager
def naming_options() -> Iterator[None]:
    """Spell the fields of a plan that a PlanError names as options (:func:`in_options`)."""
    try:
        yield
    except PlanError as error:
        hint = None if error.hint is None else in_options(error.hint)
        raise type(error)(in_options(error.message), hint=hint) from error


def _option(field: re.Match[str]) -> str:
    axis_type, name, value = AXES[field[1]], field[2], field[3]
    if axis_type.setting is not None:
        return f"{axis_type.setting.flag} {name}={value}"
    known = fields_of(axis_type).get(name)
    if known is None or not known.setting.flag:
        return field[0]  # no option sets it
    flag = known.setting.flag
    return {None: flag, "True": flag, "False": f"--no-{flag[2:]}"}.get(value, f"{flag} {value}")


def _without_usual_formats(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out formats of products and transfers that are the weights', so that the same plan has one spelling."""
    declared = _fields(data.get("weights")).get("dtype", "float32")
    usual = {}
    for axis, name in (("forward", "compute_dtype"), ("residency", "transfer_dtype")):
        fields = _fields(data.get(axis))
        if fields.get(name) == declared:
            usual[axis] = {**fields, name: None}
    return data | usual


def _fields(axis: object) -> dict[str, Any]:
    """Return the fields of an axis, built or not; none of what is no axis, which its type refuses."""
    return dict(axis) if isinstance(axis, dict | Axis) else {}
