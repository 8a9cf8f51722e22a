"""Records of studies in CSV files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from studies.records import append_records, records_in, write_records


@dataclass(frozen=True)
class Trained:
    case: str
    seed: int
    loss: float


def test_records_come_back_and_are_gone_on_with(tmp_path: Path):
    path = tmp_path / "new" / "runs.csv"
    assert records_in(path, Trained) == []
    first, second = Trained("a, b", 0, 0.1), Trained('say "c"', 1, 1e-300)
    append_records(path, [first])
    append_records(path, [second])
    assert records_in(path, Trained) == [first, second]
    assert path.read_text().splitlines()[0] == "case,seed,loss"
    write_records(path, [second])
    assert records_in(path, Trained) == [second]
    append_records(path.with_stem("curves"), [{"step": 1, "loss": 0.5}])
    assert path.with_stem("curves").read_text() == "step,loss\n1,0.5\n"


def test_files_that_are_stored_are_written_as_they_are(tmp_path: Path):
    from studies.sparq import pipelining, training, training_epsilon

    for kind, stored in (
        (training.TrainedCase, training.RESULTS),
        (training_epsilon.Seen, training_epsilon.RESULTS),
        (pipelining.Idle, pipelining.RESULTS),
    ):
        write_records(tmp_path / stored.name, records_in(stored, kind))
        assert (tmp_path / stored.name).read_text() == stored.read_text()
