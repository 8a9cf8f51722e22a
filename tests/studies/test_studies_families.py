from __future__ import annotations

import json
import time

import pytest
import torch

from studies.families import __main__ as command
from studies.families import trying
from studies.families.__main__ import page, shares, table
from studies.families.tiny import exception_of, families, tiny_config


def test_what_was_tried_is_the_literal_loop_or_says_what_differs(monkeypatch):
    ways = ("plan", "resident", "offload", "stages", "adapters")
    assert {way: own["word"] for way, own in trying.tried("llama", ways).items()} == dict.fromkeys(
        ("model", *ways), "yes"
    )
    monkeypatch.setattr(trying, "literal_step", lambda *_: 0.0)
    assert trying.tried("llama", ("resident",))["resident"]["word"] == "differs"


def test_a_family_without_a_tiny_model_says_why():
    found = trying.tried("musicgen", ("resident",))
    assert list(found) == ["model"]
    assert found["model"]["word"] == "fails"


def test_a_process_that_ends_or_lasts_too_long_is_reported(monkeypatch):
    monkeypatch.setattr(command, "tried", lambda *_: (_ for _ in ()).throw(SystemExit(3)))
    assert "ended with" in command._apart("llama", [])["model"]["why"]
    monkeypatch.setattr(command, "_LIMIT_S", 0.1)
    monkeypatch.setattr(command, "tried", lambda *_: time.sleep(60))
    assert "nothing within" in command._apart("llama", [])["model"]["why"]


def test_the_page_is_made_of_the_results_beside_it():
    found = json.loads(command.PAGE.with_suffix(".json").read_text(encoding="utf-8"))
    text = command.PAGE.read_text(encoding="utf-8")
    version = text.partition("that transformers ")[2].partition(" knows")[0]
    assert page(found, version) == text
    assert len(table(found).rows) == len(found)
    every = {way: num / count for way, (num, count) in shares(found).items()}
    assert every["resident"] >= 0.98
    assert every["offload"] >= 0.95
    assert every["stages"] >= 0.95


@pytest.mark.parametrize("family", ["gpt2", "jamba", "gemma3"])
def test_a_tiny_configuration_is_small_and_has_layers_of_each_type(family):
    config = tiny_config(family).get_text_config()
    assert config.num_hidden_layers == 4
    assert config.vocab_size == 96
    if family == "gemma3":
        assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_exceptions_are_of_families_that_exist_and_have_a_reason():
    torch.manual_seed(0)
    for family in families():
        exception = exception_of(family)
        assert not exception or exception["reason"]
