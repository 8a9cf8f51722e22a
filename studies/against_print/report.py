"""The report: errors by split and predictor, constants, and the cells that are scored apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from studies.against_print.sheets import sheet_outcomes, sheets_section
from studies.against_print.splits import OURS, SPLITS, Outcome, outcomes
from studies.checkout import commit
from studies.published.audit import Finding, audit
from studies.published.cells import cells_of
from studies.published.fitted_profile import PublishedProfile, known_cells, load_published_profile
from studies.published.rows import shipped_rows

_HEAD = """# Predictions against print: ZO2 and DistZO2

Commit `{commit}`. Made by `python -m studies.against_print` from the rows that ship with the project.

Constants are fitted to printed rows through the closed form of the simulator: the plan of each row is lowered to a
program on the preset hardware, the works are those of the papers' code (`studies/published/paper_code.py`), and the fit moves
only the constants listed below. Rows are kept back by setting: all methods of one model, batch, sequence and precision
at once, in whichever table they are printed; or by model, all rows of one that lies between others. Every left-out
figure is of constants fitted anew without those rows. Errors are absolute, in percent. Cells that the audit sets apart
are fitted like all others, under a loss that gives up on outliers, and are not in the figures; the last column of the
table has them.

## Errors

Leaving out the smallest or the largest model asks for more than what lies between known rows; "between" are the figures
without those two ends. The rank correlation is Spearman's, of the methods in a printed row, four or more of them that are
not set apart, as a mean over rows; what print does not tell apart counts as in the order predicted. In brackets: all cells
in, and equal numbers share the mean of their ranks.

| split | predictor | cells | median | 90 % | goal | met | between: median / 90 % | rank correlation | median of those apart |
| --- | --- | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: |
"""


def written() -> str:
    """Return the report."""
    rows = shipped_rows()
    cells, _, _ = cells_of(rows)
    findings = audit(rows)
    found: list[Outcome] = []
    for split in SPLITS:
        mine = [cell for cell in known_cells(cells, split.paper, split.domain) if cell.value is not None]
        found += outcomes(split, mine, findings)
    head = _HEAD.format(commit=commit())
    parts = [head + "\n".join(_error_rows(found)), _misses(found), *_constants(load_published_profile())]
    sheets = sheets_section(sheet_outcomes(cells, findings))
    return "\n\n".join([*parts, _coverage(found), sheets, findings_table(findings)]) + "\n"


def _error_rows(found: Sequence[Outcome]) -> Iterator[str]:
    for item in found:
        is_ours = item.predictor == OURS
        has_goal = is_ours and item.split.goal is not None
        goal = "{:g} / {:g}".format(*item.split.goal or ()) if has_goal else ""
        met = ("yes" if item.meets_goal else "no") if has_goal else ""
        apart = (
            f"{100 * float(np.median(np.abs(item.apart))):.1f} ({len(item.apart)})" if len(item.apart) else ""
        )
        rank = (
            ""
            if math.isnan(item.rank_correlation)
            else f"{item.rank_correlation:.2f} ({item.strict_correlation:.2f})"
        )
        count = f"{len(item.errors)}" + (
            f" (+{item.num_unanswered} unanswered)" if item.num_unanswered else ""
        )
        inner = ""
        if len(item.inner):
            size = np.abs(item.inner)
            inner = f"{100 * np.median(size):.2f} / {100 * np.percentile(size, 90):.2f}"
        figures = f"{item.median:.2f} | {item.p90:.2f}" if len(item.errors) else " | "
        yield (
            f"| {item.split.name} | {item.predictor} | {count} | {figures} | {goal} | {met} | {inner} | "
            f"{rank} | {apart} |"
        )


def _misses(found: Sequence[Outcome]) -> str:
    missed = [item.split.name for item in found if item.predictor == OURS and not item.meets_goal]
    return "Goals missed: " + ("; ".join(missed) if missed else "none") + "."


def _constants(profile: PublishedProfile) -> Iterator[str]:
    yield "## Constants\n\nEvery number chosen after seeing a result row. Intervals are 95 %."
    for fit in profile.fits:
        lines = [
            f"{fit.paper}, {fit.domain}: {len(fit.constants)} constants, {fit.num_cells} cells",
            "",
            "| constant | value | interval | unit | meaning | identified by |",
            "| --- | ---: | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {c.name} | {c.value:.4g} | {c.low:.4g} to {c.high:.4g} | {c.unit} | {c.meaning} | {c.identified_by} |"
            for c in fit.constants
        ]
        yield "\n".join(lines)
    yield CHOICES


CHOICES = """Choices that are no numbers, made after seeing rows, each with its reason in the code:

* ZO2's OPT rows store attention scores (`eager`), Qwen3's and DistZO2's rows do not (`sdpa`, masked half skipped);
* DistZO2's rows on four GPUs at sequences other than 2048 do not hide their uploads;
* an update of ZO2's has weight decay, which leaves four copies of a tensor alive, one of DistZO2's has none;
* float32 products of hidden sizes between 5120 and 9216 run at a rate between the two that are fitted: no row says where
  between them the slower rate of the widest models begins;
* OPT's code of ZO2's time keeps keys and values in MeZO's forwards, and logits in half precision; later code does not;
* rows of Qwen3 under ZO2 keep no second copy of the logits;
* a communicator per axis of a mesh of two axes, and two more."""


def _coverage(found: Sequence[Outcome]) -> str:
    lines = [
        "## Intervals",
        "",
        "Conformal by group of cells: the half width in logs covers nine tenths of the residuals of left-out settings (the",
        "`⌈0.9 (n + 1)⌉`-th smallest), with the uncertainty of the constants added in quadrature, and for float32 products of",
        "hidden sizes between 5120 and 9216 what no row decides. Below, half widths come from",
        "other settings (or models) than the one asked for, and for the extrapolations from known rows alone. The band is where",
        "95 % of outcomes lie if configurations held with probability 0.9 each; methods of one configuration hold or fail",
        "together, so it counts configurations. Width: median of high over low, less 1.",
        "",
        "| split | cells | within | configurations | within | band | in band | width |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for item in found:
        if item.coverage is not None:
            c = item.coverage
            lines.append(
                f"| {item.split.name} | {c.num_cells} | {c.cells:.0%} | {c.num_configurations} | {c.configurations:.0%} | "
                f"{c.band[0]:.0%} to {c.band[1]:.0%} | {'yes' if c.is_in_band else 'no'} | {c.width:.0%} |"
            )
    return "\n".join(lines)


def findings_table(findings: Sequence[Finding]) -> str:
    """Return the audit as a table."""
    lines = [
        "## Cells that cannot be right, or cannot all be",
        "",
        "| what | cells | apart | arithmetic |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {item.rule} | {'; '.join(item.places)} | {'yes' if item.sets_apart else 'no'} | {item.arithmetic} |"
        for item in findings
    ]
    return "\n".join(lines)
