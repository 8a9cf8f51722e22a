"""What options say of a first-order step."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from topology.errors import PlanError
from zosim.applications.first_order.settings import PRESETS, FirstOrder
from zosim.options import axis


class FirstOrderName(enum.StrEnum):
    """Named settings of a first-order step."""

    SGD = "sgd"
    ADAM = "adam"
    AQ_SGD = "aq-sgd"


class ShardingName(enum.StrEnum):
    """What replicas share out."""

    NONE = "none"
    FULL = "full"


Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute", help="Blocks of the first-order step keep their input alone, and run forward again."
    ),
]
Sharding = Annotated[
    ShardingName,
    typer.Option(
        help="What replicas of the first-order step share out: nothing, or weights, gradients and the optimizer's state "
        "(ZeRO's third stage, FSDP)."
    ),
]
Foreach = Annotated[
    bool,
    typer.Option(
        "--foreach", help="Adam's update goes over all parameters operation by operation, as torch's does."
    ),
]


def no_first_order(**stated: object) -> None:
    """Refuse what is about a first-order step where none is asked for; `stated` is as in :func:`first_order_of`.

    Raises
    ------
    PlanError
    """
    usual = {"num_microbatches": 1, "schedule": "gpipe", "num_samples": 1, "sharding": ShardingName.NONE}
    for name, value in stated.items():
        if value != usual.get(name, False):
            option = "--" + {"num_microbatches": "microbatches", "num_samples": "samples"}.get(name, name)
            text = option if value is True else f"{option} {value}"
            raise PlanError(f"{text} without --first-order", hint="such as --first-order sgd")


def first_order_of(
    name: FirstOrderName,
    num_microbatches: int = 1,
    schedule: str = "gpipe",
    num_samples: int = 1,
    *,
    recompute: bool = False,
    sharding: ShardingName = ShardingName.NONE,
    foreach: bool = False,
) -> FirstOrder:
    """Return the first-order settings that options name.

    Raises
    ------
    PlanError
        If another optimizer than Adam is to go over all parameters at a time.
    """
    preset = PRESETS[name]
    if foreach and preset.optimizer != "adam":
        raise PlanError(f"--foreach with --first-order {name.value}", hint="only --first-order adam has it")
    changed = {
        "num_microbatches": num_microbatches,
        "schedule": schedule,
        "num_kept_samples": num_samples if preset.num_kept_samples else 0,
        "recompute": recompute,
        "sharding": sharding.value,
        "foreach": foreach,
    }
    return axis(FirstOrder, **(preset.model_dump() | changed))
