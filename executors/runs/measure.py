"""Evaluation while a session trains: its present weights, segment by segment, wherever they reside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from executors.datasets.data import Dataset
from executors.models.model import IGNORED_LABEL
from executors.runs.evaluate import Generation, evaluate_choices, evaluate_generation, evaluate_perplexity
from executors.runs.session import Session
from executors.runs.settings import TaskName
from topology.errors import DataError

NUM_SHOWN_ANSWERS = 3
"""Generated answers that are kept beside the metrics of an evaluation."""


@dataclass(frozen=True)
class _Weights:
    """A session as the evaluations call a model."""

    session: Session

    @property
    def device(self) -> torch.device:
        return self.session.device

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(
            logits=self.session.logits({"input_ids": input_ids, "attention_mask": attention_mask})
        )


class Evaluator:
    """Evaluates one session on one dataset.

    Parameters
    ----------
    session : Session
    data : Dataset
    batch_size : int
        Sequences per forward.
    num_examples : int or None
        Only the first so many.
    task : str
        ``"choice"``, ``"perplexity"``, ``"generation"``, or ``"auto"``: told by the lines.
    generation : Generation
        How free answers are made and read.
    """

    def __init__(
        self,
        session: Session,
        data: Dataset,
        *,
        batch_size: int,
        num_examples: int | None,
        task: TaskName,
        generation: Generation,
    ) -> None:
        self._session = session
        self._data = data
        self._batch_size = batch_size
        self._num_examples = num_examples
        self._generation = generation
        self.task = _task_of(data) if task == "auto" else task
        self._may_change = task == "auto"

    def __call__(self) -> dict[str, Any]:
        """Return the metrics at the present weights.

        Raises
        ------
        DataError
            If the lines do not ask for what the task is.
        """
        if self.task == "choice":
            try:
                return asdict(self._evaluated(evaluate_choices))
            except DataError:
                if not self._may_change:
                    raise
                # The lines offer nothing to choose among: a prompt of text wants an answer in words.
                template = self._data.template
                self.task = "generation" if template and template.asks_for_label else "perplexity"
        if self.task == "generation":
            metrics = asdict(self._evaluated(evaluate_generation, self._generation))
            return metrics | {"answers": list(metrics["answers"][:NUM_SHOWN_ANSWERS])}
        return asdict(self._evaluated(evaluate_perplexity))

    def _evaluated(self, evaluate: Callable[..., Any], *how: Any) -> Any:
        return evaluate(
            _Weights(self._session),
            self._data,
            *how,
            batch_size=self._batch_size,
            num_examples=self._num_examples,
        )


def is_better(metrics: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Whether `metrics` are better than the best so far: by F1, else accuracy, else loss."""
    return best is None or _merit(metrics) > _merit(best)


def _merit(metrics: Mapping[str, Any]) -> tuple[float, ...]:
    if "f1" in metrics:
        return metrics["f1"], metrics["exact_match"]
    return metrics.get("accuracy", 0.0), -metrics["loss"]


def _task_of(data: Dataset) -> TaskName:
    """Return a choice if the first line offers answers, or has a prompt before the one that it gives."""
    (question,) = data.questions([0])
    asks = len(question.candidates) > 1 or question.candidates[0].labels[0] == IGNORED_LABEL
    return "choice" if asks else "perplexity"
