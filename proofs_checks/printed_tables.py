"""Averages, quotients, ranks and counts that papers state of whole tables, against the cells that the tables print.

A cell that two readings of the print disagree about is not used. Where a sentence is about all rows, one row that is otherwise refutes
it; where it is about an average, only the average is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from proofs_checks import printed_cells as cells
from proofs_checks.claims import Claim, corrected, counterexample, printed, reading
from proofs_checks.exact import at_most, equal, exceeds, is_true
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.zoinfer_statements import ratio_agrees

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


_TABLES = "printed figures, as they are rounded"

CLAIMS = (
    Claim(
        name="zo2-table-1-ratios",
        paper="zo2",
        where=("Table 1",),
        quotation="The values in parentheses (x) represent the ratio of each measurement compared to the baseline MeZO (first column) configuration.",
        statement="Of OPT-13B in fp16, 1326 and 1251 tokens/s over 266 are 4.98 and 4.70; 5.87 and 5.54 are printed.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_parentheses,
                cells.changed(
                    "the baseline that the ratios fit",
                    "ZO2_RATES",
                    "'fp32, OPT-13B': (266",
                    "'fp32, OPT-13B': (226",
                ),
            ),
        ),
        breaks="5.87 and 5.54 are quotients by 226.",
        consequence="Use the throughputs, not the ratios, to calibrate.",
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-ablation-trend",
        paper="zo2",
        where=("Sec. 6.3", "Table 3"),
        quotation="As the model size increases, the relative importance of the dynamic scheduler and efficient parameter updating grows more pronounced.",
        statement="Without the efficient update OPT-1.3B loses 20 % of its throughput, OPT-66B 10 % and OPT-175B 7 %; without overlap OPT-13B loses 59 % and OPT-175B 43 %: neither grows with the model.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_ablation_trend,
                cells.changed(
                    "a slower run without the update", "ZO2_RATES_WITHOUT", "8, 13, 14)", "8, 8, 14)"
                ),
            ),
        ),
        breaks="The trend is read from models up to 13B.",
        consequence="The largest models wait for transfers either way; see step-is-transfer-or-two-forwards.",
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="distzo2-unified-is-not-always-fastest",
        paper="distzo2",
        where=("App. D.3", "Table 7"),
        quotation="DistZO2 maintains strong relative performance across all sequence lengths, with the unified 2D strategy (ZO2+PertP+DDP) consistently achieving the highest throughput.",
        statement="At a length of 1024 two GPUs by perturbation alone are 1.5 times as fast as four in 2D for OPT-2.7B (15,110 against 10,231 tokens/s), and at 8192 DDP inside is the faster for OPT-1.3B.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_unified_is_not_highest,
                cells.changed("a faster unified run", "DISTZO2_RATES_BY_LENGTH", "10231", "20231"),
            ),
        ),
        breaks="The sentence describes lengths of 2048 and more.",
        consequence="Short sequences: more ranks may be slower; let the planner compare meshes.",
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="distzo2-inner-axis-is-not-always-faster",
        paper="distzo2",
        where=("Sec. 7.3", "Table 3"),
        quotation="Across all model sizes on 4 GPUs, the PertP(inner) + DDP(outer) strategy consistently achieves higher throughput across all BSs.",
        statement="OPT-2.7B at batch size 2 makes 20,837 tokens/s with DDP inside and 20,818 with PertP inside.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_inner_is_not_faster,
                cells.changed("the two swapped", "DISTZO2_RATES_BY_INNER", "20837, 20818", "20818, 20837"),
            ),
        ),
        breaks="One row is the other way round, by a part in a thousand.",
        consequence="Both orders make one estimate; the difference is where a machine's fast links are.",
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="distzo2-pairs-of-table-1",
        paper="distzo2",
        where=("Sec. 7.2", "Table 1"),
        quotation="ZO2+PertP achieves up to 2× speedup ... ZO2+PertP consistently achieves slightly higher throughput than ZO2+DDP.",
        statement="Speedups of pairs by perturbation are 1.84 to 1.98, and above those by data in every row.",
        hypotheses=_TABLES,
        checks=(printed(check_pairs, cells.changed("a faster pair", "DISTZO2_RATES", "885", "905")),),
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="sparq-accuracy-on-wic",
        paper="sparq",
        where=("Sec. 5", "Table 2"),
        quotation="SparQ with 4-bit quantization attains performance comparable to ZO-SGD and even outperforms AQ-SGD on the SST2 and WIC.",
        statement="On WIC AQ-SGD is the better on OPT-125M (53.9 against 53.4), OPT-1.3B (56.7 against 55.6), GPT2 (55.6 against 52.7) and Llama-1B (55.7 against 53.6); SparQ is on OPT-6.7B alone.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_wic,
                cells.changed("a better model", "SPARQ_WIC_ACCURACIES", "(55.6, 52.7)", "(52.6, 52.7)"),
            ),
        ),
        breaks="The sentence holds for SST-2.",
        consequence="None for what is sent; do not expect accuracy from the codec.",
        derivation="printed-figures.md#sparq",
    ),
    Claim(
        name="quzo-memory-of-the-abstract",
        paper="quzo",
        where=("Abstract",),
        quotation="QuZO incurs minimal overhead and reduces memory consumption by 2.94×–5.47× compared to quantized first-order methods during LLaMA-7B fine-tuning.",
        statement="Table 4 has LLaMA-2 7B at 11.66 GB against 8.15 GB on MultiRC, 1.43 times; 2.94 is the largest of it, and section 4.1 gives 5.47 for OPT-1.3B.",
        hypotheses=_TABLES,
        checks=(
            counterexample(
                check_memory_of_abstract,
                cells.changed("a larger first-order run", "QUZO_MEMORY", "11.66", "21.66"),
            ),
        ),
        breaks="The largest quotient of table 4 is taken for the least.",
        consequence="Expect 1.4 to 2.9 times for this model, depending on the task's length.",
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-memory-of-the-contributions",
        paper="quzo",
        where=("Sec. 1", "Table 4"),
        quotation="QuZO achieves much better accuracy than quantized first-order training while reducing the memory cost by 1.4×–2.94×.",
        statement="Table 4's quotients are 1.43 and 2.94.",
        hypotheses=_TABLES,
        checks=(
            printed(
                check_memory_of_contributions,
                cells.changed("a larger first-order run", "QUZO_MEMORY", "11.66", "21.66"),
            ),
        ),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-runtimes",
        paper="quzo",
        where=("App. C.2", "Table 15"),
        quotation="approximately 1.5× speedup over MeZO and 16× speedup over FO ... QuZO reduces GPU-hour consumption by roughly 2× compared to FO (4-bit), and about 4× compared to FO (full-precision)",
        statement="The quotients of table 15 are 1.50 and 16.1, and 2.0 and 4.0 in GPU-hours at 32 steps for one.",
        hypotheses="printed figures; 32 times as many steps, as the paper says that MeZO may need",
        checks=(
            printed(
                check_seconds,
                cells.changed("one GPU for eight", "QUZO_STEP_GPUS", "'FO 4-bit': 8", "'FO 4-bit': 1"),
            ),
        ),
        derivation="printed-figures.md#quzo",
    ),
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
                cells.changed("a better first-order run", "SPARQ_ACCURACIES", "(91.7, 92.3)", "(92.7, 92.3)"),
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
                cells.changed("a larger first-order run", "SPARQ_MEMORY", "(15, 6)", "(25, 6)"),
                cells.changed("a little more of it", "SPARQ_MEMORY", "(76, 26)", "(79, 26)"),
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
                cells.changed("a dearer run", "SPARQ_VOLUMES", "(83, 31, 9)", "(83, 31, 32)"),
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
        checks=(
            printed(
                check_fewer_bits,
                cells.changed("two swapped", "SPARQ_VOLUMES_BY_BITS", "1.2, 2.32", "2.32, 1.2"),
            ),
        ),
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
            corrected(
                check_drops_by_cells, cells.changed("another cell", "QUZO_REASONING_SCORES", "50.06", "51.06")
            ),
            counterexample(
                check_drops_as_printed,
                cells.changed("cells that average 68.6", "QUZO_REASONING_SCORES", "80.1, 50.4", "80.5, 50.4"),
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
        checks=(
            printed(check_gains, cells.changed("a better AWQ", "QUZO_REASONING_SCORES", "49.3,", "50.4,")),
        ),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-lora-scores",
        paper="quzo",
        where=("Sec. 4.1", "Table 1"),
        quotation="For the Mistral-7B-v0.3 model, QuZO delivers the best performance on 3 out of 4 tasks, improving over FO by 3.05 on SQuAD and 2.9 on MultiRC. ... QuZO again consistently outperforms both FO and MeZO",
        statement="So it is: best on MultiRC, SQuAD and DROP at 8 bits, on all four at 4, with those differences.",
        hypotheses=_TABLES,
        checks=(
            printed(
                check_lora, cells.changed("another first-order run", "QUZO_LORA_SCORES", "84.03", "84.33")
            ),
        ),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-full-tuning-scores",
        paper="quzo",
        where=("Sec. 4.2", "Table 3"),
        quotation="QuZO outperforms its truly quantized FO counterparts on all multichoice and generation tasks under FP W8A8 ... in 4 out of 7 tasks [INT W8A8] ... the best results in 4 out of 7 tasks [W4A8]",
        statement="Under FP W8A8 QuZO is above FO on COPA, ReCoRD, SQuAD and DROP; under INT W8A8 and W4A8 it is best on four of seven.",
        hypotheses="printed figures; multiple choice is COPA and ReCoRD, generation SQuAD and DROP, as appendix A has it",
        checks=(
            printed(
                check_full_tuning, cells.changed("a better LLM-FP4", "QUZO_FULL_SCORES", "24.99", "25.99")
            ),
        ),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-opt-scores",
        paper="quzo",
        where=("App. A.1", "Table 9"),
        quotation="our QuZO method outperforms quantization methods such as QLLM and SmoothQuant in 8 out of 11 tasks under the INT W8A8 quantization",
        statement="QuZO is above both on eight tasks, and draws on WSC.",
        hypotheses=_TABLES,
        checks=(printed(check_opt, cells.changed("a lower score", "QUZO_OPT_SCORES", "55.61", "55.51")),),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-hybrid-gains",
        paper="quzo",
        where=("App. B.2", "Table 11"),
        quotation="QuZO can boost around 1 to 2% average performance across these 11 tasks in both W4A8 and W8A8 quantization.",
        statement="The averages agree with their cells; hybrid formats gain 1.0 points at W4A8 and 1.9 at W8A8.",
        hypotheses=_TABLES,
        checks=(
            printed(check_hybrid, cells.changed("a lower cell", "QUZO_HYBRID_SCORES", "36.58", "26.58")),
        ),
        derivation="printed-figures.md#quzo",
    ),
    Claim(
        name="quzo-does-not-always-outperform",
        paper="quzo",
        where=("App. D.5", "Table 20"),
        quotation="The results indicate that QuZO consistently outperforms MeZO and FO, particularly in SQuAD and DROP",
        statement="At 4 bits MeZO has 82.30 on ReCoRD, QuZO 82.10; in the other five columns QuZO is the highest.",
        hypotheses=_TABLES,
        checks=(
            counterexample(check_large, cells.changed("a lower score", "QUZO_LARGE_SCORES", "82.3", "82.0")),
        ),
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
            printed(
                check_two_roundings,
                cells.changed("a better Q-RGE1", "QUZO_ROUNDING_SCORES", "63.02", "64.02"),
            ),
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
            corrected(
                check_gain_of_queries, cells.changed("another cell", "QUZO_QUERIES_SCORES", "41.33", "41.23")
            ),
            counterexample(
                check_gain_is_not_as_printed,
                cells.changed("another cell", "QUZO_QUERIES_SCORES", "41.33", "41.23"),
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
                cells.changed("a larger first-order run", "QUZO_TASK_MEMORY", "(6.76, 4.82)", "(9.76, 4.82)"),
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
                check_direction_sizes,
                cells.changed("another size", "QUZO_DIRECTION_MEGABYTES", "8: 410", "8: 430"),
            ),
            counterexample(
                check_direction_size_as_printed,
                cells.changed("a sixteenth", "QUZO_DIRECTION_MEGABYTES", "2: 110", "2: 102"),
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
        checks=(printed(check_savings_grow, cells.changed("a larger run", "ZO2_MEMORY", "6180", "16180")),),
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
                check_every_row_is_slower,
                cells.changed("a faster run", "ZO2_RATES", "4229, 4220", "4229, 4239"),
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
                partial(check_accuracies, "ZO2"),
                cells.changed("another accuracy", "ACCURACIES", "'ZO2': (91.4", "'ZO2': (91.5"),
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
            printed(
                check_order_of_features,
                cells.changed("two swapped", "ZO2_RATES_WITHOUT", "103, 105", "105, 103"),
            ),
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
        checks=(
            printed(check_compression, cells.changed("a slower fp8", "ZO2_RATES_COMPRESSED", "951", "921")),
        ),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="zo2-parity-by-batch-and-length",
        paper="zo2",
        where=("App. G.2", "Table 6", "Table 7"),
        quotation="ZO2 maintains throughput equivalency with MeZO across all model sizes ... increasing the sequence length does not compromise the throughput of ZO2, maintaining parity with the MeZO model",
        statement="ZO2 is within 4 % of MeZO in every row, and within 1 % at a batch size of 8 and at a length of 8192.",
        hypotheses="printed figures; parity with MeZO, not between lengths",
        checks=(printed(check_parity, cells.changed("a slower run", "ZO2_RATES_BY_SHAPE", "2348", "2248")),),
        derivation="printed-figures.md#zo2",
    ),
    Claim(
        name="distzo2-unified-leads-table-1",
        paper="distzo2",
        where=("Sec. 7.2", "Table 1"),
        quotation="The combination of PertP and DDP (ZO2+PertP+DDP) delivers the highest throughput across all configurations.",
        statement="In every row of table 1 four GPUs in 2D have the highest throughput, 3.07 to 3.49 times ZO2's.",
        hypotheses="printed figures at a sequence length of 2048; table 7 has others (distzo2-unified-is-not-always-fastest)",
        checks=(
            printed(check_unified_is_highest, cells.changed("a slower run", "DISTZO2_RATES", "1370", "870")),
        ),
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
            printed(
                check_comparable, cells.changed("a slower run", "DISTZO2_RATES_BESIDE_MEZO", "37777", "36777")
            ),
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
        checks=(
            printed(check_gap, cells.changed("a slower run", "DISTZO2_RATES_WITH_DDP", "31585", "30585")),
        ),
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
                cells.changed("another accuracy", "ACCURACIES", "'DistZO2': (91.4", "'DistZO2': (91.5"),
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
                cells.changed("an odd last place", "ZOINFER_ACCURACIES", "(0.59, 872)", "(0.591, 872)"),
            ),
        ),
        derivation="zoinfer-slots.md#figures",
    ),
)
