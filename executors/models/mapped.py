"""Base weights that are mapped from their files until they move into a program's buffers, so that a host holds them once.

transformers leaves weights in their files, mapped, where they are wanted in the format that they are kept in there; in
another format it would make a copy, beside which buffers have no room: and every rank one of its own. They are
therefore read as they are, and converted, or made codes of, one group at a time as they move.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from costmodel.formats import DType
from executors.formats import SAFETENSORS_NAMES, format_of
from executors.models.loading import load_model
from executors.models.weight_files import weights_digest
from zosim.plans import Plan


def moves_mapped(plan: Plan) -> bool:
    """Whether weights keep the format of their files until they move into a program's buffers, or become codes there.

    Stages compute with parameters before that.
    """
    return plan.num_stages == 1 or plan.is_shared_out or plan.coding is not None


def own_format(source: str | Path) -> DType | None:
    """Return the format that all weights in a directory are kept in; None where there are several, or none to read."""
    names = set()
    try:
        for path in sorted(filter(Path.is_file, Path(source).glob("*.safetensors"))):
            with safe_open(path, framework="pt") as file:
                names |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError):
        return None  # whoever loads the model says what is wrong with it
    kept_in = next((dtype for dtype, name in SAFETENSORS_NAMES.items() if names == {name}), None)
    return format_of(kept_in) if kept_in is not None and kept_in.is_floating_point else None


def digest_of_files(source: str | Path, dtype: str | None = None) -> str | None:
    """Return the digest of the weights in a directory, read in `dtype` (by default their own); None where there are none to read.

    Raises
    ------
    ModelError
        If the weights cannot be read.
    """
    if not (Path(source).is_dir() and any(Path(source).glob("*.safetensors"))):
        return None
    own = own_format(source) or "float32"
    return weights_digest(load_model(source, dtype=own), dtype or own)
