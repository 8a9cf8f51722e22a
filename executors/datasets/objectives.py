"""What a run minimises in place of the model's loss: any number made of the logits, differentiable or not.

Zeroth-order steps only compare values, so an error rate serves as well as a loss. It moves in jumps, though: where
neither sign of a perturbation changes an answer, the projected gradient is 0 and the step is spent in vain.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from executors.models.model import IGNORED_LABEL, Batch, Objective
from topology.errors import RunError

LOSS = "loss"


def _asked(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions, labels and which positions are asked for, each (sequences, tokens - 1)."""
    labels = batch["labels"][:, 1:]
    return logits[:, :-1].argmax(-1), labels, labels != IGNORED_LABEL


def error_rate(logits: Tensor, batch: Batch) -> Tensor:
    """Return the share of labelled tokens that the most probable token is not: 1 - accuracy."""
    predicted, labels, asked = _asked(logits, batch)
    return ((predicted != labels) & asked).sum().double() / asked.sum()


def f1_shortfall(logits: Tensor, batch: Batch) -> Tensor:
    """Return 1 - F1, the mean over sequences of the overlap between predicted and labelled tokens as multisets."""
    predicted, labels, asked = _asked(logits, batch)
    scores = [
        _overlap(predicted[row][asked[row]], labels[row][asked[row]])
        for row in range(labels.shape[0])
        if bool(asked[row].any())
    ]
    return torch.tensor(1 - sum(scores) / len(scores), dtype=torch.float64, device=logits.device)


def _overlap(predicted: Tensor, labels: Tensor) -> float:
    """Return 2·common / (predicted + labelled); both have as many tokens."""
    kinds, at = torch.unique(torch.cat([predicted, labels]), return_inverse=True)
    counts = [torch.bincount(part, minlength=kinds.numel()) for part in at.split(labels.numel())]
    return float(torch.minimum(*counts).sum()) / labels.numel()


_NAMED: dict[str, Objective] = {"accuracy": error_rate, "f1": f1_shortfall}


def objective_named(name: str) -> Objective | None:
    """Return what `name` stands for; None for the model's own loss.

    Parameters
    ----------
    name : str
        ``"loss"``, ``"accuracy"``, ``"f1"``, or ``"module:function"`` of logits and batch, its module perhaps in the
        working directory.

    Raises
    ------
    RunError
        If there is no such objective.
    """
    if name == LOSS:
        return None
    if name in _NAMED:
        return _NAMED[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise RunError(
            f"there is no objective {name!r}",
            hint=f"objectives are {LOSS}, {', '.join(_NAMED)}, or module:function of logits and batch",
        )
    try:
        with working_directory_importable():
            objective: Objective = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise RunError(
            f"objective {name!r} cannot be imported: {error}",
            hint="the module is looked for in the working directory, on PYTHONPATH and among installed packages",
        ) from error
    return _checked(name, objective)


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """Find modules beside the user, as ``python -m`` does; the ``zosim`` script itself does not."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _checked(name: str, objective: Objective) -> Objective:
    """Return `objective`, its results refused where they are no scalar."""

    def checked(logits: Tensor, batch: Batch) -> Tensor:
        value = objective(logits, batch)
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64)
        if value.numel() != 1:
            raise RunError(
                f"objective {name} returned a tensor of shape {tuple(value.shape)}, not one number"
            )
        return value.reshape(())

    return checked
