"""Greedy generation, token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executors.datasets.batches import pad
from executors.datasets.prompts import Example
from topology.errors import DataError


class CausalModel(Protocol):
    """A model whose logits at a position are of the next one's label, as transformers calls causal ones."""

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return an object with ``logits`` of shape (sequences, tokens, vocabulary)."""


@dataclass(frozen=True)
class Generation:
    """How greedy answers are made and read."""

    decode: Callable[[Sequence[int]], Any]  # turns token ids into text, as a tokenizer's ``decode``
    # Tokens that end an answer and do not belong to it, such as a newline's or the end of text.
    stop_tokens: Sequence[int] = ()
    max_new_tokens: int = 32
    max_length: int | None = None  # tokens of prompt and answer together at most: the model's positions


def prompt_of(example: Example) -> tuple[int, ...]:
    """Return the tokens before the first label, or all of an example without labels.

    Raises DataError if labels begin with the first token.
    """
    prompt = example.input_ids[: example.label_positions[0]] if example.label_positions else example.input_ids
    if not prompt:
        raise DataError(
            "a line is labelled from its first token on, so it has no prompt to answer",
            hint="label only the answer's tokens, with -100 before, or use --eval-task perplexity",
        )
    return prompt


@torch.no_grad()
def continued(
    model: CausalModel,
    prompts: Sequence[tuple[int, ...]],
    generation: Generation,
    *,
    first: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the greedy continuation of each prompt, with a forward over the whole sequences for every token.

    `first`: the first token of each, where it is known already.
    """

    def next_tokens(sequences: Sequence[tuple[int, ...]]) -> list[int]:
        logits = logits_of(model, [Example(sequence, sequence) for sequence in sequences])
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=logits.device)
        tokens: list[int] = logits[torch.arange(len(last), device=logits.device), last].argmax(-1).tolist()
        return tokens

    return continued_by(next_tokens, prompts, generation, first=first)


def continued_by(
    next_tokens: Callable[[Sequence[tuple[int, ...]]], Sequence[int]],
    prompts: Sequence[tuple[int, ...]],
    generation: Generation,
    *,
    first: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return continuations as :func:`continued`, with next tokens from `next_tokens`."""
    texts = continuing(prompts, generation, first=first)
    try:
        sequences = next(texts)
        while True:
            sequences = texts.send(next_tokens(sequences))
    except StopIteration as end:
        answers: list[list[int]] = end.value
        return answers


def continuing(
    prompts: Sequence[tuple[int, ...]], generation: Generation, *, first: Sequence[int] | None = None
) -> Generator[list[tuple[int, ...]], Sequence[int], list[list[int]]]:
    """Yield the sequences that need a next token, receive these tokens, and return the continuations at the end."""
    answers: list[list[int]] = [[] for _ in prompts]
    stops, longest = set(generation.stop_tokens), generation.max_length
    going = list(range(len(prompts)))
    for number in range(generation.max_new_tokens):
        # A prompt that fills the model's positions has no position left for another token.
        going = [at for at in going if longest is None or len(prompts[at]) + len(answers[at]) < longest]
        if not going:
            break
        tokens: Sequence[int]
        if number == 0 and first is not None:
            tokens = [first[at] for at in going]
        else:
            tokens = yield [(*prompts[at], *answers[at]) for at in going]
        for at, token in zip(going, tokens, strict=True):
            answers[at].append(token)
        going = [at for at in going if answers[at][-1] not in stops]
    return [answer[:-1] if answer and answer[-1] in stops else answer for answer in answers]


def logits_of(model: CausalModel, examples: Sequence[Example]) -> Tensor:
    """Return a model's logits of examples padded on the right."""
    batch, device = pad(examples), getattr(model, "device", None)
    if not isinstance(device, torch.device):
        device = torch.device("cpu")
    logits: Tensor = model(
        input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)
    ).logits
    return logits
