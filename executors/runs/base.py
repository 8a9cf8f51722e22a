"""What a run records of its base model beside its weights: the configuration and the tokenizer.

The same weights under another activation are another model, and the same lines under another tokenizer other examples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from executors.files import TOKENIZER_FILES
from topology.errors import ModelError, RunError
from topology.reading import parse_json, read_bytes

BASE = "base"
"""What a run's header calls these facts."""

_NO_FUNCTION = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "init_std",
    "initializer_range",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Fields that change no number of a run, or that its plan says."""


def base_facts(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a model's configuration that decide what it computes, and the transformers version that named them."""
    import transformers

    config: Any = getattr(model, "config", None)
    fields = {} if config is None else json.loads(json.dumps(config.to_dict(), default=str))
    return {"config": _deciding(fields), "transformers": transformers.__version__}


def _deciding(value: Any) -> Any:
    """Return a JSON value without the fields that decide nothing, at any depth."""
    if not isinstance(value, dict):
        return value
    return {name: _deciding(part) for name, part in value.items() if name not in _NO_FUNCTION}


def tokenizer_facts(model: str) -> dict[str, str]:
    """Return a hash of each file of a model's tokenizer, by name; formatting of its configuration does not matter."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    facts, directory = {}, Path(model)
    for name in TOKENIZER_FILES:
        path: Any = directory / name
        if not directory.is_dir():
            path = None
            with suppress(HFValidationError):
                path = try_to_load_from_cache(model, name)
        # The cache remembers, too, what a model does not have.
        if not isinstance(path, str | Path) or not Path(path).is_file():
            continue
        content = read_bytes(Path(path), "tokenizer's file", ModelError)
        if name.endswith("_config.json"):
            parsed = parse_json(content.decode(errors="replace"), f"{path} is damaged", ModelError)
            content = json.dumps(_deciding(parsed), sort_keys=True).encode()
        facts[name] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return facts


def refuse_other_base(header: Mapping[str, Any], present: Mapping[str, Any], source: str, run: str) -> None:
    """Raise if a base with equal weights computes another function than the one that a run began from.

    `header`: of the run. One that says nothing of its base is let pass: :func:`unknown_base` says so.

    Raises RunError: naming the first field or file that differs, with both values.
    """
    recorded = header.get(BASE) or {}
    if not isinstance(recorded, dict):
        raise RunError(
            f"{run} is damaged: it records {recorded!r} as its base",
            hint="restore it, or start in another directory",
        )
    is_same_library = recorded.get("transformers") == present.get("transformers")
    for what, hint in (
        (
            "config",
            "the same weights under another configuration are another model: give the one that it was",
        ),
        (
            "tokenizer",
            "the same lines under another tokenizer are other examples: give the files that it had",
        ),
    ):
        was, is_now = recorded.get(what), present.get(what)
        if not isinstance(was, dict) or not isinstance(is_now, dict):
            continue
        # Another version of the library may have fields of its own, at their usual values.
        names = {**was, **is_now} if what == "tokenizer" or is_same_library else was.keys() & is_now.keys()
        for name in names:
            if was.get(name) != is_now.get(name):
                raise RunError(
                    f"{source} is not the base of {run}: {what} {name} was {_shown(was, name)}, and is {_shown(is_now, name)}",
                    hint=hint,
                )


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return f"{facts[name]!r:.80}" if name in facts else "not there"


def unknown_base(header: Mapping[str, Any]) -> list[str]:
    """Return a note for a run of an earlier version, which recorded only its base's weights."""
    if header.get(BASE):
        return []
    parsed = "an earlier version wrote run.json, without the configuration and the tokenizer of the base"
    return [f"{parsed}: they are not compared"]
