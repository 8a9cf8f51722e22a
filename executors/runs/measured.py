"""What a session has measured: spans on all ranks, and messages between stages."""

from __future__ import annotations

from dataclasses import replace

import torch

from executors.ranks.communicator import Communicator
from executors.steps.interpreter import Interpreter
from executors.steps.memory import MemoryReport
from executors.steps.ops.codec import BoundaryActions
from zosim.timeline import Timeline


def measured_timeline(
    interpreter: Interpreter,
    communicator: Communicator | None,
    *,
    rank: int,
    first_step: int,
    num_steps: int,
    first_periodic_step: int,
    memory: MemoryReport,
) -> Timeline:
    """Return the measured spans of some steps on all ranks, and their memory.

    - `first_step`: the first step that was timed, from which steps are counted.
    - `first_periodic_step`: of these steps, the first that counts as periodic.
    """
    sent = interpreter.boundaries.sent_bytes
    spans = tuple(
        replace(item.span(rank), size_bytes=sent.get((item.step, item.instruction.id), 0)).shifted(
            0, -first_step
        )
        for item in interpreter.backend.measured()
    )
    # What ranks replayed may end beside the first step that is timed: an offload that nothing waits for yet.
    spans = tuple(
        span for span in spans if span.step >= 0 and (span.step < num_steps or span.phase == "flush")
    )
    begin = min((span.start_s for span in spans), default=0.0)
    timeline = Timeline(
        program=interpreter.program.name,
        source="measured",
        num_steps=num_steps,
        spans=tuple(span.shifted(-begin) for span in spans if span.step <= num_steps),
        memory=tuple(memory.samples(rank, 0.0)),
        first_periodic_step=first_periodic_step,
    )
    return timeline if communicator is None else timeline_of_all_ranks(communicator, timeline)


def timeline_of_all_ranks(communicator: Communicator, own: Timeline) -> Timeline:
    """Return the timelines of all ranks as one.

    Hosts' clocks differ, and so do the moments at which ranks begin to count. The exchange of losses ends on all ranks at
    the same moment, give or take the latency of one message; the first one that was timed sets the clocks.
    """
    timelines = communicator.all_gather_json(own, "gathering timelines", Timeline)
    # When the first exchange among all ranks ended, on each rank's own clock.
    ends = [
        min((span.end_s for span in timeline.spans if span.label == "exchange"), default=0.0)
        for timeline in timelines
    ]
    latest = max(ends)
    spans = [
        span.shifted(latest - end)
        for timeline, end in zip(timelines, ends, strict=True)
        for span in timeline.spans
    ]
    begin = min((span.start_s for span in spans), default=0.0)
    memory = tuple(sample for timeline in timelines for sample in timeline.memory)
    return replace(own, spans=tuple(span.shifted(-begin) for span in spans), memory=memory)


def messages_per_step(
    stages: BoundaryActions, communicator: Communicator | None, num_steps: int, *, between_stages: bool
) -> dict[str, float]:
    """Return how many messages of all stages went in each of `num_steps` steps, and their bytes on the wire.

    Those that a rank alone encodes and decodes itself count as if they went (``between_stages`` is False).
    """
    own = torch.tensor(
        [stages.num_sent, stages.num_bytes] if between_stages else [stages.num_made, stages.made_bytes]
    )
    if communicator is not None:
        own = communicator.all_gather_host(own, "counting messages").sum(0)
    num_sent, num_bytes = own.tolist()
    return {"num_per_step": num_sent / num_steps, "bytes_per_step": num_bytes / num_steps}
