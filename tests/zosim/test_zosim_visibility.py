"""Whether a smoothing radius is called too small for a codec: as it was measured."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel.formats.codecs import codec_spec
from costmodel.models.configs import read_model_spec
from zosim.cli import app
from zosim.planning.visibility import about_epsilon, least_epsilon
from zosim.plans import Estimator, Mesh, Placement, Plan, Split

MEASURED = Path(__file__).parents[2] / "studies" / "sparq" / "training_epsilon.csv"


def measured_errors():
    """Return, by split point and codec, the measured ε and errors, for roundings whose numbers both signs share."""
    found = defaultdict(list)
    with MEASURED.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["noise"] != "apart":
                found[line["split_point"], line["codec"]].append(
                    (float(line["epsilon"]), float(line["relative_error"]))
                )
    return found


@pytest.mark.parametrize(("split_point", "codec"), sorted(measured_errors()))
def test_the_rule_is_what_was_measured(split_point, codec):
    epsilons, errors = map(np.array, zip(*sorted(measured_errors()[split_point, codec]), strict=True))
    least = least_epsilon(codec_spec(codec), residual=split_point == "between")
    # Errors of 16 perturbations scatter; a factor of two in ε is within that.
    assert np.all(errors[epsilons >= 2.1 * least] < 1)
    if split_point == "between":
        assert np.all(errors[epsilons <= least / 2.1] > 1)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_codec_has_a_rule_and_the_residual_stream_needs_more(bits, rounding):
    codec = codec_spec(f"q{bits}:{rounding}")
    assert 0 < least_epsilon(codec, residual=False) < least_epsilon(codec, residual=True) < 0.1


def plan(epsilon, split_point="block.5", **split):
    made = Split(split_points=(split_point,), **split)
    return Plan(
        model=read_model_spec("opt-125m", split_blocks=made.split_blocks),
        placement=Placement(topology="none", devices=("cpu0", "cpu1")),
        batch=1,
        seq=16,
        mesh=Mesh(stage=2),
        split=made,
        estimator=Estimator(epsilon=epsilon),
    )


@pytest.mark.parametrize(
    ("made", "reported"),
    [
        (plan(1e-3, residual_codec="q2"), 1),
        (plan(1e-3, residual_codec="q8"), 0),
        (plan(1e-5, residual_codec="q8"), 1),
        (plan(1e-3), 0),
        (plan(1e-3, codec="q2"), 0),
        (plan(1e-3, "block.5.mlp", codec="q2"), 0),
        (plan(1e-6, "block.5.mlp", codec="q2", residual_codec="q4"), 2),
    ],
)
def test_what_goes_through_too_few_bits_is_told(made, reported):
    assert len(list(about_epsilon(made))) == reported


def test_planning_warns():
    requested = [
        "plan",
        "--model",
        "opt-125m",
        "--hardware",
        "cpu-cluster-1gbit",
        "--batch",
        "4",
        "--seq",
        "512",
    ]
    requested += ["--mesh", "stage=2", "--split-points", "block.5", "--residual-codec", "q2", "--allow-lossy"]
    result = CliRunner().invoke(app, requested)
    assert result.exit_code == 0, result.output
    assert "codec q2" in result.stderr
    assert "below ε = 0.03" in result.stderr
