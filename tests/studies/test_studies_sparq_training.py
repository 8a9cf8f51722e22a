"""Training with a codec at a split point: what is evaluated is what is trained, and the committed runs say what the page says."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from executors.models.model import SegmentedModel
from executors.models.pretrain import Recipe, build_model
from executors.runs.session import Session
from studies.records import records_in
from studies.sparq import pipelining
from studies.sparq.codec_times import LINKS, over
from studies.sparq.training import CASES, RESULTS, CodecCase, Through, TrainedCase, plan_of, summary
from studies.sparq.training_epsilon import ENCODINGS, EPSILONS, gradients, read_seen
from studies.sparq.training_time import CASES as TIMED_CASES

RECIPE = Recipe(num_blocks=2, hidden_size=32, max_positions=128)


def batch(seed=0):
    tokens = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


@pytest.mark.parametrize(
    "case",
    [
        CodecCase("inside", "block.1.mlp", "q2:affine-zero", "q3"),
        CodecCase("between", "block.0", "none", "q2"),
        CodecCase("plain", "block.1.mlp"),
    ],
)
def test_what_is_evaluated_is_what_a_session_forwards(case):
    model, given = build_model(RECIPE), batch()
    with torch.no_grad():
        logits = Through(model, case)(given["input_ids"], given["attention_mask"]).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
    epsilon = 1e-9  # below what a weight of float32 sees: both signs are the weights themselves
    plan = plan_of(model, split=case.split(), estimator={"epsilon": epsilon}).model_copy(
        update={"batch": 2, "seq": 12}
    )
    with Session(plan, model, learning_rate=0.0) as session:
        record = session.step(given)
    assert record.loss == pytest.approx(float(wanted), rel=1e-5)


def test_a_codec_of_eight_bits_leaves_a_gradient_where_it_is_and_one_bit_does_not():
    model = build_model(RECIPE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fine, coarse = ("between", "q8", "nearest"), ("between", "q1", "nearest")
    with torch.no_grad():
        plain, encoded = gradients(SegmentedModel(model), batch(), 1e-1, 3, (fine, coarse))
    assert abs(encoded[fine] - plain) < 0.2 * abs(plain)
    assert abs(encoded[coarse] - plain) > abs(encoded[fine] - plain)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_cases_and_codings_are_named_once():
    for names in ([case.name for case in CASES], ENCODINGS):
        assert len(set(names)) == len(names)
    assert len({(case.name, encoding) for case, encoding in TIMED_CASES}) == len(TIMED_CASES)


def test_the_committed_runs_are_known_and_say_what_the_docs_say():
    rows = records_in(RESULTS, TrainedCase)
    assert {row.case for row in rows} <= {case.name for case in CASES}
    assert len({row.key for row in rows}) == len(rows)
    loss = {case.name: [r.loss for r in rows if r.case == case.name] for case in CASES}
    size = {case.name: [r.bytes_after for r in rows if r.case == case.name] for case in CASES}
    plain = fmean(loss["none"])
    assert all(fmean(loss[f"inside {bits}"]) < plain + 0.1 for bits in (1, 2, 4, 8))
    assert fmean(loss["between 8"]) < plain + 0.1
    assert fmean(loss["between 2"]) > plain + 0.25
    # Inside a block the residual stream, sent in full, is most of what crosses.
    assert fmean(size["inside 1"]) > 0.9 * fmean(size["inside 4"]) > fmean(size["between 8"])


def test_every_encoding_was_measured_at_every_radius():
    seen = read_seen()
    assert {((row.split_point, row.codec, row.noise), row.epsilon) for row in seen} == {
        (encoding, epsilon) for encoding in ENCODINGS for epsilon in EPSILONS
    }


def test_the_page_has_the_rows_of_the_files():
    page = Path("docs/benchmarks/codecs.md").read_text(encoding="utf-8").splitlines()
    for line in (
        summary(records_in(RESULTS, TrainedCase)).to_markdown()
        + "\n"
        + pipelining.table(records_in(pipelining.RESULTS, pipelining.Idle)).to_markdown()
    ).split("\n"):
        assert line in page


def test_encodings_over_links_are_those_of_the_page():
    chosen = [over(bandwidth)[0].spec.encoding for bandwidth in LINKS]
    assert chosen == ["entropy", "run-length", "run-length", "index", "dense", "dense"]
    for bandwidth in LINKS:
        best, plain = over(bandwidth)
        # On fast links plain numbers are faster than any codec.
        assert (best.seconds < plain.seconds) == (bandwidth < 1e9)
