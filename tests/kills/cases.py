"""What is killed, when and how: a schedule that follows from a seed."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.kills.points import Point

STEPS, BATCH = 24, 4
CHECKPOINT_EVERY, EVALUATE_EVERY, DIGEST_EVERY = 5, 6, 4
TIMEOUT_S = 30
"""After which a rank that waits for others gives up."""

_OFFLOADED = "--residency offloaded"
_DELAYED = f"{_OFFLOADED} --update delayed"
_ADAPTERS = "--weights adapters --distribution lozo --tune linears --lazy-steps 7"
_LORA = "--lora-rank 2 --lora-targets q_proj,v_proj"
_WINDOWS = f"{_LORA} --lora-lazy-steps 5 --lora-max-rank 4"

PLACEMENTS: dict[str, str] = {
    "one": "",
    "one-process": "--no-launch",
    "one-offloaded": _OFFLOADED,
    "one-offloaded-delayed": f"--no-launch {_DELAYED}",
    "one-full-counter": "--traversal full --rng counter",
    "one-copies": f"--weights copies --sample-ahead {_OFFLOADED}",
    "one-queries": "--num-perturbations 3 --difference forward",
    "one-lossy-transfer": f"{_DELAYED} --transfer-dtype bfloat16 --allow-lossy",
    "one-lora": f"{_LORA} --no-launch",
    "one-prefix": "--prefix 2",
    "one-quantized": "--weight-format int8 --allow-lossy --no-launch",
    "one-low-rank": "--distribution lozo --tune linears --lazy-steps 7",
    "one-adapters": f"{_ADAPTERS} --num-perturbations 2 --no-launch",
    "data": "--mesh data=2",
    "data-offloaded": f"--mesh data=2 {_OFFLOADED}",
    "data-shared": f"--mesh data=2 --transfers shared {_DELAYED}",
    "data-sliced-copies": f"--mesh data=2 --transfers sliced --weights copies {_DELAYED}",
    "perturb": "--mesh perturb=2 --rng counter",
    "perturb-sliced": f"--mesh perturb=2 --transfers sliced {_DELAYED}",
    "perturb-quantized": "--mesh perturb=2 --weight-format int4 --zero-point --residency offloaded --allow-lossy",
    "perturb-adapters": f"--mesh perturb=2 {_ADAPTERS}",
    "perturb-lora": f"--mesh perturb=2 {_LORA}",
    "perturb-lossy-transfer": f"--mesh perturb=2 --transfers sliced {_OFFLOADED} --transfer-dtype bfloat16 --allow-lossy",
    "perturb-queries": f"--mesh perturb=4 --num-perturbations 2 --transfers shared {_OFFLOADED}",
    "2d": "--mesh data=2,perturb=2",
    "2d-sliced": f"--mesh data=2,perturb=2 --transfers sliced {_DELAYED}",
    "stage": "--mesh stage=2 --split-points block.0.mlp",
    "stage-codec": "--mesh stage=2 --split-points block.0.mlp --codec q8 --residual-codec q8 --allow-lossy --rng counter",
    "stage-data": "--mesh data=2,stage=2 --split-points block.0",
    "one-windows": f"{_WINDOWS} --no-launch --weights adapters",
    "perturb-windows": f"--mesh perturb=2 {_WINDOWS} {_OFFLOADED}",
    "stage-windows": f"--mesh stage=2 --split-points block.0.mlp {_WINDOWS}",
    "data-unequal": "--mesh data=3:1",
    "one-some-resident": f"{_OFFLOADED} --resident-blocks 1",
    "one-drive": "--residency nvme --no-launch",
    "perturb-drive-some-resident": "--mesh perturb=2 --residency nvme --resident-blocks 1",
    "stage-quantized": "--mesh stage=2 --split-points block.0.mlp --weight-format int8 --allow-lossy",
}


def num_ranks(placement: str) -> int:
    """Return how many ranks a placement has."""
    words = PLACEMENTS[placement].split()
    product = 1
    for axis in words[words.index("--mesh") + 1].split(",") if "--mesh" in words else ():
        size = axis.partition("=")[2]
        product *= len(shares) if len(shares := size.split(":")) > 1 else int(size)
    return product


def has_launcher(placement: str) -> bool:
    """Whether the command starts its ranks, rather than being the only one."""
    return "--no-launch" not in PLACEMENTS[placement]


_RUNS = "executors.runs"

POINTS: dict[str, Point] = {
    point.name: point
    for point in (
        Point("header/rename", "os.rename", r"run\.json$"),
        Point("programs/rename", "os.rename", r"program\.json$"),
        Point("log/created", "open", r"/steps\.jsonl$"),
        Point("first step", "call", f"{_RUNS}.session:Session.begin_step"),
        Point("forward", "call", "transformers.models.opt.modeling_opt:OPTDecoderLayer.forward"),
        Point("log/half a line", "write", r"/steps\.jsonl$"),
        Point("metrics/half a line", "write", r"/metrics\.jsonl$"),
        Point("digests/half a line", "write", r"/digests\.jsonl$"),
        Point("digest", "call", f"{_RUNS}.session:Session.digest"),
        Point("flush", "call", f"{_RUNS}.session:Session.flush"),
        Point("checkpoint/begun", "open", r"/\.step-\d+\.safetensors\.\d+\.partial$"),
        Point("checkpoint/rename", "os.rename", r"/step-\d+\.safetensors$"),
        Point("checkpoint/oldest removed", "os.remove", r"/step-\d+\.safetensors$"),
        Point("evaluation", "call", f"{_RUNS}.session:Session.logits"),
        Point("best/rename", "os.rename", r"/best/.*model\.safetensors$"),
        Point("timeline", "open", r"timeline\.json"),
        Point("weights/begun", "open", r"out/\.model\.safetensors\.\d+\.partial$"),
        Point("weights/rename", "os.rename", r"out/model\.safetensors$"),
        Point("end/header", "os.rename", r"out/run\.json$", nth=2),
        Point("replay", "call", f"{_RUNS}.session:Session.replay"),
        Point("joining", "call", "executors.ranks.gloo:gloo_group"),
        Point("interval/closing", "call", f"{_RUNS}.lazy_intervals:close_increment"),
        Point("interval/drawn", "call", f"{_RUNS}.lazy_intervals:LazyIntervals.draw"),
    )
}
"""The first forwards are those of the first evaluation and the first step; only a run that goes on comes to "replay", and only several ranks
to "joining", only adapters whose A is drawn anew to an "interval"."""

_OF_EVERY_RANK = {
    "first step",
    "forward",
    "flush",
    "evaluation",
    "replay",
    "digest",
    "joining",
    "interval/closing",
    "interval/drawn",
}
"""Points that every rank comes to; at the others rank 0 alone writes."""

_MOST: Mapping[str, int] = {
    "forward": 24,
    "flush": 8,
    "evaluation": 8,
    "log/half a line": STEPS,
    "metrics/half a line": STEPS,
    "checkpoint/begun": 4,
    "checkpoint/rename": 4,
    "digest": 5,
    "replay": 5,
    "joining": 3,
    "interval/closing": 9,
    "interval/drawn": 5,
}
"""How many of an event one is drawn from; of the others it is the one that the point names."""


@dataclass(frozen=True)
class Strike:
    """One signal.

    - `signal`: ``SIGKILL``, ``SIGTERM``, ``SIGINT``, or ``SIGSTOP``.
    - `target`: ``rank N``, ``launcher`` (the process of the command), or ``group`` (every process of the run's group).
    - `point`: When; else one of the next two says it.
    - `log_part`: When this part of what the log still lacks is there.
    - `time_part`: After this part of the time that an undisturbed run took.
    """

    signal: str
    target: str
    point: Point | None = None
    log_part: float | None = None
    time_part: float | None = None

    @property
    def number(self) -> signal.Signals:
        """The signal as the system knows it."""
        return signal.Signals[self.signal]

    @property
    def when(self) -> str:
        """The instant in words."""
        if self.point is not None:
            return f"{self.point.name} {self.point.nth} of rank {self.point.rank or 0}"
        if self.log_part is not None:
            return f"log at {self.log_part:.1%}"
        return f"time at {self.time_part:.1%}"


@dataclass(frozen=True)
class Case:
    """A run, and the strikes that it takes on its way, one a process tree."""

    number: int
    placement: str
    strikes: tuple[Strike, ...]


def case_of(seed: int, number: int, placements: tuple[str, ...] = tuple(PLACEMENTS)) -> Case:
    """Return case `number` of a seed. Placements, signals and targets take turns; instants are drawn."""
    rng = random.Random(f"{seed}/{number}")
    placement = placements[number % len(placements)]
    # Another signal comes first in every round of the placements.
    turn = number // len(placements) + number % len(placements)
    strikes = [_strike(rng, placement, turn, is_resumed=False)]
    while len(strikes) < 3 and rng.random() < 0.35:
        strikes.append(_strike(rng, placement, turn + len(strikes), is_resumed=True))
    return Case(number, placement, tuple(strikes))


_SIGNALS = ("SIGKILL", "SIGTERM", "SIGKILL", "SIGINT", "SIGKILL", "SIGSTOP")
_TARGETS = ("rank", "launcher", "group")


def _strike(rng: random.Random, placement: str, turn: int, *, is_resumed: bool) -> Strike:
    name = _SIGNALS[turn % len(_SIGNALS)]
    kind = "rank" if name == "SIGSTOP" else _TARGETS[turn // len(_SIGNALS) % len(_TARGETS)]
    if kind == "rank" and not has_launcher(placement):
        kind = "launcher"
    victim = rng.randrange(num_ranks(placement))
    target = f"rank {victim}" if kind == "rank" else kind
    how = rng.random()
    if how < 0.2:
        return Strike(name, target, log_part=round(rng.random(), 4))
    if how < 0.35:
        return Strike(name, target, time_part=round(rng.random(), 4))
    left_out = set() if is_resumed else {"replay"}
    left_out |= {"joining"} if num_ranks(placement) == 1 else set()
    windows = ["interval/closing", "interval/drawn"]
    left_out |= set() if "windows" in placement else set(windows)
    names = [name for name in POINTS if name not in left_out]
    names += 4 * windows if "windows" in placement else []  # what these runs alone come to
    point = POINTS[rng.choice(names)]
    rank = rng.randrange(num_ranks(placement)) if point.name in _OF_EVERY_RANK else 0
    nth = rng.randint(1, _MOST[point.name]) if point.name in _MOST else point.nth
    return Strike(name, target, point=replace(point, nth=nth, rank=rank))
