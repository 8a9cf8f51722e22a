"""Averages, quotients, ranks and counts that papers state of whole tables, against the cells that the tables print.

A cell that two readings of the print disagree about is not used. Where a sentence is about all rows, one row that is otherwise refutes
it; where it is about an average, only the average is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from proofs_checks.claims import Checks, corrected, counterexample, printed, reading
from proofs_checks.exact import at_most, equal, exceeds, is_true
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.printed import cells
from proofs_checks.zoinfer.statements import ratio_agrees

# -- SparQ ----------------------------------------------------------------------------------------------------------


def check_wic(_context: Context) -> Outcome:
    """Count models for which SparQ does not outperform AQ-SGD on WIC."""
    worse = [name for name, (baseline, own) in cells.SPARQ_WIC_ACCURACIES.items() if own < baseline]
    return exceeds(len(worse), 3, what=f"models on which AQ-SGD is the better: {', '.join(worse)}")


def check_first_order_is_not_highest(_context: Context) -> Outcome:
    """Compare accuracies of FO-SGD with SparQ's, model by model: one is the other way round."""
    rows = cells.SPARQ_ACCURACIES
    parts = {"OPT-1.3B": exceeds(*reversed(rows["OPT-1.3B"]), what="SparQ against FO-SGD, %")}
    for name, (first_order, own) in rows.items():
        if name != "OPT-1.3B":
            parts[name] = exceeds(first_order, own, what="FO-SGD against SparQ, %")
    return everything_holds(parts)


def check_memory_is_not_threefold(_context: Context) -> Outcome:
    """Compare quotients of the printed memory with 3: as printed, and for OPT whatever was rounded away."""
    parts = {
        name: exceeds(3.0, first_order / own, what=f"3 against {first_order}/{own}")
        for name, (first_order, own) in cells.SPARQ_MEMORY.items()
    }
    for name in ("OPT-1.3B", "OPT-6.7B"):
        first_order, own = cells.SPARQ_MEMORY[name]
        parts[f"{name}, whatever was rounded"] = at_most(
            (first_order + 0.5) / (own - 0.5), 3.0, what="largest quotient that rounds to these"
        )
    return everything_holds(parts)


def check_communication(_context: Context) -> Outcome:
    """Compare what SparQ sends with what both first-order methods send: in every row, and on average."""
    rows = cells.SPARQ_VOLUMES
    parts = {
        name: exceeds(min(row[:2]), row[2], what="GB of the frugal first-order method against SparQ")
        for name, row in rows.items()
    }
    for column, name, least in ((1, "AQ-SGD", 0.5), (0, "FO-SGD", 0.7)):
        saved = sum(1 - row[2] / row[column] for row in rows.values()) / len(rows)
        parts[f"saved on average against {name}"] = exceeds(saved, least, what="part")
    return everything_holds(parts)


def check_fewer_bits(_context: Context) -> Outcome:
    """Compare what is sent at fewer bits with what is sent at more, row by row."""
    return everything_holds(
        {
            name: is_true(list(row) == sorted(set(row)), what=f"{row} GB at 1, 4 and 8 bits")
            for name, row in cells.SPARQ_VOLUMES_BY_BITS.items()
        }
    )


# -- QuZO -----------------------------------------------------------------------------------------------------------


def check_memory_of_abstract(_context: Context) -> Outcome:
    """Compare quotients of table 4's memory with the least that the abstract states."""
    first_order, own = cells.QUZO_MEMORY["MultiRC"]
    return exceeds(2.94, first_order / own, what="the abstract's least against MultiRC's quotient", factor=2)


def check_memory_of_contributions(_context: Context) -> Outcome:
    """Compare quotients of table 4's memory with the range that the list of contributions states."""
    said = {"MultiRC": (1.4, 0.05), "SQuAD": (2.94, 0.005)}
    return everything_holds(
        {
            name: is_true(
                ratio_agrees((first, 0.005), (own, 0.005), said[name]),
                what=f"{first}/{own} is {said[name][0]}",
            )
            for name, (first, own) in cells.QUZO_MEMORY.items()
        }
    )


def check_seconds(_context: Context) -> Outcome:
    """Compare printed speedups and GPU-hours with quotients, 32 times as many zeroth-order steps being taken."""
    seconds = {name: cell for name, (cell,) in cells.QUZO_STEP_SECONDS.items()}
    own = seconds["QuZO 4-bit"]
    hours = {name: taken * cells.QUZO_STEP_GPUS[name] for name, taken in seconds.items()}
    return everything_holds(
        {
            "1.5× over MeZO": is_true(ratio_agrees((4.267, 0.0005), (own, 0.005), (1.5, 0.05)), what="4.267/2.84"),
            "16× over FO": is_true(ratio_agrees((45.61, 0.005), (own, 0.005), (16, 0.5)), what="45.61/2.84"),
            "4× in GPU-hours": is_true(abs(hours["FO fp32"] / (32 * hours["QuZO 4-bit"]) - 4) < 0.1, what="45.61·8/(32·2.84)"),
            "2× in GPU-hours, 4 bits": is_true(
                abs(hours["FO 4-bit"] / (32 * hours["QuZO 4-bit"]) - 2) < 0.1, what="22.80·8/(32·2.84)"
            ),
        }
    )  # fmt: skip


def _average(name: str) -> float:
    scores, _ = cells.QUZO_REASONING_SCORES[name]
    return sum(scores) / len(scores)


def check_drops_by_cells(_context: Context) -> Outcome:
    """Compare drops against the averages of the cells: 0.07 and 0.12; and every other average with its cells."""
    parts = {
        "W8A8": equal(_average("FP16") - _average("QuZO W8A8"), 0.07, what="drop", tolerance=0.005 / 0.07),
        "W4A16": equal(
            _average("FP16") - _average("QuZO W4A16"), 0.116, what="drop", tolerance=0.001 / 0.116
        ),
    }
    for name, (_, said) in cells.QUZO_REASONING_SCORES.items():
        if name != "FP16":
            parts[name] = is_true(abs(_average(name) - said) < 0.051, what=f"{said} is {_average(name):.3f}")
    return everything_holds(parts)


def check_drops_as_printed(_context: Context) -> Outcome:
    """Show that the printed drops rest on an average of 68.6, and that the cells' is 68.51."""
    said = {name: average for name, (_, average) in cells.QUZO_REASONING_SCORES.items()}
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
    said = {name: average for name, (_, average) in cells.QUZO_REASONING_SCORES.items()}
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


def _wins(rows: Mapping[str, Sequence[float]]) -> list[int]:
    """Return on which tasks QuZO has the best score, alone."""
    own = rows["QuZO"]
    others = [row for name, row in rows.items() if name != "QuZO"]
    return [task for task, score in enumerate(own) if all(score > row[task] for row in others)]


def check_full_tuning(_context: Context) -> Outcome:
    """Count tasks on which QuZO has the best score of table 3."""
    rows = cells.QUZO_FULL_SCORES
    return everything_holds(
        {
            "FP W8A8: COPA, ReCoRD, SQuAD, DROP": is_true(
                set(_wins(rows["FP W8A8"])) >= {3, 4, 5, 6}, what="QuZO is above FO"
            ),
            "INT W8A8": equal(float(len(_wins(rows["INT W8A8"]))), 4.0, what="of 7 tasks"),
            "W4A8": equal(float(len(_wins(rows["W4A8"]))), 4.0, what="of 7 tasks"),
        }
    )


def check_opt(_context: Context) -> Outcome:
    """Count tasks of table 9 on which QuZO is above QLLM and SmoothQuant."""
    return equal(float(len(_wins(cells.QUZO_OPT_SCORES))), 8.0, what="of 11 tasks; one more is a draw")


def check_hybrid(_context: Context) -> Outcome:
    """Compare printed averages of table 11 with their cells, and gains of hybrid formats with 1 to 2 points."""
    rows = cells.QUZO_HYBRID_SCORES
    means = {name: sum(scores) / len(scores) for name, (scores, _) in rows.items()}
    parts = {
        name: is_true(abs(means[name] - said) < 0.0151, what=f"{said} is {means[name]:.3f}")
        for name, (_, said) in rows.items()
    }
    for bits in ("W4A8", "W8A8"):
        gain = means[f"INT/FP {bits}"] - means[f"INT {bits}"]
        parts[f"gain, {bits}"] = is_true(0.95 < gain < 2.05, what=f"{gain:.2f} points")
    return everything_holds(parts)  # fmt: skip


def check_large(_context: Context) -> Outcome:
    """Show the cell of table 20 in which MeZO is above QuZO; in the others it is not."""
    rows = cells.QUZO_LARGE_SCORES
    return everything_holds(
        {
            "4 bits, ReCoRD": exceeds(
                rows["4 bits"]["MeZO"][0], rows["4 bits"]["QuZO"][0], what="MeZO against QuZO"
            ),
            "4 bits, others": is_true(_wins(rows["4 bits"]) == [1, 2], what="QuZO is best on SQuAD and DROP"),
            "8 bits": equal(float(len(_wins(rows["8 bits"]))), 3.0, what="of 3 tasks"),
        }
    )


def check_two_roundings(_context: Context) -> Outcome:
    """Compare Q-RGE2 with Q-RGE1 cell by cell, and its gain on SQuAD with 10 points."""
    parts = {}
    for bits, (once, twice) in cells.QUZO_ROUNDING_SCORES.items():
        parts[bits] = is_true(all(b > a for a, b in zip(once, twice, strict=True)), what="above in all cells")
        parts[f"{bits}, SQuAD"] = exceeds(twice[1] - once[1], 10.0, what="points")
    return everything_holds(parts)


def check_gain_of_queries(_context: Context) -> Outcome:
    """Compare what ten queries bring with 3.7 points."""
    one, ten = cells.QUZO_QUERIES_SCORES
    return equal(round(ten - one, 1), 3.7, what="points, to one place")


def check_gain_is_not_as_printed(_context: Context) -> Outcome:
    """Show that neither the difference nor the quotient of the cells rounds to 3.6 %."""
    one, ten = cells.QUZO_QUERIES_SCORES
    return everything_holds(
        {
            "points": exceeds(ten - one, 3.65, what="41.33 - 37.61 against what rounds to 3.6"),
            "relative": exceeds(100 * (ten / one - 1), 3.65, what="% of 37.61", factor=2),
        }
    )


def check_memory_below_twofold(_context: Context) -> Outcome:
    """Show rows of table 14 in which QuZO takes more than half of a first-order method's memory."""
    rows = cells.QUZO_TASK_MEMORY
    below = ("OPT 1.3B, 8-bit, ReCoRD", "OPT 1.3B, 8-bit, DROP", "OPT 1.3B, 4-bit, ReCoRD", "LLaMa-2 7B, 8-bit, ReCoRD")  # fmt: skip
    return everything_holds(
        {name: exceeds(2.0, rows[name][0] / rows[name][1], what="2 against the quotient") for name in below}
    )


def check_lora(_context: Context) -> Outcome:
    """Count tasks of table 1 on which QuZO is best, and compare two gains with those stated."""
    rows = cells.QUZO_LORA_SCORES
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


def check_direction_sizes(_context: Context) -> Outcome:
    """Compare a direction's size at 8 and 2 bits with 1.63 GB/4 and 1.63 GB/16, and the saving with 4 and 16."""
    whole, said = cells.QUZO_DIRECTION_MEGABYTES
    return everything_holds(
        {
            "8 bits": equal(said[8], whole * 8 / 32, what="MB", tolerance=0.01),
            "2 bits": equal(whole * 2 / 32, 102, what="MB", tolerance=0.005),
            "4 to 16 times": equal([32 / 8, 32 / 2], [4.0, 16.0], what="smaller"),
        }
    )


def check_direction_size_as_printed(_context: Context) -> Outcome:
    """Show that no rounding of 1.63 GB makes a sixteenth of it 110 MB, in powers of 10 or of 2."""
    whole, said = cells.QUZO_DIRECTION_MEGABYTES
    largest = (whole + 5) / 1000 * 1024 / 16  # 1.635 GiB in MiB
    return exceeds(
        said[2] - 5, largest * 1.003, what="least that rounds to 110 against the most that 1.63 allows"
    )


# -- ZO2 ------------------------------------------------------------------------------------------------------------


def check_parentheses(_context: Context) -> Outcome:
    """Compare printed ratios of OPT-13B with quotients of the printed throughputs."""
    base = (cells.ZO2_RATES["fp32, OPT-13B"][0], 0.5)
    parts = {}
    for name, (value, said) in cells.ZO2_RATIOS.items():
        agrees = name.endswith("fp32")
        parts[name] = is_true(
            ratio_agrees((value, 0.5), base, (said, 0.005)) == agrees,
            what=f"{value}/266 {'is' if agrees else 'is not'} {said}",
        )
    return everything_holds(parts)


def check_ablation_trend(_context: Context) -> Outcome:
    """Compare what leaving out the efficient update and the overlap costs the smallest and the largest models."""
    rows = cells.ZO2_RATES_WITHOUT
    lost = {
        name: (1 - overlap / whole, 1 - update / whole) for name, (_, overlap, update, whole) in rows.items()
    }
    return everything_holds(
        {
            "efficient update, 1.3B against 175B": exceeds(
                lost["OPT-1.3B"][1], lost["OPT-175B"][1], what="part of the throughput lost", factor=2
            ),
            "efficient update, 1.3B against 66B": exceeds(
                lost["OPT-1.3B"][1], lost["OPT-66B"][1], what="part of the throughput lost"
            ),
            "overlap, 13B against 175B": exceeds(
                lost["OPT-13B"][0], lost["OPT-175B"][0], what="part of the throughput lost"
            ),
        }
    )


def check_savings_grow(_context: Context) -> Outcome:
    """Compare the part of MeZO's memory that ZO2 needs from one model to the next larger."""
    parts = {}
    for precision in ("fp32", "fp16"):
        shares = [own / base for name, (base, own) in cells.ZO2_MEMORY.items() if name.startswith(precision)]
        parts[precision] = is_true(
            max(shares) < 1 and shares == sorted(shares, reverse=True),
            what=f"{[round(share, 2) for share in shares]} of MeZO's memory",
        )
    return everything_holds(parts)


def check_every_row_is_slower(_context: Context) -> Outcome:
    """Show that ZO2 is slower than MeZO in every row of both, by up to 6 %."""
    rows = cells.ZO2_RATES
    parts = {name: exceeds(base, own, what="MeZO's tokens/s") for name, (base, own) in rows.items()}
    lost = max(1 - own / base for base, own in rows.values())
    parts["at most"] = exceeds(lost, 0.05, what="part of the throughput lost, OPT-13B in fp16")
    return everything_holds(parts)


def check_accuracies(method: str, _context: Context) -> Outcome:
    """Compare a method's accuracies with MeZO's, task by task."""
    return equal(cells.ACCURACIES[method], cells.ACCURACIES["MeZO"], what=method, tolerance=0.0)


def check_order_of_features(_context: Context) -> Outcome:
    """Compare the order of what leaving out each of three features costs, model by model."""
    return everything_holds(
        {
            name: is_true(list(row) == sorted(set(row)), what=f"{row} tokens/s")
            for name, row in cells.ZO2_RATES_WITHOUT.items()
        }
    )


def check_compression(_context: Context) -> Outcome:
    """Compare throughputs of formats with each other: fewer bits are faster from 2.7B on, and not for 1.3B."""
    parts = {}
    for name, (plain, half, brain, eighth) in cells.ZO2_RATES_COMPRESSED.items():
        parts[f"{name}, two formats of 16 bits"] = at_most(abs(half - brain) / half, 0.0025, what="apart")
        parts[f"{name}, 8 bits against 16"] = exceeds(eighth, half, what="tokens/s")
        ordered = (plain, eighth) if name == "OPT-1.3B" else (half, plain)
        parts[f"{name}, 16 bits against none"] = exceeds(*ordered, what="tokens/s")
    return everything_holds(parts)


def check_parity(_context: Context) -> Outcome:
    """Compare what ZO2 loses against MeZO with 4 % in every row, and with 1 % at the largest batches and lengths."""
    parts = {}
    for name, (base, own) in cells.ZO2_RATES_BY_SHAPE.items():
        largest = "batch 8" in name or "8192" in name
        parts[name] = at_most(1 - own / base, 0.01 if largest else 0.04, what="part of the throughput lost")
    return everything_holds(parts)


# -- DistZO2 --------------------------------------------------------------------------------------------------------


def check_unified_is_not_highest(_context: Context) -> Outcome:
    """Show models and lengths at which the unified strategy is not the fastest of its table."""
    slow = ("OPT-2.7B, 1024", "OPT-30B, 1024", "OPT-1.3B, 8192")
    return everything_holds(
        {
            name: exceeds(max(rates), rates[-1], what="fastest against PertP+DDP", factor=1.1)
            for name, rates in cells.DISTZO2_RATES_BY_LENGTH.items()
            if name in slow
        }
    )


def check_inner_is_not_faster(_context: Context) -> Outcome:
    """Show a row in which DDP inside is the faster."""
    return exceeds(
        *cells.DISTZO2_RATES_BY_INNER["OPT-2.7B, 2"],
        what="OPT-2.7B, batch size 2: DDP inside against PertP inside",
    )


def check_pairs(_context: Context) -> Outcome:
    """Compare speedups of table 1 with 2, and both kinds of pairs with each other."""
    parts = {}
    for name, (alone, perturbation, data, _) in cells.DISTZO2_RATES.items():
        parts[name] = at_most(perturbation / alone, 2.0, what="speedup of a pair by perturbation")
        parts[f"{name}, against data"] = exceeds(perturbation, data, what="tokens/s")
    return everything_holds(parts)


def check_unified_is_highest(_context: Context) -> Outcome:
    """Compare 2D's throughput with the others' of table 1, and its speedup over ZO2 with 3."""
    parts = {}
    for name, row in cells.DISTZO2_RATES.items():
        parts[name] = exceeds(row[3], max(row[:3]), what="tokens/s of 2D")
        parts[f"{name}, over ZO2"] = exceeds(row[3] / row[0], 3.0, what="speedup")
    return everything_holds(parts)


def check_comparable(_context: Context) -> Outcome:
    """Compare what ZO2 loses against MeZO behind one parallelism with 4.2 %."""
    return everything_holds(
        {
            name: at_most(1 - own / base, 0.042, what="part of the throughput lost")
            for name, (base, own) in cells.DISTZO2_RATES_BESIDE_MEZO.items()
        }
    )


def check_gap(_context: Context) -> Outcome:
    """Compare how far ZO2 is from MeZO with 1 %, GPU count by GPU count."""
    return everything_holds(
        {
            name: at_most(abs(1 - own / base), 0.01, what="apart")
            for name, (base, own) in cells.DISTZO2_RATES_WITH_DDP.items()
        }
    )


# -- ZOinfer --------------------------------------------------------------------------------------------------------


def _is_share(accuracy: float, count: int) -> bool:
    """Return whether a whole number of examples makes that accuracy, to three places."""
    return any(round(right / count, 3) == accuracy for right in range(count + 1))


def check_shares_of_872(_context: Context) -> Outcome:
    """Ask whether every printed accuracy is a share of its examples, 872 for validation."""
    return everything_holds(
        {
            name: is_true(_is_share(accuracy, count), what=f"{accuracy} of {count}")
            for name, (accuracy, count) in cells.ZOINFER_ACCURACIES.items()
        }
    )


def check_shares_of_500(_context: Context) -> Outcome:
    """Ask whether every printed accuracy is a share of its examples, 500 for table 3's validation."""
    return everything_holds(
        {
            name: is_true(_is_share(accuracy, 500 if "table 3" in name else count), what=f"{accuracy}")
            for name, (accuracy, count) in cells.ZOINFER_ACCURACIES.items()
        }
    )


CHECKS: Checks = {
    "zo2-table-1-ratios": counterexample(
        check_parentheses,
        cells.changed(
            "the baseline that the ratios fit",
            "ZO2_RATES",
            "'fp32, OPT-13B': (266",
            "'fp32, OPT-13B': (226",
        ),
    ),
    "zo2-ablation-trend": counterexample(
        check_ablation_trend,
        cells.changed("a slower run without the update", "ZO2_RATES_WITHOUT", "8, 13, 14)", "8, 8, 14)"),
    ),
    "distzo2-unified-is-not-always-fastest": counterexample(
        check_unified_is_not_highest,
        cells.changed("a faster unified run", "DISTZO2_RATES_BY_LENGTH", "10231", "20231"),
    ),
    "distzo2-inner-axis-is-not-always-faster": counterexample(
        check_inner_is_not_faster,
        cells.changed("the two swapped", "DISTZO2_RATES_BY_INNER", "20837, 20818", "20818, 20837"),
    ),
    "distzo2-pairs-of-table-1": printed(
        check_pairs, cells.changed("a faster pair", "DISTZO2_RATES", "885", "905")
    ),
    "sparq-accuracy-on-wic": counterexample(
        check_wic,
        cells.changed("a better model", "SPARQ_WIC_ACCURACIES", "(55.6, 52.7)", "(52.6, 52.7)"),
    ),
    "quzo-memory-of-the-abstract": counterexample(
        check_memory_of_abstract,
        cells.changed("a larger first-order run", "QUZO_MEMORY", "11.66", "21.66"),
    ),
    "quzo-memory-of-the-contributions": printed(
        check_memory_of_contributions,
        cells.changed("a larger first-order run", "QUZO_MEMORY", "11.66", "21.66"),
    ),
    "quzo-runtimes": printed(
        check_seconds,
        cells.changed("one GPU for eight", "QUZO_STEP_GPUS", "'FO 4-bit': 8", "'FO 4-bit': 1"),
    ),
    "sparq-first-order-is-not-highest": counterexample(
        check_first_order_is_not_highest,
        cells.changed("a better first-order run", "SPARQ_ACCURACIES", "(91.7, 92.3)", "(92.7, 92.3)"),
    ),
    "sparq-memory-is-not-threefold": counterexample(
        check_memory_is_not_threefold,
        cells.changed("a larger first-order run", "SPARQ_MEMORY", "(15, 6)", "(25, 6)"),
        cells.changed("a little more of it", "SPARQ_MEMORY", "(76, 26)", "(79, 26)"),
    ),
    "sparq-communication-is-halved": printed(
        check_communication,
        cells.changed("a dearer run", "SPARQ_VOLUMES", "(83, 31, 9)", "(83, 31, 32)"),
    ),
    "sparq-fewer-bits-send-less": printed(
        check_fewer_bits,
        cells.changed("two swapped", "SPARQ_VOLUMES_BY_BITS", "1.2, 2.32", "2.32, 1.2"),
    ),
    "quzo-zero-shot-drops": (
        corrected(
            check_drops_by_cells, cells.changed("another cell", "QUZO_REASONING_SCORES", "50.06", "51.06")
        ),
        counterexample(
            check_drops_as_printed,
            cells.changed("cells that average 68.6", "QUZO_REASONING_SCORES", "80.1, 50.4", "80.5, 50.4"),
        ),
    ),
    "quzo-zero-shot-gains": printed(
        check_gains, cells.changed("a better AWQ", "QUZO_REASONING_SCORES", "49.3,", "50.4,")
    ),
    "quzo-lora-scores": printed(
        check_lora, cells.changed("another first-order run", "QUZO_LORA_SCORES", "84.03", "84.33")
    ),
    "quzo-full-tuning-scores": printed(
        check_full_tuning, cells.changed("a better LLM-FP4", "QUZO_FULL_SCORES", "24.99", "25.99")
    ),
    "quzo-opt-scores": printed(
        check_opt, cells.changed("a lower score", "QUZO_OPT_SCORES", "55.61", "55.51")
    ),
    "quzo-hybrid-gains": printed(
        check_hybrid, cells.changed("a lower cell", "QUZO_HYBRID_SCORES", "36.58", "26.58")
    ),
    "quzo-does-not-always-outperform": counterexample(
        check_large, cells.changed("a lower score", "QUZO_LARGE_SCORES", "82.3", "82.0")
    ),
    "quzo-two-roundings-score-higher": printed(
        check_two_roundings,
        cells.changed("a better Q-RGE1", "QUZO_ROUNDING_SCORES", "63.02", "64.02"),
    ),
    "quzo-gain-of-ten-queries": (
        corrected(
            check_gain_of_queries, cells.changed("another cell", "QUZO_QUERIES_SCORES", "41.33", "41.23")
        ),
        counterexample(
            check_gain_is_not_as_printed,
            cells.changed("another cell", "QUZO_QUERIES_SCORES", "41.33", "41.23"),
        ),
    ),
    "quzo-memory-below-twofold": counterexample(
        check_memory_below_twofold,
        cells.changed("a larger first-order run", "QUZO_TASK_MEMORY", "(6.76, 4.82)", "(9.76, 4.82)"),
    ),
    "quzo-size-of-a-rounded-direction": (
        corrected(
            check_direction_sizes,
            cells.changed("another size", "QUZO_DIRECTION_MEGABYTES", "8: 410", "8: 430"),
        ),
        counterexample(
            check_direction_size_as_printed,
            cells.changed("a sixteenth", "QUZO_DIRECTION_MEGABYTES", "2: 110", "2: 102"),
        ),
    ),
    "zo2-savings-grow-with-models": printed(
        check_savings_grow, cells.changed("a larger run", "ZO2_MEMORY", "6180", "16180")
    ),
    "zo2-takes-some-time": counterexample(
        check_every_row_is_slower,
        cells.changed("a faster run", "ZO2_RATES", "4229, 4220", "4229, 4239"),
    ),
    "zo2-accuracies-are-alike": printed(
        partial(check_accuracies, "ZO2"),
        cells.changed("another accuracy", "ACCURACIES", "'ZO2': (91.4", "'ZO2': (91.5"),
    ),
    "zo2-order-of-features": printed(
        check_order_of_features,
        cells.changed("two swapped", "ZO2_RATES_WITHOUT", "103, 105", "105, 103"),
    ),
    "zo2-compressed-transfers": printed(
        check_compression, cells.changed("a slower fp8", "ZO2_RATES_COMPRESSED", "951", "921")
    ),
    "zo2-parity-by-batch-and-length": printed(
        check_parity, cells.changed("a slower run", "ZO2_RATES_BY_SHAPE", "2348", "2248")
    ),
    "distzo2-unified-leads-table-1": printed(
        check_unified_is_highest, cells.changed("a slower run", "DISTZO2_RATES", "1370", "870")
    ),
    "distzo2-keeps-up-with-mezo": printed(
        check_comparable, cells.changed("a slower run", "DISTZO2_RATES_BESIDE_MEZO", "37777", "36777")
    ),
    "distzo2-gap-stays-small": printed(
        check_gap, cells.changed("a slower run", "DISTZO2_RATES_WITH_DDP", "31585", "30585")
    ),
    "distzo2-accuracies-are-alike": printed(
        partial(check_accuracies, "DistZO2"),
        cells.changed("another accuracy", "ACCURACIES", "'DistZO2': (91.4", "'DistZO2': (91.5"),
    ),
    "zoinfer-validation-examples": (
        reading("872 examples, as section 4 says of the long run", check_shares_of_872),
        reading(
            "500 examples behind table 3",
            check_shares_of_500,
            cells.changed("an odd last place", "ZOINFER_ACCURACIES", "(0.59, 872)", "(0.591, 872)"),
        ),
    ),
}
