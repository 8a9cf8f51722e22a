"""What a run leaves behind: ``run.json``, ``steps.jsonl``, weights under Hugging Face's names.

The header, the log of seeds and scalars, and the base weights determine every later weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, create_model
from torch import nn

from costmodel.models.configs import LoRA, Prefix, Subset
from executors.devices import attention_facts, device_name
from executors.files import locked, refuse_irregular_run, write_atomically
from executors.models.weight_files import weights_digest
from executors.runs.base import BASE, base_facts
from executors.runs.jsonlines import JsonLines, read_lines
from executors.runs.learning_rate import LearningRate
from executors.runs.settings import DataSettings, EvaluationSettings, LossName, recorded_options
from topology.checksummed import with_digest, without_digest
from topology.errors import RunError, ZosimError
from topology.limits import Seed, Threads
from topology.reading import parse_json, read_text
from topology.renamed import with_present_names
from topology.validation import readable
from zosim.plans import Plan

HEADER_NAME = "run.json"
STEPS_NAME = "steps.jsonl"
REFUSED_NAME = "steps-refused.jsonl"
RUNLOG_VERSION, OLDER_VERSIONS = 3, (2,)


class _Section(BaseModel):
    # Strict, since what is read is used as it stands: "8" is no number of threads.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _RunSection(_Section):
    """Settings of ``zosim run`` beside its options: fields of :class:`executors.runs.settings.RunSettings`."""

    learning_rate: LearningRate
    data_sha256: str | None = None
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


class RunLog:
    """The log of one run, and the lock of its directory.

    - `directory`: made if need be.
    - `header`: to begin with; without it the log begins with :meth:`begin` or :meth:`resume`.

    Raises ZosimError if the directory holds a run already, another process writes to it, or it cannot be written to.
    """

    def __init__(self, directory: str | Path, header: Mapping[str, Any] | None = None) -> None:
        self.directory = Path(directory)
        with ExitStack() as opened:
            # Locked before anything is read, so that no other process can begin in between.
            opened.enter_context(locked(self.directory))
            self._opened = opened.pop_all()
        if header is not None:
            try:
                self.begin(header)
            except BaseException:
                self.close()
                raise

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write ``run.json`` and an empty log; raise if there is a log already."""
        if (self.directory / STEPS_NAME).exists():
            raise RunError(
                f"{self.directory} already holds the log of a run ({STEPS_NAME})",
                hint="resume it (--resume), give another --out, or remove that directory",
            )
        write_header(self.directory, header)
        # The header first: a log without one says nothing, a header without a log is a run of no step.
        self._steps = self._opened.enter_context(JsonLines(self.directory / STEPS_NAME))

    def resume(self, keep_bytes: int) -> None:
        """Continue the existing log after its first `keep_bytes` bytes."""
        self._steps = self._opened.enter_context(
            JsonLines(self.directory / STEPS_NAME, keep_bytes=keep_bytes)
        )

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of one step to the disk."""
        self._steps.append(rows)

    def refuse_moved(self) -> None:
        """Raise if the log's path no longer leads to the open file."""
        self._steps.refuse_moved()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def truncate(self, num_steps: int) -> None:
        """Keep the first `num_steps` steps; write the others to :data:`REFUSED_NAME`, replacing that file."""
        lines = read_lines(self.directory / STEPS_NAME)
        kept = [line for line in lines if line.row["step"] < num_steps]
        refused = "".join(json.dumps(line.row) + "\n" for line in lines[len(kept) :])
        # Kept before the log is cut: a crash in between loses nothing.
        write_atomically(self.directory / REFUSED_NAME, refused)
        self._steps.truncate(kept[-1].end if kept else 0)

    def close(self) -> None:
        """Close the log, and unlock the directory."""
        self._opened.close()


def write_header(directory: Path, header: Mapping[str, Any]) -> None:
    """Write ``run.json`` with its digest, atomically."""
    content = json.loads(json.dumps(dict(header)))  # as it will be read
    write_atomically(directory / HEADER_NAME, json.dumps(with_digest(content), indent=2) + "\n")


def read_header(directory: str | Path) -> dict[str, Any]:
    """Return a run's header.

    Raises RunError if there is none, it is damaged, another version wrote it, or something in the directory is no file
    of a run.
    """
    path = Path(directory) / HEADER_NAME
    refuse_irregular_run(Path(directory))
    if not path.exists():
        raise RunError(
            f"{directory} holds no run: {HEADER_NAME} is missing",
            hint="name the DIR of `zosim run --out DIR`",
        )
    text = read_text(path, "run's header", RunError)
    header = parse_json(text, f"{path} is damaged", RunError, hint="restore the file from a copy")
    version = header.get("version") if isinstance(header, dict) else type(header).__name__
    if version not in (*OLDER_VERSIONS, RUNLOG_VERSION):
        raise RunError(f"{path} is not a run's header of version {RUNLOG_VERSION} (its version: {version!r})")
    missing = [name for name in _HEADER_FIELDS if name not in upgrade(header)]
    if missing:
        raise RunError(f"{path} is damaged: it lacks {', '.join(missing)}")
    header, is_whole = without_digest(header)
    # The digest covers the options: edited ones would not explain the log.
    if not is_whole:
        raise RunError(
            f"{path} is damaged: its digest does not match",
            hint="restore the file from a copy; to change options, use the command line",
        )
    return _checked(upgrade(header), path)


def _checked(header: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a header with every field of its plan, or raise if one is missing, unknown or not what it should be."""
    try:
        with readable(str(path), RunError, model=RunHeader):
            known = RunHeader.model_validate_json(json.dumps(header))
    except RunError:
        raise
    except ZosimError as error:  # of a part that checks itself
        raise RunError(f"{path} is not valid: {error.message}", hint=error.hint) from error
    # As floats: JSON may have an integer of any size in their place.
    floats = {"epsilon": known.epsilon, "weight_decay": known.weight_decay}
    return {**header, **floats, "plan": known.plan.model_dump(mode="json")}


RENAMED: Mapping[str, str] = {
    "run.schedule": "learning_rate",
    "run.learning_rate.kind": "schedule",
    "run.save_as=codes": "compressed-tensors",
    "run.save_as=zosim-codes": "zosim",
    "finished.moved_codes": "quantized_updates",
    "finished.quantized_updates.unmoved": "unchanged",
}
"""Fields of a header that were renamed (:mod:`topology.renamed`), but for those of its plan, which upgrades itself."""


def upgrade(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return a header in the fields of this version."""
    version = {"version": RUNLOG_VERSION} if header.get("version") in OLDER_VERSIONS else {}
    upgraded = with_present_names(dict(header) | version, RENAMED)
    run = upgraded.get("run")
    if isinstance(run, dict) and isinstance(run.get("identity"), dict):
        # Earlier versions recorded the settings that decide a run's numbers once more, with the digest of its data.
        sha256 = run["identity"].get("data_sha256")
        upgraded["run"] = {k: v for k, v in run.items() if k != "identity"} | {"data_sha256": sha256}
    return upgraded


_HEADER_FIELDS = ("epsilon", "weight_decay", "plan", "trainable", "base_digest", "seed", "loss_dtype")


def header_of(
    model: nn.Module,
    *,
    plan: Mapping[str, Any],
    epsilon: float,
    weight_decay: float,
    device: str,
    base_digest: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the header of a run: what a replay needs beside the log, and what bits depend on."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "version": RUNLOG_VERSION,
        "epsilon": epsilon,
        "weight_decay": weight_decay,
        "plan": dict(plan),
        "trainable": names,
        "base_digest": base_digest or weights_digest(model),
        BASE: base_facts(model),
        **machine_facts(device),
        **more,
    }


def machine_facts(device: str) -> dict[str, Any]:
    """Return what bits depend on beside a run's own numbers: torch, instruction set, threads, device, attention."""
    return {
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "device": device,
        "device_name": device_name(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **attention_facts(device),
    }
