"""What one rank of a plan holds and forwards, which all axes ask for, and the list that they write into.

The second of two stages, with half of the sequences:

>>> from costmodel import read_model_spec
>>> from zosim.plans import Mesh, Placement, Split
>>> axes = {"mesh": Mesh(data=2, stage=2), "split": Split(split_points=("block.9",))}
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",) * 4)
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=6, seq=16, placement=placement, **axes)
>>> rank = Rank(plan, number=1)
>>> rank.segments, rank.num_sequences, rank.is_first_stage
(('block.10', 'block.11', 'head'), 3, False)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from costmodel.formats.distributions import DISTRIBUTIONS, Distribution
from costmodel.models.forward import activation_bytes
from costmodel.models.model_spec import EMBED, HEAD, ModelSpec, ParamGroup
from costmodel.storage import DenseStorage
from costmodel.work import Work
from zosim.eval_points import EvalPoint
from zosim.lowering.buckets import alignment_of
from zosim.plans import Plan
from zosim.program.contents import BATCH, Hidden
from zosim.program.instructions import Access, Instruction, Stream
from zosim.program.operations import Operation


def is_embedding_or_head(segment: str) -> bool:
    """Whether `segment` is the embedding or the head."""
    return segment in (EMBED, HEAD)


@dataclass(frozen=True)
class Rank:
    """One rank of a plan."""

    plan: Plan
    number: int = 0

    @property
    def model(self) -> ModelSpec:
        """The model that is tuned."""
        return self.plan.model

    @cached_property
    def own_eval_points(self) -> tuple[EvalPoint, ...]:
        """Evaluation points that this rank forwards."""
        return self.plan.eval_points_of(self.number)

    @cached_property
    def number_of_own(self) -> dict[EvalPoint, int]:
        """Number of each of :attr:`own_eval_points`, counted from 0."""
        return {eval_point: number for number, eval_point in enumerate(self.own_eval_points)}

    @cached_property
    def num_sequences(self) -> int:
        """Sequences that this rank forwards at each of its points."""
        return len(self.plan.rows_of(self.number))

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank forwards at each of its points, padding included."""
        return self.num_sequences * self.plan.seq

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Segments that this rank runs."""
        return self.plan.segments_of(self.number)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.plan.mesh.coordinates(self.number).stage

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head."""
        return self.stage == self.plan.mesh.stage - 1

    @cached_property
    def alignment_bytes(self) -> int:
        """Multiples of this are where the tensors of this rank's parameters and perturbations start."""
        return alignment_of(self.plan)

    # -- parameter groups --------------------------------------------------------------------------------------

    @cached_property
    def param_groups(self) -> tuple[ParamGroup, ...]:
        """Parameter groups that this rank holds, in registration order."""
        own = set(self.segments)
        return tuple(group for group in self.model.param_groups if own & set(group.segments))

    def readers(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the segments of this rank that read `group`, in execution order."""
        return self._readers[group.name]

    @cached_property
    def _readers(self) -> dict[str, tuple[str, ...]]:
        # Worked out once: lowering asks for every group at every visit.
        own = frozenset(self.segments)
        return {group.name: tuple(s for s in group.segments if s in own) for group in self.model.param_groups}

    def updated_with(self, segment: str) -> tuple[ParamGroup, ...]:
        """Return the groups that are updated with `segment`: a tied one with the last segment that reads it."""
        param_groups = self.model.param_groups_of(segment)
        return tuple(group for group in param_groups if self.readers(group)[-1] == segment)

    def trainable(self, segment: str) -> tuple[ParamGroup, ...]:
        """Return the groups of `segment` that are tuned."""
        return tuple(group for group in self.model.param_groups_of(segment) if group.num_trainable)

    def perturbed_whole(self, segment: str) -> tuple[ParamGroup, ...]:
        """Return the tuned groups of `segment` that a perturbation writes as a whole.

        Others are read through gathered rows (:meth:`gathers`), or their perturbation is added in products (:meth:`has_side_path`).
        """
        return tuple(
            group
            for group in self.trainable(segment)
            if not (self.gathers(group, segment) or self.has_side_path(group))
        )

    def gathers(self, group: ParamGroup, segment: str) -> bool:
        """Whether `segment` reads `group` through gathered rows, because a later segment needs it unperturbed."""
        readers = self.readers(group)
        # A tied table is perturbed at its last reader. The embedding, which needs few of its rows, adds the perturbation to those.
        return (
            not self.is_full_pass and group.num_trainable > 0 and len(readers) > 1 and segment == readers[0]
        )

    @cached_property
    def storage(self) -> DenseStorage:
        """How parameters are stored, and perturbations beside them."""
        return self.plan.storage

    def has_side_path(self, group: ParamGroup) -> bool:
        """Whether `group` stays as it is at every point, and forwards add its perturbation: everything, where points are together."""
        return group.num_trainable > 0 and (self.storage.has_side_path(group) or self.is_batched)

    # -- what several axes look at -----------------------------------------------------------------------------

    @property
    def is_batched(self) -> bool:
        """Whether one forward is at all points of this rank."""
        return self.plan.perturbs_by_adapters

    @property
    def adds_factors(self) -> bool:
        """Whether forwards at all points are handed the factors of perturbations rather than perturbations of factors."""
        return self.is_batched and self.plan.perturbations.rank is not None

    @property
    def is_full_pass(self) -> bool:
        """Whether all parameters are at one point together."""
        return self.plan.is_full_pass

    def is_delayed(self, group: ParamGroup) -> bool:
        """Whether the update of `group` waits for its turn in the next step."""
        # Blocks alone, as in ZO2: embedding and head are updated when the step ends.
        return self.plan.schedule.update == "delayed" and not is_embedding_or_head(group.segments[0])

    @property
    def distribution(self) -> Distribution:
        """What perturbations are drawn from."""
        return DISTRIBUTIONS[self.plan.perturbations.distribution]

    def hidden(self, eval_point: EvalPoint, segment: str) -> Access:
        """Return the access to the hidden state that `segment` leaves at `eval_point`."""
        # One buffer for each point: what a segment leaves takes the place of what it read.
        return Access(f"hidden.{eval_point}", Hidden(segment, eval_point), 0, self.hidden_bytes(segment))

    def hidden_bytes(self, segment: str) -> int:
        """Return the bytes of what `segment` leaves at one point."""
        return activation_bytes(
            self.model,
            batch=self.num_sequences,
            seq=self.plan.seq,
            dtype=self.plan.compute_dtype,
            segment=segment,
        )

    def batch(self) -> Access:
        """Return the access to the batch."""
        # Tokens, attention mask and labels, in int64.
        return Access("batch", BATCH, 0, 3 * 8 * self.num_tokens)


class Listing:
    """Instructions of one part of one rank's program, in an order that would be right on a single stream."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._named: dict[str, int] = {}

    def emit(
        self,
        name: str,
        op: Operation,
        stream: Stream,
        label: str,
        segment: str,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        work: Work,
    ) -> None:
        """Add an instruction; a name that stands already is numbered."""
        # Such as a perturbation that is drawn twice in a step: edges name instructions, so names are unique.
        count = self._named.get(name, 0) + 1
        self._named[name] = count
        unique = name if count == 1 else f"{name}#{count}"
        self.instructions.append(
            Instruction(unique, op, stream, label, segment, reads=reads, writes=writes, work=work)
        )


class AxisWriter:
    """Writes what one axis means for a rank's step."""

    def __init__(self, rank: Rank, listing: Listing) -> None:
        self._rank = rank
        self._plan = rank.plan
        self._storage = rank.storage
        self._emit = listing.emit
