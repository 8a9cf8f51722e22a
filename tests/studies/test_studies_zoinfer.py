"""ZOinfer's speed-ups: predicted from counted work, from cells left out, and what the unnamed GPU must be."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from studies.published.dispatch import answers_of_all, zoinfer_answer
from studies.published.fitted_profile import load_published_profile
from studies.published.rows import PublishedRow, shipped_rows
from studies.published.zoinfer import (
    ZoinferCase,
    calibrate_zoinfer,
    fit_cells,
    loop_s,
    predicted,
    printed_cells,
    serving_s,
)

ROWS = shipped_rows("ZOinfer")
FIT = load_published_profile().zoinfer


def row_of(**columns):
    fields = {
        "paper": "ZOinfer",
        "table": "2",
        "model": "OPT-6.7B",
        "method": "vLLM vs official LoZO",
        "batch_size": "64",
    }
    return PublishedRow({**fields, "quantity": "core_step_speedup", **columns}, "rows")


def test_the_profile_that_ships_is_what_its_rows_say():
    assert FIT.num_cells == len(printed_cells(ROWS)) == 14
    assert fit_cells(printed_cells(ROWS)) == pytest.approx(FIT.values, rel=1e-3)
    assert calibrate_zoinfer(ROWS).half_width == pytest.approx(FIT.half_width, rel=1e-2)


def test_models_left_out_are_predicted_from_the_others():
    """The goals of the cells that nobody here has seen: 15 % median, 40 % at the 90th percentile."""
    known, errors = printed_cells(ROWS), []
    for model in ("opt-1.3b", "opt-2.7b"):
        values = fit_cells([case for case in known if case.model != model])
        errors += [abs(predicted(case, values)[0] / case.value - 1) for case in known if case.model == model]
    assert np.median(errors) < 0.15
    assert np.quantile(errors, 0.9) < 0.40


def test_a_value_that_is_there_does_not_change_a_prediction():
    emptied = [replace(row, fields={**row.fields, "value": ""}) for row in ROWS]
    profile = load_published_profile()
    assert answers_of_all(emptied, profile) == answers_of_all(ROWS, profile)


def test_speedups_have_the_shape_that_work_gives_them():
    """Passes over weights weigh most where batches are small and models large."""
    small, large = (zoinfer_answer(row_of(batch_size=size), FIT) for size in ("16", "128"))
    assert small.predicted > large.predicted > 1
    assert small.low < small.predicted < small.high
    assert (small.bottleneck, large.bottleneck) == ("passes over parameters", "matrix products")
    case = ZoinferCase("opt-13b", 64, "speedup")
    parts = loop_s(case, FIT.values)[0] / serving_s(case, FIT.values)[0]
    assert predicted(case, FIT.values)[0] == pytest.approx(parts)


def test_the_unnamed_gpu_passes_over_memory_as_an_a100_does():
    """Its copies reach 1.0 to 1.8 TB/s of a data sheet's 1.6 and 2.0; an H100 has 3.35, whose passes take half as long."""
    bandwidth = next(constant for constant in FIT.constants if constant.name == "bandwidth")
    assert 1.0e12 < bandwidth.low < bandwidth.high < 1.8e12


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"quantity": "runtime_speedup"}, "not predicted"),
        ({"model": "GPT-5"}, "no model is known"),
        ({"method": "LoHO"}, "neither the official loop"),
    ],
)
def test_what_cannot_be_predicted_says_why(columns, says):
    answer = zoinfer_answer(row_of(**columns), FIT)
    assert answer.predicted is None
    assert says in answer.note


def test_hours_are_those_of_twenty_thousand_steps():
    answer = zoinfer_answer(
        row_of(table="1", model="OPT-13B", method="vLLM, nu = 50", quantity="training_time", batch_size="16"),
        FIT,
    )
    seconds = serving_s(ZoinferCase("opt-13b", 16, "serving"), FIT.values)[0]
    assert answer.predicted == pytest.approx(seconds * 20_000 / 3600)
    assert math.log(answer.high / answer.low) == pytest.approx(2 * FIT.half_width)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_moments_of_perturbations_are_those_of_their_formulas(rank):
    import torch

    from studies.zoinfer.ranks import moments_reported, sampled_moments

    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (4, 2))]
    sampled = np.array([sampled_moments(matrices, rank, 40_000, seed) for seed in range(6)])
    means, errors = sampled.mean(0), sampled.std(0, ddof=1) / 6**0.5
    second, fourth = moments_reported(matrices, rank)
    square = sum(float(matrix.square().sum()) for matrix in matrices)
    # Five standard errors of six batches: Student's t with five degrees of freedom passes that once in 250.
    assert np.all(np.abs(means - (second, square, fourth)) < 5 * errors)
    assert np.all(errors < 0.05 * means)


def loss_in_the_logits_dtype(logits, labels, **_):
    """Return the loss in float64: float32, which transformers takes it in, rounds enough for 1e-3 of a difference over 2e-3."""
    import torch

    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_the_loop_goes_along_the_runtimes_perturbations():
    import copy

    import torch

    from executors.runs.adapters import attach
    from executors.runs.session import Session
    from studies.zoinfer.reference import PlainLoop
    from tests.support.tiny import batches, model_of, plan_of

    model = model_of("opt", torch.float64, num_hidden_layers=1)
    attach(model, "linears")
    loop = PlainLoop(copy.deepcopy(model), 2, 3, 1e-2, 1e-3)
    loop.model.loss_function = loss_in_the_logits_dtype
    perturbations = {"distribution": "lozo", "rank": 2, "lazy_steps": 3}
    plan = plan_of(model, dtype="float64", perturbations=perturbations, weights={"perturbation": "adapters"})
    with Session(plan, model, learning_rate=1e-2, loss_dtype="fp64") as session:
        for number, batch in enumerate(batches(5)):
            g = loop.step(number, batch, 7 * number)
            record = session.step(batch, seeds=(7 * number,))
            # Losses below 8 that each carry a thousand roundings to float64 are apart by 1e-9 once divided by 2 * 1e-3.
            assert record.projected_gradients[0] == pytest.approx(g, abs=1e-9)
            assert abs(g) > 0.1


@pytest.mark.slow
def test_a_server_answers_all_requests_beside_probes(monkeypatch, capsys):
    from studies.zoinfer import slack

    sizes = ["--width", "64", "--blocks", "1", "--batch", "4", "--parts", "2"]
    monkeypatch.setattr(sys, "argv", ["slack", *sizes, "--load", "0.05", "--seconds", "3", "--repeats", "2"])
    slack.main()
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    per_hour = {row[0]: float(row[2]) for row in rows if row and row[0] in ("none", "whole", "segments")}
    assert per_hour["none"] == 0
    assert per_hour["whole"] > 0
    assert per_hour["segments"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_mixed_batches_have_pefts_scores(monkeypatch, capsys):
    pytest.importorskip("peft")
    from studies.zoinfer import mixed

    monkeypatch.setattr(sys, "argv", ["mixed", "--shape", "1m", "--batch", "8", "--rounds", "1"])
    mixed.main()
    output = re.search(r"those of PEFT by at most (\S+)", " ".join(capsys.readouterr().out.split()))
    assert output is not None
    assert float(output[1]) < 1e-5
