"""The config tree of a plan: what options, Python, a plan's file and a run's header state, each in the same form.

A config is partial: a field that nobody set is not in its ``model_fields_set``, and reads as its default. Configs are laid over
each other with :func:`merge`, and :func:`zosim.planning.resolve.resolve` makes a plan of what came out.

>>> file = PlanConfig(batch=4, residency=Residency(blocks="offloaded", num_staging_buffers=2))
>>> typed = PlanConfig(residency=Residency(num_staging_buffers=3))
>>> merge(file, typed).set_fields()
{'batch': 4, 'residency': {'blocks': 'offloaded', 'num_staging_buffers': 3}}
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeVar

from costmodel.models.model_spec import ModelSpec
from topology.errors import PlanError
from topology.limits import Extent, Ranks
from topology.units import QuantityError, parse_bytes
from zosim.plans import (
    AXES,
    Estimator,
    ForwardPass,
    LowBits,
    Mesh,
    Method,
    Perturbations,
    Placement,
    Plan,
    Residency,
    Schedule,
    Section,
    Setting,
    Split,
    Weights,
)

AnySection = TypeVar("AnySection", bound=Section)

HOST = "host"
"""Name of this machine, among those of presets and files."""

USUAL_SEQ = 2048
"""Tokens per sequence where neither an option nor data say how many, if the model has as many positions."""


def _memory_limit(option: str, text: str) -> int:
    """Return the bytes that an option leaves to a plan.

    Raises PlanError if the text is no size, or zero.
    """
    try:
        size_bytes = parse_bytes(text)
    except QuantityError as error:
        raise PlanError(f"{option} {text}: {error.message}", hint=error.hint) from None
    if size_bytes == 0:
        raise PlanError(
            f"{option} {text} must be above 0",
            hint="such as 20GiB; without the option, all memory may be used",
        )
    return size_bytes


class Search(Section):
    """Which plans the planner may choose from."""

    heading = "Placement"

    # `"mezo"` keeps all blocks on one device, `"zo2"` offloads them from one; `"pertp"`, `"ddp"` and `"2d"` share the forwards of a
    # step out among several, with blocks resident or offloaded; `"sparq"` splits the model into stages, perhaps with the forwards
    # shared out as well; `"auto"` tries all of these.
    method: Annotated[
        Method,
        Setting(
            "--method",
            "Method to plan: one device with resident (mezo) or offloaded (zo2) blocks; forwards shared "
            "among ranks (pertp, ddp, 2d); stages (sparq); or the fastest of all (auto).",
        ),
    ] = "auto"
    # Number of ranks; None for as many as are fastest on the devices at hand.
    ranks: Annotated[
        Ranks | None,
        Setting(
            "--ranks",
            "Number of ranks; the planner chooses their mesh.",
            usual="the fastest number on the available devices; 1 with --device",
        ),
    ] = None
    # Whether plans that lose precision (narrower transfers, codecs, quantized weights) may be chosen.
    allow_lossy: Annotated[
        bool,
        Setting(
            "--allow-lossy",
            "Allow plans that lose precision: narrower transfers, codecs, quantized weights.",
            heading="Precision",
        ),
    ] = False
    # max_device_bytes, max_host_bytes: limits below what the hardware has.
    max_device_bytes: Annotated[
        int | None,
        Setting(
            "--max-device-memory",
            "Limit on the memory used on each device, such as 20GiB.",
            usual="all of the memory",
            typed=str,
            parse=partial(_memory_limit, "--max-device-memory"),
            heading="Hardware",
        ),
    ] = None
    max_host_bytes: Annotated[
        int | None,
        Setting(
            "--max-host-memory",
            "Limit on the memory used on each host, such as 64GiB.",
            usual="all of the memory",
            typed=str,
            parse=partial(_memory_limit, "--max-host-memory"),
            expert=True,
            heading="Hardware",
        ),
    ] = None


class PlanConfig(Section):
    """What is set of a plan, and how the rest may be chosen."""

    heading = "Model and data"

    model: ModelSpec | None = None
    # Sequences per step over all ranks.
    batch: Annotated[
        Extent,
        Setting("--batch", "Number of sequences per step, over all ranks.", changes="numbers"),
    ] = 1
    # Tokens per sequence, padding included; None for the longest line of the data, or `USUAL_SEQ` without data.
    seq: Annotated[
        Extent | None,
        Setting(
            "--seq",
            "Maximum sequence length in tokens.",
            usual=f"the longest line of the data; without data {USUAL_SEQ}, or as many as the model has positions",
        ),
    ] = None
    search: Search = Search()
    weights: Weights = Weights()
    mesh: Mesh = Mesh()
    placement: Placement | None = None  # a config that has one leaves nothing to the planner
    split: Split = Split()
    estimator: Estimator = Estimator()
    residency: Residency = Residency()
    schedule: Schedule = Schedule()
    low_bits: LowBits = LowBits()
    perturbations: Perturbations = Perturbations()
    forward: ForwardPass = ForwardPass()

    @property
    def spec(self) -> ModelSpec:
        """The model, of a config that has one: what is asked of the planner and what becomes a plan do."""
        assert self.model is not None
        return self.model

    @classmethod
    def of(cls, plan: Plan) -> PlanConfig:
        """Return a plan as a config: every field is set."""
        axes = {name: axis.model_copy(update=dict(axis)) for name, axis in plan.axes.items()}
        return cls(model=plan.model, batch=plan.batch, seq=plan.seq, **axes)  # type: ignore[arg-type]

    def fixed(self, *axes: str) -> dict[str, dict[str, object]]:
        """Return what is set of the axes of a plan, of all but mesh, placement and split unless some are named."""
        names = axes or [name for name in AXES if name not in ("mesh", "placement", "split")]
        return {name: getattr(self, name).set_fields() for name in names if name in self.model_fields_set}


def filled(config: PlanConfig) -> PlanConfig:
    """Return a config completed from data and model: a sequence's tokens, how a quantized model keeps its weights."""
    if config.seq is None:
        config = config.model_copy(update={"seq": min(USUAL_SEQ, config.spec.max_positions)})
    stored = config.spec.stored
    if stored is None:
        return config
    return merge(PlanConfig(low_bits=LowBits.model_construct(None, **stored.fields)), config)


def merge(base: AnySection, over: AnySection) -> AnySection:
    """Return `base` with every field that is set in `over` in place of its own."""
    fields = {name: getattr(over, name) for name in over.model_fields_set}
    return base.model_copy(
        update={
            name: merge(getattr(base, name), value)
            if isinstance(value, Section) and getattr(base, name)
            else value
            for name, value in fields.items()
        }
    )
