"""Training and evaluation data: JSON lines, read at random.

A line is either tokens, ``{"input_ids": [...], "labels": [...]}`` with `labels` optional, or fields of a
prompt template (:mod:`executors.datasets.prompts`). Files are indexed by the offsets of their lines and never loaded
as a whole.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from executors.datasets.prompts import (
    LABEL_FIELD,
    Example,
    JsonObject,
    OffsetTokenizer,
    PromptTemplate,
    Question,
    did_you_mean,
)
from executors.labels import IGNORED_LABEL
from topology.errors import DataError
from topology.reading import parse_json

NUM_CHECKED_AT_START = 2000
"""Lines read when a file is opened, so that most mistakes show before anything else is started."""

MAX_LINE_BYTES = 64 * 2**20
"""Of one example; a million tokens take a tenth of it."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some editors begin a file with."""


@dataclass(frozen=True)
class LineFile:
    """Index of the lines of a JSON-lines file; blank lines do not count."""

    path: Path
    offsets: npt.NDArray[np.int64]  # array of int64: first byte of each line
    numbers: npt.NDArray[np.int64]  # array of int64: its number in the file, from 1, for messages
    sha256: str

    @classmethod
    def index(cls, path: str | Path) -> LineFile:
        """Return the index of a file, read once from end to end.

        Raises DataError if the file is missing, cannot be read, or has no line.
        """
        path = Path(path)
        digest = hashlib.sha256()
        offsets, numbers, at, number = [], [], 0, 0
        try:
            with _opened(path) as file:
                # A byte more than is allowed, so that a longer line shows.
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise DataError(
                            f"{path}, line {number} has more than {MAX_LINE_BYTES // 2**20} MiB",
                            hint="write one example per line; a JSON array on one line is not JSON lines",
                        )
                    digest.update(line)
                    if line.removeprefix(_BYTE_ORDER_MARK).strip():
                        offsets.append(at)
                        numbers.append(number)
                    at += len(line)
        except OSError as error:
            raise _unreadable(path, error) from None
        if not offsets:
            raise DataError(f"{path} is empty", hint="write one JSON object per line, with text or input_ids")
        return cls(path, np.array(offsets, np.int64), np.array(numbers, np.int64), digest.hexdigest())

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, indices: Sequence[int]) -> Generator[JsonObject, None, None]:
        """Yield the objects on some lines, counted from 0 without the blank ones; close it where one of them may be refused.

        Raises DataError if a line is not a JSON object, or the file can no longer be read.
        """
        try:
            with _opened(self.path) as file:
                for index in indices:
                    file.seek(self.offsets[index])
                    yield self._parse(index, file.readline(MAX_LINE_BYTES))
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def where(self, index: int) -> str:
        """Return the file and number of a line, for messages."""
        return f"{self.path}, line {self.numbers[index]}"

    def _parse(self, index: int, line: bytes) -> JsonObject:
        to_convert = _conversion(self.path, line) if index == 0 else None
        try:
            text = line.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.where(index)} is not UTF-8: {error.reason}",
                hint=to_convert
                or f"convert it from the encoding that it has, such as: iconv -f LATIN1 -t UTF-8 {self.path} > lines.jsonl",
            ) from None
        value = parse_json(
            text,
            f"{self.where(index)} is not JSON",
            DataError,
            hint=f"each line must be a JSON object; this one begins with {text[:60].strip()!r}"
            + (f"; {to_convert}" if to_convert else ""),
        )
        if not isinstance(value, dict):
            raise DataError(
                f"{self.where(index)} holds a JSON {type(value).__name__}, but an example must be an object",
                hint=f"put each object on a line of its own: jq -c '.[]' {self.path} > lines.jsonl"
                if isinstance(value, list) and value and isinstance(value[0], dict)
                else 'write {"input_ids": [...], "labels": [...]} or the fields of a template',
            )
        return value


@dataclass(frozen=True)
class Limits:
    """Limits of the examples that a model can be fed."""

    vocab_size: int | None = None  # token ids and labels must be below it
    max_length: int | None = None  # longest sequence, in tokens
    truncate: bool = False  # whether longer ones are cut rather than refused
    num_positions: int | None = None  # of the model, for the hint to whoever has longer ones

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise DataError(f"max_length={self.max_length} leaves no token to predict", hint="use at least 2")

    def fit(self, example: Example, where: str, *, num_kept: int = 0) -> Example:
        """Return the example, cut if it may be; raise if it cannot be used.

        Raises DataError if it is too long, has a token outside the vocabulary, or asks for nothing.
        """
        if self.max_length is not None and len(example) > self.max_length:
            if not self.truncate:
                raise self._too_long(len(example), where)
            example = example.truncated(self.max_length, num_kept=num_kept)
        if self.vocab_size is not None:
            self._check_vocabulary("input_ids", example.input_ids, where)
            self._check_vocabulary("labels", [x for x in example.labels if x != IGNORED_LABEL], where)
        if not any(at > 0 for at in example.label_positions):
            raise DataError(
                f"{where} has no label after its first token, so there is nothing to predict",
                hint="label at least one later token; -100 marks unlabelled ones, and nothing predicts the first",
            )
        return example

    def _too_long(self, num_tokens: int, where: str) -> DataError:
        if self.num_positions is not None and num_tokens > self.num_positions:
            return DataError(
                f"{where} has {num_tokens} tokens, more than the {self.num_positions} positions of the model",
                hint="--truncate cuts long lines",
            )
        return DataError(
            f"{where} has {num_tokens} tokens, more than the maximum of {self.max_length}",
            hint=f"--truncate cuts long lines; --seq {num_tokens} keeps this one"
            + ("" if self.num_positions is not None else ", if the model has that many positions"),
        )

    def _check_vocabulary(self, name: str, tokens: Sequence[int], where: str) -> None:
        if tokens and max(tokens) >= (self.vocab_size or 0):
            raise DataError(
                f"{where}: {name} has token {max(tokens)}, but the model's vocabulary has {self.vocab_size} "
                "tokens",
                hint="tokenize the data with this model's tokenizer",
            )


@dataclass(frozen=True)
class Dataset:
    """Examples of one file, in the order of its lines."""

    lines: LineFile
    limits: Limits = Limits()
    template: PromptTemplate | None = None  # None for lines of tokens
    tokenizer: OffsetTokenizer | None = None  # the model's, needed with a template
    fills_masks: bool = False  # whether the model fills in masks: they then stand where labels are

    def __len__(self) -> int:
        return len(self.lines)

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """Return the training examples of some lines.

        Raises DataError if a line cannot be used; the message has its number.
        """
        return [question.candidates[question.answer] for question in self.questions(indices)]

    def questions(self, indices: Sequence[int]) -> list[Question]:
        """Return some lines as questions with candidates; a line of tokens has only its own."""
        with closing(self.lines.read(indices)) as read:
            pairs = zip(indices, read, strict=True)
            return [self._question(line, self.lines.where(index)) for index, line in pairs]

    def check(self, num_lines: int | None = None) -> None:
        """Read the first lines (None: all) and raise for one that cannot be used."""
        for _ in self._first(num_lines):
            pass

    def longest(self) -> int:
        """Return the tokens of the longest candidate on any line, cut as the limits say."""
        return max(len(one) for question in self._first(None) for one in question.candidates)

    def _first(self, num_lines: int | None) -> Iterator[Question]:
        num_lines = len(self) if num_lines is None else min(num_lines, len(self))
        # The file is opened once for a thousand lines, whose examples alone are in memory.
        for start in range(0, num_lines, 1000):
            yield from self.questions(range(start, min(start + 1000, num_lines)))

    def _question(self, line: JsonObject, where: str) -> Question:
        if self.template is None or self.tokenizer is None:
            example = self.limits.fit(_tokens_of(line, where), where)
            if self.fills_masks and all(
                example.input_ids[at] == example.labels[at] for at in example.label_positions
            ):
                raise DataError(
                    f"{where} reveals its labels: its input_ids contain them",
                    hint="for a masked model, input_ids need the mask token where labels are, and labels -100 "
                    "elsewhere",
                )
            return Question((example,), 0)
        with _named(where):
            question, num_kept = self.template.encode(line, self.tokenizer)
        fitted = tuple(self.limits.fit(example, where, num_kept=num_kept) for example in question.candidates)
        is_shorter = [
            len(example.label_positions) < len(whole.label_positions)
            for example, whole in zip(fitted, question.candidates, strict=True)
        ]
        if len(fitted) > 1 and any(is_shorter):
            raise DataError(
                f"{where} cannot be cut to {self.limits.max_length} tokens: an answer and what follows it have more",
                hint="raise --seq, or shorten the template after {label}",
            )
        if self.fills_masks:
            if (mask_token := self.tokenizer.mask_token_id) is None:
                raise DataError(
                    "the model is a masked model, but its tokenizer has no mask token",
                    hint="copy the tokenizer's files again, or give input_ids that contain the mask token",
                )
            fitted = tuple(example.masked(mask_token) for example in fitted)
        return Question(fitted, question.answer)


def open_dataset(
    path: str | Path,
    *,
    limits: Limits = Limits(),
    template: PromptTemplate | None = None,
    tokenizer: OffsetTokenizer | None = None,
    fills_masks: bool = False,
) -> Dataset:
    """Return a file's examples, the first lines already checked.

    - `path`: JSON lines of tokens or of a template's fields; the first line shows which of the two.
    - `template`: for lines of text. Lines with a ``text`` field and no template are plain language modelling.

    Raises DataError if the file cannot be used; the message names the line where there is one.
    """
    lines, template = _lines_and_template(path, template)
    if template is None:
        tokenizer = None
    elif tokenizer is None:
        raise DataError(
            f"{path} holds text, but the model has no tokenizer",
            hint="name a model directory with its tokenizer's files, add --allow-download, or give input_ids",
        )
    elif not tokenizer.is_fast:
        raise DataError(
            f"{path} holds text, but the model's tokenizer cannot locate the tokens of a label word",
            hint="install the fast tokenizer (the tokenizers package), or give input_ids",
        )
    elif fills_masks and not template.asks_for_label:
        raise DataError(
            f"{path}: a masked model needs a template that places its mask",
            hint='give a --template with {label}, such as "{text} It was {label}."',
        )
    dataset = Dataset(lines, limits, template, tokenizer, fills_masks)
    dataset.check(NUM_CHECKED_AT_START)
    return dataset


def check_lines(path: str | Path, template: PromptTemplate | None) -> None:
    """Read all lines of a file, and raise for one that no model can be fed; needs no tokenizer.

    Raises DataError as :func:`open_dataset`; also for a label that no word stands for, on whichever line.
    """
    lines, template = _lines_and_template(path, template)
    with closing(lines.read(range(len(lines)))) as read:
        for index, line in enumerate(read):
            if template is None:
                _tokens_of(line, lines.where(index))
            else:
                with _named(lines.where(index)):
                    template.candidates(line)


def _lines_and_template(
    path: str | Path, template: PromptTemplate | None
) -> tuple[LineFile, PromptTemplate | None]:
    """Return a file's lines and their template; None where the first line holds tokens."""
    lines = LineFile.index(path)
    (first,) = lines.read([0])
    if "input_ids" not in first:
        if template is None and ("text" not in first or "label" in first):
            text = next((name for name, value in first.items() if isinstance(value, str)), None)
            answer = "" if LABEL_FIELD in first else f", and rename the field of the answer to {LABEL_FIELD}"
            raise DataError(
                f"{lines.where(0)} has no input_ids, and no template for its fields is given",
                hint=f"its fields are {', '.join(first) or 'none'}; "
                + (
                    f'give --template, such as "{{{text}}} It was {{{LABEL_FIELD}}}."{answer}'
                    if text is not None
                    else "none is text: write a conversation as text, in the form of the model's chat template, with "
                    f"a field text for what is asked and {LABEL_FIELD} for the answer"
                ),
            )
        return lines, template or PromptTemplate("{text}")
    if template is not None:
        raise DataError(
            f"{path} holds tokens, so the template {template.text!r} does not apply",
            hint="leave --template out",
        )
    return lines, None


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Add the place of a line to errors in the block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error.message}", hint=error.hint) from None


def _opened(path: Path) -> BinaryIO:
    """Open a file of data; raise for a directory, a pipe or a device, which could not be read twice or might hang."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "a pipe or a device"
        raise DataError(
            f"{path} is {kind}, not a regular file", hint="write the lines to a file, and give that"
        )
    return path.open("rb")


def _conversion(path: Path, first_line: bytes) -> str | None:
    """How a file of another kind becomes JSON lines; None where its first line does not show its kind."""
    begin = first_line.removeprefix(_BYTE_ORDER_MARK).strip()
    if begin.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "it is compressed: unpack it first, such as with gunzip or unzip"
    if begin.startswith((b"PAR1", b"ARROW1")):
        reader = "read_parquet" if begin.startswith(b"PAR1") else "read_feather"
        command = f"import pandas; pandas.{reader}({str(path)!r}).to_json('lines.jsonl', orient='records', lines=True)"
        return f'write it as JSON lines, such as with pandas: python -c "{command}"'
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"convert it: iconv -f UTF-16 -t UTF-8 {path} > lines.jsonl"
    if begin in {b"[", b"{", b"[{"}:
        return f"write one object per line: jq -c '{'.' if begin == b'{' else '.[]'}' {path} > lines.jsonl"
    separator = "\t" if b"\t" in begin else ","
    if separator.encode() in begin and begin[:1] not in b"[{":
        table = (
            f"csv.DictReader(open({str(path)!r}, newline='', encoding='utf-8-sig'), delimiter={separator!r})"
        )
        command = f"import csv, json; [print(json.dumps(row)) for row in {table}]"
        return f'if it is a table with a line of names, write it as JSON lines: python -c "{command}" > lines.jsonl'
    return None


def _unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        parent = path.parent
        near = [entry.name for entry in parent.glob(f"*{path.suffix}")] if parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near[:1000], n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else f"paths start in {Path.cwd()}"
        return DataError(f"the data file {path} does not exist", hint=hint)
    return DataError(f"{path} cannot be read: {error.strerror}")


def _tokens_of(line: JsonObject, where: str) -> Example:
    if "input_ids" not in line:
        raise DataError(
            f"{where} has no input_ids", hint=did_you_mean("input_ids", list(line), kind="its fields")
        )
    input_ids = _token_list(line, "input_ids", where, lowest=0)
    _refuse_ignored(line, where)
    if line.get("labels") is None:
        return Example(input_ids, input_ids)
    labels = _token_list(line, "labels", where, lowest=IGNORED_LABEL)
    if len(labels) != len(input_ids):
        raise DataError(
            f"{where} has {len(input_ids)} input_ids, but {len(labels)} labels",
            hint="give one label per token, and -100 for unlabelled ones; the model shifts them",
        )
    return Example(input_ids, labels)


def _refuse_ignored(line: JsonObject, where: str) -> None:
    """Raise for fields that would be ignored although they say what is to be learned."""
    if line.get("labels") is None:
        close = difflib.get_close_matches(
            "labels", [name for name in line if name != "labels"], n=1, cutoff=0.75
        )
        if close:
            raise DataError(
                f"{where} has {close[0]!r} with its input_ids, but no labels",
                hint="labels are a list with one entry per token, -100 for unlabelled ones; without it all "
                "tokens are labelled",
            )
    if isinstance(mask := line.get("attention_mask"), list) and 0 in mask:
        raise DataError(
            f"{where} is padded: its attention_mask contains zeros",
            hint="remove the padding; zosim pads batches itself",
        )


def _token_list(line: Mapping[str, Any], name: str, where: str, *, lowest: int) -> tuple[int, ...]:
    value = line[name]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} must be a list of token ids, got {value!r:.60}")
    for token in value:
        # Of the negative numbers -100 alone stands for something; a bool is an int to Python, and no token.
        if type(token) is not int or token < lowest or lowest < token < 0:
            rule = "whole numbers from 0" + (" (or -100)" if lowest else "")
            raise DataError(f"{where}: {name} contains {token!r:.60}, but token ids must be {rule}")
    return tuple(value)
