"""The embedded model and its task: the text, the tokenizer, the cache; the real recipe behind `slow`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executors.datasets.data import Limits, open_dataset
from executors.datasets.prompts import PromptTemplate
from executors.models import corpus, pretrain
from executors.runs.evaluate import evaluate_choices
from topology.errors import DataError, ModelError

TINY = pretrain.Recipe(
    num_blocks=1, hidden_size=32, num_steps=4, batch=2, seq=70, max_positions=70, warmup_steps=1
)


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.installed_corpus()


@pytest.fixture
def read_once(text: corpus.Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the tests that pretrain many times the reading of the standard library."""
    monkeypatch.setattr(corpus, "installed_corpus", lambda: text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pretrain.Pretrained:
    return pretrain.pretrained_model(TINY, cache=tmp_path_factory.mktemp("cache"))


class TestText:
    def test_every_byte_is_its_own_token(self) -> None:
        tokenizer = corpus.byte_tokenizer()
        for sample in ("def f(x):\n\treturn 'é'\r\n", "  \x00\x7f 日本語 ", "".join(map(chr, range(256)))):
            ids = tokenizer(sample)["input_ids"]
            assert ids == list(sample.encode())
            assert tokenizer.decode(ids) == sample
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (
            corpus.PAD,
            corpus.END,
            corpus.VOCAB_SIZE,
        )

    def test_held_out_text_is_not_trained_on(self, text: corpus.Corpus) -> None:
        for trained, held_out, documents in zip(
            text.training, text.held_out, (text.prose, text.code), strict=True
        ):
            total = sum(len(body) for _, body in documents)
            assert len(trained) + len(held_out) == total
            assert 0.15 < len(held_out) / total < 0.35

    def test_text_is_held_out_by_long_stretches(self) -> None:
        """Short ones would have the task ask of text that stands between trained text."""
        stretches = [bytes([number]) * 8192 for number in range(64)]
        documents = (("manual", b"".join(stretches)),)
        trained, _ = corpus.Corpus(documents, documents).training
        held_out, _ = corpus.Corpus(documents, documents).held_out
        assert set(trained.tolist()).isdisjoint(held_out.tolist())
        assert 0 < len(set(held_out.tolist())) < 32

    def test_splits_share_no_text(self, text: corpus.Corpus) -> None:
        for held_out in text.held_out:
            splits = corpus._deal(held_out, np.random.default_rng(0))
            assert 0 <= len(held_out) - sum(len(chunk) for split in splits for chunk in split) < 240
            assert [len(split) / len(splits[0]) for split in splits] == pytest.approx(
                [1, 1 / 3, 1 / 3], rel=0.1
            )

    def test_too_little_text_is_refused(self) -> None:
        with pytest.raises(DataError, match="9 bytes of documentation"):
            corpus.Corpus((("a", b"too short"),), (("b", b"x" * 200_000),))


class TestTask:
    def test_is_balanced_and_asks_for_one_byte(self, tiny: pretrain.Pretrained) -> None:
        for path, num in ((tiny.train, 2048), (tiny.tuning, 400), (tiny.validation, 600)):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert len(lines) == num
            assert sum(line["label"] == "code" for line in lines) == num / 2
            assert {tuple(set(line["labels"])) for line in lines} <= {(-100, ord("t")), (ord("t"), -100)} | {
                (-100, ord("c")),
                (ord("c"), -100),
            }

    def test_its_text_form_gives_the_same_tokens(self, tiny: pretrain.Pretrained, tmp_path: Path) -> None:
        lines = [json.loads(line) for line in tiny.train.read_text().splitlines()]
        whole = [line for line in lines if "\ufffd" not in line["text"]][:200]
        path = tmp_path / "text.jsonl"
        path.write_text("".join(json.dumps({"text": x["text"], "label": x["label"]}) + "\n" for x in whole))
        data = open_dataset(
            path,
            template=PromptTemplate(corpus.TEMPLATE, corpus.LABEL_WORDS),
            tokenizer=AutoTokenizer.from_pretrained(tiny.model),
        )
        examples = data.examples(range(len(whole)))
        assert [list(example.input_ids) for example in examples] == [line["input_ids"] for line in whole]
        assert [list(example.labels) for example in examples] == [line["labels"] for line in whole]

    def test_fits_the_model(self, tiny: pretrain.Pretrained) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny.model).eval()
        limits = Limits(model.config.vocab_size, model.config.max_position_embeddings)
        result = evaluate_choices(model, open_dataset(tiny.validation, limits=limits), num_examples=20)
        assert result.num_examples == 20
        assert result.loss < 10


class TestCache:
    def test_a_hugging_face_directory(self, tiny: pretrain.Pretrained) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny.model)
        assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert 3 < tiny.bits_per_byte < 9

    def test_weights_are_a_function_of_the_recipe(self, text: corpus.Corpus) -> None:
        before = torch.random.get_rng_state()
        first, second = (pretrain.pretrain(TINY, text).state_dict() for _ in range(2))
        other = pretrain.pretrain(replace(TINY, seed=1), text).state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)
        assert torch.equal(before, torch.random.get_rng_state())

    def test_is_used_again(self, tiny: pretrain.Pretrained) -> None:
        cache = tiny.model.parent.parent
        steps: list[int] = []
        again = pretrain.pretrained_model(TINY, cache=cache, on_step=lambda done, loss: steps.append(done))
        assert (again, steps) == (tiny, [])

    @pytest.mark.usefixtures("read_once")
    @pytest.mark.parametrize(
        ("victim", "harm"),
        [("model.safetensors", "flip"), ("manifest.json", "truncate"), ("train.jsonl", "remove")],
    )
    def test_damage_is_repaired(
        self, tiny: pretrain.Pretrained, tmp_path: Path, victim: str, harm: str
    ) -> None:
        shutil.copytree(tiny.model, tmp_path / "models" / TINY.name)
        path = tmp_path / "models" / TINY.name / victim
        contents = bytearray(path.read_bytes())
        if harm == "remove":
            path.unlink()
        elif harm == "truncate":
            path.write_bytes(contents[: len(contents) // 2])
        else:
            contents[len(contents) // 2] ^= 0x80
            path.write_bytes(contents)
        steps: list[int] = []
        again = pretrain.pretrained_model(TINY, cache=tmp_path, on_step=lambda done, loss: steps.append(done))
        assert steps == [1, 2, 3, 4]
        weights = (made.model / "model.safetensors" for made in (tiny, again))
        assert len({path.read_bytes() for path in weights}) == 1

    @pytest.mark.usefixtures("read_once")
    def test_an_interrupted_one_leaves_nothing_behind(self, tmp_path: Path) -> None:
        def interrupt(done: int, loss: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pretrain.pretrained_model(TINY, cache=tmp_path, on_step=interrupt)
        assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{TINY.name}.lock"]

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match=f"cannot cache .*\n\nhint: set {pretrain.CACHE_VARIABLE}"):
            pretrain.pretrained_model(TINY, cache=tmp_path / "file")

    def test_the_environment_chooses_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(pretrain.CACHE_VARIABLE, str(tmp_path))
        assert pretrain.cache_directory() == tmp_path
        monkeypatch.delenv(pretrain.CACHE_VARIABLE)
        assert pretrain.cache_directory().name == "zosim"

    @pytest.mark.slow
    def test_two_processes_make_one_model(self, tmp_path: Path) -> None:
        script = (
            "from executors.models.pretrain import *; from pathlib import Path; import sys; steps = []\n"
            "pretrained_model(Recipe(num_blocks=1, hidden_size=32, num_steps=30, batch=2, seq=70),"
            " cache=Path(sys.argv[1]), on_step=lambda done, loss: steps.append(done)); print(len(steps))"
        )
        command = [sys.executable, "-c", script, str(tmp_path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        runs = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)
        ]
        assert sorted(int(run.communicate()[0]) for run in runs) == [0, 30]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 100, "multiple of 32"),
        ("seq", 32, "from 70"),
        ("seq", 1000, "max_positions=256"),
        ("num_steps", 0, "num_steps=0"),
    ],
)
def test_refuses_a_recipe(field: str, value: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        replace(pretrain.Recipe(), **{field: value})


@pytest.mark.slow
def test_the_shipped_recipe_learns() -> None:
    """Uses the user's cache, as the demo does."""
    made = pretrain.pretrained_model()
    # A byte's entropy in this text without context is about 4.6 bits; 600 steps reach about 2.7.
    assert made.bits_per_byte < 3.2


def test_the_weights_that_come_with_the_package_are_the_default_recipe_s_and_know_text(
    tmp_path: Path,
) -> None:
    began = []
    made = pretrain.pretrained_model(cache=tmp_path, on_step=lambda *step: began.append(step))
    assert began == []  # nothing was pretrained
    assert made.bits_per_byte < 3.5  # an untrained model needs about 8
    facts = json.loads((made.model / "manifest.json").read_text())
    assert pretrain.Recipe(**facts["recipe"]) == pretrain.Recipe()
