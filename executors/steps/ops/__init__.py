"""What each operation does: one home per operation, where an instruction becomes an action on buffers and tensors.

An instruction is resolved once, by its operation and its operands alone; what a step then calls is the action.
"""

from __future__ import annotations

from collections.abc import Callable

from executors.steps.ops.codec import BoundaryActions
from executors.steps.ops.context import Context
from executors.steps.ops.copy import Copies
from executors.steps.ops.exchange import Exchanges
from executors.steps.ops.forward import Forwards
from executors.steps.ops.operands import Action, Unfit
from executors.steps.ops.param_passes import ParamPasses
from executors.steps.ops.sample import Sampling
from topology.errors import ProgramError
from zosim.program.instructions import Instruction, Phase

__all__ = ["Action", "Actions", "Context"]


class Actions:
    """Makes actions out of one program's instructions.

    - `boundaries`: Counts what goes to other stages.
    - `param_passes`: Perturbs and updates.
    - `num_perturbations`: Perturbations per step.
    """

    def __init__(self, context: Context) -> None:
        self._name = context.program.name
        self.boundaries = BoundaryActions(context)
        copies, forwards = Copies(context), Forwards(context)
        exchanges, self.param_passes = Exchanges(context), ParamPasses(context)
        self.num_perturbations = self.param_passes.num_perturbations
        self._makers: dict[str, Callable[[Instruction], Action]] = {
            "load": forwards.load,
            "copy": copies.copy,
            "cast": copies.cast,
            "allocate": copies.allocate,
            "free": copies.free,
            "sample": Sampling(context).sample,
            "perturb": self.param_passes.perturb,
            "update": self.param_passes.update,
            "forward": forwards.forward,
            "scalar": exchanges.scalar,
            "collective": exchanges.collective,
            "encode": self.boundaries.encode,
            "decode": self.boundaries.decode,
            "send": self.boundaries.send,
            "recv": self.boundaries.recv,
        }

    def of(self, phase: Phase, instruction: Instruction) -> Action:
        """Return what does `instruction`. Raises ProgramError if its operands do not fit its operation."""
        try:
            return self._makers[instruction.op.type](instruction)
        except Unfit as unfit:
            raise ProgramError(
                f"program {self._name}: {phase}/{instruction.id} {unfit}",
                hint="correct its operands, or lower the plan again",
            ) from None
