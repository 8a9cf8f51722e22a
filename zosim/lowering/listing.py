"""The list that a step is written into, and what writers of zeroth-order steps ask of the model."""

from __future__ import annotations

from costmodel.model_spec import ParameterGroup
from costmodel.work import Work
from zosim.instructions import Access, Instruction, Stream
from zosim.lowering.layout import Layout
from zosim.operations import Operation
from zosim.plans import Plan


class Instructions:
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
        count = self._named.get(name, 0) + 1
        self._named[name] = count
        unique = name if count == 1 else f"{name}#{count}"
        self.instructions.append(
            Instruction(unique, op, stream, label, segment, reads=reads, writes=writes, work=work)
        )


class Listing(Instructions):
    """Instructions of a zeroth-order step, and what its writers ask of the model.

    Parameters
    ----------
    plan : Plan
    rank : int
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__()
        self.plan = plan
        self.layout = Layout(plan, rank)
        self.model = plan.model

    @property
    def sweeps(self) -> Stream:
        """The stream that perturbs and updates: compute, which reads what it changes, unless that reads copies."""
        are_copies = self.plan.weights.perturbation == "copies"
        return Stream.DRAW if self.plan.directions.drawn_ahead and are_copies else Stream.COMPUTE

    def own(self, segment: str) -> tuple[ParameterGroup, ...]:
        """Return the groups that are updated with `segment`: a tied one with the last segment that reads it."""
        groups = self.model.groups_of(segment)
        return tuple(group for group in groups if self.layout.readers(group)[-1] == segment)

    def trainable(self, segment: str) -> tuple[ParameterGroup, ...]:
        """Return the groups of `segment` that are tuned."""
        return tuple(group for group in self.model.groups_of(segment) if group.num_trainable)

    def perturbed_in_place(self, segment: str) -> tuple[ParameterGroup, ...]:
        """Return those of them that are perturbed where they lie."""
        return tuple(g for g in self.trainable(segment) if not self.layout.gathers(g, segment))

    def offloaded(self, segment: str) -> tuple[ParameterGroup, ...]:
        """Return the groups of `segment` that live on the host."""
        return tuple(group for group in self.model.groups_of(segment) if self.layout.is_offloaded(group))
