"""What papers say of their own tables, held against the figures that the tables print."""

from __future__ import annotations

from collections.abc import Mapping

from proofs_checks.claims import Claim, counterexample, printed
from proofs_checks.exact import at_most, exceeds, is_true
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.zoinfer_statements import ratio_agrees


def zo2_throughputs() -> Mapping[tuple[str, str], tuple[float, float]]:
    """Return tokens/s and the ratio printed beside it, of OPT-13B in ZO2's table 1; MeZO in fp32 is the baseline."""
    return {
        ("MeZO", "fp32"): (266, 1.0),
        ("ZO2", "fp32"): (259, 0.97),
        ("MeZO", "fp16"): (1326, 5.87),
        ("ZO2", "fp16"): (1251, 5.54),
    }


def check_parentheses(_context: Context) -> Outcome:
    """Compare printed ratios of OPT-13B with quotients of the printed throughputs."""
    figures = zo2_throughputs()
    base = (figures["MeZO", "fp32"][0], 0.5)
    agree = {key: ratio_agrees((value, 0.5), base, (said, 0.005)) for key, (value, said) in figures.items()}
    parts = {
        f"{method}, {precision}": is_true(
            agree[method, precision] == (precision == "fp32"),
            what=f"{figures[method, precision][0]}/266 {'is' if precision == 'fp32' else 'is not'} {figures[method, precision][1]}",
        )
        for method, precision in figures
    }
    return everything_holds(parts)


def zo2_ablation() -> Mapping[str, tuple[float, float, float]]:
    """Return tokens/s without overlap, without the efficient update, and with all, by model (ZO2's table 3)."""
    return {
        "OPT-1.3B": (1109, 1567, 1955),
        "OPT-2.7B": (573, 849, 1086),
        "OPT-13B": (105, 198, 259),
        "OPT-66B": (22, 36, 40),
        "OPT-175B": (8, 13, 14),
    }


def check_ablation_trend(_context: Context) -> Outcome:
    """Compare what leaving out the efficient update and the overlap costs the smallest and the largest models."""
    rows = zo2_ablation()
    lost = {
        name: (1 - overlap / whole, 1 - update / whole) for name, (overlap, update, whole) in rows.items()
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


def distzo2_by_length() -> Mapping[tuple[str, int], Mapping[str, float]]:
    """Return tokens/s of DistZO2's table 7 at two sequence lengths."""
    return {
        ("OPT-2.7B", 1024): {"PertP": 15110, "DDP": 12399, "DDP+PertP": 11070, "PertP+DDP": 10231},
        ("OPT-30B", 1024): {"PertP": 1703, "DDP": 1344, "DDP+PertP": 1119, "PertP+DDP": 1239},
        ("OPT-1.3B", 8192): {"PertP": 31948, "DDP": 31236, "DDP+PertP": 61766, "PertP+DDP": 51007},
    }


def check_unified_is_not_highest(_context: Context) -> Outcome:
    """Show models and lengths at which the unified strategy is not the fastest of its table."""
    return everything_holds(
        {
            f"{model}, {length}": exceeds(
                max(rates.values()), rates["PertP+DDP"], what="fastest against PertP+DDP", factor=1.1
            )
            for (model, length), rates in distzo2_by_length().items()
        }
    )


def distzo2_inner() -> tuple[float, float]:
    """Return tokens/s of OPT-2.7B at batch size 2 with DDP inside and with PertP inside (DistZO2's table 3)."""
    return 20837, 20818


def check_inner_is_not_faster(_context: Context) -> Outcome:
    """Show a row in which DDP inside is the faster."""
    return exceeds(*distzo2_inner(), what="OPT-2.7B, batch size 2: DDP inside against PertP inside")


def distzo2_pairs() -> Mapping[str, tuple[float, float, float]]:
    """Return tokens/s of ZO2, of a pair by perturbation and of a pair by data (DistZO2's table 1, fp16)."""
    return {
        "OPT-1.3B": (18625, 34225, 31585),
        "OPT-2.7B": (9582, 17720, 16106),
        "OPT-6.7B": (4133, 7653, 7062),
        "OPT-30B": (976, 1820, 1661),
        "OPT-66B": (446, 885, 764),
    }


def check_pairs(_context: Context) -> Outcome:
    """Compare speedups of table 1 with 2, and both kinds of pairs with each other."""
    parts = {}
    for name, (alone, perturbation, data) in distzo2_pairs().items():
        parts[name] = at_most(perturbation / alone, 2.0, what="speedup of a pair by perturbation")
        parts[f"{name}, against data"] = exceeds(perturbation, data, what="tokens/s")
    return everything_holds(parts)


def sparq_wic() -> Mapping[str, tuple[float, float]]:
    """Return accuracies of AQ-SGD and SparQ on WIC (SparQ's table 2)."""
    return {
        "OPT-125M": (53.9, 53.4),
        "OPT-1.3B": (56.7, 55.6),
        "OPT-6.7B": (56.8, 57.8),
        "GPT2": (55.6, 52.7),
    }


def check_wic(_context: Context) -> Outcome:
    """Count models for which SparQ does not outperform AQ-SGD on WIC."""
    worse = [name for name, (baseline, own) in sparq_wic().items() if own < baseline]
    return exceeds(len(worse), 2, what=f"models on which AQ-SGD is the better: {', '.join(worse)}")


def quzo_memory() -> Mapping[str, tuple[float, float]]:
    """Return GB of first-order training in 8 bits and of QuZO, LLaMA-2 7B (QuZO's table 4)."""
    return {"MultiRC": (11.66, 8.15), "SQuAD": (21.29, 7.24)}


def check_memory_of_abstract(_context: Context) -> Outcome:
    """Compare quotients of table 4 with the least that the abstract states."""
    first_order, own = quzo_memory()["MultiRC"]
    return exceeds(2.94, first_order / own, what="the abstract's least against MultiRC's quotient", factor=2)


def check_memory_of_contributions(_context: Context) -> Outcome:
    """Compare quotients of table 4 with the range among the contributions."""
    said = {"MultiRC": (1.4, 0.05), "SQuAD": (2.94, 0.005)}
    return everything_holds(
        {
            name: is_true(
                ratio_agrees((first, 0.005), (own, 0.005), said[name]),
                what=f"{first}/{own} is {said[name][0]}",
            )
            for name, (first, own) in quzo_memory().items()
        }
    )


def quzo_seconds() -> Mapping[str, tuple[float, int]]:
    """Return seconds a step and GPUs, OPT-30B on DROP (QuZO's table 15)."""
    return {"FO fp32": (45.61, 8), "FO 4-bit": (22.80, 8), "MeZO": (4.267, 2), "QuZO": (2.84, 1)}


def check_seconds(_context: Context) -> Outcome:
    """Compare printed speedups and GPU-hours with quotients, 32 times as many zeroth-order steps being taken."""
    rows = quzo_seconds()
    own = rows["QuZO"][0]
    hours = {name: seconds * gpus for name, (seconds, gpus) in rows.items()}
    return everything_holds(
        {
            "1.5× over MeZO": is_true(ratio_agrees((4.267, 0.0005), (own, 0.005), (1.5, 0.05)), what="4.267/2.84"),
            "16× over FO": is_true(ratio_agrees((45.61, 0.005), (own, 0.005), (16, 0.5)), what="45.61/2.84"),
            "4× in GPU-hours": is_true(abs(hours["FO fp32"] / (32 * hours["QuZO"]) - 4) < 0.1, what="45.61·8/(32·2.84)"),
            "2× in GPU-hours, 4 bits": is_true(
                abs(hours["FO 4-bit"] / (32 * hours["QuZO"]) - 2) < 0.1, what="22.80·8/(32·2.84)"
            ),
        }
    )  # fmt: skip


def _datum(name: str, function: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"proofs_checks.printed_figures:{function}", old, new)


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
                _datum("the baseline that the ratios fit", "zo2_throughputs", "(266, 1.0)", "(226, 1.0)"),
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
                _datum("a slower run without the update", "zo2_ablation", "(8, 13, 14)", "(8, 8, 14)"),
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
                _datum("a faster unified run", "distzo2_by_length", "10231", "20231"),
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
                _datum("the two swapped", "distzo2_inner", "20837, 20818", "20818, 20837"),
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
        checks=(printed(check_pairs, _datum("a faster pair", "distzo2_pairs", "885", "905")),),
        derivation="printed-figures.md#distzo2",
    ),
    Claim(
        name="sparq-accuracy-on-wic",
        paper="sparq",
        where=("Sec. 5", "Table 2"),
        quotation="SparQ with 4-bit quantization attains performance comparable to ZO-SGD and even outperforms AQ-SGD on the SST2 and WIC.",
        statement="On WIC AQ-SGD is the better on OPT-125M (53.9 against 53.4), OPT-1.3B (56.7 against 55.6) and GPT2 (55.6 against 52.7); SparQ is on OPT-6.7B alone of these.",
        hypotheses=_TABLES,
        checks=(
            counterexample(check_wic, _datum("a better model", "sparq_wic", "(55.6, 52.7)", "(52.6, 52.7)")),
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
                check_memory_of_abstract, _datum("a larger first-order run", "quzo_memory", "11.66", "21.66")
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
                _datum("a larger first-order run", "quzo_memory", "11.66", "21.66"),
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
            printed(check_seconds, _datum("one GPU for eight", "quzo_seconds", "(22.80, 8)", "(22.80, 1)")),
        ),
        derivation="printed-figures.md#quzo",
    ),
)
