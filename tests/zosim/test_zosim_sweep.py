"""Sweeps: configurations read and checked, results kept once, equal for any number of shards and any executor."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future

import pytest
from typer.testing import CliRunner

import zosim
from tests.kills.sweeps import killed, product, table_of
from topology.errors import PlanError, RunError
from zosim.applications.sweep.results import Results
from zosim.applications.validation.rows import RowsError
from zosim.cli import app

GRID = "model: opt-125m\nhardware: [a6000-2x, rtx4090-2x]\nbatch: [1, 2, 3, 7]\nseq: [16, 32, null]\n"


class AtOnce(Executor):
    """Evaluates in this process, as it is asked."""

    def submit(self, function, /, *arguments, **more):
        future = Future()
        future.set_result(function(*arguments, **more))
        return future


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID)
    return tmp_path / "grid.yaml"


def pass_bytes(file, **options):
    return zosim.sweep(file, **{"workers": 2, "executor": AtOnce(), "evaluate": product, **options})


def test_a_configuration_is_done_once_and_a_failing_one_is_a_row(grid):
    first = pass_bytes(grid)
    assert (first.num_total, first.num_new, first.num_failed) == (24, 24, 6)
    assert first.errors == (("ValueError", 6),)
    assert "ValueError: 7 is a multiple of 7" in [row.outcome for row in table_of(first.output)]
    assert [row.inputs["batch"] for row in first.fastest[:6]] == [3] * 6
    again = pass_bytes(grid)
    assert (again.num_new, again.num_failed, again.fastest) == (0, 6, first.fastest)


def test_shards_merged_are_the_table_of_one(grid, tmp_path):
    whole = pass_bytes(grid)
    outputs = [tmp_path / f"{number}.sqlite" for number in range(1, 9)]
    parts = [pass_bytes(grid, output=o, shard=f"{n}/8") for n, o in enumerate(outputs, start=1)]
    assert sum(part.num_total for part in parts) == whole.num_total
    merged = pass_bytes(grid, output=tmp_path / "all.sqlite", merge=outputs, table=tmp_path / "all.csv")
    assert merged.num_new == 0
    assert table_of(merged.output) == table_of(whole.output)
    header, *lines = (tmp_path / "all.csv").read_text().splitlines()
    assert header == "model,hardware,batch,seq,tokens_per_s,error"
    assert len(lines) == 24


def test_a_merge_refuses_a_clash_and_adds_nothing(grid, tmp_path):
    pass_bytes(grid, output=tmp_path / "own.sqlite", shard="1/2")
    before = table_of(tmp_path / "own.sqlite")
    pass_bytes(grid, output=tmp_path / "other.sqlite")
    with Results(tmp_path / "other.sqlite") as results:
        results._database.execute(
            "UPDATE results SET result = '{\"tokens_per_s\": 1.25}', error = NULL WHERE key = ?",
            (before[-1].key,),
        )
    with pytest.raises(RowsError, match=r"other results for the same inputs: .*1\.25"):
        pass_bytes(grid, output=tmp_path / "own.sqlite", merge=[tmp_path / "other.sqlite"])
    assert table_of(tmp_path / "own.sqlite") == before


def test_a_key_is_of_the_meaning_and_not_of_the_spelling(tmp_path):
    (tmp_path / "a.csv").write_text(
        "model,hardware,batch,num_perturbations\nopt-125m,a6000-2x,2,\nOPT-125M,a6000-2x,2.0,\n"
    )
    one = pass_bytes(tmp_path / "a.csv")
    assert one.num_total == 1
    (tmp_path / "b.yaml").write_text("{batch: 2, hardware: a6000-2x, model: facebook/opt-125m}")
    assert pass_bytes(tmp_path / "b.yaml", output=one.output).num_new == 0
    (tmp_path / "c.yaml").write_text("{batch: 2, hardware: a6000-2x, model: opt-125m, seq: 16}")
    assert pass_bytes(tmp_path / "c.yaml", output=one.output).num_new == 1


def test_wrong_rows_are_refused_together_by_row_and_field(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(
        "model,hardware,batch,bach,threads\nopt-125m,host,1,,\nopt-125m,a6000-2x,x,,\nopt-9b,a6000-2x,,,\n"
        "opt-125m,a6000-2x,,3,\nopt-125m,a6000-2x,,,0\n"
    )
    with pytest.raises(RowsError) as refusal:
        pass_bytes(file)
    for line, what in enumerate(
        ["hardware: host", "batch: --batch x", "model: ", "bach: there", "threads: '0'"]
    ):
        assert f"rows.csv, line {line + 2}: {what}" in refusal.value.message
    assert "batch" in refusal.value.hint
    assert not (tmp_path / "rows.sqlite").exists()


@pytest.mark.parametrize("text", ["", "[]", "model: [[a]]", "model: opt-125m", "- 3", "a: {b: c}"])
def test_a_grid_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(RowsError):
        pass_bytes(tmp_path / "grid.yaml")


def test_files_of_others_and_files_in_use_are_refused(grid, tmp_path):
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    for options, message in {
        ("text.sqlite", "1/1"): "holds no results",
        ("grid.yaml", "1/1"): "is the file of configurations",
    }.items():
        with pytest.raises(RowsError, match=message):
            pass_bytes(grid, output=tmp_path / options[0], shard=options[1])
    with pytest.raises(PlanError, match=r"--shard 3/2 must be"):
        pass_bytes(grid, shard="3/2")
    with Results(tmp_path / "used.sqlite"), pytest.raises(RowsError, match="another process writes"):
        pass_bytes(grid, output=tmp_path / "used.sqlite")


def test_an_executor_that_breaks_keeps_what_it_has_done(grid):
    from concurrent.futures import BrokenExecutor

    class Breaking(AtOnce):
        left = 10

        def submit(self, function, /, *arguments, **more):
            self.left -= 1
            if self.left < 0:
                raise BrokenExecutor
            return super().submit(function, *arguments, **more)

    with pytest.raises(RunError, match="the executor broke"):
        pass_bytes(grid, executor=Breaking())
    assert pass_bytes(grid).num_new == 24 - 10


def test_the_command_plans_and_reports(tmp_path, monkeypatch):
    """The processes that evaluate are left out; the slow test has them."""
    from zosim.applications.sweep import command, sweeping

    monkeypatch.setattr(command, "sweep_of", lambda *a, **k: sweeping.sweep(*a, **k, executor=AtOnce()))
    (tmp_path / "rows.csv").write_text(
        "model,hardware,batch,seq,max_device_memory\nopt-125m,a100-80gb-milan,1,16,\nopt-125m,a100-80gb-milan,1,16,1MiB\n"
    )
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "rows.csv"), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["configurations"], data["errors"]) == (2, {"DoesNotFit": 1})
    predicted = zosim.plan("opt-125m", "a100-80gb-milan", seq=16).prediction
    assert data["fastest"][0]["step_time_s"] == predicted.step_time_s
    assert data["fastest"][0]["device_bytes"] == predicted.footprints.largest.device_bytes


@pytest.mark.slow
def test_sweeps_that_are_killed_end_as_if_nobody_had(tmp_path):
    killed(tmp_path / "killed", count=2)
    (tmp_path / "whole.yaml").write_text((tmp_path / "killed" / "grid.yaml").read_text())
    whole = pass_bytes(tmp_path / "whole.yaml")
    assert table_of(tmp_path / "killed" / "grid.sqlite") == table_of(whole.output)


@pytest.mark.slow
def test_dask_is_an_executor_as_any_other(grid, tmp_path):
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    workers = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with workers as cluster, distributed.Client(cluster) as client:
        by_dask = pass_bytes(grid, output=tmp_path / "dask.sqlite", executor=client.get_executor())
    assert table_of(by_dask.output) == table_of(pass_bytes(grid).output)
