"""A paper's tables made again: published, predicted, error and verdict per cell, plots, conventions, audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from studies.against_print.report import findings_table
from studies.plots import picture
from studies.published.audit import AuditFinding, audit
from studies.published.cells import Cell, cells_of
from studies.published.conventions import MEBIBYTE
from studies.published.fitted_profile import load_published_profile
from studies.published.memory import parts_of
from studies.published.predicting import answers
from studies.published.rows import PublishedRow, shipped_rows
from studies.published.tables import Pair, rules_of, tables_of
from zosim.report import Bullets, Picture, Report

_TITLES = {
    "throughput": "throughput in tokens/s",
    "memory": "device memory in MB of 2^20 bytes",
    "transfer": "1e9 parameters/s",
}


_COLUMNS = ("cell", "model", "method", "batch_size", "seq_len", "precision", "quantity")


def write(paper: str, out: Path) -> Path:
    """Write the report of a paper and its plots, and return the report's path."""
    out.mkdir(parents=True, exist_ok=True)
    rows = shipped_rows(paper)
    reported = answers(rows, load_published_profile())
    findings = audit(rows)
    pairs = list(zip(rows, reported, strict=True))
    plots = [_plot(kind, pairs, out) for kind in _TITLES if _answered(pairs, kind)]
    path = out / "tables.md"
    path.write_text(_report(paper, pairs, findings, plots), encoding="utf-8")
    return path


def _report(
    paper: str,
    pairs: Sequence[Pair],
    findings: Sequence[AuditFinding],
    plots: Sequence[Path],
) -> str:
    words = (
        f"Made by `python -m studies.{paper.lower()}`. Predictions come "
        "from the profile that ships, which was fitted to these rows; what rows that were left out say is in the report "
        "against print. A verdict says whether the printed number lies within the 90 % interval, or why nothing is "
        "predicted."
    )
    return Report(
        f"The tables of {paper}, published and predicted",
        words,
        *(Picture(plot.stem, plot.name) for plot in plots),
        Report("Conventions found", Bullets(_conventions(paper, [row for row, _ in pairs]))),
        *tables_of(pairs, _COLUMNS, rules_of(findings)),
        findings_table("Audit: cells that cannot be right, or cannot all be", findings),
        Report("Audit: text against tables", Bullets(TEXT[paper])),
    ).to_markdown()


def _conventions(paper: str, rows: Sequence[PublishedRow]) -> Iterator[str]:
    """Yield what the numbers say about how they were counted, each with one example computed from the rows."""
    cells = [cell for cell in cells_of(rows)[0] if cell.value is not None]
    if paper == "ZO2":
        one = next(
            c
            for c in cells
            if c.row["model"] == "OPT-13B" and c.row["batch_size"] == "8" and c.row.kind == "throughput"
        )
        rate = _rate(one) / 1e12
        yield (
            f"A token counts once a step: {one.printed:g} tokens/s for OPT-13B at batch 8 is {rate:.1f} Tflop/s over both "
            "forwards, within the A100's 19.5 in float32. If tokens counted at both forwards, it would be half of that."
        )
        yield (
            f'"FP32" is float32, not TF32: {rate:.1f} Tflop/s at batch 8 is nearly all of 19.5 and 11 % of the 156 that '
            "TF32 has."
        )
    else:
        yield (
            "The batch is that of the whole step. On two GPUs, DDP at batch 8 prints 36744 tokens/s for OPT-1.3B, twice "
            "the 18625 of one GPU at batch 4. That is the same work for each GPU in the same time. If the batch were that of one "
            "GPU, the pair would be DDP at batch 4, which prints 31585."
        )
        one = next(
            c
            for c in cells
            if c.row["model"] == "OPT-30B" and c.row["batch_size"] == "8" and c.row["gpus"] == "2"
        )
        rate = _rate(one) / 1e12
        yield (
            f"A token counts once a step, although both signs forward it. {one.printed:g} tokens/s for OPT-30B under "
            f"{one.case.method.describe()} is then {rate:.0f} of the 148 Tflop/s of each GPU. Counted at both forwards it would be "
            f"{rate / 2:.0f}, far less than such products reach."
        )
    lightest = next(c for c in cells if c.row.kind == "memory" and c.case.method.base == "MeZO")
    weights = parts_of(lightest.case).kept
    yield (
        f"A megabyte is taken as 2^20 bytes, as nvidia-smi prints them: {lightest.row['model']} {lightest.row['precision']} "
        f"weights are {weights / MEBIBYTE:.0f} of these ({weights / 1e6:.0f} of 10^6 bytes) in {lightest.printed:g} printed."
    )


def _rate(cell: Cell) -> float:
    """Return the flop/s that each GPU multiplies at the printed throughput."""
    flops = sum(part.flops for item in cell.program.step for part in item.work.matmuls)
    return flops * cell.printed / cell.case.plan.tokens_per_step


def _answered(pairs: Sequence[Pair], kind: str) -> list[Pair]:
    return [(row, answer) for row, answer in pairs if row.kind == kind and row.value and answer.predicted]


def _plot(kind: str, pairs: Sequence[Pair], out: Path) -> Path:
    path = out / f"{kind}.png"
    with picture(path, dpi=120, layout="constrained", figsize=(6, 5)) as (_, axes):
        points = [
            (row["table"], row.value or 0.0, answer.predicted or 0.0)
            for row, answer in _answered(pairs, kind)
        ]
        for table in dict.fromkeys(name for name, _, _ in points):
            mine = [(printed, predicted) for name, printed, predicted in points if name == table]
            axes.plot(*zip(*mine, strict=True), linestyle="", marker=".", label=f"Table {table}")
        ends = [min(printed for _, printed, _ in points), max(printed for _, printed, _ in points)]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"printed {_TITLES[kind]}", ylabel="predicted")
        axes.legend()
    return path


TEXT = {
    "ZO2": (
        'G.1: "there is no significant difference between the 16-bit formats". For compression that holds to the digit for '
        + "most models. For autocast it does not. With fp16 compression, 1.3B and 2.7B run at 4430 and 2816 tokens/s under bf16, and at "
        + "4770 and 2974 under fp16. That is 7 and 5 % slower, the cost of one more cast of every stored score.",
        'G.3: "only a slight drop in throughput". The ratios printed in Table 8 are 0.82, 0.76 and 0.74.',
        '6.3: removing reusable memory gives "the most substantial decrease". At 13B the two ablations print 103 and 105.',
        "Table 1, float32: 66B and 175B print 40 and 14 tokens/s, about 1.4 times slower than their operations would take "
        + "at the rate that 1.3B to 13B reach. Not impossible, and not explained here; the fit has a constant for it. Mixed "
        + "precision with the same float32 weights does not show it at 66B, so passes over weights and copies are not the "
        + "reason. Batch 8 at 13B, an equally long step, does not show it either, so a throttled GPU is not.",
        "Table 3, float32, no efficient update: every block moves up and down a second time. At 66B that is 261 GB each way "
        + "for 4.3 to 7.1 s more a step (rounding of 40 and 36 included). The first pass saves about 2 s of updates. So it is "
        + "28 GB/s each way or more. The same arithmetic gives 16 to 18 GB/s at 1.3B to 13B. The bus carries 31.5, so it is "
        + "not impossible. With the base row at the rate of the smaller models, 66B would fit, too.",
        "Table 3, 13B without overlap: bytes both ways over the extra seconds of a step are 8.7 GB/s. The same "
        + "arithmetic gives 11.9 to 12.7 GB/s at 1.3B, 2.7B, 66B and 175B. Not impossible, scored with the others.",
    ),
    "DistZO2": (
        "Table 1's caption speaks of both FP32 and FP16 modes; its columns hold one precision.",
        'D.3: "the unified 2D strategy (ZO2+PertP+DDP) consistently achieving the highest throughput" across sequence '
        + "lengths. At s = 1024 two GPUs with PertP print more than four with it for 2.7B (15110 against 10231), 6.7B (7250 "
        + "against 5351) and 30B (1703 against 1239).",
        '7.3: PertP inside "consistently achieves higher throughput across all BSs" than DDP inside. Of the pairs that ship, '
        + "Table 3 has one the other way round, by 0.1 % (2.7B, batch 2). Table 7 has four (1.3B and 2.7B at 1024, 1.3B and 30B at "
        + "8192).",
        '7.3: "up to 4.6x improvement in both upload and offload speeds", over four lanes, of which Eq. 3 allows less than '
        + "four. For uploads no ratio of Table 2 that ships is above 4.1.",
        "The limitations speak of up to 16 GPUs, appendix D.2 of up to three nodes with four GPUs each.",
        "Two-dimensional steps at s = 1024 and 8192 take longer than those at 2048 suggest, by about as many seconds at both "
        + "lengths. For 2.7B to 30B it is 45 to 80 ps per parameter, or 25 to 45 GB/s for fp16 weights. That is Table 2's "
        + "upload, so uploads seem not to be hidden, against 6.1.",
    ),
}
"""What the papers say in words that their tables do not bear out, or bear out in part."""
