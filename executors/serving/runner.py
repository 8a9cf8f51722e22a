"""The interface of a serving runner on which zeroth-order steps can run: load adapters, score, generate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from executors.datasets.prompts import Example
from executors.labels import IGNORED_LABEL
from topology.errors import RunError


@dataclass(frozen=True)
class Request:
    """Tokens to score.

    Attributes
    ----------
    first : int
        Of the tokens, the first whose log-probability is asked for; at least 1.
    adapter : str or None
        Name of what stands beside the base; None for the base alone.
    """

    tokens: tuple[int, ...]
    first: int = 1
    adapter: str | None = None


class ServingRunner(Protocol):
    """A base model with adapters, one of which each request may name.

    :class:`executors.serving.runtime.Runtime` is one in this process; :class:`executors.serving.client.RemoteServer` one behind the
    OpenAI-compatible protocol.
    """

    @property
    def base_digest(self) -> str | None:
        """Hash of the base's weights; None where the server does not tell."""

    @property
    def base_dtype(self) -> str | None:
        """Format that :attr:`base_digest` reads them in; None for that of their files."""

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter that PEFT wrote, replacing one of the same name.

        Raises
        ------
        ModelError
            If it does not belong beside this base.
        """

    def unload(self, name: str) -> None:
        """Unload an adapter."""

    def adapters(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return the log-probabilities of every request's tokens from :attr:`Request.first` on."""

    def generate(
        self, prompts: Sequence[Sequence[int]], adapter: str | None, *, max_new_tokens: int
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, without the token that ends it."""


def mean_losses(
    runner: ServingRunner, adapters: Sequence[str | None], examples: Sequence[Example]
) -> tuple[list[float], int]:
    """Return the mean loss over labelled tokens with each adapter, scored together, and the number of these tokens.

    Raises RunError if nothing is asked of the examples.
    """
    # No token stands before the first one: its label has no score.
    firsts = [
        (example, max(1, example.label_positions[0])) for example in examples if example.label_positions
    ]
    if not firsts:
        raise RunError("the examples have no labels")
    scores = iter(
        runner.score(
            [Request(example.input_ids, first, name) for name in adapters for example, first in firsts]
        )
    )
    losses, num_tokens = [], 0
    for _ in adapters:
        kept = [
            [
                score
                for score, label in zip(next(scores), example.labels[first:], strict=True)
                if label != IGNORED_LABEL
            ]
            for example, first in firsts
        ]
        num_tokens = sum(map(len, kept))
        losses.append(-math.fsum(map(math.fsum, kept)) / num_tokens)
    return losses, num_tokens
