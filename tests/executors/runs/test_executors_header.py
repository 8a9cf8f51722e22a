"""Headers of runs that an earlier version wrote are read in the words of this one."""

from __future__ import annotations

import pytest

from executors.runs.runlog import RunSection, upgrade
from executors.runs.settings import refuse_other_identity
from topology.errors import RunError


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


def test_an_identity_is_read_in_the_words_of_before() -> None:
    identity = {
        "direction": "lozo",
        "direction_rank": 2,
        "num_queries": 3,
        "update_rounding": "query",
        "traversal": "sweep",
        "kernel": "dequantise",
    }
    assert upgrade({"run": {"identity": identity}})["run"]["identity"] == {
        "distribution": "lozo",
        "perturbation_rank": 2,
        "num_perturbations": 3,
        "update_rounding": "perturbation",
        "traversal": "full",
        "kernel": "dequantize",
    }


def test_a_recorded_identity_may_name_settings_that_were_removed() -> None:
    refuse_other_identity(
        {"batch": 2, "coded_parts": "blocks", "full_range": False, "outliers": 0.0, "adapter_span": 2.0},
        {"batch": 2},
        "runs/of-before",
    )


def test_a_header_is_read_in_the_names_of_quantized_weights() -> None:
    finished = {"moved_codes": {"num": 4, "unmoved": 3, "saturated": 0}}
    header = upgrade({"version": 3, "run": {"save_as": "zosim-codes"}, "finished": finished})
    assert header["run"]["save_as"] == "zosim"
    assert header["finished"] == {"quantized_updates": {"num": 4, "unchanged": 3, "saturated": 0}}


def test_a_recorded_identity_is_read_in_the_present_names() -> None:
    for recorded in ({"num_slots": 2}, {"residency": {"num_slots": 2}}):
        identity = upgrade({"version": 3, "run": {"identity": recorded}})["run"]["identity"]
        refuse_other_identity(identity, {"num_staging_buffers": 2}, "runs/of-before")
        with pytest.raises(RunError, match="num_staging_buffers=2, but this command says 3"):
            refuse_other_identity(identity, {"num_staging_buffers": 3}, "runs/of-before")
