from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from costmodel.models.configs import read_model_spec
from studies.published.audit import audit, set_apart
from studies.published.dispatch import answers_of_all, quzo_answer
from studies.published.fitted_profile import load_published_profile
from studies.published.quzo import (
    CONSTANTS,
    GIBIBYTE,
    calibrate_quzo,
    fit_peaks,
    formula,
    peak_gib,
    printed_peaks,
    quzo_case,
    step_s,
)
from studies.published.rows import PublishedRow, shipped_rows
from studies.published.sparq import NotPredicted
from studies.quzo.__main__ import main

ROWS = shipped_rows("QuZO")
FIT = load_published_profile().quzo


def row_of(**columns: str) -> PublishedRow:
    fields = {
        "paper": "QuZO",
        "table": "14",
        "model": "OPT 1.3B",
        "method": "QuZO",
        "precision": "8-bit",
        "quantity": "memory",
    }
    return PublishedRow({**fields, "dataset": "DROP", **columns}, "rows")


def test_the_profile_that_ships_is_what_its_rows_say():
    known = printed_peaks(ROWS)
    assert FIT.num_cells == len(known) == 25
    values = {constant.name: constant.value for constant in FIT.constants}
    assert fit_peaks(known) == pytest.approx(values, rel=1e-4)


@pytest.mark.slow
def test_the_interval_that_ships_is_that_of_peaks_left_out():
    assert calibrate_quzo(ROWS).half_width == pytest.approx(FIT.half_width, rel=1e-3)


def test_a_value_that_is_there_does_not_change_a_prediction():
    emptied = [replace(row, fields={**row.fields, "value": ""}) for row in ROWS]
    assert answers_of_all(emptied, load_published_profile()) == answers_of_all(ROWS, load_published_profile())


def test_parts_of_a_peak_by_hand():
    """The difference of two peaks is what the tokens between them take."""
    values = {constant.name: constant.prior for constant in CONSTANTS}
    case = quzo_case(row_of(dataset="SST-2"))
    spec = read_model_spec("opt-1.3b")
    more, _ = peak_gib(case, {**values, "tokens|SST-2": 3000.0})
    less, _ = peak_gib(case, {**values, "tokens|SST-2": 2000.0})
    cache, logits = 2 * 24 * 2048 * 2, 2 * 2 * 50272
    per_token = (more - less) * GIBIBYTE / 1000
    assert cache + logits < per_token < cache + logits + 60_000  # and one block's temporaries
    weights = less * GIBIBYTE - 2000 * per_token - 0.5 * GIBIBYTE
    assert weights == pytest.approx(spec.num_parameters, rel=1e-6)


def test_qlora_keeps_embeddings_in_16_bits():
    values = {constant.name: constant.prior for constant in CONSTANTS} | {
        "tokens|SST-2": 1e-9,
        "context": 1e-9,
    }
    spec = read_model_spec("llama-2-7b")
    edges = sum(group.num_parameters for group in spec.param_groups if not group.name.startswith("block."))
    gib, largest = peak_gib(
        quzo_case(row_of(model="LLaMa-2 7B", method="QLoRA", precision="4-bit", dataset="SST-2")), values
    )
    assert largest == "weights"
    assert gib * GIBIBYTE == pytest.approx((spec.num_parameters - edges) / 2 + 2 * edges, rel=1e-6)


def test_peaks_left_out_one_by_one_are_within_the_goals():
    apart = set_apart(audit(ROWS))
    known = printed_peaks([row for row in ROWS if row.place not in apart])
    errors = []
    for case in known[::6]:
        values = fit_peaks([other for other in known if other is not case])
        errors.append(abs(peak_gib(case, values)[0] / case.value - 1))
    assert np.median(errors) < 0.2
    assert max(errors) < 0.6


def test_table_13_is_what_the_bits_say():
    assert formula(row_of(quantity="weight_memory_formula", method="QuZO(4-bit)")) == "|w|/8"
    assert formula(row_of(quantity="dynamic_memory_formula", method="MeZO", precision="")) == "max_l |w|"
    assert formula(row_of(quantity="dynamic_memory_formula", method="FO(8-bit)")) == "sum_l max(|a|/4, |w|/4)"


def test_seconds_of_a_first_order_step_are_products_and_an_exchange():
    case = quzo_case(
        row_of(model="OPT-30B", method="FO", precision="fp32", gpus="8", quantity="time_per_step")
    )
    values = {"step_tokens": 1000.0, "exchange_rate": 1e10, "four_bit_time": 0.5}
    parameters = read_model_spec("opt-30b").num_parameters
    assert step_s(case, values)[0] == pytest.approx(
        3 * 2 * parameters * 1000 / 16e12 + 3 * 7 / 8 * 4 * parameters / 1e10
    )
    assert step_s(replace(case, bits=4), values)[0] == pytest.approx(step_s(case, values)[0] / 2)


def test_what_cannot_fit_is_said_not_to():
    answer = quzo_answer(row_of(model="LLaMa-2 7B", method="LLM.int8()"), FIT)
    assert answer.predicted is None
    assert answer.note.startswith("out of memory")
    likely = quzo_answer(row_of(model="LLaMa-2 7B", method="QLoRA", precision="4-bit"), FIT)
    assert likely.predicted < likely.high < 39.4
    assert "of a run that fits" in likely.note


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"model": "OPT 9B"}, "no model is known"),
        ({"method": "GaLore"}, "is not one of QuZO's tables'"),
        ({"precision": "2-bit"}, "is none of 4-bit"),
        ({"dataset": "TREC"}, "nothing is known of the batches"),
        ({"quantity": "score"}, "is not predicted, only memory"),
    ],
)
def test_a_row_about_something_else_gets_a_reason(columns, words):
    answer = quzo_answer(row_of(**columns), FIT)
    assert answer.predicted is None
    assert words in answer.note


def test_a_model_is_known_by_its_printed_names():
    for printed in ("LLaMa-2 7B", "LLaMA2-7B", "llama-2-7b"):
        assert quzo_case(row_of(model=printed)).model == "llama-2-7b"
    with pytest.raises(NotPredicted):
        quzo_case(row_of(model=""))


def test_the_audit_finds_what_is_planted_and_what_is_printed():
    findings = [finding for finding in audit(ROWS) if finding.places[0].startswith("QuZO")]
    assert {
        "QuZO Table 4, r1c1",
        "QuZO Table 15, r1c2",
        "QuZO Table 15, r1c3",
        "QuZO Table 15, r1c4",
    } == set_apart(findings)
    assert sum(finding.rule == "a half that is no measurement" for finding in findings) == 2
    least = read_model_spec("llama-2-7b").num_parameters / 2 / GIBIBYTE
    planted = row_of(
        table="4",
        model="LLaMa-2 7B",
        precision="4-bit",
        value=f"{0.9 * least:.2f}",
        cell="r9c9",
        quantity="memory_total",
    )
    assert set_apart(audit([planted])) == {"QuZO Table 4, r9c9"}
    sound = replace(planted, fields={**planted.fields, "value": f"{1.1 * least:.2f}"})
    assert not audit([sound])


@pytest.mark.slow
def test_the_report_has_every_cell(tmp_path):
    main(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| r")]
    assert len(lines) == len(ROWS)
    assert sum(line.endswith("| within |") for line in lines) > 20
    assert math.isfinite(FIT.half_width)
