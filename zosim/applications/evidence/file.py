"""A run as one file that somebody else can check, and that a calibration can learn from.

It holds the machine, the profile, the plan and the programs that ran, what was predicted from them, and the spans that were
measured: enough to make the prediction again, and to hold it against the run, without the machine, the model's weights
or its data. What could tell who ran it where is taken out (:mod:`zosim.applications.evidence.anonymous`).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from costmodel.rates.profile import Profile
from costmodel.scoring import Row
from topology.checksummed import with_digest, without_digest
from topology.errors import ZosimError
from topology.graph import Topology
from topology.reading import read_json_object
from topology.renamed import with_present_names
from topology.validation import FrozenModel, RuleError, readable
from zosim.analysis.compare import Comparison, compare, slowest_rank
from zosim.applications.evidence.anonymous import Anonymous, refuse_private
from zosim.lowering import lower_all
from zosim.planning.predict import PlannedRun
from zosim.plans import Plan
from zosim.program.instructions import Space
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline

EVIDENCE_FORMAT: Literal["zosim-evidence"] = "zosim-evidence"
EVIDENCE_VERSION: Literal[1] = 1
RENAMED: Mapping[str, str] = {
    "measurement.num_steady_steps": "num_periodic_steps",
    "timeline.first_steady_step": "first_periodic_step",
}
"""Fields that were renamed of evidence (:mod:`topology.renamed`), but for plan and profile, which upgrade themselves."""


SAME_PREDICTION = 1e-6
"""Relative difference up to which a prediction counts as the same: sums of durations on another processor."""
SAME_MEASUREMENT = 1e-9

_HEADER_KEYS = ("torch", "instruction_set", "float32_matmul_precision")


class EvidenceError(ZosimError):
    """A file that is no evidence, or a run that none can be made of."""


class Predicted(FrozenModel):
    """What was predicted."""

    step_time_s: float = Field(gt=0)
    low_s: float = Field(gt=0)
    high_s: float = Field(gt=0)
    # device_bytes, host_bytes: of the fullest device and host.
    device_bytes: int = Field(ge=0)
    host_bytes: int = Field(ge=0)
    bottleneck: str

    @classmethod
    def of(cls, planned: PlannedRun) -> Predicted:
        """Return the prediction of a plan on its hardware."""
        prediction = planned.prediction
        return cls(
            step_time_s=prediction.step_time_s,
            low_s=prediction.low_s,
            high_s=prediction.high_s,
            device_bytes=prediction.footprints.largest.device_bytes,
            host_bytes=prediction.footprints.fullest.size_bytes,
            bottleneck=prediction.bottleneck.description,
        )


class MeasuredRun(FrozenModel):
    """What was measured, in numbers that follow from the spans."""

    step_time_s: float = Field(gt=0)  # median of the periodic steps
    num_periodic_steps: int = Field(gt=0)
    # device_bytes, host_bytes: peaks of the first rank.
    device_bytes: int = Field(ge=0)
    host_bytes: int = Field(ge=0)
    # Tokens of the batches, without their padding; None where the timeline does not know how many a step had.
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, timeline: Timeline) -> MeasuredRun:
        """Return what a measured timeline comes to."""
        rank = timeline.ranks[0] if timeline.ranks else 0
        tokens = timeline.tokens_per_step
        return cls(
            step_time_s=timeline.step_time_s,
            tokens_per_s=None if tokens is None else tokens / timeline.step_time_s,
            num_periodic_steps=len(timeline.periodic_steps),
            device_bytes=timeline.peak_memory(Space.DEVICE, rank).size_bytes,
            host_bytes=timeline.peak_memory(Space.HOST, rank).size_bytes,
        )


class Evidence(FrozenModel):
    """One run, checkable."""

    format: Literal["zosim-evidence"] = EVIDENCE_FORMAT
    version: Literal[1] = EVIDENCE_VERSION
    versions: dict[str, str]  # of zosim, Python, torch and the like, and what bits and rates depend on
    num_threads: int = Field(gt=0)
    topology: Topology
    profile: Profile
    plan: Plan
    programs: dict[str, Any]
    # Whether these are other programs than the plan was lowered to by the zosim that made the file.
    is_edited: bool
    prediction: Predicted
    measurement: MeasuredRun
    timeline: Timeline

    @model_validator(mode="after")
    def _is_a_run(self) -> Evidence:
        if self.timeline.source != "measured":
            message = f"the timeline is {self.timeline.source}, not measured"
            raise RuleError(message, hint="`zosim evidence make RUN` makes evidence of a run")
        return self

    @cached_property
    def program_set(self) -> ProgramSet:
        """The programs that ran."""
        return ProgramSet.from_data(self.programs, "in the evidence")

    @cached_property
    def planned(self) -> PlannedRun:
        """Plan, hardware and programs, to predict anew."""
        return PlannedRun(self.plan, self.topology, self.profile, self.program_set)

    @property
    def row(self) -> Row:
        """The step time, as it is predicted and measured."""
        reported = self.prediction
        return Row(
            self.plan.describe(),
            "step_s",
            self.measurement.step_time_s,
            reported.step_time_s,
            reported.low_s,
            reported.high_s,
        )

    def comparison(self) -> Comparison:
        """Return prediction and measurement line by line, for the last rank to end its steps."""
        rank = slowest_rank(self.timeline)
        predicted = self.planned.timeline_of(rank)
        at_slowdown = self.planned.at_slowdown_of(self.timeline)
        program = self.program_set.program_of(rank)
        return compare(predicted, self.timeline, program, rank, at_slowdown, self.plan.tokens_per_step)

    def save(self, path: str | Path) -> None:
        """Write the evidence as JSON, with a digest.

        Raises EvidenceError if something of this machine or its user is still in it.
        """
        content = self.model_dump(mode="json")
        text = json.dumps(with_digest(content), indent=1)
        refuse_private(text, EvidenceError)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Evidence:
        """Read what :meth:`save` wrote.

        Raises EvidenceError if the file is missing, is something else, is of a newer version, was changed, or contradicts itself.
        """
        content, is_unchanged = without_digest(_read(path))
        if not is_unchanged:
            raise EvidenceError(
                f"{path} is damaged or was edited: its digest does not match its content",
                hint="get the file again from its author",
            )
        try:
            with readable(f"evidence {path}", EvidenceError, model=cls):
                return cls.model_validate(with_present_names(content, RENAMED))
        except EvidenceError:
            raise
        except ZosimError as error:  # of a part that checks itself
            raise EvidenceError(f"evidence {path} is not valid: {error.message}", hint=error.hint) from error


@dataclass(frozen=True)
class CheckedStatement:
    """One statement of an evidence file, held against what follows from the rest of it."""

    what: str
    declared: float | str
    found: float | str
    holds: bool


def check(evidence: Evidence) -> tuple[CheckedStatement, ...]:
    """Return every statement of an evidence file with what comes of making it again.

    Raises ZosimError if plan, programs, profile and topology do not belong together.
    """
    spec = evidence.topology.device_spec(evidence.plan.placement.devices[0])
    evidence.profile.check_device(device_name=spec.name, device_type=spec.type)
    return (
        *_compared(
            "predicted",
            evidence.prediction.model_dump(),
            Predicted.of(evidence.planned).model_dump(),
            SAME_PREDICTION,
        ),
        *_compared(
            "measured",
            evidence.measurement.model_dump(),
            MeasuredRun.of(evidence.timeline).model_dump(),
            SAME_MEASUREMENT,
        ),
        _spans_belong(evidence),
        _programs_belong(evidence),
    )


def _compared(
    whose: str, declared: Mapping[str, Any], predicted: Mapping[str, Any], tolerance: float
) -> Iterator[CheckedStatement]:
    for name, value in declared.items():
        again = predicted[name]
        is_number = isinstance(value, int | float)
        same = abs(again - value) <= tolerance * abs(value) if is_number else again == value
        yield CheckedStatement(f"{whose} {name}", value, again, same)


def _spans_belong(evidence: Evidence) -> CheckedStatement:
    """Return whether every measured span is of an instruction that its rank ran."""
    known = {
        (rank, phase, item.id)
        for rank in range(evidence.program_set.world_size)
        for phase, item in evidence.program_set.program_of(rank).instructions()
    }
    foreign = {
        f"{span.phase}/{span.instruction} of rank {span.rank}"
        for span in evidence.timeline.spans
        if (span.rank, span.phase, span.instruction) not in known
    }
    description = f"{len(foreign)}, such as {min(foreign)}" if foreign else "none"
    return CheckedStatement("spans of no instruction", "none", description, not foreign)


def _programs_belong(evidence: Evidence) -> CheckedStatement:
    """Return whether the programs are what the plan is lowered to, where they say so."""
    if evidence.is_edited:
        return CheckedStatement("programs", "edited by hand", "not compared with the plan", True)
    same = lower_all(evidence.plan).to_json() == evidence.program_set.to_json()
    return CheckedStatement("programs", "the plan's", "the plan's" if same else "others", same)


def evidence_of(run: str | Path, planned: PlannedRun) -> Evidence:
    """Return the evidence of a run.

    Raises EvidenceError if the directory lacks something, or ranks ran on unlike devices.
    """
    directory = Path(run)
    header = run_header(directory)
    profile, threads = planned.profile, int(header["num_threads"])
    if profile.device_type == "cpu" and profile.num_threads != threads:
        raise EvidenceError(
            f"the run used {threads} threads, but the profile is for {profile.num_threads}",
            hint=f"give --threads {threads}, or a profile calibrated with {threads} threads",
        )
    if len(set(planned.rank_profiles)) > 1:
        raise EvidenceError(
            f"the ranks of {directory} ran on different types of devices, but evidence holds one profile",
            hint="make evidence of a run on devices of one type",
        )
    anonymous = Anonymous(planned)
    timeline = anonymous.timeline(Timeline.load(directory / "timeline.json"))
    plain = anonymous.planned
    return Evidence(
        versions={
            "zosim": version("zosim"),
            "python": platform.python_version(),
            **{name: str(header[name]) for name in _HEADER_KEYS if name in header},
        },
        num_threads=threads,
        topology=plain.topology,
        profile=plain.profile,
        plan=plain.plan,
        programs=json.loads(plain.programs.to_json()),
        is_edited=lower_all(plain.plan).to_json() != plain.programs.to_json(),
        prediction=Predicted.of(plain),
        measurement=MeasuredRun.of(timeline),
        timeline=timeline,
    )


def run_header(directory: Path) -> dict[str, Any]:
    """Return the header of a run.

    Raises EvidenceError if the directory holds no run.
    """
    path, hint = directory / "run.json", "`zosim run --out DIR` writes one"
    header = read_json_object(path, "run's header", EvidenceError, hint=hint)
    num_threads = header.get("num_threads")
    if type(num_threads) is not int or num_threads < 1:
        raise EvidenceError(f"{path} is not the header of a run: num_threads={num_threads!r}", hint=hint)
    return header


def _read(path: str | Path) -> dict[str, Any]:
    hint = "`zosim evidence make RUN -o FILE` writes one"
    content = read_json_object(path, "run's evidence", EvidenceError, hint=hint)
    if content.get("format") != EVIDENCE_FORMAT:
        raise EvidenceError(f"{path} is not an evidence file", hint=hint)
    version = content.get("version")
    if version != EVIDENCE_VERSION:
        newer = isinstance(version, int) and version > EVIDENCE_VERSION
        versions = content.get("versions")
        made_by = versions.get("zosim", "another") if isinstance(versions, dict) else "another"
        raise EvidenceError(
            f"{path} is evidence of version {version!r}, but this zosim reads version {EVIDENCE_VERSION}",
            hint=f"install zosim {made_by} or later" if newer else "make it again with this zosim",
        )
    return content
