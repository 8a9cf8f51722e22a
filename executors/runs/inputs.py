"""What a run reads beside its weights: the data as examples, and the model's tokenizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from costmodel.models.model_spec import ModelSpec
from executors.datasets.data import Dataset, Limits, LineFile, open_dataset
from executors.datasets.generation import Generation
from executors.datasets.rewards import objective_of_text, reward_named
from executors.files import TOKENIZER_FILES, replacing
from executors.models.loading import load_config, refusing
from executors.models.model import TextObjective
from executors.runs.settings import DataSettings, EvaluationSettings, RunSettings
from topology.errors import ModelError
from topology.reading import read_json_object
from topology.validation import readable
from zosim.console import stderr


def open_data(settings: RunSettings, data: DataSettings) -> Dataset:
    """Return the examples that a run reads, for its model. Raises DataError if the file cannot be used."""
    return _opened(settings.run.model, settings.plan.model, data, settings.plan.seq)


def longest_line(
    model: str, spec: ModelSpec, data: DataSettings, evaluation: EvaluationSettings | None
) -> int:
    """Return the number of tokens of the longest line that a run reads; with ``--truncate``, at most the model's positions.

    Raises DataError if a line has more tokens than the model has positions and is not to be cut, or cannot be used.
    """
    files = [data] if evaluation is None else [data, data.model_copy(update={"path": evaluation.path})]
    return max(_opened(model, spec, file, spec.max_positions).longest() for file in files)


def _opened(model: str, spec: ModelSpec, data: DataSettings, max_length: int) -> Dataset:
    return open_dataset(
        data.path,
        limits=Limits(spec.vocab_size, max_length, data.truncate, spec.max_positions),
        template=data.prompt,
        tokenizer=tokenizer_for(model, data.path),
        fills_masks=not spec.is_causal,
    )


def tokenizer_for(model: str, path: str) -> Any:
    """Return the model's tokenizer if the file's lines are text; None where they are tokens or there is none."""
    (first,) = LineFile.index(path).read([0])
    return None if "input_ids" in first else _any_tokenizer(model)


def _any_tokenizer(model: str) -> Any:
    """Return the model's tokenizer; None if there is none here.

    Raises ModelError if its files are damaged. Code that a directory brings for its tokenizer is never run.
    """
    import transformers

    directory = Path(model)
    if directory.is_dir():
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            return None
        _check_tokenizer_files(directory)
    try:
        config = load_config(model)
        with refusing(f"{model} (its tokenizer)"), warnings.catch_warnings():
            # About a tokenizer's age, and what a model would do with long texts.
            warnings.simplefilter("ignore")
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                model, config=config, local_files_only=True, trust_remote_code=False
            )
            # Where a directory holds no tokenizer, some models' classes make one without a vocabulary.
            return tokenizer if tokenizer.encode(_SOME_TEXT, add_special_tokens=False) else None
    except ModelError:
        if directory.is_dir():
            raise
        return None


class _TokenizerConfig(BaseModel):
    """Fields of a ``tokenizer_config.json`` on whose types transformers relies."""

    model_config = ConfigDict(strict=True)

    tokenizer_class: str | None = None
    model_max_length: float | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]] = {}


def _check_tokenizer_files(directory: Path) -> None:
    """Raise for tokenizer files that are damaged, naming the file.

    What ``tokenizer.json`` holds is a program of a kind: patterns and replacements. It is tried in a process of its own, which
    a pattern or a replacement that multiplies without end cannot leave with this one's memory or time.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (directory / name).is_file():
            fields = read_json_object(directory / name, "tokenizer configuration", ModelError)
            if name == "tokenizer_config.json":
                with readable(str(directory / name), ModelError, model=_TokenizerConfig):
                    _TokenizerConfig.model_validate(fields)
    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    tried = subprocess.run(
        [sys.executable, "-P", str(_TRIAL), str(path), _SOME_TEXT],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        reason = tried.stdout.strip() or "it takes too much time or memory"
        raise ModelError(
            f"{path} is not a valid tokenizer: {reason}", hint="copy the tokenizer's files again"
        )


_SOME_TEXT = "some text, Some more:  2 + 2\n" + 80 * "a" + " é"
"""Long enough for a pattern that tries every way to part a word to show it."""
_TRIAL = Path(__file__).with_name("tokenizer_trial.py")


def evaluation_data(settings: RunSettings) -> Dataset | None:
    """Return the examples that a run evaluates on, None if it does not."""
    wanted = settings.evaluation
    if wanted is None:
        return None
    data = settings.data
    return open_data(settings, data.model_copy(update={"path": wanted.path, "shuffle": False}))


def generation_of(settings: RunSettings, wanted: EvaluationSettings) -> Generation:
    """Return how answers are generated and read: by the model's tokenizer, or as token numbers where it has none.

    An answer ends with the model's own token for that, or with a line.
    """
    ends = _end_tokens(settings)
    tokenizer = _any_tokenizer(settings.run.model)
    if tokenizer is not None:
        # The last token: some tokenizers put one for a space before it.
        ends |= set(tokenizer.encode("\n", add_special_tokens=False)[-1:])

    def decode(tokens: Sequence[int]) -> str:
        if tokenizer is None:
            return " ".join(map(str, tokens))
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    return Generation(
        decode=decode,
        stop_tokens=tuple(sorted(ends)),
        max_new_tokens=wanted.max_new_tokens,
        max_length=settings.plan.model.max_positions,
    )


def text_objective(settings: RunSettings) -> TextObjective | None:
    """Return the objective of a run with a reward, minus the mean reward of generated text; None for any other run.

    Text ends with the model's own token for that, as a server's does.
    """
    num_new_tokens = settings.plan.forward.num_new_tokens
    if settings.run.reward is None or num_new_tokens is None:
        return None
    reward = reward_named(
        settings.run.reward, settings.run.reward_timeout_s, from_here=not settings.run.resume
    )
    tokenizer = tokenizer_for(settings.run.model, settings.data.path)
    decode = None if tokenizer is None else tokenizer.decode
    longest = settings.plan.model.max_positions
    generation = Generation(list, tuple(sorted(_end_tokens(settings))), num_new_tokens, longest)
    return objective_of_text(reward, generation, decode)


def _end_tokens(settings: RunSettings) -> set[int]:
    if settings.run.random_weights:
        return set()
    config = load_config(settings.run.model, allow_download=settings.run.allow_download)
    ended_by = getattr(config, "eos_token_id", None)
    return set(ended_by if isinstance(ended_by, list) else [ended_by]) - {None}


def pad_token(settings: RunSettings) -> int:
    """Return the token of padded positions: the model's own if it has one, else 0."""
    if settings.run.random_weights:
        return 0
    config = load_config(settings.run.model, allow_download=settings.run.allow_download)
    token = getattr(config, "pad_token_id", None)
    return token if isinstance(token, int) and 0 <= token < settings.plan.model.vocab_size else 0


def copy_tokenizer(model: str, out: Path) -> None:
    """Copy a model directory's tokenizer to weights that were made from it.

    A link that leads out of the directory is not copied, unless into the cache of the Hub that the directory is of: it
    might lead to anything that the user can read.
    """
    directory = Path(model).resolve()
    # A snapshot in the Hub's cache is made of links to the blobs beside it.
    homes = [directory, *([directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else [])]
    for name in TOKENIZER_FILES:
        source = (directory / name).resolve()
        if not source.is_file() or source == (out / name).resolve():
            continue
        if not any(source.is_relative_to(home) for home in homes):
            warning = (
                f"warning: {directory / name} leads out of its directory, to {source}, and is not copied"
            )
            stderr.print(warning, markup=False, soft_wrap=True)
        else:
            with source.open("rb") as read, replacing(out / name) as file:
                shutil.copyfileobj(read, file)
