"""Evaluation while a session trains: its present weights, segment by segment, wherever they reside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from executors.data import Dataset
from executors.evaluate import evaluate_choices, evaluate_perplexity
from executors.prompts import IGNORED
from executors.session import Session
from topology.errors import DataError


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

    Attributes
    ----------
    metric : str
        What a better model has more of (``"accuracy"``) or less of (``"loss"``).
    """

    def __init__(self, session: Session, data: Dataset, *, batch_size: int, num_examples: int | None) -> None:
        self._session = session
        self._data = data
        self._batch_size = batch_size
        self._num_examples = num_examples
        self.metric = "accuracy" if _asks_a_question(data) else "loss"

    def __call__(self) -> dict[str, Any]:
        """Return the metrics at the present weights: accuracy among label words or choices, else perplexity."""
        if self.metric == "accuracy":
            try:
                return asdict(self._evaluated(evaluate_choices))
            except DataError:
                self.metric = "loss"  # the lines offer nothing to choose among
        return asdict(self._evaluated(evaluate_perplexity))

    def _evaluated(self, evaluate: Callable[..., Any]) -> Any:
        return evaluate(
            _Weights(self._session),
            self._data,
            batch_size=self._batch_size,
            num_examples=self._num_examples,
        )

    def is_better(self, metrics: dict[str, Any], best: dict[str, Any] | None) -> bool:
        """Whether `metrics` are better than the best so far."""
        if best is None:
            return True
        if self.metric == "accuracy" and metrics["accuracy"] != best["accuracy"]:
            return bool(metrics["accuracy"] > best["accuracy"])
        return bool(metrics["loss"] < best["loss"])


def _asks_a_question(data: Dataset) -> bool:
    """Whether the first line offers answers, or has a prompt before the one that it gives."""
    (question,) = data.questions([0])
    return len(question.candidates) > 1 or question.candidates[0].labels[0] == IGNORED
