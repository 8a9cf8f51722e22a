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

from executors.buffers import TORCH_DTYPES
from topology.errors import RunError

HEADER_NAME = "run.json"
STEPS_NAME = "steps.jsonl"
WEIGHTS_NAME = "model.safetensors"
RUNLOG_VERSION = 1

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


class RunLog:
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
                    hint="give another --out, or remove that directory",
                )
            write_atomically(self.directory / HEADER_NAME, json.dumps(dict(header), indent=2) + "\n")
            self._steps: IO[str] = (self.directory / STEPS_NAME).open("x", encoding="utf-8")
        except OSError as error:
            message = f"cannot write to {self.directory}: {error}"
            raise RunError(message, hint="give an --out that can be written") from error

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of one step and hand them to the operating system."""
        text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
        self._steps.write(text)
        self._steps.flush()

    def close(self) -> None:
        """End the log."""
        self._steps.flush()
        os.fsync(self._steps.fileno())
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_steps(directory: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log.

    Raises
    ------
    RunError
        If there is no log, or a line of it is damaged.
    """
    path = Path(directory) / STEPS_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read: {error}"
        raise RunError(message, hint="`zosim run --out DIR` writes it") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            message = f"{path} line {number} is damaged: {error}"
            raise RunError(message) from error
    return rows


def header_of(
    model: nn.Module,
    *,
    plan: Mapping[str, Any],
    epsilon: float,
    weight_decay: float,
    device: str,
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
        "base_digest": weights_digest(model),
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **more,
    }


def weights_digest(model: nn.Module) -> str:
    """Return a hash over names, formats, shapes and bits of all parameters, in registration order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(_bytes_of(parameter.data))
    return digest.hexdigest()


def save_weights(model: nn.Module, path: str | Path, dtype: str | None = None) -> None:
    """Write a model's parameters as safetensors under their names, a tied one once.

    Parameters
    ----------
    model : torch.nn.Module
    path : path
        Replaced only when everything has been written.
    dtype : str, optional
        Format to write floating-point tensors in; by default their own.

    Notes
    -----
    Tensors are written one by one: the buckets that they lie in are neither copied nor written.
    """
    wanted = TORCH_DTYPES[dtype] if dtype else None
    tensors = _saved_tensors(model)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, each once."""
    persistent = set(model.state_dict().keys())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in persistent}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).cpu().numpy().data if math.prod(tensor.shape) else memoryview(b"")
