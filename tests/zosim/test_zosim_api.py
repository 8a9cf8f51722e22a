"""The package's API: every name it promises is there, whatever was imported before."""

from __future__ import annotations

import importlib
import json
import pkgutil
import pydoc
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import zosim
from costmodel.models.configs import LoRA, read_model_spec
from zosim.cli import app
from zosim.report import Bullets, Code, Picture, Report, Table


def test_every_promised_name_is_there() -> None:
    for module in pkgutil.iter_modules(zosim.__path__, "zosim."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in zosim.__all__:
        assert getattr(zosim, name) is not None
        assert not hasattr(getattr(zosim, name), "__path__")
    assert callable(zosim.lower)
    assert callable(zosim.choose)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'backward'"):
        zosim.backward  # noqa: B018


def test_help_of_the_package_lists_what_can_be_called() -> None:
    text = pydoc.render_doc(zosim, renderer=pydoc.plaintext)
    for name in ("plan", "simulate", "run", "compare", "buy"):
        assert re.search(rf"^    {name}( = \w+)?\(", text, re.MULTILINE), name


@pytest.mark.crossed(quick=7)
@pytest.mark.parametrize(
    ("model", "hardware", "declared", "expected"),
    [
        ("opt-13b", "a100-80gb-milan", None, "float16"),
        ("llama-3-8b", "a100-80gb-milan", None, "bfloat16"),
        ("llama-3-8b", "t4-1x", None, "float32"),
        ("gpt2", "a100-80gb-milan", None, "bfloat16"),
        ("gpt2", "t4-1x", None, "float32"),
        ("opt-125m", "cpu-laptop", None, "float32"),
        ("opt-125m", "a100-80gb-milan", "float32", "float32"),
    ],
)
def test_weights_have_the_checkpoints_format_unless_another_is_named(
    model, hardware, declared, expected
) -> None:
    options = {} if declared is None else {"dtype": declared}
    decision = zosim.plan(model, hardware, seq=16, **options)
    assert decision.plan.storage_dtype == expected
    assert decision.reasons[0].startswith(f"weights in {expected}") == (declared is None)
    if hardware == "t4-1x":
        return  # the price table has none
    answer = zosim.buy(
        model, seq=16, machines=[hardware], steps=1, count=[1], simulate=0, explain=0, **options
    )
    assert {offer.machine.plan.storage_dtype for offer in answer.offers} <= {expected}


def test_a_plan_simulated_on_other_hardware_says_which() -> None:
    decision = zosim.plan("opt-125m", "a100-80gb-milan", seq=16)
    planned = zosim.simulate(decision, "h200-1x")
    assert planned.plan.placement.topology == "h200-1x"
    assert planned.step_time_s < decision.prediction.step_time_s


def test_two_plans_are_compared_figure_by_figure(tmp_path: Path) -> None:
    files = [tmp_path / "resident.json", tmp_path / "offloaded.json"]
    plans = [zosim.plan("opt-125m", "a100-80gb-milan", seq=64, method=method) for method in ("mezo", "zo2")]
    for decision, file in zip(plans, files, strict=True):
        decision.plan.save(file)
    data = json.loads(zosim.compare(files[1], files[0]).to_json())
    first, second = (decision.prediction.step_time_s for decision in plans)
    assert data["second_over_first"]["step_time_s"] == pytest.approx(second / first)
    result = CliRunner().invoke(app, ["compare", *map(str, files)])
    assert result.exit_code == 0, result.output
    assert f"{second / first:.3g}" in result.output
    assert "mezo" in result.output
    refused = CliRunner().invoke(app, ["compare", *map(str, files), "--rank", "0"])
    assert refused.exit_code == 2


def test_planning_from_python_is_the_command(tmp_path: Path) -> None:
    options = {
        "batch": 2,
        "seq": 64,
        "dtype": "float16",
        "method": "zo2",
        "staging_buffers": 2,
        "keep_perturbations": True,
    }
    decision = zosim.plan("opt-125m", "a100-80gb-milan", max_device_memory="4GiB", **options)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = [word for word in words if word != "True"]
    command = ["plan", "--model", "opt-125m", "--hardware", "a100-80gb-milan", "--max-device-memory", "4GiB"]
    result = CliRunner().invoke(app, [*command, *words, "-o", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert zosim.Plan.load(tmp_path / "plan.json") == decision.plan
    assert zosim.simulate(tmp_path / "plan.json").step_time_s == decision.prediction.step_time_s
    assert len(repr(decision)) < 200
    assert "<table>" in decision._repr_html_()


def test_what_is_tuned_beside_a_model_is_planned_as_it_is_run() -> None:
    where = {"hardware": "a100-80gb-milan", "batch": 2, "seq": 64}
    lora = LoRA(rank=2, target_modules=("q_proj", "fc1"), lazy_steps=50, max_rank=8)
    declared = {"lora_rank": 2, "lora_targets": "q_proj,fc1", "lora_lazy_steps": 50, "lora_max_rank": 8}
    decision = zosim.plan("opt-125m", **where, **declared, weights="adapters")
    assert decision.plan.model == read_model_spec("opt-125m", trainable=lora)
    assert decision.plan.perturbs_by_adapters
    assert "opt-125m with adapters of rank 8" in repr(decision._repr_html_())
    assert zosim.plan("opt-125m", **where, prefix=5).plan.model.num_prefix_tokens == 5
    with pytest.raises(zosim.ZosimError, match="need a rank and target layers"):
        zosim.plan("opt-125m", **where, lora_rank=2)
    with pytest.raises(zosim.ZosimError, match="exclude each other"):
        zosim.plan("opt-125m", **where, prefix=5, **declared)


def test_facts_of_a_batch_count_where_a_packed_forward_saves_by_them() -> None:
    """That a plan knows nothing of the data is told."""
    options = {
        "hardware": "a100-80gb-milan",
        "batch": 16,
        "seq": 128,
        "tune": "linears",
        "distribution": "lozo",
    }
    for weights in ("adapters", "serial"):
        decision = zosim.plan("opt-125m", **options, weights=weights)
        untold = decision.plan
        facts = {"num_tokens": 40, "num_labels": 1}
        reported = untold.model_copy(update={"forward": untold.forward.model_copy(update=facts)})
        times = [zosim.simulate(plan).prediction.step_time_s for plan in (reported, untold)]
        assert (times[0] < times[1]) == (weights == "adapters")
        assert any(
            "assumes that a forward computes every token" in reason for reason in decision.reasons
        ) == (weights == "adapters")


def test_a_setting_that_there_is_not_is_named_with_its_neighbour() -> None:
    with pytest.raises(zosim.ZosimError, match="no option 'staging_bufers'") as caught:
        zosim.plan("opt-125m", "a100-80gb-milan", staging_bufers=2)
    assert "staging_buffers" in (caught.value.hint or "")


HOSTILE = st.lists(
    st.sampled_from(
        ["[a](http://x)", "![a](x.png)", "<http://x>", "<b>", "<!-- -->", "[a]: /x", "[a]", "`", "``", "\\", "|", "|-|-|", "~~~", "\n", " ", "*", "a", "\x1b"]
    ),
    max_size=9,
).map("".join)  # fmt: skip


@given(HOSTILE)
@example("[a](http://x)\n```")
@example("~~~\n[a](http://x)")
@example("` \n `[a](http://x)`")
@example("|a|b|\n|-|-|\n|`|[a](http://x)`|")
def test_what_a_report_says_brings_no_link_no_image_and_no_tag_of_its_own(text: str) -> None:
    parts = text, Bullets([text]), Code(text), Table((text,), [(text,)], title=text), Picture("a", "p.svg")
    markdown = Report(text, *parts).to_markdown()
    shown = [
        MarkdownIt("commonmark", {"html": html}).enable("table").render(markdown) for html in (True, False)
    ]
    assert shown[0] == shown[1] == Report(text, *parts).to_html()
    assert "<a " not in shown[0]
    assert shown[0].count("<img ") == 1


def test_what_is_quoted_stays_as_it_is() -> None:
    printed = Report("", "`a[0]` and a[0], `<b>` and **bold**", Table(("c",), [("`a|b[0]`",)])).to_markdown()
    assert printed == "`a[0]` and a\\[0], `<b>` and **bold**\n\n| c |\n| --- |\n| `a\\|b[0]` |\n"


def test_what_no_stage_can_do_is_planned_without_stages() -> None:
    """Points as adapters do not go with split points, and the machine has two devices."""
    requested = {"batch": 2, "seq": 32, "weights": "adapters", "distribution": "lozo", "tune": "linears"}
    assert zosim.plan("opt-125m", "rtx4090-2x", **requested).plan.mesh.stage == 1
    with pytest.raises(zosim.ZosimError, match="does not support split points"):
        zosim.plan("opt-125m", "rtx4090-2x", mesh="stage=2", **requested)
