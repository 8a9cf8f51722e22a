"""``zosim plan``, ``lower``, ``simulate`` and ``compare`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from topology import load_preset
from zosim import api
from zosim.cli import app
from zosim.hardware.profiles import Profiles
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.program_set import ProgramSet

PLAN = ["plan", "--model", "opt-125m", "--hardware", "a100-80gb-milan", "--seq", "128", "--dtype", "fp16"]


def call(*words: str | Path, fails: bool = False) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == (2 if fails else 0), (result.output, result.exception)
    assert not fails or result.stderr.startswith("error: ")
    return result


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    call(*PLAN, "--method", "zo2", "-o", tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_plan_says_what_and_why_and_writes_it(tmp_path: Path) -> None:
    result = call(*PLAN, "-o", tmp_path / "plan.json")
    assert "chosen" in result.stdout
    assert "bottleneck" in result.stdout
    assert "second:" in result.stdout
    assert Plan.load(tmp_path / "plan.json").seq == 128


def test_plan_as_json_is_one_document() -> None:
    data = json.loads(call(*PLAN, "--json").stdout)
    assert data["prediction"]["step_time_low_s"] <= data["prediction"]["step_time_s"]
    assert data["plan"]["model"]["name"] == "opt-125m"
    assert data["reasons"]


def test_copies_of_weights_are_planned_with_their_memory(tmp_path: Path) -> None:
    call(*PLAN, "--method", "zo2", "--weights", "copies", "--no-sample-ahead", "-o", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.weights.perturbation, plan.perturbations.sampled_ahead) == ("copies", False)
    call("lower", tmp_path / "plan.json", "-o", tmp_path / "program.json")
    (copy,) = [b for b in Program.load(tmp_path / "program.json").buffers if b.role == "copies"]
    largest = max(group.num_trainable for group in plan.model.param_groups) * 2  # bytes of a float16
    assert largest <= copy.size_bytes < 1.1 * largest


def test_copies_are_chosen_only_where_they_are_asked_for_and_never_slow_a_step() -> None:
    serial, copies = (
        json.loads(call(*PLAN, *options, "--json").stdout) for options in ([], ["--weights", "copies"])
    )
    ways = [found["plan"]["weights"]["perturbation"] for found in (serial, copies)]
    assert ways == ["serial", "copies"]
    assert copies["prediction"]["step_time_s"] <= serial["prediction"]["step_time_s"]


def test_perturbations_are_kept_where_that_is_asked_for_and_fits() -> None:
    kept, again = (
        json.loads(call(*PLAN, "--method", "mezo", *options, "--json").stdout)
        for options in (["--keep-perturbations"], ["--no-keep-perturbations"])
    )
    plans = [Plan.model_validate(found["plan"]) for found in (kept, again)]
    assert [plan.perturbations.kept for plan in plans] == [True, False]
    assert "perturbations kept" in kept["reasons"][0]
    trainable = 2 * sum(group.num_trainable for group in plans[0].model.param_groups)  # bytes of a float16
    sizes = [
        sum(
            part["size_bytes"]
            for part in found["prediction"]["memory_components"]
            if part["name"] == "perturbations"
        )
        for found in (kept, again)
    ]
    assert sizes[1] < 0.5 * trainable < trainable <= sizes[0] < 1.01 * trainable
    assert kept["prediction"]["step_time_s"] < again["prediction"]["step_time_s"]
    limit = ["--max-device-memory", f"{(kept['prediction']['device_bytes'] - trainable // 2) // 2**20}MiB"]
    error = call(*PLAN, "--method", "mezo", "--keep-perturbations", *limit, fails=True).stderr
    assert "perturbations" in error
    call(*PLAN, "--method", "mezo", *limit)


def test_simulate_agrees_with_plan_and_writes_a_trace(plan_file: Path, tmp_path: Path) -> None:
    planned = json.loads(call(*PLAN, "--method", "zo2", "--json").stdout)["prediction"]
    simulated = json.loads(call("simulate", plan_file, "--trace", tmp_path / "t.json", "--json").stdout)
    assert simulated["step_time_s"] == planned["step_time_s"]
    trace = json.loads((tmp_path / "t.json").read_text())
    assert any(event.get("ph") == "X" for event in trace["traceEvents"])


def test_an_edited_program_changes_the_prediction(plan_file: Path, tmp_path: Path) -> None:
    """A dependency too many is legal, and slower."""
    call("lower", plan_file, "-o", tmp_path / "program.json")
    data = json.loads((tmp_path / "program.json").read_text())
    for instruction in data["step"]:
        if instruction["id"].endswith("/upload") and instruction["segment"] != "block.0":
            block = int(instruction["segment"].removeprefix("block."))
            instruction.setdefault("after", []).append({"instruction": f"block.{block - 1}/restore[q0]"})
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(data))
    call("lower", plan_file, "--check", edited)
    before = json.loads(call("simulate", plan_file, "--json").stdout)["step_time_s"]
    after = json.loads(call("simulate", plan_file, "--program", edited, "--json").stdout)["step_time_s"]
    assert after > before


def test_a_program_with_a_hazard_is_refused_by_name(plan_file: Path, tmp_path: Path) -> None:
    call("lower", plan_file, "-o", tmp_path / "program.json")
    data = json.loads((tmp_path / "program.json").read_text())
    update = next(i for i in data["step"] if i["id"] == "block.5/update[q0]")
    del update["after"]
    (tmp_path / "program.json").write_text(json.dumps(data))
    error = call("simulate", plan_file, "--program", tmp_path / "program.json", fails=True).stderr
    assert "nothing orders step[0]/block.5/update[q0] and step[0]/block.5/upload" in error


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("command", "option"),
    [("simulate", "--samples"), ("simulate", "--microbatches"), ("lower", "--microbatches")],
)
def test_what_is_about_a_first_order_step_is_not_passed_over(
    plan_file: Path, command: str, option: str
) -> None:
    error = call(command, plan_file, option, 3, fails=True).stderr
    assert f"{option} 3 needs --first-order" in error


def test_lower_prints_a_program(plan_file: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(call("lower", plan_file).stdout)
    assert Program.load(tmp_path / "p.json").step


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["--dtype", "fp17"], "--dtype fp17 is not valid: must be one of", "float16"),
        (["--rng", "mezzo"], "must be one of 'mezo' or 'counter'", "did you mean 'mezo'"),
        (["--eps", "0"], "--eps 0.0 is not valid", None),
        (["--max-device-memory", "lots"], "lots", None),
        (["--max-device-memory", "20"], "--max-device-memory 20: a number without a unit", "80 GiB"),
        (
            ["--max-device-memory", "0GiB"],
            "--max-device-memory 0GiB must be above 0",
            "all memory may be used",
        ),
        (["--max-host-memory", "0 B"], "--max-host-memory 0 B must be above 0", None),
        (
            ["--residency", "resident", "--staging-buffers", "2"],
            "--staging-buffers 2 applies to offloaded",
            "offloaded",
        ),
        (["--method", "mezo", "--no-overlap"], "--no-overlap applies to offloaded", None),
        (
            ["--hardware", "cpu-laptop", "--threads", "99"],
            "99 is more than the 8 cores of cpu0",
            "8 or less",
        ),
        (["-o", "nowhere/plan.json"], "nowhere/plan.json: No such file", "make that directory"),
        (["--model", "x" * 300], "xxx: File name too long", "shorter"),
        (["--max-device-memory", "100MiB"], "no plan for opt-125m", "smaller batch"),
        (["--seq", "4096"], "--seq 4096 exceeds the 2048 positions", "--seq 2048 or less"),
        (["--device", "gpu7"], "gpu7", None),
        (["--hardware", "a100-80gb-mlian"], "a100-80gb-mlian", "a100-80gb-milan"),
        (["--model", "opt-13"], "opt-13", None),
        (["--transfer-dtype", "fp8"], "loses precision", "--allow-lossy"),
        (["--profile", "nowhere.json"], "nowhere.json", "calibrate"),
    ],
)
def test_mistakes_are_answered_in_words(words: list[str], says: str, hint: str | None) -> None:
    error = call(*PLAN, *words, fails=True).stderr
    assert says in error
    if hint is not None:
        assert hint in error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no plan at"),
        ("{", "is not a plan"),
        ("[]", "no JSON object"),
        ('{"version": 7}', "version 7"),
        ('{"version": 1, "batch": -2}', "batch"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    assert says in call("simulate", path, fails=True).stderr


def test_a_file_that_contradicts_itself_is_told_in_fields_and_options_in_options(
    plan_file: Path, tmp_path: Path
) -> None:
    data = json.loads(plan_file.read_text())
    data["residency"]["transfers"] = "shared"
    path = tmp_path / "contradiction.json"
    path.write_text(json.dumps(data))
    assert "residency.transfers=shared needs several ranks" in call("simulate", path, fails=True).stderr
    error = call(*PLAN, "--transfers", "shared", "--method", "zo2", fails=True).stderr
    assert "--transfers shared needs several ranks" in error
    assert "use --transfers private" in error


def test_a_plan_for_other_hardware_names_the_devices(plan_file: Path) -> None:
    error = call("simulate", plan_file, "--hardware", "cpu-laptop", fails=True).stderr
    assert "the plan runs on gpu0" in error
    assert "cpu0" in error


RANKS = [
    "plan",
    "--model",
    "opt-125m",
    "--hardware",
    "h20-4x-milan",
    "--seq",
    "128",
    "--batch",
    "4",
    "--dtype",
    "fp16",
]


@pytest.fixture
def plan_of_four(tmp_path: Path) -> Path:
    call(
        *RANKS,
        "--method",
        "2d",
        "--residency",
        "offloaded",
        "--transfers",
        "sliced",
        "--update",
        "delayed",
        "-o",
        tmp_path / "p.json",
    )
    return tmp_path / "p.json"


@pytest.mark.slow
def test_a_plan_of_several_ranks_is_simulated_as_it_was_planned(plan_of_four: Path) -> None:
    plan = Plan.load(plan_of_four)
    assert (plan.mesh.data, plan.mesh.perturb, plan.residency.transfers) == (2, 2, "sliced")
    data = json.loads(call("simulate", plan_of_four, "--json").stdout)
    assert data["num_ranks"] == 4
    assert [host["ranks"] for host in data["hosts"]] == [[0, 1, 2, 3]]
    assert data["host_bytes"] == data["hosts"][0]["host_bytes"]
    assert 0 < data["exchange_s"] < data["step_time_s"]
    words = call("simulate", plan_of_four).stdout
    assert "the exchange of losses and shares of blocks" in words


@pytest.mark.slow
def test_one_process_of_a_host_issues_the_copies_of_all_its_devices(
    plan_of_four: Path, tmp_path: Path
) -> None:
    slow, topology = tmp_path / "slow.json", load_preset("h20-4x-milan")
    profile = Profiles(topology).of(topology.compute_devices[0].id)
    launch = profile.constant("copy_latency_s").model_copy(update={"value": 0.05, "low": 0.05, "high": 0.05})
    profile.with_constants(launch, origin="calibrated").save(slow)
    apart, together = (
        json.loads(call("simulate", plan_of_four, "--profile", slow, *words, "--json").stdout)["step_time_s"]
        for words in ((), ("--one-process",))
    )
    # Launches are what takes long: of twelve blocks up and down and of a batch on each of four ranks. Two streams of
    # each rank launch at the same time, or all eight one after the other.
    assert apart == pytest.approx(13 * 0.05, rel=0.02)
    assert together == pytest.approx(4 * (12 + 12 + 1) * 0.05, rel=1e-3)


def test_lower_writes_all_programs_or_one_ranks(plan_of_four: Path, tmp_path: Path) -> None:
    call("lower", plan_of_four, "-o", tmp_path / "set.json")
    programs = ProgramSet.load(tmp_path / "set.json")
    assert programs.world_size == 4
    (tmp_path / "one.json").write_text(call("lower", plan_of_four, "--rank", "3").stdout)
    assert Program.load(tmp_path / "one.json") == programs.program_of(3)
    assert "on each of 4 ranks" in call("lower", plan_of_four, "--check", tmp_path / "set.json").stderr
    assert (
        "--rank 4 does not exist among 4 ranks"
        in call("lower", plan_of_four, "--rank", "4", fails=True).stderr
    )
    error = call("simulate", plan_of_four, "--program", tmp_path / "one.json", fails=True).stderr
    assert "programs are for 1 ranks, but the plan has 4" in error or "is for groups" in error


@pytest.mark.slow
def test_compare_looks_at_the_slowest_rank_or_the_one_named(plan_of_four: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    planned_run = api.simulate(plan_of_four)
    planned_run.simulated(num_steps=6).save(run / "timeline.json")
    same = json.loads(call("compare", plan_of_four, run, "--json").stdout)
    assert abs(same["step_error"]) < 1e-9
    named = json.loads(call("compare", plan_of_four, run, "--rank", "2", "--json").stdout)
    assert named["rank"] == 2
    assert "the run has no rank 9" in call("compare", plan_of_four, run, "--rank", "9", fails=True).stderr
    error = call("compare", run, fails=True).stderr
    assert "plan.json" in error
    assert "run.json" in error
    assert f"zosim compare PLAN {run}" in error
    (run / "run.json").write_text(json.dumps({"plan": Plan.load(plan_of_four).model_dump(mode="json")}))
    assert json.loads(call("compare", run, "--json").stdout) == same
    (run / "run.json").write_text('{"plan": 3}')
    assert "the plan in" in call("compare", run, fails=True).stderr
    Plan.load(plan_of_four).save(run / "plan.json")
    assert json.loads(call("compare", run, "--json").stdout) == same
    assert "is not the directory of a run" in call("compare", plan_of_four, fails=True).stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mesh", "data=2,stge=2"], "'stge' is not a mesh axis"),
        (["--mesh", "data=4", "--ranks", "2"], "has 4 ranks, but --ranks is 2"),
        (["--mesh", "data=4", "--batch", "3"], "is too small for --mesh data=4"),
        (["--mesh", "perturb=4"], "some rank would have none"),
        (["--mesh", "data=2", "--method", "zo2"], "does not allow data=2"),
        (["--ranks", "9", "--batch", "9"], "9 ranks need 9 GPUs"),
        (["--transfers", "slices"], "'sliced'"),
        (["--residency", "gone"], "must be one of 'resident', 'offloaded'"),
        (["--method", "mezo", "--residency", "offloaded"], "--method mezo keeps blocks resident"),
        (["--mesh", "data=2,data=2"], "names data twice"),
        (["--mesh", "stage=3", "--split-points", "block.5,block.3"], "must be in the model's order"),
    ],
)
def test_mistakes_about_ranks_are_answered_in_words(words: list[str], says: str) -> None:
    assert says in call(*RANKS, *words, fails=True).stderr


def test_a_format_that_a_gpu_has_no_units_for_is_told_when_planning_and_simulating(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("plan", "--model", "opt-125m", "--hardware", "t4-1x", "--batch", "4", "--seq", "64", "-o", file)
    reported = "Tesla T4 declares no peak for bfloat16: multiplied in float32"
    assert reported in " ".join(call(*words, "--dtype", "bfloat16").stdout.split())
    assert reported in " ".join(call("simulate", file).stdout.split())
    assert "declares no peak" not in call(*words, "--dtype", "float16").stdout


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("mesh", ["data=1", "data=2,perturb=2"])
def test_simulating_by_simpy_says_what_lockstep_says(tmp_path: Path, mesh: str) -> None:
    file = tmp_path / "plan.json"
    hardware = ("--hardware", "h20-4x-milan", "--batch", "4", "--seq", "64", "--mesh", mesh)
    call("plan", "--model", "opt-125m", *hardware, "-o", file)
    printed = {
        simulator: json.loads(
            call("simulate", file, "--simulator", simulator, "--steps", "6", "--json").stdout
        )
        for simulator in ("lockstep", "simpy")
    }
    for figure in ("step_time_s", "step_time_low_s", "step_time_high_s", "makespan_s"):
        assert printed["simpy"][figure] == pytest.approx(printed["lockstep"][figure], rel=1e-9)
