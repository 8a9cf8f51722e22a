"""The report beside measurements that somebody brings."""

from pathlib import Path

from studies.validation.__main__ import main


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
