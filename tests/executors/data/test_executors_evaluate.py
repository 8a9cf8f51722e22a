"""Evaluation against hand-made models whose answers are known, and against transformers' own loss and generation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import OPTConfig, OPTForCausalLM

from executors.datasets.batches import pad
from executors.datasets.data import Dataset, open_dataset
from executors.datasets.generation import Generation
from executors.runs.evaluate import (
    evaluate_choices,
    evaluate_generation,
    evaluate_perplexity,
    word_f1,
)
from topology.errors import DataError

VOCAB = 20


class NextToken:
    """A model that believes with probability 1/2 that the next token is this one plus one, else anything."""

    def __init__(self) -> None:
        self.num_rows = 0

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        self.num_rows += len(input_ids)
        probabilities = torch.full((*input_ids.shape, VOCAB), 0.5 / (VOCAB - 1))
        probabilities.scatter_(-1, ((input_ids + 1) % VOCAB)[..., None], 0.5)
        return SimpleNamespace(logits=probabilities.log())


@pytest.fixture(scope="module")
def opt() -> OPTForCausalLM:
    torch.manual_seed(3)
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, dropout=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        init_std=0.4,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def dataset(folder: Path, lines: Iterable[tuple[list[int], list[int]]]) -> Dataset:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids, "labels": labels}) + "\n" for ids, labels in lines))
    return open_dataset(path)


def asking(prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
    return prompt + answer, [-100] * len(prompt) + answer


class TestChoices:
    def test_a_known_model(self, tmp_path: Path) -> None:
        data = dataset(
            tmp_path, [asking([3, 4], [5]), asking([8], [9]), asking([3, 4], [9]), asking([1, 8], [5])]
        )
        result = evaluate_choices(NextToken(), data)
        right, wrong = math.log(2), -math.log(0.5 / (VOCAB - 1))
        assert (result.num_examples, result.num_correct, result.accuracy) == (4, 2, 0.5)
        assert result.accuracy_stderr == 0.25
        assert result.loss == pytest.approx((right + wrong) / 2, rel=1e-6)
        assert result.loss_stderr == pytest.approx((wrong - right) / math.sqrt(12), rel=1e-6)

    def test_answers_of_one_token_share_a_forward(self, tmp_path: Path) -> None:
        model = NextToken()
        evaluate_choices(model, dataset(tmp_path, [asking([3], [4]), asking([3], [5])]))
        assert model.num_rows == 2

    def test_longer_answers_are_summed_or_averaged(self, tmp_path: Path) -> None:
        # From 3, the six likely tokens together (1/2^6) are less likely than the unlikely one (1/38); each is not.
        data = dataset(tmp_path, [asking([3], [9]), asking([3], [9]), asking([3], [4, 5, 6, 7, 8, 9])])
        summed, averaged = (evaluate_choices(NextToken(), data, per_token=flag) for flag in (False, True))
        assert (summed.num_correct, averaged.num_correct) == (2, 1)
        assert summed.loss == averaged.loss

    def test_sharing_changes_nothing(self, tmp_path: Path, opt: OPTForCausalLM) -> None:
        prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [2, 2]]
        data = dataset(tmp_path, [asking(prompt, [10 + at % 3]) for at, prompt in enumerate(prompts)])
        result = evaluate_choices(opt, data, batch_size=3)
        losses = []
        for at, prompt in enumerate(prompts):
            with torch.no_grad():
                logits = opt(input_ids=torch.tensor([prompt])).logits[0, -1].double()
            losses.append(-float(logits.log_softmax(-1)[10 + at % 3]))
        assert result.loss == pytest.approx(sum(losses) / 4, rel=1e-5)

    @pytest.mark.parametrize("num", [1, 65])
    def test_refuses_what_is_no_classification(self, tmp_path: Path, num: int) -> None:
        lines = [asking([1], [at // 10, at % 10]) for at in range(num)]
        with pytest.raises(DataError, match=f"{num} distinct answers"):
            evaluate_choices(NextToken(), dataset(tmp_path, lines))


class TestPerplexity:
    def test_equals_transformers_loss(self, tmp_path: Path, opt: OPTForCausalLM) -> None:
        lines = [([1, 2, 3, 4], [1, 2, 3, 4]), ([5, 6, 7], [-100, -100, 7]), ([8] * 9, [-100] * 4 + [8] * 5)]
        data = dataset(tmp_path, lines)
        batch = pad(data.examples(range(3)))
        with torch.no_grad():
            expected = opt(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
            ).loss.item()
        result = evaluate_perplexity(opt, data, batch_size=2)
        assert result.num_tokens == 3 + 1 + 5
        # transformers averages in float32.
        assert result.loss == pytest.approx(expected, rel=1e-5)
        assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-4)

    def test_equal_examples_have_no_spread(self, tmp_path: Path, opt: OPTForCausalLM) -> None:
        data = dataset(tmp_path, [([1, 2, 3], [1, 2, 3])] * 4)
        assert evaluate_perplexity(opt, data).loss_stderr == pytest.approx(0, abs=1e-9)


class TestGeneration:
    @staticmethod
    def words(tokens: Iterable[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    def test_counts_up_until_it_is_told_to_stop(self, tmp_path: Path) -> None:
        data = dataset(tmp_path, [asking([1], [2, 3]), asking([7, 2], [3, 9]), asking([3], [5])])
        result = evaluate_generation(
            NextToken(), data, Generation(self.words, stop_tokens=[4], max_new_tokens=3)
        )
        assert result.answers == ("w2 w3", "w3", "")
        assert result.exact_match == pytest.approx(1 / 3)
        assert result.f1 == pytest.approx((1 + 2 / 3 + 0) / 3)

    def test_greedy_equals_transformers(self, tmp_path: Path, opt: OPTForCausalLM) -> None:
        prompts = [[3, 4, 5], [6], [9, 8]]
        result = evaluate_generation(
            opt,
            dataset(tmp_path, [asking(prompt, [1]) for prompt in prompts]),
            Generation(self.words, max_new_tokens=5),
        )
        for prompt, answer in zip(prompts, result.answers, strict=True):
            ids = torch.tensor([prompt])
            expected = opt.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None
            )
            assert answer == self.words(expected[0, len(prompt) :].tolist())

    def test_stops_where_the_model_has_no_more_positions(self, tmp_path: Path, opt: OPTForCausalLM) -> None:
        data = dataset(tmp_path, [asking([1] * 30, [2]), asking([1, 2, 3], [4])])
        result = evaluate_generation(opt, data, Generation(self.words, max_new_tokens=8, max_length=32))
        assert [len(answer.split()) for answer in result.answers] == [2, 8]

    def test_needs_a_prompt(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no prompt"):
            evaluate_generation(NextToken(), dataset(tmp_path, [([1, 2], [1, 2])]), Generation(self.words))


@given(st.text("ab the.", max_size=12), st.text("ab the.", max_size=12))
def test_f1_is_a_symmetric_share(one: str, other: str) -> None:
    assert 0 <= word_f1(one, other) <= 1
    assert word_f1(one, other) == word_f1(other, one)
    assert word_f1(one, one) == 1
