"""What a serving engine must offer for zeroth-order steps to run on it: adapters that come and go, scores, and text."""

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
    """Tokens that are to be scored.

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


class ServingEngine(Protocol):
    """A base model with adapters beside it, each of which some requests are for.

    :class:`executors.serving.runtime.Runtime` is one in this process; :class:`executors.serving.client.RemoteEngine` one behind the
    OpenAI-compatible protocol.
    """

    @property
    def base_digest(self) -> str | None:
        """Hash of the base's weights; None where the engine does not tell."""

    @property
    def base_dtype(self) -> str | None:
        """Format that :attr:`base_digest` reads them in; None for that of their files."""

    def load(self, name: str, directory: Path) -> None:
        """Take an adapter as PEFT writes it, in place of one of the same name.

        Raises
        ------
        ModelError
            If it does not belong beside this base.
        """

    def unload(self, name: str) -> None:
        """Let an adapter go."""

    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that are there."""

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return of every request the log-probabilities of its tokens from :attr:`Request.first` on."""

    def generate(
        self, prompts: Sequence[Sequence[int]], adapter: str | None, *, max_new_tokens: int
    ) -> list[list[int]]:
        """Return the most probable continuation of each prompt, a token that ends it left out."""


def mean_losses(
    engine: ServingEngine, adapters: Sequence[str | None], examples: Sequence[Example]
) -> tuple[list[float], int]:
    """Return the mean loss over labelled tokens beside each of some adapters, all scored at once, and how many tokens these are.

    Raises
    ------
    RunError
        If nothing is asked of the examples.
    """
    # No token stands before the first one: its label has no score.
    firsts = [(example, max(1, example.asked[0])) for example in examples if example.asked]
    if not firsts:
        raise RunError("nothing is asked of the examples")
    scores = iter(
        engine.score(
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
