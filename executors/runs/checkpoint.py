"""Weights after some steps, on disk, so that a resumed run need not replay its whole log.

A checkpoint is a safetensors file that appears whole or not at all. It says how many steps are behind it, hashes
its own parameters, and names the base weights and the steps that it came from: one that is damaged, truncated or
another run's is never used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from executors.models.parameters import stored_parameters
from executors.models.weight_files import is_tuned, save_weights, update_digest, weights_digest
from topology.errors import RunError
from topology.limits import whole_number

if TYPE_CHECKING:
    from executors.runs.history import History

CHECKPOINTS_NAME = "checkpoints"
NUM_KEPT = 2
"""Checkpoints kept: the newest, and the one before in case its disk fails."""


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights that belongs to a run."""

    path: Path
    num_steps: int

    def load(self, model: nn.Module) -> None:
        """Load these weights into a model of the base's shape."""
        with _opened(self.path) as file, torch.no_grad():
            held = set(file.keys())
            for tensor in stored_parameters(model):
                if tensor.name in held:  # mapped from the file until it moves into a buffer
                    names = [tensor.name + suffix for suffix in tensor.arrays(tensor.values.dtype)]
                    tensor.hold(tensor.stored_in(map(file.get_tensor, names)))


def save_checkpoint(
    model: nn.Module, directory: Path, *, dtype: str, num_steps: int, base_digest: str, history_digest: str
) -> Path:
    """Write the parameters that the run changes, and keep the newest :data:`NUM_KEPT` checkpoints.

    - `model`: its parameters are those after `num_steps` steps, flushed.
    - `base_digest`, `history_digest`: name the base weights and the steps that led here.
    """
    folder = directory / CHECKPOINTS_NAME
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{num_steps:08d}.safetensors"
    facts = {
        "num_steps": str(num_steps),
        "digest": weights_digest(model, dtype, trainable_only=True),
        "base_digest": base_digest,
        "history_digest": history_digest,
    }
    save_weights(model, path, dtype, metadata=facts, trainable_only=True)
    # Only now: a crash leaves one checkpoint too many, never one too few.
    for old in _files(folder)[:-NUM_KEPT]:
        old.unlink()
    return path


def newest_checkpoint(
    history: History, model: nn.Module, refused: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is whole and belongs to it.

    `refused`: called with the reason, in words, why a checkpoint is not used.
    """
    for path in reversed(_files(history.directory / CHECKPOINTS_NAME)):
        try:
            return _checked(path, history, model)
        except RunError as error:
            refused(error.message)
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"))


def _checked(path: Path, history: History, model: nn.Module) -> Checkpoint:
    with _opened(path) as file:
        facts: Mapping[str, str] = file.metadata() or {}
        num_steps = whole_number(facts.get("num_steps", ""))
        if num_steps is None:
            raise RunError(f"checkpoint {path} does not record its step")
        # What is cheap first: the digest reads the whole file.
        if facts.get("base_digest") != history.header["base_digest"]:
            raise RunError(f"checkpoint {path} belongs to another run, which began from other base weights")
        if num_steps > history.num_steps:
            raise RunError(
                f"checkpoint {path} is ahead of the log, which ends after {history.num_steps} steps"
            )
        if facts.get("history_digest") != history.digest(num_steps):
            raise RunError(f"checkpoint {path} belongs to another run, with other steps before it")
        if facts.get("digest") != _digest(file, model, path):
            raise RunError(f"checkpoint {path} is damaged: its parameters do not match its digest")
    return Checkpoint(path, num_steps)


def _digest(file: Any, model: nn.Module, path: Path) -> str:
    """Return the hash of the parameters in a file; raise unless they are those of `model`."""
    held = set(file.keys())
    digest = hashlib.blake2b(digest_size=16)
    for tensor in filter(is_tuned, stored_parameters(model)):
        # Numbers are in the run's format, which the model need not have been given yet.
        arrays = tensor.arrays(tensor.values.dtype)
        # Of a parameter in several arrays each has a format of its own.
        for suffix, (shape, dtype) in arrays.items():
            name = tensor.name + suffix
            if name not in held:
                raise RunError(f"checkpoint {path} lacks {name}")
            array: Tensor = file.get_tensor(name)
            if tuple(array.shape) != tuple(shape) or (len(arrays) > 1 and dtype != array.dtype):
                shapes = f"{tuple(array.shape)}, the model's is {tuple(shape)}"
                raise RunError(f"checkpoint {path}: {name} has shape {shapes}")
            update_digest(digest, name, array)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; a file that cannot be opened is named."""
    import safetensors

    with ExitStack() as stack:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
        except (OSError, safetensors.SafetensorError) as error:
            raise RunError(f"checkpoint {path} is damaged: {error}") from error
        yield file
