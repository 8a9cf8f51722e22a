"""What a run minimises in place of the model's loss: any number made of the logits, differentiable or not.

Zeroth-order steps only compare values, so an error rate serves as well as a loss. It moves in jumps, though: where
neither sign of a perturbation changes an answer, the projected gradient is 0 and the step is spent in vain.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executors.labels import IGNORED_LABEL
from executors.models.model import Batch, Objective
from topology.errors import RunError

LOSS = "loss"


def _at_labels(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions, labels and which positions are asked for, each (sequences, tokens - 1)."""
    labels = batch["labels"][:, 1:]
    return logits[:, :-1].argmax(-1), labels, labels != IGNORED_LABEL


def error_rate(logits: Tensor, batch: Batch) -> Tensor:
    """Return the share of labelled tokens that the most probable token is not: 1 - accuracy."""
    predicted, labels, is_label = _at_labels(logits, batch)
    return ((predicted != labels) & is_label).sum().double() / is_label.sum()


def f1_shortfall(logits: Tensor, batch: Batch) -> Tensor:
    """Return 1 - F1, the mean over sequences of the overlap between predicted and labelled tokens as multisets."""
    predicted, labels, is_label = _at_labels(logits, batch)
    scores = [
        _overlap(predicted[row][is_label[row]], labels[row][is_label[row]])
        for row in range(labels.shape[0])
        if bool(is_label[row].any())
    ]
    return torch.tensor(1 - sum(scores) / len(scores), dtype=torch.float64, device=logits.device)


def _overlap(predicted: Tensor, labels: Tensor) -> float:
    """Return 2·common / (predicted + labelled); both have as many tokens."""
    kinds, at = torch.unique(torch.cat([predicted, labels]), return_inverse=True)
    counts = [torch.bincount(part, minlength=kinds.numel()) for part in at.split(labels.numel())]
    return float(torch.minimum(*counts).sum()) / labels.numel()


_NAMED: dict[str, Objective] = {"accuracy": error_rate, "f1": f1_shortfall}


def objective_named(name: str, *, from_here: bool = True) -> Objective | None:
    """Return the objective called `name`; None for the model's own loss.

    - `name`: ``"loss"``, ``"accuracy"``, ``"f1"``, or ``"module:function"`` of logits and batch.
    - `from_here`: as of :func:`imported`.

    Raises RunError if there is no such objective.
    """
    if name == LOSS:
        return None
    if name in _NAMED:
        return _NAMED[name]
    if not names_code(name):
        raise RunError(
            f"unknown objective {name!r}",
            hint=f"use {LOSS}, {', '.join(_NAMED)}, or your function of logits and batch, such as "
            "module:function",
        )
    return _checked(name, imported("objective", name, from_here=from_here))


def names_code(name: str) -> bool:
    """Whether the name of an objective or a reward is ``module:function``, which is imported and run."""
    return ":" in name and "//" not in name


def imported(what: str, name: str, *, from_here: bool = True) -> Callable[..., Any]:
    """Return the function that ``module:function`` names.

    `from_here`: whether the module may lie in the working directory. A resumed run does not look there: people stand in the
    directory of the run that they go on with, and that may be untrusted.

    Raises RunError if it cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        with working_directory_importable() if from_here else nullcontext():
            named: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        searched = "on PYTHONPATH and among installed packages"
        raise RunError(
            f"cannot import {what} {name!r}: {error}",
            hint=f"the module is looked for in the working directory, {searched}"
            if from_here
            else f"a resumed run looks for the module {searched}, and not in the working directory",
        ) from error
    return named


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """Let modules of the working directory be imported, as ``python -m`` does."""
    here = str(Path.cwd())
    # Behind all else: a file of the user's takes no installed module's place.
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _checked(name: str, objective: Objective) -> Objective:
    """Wrap `objective` to raise where its result is not a scalar."""

    def checked(logits: Tensor, batch: Batch) -> Tensor:
        value = objective(logits, batch)
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64)
        if value.numel() != 1:
            raise RunError(
                f"objective {name} returned a tensor of shape {tuple(value.shape)} instead of one number"
            )
        return value.reshape(())

    return checked
