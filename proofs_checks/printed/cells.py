"""Cells of the papers' tables, as they are printed: the one home of what claims quote and studies predict.

Tables of times, memory and volumes ship as CSV files, a row a cell, with all that the table, its caption and the section on
its set-up say of the cell. Tables of scores, which nobody predicts, are written out below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources

from proofs_checks.mutation import Mutant
from zosim.applications.validation.tables import TableRow, read_table

REQUIRED = (
    "paper", "table", "model", "method", "gpus", "gpu_type", "batch_size", "seq_len", "precision", "quantity", "unit",
)  # fmt: skip
"""Columns without which a row says too little; `value` and `note` may be left out like any other."""

Cells = Mapping[str, tuple[float, ...]]
"""Numbers of one row of a table, by the row's label."""


@cache
def printed_rows() -> tuple[TableRow, ...]:
    """Return the cells that ship, a row each: tables in the order of their files' names, cells as they are printed.

    Examples
    --------
    >>> cell = next(row for row in printed_rows() if row["paper"] == "ZO2")
    >>> cell["model"], cell["method"], cell["precision"], cell["quantity"], cell["value"], cell["unit"]
    ('OPT-1.3B', 'MeZO', 'fp32', 'memory', '8898', 'MB')
    """
    with resources.as_file(resources.files("proofs_checks") / "data") as folder:
        return tuple(row for path in sorted(folder.glob("*.csv")) for row in read_table(path, REQUIRED))


def printed_table(
    table: str,
    columns: Sequence[str],
    *,
    column_of: str = "method",
    label: str = "{model}",
    **fixed: str,
) -> Cells:
    """Return the numbers of a printed table, row by row. A row of it that lacks one of the numbers is left out.

    Parameters
    ----------
    table : str
        Paper and number, as the shipped rows have them: ``"ZO2 1"``.
    columns : sequence of str
        What stands at the head of each number, in the order that they come back.
    column_of : str
        The field of a shipped row that holds such a head.
    label : str
        What a row is called: words with the names of its fields in braces.
    **fixed : str
        What other fields of a shipped row must hold.

    Examples
    --------
    ZO2's table 1 prints tokens/s; MeZO cannot run models above 13B.

    >>> printed_table("ZO2 1", ("MeZO", "ZO2"), precision="fp16", quantity="throughput")
    {'OPT-1.3B': (6629, 6448), 'OPT-2.7B': (4229, 4220), 'OPT-13B': (1326, 1251)}
    """
    found: dict[str, dict[str, float]] = {}
    for row in printed_rows():
        wanted = f"{row['paper']} {row['table']}" == table and row[column_of] in columns
        if wanted and row["value"] and all(row[name] == value for name, value in fixed.items()):
            numbers = found.setdefault(label.format_map(row.fields), {})
            assert row[column_of] not in numbers, f"{row.where}: {label} and {column_of} name two cells"
            numbers[row[column_of]] = _number(row["value"])
    return {
        name: tuple(numbers[column] for column in columns)
        for name, numbers in found.items()
        if len(numbers) == len(columns)
    }


def _number(text: str) -> float:
    """Return a printed number, a whole one without a decimal point."""
    return int(text) if text.isdecimal() else float(text)


def changed(name: str, table: str, old: str, new: str) -> Mutant:
    """Return a fault that changes a cell of a table of this module; `old` and `new` are text of the table's ``repr``."""
    return Mutant(name, f"{__name__}:{table}", old, new)


_rates = partial(printed_table, quantity="throughput")

SPARQ_ACCURACIES = printed_table(
    "SparQ 2", ("FO-SGD", "SparQ(4Q,forward)"), quantity="accuracy", dataset="SST-2"
)
"""Accuracies of FO-SGD and of SparQ on SST-2, in %."""

SPARQ_WIC_ACCURACIES = printed_table(
    "SparQ 2", ("AQ-SGD", "SparQ(4Q,forward)"), quantity="accuracy", dataset="WIC"
)
"""Accuracies of AQ-SGD and of SparQ on WIC, in %."""

SPARQ_MEMORY = printed_table(
    "SparQ 2", ("FO-SGD", "SparQ(4Q,forward)"), quantity="memory_peak_total", dataset="SST-2"
)
"""GB of GPU memory of FO-SGD and of SparQ on SST-2, batch size 32, in whole GB."""

SPARQ_MEMORY_BY_TASK = printed_table(
    "SparQ 2", ("FO-SGD", "SparQ(4Q,forward)"), quantity="memory_peak_total", label="{model}, {dataset}"
)
"""The same on SST-2, WIC and RTE."""

SPARQ_VOLUMES = printed_table(
    "SparQ 2", ("FO-SGD", "AQ-SGD", "SparQ(4Q,forward)"), quantity="comm_volume", label="{model}, {dataset}"
)
"""GB sent by FO-SGD, AQ-SGD and SparQ. On WIC, no row has all three."""

SPARQ_VOLUMES_BY_BITS = printed_table(
    "SparQ 1",
    ("act-1bit", "act-4bit", "act-8bit"),
    column_of="precision",
    label="{model}, {dataset}",
    quantity="comm_volume",
)
"""GB sent by SparQ at 1, 4 and 8 bits."""

QUZO_LORA_SCORES = {
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
"""Scores of Mistral-7B on MultiRC, ReCoRD, SQuAD and DROP (QuZO's table 1)."""

QUZO_REASONING_SCORES = {
    "FP16": ((79.05, 80.10, 50.40, 60.20, 72.80), 68.6),
    "SmoothQuant W8A8": ((79.50, 79.70, 49.00, 60.00, 73.20), 68.30),
    "RTN W4A16": ((76.6, 70.10, 45.00, 56.80, 71.00), 63.90),
    "AWQ W4A16": ((79.10, 79.70, 49.30, 59.10, 74.00), 68.20),
    "QuIP W4A16": ((78.20, 78.20, 47.40, 58.60, 73.20), 67.10),
    "QServe W4A8": ((79.21, 79.20, 49.61, 59.31, 73.02), 68.07),
    "QuZO W8A8": ((78.74, 80.03, 50.06, 59.34, 74.03), 68.43),
    "QuZO W4A16": ((79.86, 79.13, 49.59, 59.13, 74.26), 68.39),
}
"""Accuracies on five tasks, and the printed average (QuZO's table 2)."""

QUZO_FULL_SCORES = {
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
"""Scores on RTE, WSC, MultiRC, COPA, ReCoRD, SQuAD and DROP, by bits and method (QuZO's table 3)."""

QUZO_OPT_SCORES = {
    "QLLM": (82.45, 55.59, 66.07, 63.00, 63.46, 52.35, 56.81, 71.01, 59.90, 61.49, 15.80),
    "SmoothQuant": (75.01, 52.34, 37.51, 48.20, 44.23, 57.83, 53.41, 71.03, 68.81, 69.42, 11.22),
    "QuZO": (91.38, 55.61, 67.85, 62.30, 63.46, 60.03, 55.91, 74.00, 70.81, 73.88, 21.82),
}
"""Scores of OPT-1.3B on eleven tasks, INT W8A8 (QuZO's table 9)."""

QUZO_HYBRID_SCORES = {
    "INT W4A8": ((89.10, 54.87, 62.50, 66.60, 64.42, 57.99, 60.60, 83.00, 78.20, 78.12, 31.80), 66.10),
    "INT/FP W4A8": ((90.59, 59.92, 63.71, 68.40, 64.50, 59.70, 59.30, 80.00, 78.60, 79.89, 33.55), 67.10),
    "INT W8A8": ((93.00, 61.01, 64.18, 80.00, 63.46, 52.82, 60.01, 81.00, 79.00, 77.71, 31.11), 67.58),
    "INT/FP W8A8": ((93.08, 65.95, 64.28, 81.10, 64.57, 55.17, 60.11, 83.00, 79.60, 80.74, 36.58), 69.47),
}
"""Scores on eleven tasks and the printed average, without and with hybrid formats (QuZO's table 11)."""

QUZO_LARGE_SCORES = {
    "8 bits": {"FO": (81.70, 63.23, 25.90), "MeZO": (82.10, 63.71, 25.20), "QuZO": (82.20, 78.19, 37.61)},
    "4 bits": {"FO": (82.00, 62.27, 25.31), "MeZO": (82.30, 62.62, 25.33), "QuZO": (82.10, 73.79, 27.32)},
}
"""Scores of LLaMa-2 13B on ReCoRD, SQuAD and DROP (QuZO's table 20)."""

QUZO_ROUNDING_SCORES = {
    "8 bits": ((81.80, 64.23, 24.88), (82.20, 78.19, 37.61)),
    "4 bits": ((81.60, 63.02, 25.15), (82.10, 73.79, 27.32)),
}
"""Scores of Q-RGE1 and Q-RGE2 on ReCoRD, SQuAD and DROP (QuZO's table 18)."""

QUZO_QUERIES_SCORES = (37.61, 41.33)
"""Scores on DROP with one query and with ten (QuZO's table 16)."""

QUZO_WEIGHT_ONLY_SCORES = {
    "INT W4": (92.43, 60.28, 60.71, 65.50, 59.60, 83.00, 79.00, 82.78, 37.31),
    "INT W8": (92.77, 62.81, 71.42, 64.00, 60.70, 83.00, 81.00, 80.93, 40.25),
}
"""Scores of LLaMA-2 7B with quantized weights and activations in 32 bits, on SST-2, RTE, CB, BoolQ, MultiRC, COPA, ReCoRD, SQuAD and DROP
(QuZO's table 10)."""

QUZO_DIRECTION_SCORES = {"I-BERT": (92.77, 92.48, 91.89), "RoBERTa-Large": (92.48, 91.51, 93.07)}
"""Accuracies on SST-2 with directions of 8, 4 and 2 bits, INT W8A8 (QuZO's table 12)."""

QUZO_SPARSITY_SCORES = {
    0: (82.20, 80.29, 37.61),
    20: (82.60, 80.52, 34.65),
    50: (82.50, 81.21, 40.51),
    80: (83.00, 80.10, 25.99),
}
"""Scores on ReCoRD, SQuAD and DROP by % of a direction that is 0 (QuZO's table 17)."""

QUZO_ONE_POINT_SCORES = {"one point": (89.96, 53.56, 48.24), "QuZO": (91.62, 64.40, 54.87)}
"""Scores on SST-2, SNLI and RTE at 4 bits (QuZO's table 19)."""

QUZO_70B_SCORES = {"FO": (76.78, 51.84), "QuZO": (81.25, 58.11)}
"""Scores of LLaMA-70B on SQuAD and DROP at 4 bits (QuZO's table 21)."""

QUZO_MEMORY = printed_table("QuZO 4", ("FO-SGD", "QuZO"), quantity="memory_total", label="{dataset}")
"""GB of first-order training in 8 bits and of QuZO, LLaMA-2 7B."""

QUZO_TASK_MEMORY = {
    name: cells
    for baseline in ("LLM.int8()", "QLoRA")
    for name, cells in printed_table(
        "QuZO 14", (baseline, "QuZO"), quantity="memory", label="{model}, {precision}, {dataset}"
    ).items()
}
"""GB of a first-order method and of QuZO of one number of bits: LLM.int8() at 8 bits, QLoRA at 4."""

QUZO_STEP_SECONDS = printed_table(
    "QuZO 15", ("time_per_step",), column_of="quantity", label="{method} {precision}"
)
"""Seconds a step, OPT-30B on DROP."""

QUZO_STEP_GPUS = {"FO fp32": 8, "FO 4-bit": 8, "MeZO fp32": 2, "QuZO 4-bit": 1}
"""GPUs of the same steps (QuZO's table 15)."""

QUZO_DIRECTION_MEGABYTES = (1630, {8: 410, 2: 110})
"""MB of a direction of 32 bits, and by bits MB that are stated for a rounded one (QuZO's appendix B.3)."""

ZO2_MEMORY = printed_table("ZO2 1", ("MeZO", "ZO2"), quantity="memory", label="{precision}, {model}")
"""MB of MeZO and of ZO2, by precision and model, models in the order of size."""

ZO2_RATES = _rates("ZO2 1", ("MeZO", "ZO2"), label="{precision}, {model}")
"""Tokens/s of MeZO and of ZO2, by precision and model."""

ZO2_RATIOS = printed_table(
    "ZO2 1",
    ("throughput", "throughput_ratio"),
    column_of="quantity",
    label="{method}, {precision}",
    model="OPT-13B",
)
"""Tokens/s of OPT-13B, and the ratio to MeZO in fp32 that is printed beside each. The baseline has none."""

ZO2_175B_MEMORY = printed_table("ZO2 1", ("ZO2",), quantity="memory", label="{precision}", model="OPT-175B")
"""MB of OPT-175B, by precision."""

ZO2_SHAPES = {
    "OPT-1.3B": (24, 32, 2048),
    "OPT-2.7B": (32, 32, 2560),
    "OPT-6.7B": (32, 32, 4096),
    "OPT-13B": (40, 40, 5120),
    "OPT-30B": (48, 56, 7168),
    "OPT-66B": (64, 72, 9216),
    "OPT-175B": (96, 96, 12288),
}
"""Layers, heads and width of the OPT models (ZO2's table 4)."""

ZO2_QWEN = {
    quantity: printed_table("ZO2 8", ("MeZO", "ZO2"), quantity=quantity)
    for quantity in ("memory", "throughput")
}
"""MB and tokens/s of Qwen3 with MeZO and with ZO2, by quantity and model."""

ZO2_QWEN_RATIOS = {
    quantity: printed_table("ZO2 8", ("ZO2",), quantity=f"{quantity}_ratio")
    for quantity in ("memory", "throughput")
}
"""Ratios to MeZO that are printed beside them."""

ACCURACIES = {
    "MeZO": (91.4, 66.1, 67.9, 67.6, 63.5, 61.1, 60.1),
    "ZO2": (91.4, 66.1, 67.9, 67.6, 63.5, 61.1, 60.1),
    "DistZO2": (91.4, 66.1, 67.9, 67.6, 63.5, 61.1, 60.1),
}
"""Accuracies on SST-2, RTE, CB, BoolQ, WSC, WIC and MultiRC, in % (ZO2's table 2, DistZO2's table 6)."""

ZO2_RATES_WITHOUT = _rates(
    "ZO2 3", ("ZO2(no reusable memory)", "ZO2(no scheduler overlap)", "ZO2(no efficient update)", "ZO2")
)
"""Tokens/s without reusable memory, without overlap, without the efficient update, and with all three."""

ZO2_RATES_COMPRESSED = _rates(
    "ZO2 5",
    ("ZO2(compress=none)", "ZO2(compress=fp16)", "ZO2(compress=bf16)", "ZO2(compress=fp8)"),
    precision="amp-fp16",
)
"""Tokens/s without compression and with fp16, bf16 and fp8, AMP in fp16."""

ZO2_RATES_BY_SHAPE = {
    name: cells
    for table in ("ZO2 6", "ZO2 7")
    for name, cells in _rates(
        table, ("MeZO", "ZO2"), label="{model}, batch {batch_size}, length {seq_len}"
    ).items()
}
"""Tokens/s of MeZO and of ZO2 by batch size (table 6) and by length (table 7)."""

DISTZO2_RATES = _rates("DistZO2 1", ("ZO2", "DistZO2(PertP)", "DistZO2(DDP)", "DistZO2(2D)"))
"""Tokens/s of ZO2, PertP, DDP and both on 1, 2, 2 and 4 GPUs."""

DISTZO2_SLICES = printed_table("DistZO2 2", ("plain", "CommOpt"), label="{model}, {quantity}")
"""Billions of parameters a second that four GPUs upload and offload, each a whole block and each a slice of it."""

DISTZO2_QWEN_RATES = _rates("DistZO2 4", ("ZO2+PertP", "ZO2+DDP", "ZO2+PertP+DDP"))
"""Tokens/s of Qwen3 by perturbation and by data on two GPUs, and by both on four."""

DISTZO2_RATES_BESIDE_MEZO = {
    f"{parallelism}, {name}": cells
    for parallelism in ("PertP", "DDP")
    for name, cells in _rates(
        "DistZO2 3", (f"MeZO({parallelism})", f"DistZO2({parallelism})"), label="{model}, {batch_size}"
    ).items()
}
"""Tokens/s of MeZO and of ZO2 behind one parallelism, by model and batch size."""

DISTZO2_RATES_BY_INNER = _rates(
    "DistZO2 3", ("DistZO2(DDP+PertP)", "DistZO2(PertP+DDP)"), label="{model}, {batch_size}"
)
"""Tokens/s of four GPUs with DDP inside and with PertP inside, by model and batch size."""

DISTZO2_RATES_WITH_DDP = _rates("DistZO2 5", ("MeZO+DDP", "ZO2+DDP"), label="{model}, {gpus}")
"""Tokens/s of MeZO and of ZO2 with DDP on one GPU and on two."""

DISTZO2_RATES_BY_LENGTH = _rates(
    "DistZO2 7", ("ZO2+PertP", "ZO2+DDP", "ZO2+DDP+PertP", "ZO2+PertP+DDP"), label="{model}, {seq_len}"
)
"""Tokens/s of PertP, of DDP, and of both with DDP inside and with PertP inside, by model and sequence length."""

ZOINFER_ACCURACIES = {
    "final evaluation, vLLM": (0.922, 500),
    "final evaluation, LoRA-only": (0.902, 500),
    "final full validation": (0.931, 872),
    "table 3, development": (0.626, 500),
    "table 3, validation, MeZO": (0.570, 872),
    "table 3, validation, r = 128": (0.590, 872),
}
"""Accuracies to three places, and how many examples are said to be behind them (ZOinfer's tables 1 and 3)."""
