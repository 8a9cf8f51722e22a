"""A tokenizer of whole words, and lines of text that it reads, for models of the tiny shapes."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "it",
    "was",
    "great",
    "terrible",
    "i",
    "loved",
    "hated",
    "this",
    "film",
    "of",
    "the",
    "day",
    "a",
    "b",
    "c",
    "d",
]
TEMPLATE, LABEL_WORDS = "{text} it was {label}", "0=terrible,1=great"
OPTIONS = ("--template", TEMPLATE, "--label-words", LABEL_WORDS)


def word_tokenizer():
    """One token per word, and one that opens a text."""
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", pad_token="<pad>")


def text_line(num_tokens, label=0):
    """A line that has so many tokens under the template: its words, one that opens it, and three of the template."""
    return {"text": " ".join(["a"] * (num_tokens - 4)), "label": label}


def write_text(path, lengths, labels=(0, 1)):
    """Write a line of text of each length."""
    lines = [text_line(length, labels[at % len(labels)]) for at, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
