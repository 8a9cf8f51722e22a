"""Rows of published tables: what ships, and what a user's file may hold."""

import csv

import pytest

from studies.published.rows import REQUIRED, PublishedRow, RowsError, read_rows, shipped_rows, write_rows


def row(**fields):
    return PublishedRow({**dict.fromkeys(REQUIRED, ""), **fields}, "a test")


def test_all_papers_ship_and_every_row_says_what_it_is_of():
    rows = shipped_rows()
    assert {item["paper"] for item in rows} == {"ZO2", "DistZO2", "SparQ", "QuZO", "ZOinfer"}
    assert all(item["quantity"] and item["cell"] for item in rows)
    # Formulas are of every model.
    assert {item["table"] for item in rows if not item["model"]} == {"13"}
    assert shipped_rows("ZO2") == [item for item in rows if item["paper"] == "ZO2"]


def test_rows_come_back_in_order_with_columns_appended(tmp_path):
    rows = shipped_rows("DistZO2")[:5]
    write_rows(tmp_path / "out.csv", rows, [{"predicted": str(number)} for number in range(5)])
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [line["predicted"] for line in found] == list("01234")
    assert [{**line, "predicted": ""} for line in found] == [
        {**item.fields, "predicted": ""} for item in rows
    ]


def test_no_rows_still_have_a_header(tmp_path):
    write_rows(tmp_path / "out.csv", [], [])
    assert (tmp_path / "out.csv").read_text().split(",")[0] == "paper"


@pytest.mark.parametrize("text", ["fast", "-1", "0", "nan", "inf"])
def test_a_value_that_is_no_measurement_is_named(text):
    with pytest.raises(RowsError, match="value is"):
        _ = row(value=text).value


def test_an_empty_value_is_no_value_and_only_its_note_makes_it_out_of_memory():
    assert row().value is None
    assert not row().is_out_of_memory
    assert row(note="OOM").is_out_of_memory
    assert not row(note="OOM", value="3").is_out_of_memory


def test_a_count_must_be_one():
    assert row(gpus="4").count("gpus") == 4
    with pytest.raises(RowsError, match="gpus is '0'"):
        row(gpus="0").count("gpus")


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("paper,table\nZO2,1\n")
    with pytest.raises(RowsError, match="lacks columns: model"):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RowsError, match="cannot read the rows"):
        read_rows(tmp_path / "none.csv")


def test_a_setting_is_shared_by_methods_and_tables():
    rows = [item for item in shipped_rows("ZO2") if item["model"] == "OPT-13B" and item["batch_size"] == "1"]
    at_2048 = {item.setting for item in rows if item["seq_len"] == "2048" and item["precision"] == "fp32"}
    assert len(at_2048) == 1
