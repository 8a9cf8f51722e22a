"""Ranges, quotients and explanations that papers add to their tables, against the cells, and against what follows from the method."""

from __future__ import annotations

import math

from costmodel.formats.roundings import RoundedDirection
from costmodel.models.configs import read_model_spec, shipped_config
from proofs_checks.claims import Checks, conditioned, corrected, counterexample, printed
from proofs_checks.exact import equal, exceeds, is_true
from proofs_checks.mutation import Mutant
from proofs_checks.oracles.statements import exchange_share
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.printed import cells
from proofs_checks.quzo.statements import enumerated_moments

# -- ZO2 ------------------------------------------------------------------------------------------------------------


def check_half_precision_fits(_context: Context) -> Outcome:
    """Ask whether OPT-175B's memory in fp16 rounds to 18 GB."""
    (used,) = cells.ZO2_175B_MEMORY["fp16"]
    return is_true(round(used / 1000) == 18, what=f"{used} MB")


def check_full_precision_does_not(_context: Context) -> Outcome:
    """Compare OPT-175B's memory in fp32 with 18 GB."""
    (used,) = cells.ZO2_175B_MEMORY["fp32"]
    return exceeds(used / 1000, 18.5, what="GB", factor=1.8)


def check_shapes(_context: Context) -> Outcome:
    """Compare printed layers, heads and widths with the models' own configurations, and parameters with the models' names."""
    parts = {}
    for name, shape in cells.ZO2_SHAPES.items():
        config = shipped_config(name.lower())
        own = [config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
        parts[name] = equal(shape, own, what="layers, heads, width", tolerance=0.0)
        billions = read_model_spec(name.lower()).num_parameters / 1e9
        stated = float(name.removeprefix("OPT-").removesuffix("B"))
        parts[f"{name}, parameters"] = equal(billions, stated, what="billions", tolerance=0.025)
    return everything_holds(parts)


def check_cut_off(_context: Context) -> Outcome:
    """Compare the ratios printed in table 8 with quotients of its cells, cut off after two places."""
    return everything_holds(
        {
            f"{name}, {quantity}": equal(
                cells.ZO2_QWEN_RATIOS[quantity][name], [math.floor(100 * own / base) / 100], what=f"{own}/{base}"
            )
            for quantity, rows in cells.ZO2_QWEN.items()
            for name, (base, own) in rows.items()
        }
    )  # fmt: skip


def check_not_rounded(_context: Context) -> Outcome:
    """Show ratios of table 8 to which no quotient of what its cells round from rounds."""
    parts = {}
    for quantity, name in (
        ("memory", "Qwen3-1.7B"),
        ("throughput", "Qwen3-1.7B"),
        ("throughput", "Qwen3-32B"),
    ):
        base, own = cells.ZO2_QWEN[quantity][name]
        (said,) = cells.ZO2_QWEN_RATIOS[quantity][name]
        parts[f"{name}, {quantity}"] = exceeds(
            (own - 0.5) / (base + 0.5),
            said + 0.005,
            what=f"least quotient against the most that rounds to {said}",
        )
    return everything_holds(parts)  # fmt: skip


def check_drop_is_not_slight(_context: Context) -> Outcome:
    """Compare what ZO2 loses of MeZO's throughput on Qwen3 with what it loses on OPT, at most."""
    opt = max(1 - own / base for base, own in cells.ZO2_RATES.values())
    return everything_holds(
        {
            name: exceeds(1 - own / base, opt, what="part of the throughput lost, against the most of table 1", factor=3)
            for name, (base, own) in cells.ZO2_QWEN["throughput"].items()
        }
    )  # fmt: skip


# -- DistZO2 --------------------------------------------------------------------------------------------------------


def check_more_than_four_lanes(_context: Context) -> Outcome:
    """Compare printed speedups of four ranks that copy a quarter each with what equation 3 allows: less than 4."""
    # t/(t/n + (n - 1)/n·bytes/NVLink) with t = bytes/PCIe.
    allowed = max(4 / (1 + exchange_share(4, quotient)) for quotient in (10.0, 100.0, 1e6))
    parts = {"equation 3": exceeds(4.0, allowed, what="4 against n/(1 + (n - 1)B_PCIe/B_NVLink)")}
    rows = cells.DISTZO2_SLICES
    for name in ("OPT-1.3B, upload_rate", "OPT-1.3B, offload_rate", "OPT-13B, offload_rate"):
        plain, sliced = rows[name]
        parts[name] = exceeds(
            (sliced - 0.005) / (plain + 0.005), 4.0, what=f"{sliced}/{plain}, the least it rounds from"
        )
    most = max(sliced / plain for plain, sliced in rows.values())
    parts["up to 4.6"] = is_true(abs(most - 4.6) < 0.05, what=f"largest quotient of the cells: {most:.3f}")
    up = max(sliced / plain for name, (plain, sliced) in rows.items() if "upload" in name)
    parts["of uploads"] = exceeds(4.55, up, what="4.55 against the largest quotient of uploads")
    return everything_holds(parts)


def check_strategies_differ(_context: Context) -> Outcome:
    """Compare data parallelism over perturbation parallelism of Qwen3 with the same quotient of OPT."""
    opt = min(data / pair for _, pair, data, _ in cells.DISTZO2_RATES.values())
    return everything_holds(
        {
            name: exceeds(opt, data / pair, what="least of OPT against DDP over PertP", factor=2.5)
            for name, (pair, data, _) in cells.DISTZO2_QWEN_RATES.items()
        }
    )


def check_both_are_faster(_context: Context) -> Outcome:
    """Compare both axes on four GPUs with perturbation on two, model by model."""
    return everything_holds(
        {
            name: exceeds(both / pair, 1.0, what="four GPUs over two", factor=1.4)
            for name, (pair, _, both) in cells.DISTZO2_QWEN_RATES.items()
        }
    )


# -- SparQ ----------------------------------------------------------------------------------------------------------


def _saved(name: str, first: float = 0.0, own: float = 0.0) -> float:
    """Return the part of FO-SGD's memory that SparQ saves, each figure off by a part of its last place."""
    base, needed = cells.SPARQ_MEMORY_BY_TASK[name]
    return 1 - (needed + own) / (base + first)


def check_savings_in_between(_context: Context) -> Outcome:
    """Ask whether savings of all rows but two can be from 30 to 70 %, as far as whole GB tell."""
    return everything_holds(
        {
            name: is_true(
                _saved(name, 0.5, -0.5) >= 0.3 and _saved(name, -0.5, 0.5) <= 0.7,
                what=f"{100 * _saved(name):.0f} %",
            )
            for name in cells.SPARQ_MEMORY_BY_TASK
            if name not in _SAVES_MORE
        }
    )


_SAVES_MORE = ("OPT-1.3B, RTE", "OPT-6.7B, RTE")


def check_savings_beyond(_context: Context) -> Outcome:
    """Show rows that save more than 70 %, whatever was rounded."""
    return everything_holds(
        {name: exceeds(_saved(name, -0.5, 0.5), 0.7, what="part saved, at least") for name in _SAVES_MORE}
    )


# -- QuZO -----------------------------------------------------------------------------------------------------------

_NINE = (0, 1, 2, 3, 6, 7, 8, 9, 10)
"""Places of the nine tasks of table 10 among the eleven of table 11."""


def _beside_activations(bits: str) -> tuple[list[float], list[float]]:
    """Return scores with quantized weights alone, and with activations in 8 bits beside them."""
    scores, _ = cells.QUZO_HYBRID_SCORES[f"INT {bits}A8"]
    return list(cells.QUZO_WEIGHT_ONLY_SCORES[f"INT {bits}"]), [scores[place] for place in _NINE]


def check_weight_only_on_average(_context: Context) -> Outcome:
    """Compare averages over nine tasks with quantized weights alone and with quantized activations."""
    parts = {}
    for bits, gained in (("W4", 1.0), ("W8", 1.0)):
        alone, both = _beside_activations(bits)
        parts[bits] = exceeds((sum(alone) - sum(both)) / 9, gained, what="points on average")
    return everything_holds(parts)


def check_weight_only_in_cells(_context: Context) -> Outcome:
    """Show tasks on which quantizing activations as well scores higher."""
    parts = {}
    for bits, task in (("W4", 2), ("W4", 3), ("W4", 4), ("W8", 0), ("W8", 3)):
        alone, both = _beside_activations(bits)
        parts[f"{bits}, task {task}"] = exceeds(both[task], alone[task], what="both against weights alone")
    return everything_holds(parts)


def check_low_bit_directions(_context: Context) -> Outcome:
    """Compare I-BERT's loss of accuracy with 1 point, and RoBERTa's best number of bits with 2."""
    ibert, roberta = (cells.QUZO_DIRECTION_SCORES[name] for name in ("I-BERT", "RoBERTa-Large"))
    return everything_holds(
        {
            "I-BERT": exceeds(1.0, ibert[0] - min(ibert), what="1 point against the largest drop"),
            "RoBERTa-Large": exceeds(roberta[2], max(roberta[:2]), what="2 bits against 8 and 4"),
        }
    )


def check_sparsity(_context: Context) -> Outcome:
    """Compare scores at 50 and 80 % zeros with those at none."""
    rows = cells.QUZO_SPARSITY_SCORES
    return everything_holds(
        {
            "50 %": is_true(all(half >= none for half, none in zip(rows[50], rows[0], strict=True)), what=f"{rows[50]}"),
            "80 %, DROP": exceeds(rows[0][2] - rows[80][2], 10.0, what="points lost"),
            "80 %, on average": exceeds(sum(rows[0]), sum(rows[80]), what="sums"),
        }
    )  # fmt: skip


def check_one_point_scores(_context: Context) -> Outcome:
    """Compare scores of one-point estimates with QuZO's, task by task."""
    rows = cells.QUZO_ONE_POINT_SCORES
    return everything_holds(
        {
            str(task): exceeds(own, other, what="QuZO against one point")
            for task, (other, own) in enumerate(zip(rows["one point"], rows["QuZO"], strict=True))
        }
    )


def check_large_model_scores(_context: Context) -> Outcome:
    """Compare QuZO's scores of LLaMA-70B with first-order ones."""
    rows = cells.QUZO_70B_SCORES
    return everything_holds(
        {
            name: exceeds(rows["QuZO"][task], rows["FO"][task], what="QuZO against FO")
            for task, name in enumerate(("SQuAD", "DROP"))
        }
    )


def check_bias_explains_nothing(_context: Context) -> Outcome:
    """Compare what one rounding used twice changes in mean and square of an estimate, 8 bits, with the points that it is said to cost.

    Notes
    -----
    The mean is ``E[Q²]`` of the gradient, so that steps of learning rate η are steps of ``vη``: along a direction of curvature 1 they are
    ``e^{-t}`` and ``e^{-vt}`` of the start, which are never farther apart than ``|v - 1|/e``.
    """
    (once, twice), parts = cells.QUZO_ROUNDING_SCORES["8 bits"], {}
    own = RoundedDirection("gaussian", 8)
    squares = enumerated_moments(own)[0]
    parts["E[Q²] of what runs"] = equal(own.moments.second, squares, what="moment", tolerance=1e-7)
    off = abs(squares - 1)
    parts["mean"] = exceeds(5e-4, off, what="5e-4 against |E[Q²] - 1|")
    parts["square"] = equal(
        own.moments.cross_fourth / own.moments.fourth, 1.0, what="E[Q₁²Q₂²]/E[Q⁴]", tolerance=1e-3
    )
    apart = max(abs(math.exp(-t / 100) - math.exp(-squares * t / 100)) for t in range(1000))
    parts["runs"] = exceeds(
        1e-4, apart, what="1e-4 of the distance to the minimum against the most between both"
    )
    parts["points"] = exceeds(twice[1] - once[1], 13.0, what="points on SQuAD between Q-RGE2 and Q-RGE1")
    return everything_holds(parts)  # fmt: skip


CHECKS: Checks = {
    "zo2-175b-on-18-gb": (
        conditioned(
            check_half_precision_fits,
            cells.changed("half a GB more", "ZO2_175B_MEMORY", "18039", "18539"),
        ),
        counterexample(
            check_full_precision_does_not,
            cells.changed("fp32 as small as fp16", "ZO2_175B_MEMORY", "34015", "18015"),
        ),
    ),
    "zo2-shapes-of-opt": printed(
        check_shapes,
        cells.changed("a layer more", "ZO2_SHAPES", "(48, 56, 7168)", "(49, 56, 7168)"),
        cells.changed("a head fewer", "ZO2_SHAPES", "(64, 72, 9216)", "(64, 71, 9216)"),
    ),
    "zo2-table-8-ratios": (
        corrected(check_cut_off, cells.changed("a rounded ratio", "ZO2_QWEN_RATIOS", "0.92", "0.93")),
        counterexample(check_not_rounded, cells.changed("rounded ratios", "ZO2_QWEN_RATIOS", "0.74", "0.75")),
    ),
    "zo2-qwen3-drop-is-not-slight": counterexample(
        check_drop_is_not_slight,
        cells.changed("a faster run", "ZO2_QWEN", "8320, 6873", "8320, 7873"),
    ),
    "distzo2-slices-beyond-four-lanes": counterexample(
        check_more_than_four_lanes,
        cells.changed("a slower offload", "DISTZO2_SLICES", "1.79, 8.32", "1.79, 7.12"),
        Mutant(
            "an exchange that is free beyond n",
            "proofs_checks.oracles.statements:exchange_share",
            "(num_ranks - 1)",
            "(1 - num_ranks)",
        ),
    ),
    "distzo2-qwen3-by-data-is-slow": (
        counterexample(
            check_strategies_differ,
            cells.changed("a pair by data as on OPT", "DISTZO2_QWEN_RATES", "8482", "24482"),
        ),
        counterexample(
            check_both_are_faster,
            cells.changed("four GPUs as fast as two", "DISTZO2_QWEN_RATES", "10628", "6628"),
        ),
    ),
    "sparq-memory-by-task": (
        conditioned(
            check_savings_in_between,
            cells.changed(
                "a row that saves a fifth",
                "SPARQ_MEMORY_BY_TASK",
                "'OPT-1.3B, SST-2': (15, 6)",
                "'OPT-1.3B, SST-2': (15, 12)",
            ),
        ),
        counterexample(
            check_savings_beyond,
            cells.changed(
                "a row within the range",
                "SPARQ_MEMORY_BY_TASK",
                "'OPT-6.7B, RTE': (202, 29)",
                "'OPT-6.7B, RTE': (202, 92)",
            ),
        ),
    ),
    "quzo-weight-only-scores": (
        conditioned(
            check_weight_only_on_average,
            cells.changed("a lower score", "QUZO_WEIGHT_ONLY_SCORES", "82.78, 37.31", "82.78, 27.31"),
        ),
        counterexample(
            check_weight_only_in_cells,
            cells.changed("a higher score", "QUZO_WEIGHT_ONLY_SCORES", "60.71, 65.5,", "62.71, 65.5,"),
        ),
    ),
    "quzo-low-bit-directions-score": printed(
        check_low_bit_directions,
        cells.changed("a drop of a point", "QUZO_DIRECTION_SCORES", "91.89", "91.69"),
        cells.changed("2 bits behind 8", "QUZO_DIRECTION_SCORES", "93.07", "92.07"),
    ),
    "quzo-sparsity-scores": printed(
        check_sparsity,
        cells.changed("a task that loses at 50 %", "QUZO_SPARSITY_SCORES", "81.21", "80.21"),
        cells.changed("DROP as at none", "QUZO_SPARSITY_SCORES", "25.99", "35.99"),
    ),
    "quzo-one-point-scores": printed(
        check_one_point_scores,
        cells.changed("a task as good", "QUZO_ONE_POINT_SCORES", "89.96", "91.96"),
    ),
    "quzo-70b-scores": printed(
        check_large_model_scores, cells.changed("a task behind", "QUZO_70B_SCORES", "58.11", "50.11")
    ),
    "quzo-bias-explains-no-points": counterexample(
        check_bias_explains_nothing,
        Mutant(
            "a second moment that forgets the tails",
            "costmodel.formats.roundings:moments_of",
            "tail, _, _ = between(levels[-1], math.inf)",
            "tail = 0.0",
        ),
        cells.changed("one score for both", "QUZO_ROUNDING_SCORES", "64.23", "78.19"),
    ),
}
