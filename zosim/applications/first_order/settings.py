"""How a first-order step is done: optimizer, microbatches and their order, codecs; and what options say of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from costmodel.formats.codecs import codec_spec
from costmodel.models.backward import Optimizer
from topology.errors import PlanError
from zosim.options import config_of
from zosim.plans.setting import Section, Setting, fields_of

Schedule = Literal["gpipe", "1f1b"]
Turn = tuple[Literal["forward", "backward"], int]


class FirstOrder(Section):
    """How a first-order step is done."""

    heading = "Estimator and optimizer"

    optimizer: Optimizer = "sgd"
    schedule: Annotated[Schedule, Setting("--schedule", "Pipeline schedule of the first-order step.")] = (
        "gpipe"
    )
    # Parts that each rank's share of the batch passes through the pipeline in.
    num_microbatches: Annotated[
        PositiveInt, Setting("--microbatches", "Number of microbatches in the first-order step.")
    ] = 1
    # codec, gradient_codec: of everything that crosses a boundary forward, and of its gradients back.
    codec: str = "none"
    gradient_codec: str = "none"
    # Samples whose last message both ends of a boundary keep (AQ-SGD), the batch's at least; 0 for none.
    num_kept_samples: Annotated[
        NonNegativeInt,
        Setting(
            "--samples",
            "Number of samples whose last messages aq-sgd keeps.",
            usual="1, and at least the batch",
        ),
    ] = 0
    dropout: bool = True  # whether masks are kept
    # Whether a block keeps its input alone, and runs its forward again before its backward.
    recompute: Annotated[
        bool,
        Setting(
            "--recompute", "Recompute activations in the first-order step; each block keeps only its input."
        ),
    ] = False
    # `"full"` shares weights, gradients and the optimizer's state out among the replicas (ZeRO's third stage, FSDP): a segment's
    # weights are gathered before each forward and each backward, in the format of the products, and its gradients are summed into
    # shares after each backward. `"none"` keeps all of them on every replica.
    sharding: Annotated[
        Literal["none", "full"],
        Setting(
            "--sharding",
            "Sharding of the first-order step: none, or weights, gradients and optimizer state over the "
            "replicas (full, as ZeRO-3 and FSDP).",
        ),
    ] = "none"
    # Whether Adam goes over all parameters in one pass of each kind, as torch's does by default on GPUs: it then makes a float32 copy
    # of a moment, and more passes than a fused update. Activations are gone by then.
    foreach: Annotated[
        bool,
        Setting(
            "--foreach",
            "Update with Adam by one operation over all parameters at a time, as torch does.",
        ),
    ] = False
    # Whether first and last stage sum the gradients of a table that both hold; otherwise they are two tables.
    sums_ends: bool = True

    def codec_of(self, phase: str) -> str:
        """Return the codec of what crosses in ``"forward"`` or ``"backward"``."""
        return self.codec if phase == "forward" else self.gradient_codec

    def describe(self) -> str:
        """Return the settings in words."""
        phrases = [self.optimizer, f"{self.num_microbatches} x {self.schedule}"]
        phrases += [f"{self.codec} forward"] if not codec_spec(self.codec).is_lossless else []
        phrases += [f"{self.gradient_codec} back"] if not codec_spec(self.gradient_codec).is_lossless else []
        phrases += ["activations computed again"] if self.recompute else []
        phrases += ["weights shared out among replicas"] if self.sharding == "full" else []
        phrases += ["a pass over all parameters at a time"] if self.foreach else []
        phrases += [f"messages of {self.num_kept_samples} samples kept"] if self.num_kept_samples else []
        return ", ".join(phrases)


AQ_SGD = FirstOrder(codec="q4:dense", gradient_codec="q8:dense", num_kept_samples=1)
"""As SparQ's tables have it: 4 bits forward, 8 back."""

PRESETS: dict[str, FirstOrder] = {
    "sgd": FirstOrder(),
    "adam": FirstOrder(optimizer="adam"),
    "aq-sgd": AQ_SGD,
}


def turns(schedule: Schedule, num_microbatches: int, num_stages: int, stage: int) -> Iterator[Turn]:
    """Yield the forwards and backwards of a stage in the order in which it does them.

    >>> " ".join(f"{phase[0]}{number}" for phase, number in turns("1f1b", 3, 2, 0))
    'f0 f1 b0 f2 b1 b2'
    """
    ahead = num_kept_at_once(schedule, num_microbatches, num_stages, stage)
    for number in range(num_microbatches + ahead - 1):
        if number < num_microbatches:
            yield "forward", number
        if number >= ahead - 1:
            yield "backward", number - ahead + 1


def num_kept_at_once(schedule: Schedule, num_microbatches: int, num_stages: int, stage: int) -> int:
    """Return the microbatches whose activations a stage keeps at one time."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


FirstOrderName = Literal["sgd", "adam", "aq-sgd"]
"""Named settings of a first-order step."""


def first_order_of(name: FirstOrderName | None, **settings: Any) -> FirstOrder | None:
    """Return the settings of the first-order step that is asked for; None where none is.

    Raises PlanError if there is something to be otherwise and no step, or another optimizer than Adam is to go over all parameters at a
    time.

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
