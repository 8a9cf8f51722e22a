"""Evaluations of a run while it trains: when they are due, what they measure, which was the best, and its weights kept.

All ranks evaluate alike, so that they agree on the outcome and none waits long for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from costmodel.models.configs import LoRA, Prefix
from executors.datasets.generation import Generation
from executors.labels import IGNORED_LABEL
from executors.models.weight_files import save_pretrained
from executors.runs.adapters import save_adapters_only
from executors.runs.evaluate import evaluate_choices, evaluate_generation, evaluate_perplexity
from executors.runs.inputs import copy_tokenizer, evaluation_data, generation_of
from executors.runs.run_files import BEST_NAME, METRICS_NAME, evaluations_of
from executors.runs.session import Session
from executors.runs.settings import RunSettings, TaskName
from topology.errors import DataError, RunError

NUM_SHOWN_ANSWERS = 3
"""Generated answers that are kept beside the metrics of an evaluation."""


@dataclass(frozen=True)
class EvaluatedWeights:
    """A session that evaluations can call as a model."""

    session: Session

    @property
    def device(self) -> torch.device:
        """Device of the forwards."""
        return self.session.device

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return an object with ``logits``."""
        return SimpleNamespace(
            logits=self.session.logits({"input_ids": input_ids, "attention_mask": attention_mask})
        )


def is_better(metrics: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Whether `metrics` are better than the best so far: by F1, else accuracy, else loss."""
    return best is None or _merit(metrics) > _merit(best)


def _merit(metrics: Mapping[str, Any]) -> tuple[float, ...]:
    if "f1" in metrics:
        return metrics["f1"], metrics["exact_match"]
    return metrics.get("accuracy", 0.0), -metrics["loss"]


class Evaluations:
    """The evaluations of one run.

    - `best`, `latest`: Metrics, with the ``num_steps`` behind them.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._data = evaluation_data(settings)
        self._task: TaskName | None = None
        self._generation: Generation | None = None
        self.best: dict[str, Any] | None = None
        self.latest: dict[str, Any] | None = None

    def recall(self, directory: Path, num_steps: int) -> None:
        """Take over the evaluations that an earlier process recorded in the first `num_steps` steps.

        Raises RunError if an evaluation's row lacks what evaluations are compared by.
        """
        for row in evaluations_of(directory, num_steps):
            try:
                if is_better(row, self.best):
                    self.best = row
            except (KeyError, TypeError) as error:
                raise RunError(
                    f"{directory / METRICS_NAME} is damaged in the evaluation after {row['num_steps']} steps: {error}",
                    hint="restore the file from a copy, or remove it; training continues without it",
                ) from error
            self.latest = row

    def is_due(self, num_steps: int) -> bool:
        """Whether an evaluation is due after `num_steps` steps and was not done yet."""
        wanted = self._settings.evaluation
        if wanted is None or (self.latest is not None and self.latest["num_steps"] == num_steps):
            return False
        ends = (0, self._settings.num_steps)
        return num_steps in ends or bool(wanted.every and num_steps % wanted.every == 0)

    def evaluate(self, session: Session) -> dict[str, Any]:
        """Evaluate the current weights, keep them if they are the best and ``--keep-best`` is set, and return the metrics."""
        metrics = {"num_steps": session.num_steps, "split": "eval", **self._metrics(session)}
        wanted = self._settings.evaluation
        if is_better(metrics, self.best):
            self.best = metrics
            if wanted is not None and wanted.keep_best:
                session.on_rank_0(lambda: self._keep(session), "writing the best weights")
        self.latest = metrics
        return metrics

    def _metrics(self, session: Session) -> dict[str, Any]:
        """Return the metrics at the current weights. With ``--eval-task auto``, the first lines decide the task.

        Raises DataError if the lines do not ask for what the task is.
        """
        wanted, data, is_causal = self._settings.evaluation, self._data, session.plan.model.is_causal
        assert wanted is not None
        assert data is not None
        if self._task is None:
            (question,) = data.questions([0])
            offers = len(question.candidates) > 1 or question.candidates[0].labels[0] == IGNORED_LABEL
            self._task = wanted.task if wanted.task != "auto" else "choice" if offers else "perplexity"
            if self._task == "generation" and not is_causal:
                raise RunError(
                    "a masked model cannot generate text",
                    hint="use --eval-task choice or perplexity",
                )

        def evaluated(evaluate: Callable[..., Any], *how: Any) -> dict[str, Any]:
            batch_size, num_examples = self._settings.plan.batch, wanted.num_examples
            model = EvaluatedWeights(session)
            return asdict(evaluate(model, data, *how, batch_size=batch_size, num_examples=num_examples))

        if self._task == "choice":
            try:
                return evaluated(evaluate_choices)
            except DataError:
                if wanted.task != "auto":
                    raise
                # The lines offer nothing to choose among: a prompt of text wants an answer in words.
                asks = is_causal and data.template is not None and data.template.asks_for_label
                self._task = "generation" if asks else "perplexity"
        if self._task == "generation":
            self._generation = self._generation or generation_of(self._settings, wanted)
            metrics = evaluated(evaluate_generation, self._generation)
            return metrics | {"answers": list(metrics["answers"][:NUM_SHOWN_ANSWERS])}
        return evaluated(evaluate_perplexity)

    def _keep(self, session: Session) -> None:
        folder, adapters = Path(self._settings.run.out) / BEST_NAME, self._settings.adapters
        storage = self._settings.plan.storage_dtype
        if isinstance(adapters, LoRA | Prefix):
            save_adapters_only(session.model, folder, adapters, storage)
        else:
            save_pretrained(session.model, folder, storage)
            copy_tokenizer(self._settings.run.model, folder)
