"""What a first user meets: commands that need less said, and refusals before anything takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from executors.ranks import host_memory
from executors.runs import history as history_module
from executors.runs.history import read_history
from executors.runs.runlog import read_header
from tests.support import command
from tests.support.command import loaded, saved_lines, saved_model, zosim
from tests.support.reference_mezo import differing
from topology.errors import refusal_of_machine


@pytest.fixture
def inputs(tmp_path):
    saved_lines(tmp_path / "data.jsonl")
    return saved_model("opt", tmp_path), tmp_path / "data.jsonl"


train = partial(command.train, steps=3, batch=3, shuffle="off")


def test_a_run_goes_on_with_the_threads_of_its_record(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    try:
        assert train(*inputs, tmp_path / "out", "--threads", 2) == 0
        capsys.readouterr()
        assert zosim("run", "--out", tmp_path / "out", "--resume", "--steps", 4, "--no-launch") == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert read_header(tmp_path / "out")["num_threads"] == 2
    assert "warning" not in capsys.readouterr().err


def test_replay_takes_the_base_weights_that_the_record_names(inputs, tmp_path, capsys):
    out, again = tmp_path / "out", tmp_path / "again"
    assert train(*inputs, out) == 0
    capsys.readouterr()
    assert zosim("replay", out, "-o", again) == 0
    assert capsys.readouterr().err.startswith(f"base weights: {inputs[0]}, as recorded in {out}\n")
    assert differing(loaded(out), loaded(again)) == []


def test_a_base_that_was_moved_is_asked_for(inputs, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(*inputs, out) == 0
    inputs[0].rename(tmp_path / "moved")
    assert zosim("run", "--out", out, "--resume", "--steps", 4, "--no-launch") == 2
    said = capsys.readouterr().err
    assert f"the base weights of {out} are not there" in said
    assert "name where they are now with --model" in said


def test_the_log_of_a_run_that_goes_on_is_not_taken_for_a_truncated_one(inputs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert train(*inputs, out, "--digest-every", 1) == 0
    header = {name: value for name, value in read_header(out).items() if name != "finished"}
    monkeypatch.setattr(history_module, "read_header", lambda _: header)
    steps, digests = out / "steps.jsonl", out / "digests.jsonl"
    later = {path: path.read_text() for path in (steps, digests)}
    for path, text in later.items():
        path.write_text("".join(text.splitlines(keepends=True)[:2]))
    read_lines = history_module.read_lines

    def read_while_it_goes_on(path):
        lines = read_lines(path)
        for each, text in later.items():  # step 2 and its digest are written meanwhile
            each.write_text(text)
        return lines

    monkeypatch.setattr(history_module, "read_lines", read_while_it_goes_on)
    assert read_history(out).num_steps in (2, 3)


def test_a_batch_that_is_larger_than_the_data_is_said(inputs, tmp_path, capsys):
    model, data = inputs
    assert train(model, data, tmp_path / "fits", "--batch", 10, steps=1) == 0
    assert "warning" not in capsys.readouterr().err
    assert train(model, data, tmp_path / "out", "--batch", 11, steps=1) == 0
    assert f"warning: a batch of 11 exceeds the 10 lines of {data}" in capsys.readouterr().err


def test_a_directory_with_an_adapter_is_not_said_to_have_nothing_to_train(inputs, tmp_path, capsys):
    model, data = inputs
    assert train(model, data, tmp_path / "lora", "--lora-rank", 2, "--lora-targets", "q_proj") == 0
    (model / "adapter_config.json").write_bytes((tmp_path / "lora/adapter/adapter_config.json").read_bytes())
    capsys.readouterr()
    assert train(model, data, tmp_path / "out") == 2
    output = capsys.readouterr().err
    assert "no trainable parameter" not in output
    assert "adapter" in output


def test_too_few_open_files_for_shared_blocks_is_no_mistake_of_ours(tmp_path, monkeypatch):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the first number that is free
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    try:
        with (
            pytest.raises(OSError, match="Too many open files") as caught,
            host_memory.memory_file(4096, [tmp_path]),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in refusal_of_machine(caught.value).hint
    assert list(tmp_path.iterdir()) == []
    assert os.dup(0) == lowest  # and no descriptor is left open
    os.close(lowest)


WITHOUT_TORCH = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "tokenizers"):
            raise ModuleNotFoundError(f"there is no {name}", name=name)

sys.meta_path.insert(0, Hidden())
"""

RUN = """
import zosim
from topology.errors import ZosimError
try:
    zosim.run(model="opt-1m", data="nowhere.jsonl", steps=1, out="out")
except ZosimError as error:
    print(error.message, error.hint)
"""

DEMO = """
from zosim.cli import main
sys.argv[1:] = ["demo", "--out", "demo"]
main()
"""


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("program", [RUN, DEMO], ids=["zosim.run", "zosim demo"])
def test_without_torch_what_needs_it_says_so_first(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert "this needs torch, which is not installed" in output
    assert "pip install -e '.[run]'" in output
    assert "Traceback" not in output
    assert "1 of " not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_torch_keeps_what_it_compiles_where_only_this_user_writes(tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    program = "import executors, os, torch._dynamo; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(temporary), "ZOSIM_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "cache" / "compiled")
    assert (tmp_path / "cache" / "compiled").stat().st_mode & 0o077 == 0
    assert list(temporary.iterdir()) == []


def test_the_data_of_a_run_that_is_resumed_are_looked_at_first_as_well(inputs, tmp_path, capsys):
    model, data = inputs
    assert train(model, data, tmp_path / "out") == 0
    data.write_text(json.dumps({"input_id": [1, 2]}) + "\n")
    capsys.readouterr()
    assert zosim("run", "--out", tmp_path / "out", "--resume", "--steps", 4, "--no-launch") == 2
    assert "no template for its fields" in capsys.readouterr().err
