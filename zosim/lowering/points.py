"""How weights come to an evaluation point: one state of them that walks where it lies, or a copy for each point."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from costmodel.model_spec import ParameterGroup
from costmodel.sweeps import perturb_work
from zosim.instructions import Access
from zosim.lowering.directions import SCALED, Directions
from zosim.lowering.listing import Listing
from zosim.operations import Perturb


class Leg(NamedTuple):
    """One perturbation of a query's way.

    Attributes
    ----------
    before, point : str
        Points that it leads from and to; empty for the unperturbed weights.
    scale : int
        Multiple of the direction.
    """

    before: str
    point: str
    scale: int


class Points:
    """Writes perturbations, and knows where the weights of each point lie.

    Parameters
    ----------
    listing : Listing
    directions : Directions
        Those of the same listing.
    """

    def __init__(self, listing: Listing, directions: Directions) -> None:
        self.layout = listing.layout
        self._listing = listing
        self._directions = directions
        self._plan = listing.plan
        self._perturbed = [point for point in self.layout.own_points if point]
        self._copies: dict[tuple[str, str], Access] = {}
        self._turn = 0

    @property
    def are_copies(self) -> bool:
        """Whether each point is written beside the weights, which evaluations leave alone."""
        return self._plan.weights.perturbation == "copies"

    def way(self, query: int) -> tuple[tuple[Leg, ...], ...]:
        """Return the perturbations of `query`, those together that one draw serves under a sweep.

        Weights in place go through all points, whoever forwards them, and back. Copies are made for this rank's own; where
        it has none, its directions are drawn if they are kept, or so that the step after can draw them again.
        """
        plus, minus = f"q{query}+", f"q{query}-"
        if self.are_copies:
            legs = (Leg("", plus, 1), Leg("", minus, -1))
            own = tuple(leg for leg in legs if leg.point in self._perturbed)
            is_recorded = self._plan.schedule.update == "delayed" and self._plan.directions.rng == "mezo"
            return (own,) if own or is_recorded or self._plan.directions.kept else ()
        if self._plan.estimator.difference == "central":
            return (Leg("", plus, 1),), (Leg(plus, minus, -2),), (Leg(minus, "", 1),)
        return (Leg("", plus, 1),), (Leg(plus, "", -1),)

    def go(self, groups: Iterable[ParameterGroup], segment: str, query: int, leg: Leg) -> None:
        """Write one perturbation of `groups`."""
        number = self._take_turn(segment, leg.point)
        for group in groups:
            place = self.layout.place(group, segment)
            read = self.layout.trainable(group, place, 0, leg.before)
            left = self.layout.trainable(group, place, 0, leg.point)
            if self.are_copies:
                left = self.layout.copy(group, segment, leg.point, number)
                self._copies[group.name, leg.point] = left
            self._perturb(group, segment, query, leg, read, left)

    def weights(self, group: ParameterGroup, segment: str, point: str) -> tuple[Access, ...]:
        """Return what a forward of `segment` at `point` reads of `group`."""
        place = self.layout.place(group, segment)
        if not (self.are_copies and point and group.num_trainable):
            return self.layout.weights(group, place, 0, point)
        return (*self.layout.frozen(group, place), self._copies[group.name, point])

    def leaves_changed(self, group: ParameterGroup) -> bool:
        """Whether a visit of a step leaves `group` in other bits than it came in."""
        return self.layout.is_delayed(group) or not self.are_copies

    def _take_turn(self, segment: str, point: str) -> int:
        """Return the number of the buffer that a copy goes into."""
        if self.layout.num_copies < 2 or not self.layout.takes_turns(segment):
            return 0
        if self.layout.is_swept:
            return self._perturbed.index(point) % self.layout.num_copies
        self._turn += 1
        return self._turn % self.layout.num_copies

    def _perturb(
        self, group: ParameterGroup, segment: str, query: int, leg: Leg, read: Access, left: Access
    ) -> None:
        direction = self._directions.held(group, query)
        is_fused = self._plan.directions.distribution == "rademacher" or direction.point.endswith(SCALED)
        label = "perturb" if leg.point else "restore"
        self._listing.emit(
            f"{group.name}/{label}[{leg.point or f'q{query}'}]",
            Perturb(group.name, leg.scale, query),
            self._listing.sweeps,
            label,
            segment,
            (read, direction),
            (left,),
            perturb_work(
                group.num_trainable,
                dtype=self._plan.weights.dtype,
                arithmetic="fused" if is_fused else "pieces",
            ),
        )
