"""``python -m studies.why_seeds_suffice``: train, throw the weights away, and rebuild them from the log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from executors.runs.records import StepRecord
from studies.why_seeds_suffice.training import num_differing, session_of, small_model, train
from zosim.console import stdout

_NUM_STEPS = 20


def rebuilt(records: Sequence[StepRecord], *, offloaded: bool) -> Mapping[str, Tensor]:
    """Return the weights that the log leads to from the base weights, without a forward."""
    with session_of(small_model(), offloaded=offloaded) as session:
        for record in records:
            session.replay(record)
        return session.state_dict()


def main() -> None:
    """Print what the log weighs, and what it rebuilds."""
    torch.set_num_threads(1)
    run = train(_NUM_STEPS)
    log_bytes = sum(len(json.dumps(row)) + 1 for record in run.records for row in record.rows())
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in run.tuned.values())
    stdout.print(
        f"trained {_NUM_STEPS} steps offloaded: {num_differing(run.base, run.tuned)} elements changed"
    )
    stdout.print(f"weights {weight_bytes} bytes, log {log_bytes / _NUM_STEPS:.0f} bytes a step")
    for name, offloaded in (("resident", False), ("offloaded", True)):
        num_elements = num_differing(rebuilt(run.records, offloaded=offloaded), run.tuned)
        stdout.print(f"rebuilt {name}: {num_elements} elements differ")
    first, *others = run.records
    off_by_one = replace(first, seeds=(first.seeds[0] + 1,))
    num_elements = num_differing(rebuilt([off_by_one, *others], offloaded=False), run.tuned)
    share = num_elements / sum(tensor.numel() for tensor in run.tuned.values())
    stdout.print(f"rebuilt with the first seed off by one: {share:.0%} of the elements differ")


if __name__ == "__main__":
    main()
