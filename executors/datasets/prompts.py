"""Examples as token ids, and the prompt templates that make them from text.

A template is ordinary text with field names in braces, such as ``"{text} It was {label}."``. The field
``{label}`` is where the label word goes; only the tokens of that word carry labels, so the loss asks for it
alone. A template without ``{label}`` is plain language modelling.
"""

from __future__ import annotations

import difflib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from executors.labels import IGNORED_LABEL
from topology.errors import DataError

LABEL_FIELD = "label"
CHOICES_FIELD = "choices"

JsonObject = Mapping[str, Any]


class OffsetTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def mask_token_id(self) -> int | None:
        """Token that a masked model fills in, where the tokenizer has one."""

    @property
    def is_fast(self) -> bool:
        """Whether it can say which characters a token covers."""

    def __call__(self, text: str, *, return_offsets_mapping: bool) -> Mapping[str, Any]:
        """Return ``input_ids`` and ``offset_mapping``, special tokens included."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence and its labels."""

    # input_ids, labels: of equal length; a label of -100 is not asked for. The model itself shifts labels by one
    # position.
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    def masked(self, mask_token: int) -> Example:
        """Return the same with `mask_token` where labels are, for a model that fills in masks."""
        pairs = zip(self.input_ids, self.labels, strict=True)
        hidden = (token if label == IGNORED_LABEL else mask_token for token, label in pairs)
        return Example(tuple(hidden), self.labels)

    @property
    def label_positions(self) -> tuple[int, ...]:
        """Positions that carry a label."""
        return tuple(at for at, label in enumerate(self.labels) if label != IGNORED_LABEL)

    def truncated(self, max_length: int, *, num_kept: int = 0) -> Example:
        """Return at most `max_length` tokens.

        A masked prompt loses its beginning, after the first `num_kept` tokens, so that what is asked stays;
        a sequence that carries labels from its start loses its end.
        """
        if len(self) <= max_length:
            return self
        if self.labels[min(num_kept, len(self) - 1)] != IGNORED_LABEL:
            return Example(self.input_ids[:max_length], self.labels[:max_length])
        num_kept = min(num_kept, max_length)
        rest = len(self) - (max_length - num_kept)
        return Example(
            self.input_ids[:num_kept] + self.input_ids[rest:], self.labels[:num_kept] + self.labels[rest:]
        )


@dataclass(frozen=True, slots=True)
class Question:
    """Candidate completions of one prompt."""

    candidates: tuple[Example, ...]  # each labels only its own completion
    answer: int  # index of the right one


@dataclass(frozen=True)
class PromptTemplate:
    """Text with named fields, and the words that labels are spelled as.

    Raises DataError if the template is not well formed.

    >>> template = PromptTemplate("{text} It was {label}.", {"0": "terrible", "1": "great"})
    >>> template.fill({"text": "I loved it.", "label": 1}, "great")
    ('I loved it. It was great.', (19, 24))
    """

    text: str
    # Word of each label, by the label as JSON spells it (``"0"``, ``"entailment"``, ``"true"``). Empty: the label is its
    # own word, or the index of one of the line's ``choices``.
    label_words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = [name for _, name in self._fragments if name is not None]
        if not fields:
            raise DataError(
                f"template {self.text!r} has no field",
                hint='write fields in braces: "{text} It was {label}."',
            )
        if fields.count(LABEL_FIELD) > 1:
            raise DataError(
                f"template {self.text!r} has {{label}} {fields.count(LABEL_FIELD)} times, but only one is "
                "allowed"
            )
        if self.label_words and LABEL_FIELD not in fields:
            raise DataError(
                f"label words are given, but template {self.text!r} has no {{label}}",
                hint='write {label} where the word goes, and rename the field of the answer to "label"',
            )

    @cached_property
    def _fragments(self) -> tuple[tuple[str, str | None], ...]:
        """(literal text, field after it) pairs."""
        try:
            parsed = list(string.Formatter().parse(self.text))
        except ValueError as error:
            raise DataError(
                f"cannot read template {self.text!r}: {error}",
                hint="double literal braces",
            ) from None
        for _, name, spec, conversion in parsed:
            if name is not None and (not name.isidentifier() or spec or conversion):
                shown = f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
                raise DataError(
                    f"template {self.text!r}: {shown} is not a plain field name",
                    hint="write {name}, where name is a field of every line; double literal braces",
                )
        return tuple((literal, name) for literal, name, _, _ in parsed)

    @property
    def asks_for_label(self) -> bool:
        """Whether the template has a ``{label}``."""
        return any(name == LABEL_FIELD for _, name in self._fragments)

    def fill(self, line: JsonObject, word: str | None) -> tuple[str, tuple[int, int]]:
        """Return the filled template and the span of characters that carries labels.

        `word`: what stands for ``{label}``; None where the template has none, and everything carries labels.

        Raises DataError if the template names a field that the line has not.
        """
        out, span = "", (0, 0)
        for literal, name in self._fragments:
            out += literal
            if name == LABEL_FIELD and word is not None:
                span = (len(out), len(out) + len(word))
                out += word
            elif name is not None:
                out += _plain(_field(line, name, self.text), name)
        return out, span if word is not None else (0, len(out))

    def words(self, line: JsonObject) -> tuple[tuple[str, ...], int]:
        """Return the candidate words of a line and the index of the right one.

        Raises DataError if the line has no label, or one that no word or choice stands for.
        """
        label = _field(line, LABEL_FIELD, self.text)
        if self.label_words:
            key = _plain(label, LABEL_FIELD)
            if key not in self.label_words:
                known = ", ".join(f"{name}={word}" for name, word in self.label_words.items())
                raise DataError(
                    f"label {key!r} has no label word",
                    hint=f"label words are {known}; add {key}=WORD to --label-words",
                )
            return tuple(self.label_words.values()), list(self.label_words).index(key)
        if CHOICES_FIELD in line:
            return _chosen(line[CHOICES_FIELD], label)
        return (_plain(label, LABEL_FIELD),), 0

    def candidates(self, line: JsonObject) -> tuple[list[tuple[str, tuple[int, int]]], int]:
        """Return a line's candidates as :meth:`fill` does, and the index of the right one."""
        words, answer = self.words(line) if self.asks_for_label else ((None,), 0)
        return [self.fill(line, word) for word in words], answer

    def encode(self, line: JsonObject, tokenizer: OffsetTokenizer) -> tuple[Question, int]:
        """Return a line as its candidates in tokens, and the number of special tokens that open each."""
        filled, answer = self.candidates(line)
        encoded = [_tokens(text, span, tokenizer) for text, span in filled]
        return Question(tuple(example for example, _ in encoded), answer), encoded[0][1]


def parse_label_words(text: str) -> dict[str, str]:
    """Return label words from their command-line form.

    Raises DataError if a part has no ``=``, a word is empty, or a label or a word stands twice.

    >>> parse_label_words("0=terrible,1=great")
    {'0': 'terrible', '1': 'great'}
    """
    words: dict[str, str] = {}
    for part in text.split(","):
        label, equals, word = part.partition("=")
        label = label.strip()
        if not equals or not word.strip() or not label:
            raise DataError(
                f"label words {text!r}: cannot read {part!r}",
                hint="write label=word,label=word, such as 0=terrible,1=great",
            )
        if label in words or word in words.values():
            raise DataError(f"label words {text!r}: {part!r} repeats a label or a word")
        words[label] = word
    return words


def did_you_mean(name: str, known: Sequence[str], *, kind: str) -> str:
    """Return a hint that offers the names closest to `name`, or all of them."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"{kind} are " + (", ".join(known) or "none")


def _tokens(text: str, span: tuple[int, int], tokenizer: OffsetTokenizer) -> tuple[Example, int]:
    try:
        encoding = tokenizer(text, return_offsets_mapping=True)
    except BaseException as error:
        # A panic in tokenizers' Rust code is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the model's tokenizer cannot read {text!r:.60}: {error}") from error
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    begin, end = span
    # A token is asked for where it shares a character with the span: words may begin within one.
    labels = [
        token if start < end and stop > begin else IGNORED_LABEL
        for token, (start, stop) in zip(ids, offsets, strict=True)
    ]
    # Special tokens cover no character.
    num_special = next((at for at, (start, stop) in enumerate(offsets) if stop > start), 0)
    return Example(tuple(ids), tuple(labels)), num_special


def _field(line: JsonObject, name: str, template: str) -> object:
    try:
        return line[name]
    except KeyError:
        raise DataError(
            f"template {template!r} uses {{{name}}}, but the line has no such field",
            hint=did_you_mean(name, list(line), kind="its fields"),
        ) from None


def _chosen(choices: object, label: object) -> tuple[tuple[str, ...], int]:
    if not isinstance(choices, list) or not choices:
        raise DataError(f"choices must be a list of answers, got {choices!r}"[:200])
    words = tuple(_plain(choice, CHOICES_FIELD) for choice in choices)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(words):
        return words, label
    if isinstance(label, str) and label in words:
        return words, words.index(label)
    raise DataError(
        f"label {label!r} is neither an index of the {len(words)} choices nor one of them",
        hint="indices count from 0",
    )


def _plain(value: object, name: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    shown = json.dumps(value, ensure_ascii=False)
    raise DataError(
        f"the field {name} of a template must be text or a number, got {shown:.60}",
        hint=f"write {name} as text, or leave the line out",
    )
