"""``zosim buy``: what to buy or rent for a job, why, and what would change the answer."""

from __future__ import annotations

import enum
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.devices.prices import Payment, PriceTable, shipped_prices_text
from topology.errors import PlanError
from zosim.applications.buying.answer import JOB_OPTIONS
from zosim.applications.buying.answer import buy as answer_for
from zosim.config import PlanConfig
from zosim.console import emit, stderr
from zosim.options import Json, with_settings


class RankName(enum.StrEnum):
    """What offers are ranked by."""

    MONEY = "money"
    HOURS = "hours"
    ENERGY = "energy"


class PaymentName(enum.StrEnum):
    """Ways to pay for a machine."""

    EITHER = "either"
    RENT = "rent"
    OWN = "own"


_PAYMENTS: dict[PaymentName, Payment | None] = {
    PaymentName.EITHER: None,
    PaymentName.RENT: "rent",
    PaymentName.OWN: "own",
}


@with_settings(PlanConfig, only=JOB_OPTIONS)
def buy(
    model: Annotated[
        str | None,
        typer.Option(
            help="A shipped size (opt-66b), a model directory, a config.json, or a saved ModelSpec."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10**12, help="Steps of the job.")] = 10_000,
    machines: Annotated[
        str | None,
        typer.Option(help="Presets or topology files, as in a,b,c; by default all that the price table has."),
    ] = None,
    count: Annotated[
        str, typer.Option(help="Devices to use at most, each tried; more than there are means all.")
    ] = "1,8",
    budget: Annotated[
        str | None, typer.Option(help="Most that may be spent, such as 5000 or '5000 USD'.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Most that it may take, such as 48h or 3d.")] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Your own price table; --show-prices prints one to start from.")
    ] = None,
    pay: Annotated[
        PaymentName, typer.Option(help="Only machines that are rented, or only owned.")
    ] = PaymentName.EITHER,
    by: Annotated[RankName, typer.Option(help="What to rank by.")] = RankName.MONEY,
    explain: Annotated[int, typer.Option(min=0, help="Offers to say of what would change them.")] = 2,
    simulate: Annotated[
        int, typer.Option(min=0, help="Offers to simulate, from the first on; the others are closed form.")
    ] = 3,
    show_prices: Annotated[
        bool, typer.Option("--show-prices", help="Print the shipped price table, and do nothing else.")
    ] = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Rank machines by hours, money and energy for a job, and say what would change the answer."""
    if show_prices:
        print(shipped_prices_text(), end="")
        return
    if model is None:
        raise PlanError("what is to be tuned was not said", hint="--model opt-66b, for instance")
    answer = answer_for(
        model,
        steps=steps,
        machines=machines,
        count=count,
        budget=budget,
        deadline=deadline,
        prices=prices,
        pay=_PAYMENTS[pay],
        by=by.value,
        explain=explain,
        simulate=simulate,
        **settings,
    )
    _say_what_prices_are(answer.market.prices, {offer.machine.name for offer in answer.offers})
    emit(answer.to_data(), json=as_json, text=answer.report())


def _say_what_prices_are(table: PriceTable, names: Collection[str]) -> None:
    """Say on stderr what the prices are worth."""
    assumed = sorted(
        name
        for name, entry in table.machines.items()
        if name in names
        for quote in (entry.rent_per_hour, entry.purchase)
        if quote is not None and quote.basis in ("assumed", "estimated")
    )
    stderr.print(
        f"prices of {table.date}, {table.currency}; owned machines are written off over {table.life_years.value:g} "
        f"years at {table.utilisation.value:.0%} use",
        markup=False,
        soft_wrap=True,
    )
    if assumed:
        stderr.print(
            f"estimated rather than quoted: {', '.join(dict.fromkeys(assumed))}; use --prices for quotes of your own",
            markup=False,
            soft_wrap=True,
        )
    stderr.print(
        "steps marked >= are the closed form; --simulate N simulates more", markup=False, soft_wrap=True
    )
