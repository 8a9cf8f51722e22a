"""Files of rows as users bring them: odd ones are answered row by row, and nothing leaks from what they print."""

import csv

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from studies.published.commands import predict
from studies.published.dispatch import answers_of_all
from studies.published.fitted_profile import calibrate_on, load_published_profile
from studies.published.rows import PublishedRow, read_rows, shipped_rows, write_rows
from topology.errors import ZosimError

ROWS = shipped_rows()
PROFILE = load_published_profile()
HEADER = (
    "paper,table,model,method,gpus,gpu_type,nodes,batch_size,seq_len,precision,quantity,unit,value,note,cell"
)
ZO2 = "ZO2,1,OPT-1.3B,ZO2,1,A100-80GB,1,1,2048,fp32,throughput,tokens/s,1955,,r1c6"
MEMORY = "ZO2,1,OPT-1.3B,ZO2,1,A100-80GB,1,1,2048,fp32,memory,MB,,,r1c2"


def app():
    found = typer.Typer()
    found.command()(predict)
    return found


def predicted(folder, content):
    """Return what the command writes for a file of these bytes, as a plain reader of CSV sees it."""
    path, out = folder / "cases.csv", folder / "out.csv"
    path.write_bytes(content)
    done = CliRunner().invoke(app(), [str(path), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    with out.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    "content",
    [
        f"{HEADER}\n{ZO2}\n{MEMORY}\n",
        f"{HEADER}\r\n{ZO2}\r\n{MEMORY}\r\n",
        f"\ufeff{HEADER}\n{ZO2}\n{MEMORY}",
        f"\n\n{HEADER}\n\n{ZO2}\n\n\n{MEMORY}\n\n",
        "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in (HEADER, ZO2, MEMORY)),
        "\n".join(line.replace(",", " , ") for line in (HEADER, ZO2, MEMORY)),
        f"{HEADER},mine\n{ZO2},7\n{MEMORY},8\n",
    ],
    ids=["plain", "windows", "byte order mark", "blank lines", "quoted", "spaces", "unknown column"],
)
def test_however_a_file_is_written_its_rows_are_answered_alike(content, tmp_path):
    found = predicted(tmp_path, content.encode())
    assert [line["cell"].strip() for line in found] == ["r1c6", "r1c2"]
    numbers = [float(line["predicted"]) for line in found]
    assert numbers == [pytest.approx(1955, rel=0.1), pytest.approx(5098, rel=0.2)]
    assert not found[0]["prediction_note"]


def test_columns_that_say_nothing_of_the_setting_may_be_left_out(tmp_path):
    names = HEADER.split(",")
    kept = [place for place, name in enumerate(names) if name not in ("value", "note", "cell", "nodes")]
    lines = [",".join(line.split(",")[place] for place in kept) for line in (HEADER, ZO2)]
    (line,) = predicted(tmp_path, "\n".join(lines).encode())
    assert line["predicted"]


def test_lines_with_too_few_or_too_many_cells_keep_their_place(tmp_path):
    found = predicted(tmp_path, f"{HEADER}\n{ZO2},more,still\nZO2,1\n{',' * 14}\n{ZO2}\n".encode())
    assert [bool(line["predicted"]) for line in found] == [True, False, False, True]
    assert found[0]["surplus"] == "more,still"
    assert all(line["prediction_note"] for line in found[1:3])


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("value", ["", "-", "OOM", "oom", "n/a", "3.1.4", "-5", "1e999"])
def test_whatever_stands_in_value_the_row_is_predicted_alike(value, tmp_path):
    (line,) = predicted(tmp_path, f"{HEADER}\n{ZO2.replace('1955', value)}\n".encode())
    assert float(line["predicted"]) == pytest.approx(1955, rel=0.1)


def test_a_cell_that_does_not_fit_says_so_whatever_is_printed(tmp_path):
    odd = ZO2.replace("OPT-1.3B,ZO2", "OPT-66B,MeZO").replace("1955", "-")
    (line,) = predicted(tmp_path, f"{HEADER}\n{odd}\n".encode())
    assert not line["predicted"]
    assert line["prediction_note"].startswith("out of memory")


def test_a_dash_or_oom_prints_no_number():
    assert [PublishedRow({"value": text}).value for text in ("-", "OOM", "\N{EM DASH}", "N/A")] == [None] * 4
    assert PublishedRow({"value": "OOM"}).is_out_of_memory
    assert not PublishedRow({"value": "-"}).is_out_of_memory


@pytest.mark.slow
def test_what_a_table_prints_never_leaks_into_its_prediction():
    sample = [row for index, row in enumerate(ROWS) if index % 47 == 0]
    emptied = [PublishedRow({**row.fields, "value": ""}, row.where) for row in sample]
    changed = [PublishedRow({**row.fields, "value": "1"}, row.where) for row in sample]
    printed = answers_of_all(sample, PROFILE)
    assert printed == answers_of_all(emptied, PROFILE) == answers_of_all(changed, PROFILE)


def test_the_profile_that_ships_has_a_part_of_every_paper():
    kinds = {(fit.paper, fit.domain) for fit in PROFILE.fits}
    assert kinds == {(paper, domain) for paper in ("ZO2", "DistZO2") for domain in ("speed", "memory")}
    assert PROFILE.sparq is not None
    assert PROFILE.sparq.volumes is not None
    assert PROFILE.sparq.peaks is not None


TEXTS = st.sampled_from(
    ["", "x", "-", "0", "1", "2", "3", "4", "7", "1.5", "1e9", "OPT-13B", "Qwen3-8B", "MeZO", "ZO2(compress=fp8)", "DistZO2(2D)",
     "fp16", "bf16", "amp-bf16", "H20-96GB", "throughput", "memory", "upload_rate", "comm_volume", "DistZO2", "SparQ", "\N{MIDDLE DOT}"]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    index=st.integers(0, len(ROWS) - 1),
    changes=st.dictionaries(st.sampled_from(list(ROWS[0].fields)), TEXTS, max_size=3),
)
@example(index=409, changes={})  # a peak that is printed as 1 GiB
@example(index=241, changes={"gpus": "x"})  # a row of QuZO that says nothing of its GPUs
def test_every_row_is_predicted_or_left_empty_with_the_reason(index, changes):
    (printed,) = answers_of_all([PublishedRow({**ROWS[index].fields, **changes}, "a test")], PROFILE)
    if printed.predicted is None:
        assert printed.note
    else:
        assert 0 < printed.low <= printed.predicted <= printed.high


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("paper", ["ZO2", "DistZO2", "SparQ"])
def test_one_row_is_enough_to_calibrate_on(paper):
    row = next(
        row for row in ROWS if row["paper"] == paper and row["quantity"] in ("throughput", "comm_volume")
    )
    other = PublishedRow({**row.fields, "model": "a model of nobody's", "value": "3"}, "a test")
    found = calibrate_on([row, other])
    (printed,) = answers_of_all([row], found)
    assert printed.low <= row.value <= printed.high or printed.predicted == pytest.approx(row.value, rel=0.1)


@pytest.mark.slow
def test_a_row_that_cannot_be_right_is_still_a_row_to_calibrate_on():
    row = next(row for row in ROWS if row.place == "DistZO2 Table 4, r5c1")
    (printed,) = answers_of_all([row], calibrate_on([row]))
    assert printed.predicted is not None


@pytest.mark.parametrize("value", ["fast", "-3"])
def test_a_number_that_is_none_is_named_when_calibrating(value):
    with pytest.raises(ZosimError, match="value is"):
        calibrate_on([PublishedRow({**ROWS[0].fields, "value": value}, "a test, line 2")])


def test_rows_written_and_read_again_are_the_same(tmp_path):
    write_rows(tmp_path / "rows.csv", ROWS[:40], [{} for _ in range(40)])
    assert [dict(row.fields) for row in read_rows(tmp_path / "rows.csv")] == [
        dict(row.fields) for row in ROWS[:40]
    ]
