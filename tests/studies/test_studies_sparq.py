from __future__ import annotations

import pytest

from studies.published.rows import shipped_rows
from studies.published.sparq import FORWARD
from studies.sparq import timelines
from studies.sparq.__main__ import main
from studies.sparq.tables import Interval, find, findings, gigabytes, printed, read_volumes, tokens

VOLUMES = read_volumes()


def test_a_printed_number_stands_for_what_rounds_to_it():
    assert (printed("1.20").low, printed("1.20").high) == pytest.approx((1.195, 1.205))
    assert printed("8") == Interval(7.5, 8.5)


def test_both_tables_print_the_same_runs():
    """Table 2 prints what table 1 has for 4 bits, with fewer digits."""
    pairs = 0
    for volume in VOLUMES:
        case = volume.case
        if (volume.row["table"], case.method, case.bits) == ("1", "SparQ", 4):
            same = [
                gigabytes(other)
                for other in VOLUMES
                if (other.row["table"], other.case.model, other.case.dataset, other.case.method)
                == ("2", case.model, case.dataset, "SparQ")
            ]
            own = gigabytes(volume)
            assert [own.low <= other.high and other.low <= own.high for other in same] == [True]
            pairs += 1
    assert pairs == 6


def test_bits_per_element_by_hand():
    # 7.18 GB against 47 GB: six messages against ten of 16 bits, 160/6·7.18/47 = 4.074.
    (found,) = (
        f for f in findings(VOLUMES)
        if (f.volume.case.model, f.volume.case.dataset, f.volume.case.bits, f.baseline) == ("OPT-1.3B", "RTE", 4, "central, 16 bits")
    )  # fmt: skip
    assert found.bits.holds(160 / 6 * 7.18 / 47)
    assert found.density[16].holds(160 / 6 * 7.18 / 47 / 20)


def test_tokens_of_a_volume_by_hand():
    volume = find(VOLUMES, "OPT-1.3B", "SST-2", "SparQ", 4)
    assert tokens(volume, activations=FORWARD, bits=4).holds(1.2e9 / (6 * 8192 / 2))


def test_first_order_runs_of_all_models_but_one_saw_as_many_tokens():
    """At the MLP's width and 16 bits each way: what makes these suppositions credible."""
    seen = {
        model: tokens(find(VOLUMES, model, "RTE", "FO-SGD"), activations=2, bits=16)
        for model in ("OPT-125M", "OPT-1.3B", "OPT-6.7B", "GPT2", "Llama-1B")
    }
    agreeing = {model for model, found in seen.items() if found.low < 1.29e6 and found.high > 1.26e6}
    assert agreeing == {"OPT-125M", "OPT-1.3B", "OPT-6.7B", "Llama-1B"}


@pytest.mark.slow
def test_the_report_has_every_cell_and_says_what_was_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timelines, "LINKS", {"1 Gbit/s": 125e6})
    main(tmp_path)
    assert "a data set but OPT-125M's FO-SGD and ZO-SGD" in capsys.readouterr().out
    text = (tmp_path / "tables.md").read_text()
    cells = [row for row in shipped_rows("SparQ") if row["quantity"] != "accuracy"]
    lines = [line for line in text.splitlines() if line.startswith("| r")]
    assert len(lines) == len(cells)
    assert all(line.endswith(("| within |", "| outside |")) for line in lines)
    assert sum(line.endswith("| within |") for line in lines) > 0.85 * len(lines)
    assert (tmp_path / "timelines.png").stat().st_size > 10_000
    assert text.count("| 1 Gbit/s |") == len(timelines.METHODS)


@pytest.fixture(scope="module")
def slow_steps():
    """Every method over 100 Mbit/s, where bytes are all that counts."""
    steps = {step.method.name: step for step in timelines.steps() if step.link == "100 Mbit/s"}
    assert list(steps) == [method.name for method in timelines.METHODS]
    return steps


@pytest.mark.slow
def test_over_a_slow_link_a_step_takes_what_its_bytes_take(slow_steps):
    """Forward and back overlap on a full-duplex link at most wholly; the latencies and the rest are little."""
    for step in slow_steps.values():
        counts = step.counts
        one_way = max(counts.activation_bytes, counts.gradient_bytes) + counts.reduced_bytes / 2
        both_ways = counts.activation_bytes + counts.gradient_bytes + counts.reduced_bytes / 2
        # An all_reduce of two moves half a buffer each way, twice.
        seconds = step.planned.prediction.step_time_s
        assert one_way / 12.5e6 <= seconds <= both_ways / 12.5e6 * 1.05 + 0.6


@pytest.mark.slow
def test_bytes_of_a_step_by_hand(slow_steps):
    """32 x 64 tokens of width 8192 + 2048: 40 MiB at 16 bits, a quarter of it at 4."""
    numbers = 32 * 64 * (8192 + 2048)
    first, ours = slow_steps["FO-SGD"].counts, slow_steps["SparQ, 4 bits, P + 1"].counts
    assert first.activation_bytes == pytest.approx(2 * numbers, rel=1e-3)
    assert first.gradient_bytes == pytest.approx(2 * numbers, rel=1e-3)
    assert slow_steps["AQ-SGD, 4 and 8 bits"].counts.size_bytes == pytest.approx(1.5 * numbers, rel=1e-3)
    assert (ours.num_activations, ours.num_scalars) == (6, 6)
    assert ours.activation_bytes == pytest.approx(6 * numbers / 2, rel=1e-3)
    assert slow_steps["ZO-SGD, 2P"].counts.num_activations == 10
