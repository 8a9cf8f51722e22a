"""A corpus from the Python installation itself, a byte-level tokenizer, and a classification task.

The prose is the language reference that :mod:`pydoc` ships (:mod:`pydoc_data.topics`), the code is the
standard library's own source. Part of both is held out of pretraining; the task asks of 60 held-out bytes
whether they are documentation or code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from executors.labels import IGNORED_LABEL
from topology.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END = 256, 257
"""Token ids past the 256 bytes."""
VOCAB_SIZE = 258

WINDOW_BYTES = 60
QUESTION = b"\nThis is "
"""Follows the window. Chosen on the tuning split: the pretrained model answers at chance, but what it believes of
the two words already depends on the window, so a few hundred zeroth-order steps show."""
LABEL_WORDS: Mapping[str, str] = {"text": "t", "code": "c"}
TEMPLATE = "{text}\nThis is {label}"
"""The same prompt for the text form of the data."""

_HELD_OUT_OF_256 = 64
_HELD_OUT_BYTES = 8192
"""Documents are held out by stretches of this size, since a few of them are most of the prose."""
_CHUNK_BYTES = 240
"""Held-out text is dealt to the splits by chunks of this size."""
_SKIPPED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "lib2to3"}
)
_LEAST_BYTES = 100_000


@dataclass(frozen=True)
class Corpus:
    """Prose and source code, by name.

    Raises DataError if there is too little of either to learn from.
    """

    # prose, code: name and contents, sorted by name.
    prose: tuple[tuple[str, bytes], ...]
    code: tuple[tuple[str, bytes], ...]

    def __post_init__(self) -> None:
        for kind, documents in (("documentation", self.prose), ("source code", self.code)):
            size_bytes = sum(len(contents) for _, contents in documents)
            if size_bytes < _LEAST_BYTES:
                raise DataError(
                    f"this Python installation has {size_bytes} bytes of {kind}, but pretraining needs "
                    f"{_LEAST_BYTES}",
                    hint="use a full CPython installation, or give --model and --data",
                )

    @cached_property
    def training(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Prose and code to pretrain on, as bytes."""
        return _joined(self.prose, held_out=False), _joined(self.code, held_out=False)

    @cached_property
    def held_out(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Prose and code that pretraining never sees, as bytes."""
        return _joined(self.prose, held_out=True), _joined(self.code, held_out=True)


def installed_corpus() -> Corpus:
    """Return the text of this Python installation.

    Raises DataError if it comes without its documentation or its source.
    """
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    prose = tuple((name, text.encode()) for name, text in sorted(topics.items()))
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    return Corpus(prose, tuple((path.relative_to(root).as_posix(), path.read_bytes()) for path in files))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token ids are the bytes of the text's UTF-8, as transformers loads it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The letter of a byte in a byte-level vocabulary is the byte itself where that can be printed (GPT-2's table).
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", bos_token="</s>"
    )


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """Examples of each split of the task."""

    train: int = 2048
    tuning: int = 400
    validation: int = 600


def write_task(corpus: Corpus, folder: Path, *, sizes: TaskSizes = TaskSizes(), seed: int = 0) -> None:
    """Write ``train.jsonl``, ``tuning.jsonl`` and ``validation.jsonl`` into `folder`.

    Held-out text is cut into chunks, the chunks are dealt to the splits (60, 20 and 20 %), and windows are
    drawn inside chunks: no byte of validation stands in another split. Classes are balanced. Settings are to
    be chosen on ``tuning``, so that ``validation`` stays a fair judge.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    dealt = [_deal(text, rng) for text in corpus.held_out]
    for split, (name, size) in enumerate(
        (("train", sizes.train), ("tuning", sizes.tuning), ("validation", sizes.validation))
    ):
        chunks = {kind: dealt[at][split] for at, kind in enumerate(LABEL_WORDS)}
        kinds = [tuple(chunks)[at % len(chunks)] for at in range(size)]
        lines = []
        for kind in rng.permutation(np.array(kinds)):
            chunk = chunks[kind][rng.integers(len(chunks[kind]))]
            start = rng.integers(len(chunk) - WINDOW_BYTES + 1)
            window = chunk[start : start + WINDOW_BYTES]
            tokens = [*window, *QUESTION, *LABEL_WORDS[kind].encode()]
            labels = [IGNORED_LABEL] * (len(tokens) - 1) + tokens[-1:]
            text = window.decode("utf-8", "replace")
            line = {"input_ids": tokens, "labels": labels, "text": text, "label": str(kind)}
            lines.append(json.dumps(line) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _deal(
    text: npt.NDArray[np.uint8], rng: np.random.Generator
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    num = len(text) // _CHUNK_BYTES
    chunks = [text[at * _CHUNK_BYTES : (at + 1) * _CHUNK_BYTES].tobytes() for at in rng.permutation(num)]
    first, second = num * 3 // 5, num * 4 // 5
    return chunks[:first], chunks[first:second], chunks[second:]


def _joined(documents: tuple[tuple[str, bytes], ...], *, held_out: bool) -> npt.NDArray[np.uint8]:
    kept = (
        contents[start : start + _HELD_OUT_BYTES]
        for name, contents in documents
        for piece, start in enumerate(range(0, len(contents), _HELD_OUT_BYTES))
        if (hashlib.sha256(f"{name}:{piece}".encode()).digest()[0] < _HELD_OUT_OF_256) == held_out
    )
    return np.frombuffer(b"".join(kept), dtype=np.uint8)
