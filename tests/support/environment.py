"""The variables of the environment, which a test leaves as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

OF_PROCESSES = ("PYTEST_CURRENT_TEST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR")
"""Set for good by pytest, by a process that joins others, and by the first import of executors."""


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """Fail where the block leaves a variable changed, for others to fail by."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = {*before, *after}.difference(OF_PROCESSES)
    assert {name: after.get(name) for name in names if after.get(name) != before.get(name)} == {}
