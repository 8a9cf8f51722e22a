"""Prices: arithmetic checked by hand, tables refused readably, every preset in the shipped table."""

from __future__ import annotations

import datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from costmodel.devices.prices import (
    HOURS_PER_YEAR,
    PriceError,
    PriceTable,
    Range,
    job_costs,
    load_prices,
    rated_power_w,
    shipped_prices,
    shipped_prices_text,
)
from topology import load_preset, preset_names, resolve
from topology.instances import instance_names

FIGURE = {"source": "a test", "date": "2026-01-01"}


def figure(value, **more):
    return {"value": value, **FIGURE, **more}


def table_data(**machines):
    return {
        "date": "2026-01-01",
        "currency": "EUR",
        "electricity_per_kwh": figure(0.5),
        "power_usage_effectiveness": figure(2.0),
        "load": figure(0.8),
        "idle": figure(0.25),
        "surroundings": figure(1.5),
        "life_years": figure(4),
        "utilisation": figure(0.5),
        "machines": machines or {"dgx-h100": {"purchase": figure(100_000), "rated_power_w": figure(8000)}},
    }


def table(**machines):
    return PriceTable.model_validate(table_data(**machines))


HOURS = Range(10.0, 5.0, 20.0)


def test_a_rented_device_is_charged_by_the_hour_and_draws_its_share():
    prices = table(
        **{"dgx-h100": {"rent_per_hour": figure(3.0, per="device"), "rated_power_w": figure(8000)}}
    )
    (cost,) = job_costs(prices, "dgx-h100", load_preset("dgx-h100"), 2, HOURS)
    assert (cost.payment, cost.outlay) == ("rent", None)
    assert cost.money == Range(60.0, 30.0, 120.0)
    # Two eighths of 8 kW, 80 % of it, for ten hours, and as much again for cooling.
    assert cost.energy_kwh.value == pytest.approx(2 * 0.8 * 10 * 2)
    assert cost.spent == cost.money


def test_a_machine_rented_whole_is_charged_whole_and_its_idle_devices_draw():
    prices = table(
        **{"dgx-h100": {"rent_per_hour": figure(20.0, per="machine"), "rated_power_w": figure(8000)}}
    )
    (cost,) = job_costs(prices, "dgx-h100", load_preset("dgx-h100"), 2, HOURS)
    assert cost.money.value == pytest.approx(200)
    assert cost.energy_kwh.value == pytest.approx(8 * (0.8 / 4 + 0.25 * 3 / 4) * 10 * 2)


def test_an_owned_machine_wears_out_and_is_plugged_in():
    (cost,) = job_costs(table(), "dgx-h100", load_preset("dgx-h100"), 8, HOURS)
    wear = 100_000 * 10 / (4 * HOURS_PER_YEAR * 0.5)
    energy = 8 * 0.8 * 10 * 2
    assert cost.energy_kwh.value == pytest.approx(energy)
    assert cost.money.value == pytest.approx(wear + 0.5 * energy)
    assert cost.spent == Range.exactly(100_000)


def test_a_price_of_its_own_site_replaces_the_tables():
    entry = {"purchase": figure(1000), "power_usage_effectiveness": figure(1.0)}
    at_home, cooled = table(**{"cpu-laptop": entry}), table(**{"cpu-laptop": {"purchase": figure(1000)}})
    laptop = load_preset("cpu-laptop")
    (here,), (there,) = (job_costs(prices, "cpu-laptop", laptop, 1, HOURS) for prices in (at_home, cooled))
    assert there.energy_kwh.value == pytest.approx(2 * here.energy_kwh.value)


def test_power_is_judged_from_processors_where_none_is_stated():
    prices = table(**{"cpu-laptop": {"purchase": figure(1000)}})
    laptop = load_preset("cpu-laptop")
    assert rated_power_w(prices, "cpu-laptop", laptop).value == pytest.approx(1.5 * 28)
    silent = laptop.nodes[2].model_copy(
        update={"spec": laptop.nodes[2].spec.model_copy(update={"tdp": None})}
    )
    nodes = tuple(silent if node.id == silent.id else node for node in laptop.nodes)
    with pytest.raises(PriceError, match="has no tdp") as caught:
        rated_power_w(prices, "cpu-laptop", laptop.model_copy(update={"nodes": nodes}))
    assert "rated_power_w" in caught.value.hint


ranges = st.tuples(*[st.floats(0.1, 1e6)] * 3).map(sorted).map(lambda v: Range(v[1], v[0], v[2]))


@given(ranges, ranges)
def test_intervals_stay_intervals(a, b):
    for result in (a + b, a * b, a / b, a * 3.0):
        assert result.low <= result.value <= result.high


def test_the_shipped_table_has_every_preset_or_the_reason_why_not():
    prices = shipped_prices()
    instances = set(instance_names().values())
    assert {*prices.machines, *prices.not_priced} - instances == set(preset_names())
    assert not prices.machines.keys() & prices.not_priced.keys()
    for name in prices.machines:
        for cost in job_costs(prices, name, resolve(name), 1, Range.exactly(1.0)):
            assert 0 < cost.money.low <= cost.money.value <= cost.money.high
    for quotes in prices.machines.values():
        for quote in quotes.quotes:
            assert quote.low <= quote.value <= quote.high


def test_a_machine_is_rented_on_several_terms_each_of_its_day():
    rents = [
        figure(4.0, per="machine"),
        figure(1.0, per="machine", term="spot", provider="AWS", of="2025-12-01"),
    ]
    prices = table(**{"dgx-h100": {"rent_per_hour": rents, "rated_power_w": figure(8000)}})
    costs = job_costs(prices, "dgx-h100", load_preset("dgx-h100"), 8, HOURS)
    assert [(cost.terms, cost.money.value) for cost in costs] == [("on-demand", 40.0), ("spot AWS", 10.0)]
    assert prices.machine("dgx-h100").rent_per_hour[1].day == datetime.date(2025, 12, 1)
    with pytest.raises(ValueError, match="whole in another"):
        table(**{"dgx-h100": {"rent_per_hour": [figure(4.0, per="machine"), figure(1.0, per="device")]}})


def test_a_table_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(shipped_prices_text())
    assert load_prices(path) == shipped_prices()


def broken(change):
    data = table_data()
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["electricity_per_kwh"].update(value=-0.1), "electricity_per_kwh.value: must be"),
        (lambda d: d["machines"]["dgx-h100"]["purchase"].update(value=0), "purchase.value"),
        (lambda d: d["machines"]["dgx-h100"]["purchase"].update(low=2e5), "does not lie between"),
        (lambda d: d["machines"].update({"dgx-h1OO": {"purchase": figure(1)}}), "neither a preset"),
        (lambda d: d["machines"].update({"h200-1x": {}}), "needs rent_per_hour, purchase, or both"),
        (lambda d: d["machines"]["dgx-h100"]["purchase"].pop("source"), "source: missing"),
        (lambda d: d["machines"]["dgx-h100"]["purchase"].pop("date"), "date: missing"),
        (lambda d: d.pop("currency"), "currency: missing"),
        (lambda d: d.update(currency="dollars"), "currency"),
        (lambda d: d["load"].update(value=1.2), "load.value"),
        (lambda d: d["power_usage_effectiveness"].update(value=0.9), "below 1"),
        (lambda d: d.update(price=3), "unknown key"),
        (lambda d: d["machines"]["dgx-h100"].update(rent_per_hour=figure(1)), "per: missing"),
    ],
)
def test_what_cannot_be_a_price_is_refused_by_name(change, words, tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump(broken(change)))
    with pytest.raises(PriceError) as caught:
        load_prices(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_what_is_no_table_is_refused(text, tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(PriceError, match="price table") as caught:
        load_prices(path)
    assert caught.value.hint


def test_a_missing_file_and_a_missing_machine_are_named(tmp_path):
    with pytest.raises(PriceError, match="no price table at"):
        load_prices(tmp_path / "none.yaml")
    with pytest.raises(PriceError, match="no prices of h200-1x") as caught:
        table().machine("h200-1x")
    assert "--prices" in caught.value.hint
