"""What is tuned beside a frozen base, of a plan and of a run: options, and the adapters or the prefix that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import NonNegativeFloat, PositiveInt

from costmodel.models.model_spec import TrainableSubset
from topology.errors import PlanError
from topology.validation import readable
from zosim.plans.setting import Section, Setting

if TYPE_CHECKING:
    from costmodel.models.configs import LoRA, Prefix, Trainable


class AdapterSettings(Section):
    """What is tuned: a part of the model, or a LoRA or a prefix beside a frozen base."""

    heading = "Estimator and optimizer"

    tuned: Annotated[
        TrainableSubset,
        Setting(
            "--tune",
            "Parameters to tune: all, only matrices, or only the linear layers of the blocks (linears).",
            "numbers",
            recorded_as="tuned",
            expert=True,
        ),
    ] = "all"
    lora_rank: Annotated[
        PositiveInt | None,
        Setting(
            "--lora-rank",
            "Tune LoRA adapters of this rank; the base stays frozen. Needs --lora-targets.",
            "numbers",
        ),
    ] = None
    lora_targets: Annotated[
        tuple[str, ...] | None,
        Setting(
            "--lora-targets",
            "Linear layers that get a LoRA adapter, such as q_proj,v_proj.",
            "numbers",
            typed=str,
            parse=lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
        ),
    ] = None
    lora_alpha: Annotated[
        NonNegativeFloat | None,
        Setting(
            "--lora-alpha",
            "Scale of LoRA adapters, which add alpha / rank * B A x.",
            "numbers",
            usual="twice the rank",
            expert=True,
        ),
    ] = None
    lora_lazy_steps: Annotated[
        PositiveInt | None,
        Setting(
            "--lora-lazy-steps",
            "Number of steps after which A is sampled anew. Only B is tuned; each A with its B is kept as"
            " a LoRA increment.",
            "numbers",
            expert=True,
        ),
    ] = None
    lora_max_rank: Annotated[
        PositiveInt | None,
        Setting(
            "--lora-max-rank",
            "Maximum rank of the LoRA increments, which are compacted to it.",
            "numbers",
            usual="64, or 4 times the rank if that is more",
            expert=True,
        ),
    ] = None
    prefix: Annotated[
        PositiveInt | None,
        Setting(
            "--prefix",
            "Tune this number of virtual tokens before the keys of every block; the base stays frozen.",
            "numbers",
        ),
    ] = None


_FIELD_OF_LORA = {
    "lora_rank": "rank",
    "lora_targets": "target_modules",
    "lora_alpha": "alpha",
    "lora_lazy_steps": "lazy_steps",
    "lora_max_rank": "max_rank",
}


def adapters_of(
    settings: AdapterSettings, recorded: Mapping[str, Any] | None = None, *, seed: int = 0
) -> tuple[LoRA | None, Prefix | None]:
    """Return the adapters or the prefix that settings mean; what was recorded stays where nothing is set.

    - `recorded`: ``lora`` and ``prefix`` of a run that is gone on with.
    - `seed`: of the numbers that they begin with.

    Raises PlanError if adapters lack a rank or targets, or a value is none of theirs.
    """
    from costmodel.models.configs import LoRA, Prefix

    declared = settings.set_fields()
    lora, prefix = ((recorded or {}).get(name) for name in ("lora", "prefix"))
    if "prefix" in declared:
        prefix = {"seed": seed} | (prefix or {}) | {"num_tokens": declared["prefix"]}
    changed = {_FIELD_OF_LORA[name]: value for name, value in declared.items() if name in _FIELD_OF_LORA}
    if changed:
        lora = (lora or {"seed": seed}) | changed
        if not {"rank", "target_modules"} <= set(lora):
            raise PlanError(
                "LoRA adapters need a rank and target layers",
                hint="such as --lora-rank 8 --lora-targets q_proj,v_proj",
            )
    with readable("the adapters", PlanError):
        return (
            LoRA.model_validate(lora) if lora else None,
            Prefix.model_validate(prefix) if prefix else None,
        )


def tuned_by(part: TrainableSubset, lora: LoRA | None, prefix: Prefix | None) -> Trainable:
    """Return the one thing that is tuned.

    Raises PlanError if there are several.
    """
    if lora is not None and prefix is not None:
        raise PlanError("--lora-rank and --prefix exclude each other", hint="leave one of them out")
    if part != "all" and (lora or prefix):
        raise PlanError(
            f"--tune {part} selects parameters of the model, but adapters or a prefix keep the model frozen",
            hint="leave --tune, or the adapters or prefix, out",
        )
    return lora or prefix or part
