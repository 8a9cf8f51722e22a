"""What options say of a first-order step."""

from __future__ import annotations

from typing import Any, Literal

from topology.errors import PlanError
from zosim.applications.first_order.settings import AQ_SGD, PRESETS, FirstOrder
from zosim.options import config_of
from zosim.plans.setting import fields_of

FirstOrderName = Literal["sgd", "adam", "aq-sgd"]
"""Named settings of a first-order step."""


def first_order_of(name: FirstOrderName | None, **settings: Any) -> FirstOrder | None:
    """Return the settings of the first-order step that is asked for; None where none is.

    Raises
    ------
    PlanError
        If there is something to be otherwise and no step, or another optimizer than Adam is to go over all parameters at a time.

    Examples
    --------
    >>> first_order_of("adam", microbatches=4).describe()
    'adam, 4 x gpipe'
    """
    changed = config_of(FirstOrder, settings).set_fields()
    if name is None:
        for field, value in changed.items():
            if value != getattr(AQ_SGD, field):
                option = fields_of(FirstOrder)[field].setting.flag
                text = option if value is True else f"{option} {value}"
                raise PlanError(f"{text} needs --first-order", hint="such as --first-order sgd")
        return None
    preset = PRESETS[name]
    if changed.get("foreach") and preset.optimizer != "adam":
        raise PlanError(
            f"--foreach does not apply to --first-order {name}",
            hint="use --first-order adam, or leave --foreach out",
        )
    if not preset.num_kept_samples:
        changed.pop("num_kept_samples", None)
    return preset.model_copy(update=changed)
