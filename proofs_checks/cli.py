"""``zosim check``: what the papers state, judged against the shipped code."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topology.errors import ZosimError
from topology.limits import MAX_SEED
from topology.reading import parse_json
from topology.validation import did_you_mean
from zosim.console import emit, progress, stdout
from zosim.report import Table

if TYPE_CHECKING:
    from proofs_checks.claims import Claim, Verdict
    from proofs_checks.evidence import Wealth
    from proofs_checks.ledger import Entry
    from proofs_checks.outcomes import Context


_OWN = "Your own estimator or quantizer (docs/how-to/judge-an-estimator.md)"


def check(
    claims: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLAIM]...", help="Names of the claims to check.", show_default="all claims"),
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(
            "--paper",
            help="Paper whose claims to check: zo2, distzo2, sparq, quzo, zoinfer, or zosim for its own.",
            show_default="all papers",
        ),
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(
            "--verdict",
            help="Verdict of the claims to show: holds, condition, correction, fails, undecided, unresolved or"
            " unsettled.",
            show_default="all verdicts",
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="List claims and planted faults, and exit.")
    ] = False,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Plant each check's faults too, and verify that it notices them.")
    ] = False,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Try every fault of the chosen claims on each claim that runs the changed code, and print "
            "which claims caught it. All claims take about an hour.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Sample sizes: small, as in the tests, or full.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of all random numbers.")] = 0,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON lines on stdout, one per claim as soon as it is checked."),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", help="HTML file to write a page to, for reading or printing.", show_default=False
        ),
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence",
            help="File that collects the outcomes of random samples over runs. Use a fresh random seed, add to"
            " the file, and fail if all its runs together reject a claim.",
            show_default=False,
        ),
    ] = None,
    oracles: Annotated[
        bool, typer.Option("--oracles", help="List the closed forms with their parameters, and exit.")
    ] = False,
    oracle: Annotated[
        str | None,
        typer.Option("--oracle", metavar="NAME", help="Name of a closed form whose value to print as JSON."),
    ] = None,
    params: Annotated[
        str,
        typer.Option(
            "--params",
            metavar="JSON",
            help="Parameters of --oracle, as a JSON object such as '{\"dimension\": 8}'.",
        ),
    ] = "{}",
    estimator: Annotated[
        str | None,
        typer.Option(
            "--estimator",
            metavar="MODULE:FUNCTION",
            help="Estimator to judge instead of the claims, such as module:function, called as estimator(loss,"
            " theta, epsilon, seed).",
            rich_help_panel=_OWN,
        ),
    ] = None,
    quantizer: Annotated[
        str | None,
        typer.Option(
            "--quantizer",
            metavar="MODULE:FUNCTION",
            help="Quantizer to judge instead of the claims, such as module:function, called as "
            "quantizer(numbers, seed).",
            rich_help_panel=_OWN,
        ),
    ] = None,
    distribution: Annotated[
        str,
        typer.Option(
            "--distribution",
            help="Distribution of the perturbations of --estimator: normal, signs, sphere (of radius sqrt(d)) "
            "or any.",
            rich_help_panel=_OWN,
        ),
    ] = "normal",
    num_perturbations: Annotated[
        int,
        typer.Option(
            "--num-perturbations",
            help="Number of perturbations that --estimator averages over.",
            rich_help_panel=_OWN,
        ),
    ] = 1,
    bias_order: Annotated[
        float,
        typer.Option(
            "--bias-order",
            help="Smallest claimed order of the bias of --estimator in eps.",
            rich_help_panel=_OWN,
        ),
    ] = 2.0,
    additive: Annotated[
        bool,
        typer.Option(
            "--additive/--not-additive",
            help="Claim that estimates of two losses by --estimator add up to the estimate of their sum.",
            rich_help_panel=_OWN,
        ),
    ] = True,
    rounding: Annotated[
        str,
        typer.Option(
            "--rounding", help="Rounding of --quantizer: stochastic or nearest.", rich_help_panel=_OWN
        ),
    ] = "stochastic",
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help="Number of neighbouring values that share a scale of --quantizer.",
            show_default="all 256",
            rich_help_panel=_OWN,
        ),
    ] = None,
    largest: Annotated[
        float,
        typer.Option(
            "--largest",
            help="Largest output of --quantizer divided by its largest input.",
            rich_help_panel=_OWN,
        ),
    ] = 1.0,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            help="Number of seeds to call --estimator or --quantizer with.",
            show_default="40000 for --estimator, 2000 for --quantizer",
            rich_help_panel=_OWN,
        ),
    ] = None,
) -> None:
    """Check the papers' claims against zosim's code; exit with 1 if a check fails or misses a planted fault."""
    if estimator is not None or quantizer is not None:
        from proofs_checks import judging

        some: dict[str, Any] = {} if samples is None else {"num_samples": samples}
        judgements = []
        if estimator is not None:
            declared: dict[str, Any] = {
                "distribution": distribution,
                "num_perturbations": num_perturbations,
                "order": bias_order,
            }
            judgements.append(
                judging.judge_estimator(
                    _named("estimator", estimator),
                    name=estimator,
                    is_linear=additive,
                    seed=seed,
                    **declared,
                    **some,
                )
            )
        if quantizer is not None:
            declared = {"rounding": rounding, "group_size": group_size, "largest": largest}
            judgements.append(
                judging.judge_quantizer(
                    _named("quantizer", quantizer), name=quantizer, seed=seed, **declared, **some
                )
            )
        for judgement in judgements:
            emit(judgement.to_data(), json=json, text="\n".join(judgement.lines()))
        if any(judgement.failed for judgement in judgements):
            raise typer.Exit(1)
        return
    if oracles or oracle is not None:
        _show_oracles(oracle, params, json=json)
        return
    from proofs_checks.outcomes import Context
    from proofs_checks.registry import claims_named

    chosen = claims_named(*(claims or ()), paper=paper)
    wanted = _verdict_named(verdict)
    if list_only:
        from proofs_checks.ledger import described

        emit([described(item) for item in chosen], json=json, text=None if json else _listing(chosen))
        return
    if evidence is not None:
        from proofs_checks.evidence import fresh_seed, read_evidence

        seed, earlier = fresh_seed(), read_evidence(evidence)
    context = Context(seed=seed, size="quick" if quick else "full")
    if report is not None and not report.parent.is_dir():
        raise ZosimError(
            f"--report {report}: the directory {report.parent} does not exist",
            hint="create it, or name another file",
        )
    if matrix:
        _try_matrix(chosen, context, json=json)
        return
    entries = _run_all(chosen, context, mutate=mutate, wanted=wanted, json=json)
    failed = [entry.claim.name for entry in entries if not entry.passed]
    if evidence is not None:
        failed += _weigh(evidence, earlier, entries, json=json)
    if report is not None:
        _write_page(report, [entry for entry in entries if wanted in (None, entry.verdict)], context)
    if not json:
        stdout.print(_summary(entries, failed), markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _named(what: str, name: str) -> Any:
    import torch

    from executors.datasets.objectives import imported

    torch.set_num_threads(1)  # numbers are few, and bits depend on how many threads there are
    return imported(what, name)


def _weigh(path: Path, evidence: dict[str, Wealth], entries: list[Entry], *, json: bool) -> list[str]:
    """Add a run to the evidence of those before, and return claims that all of them together speak against."""
    from proofs_checks.evidence import ALARM, add_to, write_evidence

    against = add_to(evidence, [entry.judged for entry in entries])
    write_evidence(path, evidence)
    if not json and evidence:
        name, most = max(evidence.items(), key=lambda item: item[1].largest)
        stdout.print(
            f"{path}: {len(evidence)} claims, {most.num_runs} runs of {name}, the strongest evidence against any claim: "
            f"{most.largest:.3g} (alarm at {ALARM:.1g})",
            markup=False,
            soft_wrap=True,
        )
    return against


def _write_page(path: Path, entries: list[Entry], context: Context) -> None:
    from proofs_checks.page import page_of

    try:
        path.write_text(page_of(entries, context, path.parent), encoding="utf-8")
    except OSError as error:
        raise ZosimError(
            f"cannot write --report {path}: {error.strerror}", hint="name another file"
        ) from None


def _show_oracles(name: str | None, params: str, *, json: bool) -> None:
    from proofs_checks.oracles import evaluate, oracles

    if name is None:
        known = list(oracles().values())
        notes = [
            f"{item.name}({', '.join(f'{key}: {kind}' for key, kind in item.parameters.items())})\n"
            f"    {item.result}\n    after {item.source}"
            for item in known
        ]
        emit([item.to_data() for item in known], json=json, text="\n".join(notes))
        return
    parameters = parse_json(params, "--params is no JSON", ZosimError, hint="such as '{\"dimension\": 8}'")
    print(jsonlib.dumps(evaluate(name, parameters), allow_nan=False))


def _verdict_named(key: str | None) -> Verdict | None:
    from proofs_checks.claims import Verdict

    if key is None:
        return None
    by_key = {verdict.name.lower(): verdict for verdict in Verdict}
    if key not in by_key:
        raise ZosimError(f"unknown verdict {key!r}", hint=did_you_mean(key, list(by_key)))
    return by_key[key]


def _run_all(
    chosen: tuple[Claim, ...], context: Context, *, mutate: bool, wanted: Verdict | None, json: bool
) -> list[Entry]:
    import torch

    from proofs_checks import ledger

    torch.set_num_threads(1)  # tensors here are tiny, and bits depend on the number
    entries = []
    with progress() as bar:
        task = bar.add_task("claims", total=len(chosen))
        for entry in ledger.run(chosen, context, mutate=mutate):
            bar.update(task, description=entry.claim.name)
            entries.append(entry)
            bar.advance(task)
            if wanted not in (None, entry.verdict):
                continue
            if json:  # at once, so that a check that is stopped has said what it knows
                print(jsonlib.dumps(entry.to_data(context), allow_nan=False, ensure_ascii=False), flush=True)
            else:
                stdout.print("\n".join(_lines(entry)) + "\n", markup=False, soft_wrap=True)
    return entries


def _try_matrix(chosen: tuple[Claim, ...], context: Context, *, json: bool) -> None:
    import torch

    from proofs_checks import ledger

    torch.set_num_threads(1)
    missed = []
    for row in ledger.matrix(chosen, context):
        missed += [] if row.passed else [row.fault.name]
        if json:
            print(jsonlib.dumps(row.to_data(context), ensure_ascii=False), flush=True)
            continue
        stdout.print(f"{row.fault.name}: {row.fault.description}", markup=False, soft_wrap=True)
        for verdict in ("caught", "crashed", "survived", "does not apply"):
            if names := row.of(verdict):
                stdout.print(f"  {verdict}: {', '.join(names)}", markup=False, soft_wrap=True)
        if names := [name for name in row.of("not reached") if name in row.planted_by]:
            stdout.print(f"  not reached, but planted: {', '.join(names)}", markup=False, soft_wrap=True)
    if missed:
        raise typer.Exit(1)


def _listing(chosen: tuple[Claim, ...]) -> Any:
    rows = [
        (
            claim.paper,
            ", ".join(claim.where),
            claim.name,
            claim.verdict_if_settled.name.lower(),
            "; ".join(fault.name for fault in claim.faults),
        )
        for claim in chosen
    ]
    return Table(("paper", "where", "claim", "verdict", "planted faults"), rows)


def _lines(entry: Entry) -> list[str]:
    claim = entry.claim
    lines = [
        f"{entry.verdict.upper()}  {claim.name} ({claim.paper}, {', '.join(claim.where)}; {entry.judged.seconds:.1f} s)",
        f"       print: {claim.quotation}",
        f"       here: {claim.statement}",
    ]
    for word in ("amendment", "breaks", "consequence", "hypotheses", "references", "derivation", "awaits"):
        text = getattr(claim, word)
        lines += [f"       {word}: {text}"] if text else []
    for check, outcome in zip(claim.checks, entry.judged.outcomes, strict=True):
        came = "so" if outcome.passed else "NOT SO"
        lines.append(f"       {check.role}, {came}: {check.title}")
        lines.append(f"         {outcome.statistic:.4g} (bound {outcome.bound:.4g}), {outcome.measured}")
        lines += [f"         - {line}" for line in outcome.details]
        for tried in entry.faults:
            if tried.check is check:
                reported = tried.verdict if tried.verdict in ("caught", "crashed") else tried.verdict.upper()
                lines.append(f"         {reported}: {tried.fault.name}, {tried.fault.description}")
                lines += [f"           {tried.reason}"] if tried.reason else []
    return lines


def _summary(entries: list[Entry], failed: list[str]) -> str:
    from proofs_checks.claims import Verdict

    counts = [
        f"{number} {verdict.name.lower()}"
        for verdict in Verdict
        if (number := sum(entry.verdict is verdict for entry in entries))
    ]
    faults = [fault.verdict for entry in entries for fault in entry.faults]
    caught, crashed = faults.count("caught"), faults.count("crashed")
    planted = f"; {caught} of {len(faults)} planted faults caught, {crashed} crashed" if faults else ""
    claims = "1 claim" if len(entries) == 1 else f"{len(entries)} claims"
    return f"{claims}: {', '.join(counts)}{planted}" + (f"; wrong: {', '.join(failed)}" if failed else "")
