"""Earlier spellings of options, values, keywords and keys of files work for one release, and say so."""

from __future__ import annotations

import json
import re
import warnings
from importlib import import_module
from typing import Annotated, Literal

import pytest
import typer

import zosim
from costmodel.models import model_spec
from costmodel.models.configs import read_model_spec
from costmodel.rates import profile
from tests.support.builders import unshared
from topology.errors import PlanError
from topology.hardware import resolve
from zosim import cli, renamed
from zosim.lowering import lower_all
from zosim.plans import Plan
from zosim.program.program_set import ProgramSet
from zosim.simulators.simulate import simulate
from zosim.timeline import Timeline

GONE = "the old spelling goes in the next release"


def plain(
    text: Annotated[str, typer.Option("--text", "-t", help="Text.")] = "",
    flag: Annotated[bool, typer.Option(help="Flag.")] = True,
    order: Annotated[Literal["full", "lazy"], typer.Option(help="Order.")] = "full",
) -> None:
    """Print what was typed."""
    print(json.dumps([text, flag, order]))


app = typer.Typer(help="A group.")
app.command()(plain)
app.callback()(lambda: None)


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    options = (
        ("--words", "--text"),
        ("--sign", "--flag"),
        ("--words", "--num-batches"),
        ("--size", "--batch"),
    )
    monkeypatch.setattr(renamed, "OPTIONS", options)
    monkeypatch.setattr(renamed, "VALUES", (("--order", "sweep", "full"), ("--dtype", "real", "float32")))


def typed(command, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    printed = capsys.readouterr()
    return ended.value.code or 0, printed.out, printed.err


@pytest.mark.parametrize(
    "build", [lambda: (cli.build("plain", plain), []), lambda: (cli.build("app", app), ["plain"])]
)
@pytest.mark.parametrize(
    ("arguments", "meant", "warned"),
    [
        (["--words", "a"], ["a", True, "full"], ["--words is now --text"]),
        (["--words=a"], ["a", True, "full"], ["--words is now --text"]),
        (["--no-sign"], ["", False, "full"], ["--no-sign is now --no-flag"]),
        (["--order", "sweep"], ["", True, "full"], ["--order sweep is now --order full"]),
        (["--order=sweep"], ["", True, "full"], ["--order sweep is now --order full"]),
        (["-t", "--words"], ["--words", True, "full"], []),
        (["--text", "--words", "--sign"], ["--words", True, "full"], ["--sign is now --flag"]),
        (["--text", "sweep"], ["sweep", True, "full"], []),
    ],
)  # fmt: skip
def test_an_earlier_spelling_works_and_warns_once(build, arguments, meant, warned, capsys):
    command, path = build()
    code, out, err = typed(command, [*path, *arguments], capsys)
    assert (code, json.loads(out)) == (0, meant)
    assert err.splitlines() == [f"warning: {what}; {GONE}" for what in warned]


def test_help_does_not_show_an_earlier_spelling(capsys):
    _, out, _ = typed(cli.build("plain", plain), ["--help"], capsys)
    assert "--text" in out
    assert "--words" not in out


def test_an_option_that_no_command_has_is_refused_as_it_was_typed(capsys):
    code, _, err = typed(cli.build("plain", plain), ["--size", "3"], capsys)
    assert code == 2
    assert "--size" in err


def test_only_the_first_of_several_ranks_warns(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert typed(cli.build("plain", plain), ["--words", "a"], capsys)[2] == ""
    monkeypatch.setenv("RANK", "0")
    assert "--words is now --text" in typed(cli.build("plain", plain), ["--words", "a"], capsys)[2]


def test_a_function_takes_earlier_keywords_and_values():
    here = {"seq": 16, "dtype": "float32"}
    with pytest.warns(DeprecationWarning, match=f"^size= is now batch=; {GONE}$") as caught:
        decision = zosim.plan("opt-1m", "cpu-laptop", size=3, **here)
    assert decision.plan.batch == 3
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=f"^dtype='real' is now dtype='float32'; {GONE}$"):
        zosim.plan("opt-1m", "cpu-laptop", seq=16, dtype="real")
    with pytest.raises(PlanError, match="there is no option 'size'"):
        zosim.plan("opt-1m", "cpu-laptop", size=3, batch=3, **here)


def test_a_function_takes_earlier_names_of_its_own_parameters(monkeypatch):
    monkeypatch.setattr(renamed, "OPTIONS", (("--players", "--simulator"),))
    decision = zosim.plan("opt-1m", "cpu-laptop", seq=16, dtype="float32")
    with pytest.warns(DeprecationWarning, match="players= is now simulator="):
        assert zosim.simulate(decision, players="simpy").simulator == "simpy"


def test_present_spellings_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zosim.plan("opt-1m", "cpu-laptop", seq=16, dtype="float32", batch=2)


@pytest.fixture(scope="module")
def good_plan() -> dict[str, object]:
    return json.loads(zosim.plan("opt-1m", "cpu-laptop", seq=16).plan.model_dump_json())


def test_plans_models_are_read_in_earlier_names(monkeypatch, good_plan):
    monkeypatch.setattr(
        import_module("zosim.plans.upgrade"), "RENAMED", {"moves": "residency", "residency.where": "blocks"}
    )
    monkeypatch.setattr(model_spec, "RENAMED", {"width": "hidden_size"})
    residency = dict(good_plan["residency"])
    residency["where"] = residency.pop("blocks")
    model = dict(good_plan["model"])
    model["width"] = model.pop("hidden_size")
    old = good_plan | {"moves": residency, "model": model}
    del old["residency"]
    assert Plan.model_validate(old) == Plan.model_validate(good_plan)


def test_a_profile_is_read_in_earlier_names(monkeypatch, tmp_path):
    from zosim.hardware.profiles import Profiles

    topology = resolve("cpu-laptop")
    device = topology.compute_devices[0].id
    good = Profiles(topology).of(device)
    old = good.model_dump(mode="json")
    old["device"] = old.pop("device_name")
    for constant in old["constants"]:
        constant["name"] = constant["name"].replace("burst", "peak")
    rows = {"device": "device_name", "constants.name=peak*": "burst*"}
    monkeypatch.setattr(profile, "RENAMED", rows)
    assert profile.Profile.model_validate(old) == good
    path = tmp_path / "profile.json"
    profile.save_checksummed(old, path, "profile", profile.ProfileError)
    assert profile.load_profile(path) == good


def test_a_profile_that_says_parts_is_read():
    from zosim.hardware.profiles import Profiles

    good = Profiles(resolve("cpu-laptop")).of("cpu0")
    said = ("shared_sampling", "skip", "slowdown")
    old = re.sub(f'"({"|".join(said)})_fraction', r'"\1_part', good.model_dump_json())
    assert '"skip_part' in old
    assert profile.Profile.model_validate_json(old) == good


def test_programs_and_models_that_say_groups_and_habits_are_read(tmp_path):
    programs = lower_all(zosim.plan("opt-1m", "cpu-laptop", seq=16, batch=2, mesh="data=2").plan)
    old = programs.to_json().replace('"process_groups"', '"groups"')
    assert '"groups"' in old
    assert ProgramSet.from_data(json.loads(old), "old.json") == programs
    plan = zosim.plan("opt-1m", "cpu-laptop", seq=16).plan
    old = plan.model_dump_json().replace('"param_groups"', '"groups"').replace('"quirks"', '"habits"')
    assert '"habits"' in old
    assert Plan.model_validate_json(old) == plan
    spec = tmp_path / "model.json"
    spec.write_text(json.dumps(json.loads(old)["model"]))
    assert read_model_spec(str(spec)) == plan.model


def test_programs_whose_operations_and_dependencies_say_group_are_read():
    options = {"seq": 16, "batch": 2, "residency": "offloaded", "transfers": "sliced"}
    programs = lower_all(zosim.plan("opt-1m", "cpu-laptop", mesh="data=2", **options).plan)
    stages = lower_all(zosim.plan("opt-1m", "cpu-laptop", seq=16, mesh="stage=2").plan)
    now = programs.to_json() + stages.to_json()
    types = re.findall(r'"type": "(\w+)"[^}]*"(?:param|process)_group"', now)
    assert {"collective", "send", "recv", "sample", "perturb", "update"} <= set(types)
    for current in (programs, stages):
        old = re.sub('"(param|process)_group"', '"group"', current.to_json()).replace(
            '"op": {"type"', '"op": {"kind"'
        )
        assert '{"kind": "collective"' in old or '{"kind": "send"' in old
        assert ProgramSet.from_data(json.loads(old), "old.json") == current


def test_a_timeline_that_says_parts_and_slots_is_read():
    timeline = simulate(lower_all(zosim.plan("opt-1m", "cpu-laptop", seq=16).plan).programs[0], unshared())
    old = timeline.to_json().replace('"phase"', '"part"').replace('"staging buffers"', '"slots"')
    assert '"part"' in old
    assert Timeline.from_data(json.loads(old), "old.json") == timeline
