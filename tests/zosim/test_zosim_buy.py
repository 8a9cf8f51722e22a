"""What to buy: ranking, limits, what would change the answer; against the planner and prices, and by hand."""

from __future__ import annotations

import datetime
import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import zosim
from costmodel.devices.prices import HOURS_PER_MONTH, Range, job_costs, shipped_prices
from costmodel.models.configs import read_model_spec
from tests.support.requests import set_in
from topology import load_preset
from topology.errors import PlanError, ZosimError
from topology.hardware import resolve as machine_of
from zosim.analysis.levers import levers
from zosim.applications.buying import command
from zosim.applications.buying.answer import buy as buy_for
from zosim.applications.buying.command import buy
from zosim.applications.buying.machine import Job, interval, machines_named, share_of, simulated
from zosim.applications.buying.offers import BuyerLimits, Market, Refusal
from zosim.applications.buying.search import OfferSearch, shortfall
from zosim.applications.buying.sensitivity import (
    effects,
    effects_table,
    limiter,
    memory_thresholds,
    near_ties,
    plan_effects,
)
from zosim.planning.planner import candidates, choose
from zosim.report import Table

PRICES = shipped_prices()


def job(model="opt-1.3b", num_steps=1000, **more):
    config = {"batch": 2, "seq": 256, "weights": {"dtype": more.pop("dtype")} if "dtype" in more else {}}
    return Job(set_in(model=read_model_spec(model), **(config | more)), num_steps=num_steps)


def market(*, limits=None, by="money", pay=None, **more):
    return Market(job(**more), PRICES, limits or BuyerLimits(), by, pay)


def search_of(chosen, *names, counts=(1,), num_simulated=0, num_listed=1000):
    search = OfferSearch(chosen, machines_named(names), counts, num_listed)
    search.run(num_simulated)
    return search


def offers_of(chosen, *names, **more):
    search = search_of(chosen, *names, **more)
    return search.listed, search.refused


NAMES = ("h200-1x", "a100-80gb-milan", "rtx4090-2x", "cpu-laptop")


def test_offers_are_what_the_planner_predicts_at_the_tables_prices():
    chosen = market()
    offers, refused = offers_of(chosen, "h200-1x", num_simulated=2)
    assert not refused
    best = choose(chosen.job.request("h200-1x", load_preset("h200-1x"), 1))
    hours = best.prediction.step_time_s * 1000 / 3600
    costs = job_costs(PRICES, "h200-1x", load_preset("h200-1x"), 1, Range.exactly(hours))
    assert {offer.payment for offer in offers} == {"rent", "own"}
    for offer in offers:
        (cost,) = (cost for cost in costs if cost.payment == offer.payment)
        assert offer.cost.hours.value == pytest.approx(hours)
        assert offer.cost.money.value == pytest.approx(cost.money.value)
        assert offer.cost.hours.low == pytest.approx(best.prediction.low_s * 1000 / 3600)
        assert offer.machine.prediction == best.prediction


@pytest.mark.slow
def test_an_offer_of_several_devices_is_the_plan_of_zosim_plan_stages_included():
    settings = {"batch": 1, "seq": 64, "method": "sparq"}
    answer = zosim.buy("opt-125m", machines="rtx4090-2x", count=2, pay="own", explain=0, **settings)
    planned, machine = zosim.plan("opt-125m", "rtx4090-2x", **settings), answer.offers[0].machine
    assert planned.plan.num_stages == 2
    assert (machine.plan, machine.prediction) == (planned.plan, planned.prediction)


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("by", ["money", "hours", "energy"])
def test_offers_are_ranked_by_what_is_asked(by):
    chosen = market(by=by)
    offers, _ = offers_of(chosen, *NAMES)
    assert len(offers) == 7  # the laptop cannot be rented
    metrics = [offer.metric(by) for offer in offers]
    assert metrics == sorted(metrics)


def test_the_closed_form_is_an_interval_around_itself_and_close_to_the_simulation():
    chosen = market()
    offers, _ = offers_of(chosen, "a100-80gb-milan")
    machine = offers[0].machine
    assert machine.prediction is None
    found, bound = simulated(chosen.job, machine).step_s, machine.step_s
    assert bound.low <= bound.value <= bound.high
    assert bound.value <= found.value * (1 + 1e-9)
    for end in ("value", "low", "high"):
        assert getattr(bound, end) == pytest.approx(getattr(found, end), rel=0.02)


def test_a_monthly_budget_stretches_rent_and_refuses_what_is_paid_at_once():
    """At half of what a month of rent costs, a job takes twice its hours; a machine's price is due in its first month."""
    rent = offers_of(market(pay="rent", num_steps=10**6), "a100-80gb-milan")[0][0].cost
    monthly = rent.money.value / rent.hours.value * HOURS_PER_MONTH / 2
    limits = BuyerLimits(monthly=monthly)
    assert limits.waited(rent).value == pytest.approx(2 * rent.hours.value)
    assert BuyerLimits(deadline_hours=1.5 * rent.hours.value, monthly=monthly).verdict(rent) == "no"
    offers, refused = offers_of(market(limits=limits, num_steps=10**6), "a100-80gb-milan")
    assert [offer.payment for offer in offers if offer.verdict != "no"] == ["rent"]
    assert not refused


def test_examples_make_steps_and_the_answer_says_what_they_compare_with():
    answer = buy_for(
        "opt-125m",
        seq=64,
        batch=16,
        examples=1000,
        epochs=3,
        machines="h200-1x",
        pay="rent",
        count=1,
        explain=0,
        simulate=0,
    )
    assert answer.market.job.num_steps == 188  # 3,000 examples in batches of 16
    first, source, *_, last = answer.sentences()
    assert source.startswith("its price is a list price of 2026-09-25: https://")
    assert first.startswith("h200-1x (on-demand RunPod, 1 device) does 188 steps in ")
    assert "plan for 1,880 to 18,800" in last
    money = answer.offers[0].cost.money.value
    assert answer.to_data()["offers"][0]["money_per_1000_steps"].value == pytest.approx(money / 0.188)


def test_an_explained_offer_names_what_of_its_host_is_assumed():
    instance = {"machines": "Standard_NC24ads_A100_v4", "count": 1, "simulate": 0, "explain": 1}
    text = buy_for("opt-125m", seq=64, method="zo2", **instance).view().to_markdown()
    assert "the bandwidth of dram0, 65.3 GB/s, is assumed" in text


def test_prices_older_than_90_days_are_warned_of(monkeypatch, capsys):
    """Those that offers rest on: of a machine that is rented, its old price of purchase says nothing."""
    offers, _ = offers_of(market(), "h200-1x")
    days = {offer.payment: offer.quote(PRICES).day for offer in offers}
    assert days["own"] < days["rent"]
    for after, old in ((90, {}), (91, {"own": "h200-1x (own)"})):
        today = days["own"] + datetime.timedelta(days=after)
        monkeypatch.setattr(
            command, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda today=today: today))
        )
        command._describe_prices(PRICES, offers)
        said = capsys.readouterr().err
        assert all(f"older than 90 days: {name} of {days[payment]};" in said for payment, name in old.items())
        assert ("older than" in said) == bool(old)


def test_only_one_term_of_rent_may_be_wanted():
    offers, _ = offers_of(market(pay="spot"), "rtx3090-1x", "h200-1x")
    assert {offer.cost.terms for offer in offers} == {"spot RunPod"}


@pytest.mark.slow
def test_a_plan_shows_what_each_figure_decides():
    """The first forwards of a resident model are limited by memory or products: halved they slow it, doubled they do not."""
    requested = {"batch": 2, "seq": 128, "method": "mezo"}
    decision = zosim.plan("opt-125m", "h200-1x", **requested)
    found = {effect.figure: effect for effect in plan_effects(decision)}
    memory = found["memory bandwidth of NVIDIA H200"]
    assert memory.doubled.times <= 1 <= memory.halved.times
    assert found["memory of NVIDIA H200"].doubled.times == 1
    table = effects_table("", tuple(found.values()), ranks=False)
    assert table.columns == ("figure", "now", "x2", "/2")


def test_near_ties_are_those_that_take_less_memory_and_hardly_longer():
    def plan(name, seconds, device_bytes):
        footprints = SimpleNamespace(largest=SimpleNamespace(device_bytes=device_bytes * 2**30))
        return SimpleNamespace(seconds=seconds, footprints=footprints, describe=lambda: name)

    others = (
        plan("small", 1.02, 15),
        plan("large", 1.01, 50),
        plan("middle", 1.01, 30),
        plan("late", 1.1, 1),
    )
    count, *front = near_ties(SimpleNamespace(chosen=plan("chosen", 1.0, 38), others=others))
    assert count == "3 other plans are within 2.5% of the fastest"
    assert [line.split()[2] for line in front] == ["middle", "small"]
    assert "15 GiB of device memory instead of 38 GiB, +2% a step" in front[1]


def test_limits_put_offers_last_and_say_so():
    free = offers_of(market(), *NAMES)[0]
    cheapest = free[0].cost
    middle = BuyerLimits(budget=cheapest.money.value * 1.01)
    offers, _ = offers_of(market(limits=middle), *NAMES)
    verdicts = [offer.verdict for offer in offers]
    assert verdicts == sorted(verdicts, key=["yes", "perhaps", "no"].index)
    for offer in offers:
        outlay = offer.cost.spent
        expected = (
            "no" if outlay.value > middle.budget else "perhaps" if outlay.high > middle.budget else "yes"
        )
        assert offer.verdict == expected


def test_an_owned_machine_is_held_against_its_price_not_its_wear():
    limits = BuyerLimits(budget=2000.0)
    offers, refused = offers_of(market(limits=limits, pay="own"), "h200-1x", "cpu-laptop")
    assert [item.name for item in refused] == ["h200-1x"]
    assert "at least 32,000 USD, above the budget of 2,000" in refused[0].reason
    assert [(o.machine.name, o.verdict) for o in offers] == [("cpu-laptop", "yes")]


def test_hopeless_machines_are_given_up_without_a_simulation(monkeypatch):
    def forbidden(*_args, **_more):
        raise AssertionError("simulated")

    hours = offers_of(market(by="hours"), "cpu-laptop")[0][0].cost.hours.value
    monkeypatch.setattr("zosim.planning.predict.PlannedRun.simulated", forbidden)
    offers, refused = offers_of(
        market(limits=BuyerLimits(deadline_hours=hours / 3)), "cpu-laptop", num_simulated=5
    )
    assert not offers
    assert "deadline" in refused[0].reason


def test_what_does_not_fit_says_what_it_lacks_and_what_that_would_bring():
    _, (refused,) = offers_of(market(model="opt-66b", batch=1), "cpu-laptop")
    assert isinstance(refused, Refusal)
    assert "of host memory" in refused.reason
    assert "more than 16 GiB" in refused.reason
    assert refused.remedy.startswith("with that memory it takes ")


def test_more_devices_are_used_only_if_they_help_and_are_paid_for():
    offers, _ = offers_of(market(by="hours", pay="rent"), "dgx-h100", counts=(1, 2, 2))
    used = {offer.machine.num_devices: offer.cost for offer in offers}
    assert set(used) == {1, 2}
    per_hour = {n: cost.money.value / cost.hours.value for n, cost in used.items()}
    assert per_hour[2] == pytest.approx(2 * per_hour[1])
    assert used[2].hours.value < used[1].hours.value


def test_levers_change_their_figure_and_no_other():
    topology = load_preset("a100-80gb-milan")
    for lever in levers(topology, ("gpu0",)):
        doubled = lever.apply(topology, 2.0)
        assert lever.apply(doubled, 0.5) == topology
        assert doubled != topology
    names = [lever.name for lever in levers(topology, ("gpu0",))]
    assert "bandwidth of pcie4-x16" in names
    assert "host memory" in names
    pair = [lever.name for lever in levers(load_preset("dgx-h100"), ("gpu0", "gpu1"))]
    assert "bandwidth of nvlink4" in pair
    assert "bandwidth of infiniband-ndr" not in pair


def test_a_transfer_bound_offer_is_limited_by_its_bus_and_a_resident_one_by_its_memory():
    moving = market(model="opt-13b", batch=1, seq=512, residency={"blocks": "offloaded"})
    (offloaded, *_), _ = offers_of(moving, "rtx4090-2x")
    assert limiter(moving.job, offloaded.machine).startswith("bandwidth of pcie4-x8 (x2: -4")
    chosen = market(model="opt-13b", batch=1, seq=512)
    (resident, *_), _ = offers_of(chosen, "h200-1x")
    assert "NVIDIA H200" in limiter(chosen.job, resident.machine)


@pytest.mark.slow
def test_effects_predict_what_planning_the_changed_machine_gives():
    chosen = market(model="opt-13b", batch=1, seq=512, pay="own")
    offers, _ = offers_of(chosen, "rtx4090-2x", "h200-1x")
    offer = next(o for o in offers if o.machine.name == "rtx4090-2x")
    by_name = {effect.figure: effect for effect in effects(chosen, offer, offers)}
    # Blocks that stay hide the copies of those that move.
    assert next(iter(by_name)) == "memory bandwidth of NVIDIA GeForce RTX 4090"
    first = next(lever for lever in offer.machine.levers if lever.name == next(iter(by_name)))
    for factor, change in ((2.0, by_name[first.name].doubled), (0.5, by_name[first.name].halved)):
        topology = first.apply(offer.machine.topology, factor)
        best = choose(chosen.job.request(offer.machine.name, topology, 1)).chosen
        assert change.times == pytest.approx(best.seconds / offer.machine.step_s.value, rel=0.02)
    # Beside blocks that stay, only what keeps perturbations as well is faster.
    (threshold,) = memory_thresholds(offer.machine)
    assert (threshold.where, threshold.times < 1) == ("device", True)
    assert threshold.placement == "mezo, full pass, samples ahead, perturbations kept"
    assert 48 * 2**30 < threshold.needed_bytes < 50 * 2**30


@pytest.mark.slow
def test_memory_that_holds_more_blocks_changes_which_offer_is_first():
    chosen = market(model="opt-66b", batch=1, seq=512, pay="rent")
    offers, _ = offers_of(chosen, "a100-80gb-milan", "h200-1x")
    assert [offer.machine.name for offer in offers] == ["a100-80gb-milan", "h200-1x"]
    first, second = ({e.figure: e for e in effects(chosen, offer, offers)} for offer in offers)
    memory = first["memory of NVIDIA A100 80GB PCIe"]
    assert memory.changes_answer
    assert "blocks resident" in memory.halved.placement
    assert not first["host memory"].changes_answer
    assert second["memory of NVIDIA H200"].doubled.times < 1


def invoke(*arguments):
    app = typer.Typer(add_completion=False)
    app.command()(buy)
    return CliRunner().invoke(app, list(arguments))


SMALL = ("--model", "opt-125m", "--seq", "64", "--steps", "100", "--machines", "h200-1x,cpu-laptop")


def test_the_command_prints_one_json_document_and_keeps_notes_apart():
    result = invoke(*SMALL, "--count", "1", "--simulate", "1", "--explain", "1", "--json")
    assert result.exit_code == 0, result.exception
    data = json.loads(result.stdout)
    assert data["currency"] == "USD"
    assert data["offers"][0]["is_simulated"]
    assert {offer["machine"] for offer in data["offers"]} == {"h200-1x", "cpu-laptop"}
    assert data["sensitivity"][0]["figures"]
    assert "prices of 2026" in result.stderr


def test_the_command_prints_a_table_and_what_would_change_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = invoke(*SMALL, "--count", "1", "--budget", "5 usd", "--deadline", "2d")
    assert result.exit_code == 0, result.exception
    for words in ("ranked by money", "limits", "a step with one figure changed", "critical path"):
        assert words in result.stdout


def test_the_shipped_table_can_be_printed_changed_and_used(tmp_path):
    text = invoke("--show-prices").stdout
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("currency: USD", "currency: CHF"))
    result = invoke(
        *SMALL, "--count", "1", "--prices", str(own), "--simulate", "0", "--explain", "0", "--json"
    )
    assert json.loads(result.stdout)["currency"] == "CHF"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--budget", "5 EUR"), "must be in USD"),
        (("--budget", "lots"), "not a sum of money"),
        (("--budget", "0"), "not a sum of money"),
        (("--deadline", "0h"), "must be more than 0"),
        (("--deadline", "soon"), "soon"),
        (("--deadline", "3"), "--deadline 3: a number without a unit"),
        (("--seq", "9999"), "exceeds the 2048 positions"),
        (("--machines", ","), "names no machine"),
        (("--count", "0"), "must be numbers of devices"),
        (("--count", "two"), "must be numbers of devices"),
        (("--machines", "dgx-h1OO"), "not host"),
        (("--prices", "none.yaml"), "no price table at"),
    ],
)
def test_what_cannot_be_asked_is_refused_readably(more, words):
    result = invoke(*SMALL, *more)
    assert words in result.exception.message
    assert result.exception.hint


def test_a_model_must_be_named():
    assert isinstance(invoke().exception, PlanError)


@pytest.mark.slow
def test_where_nothing_fits_the_answer_says_why_and_what_would():
    """The largest batch that fits, and the least deadline and budget, are true: asked for, they are met."""
    requested = ["--model", "opt-13b", "--seq", "2048", "--machines", "rtx4090-2x,cpu-laptop", "--count", "1"]
    answer = json.loads(_bought(requested, "--batch", "512"))
    assert answer["offers"] == []
    first, more, smaller = answer["nothing_within_limits"]
    assert "3 options fail: 3 too little memory" in first
    assert more.startswith("with ")
    assert "rtx4090-2x with 1 device, the smallest shortfall" in more
    batch = int(smaller.removeprefix("with --batch ").partition(" ")[0])
    sizes = {
        size: json.loads(_bought(requested, "--batch", str(size)))["offers"] for size in (batch, 2 * batch)
    }
    assert "rtx4090-2x" in {offer["machine"] for offer in sizes[batch]}
    assert "rtx4090-2x" not in {offer["machine"] for offer in sizes[2 * batch]}
    plain_text = invoke(*requested, "--batch", "512").stdout
    assert "ranked by" not in plain_text
    assert smaller[:12] in plain_text


@pytest.mark.slow
@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(("option", "unit"), [("--deadline", "h"), ("--budget", "")])
def test_the_limit_that_would_let_a_machine_in_does(option, unit):
    requested = ["--model", "opt-1.3b", "--seq", "256", "--machines", "a100-80gb-milan", "--count", "1"]
    requested += ["--pay", "rent", "--simulate", "1", "--explain", "0"]
    answer = json.loads(_bought(requested, option, f"0.01{unit}"))
    _, remedy = answer["nothing_within_limits"]
    wanted = remedy.removeprefix(f"with {option} ").partition(" or more")[0].strip("'")
    offers = json.loads(_bought(requested, option, wanted))
    assert [offer["within_limits"] for offer in offers["offers"]] in (["yes"], ["perhaps"])
    assert offers["nothing_within_limits"] == []


def _bought(requested, *more):
    result = invoke(*requested, *more, "--json")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_what_lacks_least_is_named_where_nothing_fits():
    """Of a desktop with two cards one copy of the weights in its memory lacks less than two."""
    one, two = (offers_of(market(model="opt-66b"), "rtx4090-2x", counts=(num,))[1][-1] for num in (1, 2))
    assert two.payments == ("rent", "own")
    assert two.needs[0].least <= one.needs[0].least


def test_an_assumed_bandwidth_widens_the_closed_form():
    """Of a machine whose host's memory limits copies, and that states nothing of its channels."""
    chosen = job(model="opt-66b")
    topology = share_of(machine_of("p4d"), 1)
    listed = candidates(chosen.request("p4d", topology, 1), chosen.bounder)
    step_s = interval(chosen, "p4d", topology, listed[0])
    memory = topology.node("dram0").bandwidth
    known = memory.model_copy(update={"basis": "datasheet"})
    stated = topology.model_copy(
        update={
            "nodes": tuple(
                node.model_copy(update={"bandwidth": known}) if node.id == "dram0" else node
                for node in topology.nodes
            )
        }
    )
    without = interval(chosen, "p4d", stated, listed[0])
    assert memory.basis == "assumed"
    assert step_s.high > 1.2 * without.high
    assert step_s.value == without.value


# -- few machines are planned, and the answer is that of all ------------------------------------------------------

CATALOGUE = ("h200-1x", "a100-80gb-milan", "rtx4090-2x", "rtx3090-1x", "cpu-laptop")


@pytest.mark.parametrize(
    ("by", "limits"),
    [
        ("money", BuyerLimits()),
        ("hours", BuyerLimits(budget=3000.0)),
        ("money", BuyerLimits(deadline_hours=0.001)),
        ("money", BuyerLimits(budget=1e-4)),
    ],
)
def test_a_search_that_plans_few_machines_finds_what_planning_all_finds(by, limits):
    """The first offers, what is least in money and in time, and where nothing stays within limits, what would let one in."""
    chosen, names = market(limits=limits, by=by), dict(machines_named(CATALOGUE))
    few, full = (search_of(chosen, *CATALOGUE, num_listed=num) for num in (2, 1000))
    assert few.waiting
    assert not full.waiting
    key = chosen.key
    best = sorted(full.within, key=key)[:2]
    assert [(o.machine.name, o.cost) for o in sorted(few.within, key=key)[:2]] == [
        (o.machine.name, o.cost) for o in best
    ]
    assert [o.cost for o in few.extremes] == [o.cost for o in full.extremes]
    assert shortfall(few, names)[1:] == shortfall(full, names)[1:]


@pytest.mark.parametrize("model", ["opt-1.3b", pytest.param("opt-66b", marks=pytest.mark.slow)])
def test_no_plan_takes_less_than_the_floor(model):
    """Neither in time, nor in memory; of one device and of several, with blocks that stay and that move."""
    chosen = market(model=model)
    for option in chosen.options(machines_named(("dgx-h100", "rtx4090-2x")), (1, 2)):
        request, least = (
            chosen.job.request(option.name, option.topology, option.num_devices),
            chosen.floor(option),
        )
        listed = candidates(request, chosen.job.bounder)
        if least.missing:
            assert listed[0].missing
        else:
            assert 0.6 * listed[0].seconds < least.step_s <= listed[0].seconds * (1 + 1e-9)


# -- shares, reasons, and what functions are called with ----------------------------------------------------------


def test_who_rents_one_device_has_its_share_of_the_host():
    """Of a DGX with 2 TiB at two domains, the memory, bandwidth and cores that one of four devices of a domain has."""
    whole = load_preset("dgx-h100")
    one = share_of(whole, 1)
    assert one.node("dram0").memory_bytes == whole.node("dram0").memory_bytes / 4
    assert one.node("dram0").bandwidth_bytes_per_s == whole.node("dram0").bandwidth_bytes_per_s / 4
    assert one.node("cpu0").spec.num_cores == round(whole.node("cpu0").spec.num_cores / 4)
    assert one.node("dram1").memory_bytes < 1e-5 * whole.node("dram1").memory_bytes
    assert one.node("gpu0") == whole.node("gpu0")
    four = share_of(whole, 4)
    assert four.node("dram0") == whole.node("dram0")
    assert four.node("dram1").memory_bytes < 1e-5 * whole.node("dram1").memory_bytes
    assert share_of(whole, 8).nodes[0] == whole.nodes[0]


@pytest.mark.slow
def test_a_slice_offloads_no_more_than_its_share_and_the_owner_may_use_all():
    chosen = market(model="opt-175b", batch=1, seq=512)
    offers, refused = offers_of(chosen, "dgx-h100")
    assert [offer.payment for offer in offers] == ["own"]
    assert [item.needs[0].cause for item in refused] == ["memory"]
    assert "host memory" in refused[0].reason


def test_all_reasons_of_a_refusal_are_said_at_once():
    """What lacks memory, and with it would be too dear and too late, is not recommended for want of memory alone."""
    limits = BuyerLimits(budget=1.0, deadline_hours=0.01)
    chosen = market(model="opt-66b", batch=1, limits=limits, pay="own")
    search = search_of(chosen, "cpu-laptop")
    assert not search.planned
    (laptop,) = search.refused
    assert [need.cause for need in laptop.needs] == ["memory", "hours", "money"]
    for part in ("of host memory", "hours, deadline", "USD, above the budget of 1"):
        assert part in laptop.reason
    (_, remedy, _) = shortfall(search, dict(machines_named(["cpu-laptop"])))
    assert " more memory and --deadline " in remedy
    assert " and --budget '" in remedy


def test_functions_take_what_the_command_line_takes():
    once = buy_for("opt-125m", seq=64, machines="h200-1x, cpu-laptop", count=1, explain=0, simulate=0)
    again = buy_for("opt-125m", seq=64, machines=["h200-1x", "cpu-laptop"], count=[1], explain=0, simulate=0)
    assert once.to_data() == again.to_data()
    assert {offer.machine.name for offer in once.offers} == {"h200-1x", "cpu-laptop"}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"by": "fun"}, "--by 'fun' is not one of its choices"),
        ({"pay": "steal"}, "--pay 'steal' is not one of its choices"),
        ({"method": "magic"}, "--method magic is not valid: must be one of"),
        ({"count": "many"}, "--count many must be numbers of devices"),
        ({"count": 0}, "--count 0 must be numbers of devices"),
        ({"count": None}, "--count None must be numbers of devices"),
        ({"machines": ","}, "--machines ',' names no machine"),
        ({"machines": "x"}, "x"),
        ({"steps": 0}, "--steps 0 must be a whole number of at least 1"),
        ({"batch": 1.5}, r"--batch 1\.5 is not valid"),
        ({"epochs": float("inf")}, "--epochs inf must be more than 0 and at most 1,000,000"),
        ({"steps": 3, "examples": 3}, "--steps and --examples both say how long the job is"),
        ({"simulate": -1}, "--simulate -1 must be a whole number of at least 0"),
    ],
)
def test_what_a_function_cannot_take_is_said(wrong, complaint):
    with pytest.raises(ZosimError, match=complaint):
        buy_for("opt-125m", **({"machines": "h200-1x"} | wrong))


def test_the_heads_of_the_tables_fit_in_eighty_columns():
    answer = buy_for("opt-125m", seq=64, machines="h200-1x", count=1, explain=0, simulate=0, deadline="9h")
    costs, placements = (part for part in answer.view().elements if isinstance(part, Table))
    for table in (costs, placements):
        # A border and two spaces for each column.
        assert sum(len(head) + 3 for head in table.columns) < 80
