"""Measured spans as measurements that a calibration learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from costmodel.estimate import CopyDirection
from costmodel.rates.calibration import FitReport, fit_profile
from costmodel.rates.measurement import Measurement
from costmodel.rates.profile import Profile
from costmodel.work import Work
from zosim.applications.evidence.file import Evidence, EvidenceError, check
from zosim.program import Program
from zosim.program.instructions import Instruction, Space, Stream
from zosim.program.program_set import ProgramSet
from zosim.timeline import Span, Timeline

OVERLAP = 0.05
"""Part of a span beside which another stream may have run before the span counts as contended."""

_CopyType = tuple[str, Work, CopyDirection]


def learned(paths: Sequence[str | Path]) -> tuple[Profile, FitReport]:
    """Return the profile that runs of one device teach, and how well it explains them.

    `paths`: evidence files. The fit starts from the profile that the first was predicted with, which holds whatever the runs
    leave open.

    Raises EvidenceError if a file does not hold, or the runs are of unlike devices or numbers of threads, or say nothing.
    """
    read = [(path, _sound(path)) for path in paths]
    first, measurements = read[0][1], []
    for path, evidence in read:
        if _device(evidence) != _device(first):
            raise EvidenceError(
                f"{path} is of {_device(evidence)}, but {read[0][0]} is of {_device(first)}",
                hint="give evidence of one device at a time",
            )
        measurements += measurements_of(evidence)
    if all(measurement.contended for measurement in measurements):
        raise EvidenceError(
            f"no operation in {', '.join(str(path) for path in paths)} ran without others at the same "
            "time, so no rate can be fitted",
            hint="use a run with resident blocks, or of a larger model",
        )
    return fit_profile(measurements, first.profile)


def _sound(path: str | Path) -> Evidence:
    """Return the evidence in a file that holds."""
    evidence = Evidence.load(path)
    broken = [finding.what for finding in check(evidence) if not finding.holds]
    if broken:
        raise EvidenceError(
            f"{path} failed its checks: {', '.join(broken)}", hint="`zosim evidence check` shows the details"
        )
    return evidence


def _device(evidence: Evidence) -> str:
    return f"{evidence.profile.device_name} with {evidence.profile.num_threads} threads"


def measurements_of(evidence: Evidence) -> list[Measurement]:
    """Return what a run's spans say about single operations.

    Returns
    -------
    list of Measurement
        One per kind of instruction: those of equal label, work and direction are samples of one measurement. One of
        which no sample ran alone is marked as contended, so that a fit reports it and does not learn from it.

    Notes
    -----
    A span is a whole instruction, its own cost with it. Left out are instructions that wait for other ranks, whose
    spans are not theirs alone, and instructions without work.
    """
    return measurements_of_spans(evidence.timeline, evidence.program_set, evidence.profile)


def measurements_of_spans(
    timeline: Timeline,
    program_set: ProgramSet,
    profile: Profile,
    statistic: Callable[[Sequence[float]], float] = median,
) -> list[Measurement]:
    """Return the same of a measured timeline, of the programs that were run and of the device's profile so far.

    `statistic`: what stands for the samples of one kind. Means of parts add up to the mean of their sum; medians fall short of it
    where parts are now and then held up.
    """
    measurements = []
    for (_, work, direction), (name, spans) in _grouped(timeline, program_set, profile).items():
        alone = [seconds for seconds, is_alone in spans if is_alone]
        samples = alone or [seconds for seconds, _ in spans]
        measurements.append(
            Measurement(
                name=f"{name}, {len(samples)} spans of a run",
                work=work,
                seconds=max(statistic(samples), min(samples)),
                fastest_s=min(samples),
                num_samples=len(samples),
                num_threads=profile.num_threads,
                direction=direction,
                contended=not alone,
                is_instruction=True,
            )
        )
    return measurements


def _grouped(
    timeline: Timeline, program_set: ProgramSet, profile: Profile
) -> dict[_CopyType, tuple[str, list[tuple[float, bool]]]]:
    """Return the spans of periodic steps by what they do: a name, and for each its seconds and whether it ran alone."""
    groups: dict[_CopyType, tuple[str, list[tuple[float, bool]]]] = {}
    num_ranks = program_set.world_size
    spans = [span for rank in timeline.ranks for span in timeline.periodic_spans(rank)]
    programs = {rank: program_set.program_of(rank) for rank in timeline.ranks}
    by_id = {rank: {item.id: item for item in program.step} for rank, program in programs.items()}
    for span, is_alone in _with_company(spans, is_cpu=profile.device_type == "cpu"):
        program, instruction = programs[span.rank], by_id[span.rank][span.instruction]
        waits = num_ranks > 1 and (instruction.work.link_bytes or instruction.stream == Stream.LINK)
        # A drive's rates are the topology's, none of a profile's.
        if not waits and not instruction.work.disk_bytes and _has_work(instruction.work):
            key = (instruction.label, instruction.work, _direction(program, instruction))
            name = f"{instruction.label} {instruction.id}"
            groups.setdefault(key, (name, []))[1].append((span.duration_s, is_alone))
    return groups


def _has_work(work: Work) -> bool:
    # A codec's constants are none of a profile's.
    none = Work(
        dtype=work.dtype,
        sampling_dtype=work.sampling_dtype,
        distribution=work.distribution,
        codec_work=work.codec_work,
    )
    return work != none


def _direction(program: Program, instruction: Instruction) -> CopyDirection:
    """Return which way an instruction's bytes go."""
    spaces = {program.buffer(access.buffer).space for access in instruction.writes}
    return "d2h" if spaces == {Space.HOST} else "h2d"


def _with_company(spans: Iterable[Span], *, is_cpu: bool) -> Iterator[tuple[Span, bool]]:
    """Yield spans with whether they ran alone: on a GPU on their stream, on a CPU on the whole machine."""
    listed = sorted(spans, key=lambda span: span.start_s)
    copies = (Stream.H2D, Stream.D2H)
    for number, span in enumerate(listed):
        beside_s = sum(
            min(span.end_s, other.end_s) - max(span.start_s, other.start_s)
            for other in _near(listed, number)
            if (other.rank, other.stream) != (span.rank, span.stream)
            # On a GPU those that take the same thing: both copy, or both compute.
            and (is_cpu or (span.stream in copies) == (other.stream in copies))
        )
        yield span, beside_s <= OVERLAP * span.duration_s


def _near(listed: list[Span], number: int) -> Iterator[Span]:
    """Yield the spans that overlap the one at `number`; `listed` is in the order of starts."""
    span = listed[number]
    for later in listed[number + 1 :]:
        if later.start_s >= span.end_s:
            break
        yield later
    for earlier in listed[:number]:
        if earlier.end_s > span.start_s:
            yield earlier
