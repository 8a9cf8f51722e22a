"""What ``conftest.py`` promises to every test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.support.environment import unchanged_environment


def test_the_network_is_out_of_reach() -> None:
    with socket.socket() as outside, pytest.raises(RuntimeError, match="reached for the network"):
        outside.connect(("192.0.2.1", 80))


def test_this_machine_is_within_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


@pytest.mark.slow
def test_child_processes_have_one_torch_thread() -> None:
    probe = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    assert subprocess.run(probe, capture_output=True, text=True, check=True).stdout == "1\n"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_variable_that_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="COLUMNS"), unchanged_environment():
        monkeypatch.setenv("COLUMNS", "40")
