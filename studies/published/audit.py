"""Cells that cannot be right, or that contradict each other, each with its arithmetic.

A finding states what the printed numbers say, not what their authors did. Thresholds allow for rounding and for
the spread between prints of the same configuration (up to 2 % between DistZO2's Tables 1 and 5): what exceeds a bound
by less is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from costmodel.formats import FORMATS
from costmodel.models.configs import read_model_spec
from costmodel.models.model_spec import EMBED, HEAD
from studies.published.cells import Cell, cells_of
from studies.published.conventions import MEBIBYTE
from studies.published.quzo import (
    FULL,
    GIBIBYTE,
    MEMORY,
    PAPER,
    SECONDS,
    ZEROTH_ORDER,
    QuzoCase,
    quzo_case,
)
from studies.published.rows import PublishedRow
from studies.published.sparq import NotPredicted
from zosim.program.operations import Forward

_CARD_BYTES = 40e9
Known = Sequence[tuple[PublishedRow, QuzoCase]]


def quzo_findings(rows: Sequence[PublishedRow]) -> list[AuditFinding]:
    """Return what is wrong with printed cells of QuZO's tables, rule by rule."""
    known = []
    for row in rows:
        if row["paper"] == PAPER and row["quantity"] in (*MEMORY, SECONDS):
            try:
                known.append((row, quzo_case(row)))
            except NotPredicted:
                continue
    return [finding for rule in _QUZO_RULES for finding in rule(known)]


def _weights_gib(case: QuzoCase) -> float:
    return read_model_spec(case.model).num_parameters * case.bits / 8 / GIBIBYTE


def _less_than_formula(known: Known) -> Iterator[AuditFinding]:
    """Table 13: weights, and for each layer the larger of activations and gradient; so at least twice the weights."""
    for row, case in known:
        if row["quantity"] not in MEMORY or case.value is None or not case.is_full:
            continue
        copies = 2 if case.method in FULL else 1
        least = copies * _weights_gib(case)
        if case.value < least:
            yield AuditFinding(
                "less memory than the paper's own formula",
                (row.place,),
                f"{row['model']} {row['method']} {row['precision']}: {case.value:g} GB printed; Table 13 asks for the weights and "
                f"for the sum over layers of the larger of |a| and |w|, so at least {copies} times the weights: {least:.2f} GiB "
                f"({least * GIBIBYTE / 1e9:.2f} of 10^9 bytes)",
            )


def _full_below_lora(known: Known) -> Iterator[AuditFinding]:
    """First-order tuning of all weights in a fraction of what adapters alone do not fit."""
    lacking = {(case.model, case.dataset, case.bits): row for row, case in known if row.is_out_of_memory}
    for row, case in known:
        other = lacking.get((case.model, case.dataset, case.bits))
        if case.is_full and case.method in FULL and case.value is not None and other is not None:
            yield AuditFinding(
                "two tables that disagree",
                (row.place, other.place),
                f"{row['model']} on {case.dataset}: first-order tuning of all weights in {case.bits} bits prints {case.value:g} GB, "
                f"{other['method']} with adapters of rank 8 and as many bits runs out of 40: they cannot be runs of one batch",
                sets_apart=False,
            )


def _exact_halves(known: Known) -> Iterator[AuditFinding]:
    """Four bits print half of eight to the digit on some data sets and not on others."""
    peaks = {
        (case.model, case.dataset, case.bits): (row, case.value)
        for row, case in known
        if case.method in ZEROTH_ORDER and not case.is_full and case.value is not None and case.dataset
    }
    for (model, dataset, bits), (row, value) in peaks.items():
        eight = peaks.get((model, dataset, 8))
        if bits != 4 or eight is None or value is None or eight[1] is None:
            continue
        if abs(value - eight[1] / 2) <= 0.01:
            yield AuditFinding(
                "a half that is no measurement",
                (row.place, eight[0].place),
                f"{model} QuZO on {dataset}: {value:g} GB in 4 bits is half of {eight[1]:g} in 8 to the digit, contexts and embeddings "
                "included, which no allocator does; other data sets of the same model print other parts",
                sets_apart=False,
            )


def _beyond_the_cards(known: Known) -> Iterator[AuditFinding]:
    for row, case in known:
        if row["quantity"] != SECONDS or case.value is None:
            continue
        copies = 2 if case.method in FULL else 1
        least = copies * _weights_gib(case) * GIBIBYTE
        if least > case.gpus * _CARD_BYTES * 1.1:
            yield AuditFinding(
                "weights that do not fit",
                (row.place,),
                f"{row['model']} {row['method']} {row['precision']} on {case.gpus} GPUs of 40 GB: {least / 1e9:.0f} GB of weights"
                f"{' and gradients' if copies > 1 else ''}, and nothing else counted",
            )


def _parts_of_others(known: Known) -> Iterator[AuditFinding]:
    """Table 15's 4-bit cells, printed with a tilde, are simple parts of its float32 cells."""
    steps = [(row, case) for row, case in known if row["quantity"] == SECONDS and case.value is not None]
    for row, case in steps:
        for base_row, base in steps:
            is_pair = (case.method in FULL) == (base.method in FULL) and case.bits < base.bits
            if not is_pair or "~" not in row["note"]:
                continue
            assert case.value is not None
            assert base.value is not None
            ratio = base.value / case.value
            if abs(ratio * 2 - round(ratio * 2)) < 0.02:
                yield AuditFinding(
                    "an estimate, not a measurement",
                    (row.place, base_row.place),
                    f"{row['model']} {row['method']}: {base.value:g} / {case.value:g} = {ratio:.3f}, and the cell is printed with a tilde",
                )


_QUZO_RULES: tuple[Callable[[Known], Iterator[AuditFinding]], ...] = (
    _less_than_formula,
    _full_below_lora,
    _exact_halves,
    _beyond_the_cards,
    _parts_of_others,
)


@dataclass(frozen=True)
class AuditFinding:
    """Something that cannot be, or two things that cannot both be."""

    rule: str  # what is violated
    places: tuple[str, ...]  # cells concerned: paper, table and cell
    arithmetic: str  # the numbers
    # Whether the first cell is scored apart. Off where the numbers do not say which of several cells is wrong.
    sets_apart: bool = True


SPREAD = 0.04
"""Part by which a bound must be exceeded before it is a finding."""

_PCIE4_X16 = 31.5e9
_PEAKS = {
    ("A100-80GB", "fp32"): 156e12,  # of TF32: whether it was on is not printed
    ("A100-80GB", "half"): 312e12,
    ("H20-96GB", "fp32"): 74e12,
    ("H20-96GB", "half"): 148e12,
}


def audit(rows: Sequence[PublishedRow]) -> list[AuditFinding]:
    """Return what is wrong with printed cells, rule by rule."""
    cells, _, _ = cells_of(rows)
    known = [cell for cell in cells if cell.value is not None]
    speeds = [cell for cell in known if cell.row.kind == "throughput"]
    findings: list[AuditFinding] = []
    for rule in _RULES:
        findings += rule(speeds)
    findings += [
        AuditFinding(violated, (cell.row.place, other.row.place), arithmetic)
        for violated, of_pair in _PAIR_RULES
        for cell, other in product(speeds, repeat=2)
        if (arithmetic := of_pair(cell, other))
    ]
    findings += _transfers(known)
    findings += _memory(known)
    findings += _ratios(rows)
    return findings + quzo_findings(rows)


def set_apart(findings: Sequence[AuditFinding]) -> frozenset[str]:
    """Return the places of the cells that are scored apart."""
    return frozenset(finding.places[0] for finding in findings if finding.sets_apart)


def _step_s(cell: Cell) -> float:
    return cell.case.plan.tokens_per_step / cell.printed


def _above_peak(cells: Sequence[Cell]) -> Iterator[AuditFinding]:
    for cell in cells:
        flops = sum(
            part.flops
            for item in cell.program.step
            if isinstance(item.op, Forward)
            for part in item.work.matmuls
        )
        rate = flops / _step_s(cell)
        kind = "fp32" if cell.row["precision"] == "fp32" else "half"
        peak = _PEAKS[cell.row["gpu_type"], kind]
        if rate > peak * (1 + SPREAD):
            yield AuditFinding(
                "a rate above the GPU's peak",
                (cell.row.place,),
                f"{_name(cell)}: each GPU multiplies {flops / 1e12:.0f} Tflop a step (attention not counted) in "
                f"{_step_s(cell):.3f} s at {cell.printed:g} tokens/s: {rate / 1e12:.0f} Tflop/s, the dense peak is {peak / 1e12:.0f}",
            )


def _faster_than_bus(cells: Sequence[Cell]) -> Iterator[AuditFinding]:
    for cell in cells:
        if not cell.case.method.is_offloaded:
            continue
        plan = cell.case.plan
        size = (
            _block_parameters(cell) * FORMATS[plan.transfer_dtype].element_bytes / plan.placement.world_size
        )
        rate = size / _step_s(cell)
        if rate > _PCIE4_X16 * (1 + SPREAD):
            yield AuditFinding(
                "a transfer faster than its bus",
                (cell.row.place,),
                f"{_name(cell)}: at least {size / 1e9:.1f} GB a step each way over each GPU's PCIe 4.0 x16 in "
                f"{_step_s(cell):.3f} s: {rate / 1e9:.1f} GB/s, the bus carries 31.5",
            )


def _more_than_lanes(cells: Sequence[Cell]) -> Iterator[AuditFinding]:
    """Twice the GPUs at the same batch, or at twice the batch with the same work for each."""
    for cell in cells:
        ranks = cell.case.plan.placement.world_size
        for other in cells:
            if other.case.plan.placement.world_size * 2 != ranks or not _alike(cell, other, "batch"):
                continue
            mine, theirs = cell.case.plan, other.case.plan
            same_batch = mine.batch == theirs.batch
            per_gpu_equal = mine.batch == 2 * theirs.batch and mine.mesh.perturb == theirs.mesh.perturb
            if not (same_batch or per_gpu_equal):
                continue
            factor = cell.printed / other.printed
            if factor <= 2 * (1 + SPREAD):
                continue
            what = "the same batch" if same_batch else "twice the batch, so as much for each GPU"
            # A pair in which two GPUs lag far behind every other pair says that they are slow, not that four are fast.
            first, second = (cell, other) if factor < 3 else (other, cell)
            yield AuditFinding(
                "more speed-up than GPUs",
                (first.row.place, second.row.place),
                f"{_name(cell)} at batch {mine.batch} on {ranks} GPUs {cell.printed:g} tokens/s, {_name(other)} at batch "
                f"{theirs.batch} on {ranks // 2} GPUs {other.printed:g}: {factor:.2f} times with twice the GPUs and {what}"
                + _without_copies(other, cells),
            )


def _without_copies(cell: Cell, cells: Sequence[Cell]) -> str:
    """Return what the same setting prints for weights that stay on the GPU, where transfers cannot be the reason."""
    for other in cells:
        is_same_method = (
            other.case.method.base == "MeZO" and other.case.method.parallel == cell.case.method.parallel
        )
        if is_same_method and other.row.setting == cell.row.setting and other.row["gpus"] == cell.row["gpus"]:
            return f"; MeZO, which copies nothing, prints {other.printed:g} for the latter"
    return ""


def _more_work_in_less_time(cell: Cell, other: Cell) -> str:
    here, there = cell.case.plan, other.case.plan
    longer = there.seq == 2 * here.seq and there.batch == here.batch and there.mesh == here.mesh
    if not longer or not _alike(cell, other, "seq") or cell.case.method != other.case.method:
        return ""
    if _step_s(cell) <= _step_s(other) * (1 + SPREAD):
        return ""
    return (
        f"{_name(cell)}: a step of {here.tokens_per_step} tokens takes {_step_s(cell):.3f} s "
        f"({cell.printed:g} tokens/s), one of {there.tokens_per_step} takes {_step_s(other):.3f} s "
        f"({other.printed:g})"
    )


def _same_tokens_differ(cell: Cell, other: Cell) -> str:
    """Half the sequence at twice the batch: as many tokens, and at most the attention's part less work."""
    here, there = cell.case.plan, other.case.plan
    alike = here.seq * 2 == there.seq and here.batch == 2 * there.batch and here.mesh == there.mesh
    if not alike or cell.case.method != other.case.method or not _alike(cell, other, "both"):
        return ""
    gain = _forward_flops(other) / _forward_flops(cell)
    factor = cell.printed / other.printed
    if factor <= gain * (1 + 2 * SPREAD):
        return ""
    return (
        f"{_name(cell)}: {here.tokens_per_step} tokens a step in both, {cell.printed:g} tokens/s as {here.batch} x "
        f"{here.seq}, {other.printed:g} as {there.batch} x {there.seq}: {factor:.2f} times for at most {gain:.2f} "
        "times fewer operations"
    )


def _half_bytes_slower(cell: Cell, other: Cell) -> str:
    """Pure fp16 against automatic mixed precision: the same products, half the bytes everywhere."""
    formats = cell.row["precision"] == "fp16" and other.row["precision"].startswith("amp")
    if not formats or any(cell.row[name] != other.row[name] for name in ("model", "paper")):
        return ""
    own = cell.case.method
    if other.case.method.option != "compress=none" or own.option or not own.is_offloaded:
        return ""
    if cell.printed * (1 + SPREAD) >= other.printed:
        return ""
    return (
        f"{_name(cell)}: pure fp16 at {cell.printed:g} tokens/s takes {_step_s(cell):.1f} s a step, mixed precision "
        f"with float32 weights and float32 transfers {_step_s(other):.1f} s ({other.printed:g} tokens/s), though "
        "it moves twice the bytes over every wire and multiplies as many fp16 matrices"
    )


def _formats_differ(cell: Cell, other: Cell) -> str:
    """Mixed precision in fp16 and in bf16 without compression: the same bytes and the same peaks."""
    pair = (cell.row["precision"], other.row["precision"])
    same = cell.row["model"] == other.row["model"] and cell.case.method == other.case.method
    if pair != ("amp-fp16", "amp-bf16") or not same or cell.case.method.option != "compress=none":
        return ""
    if other.printed <= cell.printed * (1 + 2 * SPREAD):
        return ""
    return (
        f"{_name(cell)}: {cell.printed:g} tokens/s under fp16 autocast, {other.printed:g} under bf16, which moves "
        f"the same float32 blocks at the same peak; the ratio is {other.printed / cell.printed:.2f}"
    )


def _transfers(cells: Sequence[Cell]) -> Iterator[AuditFinding]:
    """Slices over n lanes: Eq. 3 gives at most n times the rate of whole blocks."""
    rates = {(c.row["model"], c.row["quantity"], c.row["method"]): c for c in cells if c.is_transfer}
    for (model, quantity, method), cell in rates.items():
        plain = rates.get((model, quantity, "plain"))
        if method != "CommOpt" or plain is None:
            continue
        lanes = cell.case.plan.placement.world_size
        least = (cell.printed - 0.005) / (plain.printed + 0.005)
        if least > lanes * (1 + SPREAD):
            yield AuditFinding(
                "more speed-up than lanes",
                (cell.row.place, plain.row.place),
                f"{model}, {quantity.removesuffix('_rate')}: {cell.printed:g} against {plain.printed:g} billion parameters/s, "
                f"{cell.printed / plain.printed:.2f} times (at least {least:.2f} with rounding); slices over {lanes} lanes give "
                f"at most {lanes} times by Eq. 3, less the exchange",
            )
    yield from _offload_against_steps(cells)


def _offload_against_steps(cells: Sequence[Cell]) -> Iterator[AuditFinding]:
    best = {
        c.row["model"]: c
        for c in cells
        if c.row["quantity"] == "offload_rate" and c.row["method"] == "CommOpt"
    }
    for cell in cells:
        rate = best.get(cell.row["model"])
        if cell.row.kind != "throughput" or rate is None or not cell.case.method.is_offloaded:
            continue
        if cell.case.paper != "DistZO2" or cell.case.plan.placement.world_size != 4:
            continue
        needed = _block_parameters(cell) / _step_s(cell) / 1e9
        if needed > rate.printed * (1 + SPREAD):
            yield AuditFinding(
                "two tables that disagree",
                (rate.row.place, cell.row.place),
                f"{_name(cell)} at {cell.printed:g} tokens/s must offload its blocks at {needed:.2f} billion parameters/s, "
                f"Table 2 measures {rate.printed:g} with everything else switched off",
                sets_apart=False,
            )


def _memory(cells: Sequence[Cell]) -> Iterator[AuditFinding]:
    for cell in cells:
        if cell.row.kind != "memory" or cell.value is None:
            continue
        plan = cell.case.plan
        width = FORMATS[plan.storage_dtype].element_bytes
        ends = sum(g.num_parameters for g in plan.model.param_groups if g.segments[0] in (EMBED, HEAD))
        block = _block_parameters(cell) / plan.model.num_blocks
        least = (plan.model.num_parameters if not cell.case.method.is_offloaded else ends + block) * width
        if cell.printed * MEBIBYTE < least or cell.printed * MEBIBYTE > cell.case.capacity_bytes:
            yield AuditFinding(
                "memory that does not fit",
                (cell.row.place,),
                f"{_name(cell)}: {cell.printed:g} MiB printed, weights alone take {least / MEBIBYTE:.0f}, the GPU has "
                f"{cell.case.capacity_bytes / MEBIBYTE:.0f}",
            )


def _ratios(rows: Sequence[PublishedRow]) -> Iterator[AuditFinding]:
    """Ratios in parentheses against the numbers that they are of."""
    for row in rows:
        if not row["quantity"].endswith("_ratio") or row.value is None:
            continue
        quantity = row["quantity"].removesuffix("_ratio")
        mine = _find(rows, row, quantity, row["method"], row["precision"], row["cell"])
        is_compressed = "compress" in row["method"]
        base_precision = "fp32" if row["note"].endswith("MeZO fp32") else row["precision"]
        base = _find(
            rows, row, quantity, "ZO2(compress=none)" if is_compressed else "MeZO", base_precision, ""
        )
        if mine is None or base is None or mine.value is None or base.value is None or base.value < 1:
            continue
        ratio, half = mine.value / base.value, 0.5 * 10.0 ** -len(row["value"].partition(".")[2])
        low, high = (mine.value - 0.5) / (base.value + 0.5), (mine.value + 0.5) / (base.value - 0.5)
        # Printed ratios are cut as often as rounded.
        if row.value < low - 2 * half or row.value > high + half:
            yield AuditFinding(
                "a ratio that is not that of its numbers",
                (row.place, base.place),
                f"{row['model']}, {row['method']} {row['precision']}: {row.value:g} printed, {mine.value:g} / {base.value:g} "
                f"= {ratio:.2f}; the ratio would need {mine.value / row.value:.0f}",
                sets_apart=False,
            )


def _find(
    rows: Sequence[PublishedRow], like: PublishedRow, quantity: str, method: str, precision: str, cell: str
) -> PublishedRow | None:
    wanted = {"quantity": quantity, "method": method, "precision": precision}
    wanted |= {name: like[name] for name in ("paper", "table", "model", "batch_size", "seq_len")}
    wanted |= {"cell": cell} if cell else {}
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def _alike(cell: Cell, other: Cell, free: str) -> bool:
    """Whether two cells are of one model, hardware, precision and kind of residency, and alike in all but `free`."""
    names = ("paper", "model", "gpu_type", "precision")
    if any(cell.row[name] != other.row[name] for name in names):
        return False
    if cell.case.method.is_offloaded != other.case.method.is_offloaded:
        return False
    if free == "batch":
        return cell.case.plan.seq == other.case.plan.seq
    return free == "both" or cell.case.plan.batch == other.case.plan.batch


def _forward_flops(cell: Cell) -> int:
    return sum(item.work.flops for item in cell.program.step if isinstance(item.op, Forward))


def _block_parameters(cell: Cell) -> float:
    groups = cell.case.plan.model.param_groups
    return float(sum(group.num_parameters for group in groups if group.segments[0] not in (EMBED, HEAD)))


def _name(cell: Cell) -> str:
    return f"{cell.row['model']} {cell.case.method.describe()}"


_RULES: tuple[Callable[[Sequence[Cell]], Iterator[AuditFinding]], ...] = (
    _above_peak,
    _faster_than_bus,
    _more_than_lanes,
)
_PAIR_RULES: tuple[tuple[str, Callable[[Cell, Cell], str]], ...] = (
    ("more work in less time", _more_work_in_less_time),
    ("two tables that disagree", _same_tokens_differ),
    ("half the bytes in more time", _half_bytes_slower),
    ("two tables that disagree", _formats_differ),
)
"""What is violated, and the arithmetic of a pair of cells that does so; empty for any other pair."""
