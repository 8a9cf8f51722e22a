"""Averages, quotients, ranks and counts that papers state of whole tables, against the cells that the tables print.

A cell that two readings of the print disagree about is not used. Where a sentence is about all rows, one row that is otherwise refutes
it; where it is about an average, only the average is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from proofs_checks.claims import Claim, corrected, counterexample, printed, reading
from proofs_checks.exact import at_most, equal, exceeds, is_true
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, everything_holds

# -- SparQ ----------------------------------------------------------------------------------------------------------


def sparq_first_order() -> Mapping[str, tuple[float, float]]:
    """Return accuracies of FO-SGD and of SparQ on SST-2 (SparQ's table 2)."""
    return {
        "OPT-125M": (87.5, 84.5),
        "OPT-1.3B": (91.7, 92.3),
        "OPT-6.7B": (94.4, 92.0),
        "GPT2": (88.1, 84.8),
        "Llama-1B": (94.3, 93.4),
    }


def check_first_order_is_not_highest(_context: Context) -> Outcome:
    """Compare accuracies of FO-SGD with SparQ's, model by model: one is the other way round."""
    rows = sparq_first_order()
    parts = {"OPT-1.3B": exceeds(*reversed(rows["OPT-1.3B"]), what="SparQ against FO-SGD, %")}
    for name, (first_order, own) in rows.items():
        if name != "OPT-1.3B":
            parts[name] = exceeds(first_order, own, what="FO-SGD against SparQ, %")
    return everything_holds(parts)


def sparq_memory() -> Mapping[str, tuple[int, int]]:
    """Return GB of GPU memory of FO-SGD and of SparQ on SST-2, batch size 32 (SparQ's table 2, whole GB)."""
    return {
        "OPT-125M": (2, 1),
        "OPT-1.3B": (15, 6),
        "OPT-6.7B": (76, 26),
        "GPT2": (2, 1),
        "Llama-1B": (14, 5),
    }


def check_memory_is_not_threefold(_context: Context) -> Outcome:
    """Compare quotients of the printed memory with 3: as printed, and for OPT whatever was rounded away."""
    parts = {
        name: exceeds(3.0, first_order / own, what=f"3 against {first_order}/{own}")
        for name, (first_order, own) in sparq_memory().items()
    }
    for name in ("OPT-1.3B", "OPT-6.7B"):
        first_order, own = sparq_memory()[name]
        parts[f"{name}, whatever was rounded"] = at_most(
            (first_order + 0.5) / (own - 0.5), 3.0, what="largest quotient that rounds to these"
        )
    return everything_holds(parts)


def sparq_communication() -> Mapping[str, tuple[float, float, float]]:
    """Return GB sent by FO-SGD, AQ-SGD and SparQ on SST-2 and RTE (SparQ's table 2)."""
    return {
        "OPT-125M, SST-2": (2.8, 1.1, 0.5),
        "OPT-125M, RTE": (15.7, 5.9, 2.6),
        "OPT-1.3B, SST-2": (8, 3, 1),
        "OPT-1.3B, RTE": (42, 16, 7),
        "OPT-6.7B, SST-2": (15, 6, 2),
        "OPT-6.7B, RTE": (83, 31, 9),
        "GPT2, SST-2": (4, 3, 2),
        "GPT2, RTE": (46, 20, 9),
        "Llama-1B, SST-2": (8, 4, 2),
        "Llama-1B, RTE": (41, 17, 12),
    }


def check_communication(_context: Context) -> Outcome:
    """Compare what SparQ sends with what both first-order methods send: in every row, and on average."""
    rows = sparq_communication()
    parts = {
        name: exceeds(min(row[:2]), row[2], what="GB of the frugal first-order method against SparQ")
        for name, row in rows.items()
    }
    for column, name, least in ((1, "AQ-SGD", 0.5), (0, "FO-SGD", 0.7)):
        saved = sum(1 - row[2] / row[column] for row in rows.values()) / len(rows)
        parts[f"saved on average against {name}"] = exceeds(saved, least, what="part")
    return everything_holds(parts)


def sparq_bits() -> Mapping[str, tuple[float, float, float]]:
    """Return GB sent at 1, 4 and 8 bits (SparQ's table 1)."""
    return {
        "OPT-1.3B, SST-2": (0.31, 1.20, 2.32),
        "OPT-1.3B, RTE": (2.49, 7.18, 14.06),
        "GPT2, SST-2": (0.52, 1.55, 2.64),
        "GPT2, RTE": (3.11, 8.93, 14.72),
        "Llama-1B, SST-2": (0.65, 2.42, 5.64),
        "Llama-1B, RTE": (3.47, 12.46, 24.74),
    }


def check_fewer_bits(_context: Context) -> Outcome:
    """Compare what is sent at fewer bits with what is sent at more, row by row."""
    return everything_holds(
        {
            name: is_true(list(row) == sorted(set(row)), what=f"{row} GB at 1, 4 and 8 bits")
            for name, row in sparq_bits().items()
        }
    )


# -- QuZO -----------------------------------------------------------------------------------------------------------


def quzo_reasoning() -> Mapping[str, tuple[Sequence[float], float]]:
    """Return accuracies on five tasks and the printed average (QuZO's table 2)."""
    return {
        "FP16": ((79.05, 80.10, 50.40, 60.20, 72.80), 68.6),
        "SmoothQuant W8A8": ((79.50, 79.70, 49.00, 60.00, 73.20), 68.30),
        "RTN W4A16": ((76.6, 70.10, 45.00, 56.80, 71.00), 63.90),
        "AWQ W4A16": ((79.10, 79.70, 49.30, 59.10, 74.00), 68.20),
        "QuIP W4A16": ((78.20, 78.20, 47.40, 58.60, 73.20), 67.10),
        "QServe W4A8": ((79.21, 79.20, 49.61, 59.31, 73.02), 68.07),
        "QuZO W8A8": ((78.74, 80.03, 50.06, 59.34, 74.03), 68.43),
        "QuZO W4A16": ((79.86, 79.13, 49.59, 59.13, 74.26), 68.39),
    }


def _average(name: str) -> float:
    scores, _ = quzo_reasoning()[name]
    return sum(scores) / len(scores)


def check_drops_by_cells(_context: Context) -> Outcome:
    """Compare drops against the averages of the cells: 0.07 and 0.12; and every other average with its cells."""
    parts = {
        "W8A8": equal(_average("FP16") - _average("QuZO W8A8"), 0.07, what="drop", tolerance=0.005 / 0.07),
        "W4A16": equal(
            _average("FP16") - _average("QuZO W4A16"), 0.116, what="drop", tolerance=0.001 / 0.116
        ),
    }
    for name, (_, said) in quzo_reasoning().items():
        if name != "FP16":
            parts[name] = is_true(abs(_average(name) - said) < 0.051, what=f"{said} is {_average(name):.3f}")
    return everything_holds(parts)


def check_drops_as_printed(_context: Context) -> Outcome:
    """Show that the printed drops rest on an average of 68.6, and that the cells' is 68.51."""
    said = {name: average for name, (_, average) in quzo_reasoning().items()}
    return everything_holds(
        {
            "0.17": equal(said["FP16"] - said["QuZO W8A8"], 0.17, what="of printed averages"),
            "0.21": equal(said["FP16"] - said["QuZO W4A16"], 0.21, what="of printed averages"),
            "68.6": exceeds(
                abs(said["FP16"] - _average("FP16")), 0.05, what="printed average off its cells, by a last place", factor=1.5
            ),
        }
    )  # fmt: skip


def check_gains(_context: Context) -> Outcome:
    """Compare QuZO's averages with the others' at the same bits, and the largest gain with 4.49."""
    said = {name: average for name, (_, average) in quzo_reasoning().items()}
    return everything_holds(
        {
            "W8A8": exceeds(_average("QuZO W8A8"), _average("SmoothQuant W8A8"), what="average, %"),
            "W4A16": exceeds(
                _average("QuZO W4A16"),
                max(_average("RTN W4A16"), _average("AWQ W4A16"), _average("QuIP W4A16")),
                what="average, %",
            ),
            "up to 4.49": equal(said["QuZO W4A16"] - said["RTN W4A16"], 4.49, what="gain in the average"),
        }
    )


def quzo_full_tuning() -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Return scores on RTE, WSC, MultiRC, COPA, ReCoRD, SQuAD and DROP by bits and method (QuZO's table 3)."""
    return {
        "FP W8A8": {
            "FO": (63.90, 49.00, 58.00, 79.00, 72.50, 72.68, 23.46),
            "QuZO": (55.59, 65.38, 57.10, 80.00, 76.80, 76.38, 30.17),
        },
        "INT W8A8": {
            "FO": (52.34, 61.53, 50.60, 62.00, 74.83, 70.13, 20.06),
            "SmoothQuant": (66.78, 59.51, 61.50, 72.02, 79.10, 73.07, 29.94),
            "LLM.int8()": (62.56, 57.75, 55.61, 80.02, 80.61, 76.34, 20.15),
            "QuZO": (61.01, 63.46, 60.00, 81.00, 79.00, 77.71, 30.11),
        },
        "W4A8": {
            "FO": (47.29, 60.57, 51.90, 62.04, 73.21, 30.01, 10.06),
            "MinMax": (59.91, 41.28, 53.21, 82.51, 80.97, 50.07, 24.71),
            "LLM-FP4": (66.82, 61.38, 58.81, 82.90, 81.25, 51.07, 24.99),
            "QuZO": (64.57, 62.28, 60.60, 80.01, 78.20, 68.12, 25.10),
        },
    }


def _wins(rows: Mapping[str, Sequence[float]]) -> list[int]:
    """Return on which tasks QuZO has the best score, alone."""
    own = rows["QuZO"]
    others = [row for name, row in rows.items() if name != "QuZO"]
    return [task for task, score in enumerate(own) if all(score > row[task] for row in others)]


def check_full_tuning(_context: Context) -> Outcome:
    """Count tasks on which QuZO has the best score of table 3."""
    rows = quzo_full_tuning()
    return everything_holds(
        {
            "FP W8A8: COPA, ReCoRD, SQuAD, DROP": is_true(
                set(_wins(rows["FP W8A8"])) >= {3, 4, 5, 6}, what="QuZO is above FO"
            ),
            "INT W8A8": equal(float(len(_wins(rows["INT W8A8"]))), 4.0, what="of 7 tasks"),
            "W4A8": equal(float(len(_wins(rows["W4A8"]))), 4.0, what="of 7 tasks"),
        }
    )


def quzo_opt() -> Mapping[str, Sequence[float]]:
    """Return scores of OPT-1.3B on eleven tasks, INT W8A8 (QuZO's table 9)."""
    return {
        "QLLM": (82.45, 55.59, 66.07, 63.00, 63.46, 52.35, 56.81, 71.01, 59.90, 61.49, 15.80),
        "SmoothQuant": (75.01, 52.34, 37.51, 48.20, 44.23, 57.83, 53.41, 71.03, 68.81, 69.42, 11.22),
        "QuZO": (91.38, 55.61, 67.85, 62.30, 63.46, 60.03, 55.91, 74.00, 70.81, 73.88, 21.82),
    }


def check_opt(_context: Context) -> Outcome:
    """Count tasks of table 9 on which QuZO is above QLLM and SmoothQuant."""
    return equal(float(len(_wins(quzo_opt()))), 8.0, what="of 11 tasks; one more is a draw")


def quzo_hybrid() -> Mapping[str, tuple[Sequence[float], float]]:
    """Return scores on eleven tasks and the printed average, without and with hybrid formats (QuZO's table 11)."""
    return {
        "INT W4A8": (
            (89.10, 54.87, 62.50, 66.60, 64.42, 57.99, 60.60, 83.00, 78.20, 78.12, 31.80),
            66.10,
        ),
        "INT/FP W4A8": (
            (90.59, 59.92, 63.71, 68.40, 64.50, 59.70, 59.30, 80.00, 78.60, 79.89, 33.55),
            67.10,
        ),
        "INT W8A8": (
            (93.00, 61.01, 64.18, 80.00, 63.46, 52.82, 60.01, 81.00, 79.00, 77.71, 31.11),
            67.58,
        ),
        "INT/FP W8A8": (
            (93.08, 65.95, 64.28, 81.10, 64.57, 55.17, 60.11, 83.00, 79.60, 80.74, 36.58),
            69.47,
        ),
    }


def check_hybrid(_context: Context) -> Outcome:
    """Compare printed averages of table 11 with their cells, and gains of hybrid formats with 1 to 2 points."""
    rows = quzo_hybrid()
    means = {name: sum(scores) / len(scores) for name, (scores, _) in rows.items()}
    parts = {
        name: is_true(abs(means[name] - said) < 0.0151, what=f"{said} is {means[name]:.3f}")
        for name, (_, said) in rows.items()
    }
    for bits in ("W4A8", "W8A8"):
        gain = means[f"INT/FP {bits}"] - means[f"INT {bits}"]
        parts[f"gain, {bits}"] = is_true(0.95 < gain < 2.05, what=f"{gain:.2f} points")
    return everything_holds(parts)  # fmt: skip


def quzo_large() -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Return scores of LLaMa-2 13B on ReCoRD, SQuAD and DROP (QuZO's table 20)."""
    return {
        "8 bits": {
            "FO": (81.70, 63.23, 25.90),
            "MeZO": (82.10, 63.71, 25.20),
            "QuZO": (82.20, 78.19, 37.61),
        },
        "4 bits": {
            "FO": (82.00, 62.27, 25.31),
            "MeZO": (82.30, 62.62, 25.33),
            "QuZO": (82.10, 73.79, 27.32),
        },
    }


def check_large(_context: Context) -> Outcome:
    """Show the cell of table 20 in which MeZO is above QuZO; in the others it is not."""
    rows = quzo_large()
    return everything_holds(
        {
            "4 bits, ReCoRD": exceeds(
                rows["4 bits"]["MeZO"][0], rows["4 bits"]["QuZO"][0], what="MeZO against QuZO"
            ),
            "4 bits, others": is_true(_wins(rows["4 bits"]) == [1, 2], what="QuZO is best on SQuAD and DROP"),
            "8 bits": equal(float(len(_wins(rows["8 bits"]))), 3.0, what="of 3 tasks"),
        }
    )


def quzo_two_roundings() -> Mapping[str, tuple[Sequence[float], Sequence[float]]]:
    """Return scores of Q-RGE1 and Q-RGE2 on ReCoRD, SQuAD and DROP (QuZO's table 18)."""
    return {
        "8 bits": ((81.80, 64.23, 24.88), (82.20, 78.19, 37.61)),
        "4 bits": ((81.60, 63.02, 25.15), (82.10, 73.79, 27.32)),
    }


def check_two_roundings(_context: Context) -> Outcome:
    """Compare Q-RGE2 with Q-RGE1 cell by cell, and its gain on SQuAD with 10 points."""
    parts = {}
    for bits, (once, twice) in quzo_two_roundings().items():
        parts[bits] = is_true(all(b > a for a, b in zip(once, twice, strict=True)), what="above in all cells")
        parts[f"{bits}, SQuAD"] = exceeds(twice[1] - once[1], 10.0, what="points")
    return everything_holds(parts)


def quzo_queries() -> tuple[float, float]:
    """Return scores on DROP with one query and with ten (QuZO's table 16)."""
    return 37.61, 41.33


def check_gain_of_queries(_context: Context) -> Outcome:
    """Compare what ten queries bring with 3.7 points."""
    one, ten = quzo_queries()
    return equal(round(ten - one, 1), 3.7, what="points, to one place")


def check_gain_is_not_as_printed(_context: Context) -> Outcome:
    """Show that neither the difference nor the quotient of the cells rounds to 3.6 %."""
    one, ten = quzo_queries()
    return everything_holds(
        {
            "points": exceeds(ten - one, 3.65, what="41.33 - 37.61 against what rounds to 3.6"),
            "relative": exceeds(100 * (ten / one - 1), 3.65, what="% of 37.61", factor=2),
        }
    )


def quzo_tasks_memory() -> Mapping[str, tuple[float, float]]:
    """Return GB of a first-order method and of QuZO of one number of bits (QuZO's table 14)."""
    return {
        "OPT-1.3B, 8 bits, SST-2": (9.01, 3.43),
        "OPT-1.3B, 8 bits, ReCoRD": (6.76, 4.82),
        "OPT-1.3B, 8 bits, DROP": (31.29, 16.42),
        "OPT-1.3B, 4 bits, SST-2": (4.76, 1.72),
        "OPT-1.3B, 4 bits, ReCoRD": (4.42, 2.41),
        "LLaMa-2 7B, 8 bits, ReCoRD": (19.06, 13.04),
    }


def check_memory_below_twofold(_context: Context) -> Outcome:
    """Show rows of table 14 in which QuZO takes more than half of a first-order method's memory."""
    rows = quzo_tasks_memory()
    below = ("OPT-1.3B, 8 bits, ReCoRD", "OPT-1.3B, 8 bits, DROP", "OPT-1.3B, 4 bits, ReCoRD", "LLaMa-2 7B, 8 bits, ReCoRD")  # fmt: skip
    return everything_holds(
        {name: exceeds(2.0, rows[name][0] / rows[name][1], what="2 against the quotient") for name in below}
    )


def quzo_lora() -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Return scores of Mistral-7B on MultiRC, ReCoRD, SQuAD and DROP (QuZO's table 1)."""
    return {
        "8 bits": {
            "FO": (82.60, 80.10, 84.03, 44.52),
            "MeZO": (81.70, 78.60, 63.41, 26.19),
            "QuZO": (85.50, 79.00, 87.08, 49.69),
        },
        "4 bits": {
            "FO": (49.80, 78.80, 80.12, 31.05),
            "MeZO": (48.80, 74.50, 56.97, 23.92),
            "QuZO": (50.00, 82.60, 84.27, 45.13),
        },
    }


def check_lora(_context: Context) -> Outcome:
    """Count tasks of table 1 on which QuZO is best, and compare two gains with those stated."""
    rows = quzo_lora()
    own, first_order = rows["8 bits"]["QuZO"], rows["8 bits"]["FO"]
    return everything_holds(
        {
            "8 bits": equal(float(len(_wins(rows["8 bits"]))), 3.0, what="of 4 tasks"),
            "4 bits": equal(float(len(_wins(rows["4 bits"]))), 4.0, what="of 4 tasks"),
            "gains": equal(
                [own[2] - first_order[2], own[0] - first_order[0]], [3.05, 2.9], what="SQuAD, MultiRC", tolerance=1e-6
            ),
        }
    )  # fmt: skip


def quzo_direction_megabytes() -> tuple[float, Mapping[int, float]]:
    """Return MB of a direction of 32 bits, and by bits MB that are stated for a rounded one (QuZO's appendix B.3)."""
    return 1630, {8: 410, 2: 110}


def check_direction_sizes(_context: Context) -> Outcome:
    """Compare a direction's size at 8 and 2 bits with 1.63 GB/4 and 1.63 GB/16, and the saving with 4 and 16."""
    whole, said = quzo_direction_megabytes()
    return everything_holds(
        {
            "8 bits": equal(said[8], whole * 8 / 32, what="MB", tolerance=0.01),
            "2 bits": equal(whole * 2 / 32, 102, what="MB", tolerance=0.005),
            "4 to 16 times": equal([32 / 8, 32 / 2], [4.0, 16.0], what="smaller"),
        }
    )


def check_direction_size_as_printed(_context: Context) -> Outcome:
    """Show that no rounding of 1.63 GB makes a sixteenth of it 110 MB, in powers of 10 or of 2."""
    whole, said = quzo_direction_megabytes()
    largest = (whole + 5) / 1000 * 1024 / 16  # 1.635 GiB in MiB
    return exceeds(
        said[2] - 5, largest * 1.003, what="least that rounds to 110 against the most that 1.63 allows"
    )


# -- ZO2 ------------------------------------------------------------------------------------------------------------


def zo2_main() -> Mapping[str, tuple[float, float, float, float]]:
    """Return MB of MeZO and ZO2 and their tokens/s, by precision and model in the order of size (ZO2's table 1)."""
    return {
        "fp32, OPT-1.3B": (8898, 5098, 1998, 1955),
        "fp32, OPT-2.7B": (14514, 5930, 1104, 1086),
        "fp32, OPT-13B": (58762, 10736, 266, 259),
        "fp16, OPT-1.3B": (5814, 3750, 6629, 6448),
        "fp16, OPT-2.7B": (9054, 4142, 4229, 4220),
        "fp16, OPT-13B": (29690, 6180, 1326, 1251),
    }


def check_savings_grow(_context: Context) -> Outcome:
    """Compare the part of MeZO's memory that ZO2 needs from one model to the next larger."""
    parts = {}
    for precision in ("fp32", "fp16"):
        shares = [own / base for name, (base, own, _, _) in zo2_main().items() if name.startswith(precision)]
        parts[precision] = is_true(
            max(shares) < 1 and shares == sorted(shares, reverse=True),
            what=f"{[round(share, 2) for share in shares]} of MeZO's memory",
        )
    return everything_holds(parts)


def check_every_row_is_slower(_context: Context) -> Outcome:
    """Show that ZO2 is slower than MeZO in every row of both, by up to 6 %."""
    rows = zo2_main()
    parts = {name: exceeds(base, own, what="MeZO's tokens/s") for name, (_, _, base, own) in rows.items()}
    lost = max(1 - own / base for _, _, base, own in rows.values())
    parts["at most"] = exceeds(lost, 0.05, what="part of the throughput lost, OPT-13B in fp16")
    return everything_holds(parts)


def accuracies() -> Mapping[str, Sequence[float]]:
    """Return accuracies on SST-2, RTE, CB, BoolQ, WSC, WIC and MultiRC (ZO2's table 2, DistZO2's table 6)."""
    return {
        "MeZO": (91.4, 66.1, 67.9, 67.6, 63.5, 61.1, 60.1),
        "ZO2": (91.4, 66.1, 67.9, 67.6, 63.5, 61.1, 60.1),
        "DistZO2": (91.4, 66.1, 67.9, 67.6, 63.5, 61.1, 60.1),
    }


def check_accuracies(method: str, _context: Context) -> Outcome:
    """Compare a method's accuracies with MeZO's, task by task."""
    return equal(accuracies()[method], accuracies()["MeZO"], what=method, tolerance=0.0)


def zo2_left_out() -> Mapping[str, tuple[float, float, float, float]]:
    """Return tokens/s without reusable memory, without overlap, without the efficient update, and with all (ZO2's table 3)."""
    return {
        "OPT-1.3B": (735, 1109, 1567, 1955),
        "OPT-2.7B": (422, 573, 849, 1086),
        "OPT-13B": (103, 105, 198, 259),
        "OPT-66B": (15, 22, 36, 40),
        "OPT-175B": (5, 8, 13, 14),
    }


def check_order_of_features(_context: Context) -> Outcome:
    """Compare the order of what leaving out each of three features costs, model by model."""
    return everything_holds(
        {
            name: is_true(list(row) == sorted(set(row)), what=f"{row} tokens/s")
            for name, row in zo2_left_out().items()
        }
    )


def zo2_compressed() -> Mapping[str, tuple[float, float, float, float]]:
    """Return tokens/s without compression and with fp16, bf16 and fp8, AMP in fp16 (ZO2's table 5)."""
    return {
        "OPT-1.3B": (4827, 4770, 4760, 4802),
        "OPT-2.7B": (2811, 2974, 2974, 2997),
        "OPT-13B": (561, 930, 930, 951),
        "OPT-66B": (127, 192, 192, 198),
        "OPT-175B": (43, 65, 65, 68),
    }


def check_compression(_context: Context) -> Outcome:
    """Compare throughputs of formats with each other: fewer bits are faster from 2.7B on, and not for 1.3B."""
    parts = {}
    for name, (plain, half, brain, eighth) in zo2_compressed().items():
        parts[f"{name}, two formats of 16 bits"] = at_most(abs(half - brain) / half, 0.0025, what="apart")
        parts[f"{name}, 8 bits against 16"] = exceeds(eighth, half, what="tokens/s")
        ordered = (plain, eighth) if name == "OPT-1.3B" else (half, plain)
        parts[f"{name}, 16 bits against none"] = exceeds(*ordered, what="tokens/s")
    return everything_holds(parts)


def zo2_settings() -> Mapping[str, tuple[float, float]]:
    """Return tokens/s of MeZO and ZO2 by batch size, then by length (ZO2's tables 6 and 7)."""
    return {
        "OPT-1.3B, batch 2": (2126, 2105),
        "OPT-2.7B, batch 2": (1204, 1193),
        "OPT-13B, batch 2": (297, 294),
        "OPT-1.3B, batch 8": (2358, 2348),
        "OPT-2.7B, batch 8": (1297, 1294),
        "OPT-1.3B, length 1024": (1901, 1830),
        "OPT-2.7B, length 1024": (1051, 1013),
        "OPT-13B, length 1024": (244, 243),
        "OPT-1.3B, length 8192": (1282, 1279),
        "OPT-2.7B, length 8192": (786, 784),
    }


def check_parity(_context: Context) -> Outcome:
    """Compare what ZO2 loses against MeZO with 4 % in every row, and with 1 % at the largest batches and lengths."""
    parts = {}
    for name, (base, own) in zo2_settings().items():
        largest = name.endswith(("batch 8", "8192"))
        parts[name] = at_most(1 - own / base, 0.01 if largest else 0.04, what="part of the throughput lost")
    return everything_holds(parts)


# -- DistZO2 --------------------------------------------------------------------------------------------------------


def distzo2_main() -> Mapping[str, Sequence[float]]:
    """Return tokens/s of ZO2, PertP, DDP and both on 1, 2, 2 and 4 GPUs (DistZO2's table 1)."""
    return {
        "OPT-1.3B": (18625, 34225, 31585, 60091),
        "OPT-2.7B": (9582, 17720, 16106, 30918),
        "OPT-6.7B": (4133, 7653, 7062, 14417),
        "OPT-30B": (976, 1820, 1661, 3221),
        "OPT-66B": (446, 885, 764, 1370),
    }


def check_unified_is_highest(_context: Context) -> Outcome:
    """Compare 2D's throughput with the others' of table 1, and its speedup over ZO2 with 3."""
    parts = {}
    for name, row in distzo2_main().items():
        parts[name] = exceeds(row[3], max(row[:3]), what="tokens/s of 2D")
        parts[f"{name}, over ZO2"] = exceeds(row[3] / row[0], 3.0, what="speedup")
    return everything_holds(parts)


def distzo2_pairs_of_methods() -> Mapping[str, tuple[float, float]]:
    """Return tokens/s of MeZO and of ZO2 behind one parallelism (DistZO2's table 3, batch sizes 2 and 8)."""
    return {
        "PertP, OPT-1.3B, 8": (38869, 37777),
        "PertP, OPT-2.7B, 8": (19907, 19573),
        "PertP, OPT-6.7B, 8": (8582, 8522),
        "PertP, OPT-30B, 8": (2015, 2001),
        "DDP, OPT-1.3B, 8": (36892, 36744),
        "DDP, OPT-2.7B, 8": (18930, 18830),
        "DDP, OPT-6.7B, 2": (5622, 5391),
        "DDP, OPT-30B, 2": (1329, 1329),
    }


def check_comparable(_context: Context) -> Outcome:
    """Compare what ZO2 loses against MeZO behind one parallelism with 4.2 %."""
    return everything_holds(
        {
            name: at_most(1 - own / base, 0.042, what="part of the throughput lost")
            for name, (base, own) in distzo2_pairs_of_methods().items()
        }
    )


def distzo2_gap() -> Mapping[str, tuple[float, float]]:
    """Return tokens/s of MeZO and ZO2 with DDP on one GPU and on two (DistZO2's table 5)."""
    return {
        "OPT-1.3B, 1": (18509, 18446),
        "OPT-2.7B, 1": (9485, 9566),
        "OPT-6.7B, 1": (4062, 4060),
        "OPT-30B, 1": (968, 961),
        "OPT-1.3B, 2": (31772, 31585),
        "OPT-2.7B, 2": (16148, 16106),
        "OPT-6.7B, 2": (7062, 7062),
        "OPT-30B, 2": (1661, 1661),
    }


def check_gap(_context: Context) -> Outcome:
    """Compare how far ZO2 is from MeZO with 1 %, GPU count by GPU count."""
    return everything_holds(
        {
            name: at_most(abs(1 - own / base), 0.01, what="apart")
            for name, (base, own) in distzo2_gap().items()
        }
    )


# -- ZOinfer --------------------------------------------------------------------------------------------------------


def zoinfer_accuracies() -> Mapping[str, tuple[float, int]]:
    """Return accuracies to three places and how many examples are said to be behind them (ZOinfer's tables 1 and 3)."""
    return {
        "final evaluation, vLLM": (0.922, 500),
        "final evaluation, LoRA-only": (0.902, 500),
        "final full validation": (0.931, 872),
        "table 3, development": (0.626, 500),
        "table 3, validation, MeZO": (0.570, 872),
        "table 3, validation, r = 128": (0.590, 872),
    }


def _is_share(accuracy: float, count: int) -> bool:
    """Return whether a whole number of examples makes that accuracy, to three places."""
    return any(round(right / count, 3) == accuracy for right in range(count + 1))


def check_shares_of_872(_context: Context) -> Outcome:
    """Ask whether every printed accuracy is a share of its examples, 872 for validation."""
    return everything_holds(
        {
            name: is_true(_is_share(accuracy, count), what=f"{accuracy} of {count}")
            for name, (accuracy, count) in zoinfer_accuracies().items()
        }
    )


def check_shares_of_500(_context: Context) -> Outcome:
    """Ask the same with 500 examples behind table 3's validation."""
    return everything_holds(
        {
            name: is_true(_is_share(accuracy, 500 if "table 3" in name else count), what=f"{accuracy}")
            for name, (accuracy, count) in zoinfer_accuracies().items()
        }
    )


def _datum(name: str, function: Callable[..., object], old: str, new: str) -> Mutant:
    return Mutant(name, f"proofs_checks.printed_tables:{function.__name__}", old, new)


_TABLES = "printed figures, as they are rounded"

CLAIMS = (
    Claim(
        name="sparq-first-order-is-not-highest",
        paper="sparq",
        where=("Sec. 5", "Table 2"),
        quotation="Table 2 indicates that FO-SGD achieves the highest test accuracy among all methods.",
        statement="On SST-2 SparQ has 92.3 % with OPT-1.3B, FO-SGD 91.7 %; with the other four models FO-SGD is the higher.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_first_order_is_not_highest,
                _datum("a better first-order run", sparq_first_order, "(91.7, 92.3)", "(92.7, 92.3)"),
            ),
        ),
        breaks="One cell of the table is otherwise.",
        consequence="None for what is computed; one run of each is printed, without a spread.",
        derivation="printed-figures.md#sparq",
    ),
    Claim(
        name="sparq-memory-is-not-threefold",
        paper="sparq",
        where=("Abstract", "Sec. 7", "App. B.2"),
        quotation="SparQ reduces GPU memory usage by over 3x ... The memory overhead for first-order methods is over 3× more than that for memory-efficient zeroth-order methods",
        statement="On SST-2 at batch size 32, the setting of appendix B.2, table 2 has 15 GB against 6 with OPT-1.3B and 76 against 26 with OPT-6.7B, at most 2.82 and 3.0 times before rounding, and 2 to 2.8 times with the others.",
        hypotheses="printed figures in whole GB; both GPUs' peaks, as in table 2",
        checks=(
            counterexample(
                check_memory_is_not_threefold,
                _datum("a larger first-order run", sparq_memory, "(15, 6)", "(25, 6)"),
                _datum("a little more of it", sparq_memory, "(76, 26)", "(79, 26)"),
            ),
        ),
        breaks="Only rows of RTE, with longer sequences, are above 3.",
        consequence="Expect 2 to 3 times on short sequences; `zosim plan` predicts it for a model and a length.",
        derivation="printed-figures.md#sparq",
    ),
    Claim(
        name="sparq-communication-is-halved",
        paper="sparq",
        where=("Abstract", "Sec. 5", "Sec. 7", "Table 2"),
        quotation="On average, SparQ reduces communication overhead by more than 50% compared to AQ-SGD and over 70% compared to FO-SGD. ... SparQ stably outperforms both",
        statement="Of SST-2 and RTE SparQ sends least in every row, 54 % less than AQ-SGD and 79 % less than FO-SGD on average of the rows.",
        hypotheses="printed figures of ten rows; the mean of savings, row by row",
        checks=(
            printed(
                check_communication,
                _datum("a dearer run", sparq_communication, "(83, 31, 9)", "(83, 31, 32)"),
            ),
        ),
        derivation="printed-figures.md#sparq",
    ),
    Claim(
        name="sparq-fewer-bits-send-less",
        paper="sparq",
        where=("Sec. 5", "Table 1"),
        quotation="stronger quantization (fewer bits) consistently reduces communication overhead",
        statement="In every row of table 1 one bit sends less than four, and four less than eight.",
        hypotheses=_TABLES,
        checks=(printed(check_fewer_bits, _datum("two swapped", sparq_bits, "1.20, 2.32", "2.32, 1.20")),),
        derivation="printed-figures.md#sparq",
    ),
    Claim(
        name="quzo-zero-shot-drops",
        paper="quzo",
        where=("Sec. 4.1", "Table 2"),
        quotation="Compared to the FP16 baseline, QuZO incurs only a marginal drop of 0.17% (W8A8) and 0.21% (W4A16)",
        statement="The five cells of the FP16 row average 68.51, not 68.6; the drops are 0.07 and 0.12. All other averages agree with their cells.",
        hypotheses=_TABLES,
        checks=(
            corrected(check_drops_by_cells, _datum("another cell", quzo_reasoning, "50.06", "51.06")),
            counterexample(
                check_drops_as_printed,
                _datum("cells that average 68.6", quzo_reasoning, "80.10, 50.40", "80.50, 50.40"),
            ),
        ),
        amendment="The baseline's average is that of its cells, 68.51.",
        breaks="The printed average of the baseline is 0.09 above its cells.",
        consequence="The corrected drops are smaller; neither is beyond the spread of five tasks.",
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-zero-shot-gains",
        paper="quzo",
        where=("Sec. 4.1", "Table 2"),
        quotation="QuZO consistently outperforms other methods, achieving up to a 4.49% gain in average accuracy.",
        statement="QuZO's average is above every other method's at the same bits, by up to 4.49 points (RTN, W4A16).",
        hypotheses="printed figures; averages over five tasks, as the sentence says",
        checks=(printed(check_gains, _datum("a better AWQ", quzo_reasoning, "49.30", "50.40")),),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-lora-scores",
        paper="quzo",
        where=("Sec. 4.1", "Table 1"),
        quotation="For the Mistral-7B-v0.3 model, QuZO delivers the best performance on 3 out of 4 tasks, improving over FO by 3.05 on SQuAD and 2.9 on MultiRC. ... QuZO again consistently outperforms both FO and MeZO",
        statement="So it is: best on MultiRC, SQuAD and DROP at 8 bits, on all four at 4, with those differences.",
        hypotheses=_TABLES,
        checks=(printed(check_lora, _datum("another first-order run", quzo_lora, "84.03", "84.33")),),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-full-tuning-scores",
        paper="quzo",
        where=("Sec. 4.2", "Table 3"),
        quotation="QuZO outperforms its truly quantized FO counterparts on all multichoice and generation tasks under FP W8A8 ... in 4 out of 7 tasks [INT W8A8] ... the best results in 4 out of 7 tasks [W4A8]",
        statement="Under FP W8A8 QuZO is above FO on COPA, ReCoRD, SQuAD and DROP; under INT W8A8 and W4A8 it is best on four of seven.",
        hypotheses="printed figures; multiple choice is COPA and ReCoRD, generation SQuAD and DROP, as appendix A has it",
        checks=(printed(check_full_tuning, _datum("a better LLM-FP4", quzo_full_tuning, "24.99", "25.99")),),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-opt-scores",
        paper="quzo",
        where=("App. A.1", "Table 9"),
        quotation="our QuZO method outperforms quantization methods such as QLLM and SmoothQuant in 8 out of 11 tasks under the INT W8A8 quantization",
        statement="QuZO is above both on eight tasks, and draws on WSC.",
        hypotheses=_TABLES,
        checks=(printed(check_opt, _datum("a lower score", quzo_opt, "55.61", "55.51")),),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-hybrid-gains",
        paper="quzo",
        where=("App. B.2", "Table 11"),
        quotation="QuZO can boost around 1 to 2% average performance across these 11 tasks in both W4A8 and W8A8 quantization.",
        statement="The averages agree with their cells; hybrid formats gain 1.0 points at W4A8 and 1.9 at W8A8.",
        hypotheses=_TABLES,
        checks=(printed(check_hybrid, _datum("a lower cell", quzo_hybrid, "36.58", "26.58")),),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-does-not-always-outperform",
        paper="quzo",
        where=("App. D.5", "Table 20"),
        quotation="The results indicate that QuZO consistently outperforms MeZO and FO, particularly in SQuAD and DROP",
        statement="At 4 bits MeZO has 82.30 on ReCoRD, QuZO 82.10; in the other five columns QuZO is the highest.",
        hypotheses=_TABLES,
        checks=(counterexample(check_large, _datum("a lower score", quzo_large, "82.30", "82.00")),),
        breaks="One cell of six is otherwise, by 0.2.",
        consequence="None for what is computed; without a spread, 0.2 says little either way.",
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-two-roundings-score-higher",
        paper="quzo",
        where=("App. D.3", "Table 18"),
        quotation="Q-RGE2 consistently yields substantial accuracy improvements—exceeding 10% in challenging tasks like SQuAD",
        statement="Q-RGE2 is above Q-RGE1 in all six cells, on SQuAD by 14.0 and 10.8 points.",
        hypotheses=_TABLES,
        checks=(
            printed(check_two_roundings, _datum("a better Q-RGE1", quzo_two_roundings, "63.02", "64.02")),
        ),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-gain-of-ten-queries",
        paper="quzo",
        where=("Table 16",),
        quotation="Table 16 shows that increasing the number of queries from 1 to 10 results in a 3.6% improvement in DROP accuracy.",
        statement="41.33 - 37.61 = 3.72: an improvement of 3.7 points, 9.9 % of 37.61.",
        hypotheses=_TABLES,
        checks=(
            corrected(check_gain_of_queries, _datum("another cell", quzo_queries, "41.33", "41.23")),
            counterexample(
                check_gain_is_not_as_printed, _datum("another cell", quzo_queries, "41.33", "41.23")
            ),
        ),
        amendment="3.7 points.",
        breaks="The difference is rounded the wrong way.",
        consequence="None.",
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-memory-below-twofold",
        paper="quzo",
        where=("Sec. 4.3", "Table 14"),
        quotation="QuZO reduces 2-5.47× memory consumption compared to fully quantized FO methods in Table 14.",
        statement="On ReCoRD it is 1.40 times with OPT-1.3B at 8 bits, 1.83 at 4 bits and 1.46 with LLaMa-2 7B, and on DROP 1.91.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_memory_below_twofold,
                _datum("a larger first-order run", quzo_tasks_memory, "(6.76, 4.82)", "(9.76, 4.82)"),
            ),
        ),
        breaks="Four rows of table 14 are below 2.",
        consequence="Expect 1.4 times where sequences or batches are small beside the weights.",
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-size-of-a-rounded-direction",
        paper="quzo",
        where=("App. B.3",),
        quotation="the memory reduction is around 4-16× ... it costs around 1.63 GB of memory to store each u during one step. However, quantized perturbation would only cost 110 to 410 MB if we quantize it to 2-bit or 8-bit",
        statement="1.63 GB of 32 bits are 408 MB at 8 bits and 102 MB at 2 bits, 4 and 16 times less.",
        hypotheses="printed figures; sizes estimated by bits, as the appendix says",
        checks=(
            corrected(
                check_direction_sizes, _datum("another size", quzo_direction_megabytes, "8: 410", "8: 430")
            ),
            counterexample(
                check_direction_size_as_printed,
                _datum("a sixteenth", quzo_direction_megabytes, "2: 110", "2: 102"),
            ),
        ),
        amendment="102 MB at 2 bits.",
        breaks="110 MB is not a sixteenth of 1.63 GB, in powers of 10 or of 2.",
        consequence="Directions are drawn again, not stored, where memory counts: `directions.kept` is off by default.",
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="zo2-savings-grow-with-models",
        paper="zo2",
        where=("Sec. 6.1", "Table 1"),
        quotation="The results demonstrate a consistent advantage of ZO2 in terms of GPU memory utilization across all model sizes ... the memory savings become more pronounced as the model size increases",
        statement="ZO2 needs 57, 41 and 18 % of MeZO's memory in fp32 with 1.3, 2.7 and 13 billion parameters, and 65, 46 and 21 % in fp16.",
        hypotheses="printed figures of models that MeZO can run",
        checks=(printed(check_savings_grow, _datum("a larger run", zo2_main, "6180", "16180")),),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-takes-some-time",
        paper="zo2",
        where=("Sec. 1", "Sec. 7"),
        quotation="with no additional runtime or accuracy degradation ... maintaining high throughput without additional time costs",
        statement="ZO2 is slower than MeZO in every row that both can run, by 0.2 to 5.7 % (OPT-13B in fp16: 1251 against 1326 tokens/s); of larger models there is no MeZO to compare with.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_every_row_is_slower, _datum("a faster run", zo2_main, "4229, 4220", "4229, 4239")
            ),
        ),
        breaks='The abstract\'s "almost no additional time overhead" is what table 1 shows.',
        consequence="A step takes at least one block's transfer longer than its forwards: step-is-transfer-or-two-forwards.",
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-accuracies-are-alike",
        paper="zo2",
        where=("Sec. 6.2", "Table 2"),
        quotation="As shown in Table 2, ZO2 achieves identical precision rates to the baseline MeZO approach across all evaluated benchmarks.",
        statement="All seven pairs of table 2 are alike. Why they must be, if both draw the same numbers and round alike, is same-direction-everywhere.",
        hypotheses=_TABLES,
        checks=(
            printed(
                partial(check_accuracies, "DistZO2"),
                _datum("another accuracy", accuracies, '"DistZO2": (91.4', '"DistZO2": (91.5'),
            ),
        ),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-order-of-features",
        paper="zo2",
        where=("Sec. 6.3", "Table 3"),
        quotation="Across all models, the removal of reusable memory results in the most substantial decrease in throughput, followed by the dynamic scheduler, and finally, the efficient parameter updating.",
        statement="So it is in all rows of table 3.",
        hypotheses=_TABLES,
        checks=(
            printed(check_order_of_features, _datum("two swapped", zo2_left_out, "103, 105", "105, 103")),
        ),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-compressed-transfers",
        paper="zo2",
        where=("App. G.1", "Table 5"),
        quotation="lower-bit compression formats consistently yield higher throughput. ... no significant difference in throughput between the 16-bit formats ... exceptions are observed, such as with the OPT-1.3B model",
        statement="From OPT-2.7B on 16 bits are faster than none and 8 than 16, fp16 and bf16 are within 0.25 %, and with OPT-1.3B no compression is the fastest.",
        hypotheses="printed figures, AMP in fp16; the exception that the appendix names included",
        checks=(printed(check_compression, _datum("a slower fp8", zo2_compressed, "951", "921")),),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-parity-by-batch-and-length",
        paper="zo2",
        where=("App. G.2", "Table 6", "Table 7"),
        quotation="ZO2 maintains throughput equivalency with MeZO across all model sizes ... increasing the sequence length does not compromise the throughput of ZO2, maintaining parity with the MeZO model",
        statement="ZO2 is within 4 % of MeZO in every row, and within 1 % at a batch size of 8 and at a length of 8192.",
        hypotheses="printed figures; parity with MeZO, not between lengths",
        checks=(printed(check_parity, _datum("a slower run", zo2_settings, "2348", "2248")),),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="distzo2-unified-leads-table-1",
        paper="distzo2",
        where=("Sec. 7.2", "Table 1"),
        quotation="The combination of PertP and DDP (ZO2+PertP+DDP) delivers the highest throughput across all configurations.",
        statement="In every row of table 1 four GPUs in 2D have the highest throughput, 3.07 to 3.49 times ZO2's.",
        hypotheses="printed figures at a sequence length of 2048; table 7 has others (distzo2-unified-is-not-always-fastest)",
        checks=(printed(check_unified_is_highest, _datum("a slower run", distzo2_main, "1370", "870")),),
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="distzo2-keeps-up-with-mezo",
        paper="distzo2",
        where=("Sec. 7.3", "Table 3"),
        quotation="applying PertP or DDP allows ZO2 to maintain throughput comparable to MeZO across all model scales",
        statement="ZO2 loses at most 4.1 % against MeZO behind the same parallelism (OPT-6.7B, DDP, batch size 2: 5391 against 5622 tokens/s).",
        hypotheses=_TABLES,
        checks=(
            printed(check_comparable, _datum("a slower run", distzo2_pairs_of_methods, "37777", "36777")),
        ),
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="distzo2-gap-stays-small",
        paper="distzo2",
        where=("App. D.2", "Table 5"),
        quotation="Importantly, the performance gap between MeZO and ZO2 remains negligible throughout",
        statement="With DDP on one GPU and on two ZO2 is within 1 % of MeZO.",
        hypotheses=_TABLES,
        checks=(printed(check_gap, _datum("a slower run", distzo2_gap, "31585", "30585")),),
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="distzo2-accuracies-are-alike",
        paper="distzo2",
        where=("App. D.4", "Table 6"),
        quotation="As shown in Table 6, DistZO2 achieves identical precision rates to the baseline MeZO and ZO2 on all benchmarks",
        statement="All seven triples of table 6 are alike.",
        hypotheses=_TABLES,
        checks=(
            printed(
                partial(check_accuracies, "DistZO2"),
                _datum("another accuracy", accuracies, '"DistZO2": (91.4', '"DistZO2": (91.5'),
            ),
        ),
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="zoinfer-validation-examples",
        paper="zoinfer",
        where=("Sec. 4", "Table 3"),
        quotation="872 examples for final validation accuracy ... Final val. acc. 0.570, 0.590",
        statement="0.931 is 812 of 872, and 0.912 is 456 of 500; but no number of 872 examples makes 0.590 (514 make 0.589, 515 0.591). Of 500 it is 295.",
        hypotheses="accuracies are shares of examples, rounded to three places",
        checks=(
            reading("872 examples, as section 4 says of the long run", check_shares_of_872),
            reading(
                "500 examples behind table 3",
                check_shares_of_500,
                _datum("an odd last place", zoinfer_accuracies, "(0.590, 872)", "(0.591, 872)"),
            ),
        ),
        derivation="zoinfer-slots.md#figures",
    ),
)
