"""Evaluations of a run while it trains: when they are due, which was the best, and its weights kept.

All ranks evaluate alike, so that they agree on the outcome and none waits long for another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from executors.models.weight_files import save_pretrained
from executors.runs.adapters import save_alone
from executors.runs.inputs import copy_tokenizer, evaluation_data, generation_of
from executors.runs.measure import Evaluator, is_better
from executors.runs.run_files import BEST_NAME, METRICS_NAME, evaluations_of
from executors.runs.session import Session
from executors.runs.settings import RunSettings
from topology.errors import RunError


class Evaluations:
    """The evaluations of one run.

    Parameters
    ----------
    settings : RunSettings

    Attributes
    ----------
    best, latest : dict or None
        What was found, with the ``num_steps`` behind it.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._data = evaluation_data(settings)
        self._evaluator: Evaluator | None = None
        self.best: dict[str, Any] | None = None
        self.latest: dict[str, Any] | None = None

    def recall(self, directory: Path, num_steps: int) -> None:
        """Remember what an earlier process found in the first so many steps.

        Raises
        ------
        RunError
            If an evaluation's row lacks what evaluations are compared by.
        """
        for row in evaluations_of(directory, num_steps):
            try:
                if is_better(row, self.best):
                    self.best = row
            except (KeyError, TypeError) as error:
                raise RunError(
                    f"{directory / METRICS_NAME} is damaged in the evaluation after {row['num_steps']} steps: {error}",
                    hint="restore the file from a copy, or remove it: training goes on without",
                ) from error
            self.latest = row

    def is_due(self, num_steps: int) -> bool:
        """Whether an evaluation is due after so many steps, and no earlier process did it."""
        wanted = self._settings.evaluation
        if wanted is None or (self.latest is not None and self.latest["num_steps"] == num_steps):
            return False
        ends = (0, self._settings.num_steps)
        return num_steps in ends or bool(wanted.every and num_steps % wanted.every == 0)

    def evaluate(self, session: Session) -> dict[str, Any]:
        """Evaluate the present weights, keep them if they are the best and that is wanted, and return the metrics."""
        evaluator = self._evaluator or self._made(session)
        self._evaluator = evaluator
        metrics = {"num_steps": session.num_steps, "split": "eval", **evaluator()}
        wanted = self._settings.evaluation
        if is_better(metrics, self.best):
            self.best = metrics
            if wanted is not None and wanted.keep_best:
                session.flush()
                session.on_rank_0(lambda: self._keep(session), "writing the best weights")
        self.latest = metrics
        return metrics

    def _made(self, session: Session) -> Evaluator:
        wanted = self._settings.evaluation
        assert wanted is not None
        assert self._data is not None
        return Evaluator(
            session,
            self._data,
            batch_size=self._settings.plan.batch,
            num_examples=wanted.num_examples,
            task=wanted.task,
            generation=generation_of(self._settings, wanted),
        )

    def _keep(self, session: Session) -> None:
        folder, adapters = Path(self._settings.out) / BEST_NAME, self._settings.adapters
        storage = self._settings.plan.weights.dtype
        if adapters is not None:
            save_alone(session.model, folder, adapters, storage)
            return
        save_pretrained(session.model, folder, storage)
        copy_tokenizer(self._settings.model, folder)
