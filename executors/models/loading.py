"""Models from a directory or a name, as weights that are safe to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from costmodel.configs import shipped_config
from executors.formats import TORCH_DTYPES
from topology.errors import ModelError

_UNSAFE = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def load_model(
    source: str | Path,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    allow_download: bool = False,
    random_weights: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Return a causal language model in evaluation mode, on the CPU.

    Parameters
    ----------
    source : str or path
        Directory with ``config.json`` and safetensors, or a name that transformers knows.
    dtype : str
        Format of the weights.
    attention : str
        ``"eager"`` or ``"sdpa"``.
    allow_download : bool
        Whether a name may be looked up on the Hub; off, only what is in the local cache is read.
    random_weights : bool
        Build the architecture with random weights, reading the configuration alone; `source` may then be a size that
        comes with zosim, such as ``opt-125m``.
    seed : int
        Of the random weights.

    Raises
    ------
    ModelError
        If there is no such model, its weights are pickled, damaged or incomplete, or its attention cannot be had.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # models load in seconds, and steps have a bar of their own
    local = not allow_download
    try:
        if random_weights:
            return _random(str(source), dtype, attention, seed, local_files_only=local)
        _refuse_pickled(Path(source))
        with _silent_loading():
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(source),
                dtype=TORCH_DTYPES[dtype],
                attn_implementation=attention,
                local_files_only=local,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise _refusal(source, error, local=local) from error
    model, found = loaded
    _refuse_incomplete(source, found)
    return model.eval()  # type: ignore[no-any-return]


def load_config(source: str | Path, *, allow_download: bool = False) -> Any:
    """Return the configuration of a model, as transformers reads it.

    Raises
    ------
    ModelError
        If there is no such model, or its configuration is damaged.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(str(source), local_files_only=not allow_download)
    except (OSError, ValueError, KeyError) as error:
        raise _refusal(source, error, local=not allow_download) from error


@contextmanager
def _silent_loading() -> Iterator[None]:
    """Keep transformers from reporting what :func:`_refuse_incomplete` says shorter."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def _refuse_incomplete(source: str | Path, found: Mapping[str, Any]) -> None:
    """Raise where transformers would have drawn weights at random in place of those that a file lacks."""
    wrong = [str(name) for name, *_ in found["mismatched_keys"]]
    if wrong:
        raise ModelError(
            f"the weights in {source} do not fit its config.json: {_some(wrong)} has another shape",
            hint="the two are of different models; copy both from one place",
        )
    missing = [str(name) for name in found["missing_keys"]]
    if missing:
        raise ModelError(
            f"the weights in {source} are incomplete: {_some(missing)} is missing",
            hint="copy or convert the model again; without them these parameters would be random",
        )


def _some(names: Sequence[str]) -> str:
    names = sorted(names)
    return names[0] if len(names) == 1 else f"{names[0]} (one of {len(names)})"


def _random(source: str, dtype: str, attention: str, seed: int, **where: Any) -> nn.Module:
    import torch
    import transformers

    config = _shipped_config(source) or transformers.AutoConfig.from_pretrained(source, **where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=TORCH_DTYPES[dtype], attn_implementation=attention
        )
    return model.eval()  # type: ignore[no-any-return]


def _shipped_config(source: str) -> Any:
    """Return the configuration of a size that comes with zosim, None if `source` is something else."""
    import transformers

    if Path(source).exists():
        return None
    try:
        fields = shipped_config(source)
    except ModelError:
        return None
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def _refuse_pickled(directory: Path) -> None:
    if not directory.is_dir():
        return
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json",
            hint="give a directory written by transformers' save_pretrained",
        )
    pickled = [name for name in _UNSAFE if (directory / name).exists()]
    if pickled and not list(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory} holds its weights as {pickled[0]}, a pickle, which can run code when it is read",
            hint="where you trust it, convert it once: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW) writes safetensors",
        )


def _refusal(source: str | Path, error: Exception, *, local: bool) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hint = "give a directory written by save_pretrained"
    if isinstance(error, SafetensorError):
        hint = "the file is damaged or was copied in part; copy it again"
    if local and not Path(source).exists():
        hint += ", or allow the download of a model that the Hub knows (--allow-download)"
    return ModelError(f"cannot load the model {source}: {reason}", hint=hint)
