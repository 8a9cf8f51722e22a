"""What actions ask of an instruction's operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executors.steps.frames import StepFrame
from zosim.program.contents import ParamGroupWeights, Perturbation, PerturbationFactors, PerturbationRows
from zosim.program.instructions import Access

Action = Callable[[StepFrame], None]
"""Does an instruction in the step whose numbers it is given."""


class Unfit(Exception):  # noqa: N818 - half a sentence that the caller completes
    """Says why an instruction's operands do not fit its operation."""


def location_of(access: Access) -> tuple[str, int]:
    """Return the name under which what lies at an access is kept."""
    return access.buffer, access.offset_bytes


def of_group(
    group: str,
    contents_type: type[ParamGroupWeights | Perturbation | PerturbationRows | PerturbationFactors],
    among: Sequence[Access],
) -> list[Access]:
    """Return the accesses to what is of a kind, and of a parameter group."""
    return [
        access
        for access in among
        if isinstance(access.what, contents_type) and access.what.param_group == group
    ]


def only(accesses: Sequence[Access], what: str) -> Access:
    """Return the only access. Raises Unfit if there are none or several."""
    if len(accesses) != 1:
        raise Unfit(f"needs exactly one {what}, but has {len(accesses)}")
    return accesses[0]
