"""Run directories from an untrusted source: no code of theirs runs, and nothing outside them is written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from executors.files import RUN_FILES, RUN_FOLDERS
from executors.models.corpus import byte_tokenizer
from executors.models.loading import load_model
from executors.ranks.launch import launch, module_command
from executors.runs.inputs import tokenizer_for
from executors.runs.runlog import read_header, write_header
from executors.runs.tokenizer_trial import growth
from executors.serving.peft import read_adapter
from executors.serving.versions import Versions
from tests.support.command import rows_of, saved_lines, saved_model, train, zosim
from topology.errors import ModelError, RunError

EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\ndef loss(logits, batch):\n    return logits.double().mean()\n"


@pytest.fixture
def inputs(tmp_path):
    saved_lines(tmp_path / "data.jsonl")
    return saved_model("opt", tmp_path, num_hidden_layers=1), tmp_path / "data.jsonl"


def begun(inputs, out, *more, steps=2):
    assert train(*inputs, out, *more, steps=steps, batch=3, lr=1e-3, residency="resident") == 0
    return out


@pytest.fixture
def untrusted(tmp_path, monkeypatch):
    """A directory with modules that tell when they are run, in which the user stands."""
    directory, marker = tmp_path / "untrusted", tmp_path / "ran"
    directory.mkdir()
    for name in ("evil_of_a_stranger", "multiprocessing", "resource", "tokenizers"):
        (directory / f"{name}.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(directory))])
    monkeypatch.chdir(directory)
    yield directory, marker
    assert not marker.exists(), "untrusted code ran"
    sys.modules.pop("evil_of_a_stranger", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "evil_of_a_stranger:loss"),
        ("reward", "evil_of_a_stranger:loss"),
        ("reward", "http://127.0.0.1:1/"),
    ],
)
def test_what_a_record_names_is_not_run(inputs, untrusted, capsys, name, value):
    out, _ = untrusted
    begun(inputs, out)
    header = read_header(out)
    header["run"][name] = value
    write_header(out, header)
    capsys.readouterr()
    assert zosim("run", "--out", ".", "--resume", "--steps", 3, "--no-launch", "--no-tensorboard") == 2
    reported = " ".join(capsys.readouterr().err.split())
    assert f"{name}={value!r}" in reported
    assert f"--{name} {value}" in reported
    assert len(rows_of(out)) == 2


def test_named_again_it_is_imported_but_not_from_where_the_user_stands(
    inputs, untrusted, tmp_path, capsys, monkeypatch
):
    out, _ = untrusted
    begun(inputs, out)
    header = read_header(out)
    header["run"]["objective"] = "evil_of_a_stranger:loss"
    write_header(out, header)
    again = ("run", "--out", ".", "--resume", "--steps", 3, "--no-launch", "--no-tensorboard")
    assert zosim(*again, "--objective", "evil_of_a_stranger:loss") == 2
    assert "not in the working directory" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "evil_of_a_stranger.py").write_text(
        "def loss(logits, batch):\n    return logits.mean()\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own")])
    assert zosim(*again, "--objective", "evil_of_a_stranger:loss") == 0
    assert len(rows_of(out)) == 3


def test_other_commands_import_nothing_that_a_record_names(inputs, untrusted, tmp_path):
    out, _ = untrusted
    begun(inputs, out)
    header = read_header(out)
    header["run"] |= {"objective": "evil_of_a_stranger:loss", "reward": "evil_of_a_stranger:loss"}
    write_header(out, header)
    assert zosim("replay", ".", "--model", inputs[0], "-o", tmp_path / "again") == 0
    zosim("compare", ".")
    zosim("evidence", ".", "-o", tmp_path / "evidence.json")


@pytest.mark.dist
@pytest.mark.usefixtures("fresh_ranks", "untrusted")
def test_ranks_begin_without_the_working_directory():
    assert launch(os.getpid, world_size=2) != os.getpid()


def test_probes_begin_without_the_working_directory(untrusted):
    words, environment = module_command("executors.ranks.launch")
    assert subprocess.run(words, env=environment, cwd=untrusted[0], check=True).returncode == 0


def test_a_tokenizer_is_tried_without_the_working_directory(untrusted, tmp_path):
    model = saved_model("opt", tmp_path)
    byte_tokenizer().save_pretrained(model)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    assert tokenizer_for(str(model), str(tmp_path / "lines.jsonl")) is not None


# -- links, pipes and other things that are no files -----------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that wrote everything that a run can write beside whole weights."""
    folder = tmp_path_factory.mktemp("finished")
    saved_lines(folder / "data.jsonl")
    model = saved_model("opt", folder, num_hidden_layers=1)
    more = ("--checkpoint-every", 1, "--digest-every", 1, "--eval-data", folder / "data.jsonl", "--keep-best")
    return model, begun((model, folder / "data.jsonl"), folder / "out", *more)


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "run")


def resume(run):
    return zosim("run", "--out", run, "--resume", "--steps", 3, "--no-launch", "--no-tensorboard")


CHECKPOINT = "checkpoints/step-00000002.safetensors"
WRITTEN = [".lock", "run.json", "steps.jsonl", "metrics.jsonl", "digests.jsonl", "plan.json", "program.json", "timeline.json",
           "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "steps-refused.jsonl",
           "best/config.json", CHECKPOINT]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
def test_no_link_in_a_run_is_followed(run, tmp_path, capsys, name, there):
    outside, path = tmp_path / "outside", run / name
    if there:
        if path.exists():
            shutil.copy(path, outside)
        else:
            outside.write_text("mine")
    before = outside.read_bytes() if there else None
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    assert resume(run) == 2
    assert f"{path} is a link" in "".join(capsys.readouterr().err.split("\n"))
    assert (outside.read_bytes() if outside.exists() else None) == before


@pytest.mark.parametrize("name", RUN_FOLDERS)
def test_no_folder_of_a_run_is_a_link(run, tmp_path, capsys, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(outside)
    assert resume(run) == 2
    assert "is a link, not a directory" in " ".join(capsys.readouterr().err.split())
    assert not list(outside.iterdir())


def test_what_has_another_name_is_not_appended_to(run, tmp_path, capsys):
    os.link(run / "steps.jsonl", tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    assert resume(run) == 2
    assert "hard links" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "outside").read_bytes() == before


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:  # a name has at most 107 bytes
        here = Path.cwd()
        os.chdir(path.parent)
        made.bind(path.name)
        os.chdir(here)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (name, make)
        for name in WRITTEN
        for make in (pipe, listening, os.mkdir)
        if "/" not in name or make is not os.mkdir
    ],
)
def test_nothing_waits_for_what_is_no_file(finished, run, tmp_path, capsys, name, make):
    path = run / name
    path.unlink(missing_ok=True)
    make(path)
    compared = path.name in (
        "run.json",
        "plan.json",
        "program.json",
        "timeline.json",
        "steps.jsonl",
        "metrics.jsonl",
    )
    commands = [
        ("run", "--out", run, "--resume", "--steps", 3, "--no-launch", "--no-tensorboard"),
        ("replay", run, "--model", finished[0], "-o", tmp_path / "again"),
        *(
            [
                ("compare", run),
                ("report", run, "-o", tmp_path / "report.html"),
                ("evidence", "make", run, "-o", tmp_path / "evidence.json"),
            ]
            if compared
            else ()
        ),
    ]
    for command in commands:
        assert zosim(*command) == 2, command[0]
        output = capsys.readouterr().err
        assert "not a regular file" in " ".join(output.split())
        assert "Traceback" not in output


def test_a_record_s_number_of_any_size_is_refused(run, capsys):
    write_header(run, read_header(run) | {"epsilon": 10**38})
    assert resume(run) == 2
    output = " ".join(capsys.readouterr().err.split())
    # pydantic before 2.11 takes no such integer for a float.
    assert "does not follow from the losses" in output or "epsilon: must be a valid number" in output


def test_a_partial_file_that_is_a_link_is_not_written_through(run, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in RUN_FILES:
        (run / f".{name}.{os.getpid()}.partial").symlink_to(outside)
    assert resume(run) == 0
    assert outside.read_text() == "mine"
    assert not list(run.glob(".*.partial"))


def test_partial_files_of_others_stay(inputs, tmp_path):
    (tmp_path / "out" / "own").mkdir(parents=True)
    other = tmp_path / "out" / "own" / ".mine.partial"
    other.write_text("mine")
    begun(inputs, tmp_path / "out")
    assert other.read_text() == "mine"


def test_the_directory_of_a_run_may_be_a_link_of_the_users(inputs, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large")
    out = begun(inputs, tmp_path / "out", "--checkpoint-every", 1)
    assert resume(out) == 0
    assert zosim("replay", out, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert len(rows_of(tmp_path / "large")) == 3


def text_model(folder):
    """Write a model with a tokenizer, and lines of text."""
    model = saved_model("opt", folder, num_hidden_layers=1, vocab_size=258)
    byte_tokenizer().save_pretrained(model)
    (folder / "lines.jsonl").write_text(json.dumps({"text": "some"}) + "\n")
    return model


def test_a_snapshot_of_the_cache_is_links_and_its_tokenizer_is_copied(tmp_path, capsys):
    model = text_model(tmp_path)
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(model.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    inputs = snapshot, tmp_path / "lines.jsonl"
    more = ("--template", "{text}", "--eval-data", inputs[1], "--keep-best", "--batch", 1)
    out = begun(inputs, tmp_path / "out", *more, "--checkpoint-every", 1, "--digest-every", 1)
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not (out / "tokenizer.json").is_symlink()
    assert {path.name for path in out.iterdir()} <= {*RUN_FILES, *RUN_FOLDERS}
    assert "warning" not in capsys.readouterr().err
    assert resume(out) == 0


def test_a_tokenizer_is_not_copied_from_elsewhere(tmp_path, capsys):
    model = text_model(tmp_path)
    (tmp_path / "secret").write_text("{}")
    (model / "added_tokens.json").symlink_to(tmp_path / "secret")
    out = begun((model, tmp_path / "lines.jsonl"), tmp_path / "out", "--template", "{text}", "--batch", 1)
    assert not (out / "added_tokens.json").exists()
    assert (out / "tokenizer.json").exists()
    assert f"leads out of its directory, to {tmp_path / 'secret'}" in "".join(
        capsys.readouterr().err.split("\n")
    )


@pytest.mark.parametrize(
    "name", ["generation_config.json", "special_tokens_map.json", "chat_template.jinja", "x.safetensors"]
)
@pytest.mark.parametrize("make", [pipe, os.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "directory", "device"])  # fmt: skip
def test_a_model_directory_holds_files(tmp_path, name, make):
    model = saved_model("opt", tmp_path)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(ModelError, match=rf"{name} is .*, not a regular file"):
        load_model(model)


@pytest.mark.parametrize("base", [None, "other"])
def test_an_adapter_in_a_model_directory_brings_no_other_base(tmp_path, base):
    model = saved_model("opt", tmp_path)
    (model / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"})
    )
    with pytest.raises(ModelError, match=r"holds an adapter \(adapter_config.json\)"):
        load_model(model)


def test_adapters_are_files(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    os.mkfifo(adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="is a named pipe"):
        read_adapter(adapter, {})
    with pytest.raises(RunError, match="is a named pipe"):
        Versions(tmp_path / "versions", None, "served").keep("one", adapter)


def _tokenizer(**parts):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


DOUBLING = normalizers.Sequence([normalizers.Replace("Q", "QQ")] * 60)
MULTIPLYING = {
    "a normalizer": ({"normalizer": DOUBLING}, "its normalizer makes texts up to 1e.18 times"),
    "a decoder": ({"decoder": decoders.Sequence([decoders.Replace("Q", "QQ")] * 60)}, "its decoder makes"),
    "bytes": ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 60)}, "its pre_tokenizer makes"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(MULTIPLYING))
def test_tokenizers_that_multiply_texts_are_refused_before_they_are_run(tmp_path, case):
    parts, reason = MULTIPLYING[case]
    model = saved_model("opt", tmp_path)
    _tokenizer(**parts).save(str(model / "tokenizer.json"))
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(ModelError, match=reason):
        tokenizer_for(str(model), str(tmp_path / "lines.jsonl"))


def test_what_a_tokenizer_may_lengthen_is_bounded_by_more_than_any_does():
    ours = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    assert growth(ours["normalizer"]) * growth(ours["pre_tokenizer"]) <= 4
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    assert growth({"type": "Sequence", "normalizers": [{"type": "NFKC"}, *5 * [spaces]]}) == 2**5
    assert growth({"type": "Replace", "pattern": {"String": "ab"}, "content": "aba"}) == 1.5
    assert growth([None]) == growth(None) == 1
