"""Data files: batching by number, prompts, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from executors.datasets import data as data_module
from executors.datasets.batches import Batches
from executors.datasets.data import Dataset, Limits, LineFile, check_lines, open_dataset
from executors.datasets.prompts import Example, PromptTemplate, parse_label_words
from executors.labels import IGNORED_LABEL
from topology.errors import DataError


def write_lines(folder: Path, lines: Iterable[Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one opening token, as OPT's tokenizer has."""
    from tokenizers.processors import TemplateProcessing

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(alphabet)} | {"<s>": 256}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


@pytest.fixture
def five(tmp_path: Path) -> Dataset:
    return open_dataset(
        write_lines(tmp_path, [{"input_ids": [*[7, 8, 9][: 2 + at % 2], at]} for at in range(5)])
    )


class TestBatches:
    def test_unshuffled_batches_take_the_lines_in_turn_and_wrap(self, five: Dataset) -> None:
        batches = Batches(five, 3)
        assert [batches.indices(k) for k in range(4)] == [(0, 1, 2), (3, 4, 0), (1, 2, 3), (4, 0, 1)]

    def test_a_batch_may_be_larger_than_the_file(self, five: Dataset) -> None:
        assert Batches(five, 7).indices(1) == (2, 3, 4, 0, 1, 2, 3)

    def test_pads_on_the_right_to_the_longest(self, five: Dataset) -> None:
        batch = Batches(five, 2, pad_token=99).batch(0)
        assert batch.input_ids.tolist() == [[7, 8, 0, 99], [7, 8, 9, 1]]
        assert batch.labels.tolist() == [[7, 8, 0, -100], [7, 8, 9, 1]]
        assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
        assert {t.dtype for t in (batch.input_ids, batch.labels, batch.attention_mask)} == {torch.long}

    def test_pads_to_a_fixed_length_when_asked(self, five: Dataset) -> None:
        assert Batches(five, 2, length=6).batch(1).input_ids.shape == (2, 6)
        with pytest.raises(DataError, match="4 tokens does not fit into a batch of length 3"):
            Batches(five, 2, length=3).batch(0)

    @settings(deadline=None)
    @given(st.integers(1, 9), st.integers(0, 2**40), st.integers(1, 6))
    def test_each_shuffled_epoch_is_a_permutation(self, batch_size: int, seed: int, num_epochs: int) -> None:
        num_lines = 5
        lines = LineFile(Path("unread"), *(torch.arange(num_lines).numpy(),) * 2, "")
        batches = Batches(Dataset(lines), batch_size, shuffle=True, seed=seed)
        indices = [at for k in range(num_epochs * num_lines) for at in batches.indices(k)]
        for epoch in range(num_epochs):
            assert sorted(indices[epoch * num_lines : (epoch + 1) * num_lines]) == list(range(num_lines))

    def test_shuffling_is_random_access_and_leaves_torch_alone(self, five: Dataset) -> None:
        before = torch.random.get_rng_state()
        forwards = [Batches(five, 2, shuffle=True, seed=3).indices(k) for k in range(20)]
        torch.manual_seed(1)
        backwards = [Batches(five, 2, shuffle=True, seed=3).indices(k) for k in reversed(range(20))]
        assert forwards == backwards[::-1]
        assert len(set(forwards)) > 5
        torch.random.set_rng_state(before)
        Batches(five, 2, shuffle=True, seed=4).batch(11)
        assert torch.equal(before, torch.random.get_rng_state())

    @pytest.mark.parametrize("field", [{"batch_size": 0}, {"batch_size": 1, "seed": -1}])
    def test_refuses_nonsense(self, five: Dataset, field: dict[str, int]) -> None:
        with pytest.raises(DataError, match="must be at least"):
            Batches(five, **field)


class TestLines:
    def test_labels_default_to_the_tokens(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [-100, 5]}])
        assert open_dataset(path).examples([0, 1]) == [
            Example((1, 2), (1, 2)),
            Example((1, 2), (IGNORED_LABEL, 5)),
        ]

    @pytest.mark.parametrize(
        ("content", "hint"),
        [
            (b'text,label\n"a, b",1\n', "csv.DictReader(open("),
            (b"text\tlabel\na\t1\n", r"delimiter='\t'"),
            (b"PAR1\xff\xfe", "pandas.read_parquet("),
            (b"ARROW1\0\0\xff", "pandas.read_feather("),
            (b"\x1f\x8b\x08\xff", "unpack it first"),
            ('{"text": "a"}'.encode("utf-16"), "iconv -f UTF-16"),
            ('{"text": "é"}'.encode("latin1"), "iconv -f LATIN1"),
            (b'[\n {"text": "a"}\n]\n', "jq -c '.[]'"),
            (b'{\n "text": "a"\n}\n', "jq -c '.'"),
        ],
    )
    def test_files_of_other_kinds_are_told_how_to_become_lines(
        self, tmp_path: Path, content: bytes, hint: str
    ) -> None:
        (tmp_path / "data").write_bytes(content)
        with pytest.raises(DataError) as caught:
            open_dataset(tmp_path / "data")
        assert hint in (caught.value.hint or "")

    def test_blank_lines_and_byte_order_marks_do_not_count(self, tmp_path: Path) -> None:
        path = tmp_path / "data.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"input_ids": [1, 1]}\r\n\n  \n{"input_ids": [2, 2]}')
        data = open_dataset(path)
        assert [example.input_ids for example in data.examples([1, 0])] == [(2, 2), (1, 1)]
        assert data.lines.where(1) == f"{path}, line 4"

    def test_the_digest_is_of_the_whole_file(self, tmp_path: Path) -> None:
        one = write_lines(tmp_path, [{"input_ids": [1, 2]}])
        two = write_lines(tmp_path, [{"input_ids": [1, 3]}], "other.jsonl")
        assert LineFile.index(one).sha256 != LineFile.index(two).sha256

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            ([], "is empty"),
            (["", "  "], "is empty"),
            ([{"input_ids": [1, 2]}, '{"input_ids": [1, '], "line 2 is not JSON"),
            (["[", "]"], "line 1 is not JSON"),
            ([[1, 2]], "line 1 holds a JSON list"),
            ([[{"input_ids": [1, 2]}]], "an object\n\nhint: put each object on a line of its own: jq -c"),
            (
                [{"input_ids": [1, 2]}, {"input_id": [1, 2]}],
                "line 2 has no input_ids\n\nhint: did you mean input_id?",
            ),
            ([{"input_ids": "abc"}], "line 1: input_ids must be a list"),
            ([{"input_ids": []}], "line 1: input_ids must be a list"),
            ([{"input_ids": [1, 2.5]}], "input_ids contains 2.5"),
            ([{"input_ids": [1, True]}], "input_ids contains True"),
            ([{"input_ids": [1, -1]}], "input_ids contains -1"),
            ([{"input_ids": [1, 2], "labels": [1, -2]}], "labels contains -2"),
            ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids, but 1 labels"),
            ([{"input_ids": [1, 2], "labels": [1, -100]}], "line 1 has no label after its first token"),
            ([{"input_ids": [1]}], "line 1 has no label after its first token"),
            ([{"input_ids": [1, 50]}], "input_ids has token 50, but the model's vocabulary has 50"),
            ([{"input_ids": [1, 2], "labels": [-100, 77]}], "labels has token 77"),
            ([{"input_ids": [1] * 9}], "9 tokens, more than the maximum of 8"),
            ([{"question": "a", "label": 1}], "no input_ids, and no template"),
            ([{"text": "a"}], "has no tokenizer"),
            ([{"review": "a", "stars": 1}], '"{review} It was {label}.", and rename the field of the answer'),
        ],
    )
    def test_says_what_is_wrong_and_where(self, tmp_path: Path, lines: list[Any], words: str) -> None:
        with pytest.raises(DataError) as caught:
            open_dataset(write_lines(tmp_path, lines), limits=Limits(vocab_size=50, max_length=8))
        assert words in str(caught.value)

    def test_a_line_that_is_refused_leaves_no_file_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files, errors = [], []
        opened = data_module._opened
        monkeypatch.setattr(data_module, "_opened", lambda path: files.append(opened(path)) or files[-1])
        path = write_lines(tmp_path, [{"input_ids": [1, 2]}, {"input_id": [1, 2]}, {"input_ids": [1, 2]}])
        for read in (
            lambda: open_dataset(path, limits=Limits(vocab_size=50)),
            lambda: check_lines(path, None),
        ):
            with pytest.raises(DataError, match="line 2 has no input_ids") as caught:
                read()
            errors.append(caught.value)  # a traceback keeps what was being read
        assert files
        assert all(file.closed for file in files)

    def test_a_missing_file_offers_its_neighbour(self, tmp_path: Path) -> None:
        write_lines(tmp_path, [{"input_ids": [1, 2]}], "train.jsonl")
        with pytest.raises(
            DataError, match=r"the data file .*trian.jsonl does not exist\n\nhint: did you mean train.jsonl"
        ):
            open_dataset(tmp_path / "trian.jsonl")

    def test_a_folder_is_not_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="is a directory, not a regular file"):
            open_dataset(tmp_path)

    def test_bytes_that_are_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "data.jsonl").write_bytes(b'{"text": "\xff"}\n')
        with pytest.raises(DataError, match="line 1 is not UTF-8"):
            open_dataset(tmp_path / "data.jsonl")

    def test_a_late_mistake_is_found_when_it_is_reached(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path, [{"input_ids": [1, 2]}] * 2500 + ["oops"])
        data = open_dataset(path)
        with pytest.raises(DataError, match="line 2501"):
            Batches(data, 1).batch(2500)
        with pytest.raises(DataError, match="line 2501"):
            data.check()

    def test_truncates_only_when_asked(self, tmp_path: Path) -> None:
        masked = {"input_ids": list(range(10)), "labels": [-100] * 9 + [9]}
        path = write_lines(tmp_path, [{"input_ids": list(range(10))}, masked])
        data = open_dataset(path, limits=Limits(max_length=4, truncate=True))
        assert data.examples([0, 1]) == [
            Example((0, 1, 2, 3), (0, 1, 2, 3)),
            Example((6, 7, 8, 9), (IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL, 9)),
        ]


class TestPrompts:
    TEMPLATE = PromptTemplate("{text} It was {label}.", {"0": "bad", "1": "good"})

    def label_positions(self, example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
        return tokenizer.decode([label for label in example.labels if label != IGNORED_LABEL])

    def test_only_the_label_word_carries_labels(
        self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        path = write_lines(tmp_path, [{"text": "Fine é.", "label": 1}, {"text": "No.", "label": 0}])
        data = open_dataset(path, template=self.TEMPLATE, tokenizer=tokenizer)
        first, second = data.examples([0, 1])
        assert tokenizer.decode(first.input_ids) == "<s>Fine é. It was good."
        assert self.label_positions(first, tokenizer) == "good"
        assert self.label_positions(second, tokenizer) == "bad"
        (question,) = data.questions([1])
        assert [self.label_positions(candidate, tokenizer) for candidate in question.candidates] == [
            "bad",
            "good",
        ]
        assert question.answer == 0

    def test_a_word_with_its_space_merged_is_found(self, tmp_path: Path) -> None:
        inner = Tokenizer(
            models.WordLevel({"▁It": 0, "▁was": 1, "▁good": 2, "?": 3, "▁so": 4}, unk_token="?")
        )
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        words = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
        template = PromptTemplate("{text} It was {label} so", {"1": "good"})
        path = write_lines(tmp_path, [{"text": "It", "label": 1}])
        (example,) = open_dataset(path, template=template, tokenizer=words).examples([0])
        assert example.input_ids == (0, 0, 1, 2, 4)
        assert example.labels == (IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL, 2, IGNORED_LABEL)

    def test_multiple_choice_by_index_and_by_text(
        self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        lines = [{"q": "2+2?", "choices": ["3", "4"], "label": label} for label in (1, "4")]
        data = open_dataset(
            write_lines(tmp_path, lines), template=PromptTemplate("{q} {label}"), tokenizer=tokenizer
        )
        assert [question.answer for question in data.questions([0, 1])] == [1, 1]
        assert self.label_positions(data.examples([0])[0], tokenizer) == "4"

    def test_text_alone_is_language_modelling(
        self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        data = open_dataset(write_lines(tmp_path, [{"text": "abc"}]), tokenizer=tokenizer)
        (example,) = data.examples([0])
        assert self.label_positions(example, tokenizer) == "abc"

    def test_a_long_prompt_keeps_its_opening_token_and_its_end(
        self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        path = write_lines(tmp_path, [{"text": "x" * 50, "label": 1}])
        limits = Limits(max_length=16, truncate=True)
        (example,) = open_dataset(path, limits=limits, template=self.TEMPLATE, tokenizer=tokenizer).examples(
            [0]
        )
        assert tokenizer.decode(example.input_ids) == "<s>xx It was good."
        assert len(example) == 16

    def test_text_without_a_label_loses_its_end_and_answers_lose_nothing(
        self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        path = write_lines(tmp_path, [{"text": "abcdefgh", "label": 1}])
        limits = Limits(max_length=4, truncate=True)
        plain = open_dataset(path, limits=limits, template=PromptTemplate("{text}"), tokenizer=tokenizer)
        assert tokenizer.decode(plain.examples([0])[0].input_ids) == "<s>abc"
        with pytest.raises(DataError, match="line 1 cannot be cut to 4 tokens: an answer and what follows"):
            open_dataset(path, limits=limits, template=self.TEMPLATE, tokenizer=tokenizer)

    @pytest.mark.parametrize(
        ("template", "words", "complaint"),
        [
            ("no field", {}, "has no field"),
            ("{text", {}, "cannot read"),
            ("{0} {label}", {}, "{0} is not a plain field name"),
            ("{text:>3} {label}", {}, "{text:>3} is not a plain field name"),
            ("{label} {label}", {}, "{label} 2 times"),
            ("{text}", {"0": "x"}, "has no {label}"),
        ],
    )
    def test_refuses_a_template(self, template: str, words: dict[str, str], complaint: str) -> None:
        with pytest.raises(DataError) as caught:
            PromptTemplate(template, words)
        assert complaint in str(caught.value)

    @pytest.mark.parametrize(
        ("line", "template", "complaint"),
        [
            (
                {"text": "a", "label": 2},
                TEMPLATE,
                "line 1: label '2' has no label word\n\nhint: label words are 0=bad",
            ),
            (
                {"txt": "a", "label": 1},
                TEMPLATE,
                "uses {text}, but the line has no such field\n\nhint: did you mean txt",
            ),
            ({"text": "a"}, TEMPLATE, "uses {label}"),
            (
                {"text": ["a"], "label": 1},
                TEMPLATE,
                'the field text of a template must be text or a number, got ["a"]',
            ),
            ({"messages": [{"role": "user"}]}, None, "its fields are messages; none is text"),
            (
                {"text": "a", "choices": "b", "label": 0},
                PromptTemplate("{text} {label}"),
                "choices must be a list",
            ),
            (
                {"text": "a", "choices": ["b"], "label": 1},
                PromptTemplate("{text} {label}"),
                "neither an index",
            ),
        ],
    )
    def test_says_what_a_line_lacks(
        self,
        tmp_path: Path,
        tokenizer: PreTrainedTokenizerFast,
        line: dict[str, Any],
        template: PromptTemplate | None,
        complaint: str,
    ) -> None:
        with pytest.raises(DataError) as caught:
            open_dataset(write_lines(tmp_path, [line]), template=template, tokenizer=tokenizer)
        assert complaint in str(caught.value)

    def test_a_template_has_no_use_for_tokens(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="holds tokens"):
            open_dataset(write_lines(tmp_path, [{"input_ids": [1, 2]}]), template=self.TEMPLATE)

    @pytest.mark.parametrize("text", ["0", "0=", "=x", "0=a,0=b", "0=a,1=a"])
    def test_label_words_from_the_command_line(self, text: str) -> None:
        with pytest.raises(DataError, match="label words"):
            parse_label_words(text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"input_ids": [1, 2], "lables": [1, 2]}, "has 'lables' with its input_ids, but no labels"),
        ({"input_ids": [1, 2], "label": 1}, "has 'label' with its input_ids, but no labels"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "is padded"),
    ],
)
def test_fields_that_would_be_passed_over_are_refused(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_dataset(write_lines(tmp_path, [line]))


def test_fields_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    lines = [{"input_ids": [1, 2], "labels": [1, 2], "label": 0, "attention_mask": [1, 1], "id": "a"}]
    assert len(open_dataset(write_lines(tmp_path, lines))) == 1
