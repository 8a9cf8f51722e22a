"""Rewards of generated text: a user's function, or an endpoint on this machine."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executors.datasets.generation import Generation, continued, prompt_of
from executors.datasets.objectives import imported, names_code
from executors.datasets.prompts import Example
from executors.json_server import JsonServer, checked_limit_s, late
from executors.models.model import Batch, TextObjective
from topology.errors import RunError, ZosimError

Text = str | list[int]
"""What was generated: text where the model has a tokenizer, tokens elsewhere."""

Reward = Callable[[Sequence[Text], Sequence[Text]], list[float]]
"""Called with prompts and what was made of them; higher is better."""


def reward_named(name: str, timeout_s: float, *, from_here: bool = True) -> Reward:
    """Return the reward called `name`, with its answers checked and its time limited.

    `name`: ``"module:function"``, called with prompts and texts; or the address of an endpoint on this machine, which is sent
    ``{"prompts": [...], "texts": [...]}`` and answers ``{"rewards": [...]}``.

    Raises RunError if there is no such function, or the address is another machine's. The reward raises it for what is late, gone, no
    number or not one number for each text.
    """
    if "//" in name:
        ask = _endpoint(name, timeout_s)
    elif names_code(name):
        ask = _in_time(name, imported("reward", name, from_here=from_here), timeout_s)
    else:
        raise RunError(
            f"unknown reward {name!r}",
            hint="use your function of prompts and texts, such as module:function, or "
            "http://127.0.0.1:PORT/PATH",
        )

    def reward(prompts: Sequence[Text], texts: Sequence[Text]) -> list[float]:
        return _checked(name, ask(list(prompts), list(texts)), len(texts))

    return reward


def mean_cost(
    reward: Reward,
    prompts: Sequence[Sequence[int]],
    made: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str] | None,
) -> float:
    """Return minus the mean reward of generated texts, decoded where possible: what a step minimises."""
    as_text: Callable[[Sequence[int]], Text] = decode or list
    return -math.fsum(reward(list(map(as_text, prompts)), list(map(as_text, made)))) / len(made)


def objective_of_text(
    reward: Reward, generation: Generation, decode: Callable[[Sequence[int]], str] | None
) -> TextObjective:
    """Return the objective of a run that maximises a reward of greedy text.

    - `generation`: how text is made; :attr:`Generation.decode` is not asked.
    - `decode`: makes text of tokens for the reward; without it the reward is given tokens.
    """

    def cost(model: nn.Module, logits: Tensor, batch: Batch) -> float:
        # These logits have each text's first token; every further one takes a forward.
        prompts = list(map(prompt_of, _examples(batch)))
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=logits.device)
        first = logits[torch.arange(len(prompts), device=logits.device), ends].argmax(-1).tolist()
        return mean_cost(reward, prompts, continued(model, prompts, generation, first=first), decode)

    return TextObjective(cost)


def _examples(batch: Batch) -> list[Example]:
    """Return the examples of a batch that is padded on the right."""
    return [
        Example(tuple(tokens[:length]), tuple(labels[:length]))
        for tokens, labels, length in zip(
            batch["input_ids"].tolist(),
            batch["labels"].tolist(),
            batch["attention_mask"].sum(1).tolist(),
            strict=True,
        )
    ]


def _in_time(name: str, function: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """Wrap `function` to give up after a timeout. Its thread cannot be ended, and is left behind."""
    checked_limit_s(timeout_s, "reward")

    def ask(prompts: list[Text], texts: list[Text]) -> Any:
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((function(prompts, texts), None))
            except Exception as error:  # noqa: BLE001 - the user's code
                answers.put((None, error))

        threading.Thread(target=work, daemon=True).start()
        try:
            answer, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise late("reward", f"reward {name}", timeout_s) from None
        if isinstance(error, ZosimError):
            raise error
        if error is not None:
            raise RunError(f"reward {name} failed: {type(error).__name__}: {error}") from error
        return answer

    return ask


def _endpoint(url: str, timeout_s: float) -> Callable[..., Any]:
    server = JsonServer.at(url, "reward", timeout_s, is_local=True)

    def ask(prompts: list[Text], texts: list[Text]) -> Any:
        status, answer = server.ask("POST", body={"prompts": prompts, "texts": texts})
        if status >= 400 or not isinstance(answer, dict) or "rewards" not in answer:
            raise RunError(
                f"{server.name} answered ({status}) {str(answer)[:120]!r}",
                hint='the answer must be {"rewards": [...]}',
            )
        return answer["rewards"]

    return ask


def _checked(name: str, answer: object, num: int) -> list[float]:
    try:
        rewards = [float(value) for value in answer]  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        raise RunError(f"reward {name} returned {str(answer)[:120]} instead of a list of numbers") from None
    if len(rewards) != num:
        raise RunError(f"reward {name} returned {len(rewards)} numbers for {num} texts")
    for number, value in enumerate(rewards):
        if not math.isfinite(value):
            raise RunError(
                f"reward {name} gave {value} for text {number}", hint="a reward must be a finite number"
            )
    return rewards
