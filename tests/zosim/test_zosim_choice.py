"""Zeroth or first order: recipes beside a plan, and the sentence that decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import zosim
from topology.errors import PlanError
from zosim.applications.first_order.choice import OrderChoice
from zosim.applications.first_order.recipes import adapter_shapes
from zosim.cli import app
from zosim.planning.views import decision_data, decision_view


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> OrderChoice:
    decision = zosim.plan("opt-1.3b", "a100-80gb-milan", dtype="bfloat16", method="mezo", batch=8, seq=256)
    compared = zosim.compare_first_order(decision)
    assert isinstance(compared.compared, OrderChoice)
    assert compared.compared.verdict in decision_view(compared).to_html()
    page = zosim.write_report(compared, output=tmp_path_factory.mktemp("page") / "page.html")
    assert compared.compared.verdict in page.read_text(encoding="utf-8")
    assert decision_data(compared)["first_order"] == zosim.choose_order(decision).to_data()
    return compared.compared


def test_zeroth_order_is_the_wrong_choice_where_adapters_fit(choice: OrderChoice) -> None:
    assert choice.best is not None
    assert choice.best.name == "lora"
    assert choice.verdict.startswith("Zeroth order is the wrong choice here: lora fits")
    assert choice.zeroth.usd is not None
    full = next(one for one in choice.recipes if one.name == "adamw-fp32-master")
    assert choice.zeroth.device_bytes < full.device_bytes


def test_three_peaks_and_three_counters_of_the_recipe_are_shown(choice: OrderChoice) -> None:
    best = choice.best
    assert best is not None
    assert set(best.peaks) == {"loss", "backward", "update"}
    assert max(best.peaks, key=lambda name: best.peaks[name]) == best.peak
    assert max(best.peaks.values()) <= best.reserved_bytes < best.device_bytes
    shown = choice.view().to_markdown()
    assert all(f"{name} " in shown for name in ("loss", "backward", "update"))
    assert "reserved by it" in shown
    zeroth, *recipes = choice.to_data()["options"]
    assert not zeroth["allocated_bytes"]
    assert all(max(one["allocated_bytes"].values()) <= one["reserved_bytes"] for one in recipes)


def test_steps_to_a_target_decide_where_both_are_known(choice: OrderChoice) -> None:
    few = replace(choice, zeroth_order_steps=100, first_order_steps=1000)
    many = replace(choice, zeroth_order_steps=20_000, first_order_steps=625)
    assert few.verdict.startswith("Zeroth order is the choice here")
    assert many.verdict.startswith("Zeroth order is the wrong choice here")
    assert many.zeroth.total_s == pytest.approx(20_000 * many.zeroth.step_s)


@pytest.mark.slow
def test_zeroth_order_is_the_choice_where_no_recipe_fits() -> None:
    decision = zosim.plan("opt-175b", "a100-80gb-milan", dtype="float16", batch=1, seq=256)
    choice = zosim.choose_order(decision)
    assert choice.best is None
    assert "no first-order recipe fits" in choice.verdict


def test_the_command_compares_and_says_what_steps_need() -> None:
    words = ["plan", "--model", "opt-125m", "--hardware", "a100-80gb-milan", "--dtype", "float16"]
    words += ["--batch", "1", "--seq", "64"]
    shown = CliRunner().invoke(app, [*words, "--compare", "first-order"])
    assert shown.exit_code == 0, shown.output
    assert "qlora-nf4-dq" in shown.output
    refused = CliRunner().invoke(app, [*words, "--first-order-steps", "5"])
    assert refused.exit_code == 2


def test_targets_of_adapters_go_by_the_names_of_tools(choice: OrderChoice) -> None:
    model = choice.planned.plan.model
    assert adapter_shapes(model, "q_proj, v_proj") == adapter_shapes(model, "q,v") == 2 * [(2048, 2048)]
    with pytest.raises(PlanError, match="no linear is called 'x'"):
        adapter_shapes(model, "x")
