"""The prediction benchmark: its lists, its plans and its arithmetic. What it measures is no test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.scoring import Score
from executors.turns import TurnTimes
from studies.prediction.cases import (
    CHOICES,
    DEVELOPMENT_VOCABULARIES,
    PLACEMENTS,
    RANK_PLACEMENTS,
    Case,
    Shape,
    choice_cases,
    development_cases,
    held_out_cases,
    quantized_cases,
    quantized_tuning_cases,
    rank_cases,
    tuning_cases,
)
from studies.prediction.measuring import MeasuredSteps, Round
from studies.prediction.predicting import Choice, PredictedCase, case_rows
from studies.prediction.regret import ChoiceRequest, MeasuredChoice, measured, plans_for
from studies.prediction.report import Benchmark, largest_underestimate, meets_goals, summary
from topology import load_preset
from zosim.analysis.compare import ComparedLine

TINY = {family: Shape(family, 32, 2, 50, tied=family != "llama") for family in ("opt", "gpt2", "llama")}


def row(predicted_s: float, measured_s: float, **fields) -> PredictedCase:
    values = {
        "name": "opt 1x32 fp32 1 thread, delayed",
        "placement": "delayed",
        "predicted_s": predicted_s,
        "low_s": 0.9 * predicted_s,
        "high_s": 1.1 * predicted_s,
        "measured_s": measured_s,
        "foreign_cores": 0.0,
        "predicted_bytes": 100,
        "measured_bytes": 100,
        "limiter": "sample",
        "lines": (ComparedLine("sample", predicted_s, measured_s, predicted_s - measured_s),),
        "slowed_s": predicted_s,
        "slowdown_before": 1.0,
        "slowdown_after": 1.0,
    }
    return PredictedCase(**(values | fields))


def test_the_held_out_list_is_fixed_by_its_seed_and_apart_from_the_tuning_list():
    cases = held_out_cases(48)
    assert cases == held_out_cases(48)
    assert held_out_cases(48, seed=1) != cases
    assert len(set(cases)) == len(cases) == 48
    assert not set(cases) & set(tuning_cases())
    assert cases[:7] == held_out_cases(7)
    counts = [sum(case.placement == name for case in cases) for name in PLACEMENTS]
    assert set(counts) == {3}


def test_lists_of_qvalues_have_every_format_and_nothing_in_common():
    from studies.prediction.cases import FORMATS, PERTURBATIONS, PLACES

    unseen, seen = quantized_cases(), quantized_tuning_cases()
    assert unseen == quantized_cases()
    for cases in (unseen, seen):
        for part, names in enumerate((FORMATS, PERTURBATIONS, PLACES)):
            assert {case.placement.split("; ")[part] for case in cases} == set(names)
    assert not {case.shape for case in unseen} & {case.shape for case in seen}


@pytest.mark.crossed(quick=6)
@pytest.mark.parametrize(
    "case", [*quantized_cases(), *quantized_tuning_cases()], ids=lambda case: case.placement
)
def test_every_placement_of_qvalues_is_a_valid_plan(case):
    from studies.prediction.setting import model_of, plan_of
    from zosim.lowering import lower_all
    from zosim.program.validate_set import validate_set

    tiny = replace(case, shape=Shape(case.shape.family, 64, 2, 50), batch=2, seq=8)
    validate_set(lower_all(plan_of(tiny, model_of(tiny.shape), topology="host", device="cpu0")))


@pytest.mark.crossed(quick=6)
@pytest.mark.parametrize("placement", [*PLACEMENTS, *RANK_PLACEMENTS])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_every_placement_is_a_valid_plan(family, placement):
    from studies.prediction.setting import model_of, plan_of
    from zosim.lowering import lower_all
    from zosim.program.validate_set import validate_set

    case = Case(TINY[family], 2, 8, "float32", 1, placement)
    plan = plan_of(case, model_of(case.shape), topology="host", device="cpu0")
    assert plan.placement.world_size == case.num_ranks
    validate_set(lower_all(plan))
    assert plan.tokens_per_step == 16
    assert plan.is_transfer_lossy == ("lossy" in placement)


def test_models_are_the_same_every_time():
    import torch

    from studies.prediction.setting import batch_of, model_of

    one, two = (model_of(TINY["gpt2"]).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    batch = batch_of(Case(TINY["opt"], 2, 8, "float32", 1, "delayed"))
    assert batch["input_ids"].shape == (2, 8)
    assert int(batch["input_ids"].max()) < 50


def test_measured_steps_are_those_of_the_quieter_rounds():
    rounds = [Round((5.0, 5.0), 0.9), Round((1.0, 2.0), 0.0), Round((3.0, 2.0), 0.1), Round((9.0,), 1.0)]
    measured = MeasuredSteps(tuning_cases()[0], None, None, 0, 0, 0, rounds)  # type: ignore[arg-type]
    assert measured.step_s == 2.0
    assert measured.num_samples == 4
    assert measured.foreign_cores == pytest.approx(0.05)


def test_the_pace_of_a_case_is_that_around_its_quieter_rounds():
    rounds = [Round((1.0,), 0.0, 1.0, 2.0), Round((1.0,), 0.1, 3.0, 4.0), Round((1.0,), 0.9, 9.0, 9.0)]
    measured = MeasuredSteps(tuning_cases()[0], None, None, 0, 0, 0, rounds)  # type: ignore[arg-type]
    assert measured.references_s == (2.0, 3.0)


def test_a_case_is_disturbed_if_the_pace_is_another_after_it():
    assert not row(1.0, 1.0, slowdown_before=1.2, slowdown_after=1.3).is_disturbed
    assert row(1.0, 1.0, slowdown_before=1.0, slowdown_after=1.2).is_disturbed
    assert row(1.0, 1.0, slowdown_before=1.4, slowdown_after=1.2).is_disturbed


def test_errors_at_the_pace_before_a_case_stand_beside_those_of_the_calibration():
    scores = summary([row(1.0, 1.25, slowed_s=1.2, slowdown_before=1.3) for _ in range(3)])
    assert scores["step"]["median"] == pytest.approx(0.2)
    assert (scores["paced"]["median"], scores["paced"]["signed"]) == pytest.approx((0.04, -0.04))


def test_a_summary_counts_errors_by_their_size():
    rows = [row(1.1, 1.0), row(0.7, 1.0), row(1.0, 1.0), row(1.05, 1.0, predicted_bytes=98)]
    scores = summary(rows)
    assert scores["step"]["median"] == pytest.approx(0.075)
    assert scores["step"]["signed"] == pytest.approx(0.025)
    assert scores["step"]["coverage"] == 0.75
    assert scores["step"]["width"] == pytest.approx(1.1 / 0.9)
    assert largest_underestimate(Score.of(item.memory for item in rows)) == pytest.approx(0.02)
    assert not meets_goals(rows)
    assert meets_goals([row(1.1, 1.0), row(1.0, 1.0)])
    assert not meets_goals([row(2.0, 1.0)])
    assert not meets_goals([row(1.0, 1.0, predicted_bytes=99)])


def test_benchmarks_that_are_stored_can_be_read():
    for path in sorted(Path("docs/benchmarks").glob("*-prediction*.json")):
        stored = json.loads(path.read_text())["held_out"]
        rows = case_rows(stored["rows"])
        scores = summary(rows)
        output = stored["summary"]
        assert scores["step"]["rows"] == len(stored["rows"]) == output["num_cases"]
        assert scores["step"]["median"] == pytest.approx(output["step_median"], rel=1e-12)
        assert scores["step"]["p90"] == pytest.approx(output["step_p90"], rel=1e-12)
        assert scores["memory"]["p90"] == pytest.approx(output["memory_p90"], rel=1e-12)
        assert scores["step"]["coverage"] == pytest.approx(output["covered"])
        assert scores["paced"]["signed"] == pytest.approx(output["paced_bias"], rel=1e-12)


def test_the_regret_is_that_of_the_predicted_choice():
    slow, fast = row(1.0, 1.2, name="a"), row(1.1, 1.0, name="b")
    choice = Choice((slow, fast))
    assert (choice.chosen, choice.best) == (slow, fast)
    assert choice.regret == pytest.approx(1.2)
    assert Choice((fast,)).regret == 1.0
    assert Choice.with_and_without_limit((fast,)) == ()


def test_a_limit_is_kept_as_predicted_and_judged_as_measured():
    large = row(1.0, 1.0, name="large", predicted_bytes=300, measured_bytes=300)
    small = row(2.0, 2.0, name="small", predicted_bytes=100, measured_bytes=90)
    middle = row(1.5, 1.2, name="middle", predicted_bytes=310, measured_bytes=95)
    free, limited = Choice.with_and_without_limit((large, small, middle))
    assert free.chosen is free.best is large
    assert limited.limit_bytes == 300
    _, tight = Choice.with_and_without_limit((large, small))
    assert tight.limit_bytes == 100
    assert tight.chosen is tight.best is small
    # What was not predicted to fit, and did, counts against the choice.
    judged = Choice((large, small, middle), 100)
    assert (judged.chosen, judged.best) == (small, middle)
    assert judged.regret == pytest.approx(2.0 / 1.2)
    assert judged.keeps_limit
    assert not Choice((row(1.0, 1.0, predicted_bytes=90, measured_bytes=110),), 100).keeps_limit


def test_the_development_list_has_nothing_of_the_held_out_one():
    cases = development_cases(40, 1)
    assert cases == development_cases(40, 1)
    assert not {replace(case, num_threads=2) for case in cases} & {
        replace(case, num_threads=2) for case in held_out_cases(48)
    }
    assert not set(DEVELOPMENT_VOCABULARIES) & {case.shape.vocab for case in held_out_cases(48)}


def test_every_choice_is_of_one_configuration_and_takes_two_cores():
    for cases in choice_cases(3):
        assert len({(case.shape, case.batch, case.seq, case.dtype) for case in cases}) == 1
        assert {case.num_ranks * case.num_threads for case in cases} == {2}
        assert [case.placement for case in cases] == list(CHOICES)
    ranks = rank_cases(8)
    assert {case.placement for case in ranks} == set(RANK_PLACEMENTS)
    assert {case.num_threads for case in ranks} == {1}
    assert all(case.batch % 2 == 0 for case in ranks)
    assert ranks == rank_cases(8)


def test_a_report_holds_every_case_and_says_what_was_missed():
    profile = datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=2)
    words = {"name": "opt 2x64 bf16 2 threads, sweep", "placement": "sweep"}
    bad = row(3.0, 1.0, foreign_cores=0.5, slowdown_before=1.5, **words)
    benchmark = Benchmark(
        "2026-01-01",
        "a command",
        "abc",
        "a machine",
        held_out=(bad,),
        tuning=(row(1.0, 1.0),),
        ranks=(row(1.0, 1.1, name="ranks", placement="pertp"),),
        choices=Choice.with_and_without_limit((row(1.0, 1.3), row(1.2, 1.0, predicted_bytes=90))),
        profiles={2: profile},
        fits={},
    )
    text = benchmark.to_markdown()
    assert "**missed**" in text
    assert "In 1 of the 1 held-out cases" in text
    assert bad.name in text
    assert "+200.0%" in text
    assert "worst 1.300" in text
    assert "2 of 2 choices did" in text or "1 of 2 choices did" in text
    assert "| to choose from | 2 | 0 |" in text
    assert "| several ranks | 1 | 0 |" in text
    assert "| undisturbed | 3 | 0 |" in text  # of four: the bad one's pace changed
    assert "unknown while calibrating, 1.00 in the median" in text
    data = json.loads(benchmark.to_json())
    assert data["held_out"]["rows"][0]["measured_s"] == 1.0
    assert data["profiles"]["2"]["num_threads"] == 2


def request_of_two_ranks() -> ChoiceRequest:
    return ChoiceRequest(Case(TINY["opt"], 2, 16, "float32", 1, ""), 2, "mezo", 1)


def test_regret_is_of_rounds_that_all_plans_share():
    """The machine is twice as slow in the second round, and a session of the chosen plan is slow by itself in the third."""
    times = {
        "chosen": TurnTimes((1.1, 2.2, 1.1)),
        "chosen, again": TurnTimes((1.1, 2.2, 1.7)),
        "next 1: faster": TurnTimes((1.0, 2.0, 1.0)),
        "random 1: slower": TurnTimes((3.0, 6.0, 3.0)),
    }
    choice = MeasuredChoice(request_of_two_ranks(), "mezo", times)
    assert choice.best == "next 1: faster"
    assert (choice.regret, choice.noise) == (pytest.approx(1.1), 1.0)
    del times["next 1: faster"]
    assert (choice.best, choice.regret) == ("chosen", 1.0)


@pytest.mark.slow
@pytest.mark.dist
def test_plans_to_choose_from_run_in_turns_on_both_ranks():
    item, topology = request_of_two_ranks(), load_preset("cpu-laptop")
    plans = plans_for(item.request(topology, datasheet_profile(topology, "cpu0")), 1, 1, seed=0)
    assert [plan.placement.world_size for plan in plans.values()] == [2] * 4
    assert len({json.dumps(plan.identity(), sort_keys=True) for plan in plans.values()}) == 1
    times = measured(item, plans, num_rounds=2)
    assert {name: len(taken.seconds) for name, taken in times.items()} == dict.fromkeys(plans, 2)
