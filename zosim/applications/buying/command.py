"""``zosim buy``: what to buy or rent for a job, why, and what would change the answer."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from costmodel.devices.prices import OLD_AFTER, PriceTable, shipped_prices_text
from topology.errors import PlanError
from zosim.applications.buying.answer import JOB_OPTIONS
from zosim.applications.buying.answer import buy as answer_for
from zosim.applications.buying.offers import Offer, RankBy
from zosim.config import PlanConfig
from zosim.console import emit, stderr
from zosim.options import Json, ReportFile, with_settings


@with_settings(PlanConfig, only=JOB_OPTIONS)
def buy(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a built-in size such as opt-66b, a model directory, a config.json, or a saved "
            "ModelSpec. Required unless --show-prices.",
            rich_help_panel="Model and data",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**12,
            help="Number of training steps of the job.",
            show_default="10000",
            rich_help_panel="Run",
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**12, help="Number of training examples, instead of --steps.", rich_help_panel="Run"
        ),
    ] = None,
    epochs: Annotated[
        float, typer.Option(help="Number of passes over --examples.", rich_help_panel="Run")
    ] = 1.0,
    machines: Annotated[
        str | None,
        typer.Option(
            help="Machines to compare, as presets or topology files, such as h200-1x,dgx-h100.",
            show_default="all in the price table",
            rich_help_panel="Hardware",
        ),
    ] = None,
    count: Annotated[
        str,
        typer.Option(
            help="Numbers of devices to try, such as 1,2,4,8; a machine with fewer devices uses all.",
            rich_help_panel="Hardware",
        ),
    ] = "1,2,4,8",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Budget of the job, such as '5000 USD', or of a month, such as '500 USD/month'.",
            show_default="no limit",
            rich_help_panel="Hardware",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Time limit of the job, such as 48h or 3d.",
            show_default="no limit",
            rich_help_panel="Hardware",
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="Price table to use; --show-prices prints one to start from.",
            show_default="the built-in table",
            rich_help_panel="Hardware",
        ),
    ] = None,
    pay: Annotated[
        Literal["either", "rent", "on-demand", "reserved", "spot", "own"],
        typer.Option(
            help="Way to pay: rent on any terms (rent) or on one of three (on-demand, reserved, spot), own, or either.",
            rich_help_panel="Hardware",
        ),
    ] = "either",
    by: Annotated[
        RankBy, typer.Option(help="Criterion to rank offers by.", rich_help_panel="Output")
    ] = "money",
    offers: Annotated[
        int, typer.Option(min=1, help="Number of offers to list, best first.", rich_help_panel="Output")
    ] = 6,
    explain: Annotated[
        int,
        typer.Option(
            min=0, help="Number of offers to explain, with what would change them.", rich_help_panel="Output"
        ),
    ] = 2,
    simulate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of offers to simulate, from the best; the others are estimated in closed form.",
            rich_help_panel="Output",
        ),
    ] = 3,
    show_prices: Annotated[
        bool,
        typer.Option(
            "--show-prices", help="Print the built-in price table, and exit.", rich_help_panel="Output"
        ),
    ] = False,
    report: ReportFile = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Rank machines by time, money and energy for a training job, and show what would change the ranking.

    For example:
      zosim buy --model opt-66b --steps 10000 --budget '5000 USD' --deadline 3d
      zosim buy --model my-model --machines h200-1x,rtx4090-2x --pay own
    """
    if show_prices:
        print(shipped_prices_text(), end="")
        return
    if model is None:
        raise PlanError("--model is missing", hint="such as --model opt-66b")
    answer = answer_for(
        model,
        steps=steps,
        examples=examples,
        epochs=epochs,
        machines=machines,
        count=count,
        budget=budget,
        deadline=deadline,
        prices=prices,
        pay=None if pay == "either" else pay,
        by=by,
        offers=offers,
        explain=explain,
        simulate=simulate,
        **settings,
    )
    _describe_prices(answer.market.prices, answer.offers)
    if report is not None:
        stderr.print(f"wrote {answer.report(report)}")
    emit(answer.to_data(), json=as_json, text=answer.view())


def _describe_prices(table: PriceTable, offers: Sequence[Offer]) -> None:
    """Say on stderr what the prices that offers rest on are worth."""
    quotes = {f"{offer.machine.name} ({offer.cost.terms})": offer.quote(table) for offer in offers}
    assumed = [name for name, quote in quotes.items() if quote.basis in ("assumed", "estimated")]
    today = datetime.date.today()
    old = {name: quote.day for name, quote in quotes.items() if today - quote.day > OLD_AFTER}
    spread = f"over {table.life_years.value:g} years at {table.utilisation.value:.0%} use"
    sentences = [f"prices of {table.date} in {table.currency}; the purchase price is spread {spread}"]
    if assumed:
        sentences.append(
            f"prices that are estimates, not quotes: {', '.join(assumed)}; give your own with --prices"
        )
    if old:
        listed = ", ".join(f"{name} of {day}" for name, day in sorted(old.items(), key=lambda item: item[1]))
        sentences.append(
            f"warning: prices older than {OLD_AFTER.days} days: {listed}; look them up, and give yours with --prices"
        )
    sentences.append(">= marks a lower bound from the closed form; --simulate N simulates more offers")
    for sentence in sentences:
        stderr.print(sentence, soft_wrap=True)
