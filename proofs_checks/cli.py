"""``zosim check``: claims of the papers against the shipped code."""

from __future__ import annotations

import json as jsonlib
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zosim.console import emit, progress, stdout
from zosim.report import Table

if TYPE_CHECKING:
    from proofs_checks.claims import Claim, Context, MutantResult, Outcome


def check(
    claim: Annotated[
        str | None, typer.Argument(help="Name of one claim; all by default.", show_default=False)
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="List claims and planted faults; check none.")
    ] = False,
    mutate: Annotated[
        bool,
        typer.Option("--mutate", help="Also plant each claim's faults and see that the check catches them."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller samples, as the tests take them.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random number.")] = 0,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON on stdout, a line for each claim as soon as it is checked."),
    ] = False,
) -> None:
    """Check the papers' claims against the shipped code; exit with 1 if one fails or a planted fault survives."""
    from proofs_checks.claims import Context
    from proofs_checks.registry import claims_named

    chosen = claims_named(claim)
    if list_only:
        emit([_described(item) for item in chosen], json=json, text=None if json else _listing(chosen))
        return
    context = Context(seed=seed, size="quick" if quick else "full")
    results = _run_all(chosen, context, mutate=mutate, json=json)
    failed = [item["name"] for item in results if not item["holds"]]
    if not json:
        stdout.print(_summary(results, failed), markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _run_all(
    chosen: tuple[Claim, ...], context: Context, *, mutate: bool, json: bool
) -> list[dict[str, Any]]:
    import torch

    from proofs_checks.claims import try_mutant

    planted = replace(context, size="quick")  # a fault shows in small samples, or it is too small a fault
    torch.set_num_threads(1)  # tensors here are tiny, and bits depend on the number
    results = []
    with progress() as bar:
        task = bar.add_task("claims", total=len(chosen))
        for claim in chosen:
            bar.update(task, description=claim.name)
            begin = time.perf_counter()
            outcome = claim.run(context)
            mutants = [try_mutant(claim, mutant, planted) for mutant in claim.mutants] if mutate else []
            results.append(_result(claim, outcome, mutants, time.perf_counter() - begin))
            if json:  # at once, so that a check that is stopped has said what it knows
                of_context = {"seed": context.seed, "size": context.size}
                print(jsonlib.dumps(results[-1] | of_context, allow_nan=False), flush=True)
            else:
                stdout.print("\n".join(_lines(claim, outcome, mutants)) + "\n", markup=False, soft_wrap=True)
            bar.advance(task)
    return results


def _result(claim: Claim, outcome: Outcome, mutants: list[MutantResult], seconds: float) -> dict[str, Any]:
    return {
        **_described(claim),
        "holds": outcome.passed and all(result.verdict == "caught" for result in mutants),
        "passed": outcome.passed,
        "statistic": _finite(outcome.statistic),
        "bound": outcome.bound,
        "measured": outcome.measured,
        "details": outcome.details,
        "mutants": [
            {
                "name": result.mutant.name,
                "change": result.mutant.description,
                "verdict": result.verdict,
                "statistic": None if result.outcome is None else _finite(result.outcome.statistic),
                "reason": result.reason,
            }
            for result in mutants
        ],
        "seconds": round(seconds, 3),
    }


def _described(claim: Claim) -> dict[str, Any]:
    return {
        "name": claim.name,
        "statement": claim.statement,
        "source": claim.source,
        "assumptions": claim.assumptions,
        "mutants": [{"name": mutant.name, "change": mutant.description} for mutant in claim.mutants],
    }


def _finite(value: float) -> float | None:
    """Return `value` for JSON, which has neither infinity nor NaN."""
    return float(value) if math.isfinite(value) else None


def _listing(chosen: tuple[Claim, ...]) -> Any:
    rows = [
        (claim.name, claim.source, "; ".join(mutant.name for mutant in claim.mutants)) for claim in chosen
    ]
    return Table(("claim", "source", "planted faults"), rows)


def _lines(claim: Claim, outcome: Outcome, mutants: list[MutantResult]) -> list[str]:
    verdict = "holds" if outcome.passed else "FAILS"
    lines = [
        f"{verdict}  {claim.name}: {outcome.statistic:.4g} (bound {outcome.bound:.4g}), {outcome.measured}",
        f"       {claim.statement}",
        f"       after {claim.source}",
        f"       assumed: {claim.assumptions}",
        *(f"       - {line}" for line in outcome.details),
    ]
    for result in mutants:
        statistic = "" if result.outcome is None else f" ({result.outcome.statistic:.4g})"
        verdict = result.verdict if result.verdict == "caught" else result.verdict.upper()
        lines.append(f"       {verdict}: {result.mutant.name}{statistic}, {result.mutant.description}")
        lines += [f"         {result.reason}"] if result.reason else []
    return lines


def _summary(results: list[dict[str, Any]], failed: list[str]) -> str:
    mutants = [mutant for item in results for mutant in item["mutants"] if "verdict" in mutant]
    caught = sum(mutant["verdict"] == "caught" for mutant in mutants)
    held = f"{sum(item['passed'] for item in results)} of {len(results)} claims hold"
    planted = f", {caught} of {len(mutants)} planted faults caught" if mutants else ""
    return held + planted + (f"; wrong: {', '.join(failed)}" if failed else "")
