"""What the segments of a model take in a step on one device, for :mod:`zosim.planning.cut_search`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.estimate import estimate
from costmodel.low_bits import stored_bytes
from costmodel.model_spec import BACK, FRONT, ModelSpec, block_index, block_segment
from zosim.engines.shortening import shortened, shortest
from zosim.hardware.machine import Machine
from zosim.instructions import Stream
from zosim.lowering import unordered
from zosim.lowering.directions import num_drawn, passing_work
from zosim.lowering.rank import Rank
from zosim.planning.cuts import Cutting
from zosim.plans import INSIDE, Mesh, Plan, last_before

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class CutSite:
    """What cuts are ranked for: the first pipeline of a mesh on its devices, and what one device would do alone."""

    mesh: Mesh
    machines: tuple[Machine, ...]
    plan: Plan

    @property
    def num_sequences(self) -> int:
        """Sequences that the fullest pipeline forwards."""
        return self.mesh.most_sequences(self.plan.batch)

    @property
    def num_points(self) -> int:
        """Evaluation points that the fullest pipeline forwards."""
        return self.mesh.most_points(self.plan.estimator.num_points)

    @property
    def num_stages(self) -> int:
        """Parts that the model is cut into."""
        return len(self.machines)


@dataclass(frozen=True)
class SegmentSeconds:
    """What each segment of the model with every block cut takes on one device.

    Attributes
    ----------
    forward : numpy.ndarray
        For one evaluation point.
    once : numpy.ndarray
        For all else in a step: draws, perturbations, updates.
    walk : numpy.ndarray
        For passing over its directions, as a later stage does; 0 where none has to.
    weight_bytes : numpy.ndarray
    """

    forward: Seconds
    once: Seconds
    walk: Seconds
    weight_bytes: Seconds


class Costs:
    """Seconds of a model's segments, worked out once for as many sequences on devices of one kind."""

    def __init__(self, model: ModelSpec, cutting: Cutting) -> None:
        self.model = model
        self.cutting = cutting
        self._known: dict[Hashable, SegmentSeconds] = {}

    @cached_property
    def whole(self) -> ModelSpec:
        """The model with every block cut that can be."""
        cut_model, model = self.cutting.cut_model, self.model
        return model if cut_model is None else cut_model(tuple(range(model.num_blocks)))

    @cached_property
    def names(self) -> list[str]:
        """All cuts of the model, in its order."""
        cut = set(self.whole.cut_blocks)
        blocks = range(self.model.num_blocks)
        return [
            block_segment(index) + part
            for index in blocks
            for part in ((INSIDE, "") if index in cut else ("",))
        ]

    @cached_property
    def ends(self) -> dict[str, int]:
        """For every cut, how many of the whole model's segments are before it."""
        place = {segment: number for number, segment in enumerate(self.whole.segments)}
        return {cut: place[last_before(cut, place)] + 1 for cut in self.names}

    def seconds(self, site: CutSite) -> SegmentSeconds:
        """Return the seconds of every segment on the site's first device."""
        key = (id(site.machines[0].profile), site.num_sequences)
        if key not in self._known:
            self._known[key] = self._worked_out(site)
        return self._known[key]

    def _worked_out(self, site: CutSite) -> SegmentSeconds:
        small = self._small
        plan = site.plan.model_copy(update={"model": small, "batch": site.num_sequences})
        program, machine = unordered(plan), site.machines[0]
        forward: dict[str, float] = defaultdict(float)
        once: dict[str, float] = defaultdict(float)
        for item in program.step:
            if item.stream == Stream.COMPUTE:
                seconds = forward if item.label == "forward" else once
                seconds[item.segment] += machine.activity(program, item).seconds
        # Blocks that were left out are like the last of those that were not.
        like = [_standing_for(segment, small) for segment in self.whole.segments]
        points = len(plan.points)
        drawn = [
            sum(
                num_drawn(group, plan.directions)
                for group in self.whole.groups_of(segment)
                if group.segments[0] == segment
            )
            for segment in self.whole.segments
        ]
        stored = [
            sum(
                stored_bytes(group, plan.coding, plan.storage_dtype)
                for group in self.whole.groups_of(segment)
            )
            for segment in self.whole.segments
        ]
        return SegmentSeconds(
            np.array([forward[segment] / points for segment in like]),
            np.array([once[segment] for segment in like]),
            np.array([_walk_s(number, site) for number in drawn]),
            np.array(stored, dtype=np.float64),
        )

    @cached_property
    def _small(self) -> ModelSpec:
        """A model of two blocks, cut as the whole is, where blocks are alike; else the whole."""
        cut_model, model = self.cutting.cut_model, self.model
        if shortest(model) is model:
            return self.whole
        return shortened(model if cut_model is None else cut_model((0, 1)))


def _standing_for(segment: str, small: ModelSpec) -> str:
    if segment in small.segments:
        return segment
    end = next((part for part in (FRONT, BACK) if segment.endswith(part)), "")
    return block_segment(min(block_index(segment), small.num_blocks - 1)) + end


def _walk_s(num_elements: int, site: CutSite) -> float:
    """Return the seconds in which a generator passes over so many numbers, for every query."""
    work = passing_work(num_elements, site.plan.directions, Rank(site.plan).draw_format)
    if not work.num_skipped:
        return 0.0
    return site.plan.estimator.num_queries * estimate(work, site.machines[0].profile).seconds
