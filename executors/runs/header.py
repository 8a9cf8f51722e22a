"""What ``run.json`` may hold, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, create_model

from costmodel.models.configs import LoRA, Prefix, Subset
from executors.runs.learning_rate import LearningRate
from executors.runs.settings import DataSettings, EvaluationSettings, LossName, recorded_options
from topology.errors import RunError, ZosimError
from topology.limits import Seed, Threads
from topology.validation import readable
from zosim.plans import Plan


class _Section(BaseModel):
    # Strict, since what is read is used as it stands: "8" is no number of threads.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _RunSection(_Section):
    """What ``zosim run`` was asked for, but for its options: fields as of :class:`executors.runs.settings.RunSettings`."""

    learning_rate: LearningRate
    identity: dict[str, Any] | None = None
    data: DataSettings | None = None
    tuned: Literal["all"] | Subset = "all"
    lora: LoRA | None = None
    prefix: Prefix | None = None
    evaluation: EvaluationSettings | None = None
    edited_program: bool = False


# Of the options those that are recorded, each as RunOptions declares it. Earlier versions did not know all of them.
RunSection = create_model(
    "RunSection",
    __base__=_RunSection,
    **{
        name: (field.annotation, ... if name.endswith("_every") else field.default)
        for name, field in recorded_options().items()
    },  # type: ignore[call-overload]
)


class Finished(_Section):
    """What is known of a run that ended: its steps are read back."""

    model_config = ConfigDict(extra="allow")

    num_steps: NonNegativeInt


class RunHeader(_Section):
    """The header of a run. A loop of one's own may add fields to it."""

    model_config = ConfigDict(extra="allow")

    plan: Plan
    epsilon: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    trainable: list[str]
    base_digest: str
    base: dict[str, Any] | None = None
    seed: Seed
    loss_dtype: LossName
    num_threads: Threads = 1
    run: RunSection | None = None  # type: ignore[valid-type]
    resumed: list[Any] = []
    finished: Finished | None = None
    device: str = "cpu"
    program_digest: str | None = None
    version: Literal[3] = 3


def checked(header: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a header with every field of its plan.

    Parameters
    ----------
    header : mapping
        As it was read.
    path : Path
        For messages.

    Raises
    ------
    RunError
        If a field is missing, unknown or not what it should be.
    """
    try:
        with readable(str(path), RunError, model=RunHeader):
            known = RunHeader.model_validate_json(json.dumps(upgrade(header)))
    except RunError:
        raise
    except ZosimError as error:  # of a part that checks itself
        raise RunError(f"{path} is not valid: {error.message}", hint=error.hint) from error
    return {**upgrade(header), "plan": known.plan.model_dump(mode="json")}


def upgrade(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return a header in the fields of this version: version 2 called the learning rate a schedule."""
    if header.get("version") != 2:
        return dict(header)
    upgraded = {**header, "version": 3}
    if isinstance(run := header.get("run"), dict):
        upgraded["run"] = {"learning_rate" if name == "schedule" else name: run[name] for name in run}
    return upgraded
