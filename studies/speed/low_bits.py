"""``python -m studies.speed.low_bits``: steps with linear layers of int8 against forwards in 16 and 32 bits, in one run.

Of a session's steps the time of forwards is what its timeline lists for them, at both evaluation points, the perturbation's part
included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from costmodel.rates.profile import load_profile
from costmodel.rates.slowdown import at_slowdown, slowdown_in
from executors.reference_speed import reference_now_s
from executors.runs.session import Session
from executors.steps import streams
from executors.turns import Way, in_turns
from studies.prediction.measuring import REFERENCE_S
from studies.speed.__main__ import SHAPES, model_of_shape, session_of
from studies.speed.reference import two_forwards
from topology import detect
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.plans import LowBits, Perturbations
from zosim.simulators.simulate import simulate

_SPARSITY = 0.98

CASES: dict[str, dict[str, Any]] = {
    "W8A8": {"low_bits": {}, "perturbations": {}},
    "W8A8, signs": {"low_bits": {}, "perturbations": {"distribution": "rademacher"}},
    "W8A8, signs, 4 bits": {
        "low_bits": {"perturbation_bits": 4},
        "perturbations": {"distribution": "rademacher"},
    },
    f"W8A8, signs, 4 bits, {_SPARSITY:.0%} zeros": {
        "low_bits": {"perturbation_bits": 4, "sparsity": _SPARSITY},
        "perturbations": {"distribution": "rademacher"},
    },
    f"W8A8, {_SPARSITY:.0%} zeros": {"low_bits": {"sparsity": _SPARSITY}, "perturbations": {}},
    f"W8A8, signs, {_SPARSITY:.0%} zeros": {
        "low_bits": {"sparsity": _SPARSITY},
        "perturbations": {"distribution": "rademacher"},
    },
    f"W8A8, {_SPARSITY:.0%} zeros, kept": {
        "low_bits": {"sparsity": _SPARSITY},
        "perturbations": {"kept": True},
    },
    f"W8A8, signs, {_SPARSITY:.0%} zeros, kept": {
        "low_bits": {"sparsity": _SPARSITY},
        "perturbations": {"distribution": "rademacher", "kept": True},
    },
    "W8A16": {"low_bits": {"activations": "none"}, "perturbations": {}},
    f"W8A16, {_SPARSITY:.0%} zeros": {
        "low_bits": {"activations": "none", "sparsity": _SPARSITY},
        "perturbations": {},
    },
}


def main(
    shape: Annotated[str, typer.Option(help="One of " + ", ".join(SHAPES) + ".")] = "125m",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    seq: Annotated[int, typer.Option(min=1)] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that all take, one after the other.")] = 3,
    cases: Annotated[str, typer.Option(help="Their names, with semicolons between.")] = ";".join(CASES),
    core_time: Annotated[
        bool, typer.Option(help="Time that one thread spends on its core, which others at work change less.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Rates of `zosim calibrate -o`, to predict the steps with.")
    ] = None,
) -> None:
    """Time the cases in turns, and print ratios of medians."""
    if core_time and threads != 1:
        raise typer.BadParameter(f"--core-time is of one thread, not of {threads}: add --threads 1")
    torch.set_num_threads(threads)
    clock = process_time if core_time else perf_counter
    vars(streams)["time"] = SimpleNamespace(perf_counter=clock)  # of the spans of a timeline
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPES[shape]["vocab_size"], (batch, seq), generator=generator)
    data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    models = {name: model_of_shape(shape, getattr(torch, name)) for name in ("float32", "bfloat16")}
    sessions = {name: _session(CASES[name], models["bfloat16"], data) for name in cases.split(";")}
    works: dict[str, Callable[[], object]] = {
        **{name: partial(two_forwards, model, data) for name, model in models.items()},
        **{name: partial(session.step, data) for name, session in sessions.items()},
    }
    references_s: dict[str, list[float]] = {}
    ways = {name: _beside_a_reference(name, work, references_s) for name, work in works.items()}
    # Sessions observe their memory in the round that does not count.
    times = in_turns(ways, rounds, num_untimed=1, clock=clock)
    narrow, wide = times["bfloat16"].median_s, times["float32"].median_s
    print(f"OPT-{shape} shape, batch {batch} x {seq}, {threads} thread(s), medians of {rounds} rounds")
    print(f"two forwards: {1e3 * narrow:.1f} ms in bfloat16, {1e3 * wide:.1f} ms in float32")
    print(
        f"{'':30s}{'step':>10s}{'forwards':>11s}{'/ bfloat16':>12s}{'/ float32':>11s}{'step / forwards':>17s}"
    )
    rates, topology = None if profile is None else load_profile(profile), detect()
    for name, session in sessions.items():
        step, own = times[name].median_s, median(_forward_seconds(session))
        line = f"{name:30s}{1e3 * step:8.1f}ms{1e3 * own:9.1f}ms{own / narrow:12.2f}{own / wide:11.2f}{step / own:17.2f}"
        if rates is not None:
            for words, known in (
                ("predicted", rates),
                ("at its pace", at_slowdown(rates, slowdown_in(rates, median(references_s[name])))),
            ):
                machine = Machine.from_topology(topology, topology.of_type("cpu")[0].id, known)
                predicted_s = simulate(lower(session.plan), machine).step_time_s
                line += f", {words} {1e3 * predicted_s:.1f} ms ({predicted_s / step - 1:+.1%})"
        print(line)


def _session(case: Mapping[str, Any], model: nn.Module, data: dict[str, Tensor]) -> Session:
    """Return a session of a case, with a copy of the model."""
    low_bits = {"weights": "int8", "activations": "int8-token"} | case["low_bits"]
    return session_of(
        copy.deepcopy(model),
        data,
        "bfloat16",
        checksums=False,
        low_bits=LowBits.model_validate(low_bits),
        perturbations=Perturbations.model_validate({"rng": "counter"} | case["perturbations"]),
    )


def _beside_a_reference(name: str, work: Callable[[], object], references_s: dict[str, list[float]]) -> Way:
    """Return work that is preceded, in each of its turns, by the reference that tells the machine's pace."""

    def way(number: int) -> object:
        if number % 2 == 0:
            references_s.setdefault(name, []).append(reference_now_s(REFERENCE_S))
        return work()

    return way


def _forward_seconds(session: Session) -> list[float]:
    """Return the seconds that the forwards take of every second step: of the timed ones."""
    seconds: dict[int, float] = {}
    for span in session.timeline().periodic_spans():
        if span.label == "forward":
            seconds[span.step] = seconds.get(span.step, 0.0) + span.duration_s
    return [value for step, value in seconds.items() if step % 2]


if __name__ == "__main__":
    typer.run(main)
