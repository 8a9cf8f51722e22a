"""Time one zeroth-order step of an OPT shape in several ways, in turns, and print ratios of medians.

``python -m studies.speed --shape 125m --threads 2 --dtype float32`` prints the table that the documentation quotes;
with ``--beside`` those of bfloat16, and of the small shape with one thread, follow it. "mezo (default)" is the plan
that a user gets without choosing: resident, block by block, updated at once.
With ``--checksums`` there are three placements instead, each with and without a checksum after every change of weights.
The contenders take turns of two steps, so that a machine that slows down slows all of them; the second is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executors.models.spec import plan_of_model
from executors.runs.session import Session
from executors.turns import TurnTimes, Way, in_turns, turn_table
from studies.speed.reference import literal_step, two_forwards
from zosim.console import emit
from zosim.plans import Perturbations, Residency, Schedule
from zosim.report import Report

SHAPES: dict[str, dict[str, Any]] = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272},
}
_RATE, _EPSILON = 1e-7, 1e-3
_CHECKSUMS = ", checksums"
_LITERAL, _FORWARDS = "literal loop", "two forwards"
Batch = dict[str, torch.Tensor]


def main() -> None:
    """Time the contenders and print the table."""
    options = _options()
    settings = [SpeedSetting(options.shape, options.dtype, options.threads, options.batch, options.seq)]
    if options.beside:
        settings += [replace(settings[0], dtype="bfloat16"), replace(settings[0], shape="1m", threads=1)]
    results = []
    for setting in settings:
        seconds = timed(setting, options.rounds, checksums=options.checksums)
        report(setting, seconds)
        results.append(
            {"setting": setting.describe(), "seconds": {name: own.seconds for name, own in seconds.items()}}
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


@dataclass(frozen=True)
class SpeedSetting:
    """What is timed: a key of :data:`SHAPES`, a format of weights and products, threads, and a batch."""

    shape: str
    dtype: str
    threads: int
    batch: int
    seq: int

    def describe(self) -> str:
        """Return the setting in words."""
        batch = f"batch {self.batch} x {self.seq}"
        return f"OPT-{self.shape} shape, {self.dtype}, {batch}, {self.threads} thread(s)"


def timed(setting: SpeedSetting, rounds: int, *, checksums: bool = False) -> dict[str, TurnTimes]:
    """Return seconds of every contender in every round."""
    torch.set_num_threads(setting.threads)
    model = model_of_shape(setting.shape, getattr(torch, setting.dtype))
    return measure(model, setting.batch, setting.seq, setting.dtype, rounds, checksums=checksums)


def report(setting: SpeedSetting, seconds: dict[str, TurnTimes]) -> None:
    """Print the table of one setting."""
    rounds = len(next(iter(seconds.values())).seconds)
    ratios: dict[str, Callable[[TurnTimes], float]] = {
        "/ literal": lambda own: own.median_s / seconds[_LITERAL].median_s,
        "/ forwards": lambda own: own.median_s / seconds[_FORWARDS].median_s,
    }
    emit(
        None,
        json=False,
        text=Report(
            "",
            f"{setting.describe()}, torch {torch.__version__}, medians of {rounds} rounds",
            turn_table(seconds, ratios, digits=3),
            *(
                f"checksums add {share:+.1%} to a step: {name}"
                for name, share in checksum_shares(seconds).items()
            ),
        ),
    )


def checksum_shares(seconds: dict[str, TurnTimes]) -> dict[str, float]:
    """Return what checksums add to a step, as a share of one without: the median over rounds."""
    return {
        name: statistics.median(
            own / without
            for own, without in zip(seconds[name + _CHECKSUMS].seconds, plain.seconds, strict=True)
        )
        - 1
        for name, plain in seconds.items()
        if name + _CHECKSUMS in seconds
    }


def measure(
    model: Any, batch: int, seq: int, dtype: str, rounds: int, *, checksums: bool = False
) -> dict[str, TurnTimes]:
    """Return seconds of every contender in every round, after one round that is thrown away."""
    tokens = torch.randint(
        0, model.config.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0)
    )
    data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    contenders = dict(_contenders(model, data, dtype, checksums=checksums))
    # Small shares are told by the time on cores, which a busy machine changes less.
    clock = time.process_time if checksums else time.perf_counter
    # A session observes its memory in the first two steps, which are those of the round that does not count.
    return in_turns(contenders, rounds, num_untimed=1, clock=clock)


def _contenders(model: nn.Module, data: Batch, dtype: str, *, checksums: bool) -> list[tuple[str, Way]]:
    literal, forwards = copy.deepcopy(model), copy.deepcopy(model)
    contenders: list[tuple[str, Way]] = [
        (_LITERAL, lambda step: literal_step(literal, data, step, _RATE, _EPSILON)),
        (_FORWARDS, lambda _step: two_forwards(forwards, data)),
    ]
    delayed, kept = Schedule(update="delayed"), Perturbations(kept=True)
    counter, signs = Perturbations(rng="counter"), Perturbations(rng="counter", distribution="rademacher")
    counter_kept = Perturbations(rng="counter", kept=True)
    points: dict[str, dict[str, Any]] = {
        "mezo (default)": {},
        "mezo, delayed": {"schedule": delayed},
        "mezo, offloaded": {"residency": Residency(blocks="offloaded"), "schedule": delayed},
        "counter, gaussian": {"perturbations": counter},
        "counter, rademacher": {"perturbations": signs},
        "mezo, perturbations kept": {"perturbations": kept},
        "counter, gaussian kept": {"perturbations": counter_kept},
    }
    if checksums:
        points = {name: points[name] for name in ("mezo (default)", "mezo, offloaded", "counter, rademacher")}
    for name, axes in points.items():
        for suffix in ("", _CHECKSUMS) if checksums else ("",):
            session = session_of(copy.deepcopy(model), data, dtype, checksums=bool(suffix), **axes)
            contenders.append((name + suffix, lambda _step, session=session: session.step(data)))  # type: ignore[misc]
    return contenders


def session_of(model: nn.Module, data: Batch, dtype: str, *, checksums: bool, **axes: Any) -> Session:
    """Return a session of a plan with these axes."""
    batch, seq = data["input_ids"].shape
    axes = {"estimator": {"epsilon": _EPSILON}, "weights": {"dtype": dtype}} | axes
    plan = plan_of_model(model, batch=batch, seq=seq, **axes)
    return Session(
        plan, model, learning_rate=_RATE, num_sampling_threads=torch.get_num_threads(), checksums=checksums
    )


def model_of_shape(shape: str, dtype: torch.dtype) -> nn.Module:
    """Return an OPT of a shape with weights as they are drawn."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = SHAPES[shape]
    hidden = sizes["hidden_size"]
    config = OPTConfig(**sizes, ffn_dim=4 * hidden, word_embed_proj_dim=hidden, max_position_embeddings=2048)
    torch.manual_seed(0)
    model: Any = OPTForCausalLM(config)
    whole: nn.Module = model.to(dtype).eval()
    return whole


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.speed", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--beside", action="store_true", help="then bfloat16, and the small shape on one thread"
    )
    parser.add_argument(
        "--checksums", action="store_true", help="what checksums of weights add, in three placements"
    )
    parser.add_argument("--json", type=Path, default=None, help="write every round's seconds here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
