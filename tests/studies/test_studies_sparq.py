from __future__ import annotations

import pytest

from studies.sparq.__main__ import main
from studies.sparq.volumes import FORWARD, Interval, find, findings, printed, read_volumes, tokens

VOLUMES = read_volumes()


def test_a_printed_number_stands_for_what_rounds_to_it():
    assert (printed("1.20").low, printed("1.20").high) == pytest.approx((1.195, 1.205))
    assert printed("8") == Interval(7.5, 8.5)


def test_both_tables_print_the_same_runs():
    """Table 2 prints what table 1 has for 4 bits, with fewer digits."""
    pairs = 0
    for volume in VOLUMES:
        if (volume.table, volume.method, volume.bits) == (1, "SparQ", 4):
            same = [
                v
                for v in VOLUMES
                if (v.table, v.model, v.dataset, v.method) == (2, volume.model, volume.dataset, "SparQ")
            ]
            assert [
                v.gigabytes.low <= volume.gigabytes.high and volume.gigabytes.low <= v.gigabytes.high
                for v in same
            ] == [True]
            pairs += 1
    assert pairs == 6


def test_bits_per_element_by_hand():
    # 7.18 GB against 47 GB: six crossings against ten of 16 bits, 160/6·7.18/47 = 4.074.
    (found,) = (
        f for f in findings(VOLUMES)
        if (f.volume.model, f.volume.dataset, f.volume.bits, f.baseline) == ("OPT-1.3B", "RTE", 4, "central, 16 bits")
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


def test_the_script_prints_every_comparison(capsys):
    main()
    printed_text = capsys.readouterr().out
    for words in ("If ZO-SGD sent 10 activations", "Tokens that the volumes are", "Llama-1B"):
        assert words in printed_text
