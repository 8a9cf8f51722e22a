"""Cells of QuZO's tables that cannot be right, or cannot all be, each with its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from costmodel.models.configs import read_model_spec
from studies.published.findings import AuditFinding
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
    return [finding for rule in _RULES for finding in rule(known)]


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


_RULES: tuple[Callable[[Known], Iterator[AuditFinding]], ...] = (
    _less_than_formula,
    _full_below_lora,
    _exact_halves,
    _beyond_the_cards,
    _parts_of_others,
)
