"""The ledger as one HTML page: offline, printable, formulas in Unicode; it opens with what fails as printed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from proofs_checks.claims import Check, Verdict
from proofs_checks.ledger import Entry
from proofs_checks.outcomes import Context, Estimate, Outcome
from proofs_checks.pages import THEORY
from proofs_checks.papers import PAPERS, Paper

_SHOWN_ESTIMATES = 3
_SHOWN_LINES = 6
_AGAINST_PRINT = (Verdict.FAILS, Verdict.CORRECTION, Verdict.CONDITION)
_STYLE = """
:root { --ink: #1c1c1c; --faint: #666; --line: #ccc; }
* { box-sizing: border-box; }
body { font: 16px/1.5 Georgia, "Times New Roman", serif; color: var(--ink); background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 2px solid var(--ink); } h3 { margin: 2rem 0 .3rem; font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; } th, td { border: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { background: #f3f3f3; font-weight: 600; } .beside td { width: 50%; } code, .name { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .85em; }
.verdict { display: inline-block; padding: 0 .5em; border: 1px solid currentColor; border-radius: .3em; font-size: .85rem; }
.holds { color: #0a6b2d; } .condition, .correction { color: #8a5a00; } .fails, .unsettled { color: #a3121f; } .undecided, .unresolved { color: #4a4a8a; }
.faint, small { color: var(--faint); } blockquote { margin: 0; font-style: italic; } ul { margin: .2rem 0; padding-left: 1.2rem; }
svg { vertical-align: middle; } a { color: inherit; } details > summary { cursor: pointer; }
@media print { body { font-size: 10.5pt; max-width: none; margin: 0; } h3, tr, .opening li { break-inside: avoid; } a { text-decoration: none; } details { display: block; } }
"""


def page_of(entries: Sequence[Entry], context: Context, folder: Path) -> str:
    """Return the page; links to derivations are relative to `folder`, where it will lie."""
    body = "\n".join(_body(entries, context, folder))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What five papers state, judged</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _body(entries: Sequence[Entry], context: Context, folder: Path) -> Iterator[str]:
    yield "<h1>What five papers on zeroth-order fine-tuning state, judged by running it</h1>"
    yield (
        f"<p>{len(entries)} claims, held against the code that ships; seed {context.seed}, {context.size} samples. A verdict is computed from "
        "what the checks below return. Intervals miss the theory with the probability that a comparison is allowed, so that one run on "
        "correct code raises a false alarm with a probability below 10⁻⁶.</p>"
    )
    yield from _opening([entry for entry in entries if entry.verdict in _AGAINST_PRINT])
    yield from _overview(entries)
    for paper in PAPERS.values():
        own = [entry for entry in entries if entry.claim.paper == paper.key]
        if own:
            yield f'<h2 id="{paper.key}">{_text(paper.title)}</h2><p class="faint">{_text(paper.reference)}</p>'
            for entry in own:
                yield from _claim(entry, folder)


def _opening(against: Sequence[Entry]) -> Iterator[str]:
    yield "<h2>What does not hold as printed, and what that means for whoever runs the software</h2>"
    if not against:
        yield "<p>Nothing among these claims.</p>"
        return
    yield '<ul class="opening">'
    for entry in sorted(against, key=lambda entry: _AGAINST_PRINT.index(entry.verdict)):
        claim = entry.claim
        amended = f" {_text(claim.amendment)}" if claim.amendment else ""
        yield (
            f"<li>{_badge(entry.verdict)} <b>{_text(claim.paper)}, {_text(', '.join(claim.where))}</b>: “{_text(claim.quotation)}” "
            f'{_text(claim.breaks)}{amended}<br><b>So:</b> {_text(claim.consequence)} <a href="#{_text(claim.name)}">↓</a></li>'
        )
    yield "</ul>"


def _overview(entries: Sequence[Entry]) -> Iterator[str]:
    used = [verdict for verdict in Verdict if any(entry.verdict is verdict for entry in entries)]
    yield "<h2>By paper</h2>"
    yield _row("th", ("", *(_text(verdict) for verdict in used)), before="<table>")
    for paper in PAPERS.values():
        own = [entry.verdict for entry in entries if entry.claim.paper == paper.key]
        if own:
            counts = (str(own.count(verdict) or "") for verdict in used)
            yield _row("td", (f'<a href="#{paper.key}">{_text(_short(paper))}</a>', *counts))
    yield "</table>"


def _short(paper: Paper) -> str:
    return paper.title.partition(":")[0]


def _claim(entry: Entry, folder: Path) -> Iterator[str]:
    claim = entry.claim
    yield f'<h3 id="{_text(claim.name)}"><span class="name">{_text(claim.name)}</span> {_badge(entry.verdict)}</h3>'
    place = f"{_text(claim.paper)}, {_text(', '.join(claim.where))}"
    yield _row("th", (f"As printed ({place})", "As judged"), before='<table class="beside">')
    yield _row(
        "td", (f"<blockquote>{_text(claim.quotation)}</blockquote>", _text(claim.statement)), after="</table>"
    )
    facts = {
        "Amendment": claim.amendment,
        "Breaks": claim.breaks,
        "For a user": claim.consequence,
        "Taken": claim.hypotheses,
        "Rests on": claim.references,
        "Awaits": claim.awaits,
    }
    lines = [f"<b>{name}:</b> {_text(texts)}" for name, texts in facts.items() if texts]
    if claim.derivation:
        lines.append(f"<b>Derivation:</b> {_link(claim.derivation, folder)}")
    yield "<p>" + "<br>".join(lines) + "</p>"
    yield _row("th", ("", "what is run", "came out", "measured"), before="<table>")
    for check, outcome in zip(claim.checks, entry.judged.outcomes, strict=True):
        yield _check(check, outcome)
    yield "</table>"
    if entry.faults:
        yield "<details open><summary>Planted faults</summary><ul>"
        for tried in entry.faults:
            why = f" <small>{_text(tried.reason)}</small>" if tried.reason else ""
            yield f"<li>{tried.verdict}: {_text(tried.fault.name)} <small><code>{_text(tried.fault.description)}</code></small>{why}</li>"
        yield "</ul></details>"
    seconds = entry.judged.seconds
    yield (
        f'<p class="faint">{seconds:.1f} s'
        + (f", faults {entry.fault_seconds:.1f} s" if entry.faults else "")
        + "</p>"
    )


def _check(check: Check, outcome: Outcome) -> str:
    came = "so" if outcome.passed else '<b class="fails">not so</b>'
    texts = [f"{outcome.statistic:.3g} (bound {outcome.bound:.3g}): {_text(outcome.measured)}"]
    if outcome.resolution is not None:
        texts.append(f"notices an error of {100 * outcome.resolution:.2g} %, 999 times in 1000")
    farthest = sorted(outcome.estimates, key=lambda estimate: estimate.p_value)[:_SHOWN_ESTIMATES]
    texts += [_estimate(estimate) for estimate in farthest]
    if not farthest:
        texts += [f"<small>{_text(line)}</small>" for line in outcome.details[:_SHOWN_LINES]]
        left = len(outcome.details) - _SHOWN_LINES
        texts += [f"<small>and {left} more</small>"] if left > 0 else []
    return _row("td", (_text(check.role), _text(check.title), came, "<br>".join(texts)))


def _estimate(estimate: Estimate) -> str:
    return (
        f"{_interval(estimate)} {estimate.value:.5g} [{estimate.low:.5g}, {estimate.high:.5g}], theory {estimate.theory:.5g} "
        f"<small>{_text(estimate.name)}, n = {estimate.num_samples}</small>"
    )


def _interval(estimate: Estimate) -> str:
    """Return a picture of an interval, its estimate, and the theory as a line across."""
    low, high = min(estimate.low, estimate.theory), max(estimate.high, estimate.theory)
    width = (high - low) or 1.0

    def at(value: float) -> float:
        return round(4 + 92 * (value - low) / width, 1)

    theory = at(estimate.theory)
    return (
        '<svg width="100" height="12" role="img" aria-label="estimate with its interval, theory across">'
        f'<line x1="{at(estimate.low)}" x2="{at(estimate.high)}" y1="6" y2="6" stroke="#1c1c1c"/>'
        f'<circle cx="{at(estimate.value)}" cy="6" r="2.5"/>'
        f'<line x1="{theory}" x2="{theory}" y1="0" y2="12" stroke="#a3121f" stroke-width="1.5"/></svg>'
    )


def _link(derivation: str, folder: Path) -> str:
    page, _, anchor = derivation.partition("#")
    target = THEORY / page
    if not target.is_file():
        return _text(f"docs/theory/{derivation}")
    path = Path(os.path.relpath(target, folder.resolve())).as_posix()
    return f'<a href="{_text(path)}{"#" + _text(anchor) if anchor else ""}">{_text(derivation)}</a>'


def _badge(verdict: Verdict) -> str:
    return f'<span class="verdict {verdict.name.lower()}">{_text(verdict)}</span>'


def _row(cell: str, cells: Iterable[str], *, before: str = "", after: str = "") -> str:
    return f"{before}<tr>{''.join(f'<{cell}>{text}</{cell}>' for text in cells)}</tr>{after}"


def _text(text: str) -> str:
    return escape(str(text))
