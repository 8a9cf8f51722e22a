"""What options say of a first-order step."""

from __future__ import annotations

import enum

from topology.errors import PlanError
from zosim.applications.first_order.settings import PRESETS, FirstOrder
from zosim.options import axis


class FirstOrderName(enum.StrEnum):
    """Named settings of a first-order step."""

    SGD = "sgd"
    ADAM = "adam"
    AQ_SGD = "aq-sgd"


def no_first_order(num_microbatches: int = 1, schedule: str = "gpipe", num_samples: int = 1) -> None:
    """Refuse what is about a first-order step where none is asked for.

    Raises
    ------
    PlanError
    """
    stated = {
        f"--microbatches {num_microbatches}": num_microbatches != 1,
        f"--schedule {schedule}": schedule != "gpipe",
        f"--samples {num_samples}": num_samples != 1,
    }
    for option in (name for name, is_stated in stated.items() if is_stated):
        raise PlanError(f"{option} without --first-order", hint="such as --first-order sgd")


def first_order_of(
    name: FirstOrderName, num_microbatches: int = 1, schedule: str = "gpipe", num_samples: int = 1
) -> FirstOrder:
    """Return the first-order settings that options name."""
    preset = PRESETS[name]
    changed = {
        "num_microbatches": num_microbatches,
        "schedule": schedule,
        "num_kept_samples": num_samples if preset.num_kept_samples else 0,
    }
    return axis(FirstOrder, **(preset.model_dump() | changed))
