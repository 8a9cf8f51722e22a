"""The ranks as a grid.

Four ranks, two shards of the batch times the two signs of a perturbation; rank 1 is the other sign of rank 0's shard:

>>> mesh = Mesh.parse("data=2,perturb=2")
>>> mesh.world_size, mesh.shared_by, mesh.coordinates(1)
(4, '2d', Coordinates(data=0, perturb=1, stage=0))

Shares of the batch that are in proportion to the speed of devices:

>>> mesh = Mesh.parse("data=5:3")
>>> mesh.data, mesh.rows_of(1, batch=8), mesh.describe()
(2, range(5, 8), 'data=5:3')

Stages are the innermost: ranks 0 and 1 hold one model between them.

>>> Mesh.parse("data=2,stage=2").pipelines
((0, 1), (2, 3))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import model_validator

from topology.errors import PlanError
from topology.limits import MAX_RANKS, Extent, Ranks, whole_number
from topology.validation import did_you_mean
from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


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
        Number of shards of the batch. All see the same perturbations, and exchange losses (DistZO2's DDP).
    perturb : int
        Number of parts of a step's evaluation points: 2 for the two signs of one perturbation (DistZO2's PertP), more to
        divide the perturbations, too.
    stage : int
        Number of stages of the model, one after the other: see :class:`~zosim.plans.Split`. Neighbouring ranks are neighbouring stages.
    inner : str
        Of the other two axes, the one along which neighbours differ. Only where ranks are joined by unlike links does
        it matter.
    num_sequences : tuple of int or None
        Number of sequences of each shard, as in ``data=5:3``; None for equal shards.
    """

    heading = "Placement"

    setting: ClassVar[Setting] = Setting(
        "--mesh",
        "Ranks on each mesh axis, outermost first, such as data=2,perturb=2 or stage=2; data=5:3 gives two ranks 5 and 3 sequences.",
        planned=True,
    )

    data: Annotated[Ranks, Setting(help="Set by --mesh.", planned=True)] = 1
    perturb: Annotated[Ranks, Setting(help="Set by --mesh.", planned=True)] = 1
    stage: Annotated[Ranks, Setting(help="Set by --mesh.", planned=True)] = 1
    inner: Annotated[Literal["perturb", "data"], Setting(help="Set by --mesh.", planned=True)] = "perturb"
    num_sequences: Annotated[
        tuple[Extent, ...] | None, Setting(help="Set by --mesh.", changes="numbers", planned=True)
    ] = None

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Return the mesh that a text such as ``data=2,perturb=2`` names, the outer axis first; stages are neighbours.

        Raises
        ------
        PlanError
            If an axis is unknown or named twice, or a size is no count.
        """
        known = ("data", "perturb", "stage")
        sizes: dict[str, int] = {}
        num_sequences: tuple[int, ...] | None = None
        for item in text.split(","):
            name, _, size = (part.strip() for part in item.partition("="))
            if name not in known:
                raise PlanError(f"--mesh {text}: {name!r} is not a mesh axis", hint=did_you_mean(name, known))
            if name in sizes:
                raise PlanError(f"--mesh {text} names {name} twice", hint="such as data=2,perturb=2")
            shares = [whole_number(part) or 0 for part in size.split(":")]
            if not all(shares) or (len(shares) > 1 and name != "data"):
                raise PlanError(
                    f"--mesh {text}: {item.strip()!r} has no size for {name}", hint="such as data=2,perturb=2"
                )
            if len(shares) > 1:
                num_sequences, number = tuple(shares), len(shares)
            else:
                (number,) = shares
            if number > MAX_RANKS:
                raise PlanError(f"--mesh {text} has {number} ranks, more than the maximum of {MAX_RANKS}")
            sizes[name] = number
        inner = (
            [name for name in sizes if name != "stage"][-1]
            if {"data", "perturb"} <= set(sizes)
            else "perturb"
        )
        # Every axis is set: a mesh is named as a whole, and one that is laid over another replaces it.
        return cls.model_validate(
            dict.fromkeys(known, 1) | sizes | {"inner": inner, "num_sequences": num_sequences}
        )

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield the mesh axes of `plan` that have more than one rank."""
        del plan
        if self.world_size > 1:
            yield self.describe()

    @model_validator(mode="after")
    def _has_not_too_many(self) -> Mesh:
        if self.world_size > MAX_RANKS:
            raise PlanError(f"a mesh of {self.world_size} ranks exceeds the maximum of {MAX_RANKS}")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.perturb * self.stage

    @property
    def is_staged(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self.stage > 1

    @property
    def shared_by(self) -> str:
        """How forwards are shared out: ``"ddp"`` by sequences, ``"pertp"`` by evaluation points, ``"2d"`` by both, ``""`` not."""
        return {(False, False): "", (True, False): "ddp", (False, True): "pertp", (True, True): "2d"}[
            self.data > 1, self.perturb > 1
        ]

    def most_sequences(self, batch: int) -> int:
        """Return the most sequences of a batch of `batch` that one rank forwards."""
        return len(self.rows_of(0, batch)) if self.num_sequences is None else max(self.num_sequences)

    def rows_of(self, shard: int, batch: int) -> range:
        """Return the sequences of a batch that are in a shard: neighbours."""
        if self.num_sequences is None:
            return share(batch, self.data, shard)
        begin = sum(self.num_sequences[:shard])
        return range(begin, begin + self.num_sequences[shard])

    def most_eval_points(self, num_eval_points: int) -> int:
        """Return the most of `num_eval_points` evaluation points that one rank forwards."""
        return -(-num_eval_points // self.perturb)

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold one model between them, in the order of their stages."""
        return _pipelines(self.world_size, self.stage)

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
        sizes = {name: str(size) for name in names if (size := getattr(self, name)) > 1}
        if self.num_sequences is not None:
            sizes["data"] = ":".join(map(str, self.num_sequences))
        return ",".join(f"{name}={size}" for name, size in sizes.items())

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what `plan` has too few of for the mesh: devices, sequences, evaluation points or split points."""
        if self.world_size != plan.placement.world_size:
            yield (
                f"a mesh of data={self.data}, perturb={self.perturb}, stage={self.stage} needs {self.world_size} ranks, not "
                + str(plan.placement.world_size),
                "name one device per rank, or change the mesh",
            )
        yield from self._conflicts_of_shares(plan)
        if self.data > plan.batch:
            yield (
                (
                    f"a batch of {plan.batch} is too small for mesh.data={self.data}: some rank would have no "
                    "sequence"
                ),
                f"use mesh.data={plan.batch} or less, or a larger batch",
            )
        if self.perturb > len(plan.eval_points):
            yield (
                (
                    f"mesh.perturb={self.perturb} is more than the {len(plan.eval_points)} evaluation points of a step: "
                    "some rank would have none"
                ),
                f"use mesh.perturb={len(plan.eval_points)} or less, or more perturbations",
            )
        if self.stage > 1 and len(plan.split.split_points) != self.stage - 1:
            yield (
                (
                    f"mesh.stage={self.stage} needs {self.stage - 1} split points, but {len(plan.split.split_points)} are "
                    "given"
                ),
                "set them with split.split_points",
            )

    def _conflicts_of_shares(self, plan: Plan) -> Iterator[Conflict]:
        shares = self.num_sequences
        if shares is None:
            return
        named = f"mesh.num_sequences={list(shares)}"
        if len(shares) != self.data:
            yield (
                f"{named} has {len(shares)} shares, but mesh.data={self.data}",
                "give one for each data shard",
            )
        elif self.data == 1:
            yield f"{named} is a share of the batch, but there is one data shard", "leave it out"
        if sum(shares) != plan.batch:
            yield (
                f"the shares {':'.join(map(str, shares))} of the mesh have {sum(shares)} sequences, but the batch has {plan.batch}",
                f"use shares that sum to {plan.batch}",
            )


def share(count: int, num_parts: int, part: int) -> range:
    """Return a part of ``range(count)``, the first parts longer by one where they cannot be alike."""
    each, longer = divmod(count, num_parts)
    begin = part * each + min(part, longer)
    return range(begin, begin + each + (part < longer))


@lru_cache(64)
def _pipelines(world_size: int, stage: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + stage)) for first in range(0, world_size, stage))
