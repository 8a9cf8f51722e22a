"""What a machine costs for a job: prices with sources, dates and intervals, and the arithmetic of rent and ownership.

A price table is a YAML file, one entry per machine. The one that comes with the package is a starting point: prices
differ between sellers and age fast, and whoever buys has quotes of their own.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from topology.documents import preset_names
from topology.errors import ZosimError
from topology.figures import Basis
from topology.graph import Topology
from topology.instances import instance_names
from topology.reading import MAX_YAML_BYTES, parse_yaml, read_text
from topology.validation import FrozenModel, RuleError, did_you_mean, readable

HOURS_PER_YEAR = 8766.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
OLD_AFTER = datetime.timedelta(days=90)
"""Prices older than this are said to be."""
_FILE = re.compile(r"[/\\]|\.ya?ml$")

Payment = Literal["rent", "own"]
Term = Literal["on-demand", "reserved", "spot"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class PriceError(ZosimError):
    """A price table that cannot be read, or that lacks what is asked for."""


@dataclass(frozen=True, slots=True)
class Range:
    """A positive number with its interval: ``0 <= low <= value <= high``."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """Return a number without doubt."""
        return cls(value, value, value)

    def __add__(self, other: Range) -> Range:
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)

    def __mul__(self, other: Range | float) -> Range:
        by = other if isinstance(other, Range) else Range.exactly(other)
        return Range(self.value * by.value, self.low * by.low, self.high * by.high)

    def __truediv__(self, other: Range) -> Range:
        """Return the quotient; its ends are those of a dividend and a divisor that err in opposite ways."""
        return Range(self.value / other.value, self.low / other.high, self.high / other.low)


class Quote(FrozenModel):
    """One figure of a price table."""

    # value, low, high: the figure and its interval; `low` and `high` are `value` if left out.
    value: Positive
    low: Positive | None = None
    high: Positive | None = None
    source: str = Field(min_length=1)
    date: datetime.date
    of: datetime.date | None = None  # the day that the figure is of, where the source says so
    basis: Basis = "declared"  # what kind of knowledge it is; `assumed` means that no source states it
    note: str | None = None

    @model_validator(mode="after")
    def _is_an_interval(self) -> Quote:
        interval = self.range
        if not interval.low <= interval.value <= interval.high:
            message = (
                f"{interval.value:g} does not lie between low {interval.low:g} and high {interval.high:g}"
            )
            raise RuleError(message, hint="low <= value <= high")
        return self

    @property
    def day(self) -> datetime.date:
        """The day that the figure is of, or when its source was read."""
        return self.of or self.date

    @property
    def range(self) -> Range:
        """The figure with its interval."""
        return Range(
            self.value,
            self.value if self.low is None else self.low,
            self.value if self.high is None else self.high,
        )


class ShareQuote(Quote):
    """A share between 0 and 1."""

    value: Share
    high: Share | None = None


class Rent(Quote):
    """A price per hour."""

    # Whether single devices are rented, each with its share of the host, or only the whole machine.
    per: Literal["device", "machine"]
    term: Term = "on-demand"
    # provider, region: who lets it, and where; None where the figure is of several.
    provider: str | None = None
    region: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.term, self.provider, self.region)))


class MachinePrices(FrozenModel):
    """What one machine costs."""

    # One for each way to rent it, all of them for single devices or all for the whole machine; a file may have one alone.
    rent_per_hour: tuple[Rent, ...] = ()
    purchase: Quote | None = None  # price of the whole machine
    # What the whole machine draws at most; judged from its processors if left out.
    rated_power_w: Quote | None = None
    # Where it is not the table's, as for a machine outside of a data centre.
    power_usage_effectiveness: Quote | None = None

    @field_validator("rent_per_hour", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, Mapping) else value or ()

    @model_validator(mode="after")
    def _has_a_price(self) -> MachinePrices:
        if not self.rent_per_hour and self.purchase is None:
            message = "a machine needs rent_per_hour, purchase, or both"
            raise RuleError(message, hint="leave the machine out if it is not for sale")
        if len({rent.per for rent in self.rent_per_hour}) > 1:
            message = "a machine is rented by the device in one place and whole in another"
            raise RuleError(message, hint="list it twice, once by the path of its topology file")
        return self

    @property
    def quotes(self) -> tuple[Quote, ...]:
        """Every price."""
        return (*self.rent_per_hour, *(() if self.purchase is None else (self.purchase,)))


class PriceTable(FrozenModel):
    """Prices of machines, and what running one costs."""

    format: Literal[1] = 1
    date: datetime.date  # when the table was put together
    # Three capital letters; every price of the table is in it.
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
    sources: dict[str, str] = Field(default_factory=dict)
    electricity_per_kwh: Quote
    power_usage_effectiveness: Quote  # site power over the machine's own
    # load, idle: share of its rated power that a device (with its share of the machine) draws while the job runs, and while it has
    # nothing to do.
    load: ShareQuote
    idle: ShareQuote
    # Rated power of a machine over the TDP of its processors, where it states no rated power.
    surroundings: Quote
    # life_years, utilisation: how long a machine is written off over, and the share of that time in which it has work.
    life_years: Quote
    utilisation: ShareQuote
    # By the name of a preset, or the path of a topology file.
    machines: dict[str, MachinePrices] = Field(min_length=1)
    # Presets of which no price is known, each with the reason.
    not_priced: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _knows_its_machines(self) -> PriceTable:
        for name in self.machines:
            known = {"host", *preset_names(), *instance_names().values()}
            if name not in known and not _FILE.search(name):
                message = f"{name!r} is neither a preset, an instance, host, nor a topology file"
                raise RuleError(message, hint=did_you_mean(name, known))
        own = (prices.power_usage_effectiveness for prices in self.machines.values())
        for quote in (self.power_usage_effectiveness, *own):
            if quote is not None and quote.range.low < 1:
                message = f"power_usage_effectiveness {quote.range.low:g} is below 1"
                raise RuleError(message, hint="it is site power over the machine's own")
        return self

    def machine(self, name: str) -> MachinePrices:
        """Return the prices of a machine.

        Raises PriceError if the table has none.
        """
        if name not in self.machines:
            why = f": {self.not_priced[name]}" if name in self.not_priced else ""
            message = f"the price table of {self.date} has no prices of {name}{why}"
            raise PriceError(
                message, hint=f"it has prices of {', '.join(self.machines)}; give yours with --prices FILE"
            )
        return self.machines[name]


@dataclass(frozen=True, slots=True)
class JobCost:
    """What a job costs on a machine that is paid for one way."""

    payment: Payment
    # hours, money, energy_kwh: money includes electricity only where the machine is owned: who rents does not get that bill.
    hours: Range
    money: Range
    energy_kwh: Range
    outlay: Range | None = None  # price of the machine, where it must be bought first
    rent: Rent | None = None  # of a rented machine

    @property
    def terms(self) -> str:
        """How it is paid for, in words: its term, provider and region, or that it is owned."""
        return self.payment if self.rent is None else str(self.rent)

    @property
    def spent(self) -> Range:
        """Money that leaves the account before the job is done: a budget is held against it."""
        return self.money if self.outlay is None else self.outlay


def job_costs(
    table: PriceTable,
    name: str,
    topology: Topology,
    num_devices: int,
    hours: Range,
    *,
    num_rented: int | None = None,
) -> tuple[JobCost, ...]:
    """Return what a job costs in every way in which the machine can be paid for.

    - `num_devices`: compute devices that the job uses, of those that the machine has.
    - `num_rented`: devices that are paid for where single ones are let; by default those that are used.

    Raises PriceError if the table has no prices of the machine, or nothing says what it draws.

    With ``H`` hours, ``P`` rated power, ``d`` of ``D`` devices in use, and the table's figures,

    ``kWh = H · P · PUE · (load · d/D + idle · (1 - d/D)) / 1000``; only what is rented counts as idle or in use.

    ``rent = H · price · d`` (or ``H · price`` where only the whole machine is let)

    ``own = purchase · H / (years · 8766 · utilisation) + kWh · electricity``

    Ends of intervals are combined as if all figures erred together, so intervals are wide rather than narrow. An
    owned machine is charged as a whole, whatever part of it the job uses.
    """
    prices, total = table.machine(name), len(topology.compute_devices)
    site = prices.power_usage_effectiveness or table.power_usage_effectiveness
    site_w = rated_power_w(table, name, topology) * site.range
    costs = []
    for rent in prices.rent_per_hour:
        rented = num_rented or num_devices
        units, held = (rented, rented) if rent.per == "device" else (1, total)
        energy = _energy_kwh(table, site_w * (held / total), hours, num_devices / held)
        costs.append(JobCost("rent", hours, hours * rent.range * float(units), energy, rent=rent))
    if (purchase := prices.purchase) is not None:
        energy = _energy_kwh(table, site_w, hours, num_devices / total)
        worked_hours = table.life_years.range * table.utilisation.range * HOURS_PER_YEAR
        wear = purchase.range * hours / worked_hours
        money = wear + energy * table.electricity_per_kwh.range
        costs.append(JobCost("own", hours, money, energy, purchase.range))
    return tuple(costs)


def rated_power_w(table: PriceTable, name: str, topology: Topology) -> Range:
    """Return the rated power of the whole machine in watts: stated, or judged from its processors.

    Raises PriceError if the table states none, and neither do the processors' data sheets.
    """
    declared = table.machine(name).rated_power_w
    if declared is not None:
        return declared.range
    processors = [node.spec for node in topology.nodes if node.spec is not None]
    silent = [spec.name for spec in processors if spec.tdp_watts is None]
    if silent:
        message = f"the power of {name} is unknown: {silent[0]} has no tdp"
        raise PriceError(message, hint=f"add rated_power_w to the prices of {name}")
    return table.surroundings.range * sum(spec.tdp_watts or 0.0 for spec in processors)


def _energy_kwh(table: PriceTable, site_w: Range, hours: Range, used: float) -> Range:
    power = table.load.range * used + table.idle.range * (1 - used)
    return site_w * power * hours * 1e-3


def shipped_prices() -> PriceTable:
    """Return the newest table that comes with the package."""
    return _table(shipped_prices_text(), "the shipped price table")


def shipped_prices_text() -> str:
    """Return the newest table that comes with the package, as the file that it is."""
    folder = resources.files("costmodel") / "data" / "prices"
    newest = max(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return (folder / newest).read_text(encoding="utf-8")


def load_prices(path: str | Path) -> PriceTable:
    """Return the price table in a YAML file.

    Raises PriceError if the file cannot be read, is no YAML, or a figure is missing, not positive, or of no known machine.
    """
    hint = "`zosim buy --show-prices` prints one to start from"
    text = read_text(path, "price table", PriceError, hint=hint, max_bytes=MAX_YAML_BYTES)
    return _table(text, f"price table {path}")


def _table(text: str, what: str) -> PriceTable:
    data, _ = parse_yaml(text, what, PriceError, hint="check indentation, colons and quotes there")
    if not isinstance(data, Mapping):
        message = f"{what} must be a mapping with currency, machines and so on"
        raise PriceError(message, hint="`zosim buy --show-prices` prints one to start from")
    with readable(what, PriceError, model=PriceTable):
        return PriceTable.model_validate(data)
