"""Runs what was planned: the only package that needs torch.

Names are loaded when they are first asked for, so that listing commands stays fast.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from topology.lazy import lazy_names
from zosim.cache import cache_directory

if TYPE_CHECKING:
    from executors.models.loading import load_model as load_model
    from executors.models.spec import plan_of_model as plan_of_model
    from executors.models.spec import spec_of_model as spec_of_model
    from executors.ranks.launch import launch as launch
    from executors.runs.records import StepRecord as StepRecord
    from executors.runs.session import Session as Session
else:
    __getattr__, __all__ = lazy_names(__name__, __file__)


def _keep_compiled_code_private() -> None:
    """Let torch keep what it compiles in this user's cache: by default it makes a directory in TMPDIR whose name others can foresee."""
    if "torch" in sys.modules or "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with suppress(OSError, RuntimeError):  # no home, or one that cannot be written to
        folder = cache_directory() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


_keep_compiled_code_private()
