"""LoZO on a serving runner: a step loads two adapters, scores them, and unloads them; the result is one more adapter."""

from __future__ import annotations

import json
import math
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from executors.datasets.generation import prompt_of
from executors.datasets.prompts import Example
from executors.datasets.rewards import Reward, mean_cost
from executors.files import locked, write_atomically
from executors.models.increments import AdapterState, Increments
from executors.models.loading import load_config
from executors.models.mapped import digest_of_files
from executors.randomness.rng import mixed
from executors.runs.base import BASE, base_facts, refuse_other_base, tokenizer_facts
from executors.runs.jsonlines import JsonLines, read_lines
from executors.serving.peft import BASE_DIGEST, linear_shapes
from executors.serving.runner import ServingRunner, mean_losses
from topology.errors import RunError, ZosimError
from topology.reading import read_json_object

LOG_NAME = "steps.jsonl"
SETTINGS_NAME = "tuning.json"
SERVED_NAME = "adapter"

_LEFT, _RIGHT = 1, 2
_LARGEST = 1e30


@dataclass(frozen=True)
class TuningSettings:
    """Settings that decide the numbers of a tuning; what is usual, `zosim adapt` declares."""

    targets: tuple[str, ...]  # names of the linears that are tuned
    # rank, lazy_steps, max_rank: of a perturbation; steps that its ``V`` stays; rank that increments are compacted to
    # where they would pass it.
    rank: int
    lazy_steps: int
    max_rank: int
    epsilon: float
    learning_rate: float
    seed: int

    def __post_init__(self) -> None:
        for flag, value in (("--lr", self.learning_rate), ("--epsilon", self.epsilon)):
            if not 0 <= value <= _LARGEST:
                message = f"{flag} {value:g} is outside the range of float32"
                raise RunError(message, hint="such as --lr 1e-4 --epsilon 1e-3")
        if self.max_rank < 3 * self.rank:
            raise RunError(
                f"--max-rank {self.max_rank} is too small for a closed increment, an open one and a "
                f"perturbation, each of rank {self.rank}",
                hint=f"use --max-rank {3 * self.rank} or more, and let the server take as much",
            )


class Tuning:
    """Zeroth-order tuning whose forwards a serving runner runs.

    - `model`: directory of the base. Of weights in it the digest is compared with the server's; else the configuration alone is
      read.
    - `directory`: of the log; a tuning that is there already goes on.

    At the point ``s`` the server is given ``Σ AᵢBᵢᵀ + s·ε·UVᵀ/√r`` as one adapter, and a step adds ``-η·g·UVᵀ/√r``: ``factorised``
    perturbations [1]_, Eq. 13-18 and 20. Perturbations are functions of the seed, the step and the linear; a row of the log is written
    once both losses are there, and the increments are a function of the log. So nothing is lost with a server that is gone.

    .. [1] Li and Ding, "LLM Zeroth-Order Fine-Tuning is an Inference Workload", 2026.

    Raises RunError if the directory has another tuning's log, or one that is damaged, the base or its tokenizer is another, or the server
    serves other weights than the base's.
    """

    def __init__(self, runner: ServingRunner, model: str, directory: Path, settings: TuningSettings) -> None:
        import transformers

        self.runner = runner
        self.settings = settings
        self.directory = directory
        # The base's modules without memory: the server has the weights.
        with torch.device("meta"):
            self._base: nn.Module = transformers.AutoModelForCausalLM.from_config(load_config(model))
        shapes = linear_shapes(self._base)
        self._names = [path for path in shapes if path.rpartition(".")[2] in settings.targets]
        known = dict.fromkeys(path.rpartition(".")[2] for path in shapes)
        missing = [name for name in settings.targets if name not in known]
        if missing or not self._names:
            message = f"{model} has no linear called {', '.join(missing) or '(nothing)'}"
            raise RunError(message, hint="linears are " + ", ".join(known))
        least, narrow = min((min(shapes[name]), name) for name in self._names)
        if settings.rank > least:
            raise RunError(
                f"--rank {settings.rank} is too large for {narrow}, which maps {shapes[narrow][0]} inputs to "
                f"{shapes[narrow][1]} outputs",
                hint=f"use --rank {least} or less; 1 to 4 are usual",
            )
        self._shapes = shapes
        self._scale = 1 / math.sqrt(settings.rank)
        # The probe stands beside what has been learnt, and the server's bound is of both together.
        self.state = AdapterState(max_rank=settings.max_rank - settings.rank)
        self.num_steps = 0
        self._rights: dict[str, Tensor] = {}
        # Others may tune on the same server.
        self._perturbed = tuple(f"zosim-{secrets.token_hex(6)}-{sign}" for sign in ("plus", "minus"))
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            opened.enter_context(locked(directory))
            self._check_base(model)
            self._begin(model)
            self._opened = opened.pop_all()

    def _check_base(self, model: str) -> None:
        """Refuse a server that serves other weights than the directory of the base holds, if both are known."""
        served = self.runner.base_digest
        own = None if served is None else digest_of_files(model, self.runner.base_dtype)
        if own not in (None, served):
            raise RunError(
                f"{model} has weights of digest {own}, but the server serves a base of digest {served}",
                hint="give --model the directory that is served, or serve that directory",
            )

    def _begin(self, model: str) -> None:
        path = self.directory / SETTINGS_NAME
        declared = json.loads(json.dumps(asdict(self.settings)))
        base = base_facts(self._base) | {"tokenizer": tokenizer_facts(model)}
        if path.is_file():
            recorded = read_json_object(path, "settings of a tuning", RunError)
            unlike = [name for name, value in declared.items() if recorded.get(name) != value]
            if unlike:
                name = unlike[0]
                raise RunError(
                    f"{self.directory} was tuned with {name}={recorded.get(name)!r}, but this command says "
                    f"{declared[name]!r}",
                    hint="give the same value, or another --out",
                )
            refuse_other_base(recorded, base, model, str(self.directory))
            known, served = recorded.get(BASE_DIGEST), self.runner.base_digest
            if known is not None and served is not None and known != served:
                raise RunError(
                    f"{self.directory} was tuned on weights of digest {known}, but the server serves a base of "
                    f"digest {served}",
                    hint="start the server with the base of the tuning, or give another --out",
                )
        else:
            facts = {"model": str(model), BASE_DIGEST: self.runner.base_digest, BASE: base}
            write_atomically(path, json.dumps(declared | facts, indent=2) + "\n")
        log = self.directory / LOG_NAME
        lines = read_lines(log)
        for line in lines:
            gradient = line.row.get("projected_grad")
            if line.row.get("step") != self.num_steps or not isinstance(gradient, float):
                raise RunError(f"{log} line {line.number} is damaged: it is not step {self.num_steps}")
            self._open_interval()
            self._apply(gradient)
        self._log = JsonLines(log, keep_bytes=lines[-1].end if lines else 0)

    # -- steps -------------------------------------------------------------------------------------------------

    def step(
        self,
        examples: Sequence[Example],
        *,
        reward: Reward | None = None,
        decode: Any = None,
        max_new_tokens: int = 16,
    ) -> dict[str, Any]:
        """Run one step, and return its row of the log.

        - `reward`: what is maximised of generated text, in place of the loss of labels.
        - `decode`: makes text of tokens for `reward`; without it the reward is given tokens.
        - `max_new_tokens`: of generated text.

        Raises
        ------
        RunError
            If the server or the reward fails, or a loss is not a number. The log then has the steps before.
        """  # fmt: skip
        self._open_interval()
        lefts = {
            name: self._normals(name, self._shapes[name][1], _LEFT, self.num_steps) for name in self._names
        }
        with tempfile.TemporaryDirectory(prefix="zosim-perturbed-") as folder:
            for perturbed, sign in zip(self._perturbed, (1, -1), strict=True):
                scale = sign * self.settings.epsilon * self._scale
                self._save(Path(folder) / perturbed, {name: (left, scale) for name, left in lefts.items()})
                self.runner.load(perturbed, Path(folder) / perturbed)
            try:
                if reward is None:
                    (plus, minus), _ = mean_losses(self.runner, self._perturbed, examples)
                else:
                    prompts = list(map(prompt_of, examples))
                    plus, minus = (
                        mean_cost(
                            reward,
                            prompts,
                            self.runner.generate(prompts, perturbed, max_new_tokens=max_new_tokens),
                            decode,
                        )
                        for perturbed in self._perturbed
                    )
            finally:
                for perturbed in self._perturbed:
                    # The server may be gone: the step's own failure is what is raised.
                    with suppress(ZosimError):
                        self.runner.unload(perturbed)
        gradient = (plus - minus) / (2 * self.settings.epsilon)
        if not math.isfinite(gradient):
            raise RunError(f"step {self.num_steps}: losses of {plus} and {minus} are not finite")
        row = {
            "step": self.num_steps,
            "loss_plus": plus,
            "loss_minus": minus,
            "projected_grad": gradient,
            "learning_rate": self.settings.learning_rate,
        }
        self._log.append([row])
        self._apply(gradient)
        return row

    # -- state -------------------------------------------------------------------------------------------------

    def _open_interval(self) -> None:
        """If an interval begins, close the open increment and draw ``V`` anew."""
        interval, offset = divmod(self.num_steps, self.settings.lazy_steps)
        if offset == 0 and self.num_steps:
            self.state.close(self.settings.rank)
        if offset == 0 or not self._rights:
            self._rights = {
                name: self._normals(name, self._shapes[name][0], _RIGHT, interval) for name in self._names
            }

    def _apply(self, gradient: float) -> None:
        factor = -self.settings.learning_rate * gradient * self._scale
        for name in self._names:
            # Drawn again, as when a tuning goes on from its log.
            left = self._normals(name, self._shapes[name][1], _LEFT, self.num_steps)
            self.state.add(f"{name}.weight", left, self._rights[name], factor)
        self.num_steps += 1

    def _normals(self, name: str, rows: int, side: int, number: int) -> Tensor:
        key = mixed(self.settings.seed, side, number, self._names.index(name))
        return torch.randn((rows, self.settings.rank), generator=torch.Generator().manual_seed(key))

    def _save(self, directory: Path, perturbed: dict[str, tuple[Tensor, float]]) -> None:
        """Write the increments as one adapter, with the perturbation as the last of them."""
        state = AdapterState()
        for name in self._names:
            key = f"{name}.weight"
            known = self.state.increments.get(key, Increments())
            lefts, rights = list(known.lefts), list(known.rights)
            if name in perturbed:
                left, scale = perturbed[name]
                lefts.append(left * scale)
                rights.append(self._rights[name])
            if isinstance(self._base.get_submodule(name), nn.Linear):
                state.increments[key] = Increments(lefts, rights, known.lost)
            else:  # a weight of inputs by outputs, beside which factors change sides
                state.increments[key] = Increments(rights, lefts, known.lost)
        facts = {"num_steps": str(self.num_steps), "relative_error": repr(self.state.relative_error)}
        digest = self.runner.base_digest
        state.save(self._base, directory, facts if digest is None else facts | {BASE_DIGEST: digest})

    def save(self, directory: Path) -> None:
        """Write the tuned adapter as PEFT reads it.

        Raises
        ------
        RunError
            Before the first step.
        """
        if not self.num_steps:
            raise RunError(f"{self.directory} has no steps, so the adapter would have rank 0")
        self._save(directory, {})

    # -- end ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the log, and unlock the directory."""
        self._log.close()
        self._opened.close()
