"""Runs on lines of text: what they are planned for without a length, and what is counted of them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from tests.support import command
from tests.support.command import saved_model
from tests.support.text import OPTIONS, text_line, word_tokenizer, write_text
from zosim import compare
from zosim.plans import Plan
from zosim.timeline import Timeline

LENGTHS = (12, 9, 10, 11, 12, 8)


@pytest.fixture
def model(tmp_path):
    """A Llama with the positions of a large one."""
    directory = saved_model("llama", tmp_path, max_position_embeddings=131_072)
    word_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def data(tmp_path):
    return write_text(tmp_path / "text.jsonl", LENGTHS)


train = partial(command.train, steps=6, batch=2, shuffle="off")


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("live_tensors")
def test_text_is_planned_for_its_longest_line_and_its_own_tokens_are_counted(model, data, tmp_path, capsys):
    plain, named = tmp_path / "plain", tmp_path / "named"
    assert train(model, data, plain, *OPTIONS) == 0
    output = capsys.readouterr().err
    assert train(model, data, named, *OPTIONS, "--seq", 12) == 0
    assert Plan.load(plain / "plan.json") == Plan.load(named / "plan.json")
    assert Plan.load(plain / "plan.json").seq == 12
    # Steps 2 to 5 are steady: batches of lines (4, 5), (0, 1), (2, 3), (4, 5).
    tokens = [21, 21, 20, 21, 21, 20]
    mean_tokens = sum(tokens[2:]) / 4
    rows = metrics_of(plain)
    assert [row["tokens_per_s"] * row["seconds"] for row in rows] == pytest.approx(tokens)
    timeline = Timeline.load(plain / "timeline.json")
    assert timeline.tokens_per_step == mean_tokens
    finished = json.loads((plain / "run.json").read_text())["finished"]
    assert finished["tokens_per_step"] == mean_tokens
    assert finished["tokens_per_s"] == pytest.approx(mean_tokens / finished["step_time_s"])
    assert f"{20 / rows[-1]['seconds']:,.0f} tokens/s" in output
    found = [compare(out) for out in (plain, named)]
    assert (found[0].planned_tokens, found[0].measured_tokens) == (24, mean_tokens)
    assert found[0].predicted_step_s == found[1].predicted_step_s
    assert found[0].memory == found[1].memory
    device = found[0].memory[0]
    assert device.measured_bytes <= device.predicted_bytes < 1.25 * device.measured_bytes


def test_a_line_to_evaluate_on_may_be_the_longest(model, data, tmp_path):
    held_out = write_text(tmp_path / "held-out.jsonl", (8, 15))
    options = (*OPTIONS, "--eval-data", held_out)
    assert train(model, data, tmp_path / "out", *options, steps=1) == 0
    assert Plan.load(tmp_path / "out" / "plan.json").seq == 15


@pytest.mark.slow
def test_tokens_of_steps_that_an_earlier_process_ran_are_counted_again(model, data, tmp_path):
    out = tmp_path / "out"
    assert train(model, data, out, *OPTIONS, steps=2) == 0
    before = metrics_of(out)
    (out / "metrics.jsonl").unlink()
    assert train(model, data, out, *OPTIONS, "--resume", steps=3) == 0
    again = metrics_of(out)
    assert again[:2] == before
    assert again[2]["tokens_per_s"] * again[2]["seconds"] == pytest.approx(20)


@pytest.mark.parametrize("is_text", [True, False])
def test_lines_longer_than_the_model_has_positions(is_text, tmp_path, capsys):
    model = saved_model("llama", tmp_path)
    word_tokenizer().save_pretrained(model)
    lengths = (9, 40)
    data = write_text(tmp_path / "data.jsonl", lengths)
    if not is_text:
        lines = [{"input_ids": [5] * length} for length in lengths]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = OPTIONS if is_text else ()
    assert train(model, data, tmp_path / "out", *options) == 2
    output = capsys.readouterr().err
    assert "line 2 has 40 tokens, more than the 32 positions" in output
    assert "--truncate cuts long lines" in output
    assert "--seq" not in output
    assert train(model, data, tmp_path / "out", *options, "--truncate", steps=1) == 0
    assert Plan.load(tmp_path / "out" / "plan.json").seq == 32
    assert metrics_of(tmp_path / "out")[0]["tokens_per_s"] > 0


def test_a_line_longer_than_the_length_that_is_named_says_what_would_read_it(model, data, tmp_path, capsys):
    assert train(model, data, tmp_path / "out", *OPTIONS, "--seq", 11) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "line 1 has 12 tokens, more than the maximum of 11" in output
    assert "--seq 12 keeps this one" in output


def test_a_label_without_a_word_is_refused_on_whichever_line(model, tmp_path, capsys):
    lines = [text_line(6, at % 2) for at in range(2500)] + [text_line(6, 2)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(model, data, tmp_path / "out", *OPTIONS, "--seq", 8, steps=1) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "line 2501: label '2' has no label word" in output
    assert "label words are 0=terrible, 1=great" in output


@pytest.mark.crossed(quick=9, slow=2)
@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (None, OPTIONS, "the data file"),
        ("", OPTIONS, "is empty"),
        ('{"text": "a", "label": 0}\n{"text"', OPTIONS, "line 2 is not JSON"),
        ('{"words": "a", "label": 0}', OPTIONS, "line 1: template '{text} it was {label}' uses {text}"),
        ('{"text": "a", "label": 0}', ("--template", "{text"), "cannot read template '{text'"),
        ('{"text": "a", "label": 0}', ("--template", ""), "template '' has no field"),
        ('{"text": "a"}', ("--label-words", "0=terrible"), "no template places them"),
        ('{"text": "a", "label": 2}', OPTIONS, "line 1: label '2' has no label word"),
        ('{"input_ids": [1, "2"]}', (), "line 1: input_ids holds '2'"),
    ],
)
def test_data_are_refused_before_torch_is_imported(content, options, says, tmp_path):
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    program = (
        "import sys\n"
        "from zosim.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    arguments = (
        *f"run --model {tmp_path} --data {data} --steps 1 --out {tmp_path}/out".split(),
        *options,
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert says in " ".join(done.stderr.split())
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
