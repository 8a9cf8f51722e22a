"""What a step sends, counted from its programs: activations, gradients and scalars, each apart from the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from zosim.program import Program
from zosim.program.instructions import Instruction
from zosim.program.operations import Collective, Scalar, Send
from zosim.program.program_set import ProgramSet


@dataclass(frozen=True)
class StepCounts:
    """What all ranks send in one step."""

    # num_activations, activation_bytes: messages that go forward across split points, and their expected bytes.
    num_activations: int = 0
    activation_bytes: int = 0
    # num_gradients, gradient_bytes: those that go back.
    num_gradients: int = 0
    gradient_bytes: int = 0
    num_scalars: int = 0  # losses that a rank made and another got, once for each that got it
    # What their exchange puts on wires, with counts of labels and with places of losses that others made.
    scalar_bytes: int = 0
    reduced_bytes: int = 0  # received in sums of gradients

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return self.activation_bytes + self.gradient_bytes + self.scalar_bytes + self.reduced_bytes

    def to_data(self) -> dict[str, int]:
        """Return the counts as JSON knows them."""
        return {**asdict(self), "size_bytes": self.size_bytes}


def step_counts(programs: ProgramSet) -> StepCounts:
    """Return what a step of all ranks sends.

    SparQ [1]_ counts ``P(M - 1)`` gradient scalars. A program sends losses, not their differences: one for each point
    that the last stage forwards, to each of the ``M - 1`` others.

    .. [1] SparQ, appendix C.3.
    """
    total: Counter[str] = Counter()
    for role, number in Counter(programs.roles).items():
        program = programs.programs[role]
        for instruction in program.step:
            for name, count in _counted(program, instruction).items():
                total[name] += number * count
    return StepCounts(**total)


def _counted(program: Program, instruction: Instruction) -> dict[str, int]:
    op, size = instruction.op, instruction.work.link_bytes
    if isinstance(op, Send):
        kind = "activation" if op.offset > 0 else "gradient"
        return {f"num_{kind}s": 1, f"{kind}_bytes": size}
    if isinstance(op, Collective) and op.function == "all_reduce":
        return {"reduced_bytes": size}
    if isinstance(op, Collective) and instruction.label == "exchange":
        return {"scalar_bytes": size}
    if isinstance(op, Scalar) and op.function == "pack_losses":
        return {"num_scalars": len(instruction.reads) * (program.process_groups["world"] - 1)}
    return {}
