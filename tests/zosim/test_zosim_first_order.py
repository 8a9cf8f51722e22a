"""First-order steps as programs: rules, closed forms, published formulas, and every simulator."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_zosim_lockstep import assert_same_run, assert_same_step
from typer.testing import CliRunner

from costmodel.devices.datasheet import datasheet_profile
from costmodel.models.configs import spec_of_config
from costmodel.work import Work
from topology import load_preset
from topology.errors import Hazard, PlanError
from zosim.analysis.counts import step_counts
from zosim.applications.first_order.programs import PRESETS, FirstOrder, lower_first_order
from zosim.applications.first_order.report import baseline_run
from zosim.applications.first_order.settings import first_order_of, num_kept_at_once, turns
from zosim.applications.trace import chrome_trace
from zosim.cli import app
from zosim.planning.predict import PlannedRun
from zosim.plans import Estimator, ForwardPass, Mesh, Placement, Plan, Split, Weights
from zosim.program import Program
from zosim.program.instructions import Stream
from zosim.program.operations import Backward, Forward, Recv, Send
from zosim.program.program_set import ProgramSet
from zosim.program.validate import validate
from zosim.program.validate_set import validate_set
from zosim.simulators.closed_form import step_time_bound_of
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import periodic_step_s
from zosim.simulators.simulate import simulate_world

PRESET = "dgx-h100"
TOPOLOGY = load_preset(PRESET)
GPUS = [device.id for device in TOPOLOGY.compute_devices if device.type == "gpu"]
SPLIT_POINTS = ((), ("block.1",), ("block.1.mlp",), ("block.0", "block.1.mlp", "block.2"))
NUM_BLOCKS, WIDTH, INNER, HEADS = 4, 64, 256, 4
SMALL = {
    "opt": {
        "model_type": "opt", "vocab_size": 500, "hidden_size": WIDTH, "num_hidden_layers": NUM_BLOCKS,
        "ffn_dim": INNER, "num_attention_heads": HEADS, "max_position_embeddings": 128, "word_embed_proj_dim": WIDTH,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 500, "n_embd": WIDTH, "n_layer": NUM_BLOCKS, "n_head": HEADS,
        "n_positions": 128,
    },
}  # fmt: skip


def plan_of(split_points=(), *, data=1, model="opt", batch=8, seq=16, **axes):
    inside = tuple(
        int(split_point.split(".")[1]) for split_point in split_points if split_point.endswith("mlp")
    )
    axes = {
        "mesh": Mesh(data=data, stage=len(split_points) + 1),
        "split": Split(split_points=split_points),
        **axes,
    }
    devices = tuple(GPUS[: axes["mesh"].world_size])
    return Plan(
        model=spec_of_config(SMALL[model], name=model, split_blocks=inside),
        placement=Placement(topology=PRESET, devices=devices),
        batch=batch,
        seq=seq,
        **axes,
    )


def planned_run_of(plan, order=None):
    planned = PlannedRun(plan, TOPOLOGY, datasheet_profile(TOPOLOGY, GPUS[0]))
    return planned if order is None else baseline_run(planned, order)


def settings_of(schedule="gpipe", num_microbatches=1, preset="sgd", recompute=False, sharding="none"):
    changed = {
        "schedule": schedule,
        "num_microbatches": num_microbatches,
        "recompute": recompute,
        "sharding": sharding,
    }
    return FirstOrder.model_validate(PRESETS[preset].model_dump() | changed)


ORDERS = st.builds(
    settings_of,
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(sorted(PRESETS)),
    st.booleans(),
    st.sampled_from(["none", "full"]),
)


@settings(max_examples=15)
@given(st.sampled_from(SPLIT_POINTS), st.sampled_from([1, 2]), ORDERS)
def test_all_ranks_keep_the_rules(split_points, data, order):
    validate_set(lower_first_order(plan_of(split_points, data=data), order))


@settings(max_examples=4)
@given(st.sampled_from(SPLIT_POINTS[1:]), st.sampled_from([1, 2]), ORDERS)
def test_every_simulator_runs_them_alike(split_points, data, order):
    world = planned_run_of(plan_of(split_points, data=data), order).world
    assert_same_run(world, 3)
    assert_same_step(world)
    step_s = periodic_step_s(world)
    assert periodic_step_s(fold(world)) == pytest.approx(step_s, rel=1e-9)
    assert step_time_bound_of(world) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "order", [settings_of("1f1b", 2, "aq-sgd"), settings_of("gpipe", 2, "adam")], ids=str
)
def test_cutting_any_dependency_of_a_middle_stage_is_refused(order):
    program = lower_first_order(plan_of(("block.0", "block.2")), order).program_of(1)
    opened, num_waits = set(), 0
    for position, instruction in enumerate(program.step):
        is_first = instruction.stream not in opened
        opened.add(instruction.stream)
        for edge in range(0 if is_first else len(instruction.after)):
            after = instruction.after[:edge] + instruction.after[edge + 1 :]
            step = [*program.step]
            step[position] = replace(instruction, after=after)
            with pytest.raises(Hazard, match="nothing orders"):
                validate(replace(program, step=tuple(step)))
            num_waits += 1
    assert num_waits >= 10


def test_a_backward_before_its_forward_is_refused():
    program = lower_first_order(plan_of(), settings_of()).program_of(0)
    at = {item.id: number for number, item in enumerate(program.step)}
    step = [*program.step]
    forward, backward = at["block.3/forward[m0]"], at["block.3/backward[m0]"]
    step[forward], step[backward] = step[backward], step[forward]
    with pytest.raises(Hazard):
        validate(replace(program, step=tuple(step)))


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 5), st.data())
def test_every_microbatch_goes_there_and_back_and_few_are_kept(schedule, num, num_stages, data):
    stage = data.draw(st.integers(0, num_stages - 1))
    listed, kept, most = list(turns(schedule, num, num_stages, stage)), set(), 0
    for way, number in listed:
        (kept.add if way == "forward" else kept.remove)(number)
        most = max(most, len(kept))
    assert sorted(listed) == sorted((way, n) for way in ("forward", "backward") for n in range(num))
    assert most == num_kept_at_once(schedule, num, num_stages, stage)


def even(programs: ProgramSet, forward_s: float, backward_s: float) -> ProgramSet:
    """Return the programs with one forward and one backward a stage that take time, and nothing else that does."""

    def timed(program: Program) -> Program:
        seen, step = set(), []
        for item in program.step:
            key = (type(item.op), getattr(item.op, "microbatch", None))
            is_one = isinstance(item.op, Forward | Backward) and key not in seen
            seen.add(key)
            seconds = (forward_s if isinstance(item.op, Forward) else backward_s) if is_one else 0.0
            link = Work(link_bytes=item.work.link_bytes) if isinstance(item.op, Send | Recv) else Work()
            step.append(replace(item, work=Work(param_pass_bytes=round(seconds * 1e12)) if is_one else link))
        return replace(program, step=tuple(step))

    return ProgramSet(tuple(map(timed, programs.programs)), programs.roles, programs.process_groups)


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_the_bubble_is_that_of_gpipe(schedule, num_microbatches):
    """(m + p - 1)/m times the work of a stage, where stages are even and messages free."""
    order, split_points = settings_of(schedule, num_microbatches), ("block.0", "block.1", "block.2")
    planned = planned_run_of(plan_of(split_points), order)
    listed = even(planned.programs, 1.0, 2.0)
    one, machines = listed.program_of(0), planned.machines
    work = next(item for item in one.step if isinstance(item.op, Forward))
    pair = [
        next(item for item in one.step if isinstance(item.op, kind) and item.work.param_pass_bytes)
        for kind in (Forward, Backward)
    ]
    seconds = sum(machines[0].activity(one, item).seconds for item in pair)
    assert work.work.param_pass_bytes
    step_s = periodic_step_s(replace(planned, edited=listed).world)
    expected_s = (num_microbatches + len(split_points)) * seconds
    assert step_s == pytest.approx(expected_s, rel=2e-3)  # messages are not quite free


@pytest.mark.parametrize("split_points", SPLIT_POINTS[1:])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("data", [1, 2])
def test_two_activations_cross_a_boundary_for_each_microbatch(split_points, num_microbatches, data):
    plan = plan_of(split_points, data=data)
    counts = step_counts(lower_first_order(plan, settings_of("gpipe", num_microbatches)))
    widths = [WIDTH + (INNER if split_point.endswith("mlp") else 0) for split_point in split_points]
    numbers = 8 * 16 * sum(widths)
    for count, size in (
        (counts.num_activations, counts.activation_bytes),
        (counts.num_gradients, counts.gradient_bytes),
    ):
        assert count == num_microbatches * data * len(split_points)
        assert 4 * numbers <= size <= 4 * numbers + 200 * count  # headers
    assert counts.num_scalars == 0


def test_aq_sgd_sends_four_bits_there_and_eight_back():
    plan = plan_of(("block.1.mlp",), batch=32, seq=128)
    counts = step_counts(lower_first_order(plan, settings_of(preset="aq-sgd")))
    numbers = 32 * 128 * (WIDTH + INNER)
    assert counts.activation_bytes == pytest.approx(numbers / 2, rel=1e-2)
    assert counts.gradient_bytes == pytest.approx(numbers, rel=1e-2)


def test_aq_sgd_keeps_the_messages_of_every_sample_at_both_ends():
    order = settings_of(preset="aq-sgd").model_copy(update={"num_kept_samples": 500})
    planned = planned_run_of(plan_of(("block.1.mlp",)), order)
    parts = {part.name: part.size_bytes for taken in planned.footprints.ranks for part in taken.components}
    assert parts["kept messages"] == 500 * 16 * (WIDTH + INNER) * 4
    fetched = [
        item.id for item in planned.program.step if item.stream is Stream.H2D and item.label == "fetch"
    ]
    assert fetched == ["messages/fetch/out[m0]"]


def device_components(programs, rank=0):
    parts = {}
    for buffer in programs.program_of(rank).buffers:
        if buffer.space == "device":
            parts[buffer.role] = parts.get(buffer.role, 0) + buffer.size_bytes
    return parts


def test_adam_takes_sixteen_bytes_a_parameter():
    parts = device_components(lower_first_order(plan_of(), settings_of(preset="adam")))
    num_parameters = plan_of().model.num_parameters
    taken = parts["weights"] + parts["gradients"] + parts["optimizer state"]
    assert taken == pytest.approx(16 * num_parameters, rel=1e-2)  # tensors are aligned
    assert "optimizer state" not in device_components(lower_first_order(plan_of(), settings_of()))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activations_are_those_of_korthikanti_et_al(schedule):
    """Four blocks of s·b·h·(34 + 5·a·s/h), for all four microbatches or, on one stage, for one."""
    plan = plan_of(model="gpt2", seq=64, forward=ForwardPass(attention="eager"))
    half = plan.model_copy(update={"weights": Weights(dtype="float16")})
    program = lower_first_order(half, settings_of(schedule, 4)).program_of(0)
    kept = sum(b.size_bytes for b in program.buffers if b.name.startswith("kept.block"))
    b, s, h, a = 2, 64, WIDTH, HEADS
    assert kept == (4 if schedule == "gpipe" else 1) * NUM_BLOCKS * (34 * s * b * h + 5 * a * s * s * b)


@pytest.mark.parametrize("order", [settings_of("gpipe", 4), settings_of("1f1b", 4)], ids=["gpipe", "1f1b"])
def test_the_memory_curve_never_exceeds_the_footprint(order):
    planned = planned_run_of(plan_of(("block.1",)), order)
    for rank in (0, 1):
        peak = planned.timeline.peak_memory("device", rank)
        listed = {part.name: part.size_bytes for part in planned.footprints.ranks[rank].components}
        counted = sum(listed[role] for role in (*device_components(planned.programs, rank), "workspace"))
        assert 0.7 * counted < peak.size_bytes <= counted


@settings(max_examples=8)
@given(st.sampled_from(SPLIT_POINTS), st.sampled_from([1, 2]), ORDERS)
def test_a_step_takes_as_long_as_its_busiest_stream_and_no_longer_than_all_of_it(split_points, data, order):
    planned = planned_run_of(plan_of(split_points, data=data), order)
    total, busiest = 0.0, 0.0
    for rank, machine in enumerate(planned.machines):
        program, busy = planned.programs.program_of(rank), {}
        for item in program.step:
            seconds = machine.activity(program, item).seconds
            busy[item.stream] = busy.get(item.stream, 0.0) + seconds
        total += sum(busy.values()) + machine.step_s()
        busiest = max(busiest, *busy.values())
    assert busiest * (1 - 1e-9) <= planned.step_time_s <= total * (1 + 1e-9)


def test_replicas_sum_gradients_while_the_rest_goes_back():
    order = settings_of("gpipe", 2)
    planned = planned_run_of(plan_of(("block.1",), data=2), order)
    program = planned.programs.program_of(0)
    sums = [item for item in program.step if item.label == "all_reduce"]
    assert {item.op.process_group for item in sums} == {"replicas", "ends"}
    # A ring's rank receives 2(n - 1)/n of the buffer: here as much as it has.
    blocks = [
        item for item in sums if item.op.process_group == "replicas" and item.segment.startswith("block")
    ]
    assert [item.work.link_bytes for item in blocks] == [item.reads[0].size_bytes for item in blocks]
    spans = {s.instruction: s for s in simulate_world(planned.world, num_steps=1).spans if s.rank == 0}
    assert spans["block.1/all_reduce[replicas]"].start_s < spans["block.0/backward[m1]"].end_s


def test_two_tables_are_not_summed():
    tied, apart = (
        lower_first_order(plan_of(("block.1",)), FirstOrder(sums_ends=sums)) for sums in (True, False)
    )
    validate_set(apart)
    table = plan_of().model.param_groups_of("head")[0]
    assert step_counts(apart).reduced_bytes == 0
    # Two ranks receive as much as the table has, aligned.
    assert step_counts(tied).reduced_bytes == pytest.approx(2 * 4 * table.num_parameters, rel=0.01)


def test_programs_are_written_and_read_and_drawn(tmp_path):
    planned = planned_run_of(plan_of(("block.1.mlp",)), settings_of("1f1b", 2, "aq-sgd"))
    planned.programs.save(tmp_path / "programs.json")
    assert ProgramSet.load(tmp_path / "programs.json") == planned.programs
    names = {event["name"] for event in chrome_trace(planned.timeline)["traceEvents"]}
    assert {"forward block.3", "backward block.3", "Memcpy DtoH keep block.1.front"} <= names


def test_ranks_at_other_points_take_other_sequences():
    programs = lower_first_order(plan_of(mesh=Mesh(perturb=2)), settings_of())
    assert programs.world_size == 2
    assert programs.program_of(0).process_groups["replicas"] == 2


@pytest.mark.parametrize(
    ("axes", "order", "complaint"),
    [
        ({"batch": 3}, settings_of("gpipe", 4), "--microbatches 4 is more"),
        ({"batch": 1, "mesh": Mesh(perturb=2)}, settings_of(), "batch of 1"),
    ],
)
def test_a_batch_too_small_is_refused(axes, order, complaint):
    with pytest.raises(PlanError, match=complaint):
        lower_first_order(plan_of(**axes), order)


@pytest.mark.slow
def test_a_plan_is_compared_like_with_like(tmp_path):
    plan = plan_of(
        ("block.1.mlp",),
        estimator=Estimator(difference="forward", num_perturbations=5),
        split=Split(split_points=("block.1.mlp",), codec="q4", residual_codec="q4"),
    )
    plan.save(tmp_path / "plan.json")
    arguments = ["simulate", str(tmp_path / "plan.json"), "--first-order", "aq-sgd", "--samples", "100"]
    trace = tmp_path / "trace.json"
    done = CliRunner().invoke(app, [*arguments, "--first-order-trace", str(trace), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["counts"]["num_activations"], data["counts"]["num_scalars"]) == (6, 6)
    baseline = data["first_order"]
    assert (baseline["counts"]["num_activations"], baseline["counts"]["num_gradients"]) == (1, 1)
    assert baseline["settings"]["num_kept_samples"] == 100
    assert baseline["step_time_low_s"] <= baseline["step_time_s"] <= baseline["step_time_high_s"]
    assert json.loads(trace.read_text())["traceEvents"]
    written = tmp_path / "programs.json"
    lowered = CliRunner().invoke(app, ["lower", arguments[1], "--first-order", "aq-sgd", "-o", str(written)])
    assert lowered.exit_code == 0, lowered.output
    again = CliRunner().invoke(app, ["simulate", arguments[1], "--program", str(written), "--json"])
    assert json.loads(again.stdout)["step_time_s"] == pytest.approx(baseline["step_time_s"])
    shown = CliRunner().invoke(app, arguments)
    assert "their gradients back" in shown.stdout
    refused = CliRunner().invoke(app, ["simulate", arguments[1], "--first-order-trace", str(trace)])
    assert refused.exit_code != 0


def test_a_model_with_frozen_parameters_is_refused():
    plan = plan_of()
    model = plan.model
    groups = tuple(
        g.model_copy(update={"num_trainable": 0, "num_trainable_tensors": 0, "largest_trainable_tensor": 0})
        if g.name == "block.0"
        else g
        for g in model.param_groups
    )
    frozen = plan.model_copy(update={"model": model.model_copy(update={"param_groups": groups})})
    with pytest.raises(PlanError, match="frozen"):
        lower_first_order(frozen, settings_of())


def test_replicas_that_share_weights_out_hold_a_part_and_gather_the_rest():
    """ZeRO's third stage: gathered for each forward and each backward, gradients summed into shares."""
    plan = plan_of(data=4)
    whole, sharded = (
        lower_first_order(plan, settings_of("gpipe", 2, "adam", sharding=sharding))
        for sharding in ("none", "full")
    )
    # Every share begins at a multiple of 256 bytes, which is a few hundredths of parameters as small as these.
    for role in ("weights", "gradients", "optimizer state"):
        assert device_components(sharded)[role] == pytest.approx(device_components(whole)[role] / 4, rel=0.07)
    program = sharded.program_of(0)
    gathers = [item for item in program.step if item.label == "gather" and item.segment == "block.1"]
    sums = [item for item in program.step if item.label == "all_reduce" and item.segment == "block.1"]
    assert (len(gathers), len(sums)) == (2 * 2, 2)
    size = 4 * plan.model.param_group("block.1").num_parameters
    for item in (*gathers, *sums):
        assert item.work.link_bytes == pytest.approx(size * 3 / 4, rel=0.05)
    # The weights of the next block come while one computes.
    spans = {s.instruction: s for s in simulate_world(planned_run_of(plan, settings_of("gpipe", 2, "adam", sharding="full")).world, num_steps=1).spans if s.rank == 0}  # fmt: skip
    assert spans["block.2/gather[forward:m0]"].start_s < spans["block.1/forward[m0]"].end_s


def test_recomputing_keeps_inputs_alone_and_runs_blocks_again():
    plan = plan_of(model="gpt2", seq=64)
    plain, again = (
        lower_first_order(plan, settings_of(recompute=more)).program_of(0) for more in (False, True)
    )
    hidden = 4 * 8 * 64 * WIDTH
    kept = {b.name: b.size_bytes for b in again.buffers if b.name.startswith("kept.block")}
    assert set(kept.values()) == {hidden}

    def flops(program, name):
        return next(item.work.flops for item in program.step if item.id == name)

    forward = flops(plain, "block.1/forward[m0]")
    assert flops(again, "block.1/backward[m0]") == flops(plain, "block.1/backward[m0]") + forward
    assert flops(again, "head/backward[m0]") == flops(plain, "head/backward[m0]")


def test_options_of_a_first_order_step_change_what_they_say():
    def of(**declared):
        planned = planned_run_of(plan_of((), data=2, batch=2, seq=1), first_order_of("adam", **declared))
        pass_bytes = sum(item.work.param_pass_bytes for item in planned.programs.program_of(0).step)
        return planned.step_time_s, planned.footprints.largest.device_bytes, pass_bytes

    usual = of()
    recomputed, shared, unfused = of(recompute=True), of(sharding="full"), of(foreach=True)
    assert recomputed[0] > usual[0]
    assert recomputed[1] < usual[1]
    assert shared[1] < usual[1]
    # A copy of a moment beside so little that is kept, and 18 passes for 7.
    assert unfused[1] > usual[1]
    assert unfused[2] > 2 * usual[2]


def test_what_is_about_a_first_order_step_asks_for_one():
    assert first_order_of(None, microbatches=1, schedule="gpipe", recompute=False, samples=1) is None
    for declared, words in (
        ({"recompute": True}, "--recompute needs"),
        ({"sharding": "full"}, "--sharding full needs"),
        ({"microbatches": 2}, "--microbatches 2 needs"),
    ):
        with pytest.raises(PlanError, match=words):
            first_order_of(None, **declared)
    with pytest.raises(PlanError, match="--foreach does not apply to --first-order sgd"):
        first_order_of("sgd", foreach=True)
