"""Where to split a model into stages: from the work of its segments and what would cross, before anything is lowered.

A point passes through all stages and boundaries once; the slowest of them holds up every further point; and a stage has
its part of the perturbations to draw, apply and undo besides. Whatever overlaps, a step takes at least

    ``max(max_s u_s + K f_s, F + X + (K - 1) max_s f_s)``

of ``K`` points, with the seconds ``f_s`` of stage ``s`` for one point, ``F`` their sum, ``u_s`` what it does once, and
``X`` the messages of one point. Split points are the cheapest by this bound, and of those that are as cheap the ones whose
fullest stage is the least full: the cheapest split points up to each place in the model are known from the cheapest up to
the places before it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import le

import numpy as np
from numpy.typing import NDArray

from costmodel.estimate import estimate
from costmodel.formats import FORMATS
from costmodel.formats.codec_time import (
    BoundaryLink,
    codec_profile_of,
    codec_terms,
    decode_work,
    encode_work,
    fastest_transfer,
)
from costmodel.formats.codecs import (
    ENCODINGS,
    CodecSpec,
    codec_spec,
    message_bytes,
)
from costmodel.formats.symbols import SymbolStatistics, boundary_statistics
from costmodel.models.model_spec import BACK, FRONT, HEAD, ModelSpec, block_index, block_segment
from zosim.hardware.machine import Hop, Machine
from zosim.hardware.machines import KnownPaths
from zosim.lowering import unordered
from zosim.lowering.perturbations import num_sampled, passing_work
from zosim.lowering.schedule import StepWriter
from zosim.planning.split_options import SplitOptions, sparsest_near_the_middle
from zosim.plans import INSIDE, ForwardPass, Mesh, Plan, Split, fields_of, last_before
from zosim.program.instructions import Stream
from zosim.program.operations import Recv, Send
from zosim.simulators.shortening import shortened, shortest

# Split points of each kind (inside blocks, between them) that are worth a simulation, where there is one split point.
_NUM_TRIED = 2
LOSS_CHUNKS: tuple[int, ...] = fields_of(ForwardPass)["loss_chunk_tokens"].tried
"""Numbers of tokens that a loss is tried to be taken of at a time, the smallest first."""
# Bounds that differ by less, relative, are one.
_SAME = 1e-9

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class PlacedPipeline:
    """What split points are ranked for: the first pipeline of a mesh on its devices, and what one device would do alone."""

    mesh: Mesh
    machines: tuple[Machine, ...]
    plan: Plan

    @property
    def num_sequences(self) -> int:
        """Sequences that the fullest pipeline forwards."""
        return self.mesh.most_sequences(self.plan.batch)

    @property
    def num_eval_points(self) -> int:
        """Evaluation points that the fullest pipeline forwards."""
        return self.mesh.most_eval_points(self.plan.estimator.num_eval_points)

    @property
    def num_stages(self) -> int:
        """Parts that the model is split into."""
        return len(self.machines)


@dataclass(frozen=True)
class SegmentSeconds:
    """What each segment of the model with every block split takes on one device."""

    forward: Seconds  # for one evaluation point
    once: Seconds  # for all else in a step: draws, perturbations, updates
    skip: Seconds  # for passing over its perturbations, as a later stage does; 0 where none has to
    weight_bytes: Seconds


def in_chunks(plan: Plan, num_tokens: int) -> Plan:
    """Return a plan whose loss is taken of so many tokens at a time."""
    forward = plan.forward.model_copy(update={"loss_chunk_tokens": num_tokens})
    return plan.model_copy(update={"forward": forward})


class Costs:
    """Seconds of a model's segments, worked out once for as many sequences on devices of one type."""

    def __init__(self, model: ModelSpec, split_options: SplitOptions) -> None:
        self.model = model
        self.split_options = split_options
        self.paths = KnownPaths()
        self.alone: dict[str, PlacedPipeline] = {}
        """One rank on each device that was asked about."""
        self._known: dict[Hashable, SegmentSeconds] = {}

    @cached_property
    def whole(self) -> ModelSpec:
        """The model with every block split that can be."""
        split_model, model = self.split_options.split_model, self.model
        return split_model(tuple(range(model.num_blocks))) if split_model and model.splits_inside else model

    @cached_property
    def names(self) -> list[str]:
        """All split points of the model, in its order."""
        split_point = set(self.whole.split_blocks)
        blocks = range(self.model.num_blocks)
        return [
            block_segment(index) + part
            for index in blocks
            for part in ((INSIDE, "") if index in split_point else ("",))
        ]

    @cached_property
    def ends(self) -> dict[str, int]:
        """For every split point, how many of the whole model's segments are before it."""
        position = {segment: number for number, segment in enumerate(self.whole.segments)}
        return {split_point: position[last_before(split_point, position)] + 1 for split_point in self.names}

    def seconds(self, pipeline: PlacedPipeline, stage: int = 0) -> SegmentSeconds:
        """Return the seconds of every segment on the device of a stage."""
        # Meshes differ in stages and hops; what a segment takes, in sequences alone.
        machine = pipeline.machines[stage]
        key = (id(machine.profile), pipeline.num_sequences, pipeline.plan.low_bits)
        if key not in self._known:
            self._known[key] = self._worked_out(pipeline, machine)
        return self._known[key]

    def _worked_out(self, pipeline: PlacedPipeline, machine: Machine) -> SegmentSeconds:
        small = self._small
        plan = pipeline.plan.model_copy(update={"model": small, "batch": pipeline.num_sequences})
        program, num_eval_points = unordered(plan), len(plan.eval_points)
        forward: dict[str, float] = defaultdict(float)
        once: dict[str, float] = defaultdict(float)
        for item in program.step:
            # Copies overlap, messages are counted at boundaries.
            if item.stream == Stream.COMPUTE:
                seconds = forward if item.label == "forward" else once
                seconds[item.segment] += machine.activity(program, item).seconds
        if plan.forward.loss_chunk_tokens is None:
            # The loss may be taken in chunks, of which there is a fastest number.
            chunked = [in_chunks(plan, count) for count in LOSS_CHUNKS if count < plan.tokens_per_step]
            least_s = min(
                (estimate(StepWriter(each).loss_work(), machine.profile).seconds for each in chunked),
                default=inf,
            )
            forward[HEAD] = min(forward[HEAD], num_eval_points * least_s)
        # Blocks that were left out are like the last of those that were not.
        like = [_standing_for(segment, small) for segment in self.whole.segments]
        sampled = [
            sum(
                num_sampled(group, plan.perturbations)
                for group in self.whole.param_groups_of(segment)
                if group.segments[0] == segment
            )
            for segment in self.whole.segments
        ]
        stored = [
            sum(plan.storage.nbytes(group) for group in self.whole.param_groups_of(segment))
            for segment in self.whole.segments
        ]
        # A generator passes over the numbers of every stage before, once for each perturbation.
        works = [passing_work(number, plan.perturbations, plan.storage.sampling_format) for number in sampled]
        skips = [
            plan.estimator.num_perturbations * estimate(work, machine.profile).seconds
            if work.num_skipped
            else 0.0
            for work in works
        ]
        return SegmentSeconds(
            np.array([forward[segment] / num_eval_points for segment in like]),
            np.array([once[segment] for segment in like]),
            np.array(skips),
            np.array(stored, dtype=np.float64),
        )

    @cached_property
    def _small(self) -> ModelSpec:
        """A model of two blocks, split as the whole is, where blocks are alike; else the whole."""
        split_model, model = self.split_options.split_model, self.model
        if shortest(model) is model:
            return self.whole
        return shortened(split_model((0, 1)) if split_model and model.splits_inside else model)


def _standing_for(segment: str, small: ModelSpec) -> str:
    if segment in small.segments:
        return segment
    end = next((part for part in (FRONT, BACK) if segment.endswith(part)), "")
    return block_segment(min(block_index(segment), small.num_blocks - 1)) + end


@dataclass(frozen=True)
class BoundedSplitPoints:
    """Split points, and the seconds that a step takes at least with them."""

    split_points: tuple[str, ...]
    bound_s: float


class Ranking:
    """Split points of one model on one site, best first (`costs`: shared among sites of one model)."""

    def __init__(
        self, pipeline: PlacedPipeline, split_options: SplitOptions, costs: Costs | None = None
    ) -> None:
        self._pipeline = pipeline
        self._split_options = split_options
        self._costs = costs or Costs(pipeline.plan.model, split_options)
        self._known_boundaries: dict[str, tuple[float, float, float]] = {}

    @property
    def plan(self) -> Plan:
        """What one device would do alone."""
        return self._pipeline.plan

    def of(self, plan: Plan) -> Ranking:
        """Return the ranking where one device alone would do as another plan says."""
        return (
            self
            if plan is self.plan
            else Ranking(replace(self._pipeline, plan=plan), self._split_options, self._costs)
        )

    def best(self, limits_bytes: Sequence[float] = ()) -> list[tuple[str, ...]]:
        """Return the split points worth a simulation: those asked for, or the best inside blocks and between them, and SparQ's own choice.

        None of their stages has more bytes of weights than the limit of each, where that is possible.
        """
        if self._split_options.split_points:
            return [self._split_options.split_points]
        num_boundaries = self._pipeline.num_stages - 1
        inside = [name for name in self._costs.names if name.endswith(INSIDE)]
        between = [name for name in self._costs.names if not name.endswith(INSIDE)]
        candidates = [
            split_points
            for names in (between, inside)
            for split_points in self._best_of(names, num_boundaries, limits_bytes)
        ]
        # Several split points may be of both kinds. Those of one kind are simulated all the same: a codec does other things inside a block than between.
        if num_boundaries > 1:
            candidates += self._best_of(self._costs.names, num_boundaries, limits_bytes)
        candidates.append(
            sparsest_near_the_middle(self._costs.names, self._split_options.densities, num_boundaries + 1)
        )
        return [
            split_points for split_points in dict.fromkeys(candidates) if len(split_points) == num_boundaries
        ]

    def best_of_all(self, limits_bytes: Sequence[float] = ()) -> BoundedSplitPoints:
        """Return the best split points of any kind, of whose stages none has more bytes of weights, if there are any."""
        if self._split_options.split_points:
            return BoundedSplitPoints(
                self._split_options.split_points, self.bound_s(self._split_options.split_points)
            )
        split_points = self._spread(self._costs.names, self._pipeline.num_stages - 1, limits_bytes)
        return BoundedSplitPoints(split_points, self.bound_s(split_points) if split_points else np.inf)

    def _best_of(
        self, names: Sequence[str], num_boundaries: int, limits_bytes: Sequence[float]
    ) -> list[tuple[str, ...]]:
        if len(names) < num_boundaries:
            return []
        if num_boundaries == 1:
            alone: list[tuple[str, ...]] = [(name,) for name in names]
            fitting = [each for each in alone if self.fits(each, limits_bytes)]
            return sorted(fitting or alone, key=self.bound_s)[:_NUM_TRIED]
        return [self._spread(names, num_boundaries, limits_bytes) or self._spread(names, num_boundaries)]

    def _spread(
        self, names: Sequence[str], num_boundaries: int, limits_bytes: Sequence[float] = ()
    ) -> tuple[str, ...]:
        """Return the split points of least bound; none where no stages keep to the limit."""
        if len(names) < num_boundaries:
            return ()
        # Boundary by boundary, the cheapest way to each place is kept, and from where it came.
        tables, limits = self._tables(names), limits_bytes or [np.inf] * (num_boundaries + 1)
        # Places between which stages lie: the model's beginning, the split points, its end.
        table, last = tables[0], len(names) + 1
        # What a stage's device takes longer for a point than the first stage's would.
        later = [each.forward_s - table.forward_s for each in tables]
        busy = [
            np.where(each.weight_bytes <= limit, each.busy_s, np.inf)
            for each, limit in zip(tables, limits, strict=True)
        ]
        # The cheapest split points up to each place: the fullest stage, all messages, the slowest point.
        cheapest = [(busy[0][0].copy(), table.boundary_s.copy(), table.eval_point_s[0].copy())]
        before: list[NDArray[np.intp]] = []
        for stage in range(1, num_boundaries + 1):
            most, sent, slowest = cheapest[-1]
            most = np.maximum(most[:, None], busy[stage])
            sent = sent[:, None] + table.boundary_s[None, :] + later[stage]
            slowest = np.maximum(slowest[:, None], tables[stage].eval_point_s)
            seconds = np.maximum(most, table.total_s + sent + (self._pipeline.num_eval_points - 1) * slowest)
            # Every stage ends behind the one before; a point of the model is entered from a split point.
            seconds[np.arange(last + 1)[:, None] >= np.arange(last + 1)[None, :]] = np.inf
            seconds[0] = np.inf
            # What the bound does not tell apart, the fullest stage does: it ends last what no other stage waits for.
            is_cheapest = seconds <= seconds.min(axis=0) * (1 + _SAME)
            chosen = np.argmin(np.where(is_cheapest, most, np.inf), axis=0)
            at = chosen, np.arange(last + 1)
            # Places that so many split points cannot reach, or only with a stage that is too large.
            is_reached = np.isfinite(seconds[at])
            cheapest.append((np.where(is_reached, most[at], np.inf), sent[at], slowest[at]))
            before.append(chosen)
        if not np.isfinite(cheapest[-1][0][last]):
            return ()
        boundaries: list[int] = [last]
        for chosen in reversed(before):
            boundaries.append(int(chosen[boundaries[-1]]))
        return tuple(names[boundary - 1] for boundary in reversed(boundaries[1:]))

    def _tables(self, names: Sequence[str]) -> list[_CostTable]:
        """Return what each stage costs on its device."""
        made: dict[int, _CostTable] = {}
        for stage, machine in enumerate(self._pipeline.machines):
            if id(machine.profile) not in made:
                made[id(machine.profile)] = self._table(names, stage)
        return [made[id(machine.profile)] for machine in self._pipeline.machines]

    def _table(self, names: Sequence[str], stage: int = 0) -> _CostTable:
        seconds, num_eval_points = self._costs.seconds(self._pipeline, stage), self._pipeline.num_eval_points
        # Sums up to each place, whose differences are what lies between two.
        ends = np.array([0, *(self._costs.ends[name] for name in names), len(seconds.forward)])
        boundaries = np.array(
            [(0.0, 0.0, 0.0), *(self._boundary_seconds(name) for name in names), (0.0,) * 3]
        )
        encode, transfer, decode = boundaries.T
        forward, once, skip, stored = (
            np.concatenate([[0.0], np.cumsum(column)])[ends]
            for column in (seconds.forward, seconds.once, seconds.skip, seconds.weight_bytes)
        )
        own = forward[None, :] - forward[:, None] + decode[:, None] + encode[None, :]
        # A stage skips the numbers of all stages before it.
        busy = once[None, :] - once[:, None] + skip[:, None] + num_eval_points * own
        return _CostTable(
            np.maximum(busy, num_eval_points * transfer[None, :]),
            np.maximum(own, transfer[None, :]),
            boundaries.sum(1),
            stored[None, :] - stored[:, None],
            forward[None, :] - forward[:, None],
            float(seconds.forward.sum()),
        )

    def bound_s(self, split_points: Sequence[str]) -> float:
        """Return the seconds that a step takes at least."""
        stages = list(
            zip(self._tables(split_points), itertools.pairwise(range(len(split_points) + 2)), strict=True)
        )
        busy_s = max(table.busy_s[span] for table, span in stages)
        eval_point_s = max(table.eval_point_s[span] for table, span in stages)
        sent_s = sum(table.forward_s[span] for table, span in stages) + stages[0][0].boundary_s.sum()
        return float(max(busy_s, sent_s + (self._pipeline.num_eval_points - 1) * eval_point_s))

    def least_s(self, split_points: Sequence[str]) -> float:
        """Return the seconds that forwards and messages alone take, however perturbations are sampled and applied."""
        num_segments, num_eval_points = len(self._costs.whole.segments), self._pipeline.num_eval_points
        ends = [0, *(self._costs.ends[name] for name in split_points), num_segments]
        forwards = [
            float(self._costs.seconds(self._pipeline, stage).forward[begin:end].sum())
            for stage, (begin, end) in enumerate(itertools.pairwise(ends))
        ]
        sent_s = sum(sum(self._boundary_seconds(name)) for name in split_points)
        return sum(forwards) + sent_s + (num_eval_points - 1) * max(forwards)

    def blockwise_s(self, split_points: Sequence[str]) -> float:
        """Return the seconds that forwards alone take where each block is at all points before the next one.

        The last block of a stage, which sends, comes behind all the others.
        """
        whole, num_eval_points = self._costs.whole, self._pipeline.num_eval_points
        ends = [0, *(self._costs.ends[name] for name in split_points)]
        last = 2 if whole.split_blocks else 1
        stages = [
            *((begin, max(begin, end - last)) for begin, end in itertools.pairwise(ends)),
            (ends[-1], len(whole.segments)),
        ]
        return num_eval_points * sum(
            float(self._costs.seconds(self._pipeline, stage).forward[begin:end].sum())
            for stage, (begin, end) in enumerate(stages)
        )

    def weight_bytes(self, split_points: Sequence[str]) -> list[float]:
        """Return the weights of every stage."""
        table = self._table(split_points)
        return [float(table.weight_bytes[span]) for span in itertools.pairwise(range(len(split_points) + 2))]

    def fits(self, split_points: Sequence[str], limits_bytes: Sequence[float] = ()) -> bool:
        """Whether the weights of every stage are within its limit."""
        return not limits_bytes or all(map(le, self.weight_bytes(split_points), limits_bytes))

    def split(self, split_points: tuple[str, ...]) -> Split:
        """Return where and how the model is split."""
        codec, residual_codec = self._split_options.codecs
        inside = [split_point for split_point in split_points if split_point.endswith(INSIDE)]
        activation = self.codec_for(codec, inside, residual=False) if inside else CodecSpec()
        stream = self.codec_for(residual_codec, split_points, residual=True)
        known = [self._split_options.symbols(split_point, activation, stream) for split_point in split_points]
        return Split(
            split_points=split_points,
            codec=activation.name,
            residual_codec=stream.name,
            densities=tuple(each for each in known if each is not None),
        )

    def codec_for(self, name: str, split_points: Sequence[str], *, residual: bool) -> CodecSpec:
        """Return the codec of a name; one that leaves the encoding open with what is fastest over the link."""
        spec = codec_spec(name)
        # A name with an encoding leaves nothing to choose.
        if spec.bits is None or set(name.split(":")) & {*ENCODINGS, "smallest"}:
            return spec
        # One encoding for all split points: what is fastest where most is sent.
        shape, stats = max(
            (self._tensor(split_point, spec, residual=residual) for split_point in split_points),
            key=lambda tensor: tensor[1].entropy_bits * tensor[1].num_elements,
        )
        hop, values = self._encoded_hop, self._pipeline.machines[0].profile.values()
        link = BoundaryLink(hop.bandwidth_bytes_per_s, codec_profile_of(values), hop.latency_s)
        return fastest_transfer(spec, shape, self._element_bytes, stats, link).spec

    def _tensor(
        self, split_point: str, spec: CodecSpec, *, residual: bool
    ) -> tuple[tuple[int, ...], SymbolStatistics]:
        """Return the shape of the residual stream or of the activation at a split point, and its symbols as they are known."""
        model, other = self._pipeline.plan.model, CodecSpec()
        width = model.hidden_size if residual else model.intermediate_size
        shape = self._pipeline.num_sequences, self._pipeline.plan.seq, width
        known = self._split_options.symbols(split_point, *((other, spec) if residual else (spec, other)))
        is_second = residual and split_point.endswith(INSIDE)
        return shape, boundary_statistics(known, shape, bits=spec.bits or 1, has_side_path=is_second)

    def _boundary_seconds(self, split_point: str) -> tuple[float, float, float]:
        """Return the seconds in which one message is encoded, sent and decoded."""
        known, codecs = self._split_options.densities.get(split_point, 1.0), self._split_options.codecs
        # Split points of one kind and density take the same.
        key = f"{split_point.endswith(INSIDE)} {known}" if isinstance(known, float) else split_point
        if key in self._known_boundaries:
            return self._known_boundaries[key]
        profile = self._pipeline.machines[0].profile
        values, device_type, width = profile.values(), profile.device_type, self._element_bytes
        encode_s = decode_s = size = 0.0
        inner = [(codecs[0], False)] if split_point.endswith(INSIDE) else []
        for name, residual in (*inner, (codecs[1], True)):
            spec = self.codec_for(name, (split_point,), residual=residual)
            shape, stats = self._tensor(split_point, spec, residual=residual)
            size += message_bytes(spec, shape, width, stats)
            encode, decode = (of(spec, shape, width, stats) for of in (encode_work, decode_work))
            encode_s += sum(codec_terms(encode, values, device_type).values())
            decode_s += sum(codec_terms(decode, values, device_type).values())
        # Encoded messages pass through host memory, plain ones go from device to device.
        hop = self._encoded_hop if self._split_options.is_lossy else self._plain_hop
        self._known_boundaries[key] = encode_s, hop.latency_s + size / hop.bandwidth_bytes_per_s, decode_s
        return self._known_boundaries[key]

    @cached_property
    def _plain_hop(self) -> Hop:
        """The slowest hop between neighbouring stages' devices."""
        return _slowest(machine.channels for machine in self._pipeline.machines)

    @cached_property
    def _encoded_hop(self) -> Hop:
        """The slowest hop between neighbouring stages, of what a codec leaves on the host."""
        return _slowest(machine.host_channels or machine.channels for machine in self._pipeline.machines)

    @property
    def _element_bytes(self) -> int:
        plan = self._pipeline.plan
        return max(FORMATS[plan.compute_dtype].element_bytes, FORMATS[plan.storage_dtype].element_bytes)


def _slowest(channels: Iterable[Mapping[Send | Recv, Hop]]) -> Hop:
    return min((hop for hops in channels for hop in hops.values()), key=lambda hop: hop.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class _CostTable:
    """What stages cost between any two places of the model: its beginning, the split points, its end.

    Attributes
    ----------
    busy_s, eval_point_s, weight_bytes, forward_s : array of shape (num_boundaries, num_boundaries)
        Of a stage from the one place to the other: seconds of a step, seconds for one evaluation point, its weights, and
        seconds of forwards alone.
    boundary_s : array of shape (num_boundaries,)
        Of one message across each place; 0 at both ends.
    """

    busy_s: Seconds
    eval_point_s: Seconds
    boundary_s: Seconds
    weight_bytes: Seconds
    forward_s: Seconds
    total_s: float  # of one point through the whole model
