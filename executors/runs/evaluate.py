"""How well a model does: label words by log-probability, perplexity, greedy generation.

A model is anything called as ``model(input_ids=..., attention_mask=...)`` whose result has ``logits``. Rows are
padded on the right and taken in order, so a result is a function of the weights, the data and the batch size.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from executors.datasets.data import Dataset
from executors.datasets.generation import CausalModel, Generation, continued, logits_of, prompt_of
from executors.datasets.prompts import Example, Question
from executors.labels import IGNORED_LABEL
from topology.errors import DataError

MOST_CLASSES = 64
"""More distinct answers than this are not taken for the label words of a classification."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """Classification or multiple choice by the log-probability of the answers."""

    num_examples: int
    num_correct: int
    # accuracy, accuracy_stderr: share of right answers, and its binomial standard error.
    accuracy: float
    accuracy_stderr: float
    # loss, loss_stderr: mean over examples of the negative log-probability per token of the right answer, in nats, and
    # the standard error of that mean.
    loss: float
    loss_stderr: float


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Loss over every token that carries a label."""

    num_examples: int
    num_tokens: int
    # loss, loss_stderr: mean negative log-probability per token, in nats; its standard error counts examples as
    # independent.
    loss: float
    loss_stderr: float
    perplexity: float  # ``exp(loss)``


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Greedy answers against the expected ones."""

    num_examples: int
    # exact_match, exact_match_stderr: share of answers that are equal after normalisation.
    exact_match: float
    exact_match_stderr: float
    # f1, f1_stderr: mean over examples of the harmonic mean of precision and recall over words.
    f1: float
    f1_stderr: float
    answers: tuple[str, ...]  # what was generated, in the order of the data


@torch.no_grad()
def evaluate_choices(
    model: CausalModel,
    data: Dataset,
    *,
    num_examples: int | None = None,
    batch_size: int = 32,
    per_token: bool = False,
) -> ChoiceResult:
    """Return loss and accuracy of choosing among label words or choices.

    - `model`: in the mode (train or eval) and on the device that it is to be judged in.
    - `data`: with label words or choices. Lines of tokens choose among the distinct answers that the data holds.
    - `num_examples`: only the first so many.
    - `batch_size`: sequences per forward.
    - `per_token`: whether candidates are compared by their mean rather than their summed log-probability, which does not favour
      short ones.

    Raises DataError if the lines do not give at least two candidates.
    """
    questions = _with_candidates(data.questions(_first(data, num_examples)), data)
    rows = list(_rows(questions))
    scores = iter(_scores(model, rows, batch_size))
    right, losses = [], []
    for question in questions:
        scored = [next(scores) for _ in question.candidates]
        lengths = [len(_predicted(candidate)) for candidate in question.candidates]
        means = [score / length for score, length in zip(scored, lengths, strict=True)]
        chosen = means if per_token else scored
        # Of equal scores the first candidate wins.
        right.append(float(max(range(len(chosen)), key=chosen.__getitem__) == question.answer))
        losses.append(-means[question.answer])
    (accuracy, accuracy_stderr), (loss, loss_stderr) = _share(right), _mean(losses)
    return ChoiceResult(len(questions), int(sum(right)), accuracy, accuracy_stderr, loss, loss_stderr)


@torch.no_grad()
def evaluate_perplexity(
    model: CausalModel, data: Dataset, *, num_examples: int | None = None, batch_size: int = 32
) -> PerplexityResult:
    """Return the loss per labelled token and its exponential; parameters as :func:`evaluate_choices`."""
    examples = data.examples(_first(data, num_examples))
    scores = _scores(
        model, [_Row(example, ((example, _predicted(example)),)) for example in examples], batch_size
    )
    counts = [len(_predicted(example)) for example in examples]
    loss = -math.fsum(scores) / sum(counts)
    # A ratio of two sums: its error is that of the residuals score + loss · count.
    residuals = [score + loss * count for score, count in zip(scores, counts, strict=True)]
    num = len(examples)
    spread = math.sqrt(math.fsum(r * r for r in residuals) * num / max(num - 1, 1)) / sum(counts)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # beyond, exp raises
    return PerplexityResult(num, sum(counts), loss, spread, perplexity)


@torch.no_grad()
def evaluate_generation(
    model: CausalModel,
    data: Dataset,
    generation: Generation,
    *,
    num_examples: int | None = None,
    batch_size: int = 32,
) -> GenerationResult:
    """Return exact match and F1 of greedy answers to the prompts before the first labelled token.

    Raises DataError if a line has no prompt, since it carries labels from its first token on.
    """
    examples = data.examples(_first(data, num_examples))
    prompts = [prompt_of(example) for example in examples]
    answers = [
        generation.decode(tokens)
        for start in range(0, len(prompts), batch_size)
        for tokens in continued(model, prompts[start : start + batch_size], generation)
    ]
    expected = [
        generation.decode([label for label in example.labels if label != IGNORED_LABEL])
        for example in examples
    ]
    pairs = list(zip(answers, expected, strict=True))
    exact = _share([float(normalised(answer) == normalised(truth)) for answer, truth in pairs])
    overlap = _mean([word_f1(answer, truth) for answer, truth in pairs])
    return GenerationResult(len(examples), *exact, *overlap, tuple(answers))


def normalised(answer: str) -> str:
    """Return an answer without case, punctuation, articles and extra spaces, as question answering compares them.

    >>> normalised("The  Eiffel Tower.")
    'eiffel tower'
    """
    bare = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def word_f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall over the words of normalised answers.

    >>> word_f1("the tall tower", "tower of Eiffel")
    0.4
    """
    ours, theirs = normalised(answer).split(), normalised(truth).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


class _Row(NamedTuple):
    """One forward's sequence, and what is read off it: pairs of an example and the positions scored in it."""

    example: Example
    read: tuple[tuple[Example, tuple[int, ...]], ...]


def _first(data: Dataset, num_examples: int | None) -> range:
    return range(len(data) if num_examples is None else min(num_examples, len(data)))


def _predicted(example: Example) -> tuple[int, ...]:
    """Labelled positions that something predicts: nothing predicts the first."""
    return tuple(at for at in example.label_positions if at > 0)


def _rows(questions: Sequence[Question]) -> Iterator[_Row]:
    """One forward per candidate, or per question where candidates differ in one token only."""
    for question in questions:
        candidates = question.candidates
        label_positions = {_predicted(candidate) for candidate in candidates}
        (positions, *others) = label_positions
        begins = {candidate.input_ids[: positions[0]] for candidate in candidates}
        if not others and len(positions) == 1 and len(begins) == 1:
            yield _Row(candidates[0], tuple((candidate, positions) for candidate in candidates))
        else:
            for candidate in candidates:
                yield _Row(candidate, ((candidate, _predicted(candidate)),))


def _scores(model: CausalModel, rows: Sequence[_Row], batch_size: int) -> list[float]:
    """Return the summed log-probability of every (example, positions) read off the rows, in order."""
    scores = []
    for start in range(0, len(rows), batch_size):
        group = rows[start : start + batch_size]
        logits = logits_of(model, [row.example for row in group])
        for row, row_logits in zip(group, logits, strict=True):
            for example, positions in row.read:
                labels = torch.tensor([example.labels[at] for at in positions], device=logits.device)
                before = torch.tensor(positions, device=logits.device) - 1
                # In double precision: a sum over a large vocabulary is rounded once, on any device.
                log_probabilities = row_logits[before].double().log_softmax(-1)
                scores.append(float(log_probabilities.gather(1, labels[:, None]).sum()))
    return scores


def _with_candidates(questions: list[Question], data: Dataset) -> list[Question]:
    if any(len(question.candidates) > 1 for question in questions):
        return questions
    answers = sorted({_answer(question.candidates[0]) for question in questions})
    if not 2 <= len(answers) <= MOST_CLASSES:
        raise DataError(
            f"{data.lines.path} has {len(answers)} distinct answers, but a classification needs 2 to "
            f"{MOST_CLASSES}",
            hint="give label words or choices, or use --eval-task perplexity or generation",
        )
    return [_among(question.candidates[0], answers) for question in questions]


def _answer(example: Example) -> tuple[int, ...]:
    return tuple(example.labels[at] for at in _predicted(example))


def _among(example: Example, answers: Sequence[tuple[int, ...]]) -> Question:
    """Return the question that offers every answer in place of the example's own."""
    positions = _predicted(example)
    is_masked = any(example.input_ids[at] != example.labels[at] for at in positions)
    candidates = []
    for answer in answers:
        if not is_masked:
            before, after = example.input_ids[: positions[0]], example.input_ids[positions[-1] + 1 :]
            labels = [IGNORED_LABEL] * len(before) + [*answer] + [IGNORED_LABEL] * len(after)
            candidates.append(Example(before + answer + after, tuple(labels)))
            continue
        # Masks stand in the answer's place: the tokens stay, and labels alone differ.
        if len(answer) != len(positions):
            raise DataError(
                f"an answer of {len(answer)} tokens does not fit {len(positions)} masks",
                hint="all choices need the same number of tokens; use one token per label word",
            )
        labels = list(example.labels)
        for at, token in zip(positions, answer, strict=True):
            labels[at] = token
        candidates.append(Example(example.input_ids, tuple(labels)))
    return Question(tuple(candidates), answers.index(_answer(example)))


def _share(outcomes: Sequence[float]) -> tuple[float, float]:
    share = math.fsum(outcomes) / len(outcomes)
    return share, math.sqrt(share * (1 - share) / len(outcomes))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    num = len(values)
    mean = math.fsum(values) / num
    variance = math.fsum((value - mean) ** 2 for value in values) / max(num - 1, 1)
    return mean, math.sqrt(variance / num)
