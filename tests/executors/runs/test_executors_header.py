"""Headers of runs that an earlier version wrote are read in the words of this one."""

from __future__ import annotations

from executors.runs.runlog import RunSection, upgrade


def test_version_2_called_the_learning_rate_a_schedule() -> None:
    rate = {"kind": "linear", "learning_rate": 1e-3, "num_steps": 4, "warmup_steps": 1}
    run = {"schedule": rate, "digest_every": 100, "checkpoint_every": 0, "model": "base"}
    header = {"version": 2, "seed": 3, "run": run}
    upgraded = upgrade(header)
    assert (upgraded["version"], upgraded["seed"]) == (3, 3)
    now = {"schedule": "linear", "learning_rate": 1e-3, "num_steps": 4, "warmup_steps": 1}
    assert RunSection.model_validate(upgraded["run"]).learning_rate.model_dump() == now
    assert upgrade(upgraded) == upgraded
    assert upgrade({"version": 2, "seed": 3}) == {"version": 3, "seed": 3}
    assert header["run"] is run
    assert "schedule" in run


def test_an_identity_gives_the_digest_of_the_data_alone() -> None:
    run = {"model": "base", "identity": {"data_sha256": "ab", "num_queries": 3}}
    assert upgrade({"version": 3, "run": run})["run"] == {"model": "base", "data_sha256": "ab"}


def test_a_header_is_read_in_the_names_of_quantized_weights() -> None:
    finished = {"moved_codes": {"num": 4, "unmoved": 3, "saturated": 0}}
    header = upgrade({"version": 3, "run": {"save_as": "zosim-codes"}, "finished": finished})
    assert header["run"]["save_as"] == "zosim"
    assert header["finished"] == {"quantized_updates": {"num": 4, "unchanged": 3, "saturated": 0}}
