"""Answers generated while a run trains, against generation by transformers from the weights that the run wrote."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from executors.runs.evaluate import normalised, word_f1
from tests.support import command
from tests.support.command import saved_lines, saved_model
from tests.support.tiny import model_of

TEMPLATE = "{question}?{label}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({"</s>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    model = model_of("opt", vocab_size=300, eos_token_id=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [{"question": f"what is {n}", "label": f" it is {n * n}"} for n in range(70)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "model", folder / "data.jsonl", lines, tokenizer


train = partial(command.train, steps=4, batch=4, lr=1e-3, residency="offloaded")


def evaluations(out):
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == "eval"]


def generated(model, tokenizer, lines):
    newline = tokenizer.encode("\n")[-1]
    for line in lines:
        ids = torch.tensor([tokenizer.encode(line["question"] + "?")])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=[0, newline],
        )
        yield tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_answers_at_the_last_step_are_those_of_the_model_that_was_written(inputs, tmp_path, capsys):
    model, data, lines, tokenizer = inputs
    out = tmp_path / "out"
    options = [
        "--eval-task",
        "generation",
        "--eval-max-new-tokens",
        6,
        "--eval-examples",
        7,
        "--eval-every",
        2,
    ]
    assert train(model, data, out, "--template", TEMPLATE, "--eval-data", data, "--keep-best", *options) == 0
    found = evaluations(out)
    assert [row["num_steps"] for row in found] == [0, 2, 4]
    for row, weights in ((found[0], model), (found[-1], out)):
        answers = list(generated(AutoModelForCausalLM.from_pretrained(weights), tokenizer, lines[:7]))
        pairs = [(answer, line["label"]) for answer, line in zip(answers, lines, strict=False)]
        assert row["answers"] == answers[:3]
        assert row["exact_match"] == sum(normalised(a) == normalised(b) for a, b in pairs) / 7
        assert row["f1"] == pytest.approx(sum(word_f1(a, b) for a, b in pairs) / 7)
    finished = json.loads((out / "run.json").read_text())["finished"]
    assert finished["best_evaluation"]["f1"] == max(row["f1"] for row in found)
    assert "exact_match" in capsys.readouterr().out


@pytest.mark.slow
def test_more_answers_than_classes_are_told_from_the_lines(inputs, tmp_path):
    model, data, *_ = inputs
    out = tmp_path / "out"
    options = ("--template", TEMPLATE, "--eval-data", data, "--eval-max-new-tokens", 1)
    assert train(model, data, out, *options) == 0
    assert all("f1" in row for row in evaluations(out))
    assert train(model, data, out, "--resume", "--steps", 6) == 0
    assert [row["num_steps"] for row in evaluations(out)] == [0, 4, 6]


def test_tasks_by_name(inputs, tmp_path, capsys):
    model, *_ = inputs
    tokens = tmp_path / "tokens.jsonl"
    saved_lines(tokens)
    for task, metric in (("generation", "f1"), ("perplexity", "perplexity"), ("choice", "accuracy")):
        out = tmp_path / task
        options = ("--eval-data", tokens, "--eval-task", task, "--eval-max-new-tokens", 2)
        assert train(model, tokens, out, *options) == 0
        assert all(metric in row for row in evaluations(out))
    everything = tmp_path / "everything.jsonl"
    everything.write_text('{"input_ids": [3, 4, 5]}\n')
    assert train(model, tokens, tmp_path / "no", "--eval-data", everything, "--eval-task", "generation") == 2
    assert "no prompt to answer" in capsys.readouterr().err


def test_answers_of_a_model_without_a_tokenizer_are_its_tokens(tmp_path):
    # Where there are no files, transformers makes a tokenizer without a vocabulary, which decodes everything to "".
    tokens = tmp_path / "tokens.jsonl"
    saved_lines(tokens)
    model = saved_model("opt", tmp_path)
    options = ("--eval-data", tokens, "--eval-task", "generation", "--eval-max-new-tokens", 2)
    assert train(model, tokens, tmp_path / "out", *options) == 0
    assert all(answer.split() for answer in evaluations(tmp_path / "out")[-1]["answers"])
    assert all(
        word.isdecimal() for answer in evaluations(tmp_path / "out")[-1]["answers"] for word in answer.split()
    )


def test_text_needs_a_tokenizer(tmp_path, capsys):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some"}\n')
    assert train(saved_model("opt", tmp_path), text, tmp_path / "out") == 2
    assert "has no tokenizer" in capsys.readouterr().err
