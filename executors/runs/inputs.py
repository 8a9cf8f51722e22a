"""What a run reads beside its weights: lines as examples for its model, and the model's tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from executors.datasets.data import Dataset, Limits, LineFile, open_dataset, refuse_unreadable
from executors.datasets.prompts import PromptTemplate
from executors.models.loading import load_config
from executors.runs.evaluate import Generation
from executors.runs.settings import DataSettings, EvaluationSettings, RunSettings

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


def open_data(settings: RunSettings, data: DataSettings) -> Dataset:
    """Return the examples that a run reads, for its model.

    Raises
    ------
    DataError
        If the file cannot be used.
    """
    template = PromptTemplate(data.template, data.label_words or {}) if data.template else None
    limits = Limits(settings.plan.model.vocab_size, settings.plan.seq, data.truncate)
    return open_dataset(
        data.path, limits=limits, template=template, tokenizer=tokenizer_for(settings.model, data.path)
    )


def refuse_missing_data(settings: RunSettings) -> None:
    """Raise if a file that a run reads cannot be opened, before ranks are started for it.

    Raises
    ------
    DataError
    """
    refuse_unreadable(settings.data.path)
    if settings.evaluation is not None:
        refuse_unreadable(settings.evaluation.path)


def tokenizer_for(model: str, path: str) -> Any:
    """Return the model's tokenizer if the file's lines are text; None where they are tokens or there is none."""
    (first,) = LineFile.index(path).read([0])
    return None if "input_ids" in first else _any_tokenizer(model)


def _any_tokenizer(model: str) -> Any:
    """Return the model's tokenizer; None if there is none here."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
    # Where a directory holds no tokenizer, some models' classes make one without a vocabulary.
    return tokenizer if tokenizer.encode("some text", add_special_tokens=False) else None


def evaluation_data(settings: RunSettings) -> Dataset | None:
    """Return the examples that a run evaluates on, None if it does not."""
    wanted = settings.evaluation
    if wanted is None:
        return None
    data = settings.data
    return open_data(
        settings, DataSettings(wanted.path, data.template, data.label_words, truncate=data.truncate)
    )


def generation_of(settings: RunSettings, wanted: EvaluationSettings) -> Generation:
    """Return how answers are generated and read: by the model's tokenizer, or as token numbers where it has none.

    An answer ends with the model's own token for that, or with a line.
    """
    ends: set[int] = set()
    if not settings.random_weights:
        config = load_config(settings.model, allow_download=settings.allow_download)
        ended_by = getattr(config, "eos_token_id", None)
        ends |= set(ended_by if isinstance(ended_by, list) else [ended_by]) - {None}
    tokenizer = _any_tokenizer(settings.model)
    if tokenizer is not None:
        ends |= set(tokenizer.encode("\n", add_special_tokens=False)[-1:])
    return Generation(
        decode=_numbers if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True),
        stop_tokens=tuple(sorted(ends)),
        max_new_tokens=wanted.max_new_tokens,
        max_length=settings.plan.model.max_positions,
    )


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def pad_token(settings: RunSettings) -> int:
    """Return what padded positions hold: the model's own token for it, if it has one."""
    if settings.random_weights:
        return 0
    config = load_config(settings.model, allow_download=settings.allow_download)
    token = getattr(config, "pad_token_id", None)
    return token if isinstance(token, int) and 0 <= token < settings.plan.model.vocab_size else 0


def copy_tokenizer(model: str, out: Path) -> None:
    """Put a model directory's tokenizer beside weights that were made from it."""
    for name in _TOKENIZER_FILES:
        source = Path(model) / name
        if source.is_file() and source.resolve() != (out / name).resolve():
            shutil.copyfile(source, out / name)
