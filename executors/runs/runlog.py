"""What a run leaves behind: ``run.json``, ``steps.jsonl``, weights under Hugging Face's names.

The header, the log of seeds and scalars, and the base weights determine every later weight.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor, nn

from executors.runs.closing import Closing
from executors.runs.jsonlines import JsonLines, read_lines
from executors.steps.buffers import TORCH_DTYPES
from topology.errors import RunError
from topology.signed import with_digest, without_digest

HEADER_NAME = "run.json"
STEPS_NAME = "steps.jsonl"
WEIGHTS_NAME = "model.safetensors"
RUNLOG_VERSION = 2

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class RunLog(Closing):
    """The files of one run, written as it goes.

    Parameters
    ----------
    directory : path
        Made if need be. A log that stands there already is refused.
    header : mapping
        Written to ``run.json``.

    Raises
    ------
    RunError
        If the directory holds a run already, or cannot be written.
    """

    def __init__(self, directory: str | Path, header: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if (self.directory / STEPS_NAME).exists():
                raise RunError(
                    f"{self.directory} holds the log of a run already ({STEPS_NAME})",
                    hint="go on with it (--resume), give another --out, or remove that directory",
                )
            write_header(self.directory, header)
        except OSError as error:
            message = f"cannot write to {self.directory}: {error}"
            raise RunError(message, hint="give an --out that can be written") from error
        self._steps = JsonLines(self.directory / STEPS_NAME)

    @classmethod
    def resumed(cls, directory: str | Path, keep_bytes: int) -> Self:
        """Return a log that goes on after its first `keep_bytes` bytes."""
        log = cls.__new__(cls)
        log.directory = Path(directory)
        log._steps = JsonLines(log.directory / STEPS_NAME, keep_bytes=keep_bytes)
        return log

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of one step to the disk."""
        self._steps.append(rows)

    def close(self) -> None:
        """End the log."""
        self._steps.close()


def read_steps(directory: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log.

    Raises
    ------
    RunError
        If there is no log, or a line of it is damaged.
    """
    path = Path(directory) / STEPS_NAME
    if not path.is_file():
        raise RunError(f"there is no log {path}", hint="`zosim run --out DIR` writes it")
    return [line.row for line in read_lines(path)]


def write_header(directory: Path, header: Mapping[str, Any]) -> None:
    """Write ``run.json``, with a digest, in one instant."""
    content = json.loads(json.dumps(dict(header)))  # as it will be read
    write_atomically(directory / HEADER_NAME, json.dumps(with_digest(content), indent=2) + "\n")


def read_header(directory: str | Path) -> dict[str, Any]:
    """Return a run's header.

    Raises
    ------
    RunError
        If there is none, it is damaged, or another version wrote it.
    """
    path = Path(directory) / HEADER_NAME
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{directory} holds no run ({HEADER_NAME} is missing)") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict) or header.get("version") != RUNLOG_VERSION:
        found = header.get("version") if isinstance(header, dict) else type(header).__name__
        raise RunError(f"{path} is not the header of a run (version {found!r}, known is {RUNLOG_VERSION})")
    missing = [name for name in _HEADER_FIELDS if name not in header]
    if missing:
        raise RunError(f"{path} is damaged: it lacks {', '.join(missing)}")
    header, is_whole = without_digest(header)
    if not is_whole:
        raise RunError(
            f"{path} is damaged: it does not have the digest it states",
            hint="restore the file from a copy; options are changed on the command line, not in it",
        )
    return header


_HEADER_FIELDS = ("epsilon", "weight_decay", "plan", "trainable", "base_digest", "seed", "loss_dtype")


def header_of(
    model: nn.Module,
    *,
    plan: Mapping[str, Any],
    epsilon: float,
    weight_decay: float,
    device: str,
    base_digest: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return what a replay has to know beside the log, and what its bits depend on."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "version": RUNLOG_VERSION,
        "epsilon": epsilon,
        "weight_decay": weight_decay,
        "plan": dict(plan),
        "trainable": names,
        "base_digest": base_digest or weights_digest(model),
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **more,
    }


def weights_digest(model: nn.Module, dtype: str | None = None, *, trainable_only: bool = False) -> str:
    """Return a hash over names, formats, shapes and bits of all parameters, in registration order.

    Parameters
    ----------
    model : torch.nn.Module
    dtype : str, optional
        Format to read the parameters in; by default their own.
    trainable_only : bool
        Leave frozen parameters out.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trainable_only:
            update_digest(digest, name, parameter.data.to(TORCH_DTYPES[dtype] if dtype else parameter.dtype))
    return digest.hexdigest()


def update_digest(digest: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    """Add one named tensor to a hash."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_bytes_of(tensor))


def save_weights(
    model: nn.Module,
    path: str | Path,
    dtype: str | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    trainable_only: bool = False,
) -> None:
    """Write a model's parameters as safetensors under their names, a tied one once.

    Parameters
    ----------
    model : torch.nn.Module
    path : path
        Replaced only when everything has been written.
    dtype : str, optional
        Format to write floating-point tensors in; by default their own.
    metadata : mapping, optional
        What to say about the weights in the file.
    trainable_only : bool
        Leave frozen parameters and buffers out.

    Notes
    -----
    Tensors are written one by one: the buckets that they lie in are neither copied nor written.
    """
    tensors = _trainable_tensors(model) if trainable_only else _saved_tensors(model)
    write_tensors(tensors, path, dtype, metadata)


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors as safetensors, in one instant; parameters as :func:`save_weights`."""
    wanted = TORCH_DTYPES[dtype] if dtype else None
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        to = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        end = offset + tensor.numel() * to.itemsize
        entry = {"dtype": _SAFETENSORS_DTYPES[to], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with _replacing(Path(path)) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            to = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
            file.write(_bytes_of(tensor.to(to)))


def save_pretrained(model: nn.Module, directory: str | Path, dtype: str | None = None) -> None:
    """Write a directory that transformers loads: weights and configuration."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    save_weights(model, directory / WEIGHTS_NAME, dtype)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text`, in one instant."""
    with _replacing(path) as file:
        file.write(text.encode())


class _replacing:  # noqa: N801 - reads as the context that it is
    """Opens a temporary file beside `path` and puts it in its place if all goes well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def __enter__(self) -> IO[bytes]:
        self._file = self._partial.open("wb")
        return self._file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, each once."""
    persistent = set(model.state_dict().keys())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in persistent}


def _trainable_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).cpu().numpy().data if math.prod(tensor.shape) else memoryview(b"")
