"""The report beside measurements that somebody brings."""

from pathlib import Path

from studies.validation import made_up
from studies.validation.__main__ import main
from studies.validation.left_out import CHOSEN, held_out, machine_of, predictions, source_of
from studies.validation.made_up import Findings
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import Forecast, MeasuredRow, read_rows


def test_the_report_has_groups_and_sources_and_a_plot(tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "kind,hardware,source,dtype,m,n,k,measured\n"
        "matmul,a100-80gb-milan,one,float16,4096,4096,4096,0.0006\n"
        "matmul,a100-80gb-milan,two,float16,8192,8192,8192,0.0045\n"
        "sorting,a100-80gb-milan,two,float16,1,1,1,1\n"
    )
    main([str(rows), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| matmul | 2 | 0 |" in text
    assert "matmul, one | 1 | 0" in text
    assert "sorting" not in text
    assert (tmp_path / "out" / "errors.png").stat().st_size > 1000
    assert "matmul" in capsys.readouterr().out


def test_constants_are_judged_by_sources_that_had_no_say(tmp_path: Path, capsys) -> None:
    """One source's copies of a message reach all of an NVLink's bandwidth, the other's half of it."""
    rows = tmp_path / "rows.csv"
    lines = [
        f"p2p,dgx-h100,{source},2,{size},{size / rate}"
        for source, rate in (("one", 450e9), ("two", 225e9))
        for size in (2**30, 2**31)
    ]
    rows.write_text("kind,hardware,source,ranks,bytes,measured\n" + "\n".join(lines) + "\n")
    measured_machines = MeasuredMachines(tmp_path)
    counted = read_rows(rows)
    chosen = next(item for item in CHOSEN if item.name == "one message's part")
    by_source, by_machine = held_out(counted, measured_machines, chosen, [source_of, machine_of])
    assert [(item.left_out, item.num_rows, item.num_others) for item in by_source] == [
        ("one", 2, 2),
        ("two", 2, 2),
    ]
    # Fitted to the other alone: a half for one, all for the other, of a shipped 0.9.
    assert [item.factor for item in by_source] == [0.6, 1.1]
    assert all(item.refitted > item.shipped for item in by_source)
    assert [(item.num_others, item.factor) for item in by_machine] == [(0, chosen.neutral)]
    main([str(rows), "--left-out", "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "left_out.md").read_text()
    assert "| one message's part | one | 2 | 2 | 0.60 |" in text
    assert "p2p" in capsys.readouterr().out


def test_every_chosen_constant_changes_something_and_is_put_back() -> None:
    kernels = {
        "matmul": {"m": "300", "n": "768", "k": "768", "dtype": "float16"},
        "elementwise": {"bytes": "200000000"},
        "attention": {
            "batch": "2",
            "heads": "8",
            "seq": "512",
            "head_dim": "64",
            "causal": "true",
            "dtype": "float16",
        },
        "p2p": {"ranks": "2", "bytes": "100000000"},
        "all_reduce": {"ranks": "8", "bytes": "100000000"},
    }
    measured_machines = MeasuredMachines()
    rows = [
        MeasuredRow({"kind": kind, "hardware": "dgx-h100", **cells}, kind) for kind, cells in kernels.items()
    ]
    before = [outcome(row, measured_machines) for row in rows]
    for chosen in CHOSEN:
        concerned = [row for row in rows if chosen.concerns(row)]
        output = predictions(concerned, measured_machines, chosen)
        if concerned:
            assert any(output[1.0][row.name] != output[chosen.neutral][row.name] for row in concerned), (
                chosen.name
            )
    assert [outcome(row, measured_machines.renewed()) for row in rows] == before


def test_made_up_rows_show_what_no_measurement_is_needed_for(monkeypatch, tmp_path: Path) -> None:
    measured_machines = MeasuredMachines(tmp_path)
    requested = Findings(measured_machines)
    requested.sweep("copy", "a100-80gb-milan", "bytes", (2**20, 2**21, 2**22), direction="h2d")
    requested.sweep("matmul", "a100-80gb-milan", "m", (128, 256), dtype="float16", n=4096, k=4096)
    assert (requested.num_rows, requested.found.total()) == (5, 0)
    requested.sweep("matmul", "no-such-machine", "m", (128, 256), dtype="float16", n=4096, k=4096)
    assert +requested.found == {"matmul: no answer": 2}
    # A prediction that does not see the size, faster than any product.
    monkeypatch.setattr(made_up, "outcome", lambda row, _: Forecast(1e-9 / row.count("m"), 1.0, 2.0))
    requested.sweep("matmul", "a100-80gb-milan", "m", (128, 256), dtype="float16", n=4096, k=4096)
    assert {
        f"matmul: {what}": requested.found[f"matmul: {what}"]
        for what in ("falls", "interval", "above the peak")
    } == {
        "matmul: falls": 1,
        "matmul: interval": 2,
        "matmul: above the peak": 2,
    }
