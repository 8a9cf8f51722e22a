"""Lowering: every point of the placement space becomes a program that keeps both rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import LoRA, Work, read_model_spec
from costmodel.formats.distributions import COUNTER_BLOCK_ELEMENTS, JUMP_RAW
from topology.errors import Hazard, PlanError, ProgramError
from zosim.lowering import lower
from zosim.lowering.perturbations import passing_work
from zosim.plans import Estimator, ForwardPass, Perturbations, Placement, Plan, Residency, Schedule, Weights
from zosim.program import Program
from zosim.program.contents import Perturbation
from zosim.program.instructions import Instruction, Stream
from zosim.program.operations import Forward, Sample, Update
from zosim.program.step_graph import StepGraph
from zosim.program.validate import validate

MODELS = {
    "tied": read_model_spec("opt-125m"),
    "untied": read_model_spec("llama-2-7b"),
    "projected": read_model_spec("opt-350m"),
    "adapters": read_model_spec("opt-125m", trainable=LoRA(rank=4, target_modules=("q_proj", "v_proj"))),
}


def plan_of(model: str = "tied", **axes: object) -> Plan:
    placement = Placement(topology="cpu-laptop", devices=("cpu0",))
    return Plan(model=MODELS[model], placement=placement, batch=2, seq=32, **axes)  # type: ignore[arg-type]


def zo2(model: str = "tied", **residency: object) -> Plan:
    offloaded = Residency(blocks="offloaded", **residency)  # type: ignore[arg-type]
    return plan_of(model, residency=offloaded, schedule=Schedule(update="delayed"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any point of the space whose axes agree."""
    model = draw(st.sampled_from(sorted(MODELS)))
    blocks = draw(st.sampled_from(["resident", "offloaded"]))
    is_full_pass = blocks == "resident" and draw(st.booleans())
    may_offload_ends = blocks == "offloaded" and not MODELS[model].tied_head
    storage = draw(st.sampled_from(["float32", "bfloat16"]))
    return plan_of(
        model,
        estimator=Estimator(
            difference=draw(st.sampled_from(["central", "forward"])),
            num_perturbations=draw(st.integers(1, 3)),
        ),
        perturbations=Perturbations(
            distribution=draw(st.sampled_from(["gaussian", "rademacher"])),
            rng=draw(st.sampled_from(["mezo", "counter"])),
            order=draw(st.sampled_from(["registration", "execution"])),
            sampled_ahead=draw(st.booleans()),
            kept=draw(st.booleans()),
        ),
        weights=Weights(dtype=storage, perturbation=draw(st.sampled_from(["serial", "copies"]))),
        residency=Residency(
            blocks=blocks,
            embedding_and_head="offloaded" if may_offload_ends and draw(st.booleans()) else "resident",
            num_staging_buffers=draw(st.integers(1, 4)),
            overlap=draw(st.booleans()),
            reuse_staging_buffers=draw(st.booleans()),
            transfer_dtype=draw(st.sampled_from([storage, "bfloat16", "float8_e4m3"])),
        ),
        schedule=Schedule(
            traversal="full" if is_full_pass else "blockwise",
            update="immediate" if is_full_pass else draw(st.sampled_from(["immediate", "delayed"])),
        ),
    )


@pytest.mark.slow
@given(plans())
def test_every_placement_keeps_both_rules(plan: Plan) -> None:
    validate(lower(plan))


@given(plans())
def test_every_parameter_is_updated_once_per_perturbation(plan: Plan) -> None:
    updates = Counter(i.op.param_group for i in lower(plan).step if isinstance(i.op, Update))
    trainable = [group.name for group in plan.model.param_groups if group.num_trainable]
    assert updates == Counter(dict.fromkeys(trainable, plan.estimator.num_perturbations))


def test_a_program_survives_json(tmp_path) -> None:
    program = lower(zo2())
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == program


def samples_per_group(plan: Plan) -> set[int]:
    program = lower(plan)
    kept = [i.op.param_group for i in program.step if isinstance(i.op, Sample) and i.op.keep == "all"]
    return set(Counter(name for name in kept if name.startswith("block")).values())


def test_a_full_pass_samples_four_times_and_blockwise_twice() -> None:
    assert samples_per_group(plan_of(schedule=Schedule(traversal="full"))) == {4}
    assert samples_per_group(plan_of()) == {2}
    assert samples_per_group(zo2()) == {2}
    assert samples_per_group(
        plan_of(perturbations=Perturbations(kept=True), schedule=Schedule(traversal="full"))
    ) == {1}
    assert samples_per_group(plan_of(perturbations=Perturbations(kept=True))) == {1}


@pytest.mark.parametrize("num_staging_buffers", [1, 2, 3, 5])
def test_a_staging_buffer_is_not_overwritten_before_its_offload_is_done(num_staging_buffers: int) -> None:
    program = lower(zo2(num_staging_buffers=num_staging_buffers))
    run = StepGraph(program, num_steps=2)
    index = {(item.step, item.instruction.id): item.index for item in run.listed if item.phase == "step"}
    for i in range(MODELS["tied"].num_blocks - num_staging_buffers):
        earlier, later = index[0, f"block.{i}/offload"], index[0, f"block.{i + num_staging_buffers}/upload"]
        assert run.ordered(earlier, later)


def test_copies_run_beside_compute_unless_overlap_is_off() -> None:
    def are_ordered(plan: Plan) -> bool:
        program = lower(plan)
        run = StepGraph(program, num_steps=1)
        index = {item.instruction.id: item.index for item in run.listed if item.phase == "step"}
        return run.ordered(index["block.0/forward[q0+]"], index["block.1/upload"])

    assert not are_ordered(zo2())
    assert are_ordered(zo2(overlap=False))


def without_edge(program: Program, position: int, edge: int) -> Program:
    instruction = program.step[position]
    after = instruction.after[:edge] + instruction.after[edge + 1 :]
    edited = replace(instruction, after=after)
    return replace(program, step=(*program.step[:position], edited, *program.step[position + 1 :]))


def is_start_of_step(program: Program, instruction: Instruction) -> bool:
    """Whether an edge of `instruction` only says that the host issues one step after the other."""
    first = next(i for i in program.step if i.stream is instruction.stream)
    return instruction is first


@pytest.mark.parametrize(
    "plan", [zo2(), zo2(num_staging_buffers=1), zo2(reuse_staging_buffers=False)], ids=["3", "1", "fresh"]
)
def test_cutting_any_dependency_is_refused(plan: Plan) -> None:
    program = lower(plan)
    num_removed = 0
    for position, instruction in enumerate(program.step):
        for edge in range(len(instruction.after)):
            if is_start_of_step(program, instruction):
                continue
            with pytest.raises(Hazard, match="nothing orders"):
                validate(without_edge(program, position, edge))
            num_removed += 1
    assert num_removed > 2 * plan.model.num_blocks


def test_a_hazard_names_both_instructions_the_buffer_and_the_fix() -> None:
    program = lower(zo2())
    position = next(k for k, i in enumerate(program.step) if i.id == "block.4/offload")
    with pytest.raises(Hazard) as caught:
        validate(without_edge(program, position, 0))
    assert "block.4/offload" in str(caught.value)
    assert "block.4/restore[q0]" in str(caught.value)
    assert "staging.1" in str(caught.value)
    assert "make block.4/offload wait for block.4/restore[q0]" in str(caught.value)


def test_a_moved_instruction_is_refused() -> None:
    program = lower(plan_of())
    ids = [i.id for i in program.step]
    k = ids.index("block.3/forward[q0-]")
    step = list(program.step)
    step[k - 1], step[k] = step[k], step[k - 1]  # forward before the perturbation that it needs
    with pytest.raises(
        Hazard, match=r"block\.3/forward\[q0-\] needs block\.3\[t\] at q0-.*finds block\.3\[t\] at q0\+"
    ):
        validate(replace(program, step=tuple(step)))


def test_an_update_that_is_never_flushed_is_refused() -> None:
    with pytest.raises(Hazard, match=r"after the flush .* must hold"):
        validate(replace(lower(zo2()), flush=()))


def test_signs_that_see_different_perturbations_are_refused() -> None:
    program = lower(plan_of(estimator=Estimator(num_perturbations=2)))
    edited = tuple(
        replace(
            i,
            reads=tuple(
                replace(a, what=Perturbation("block.2", 1)) if isinstance(a.what, Perturbation) else a
                for a in i.reads
            ),
        )
        if i.id == "block.2/perturb[q0-]"
        else i
        for i in program.step
    )
    with pytest.raises(Hazard, match=r"needs z:block\.2"):
        validate(replace(program, step=edited))


def test_a_range_outside_its_buffer_is_refused() -> None:
    program = lower(plan_of())
    small = tuple(replace(b, size_bytes=8) if b.name == "perturbations" else b for b in program.buffers)
    with pytest.raises(ProgramError, match=r"perturbations, which has 8"):
        validate(replace(program, buffers=small))


def test_an_unknown_dependency_is_refused() -> None:
    program = lower(zo2())
    first = program.step[0]
    edited = replace(first, after=(replace(first.after[0], instruction="nothing"),))
    with pytest.raises(ProgramError, match=r"waits for 'nothing'"):
        validate(replace(program, step=(edited, *program.step[1:])))


def test_draws_ahead_leave_the_compute_stream() -> None:
    program = lower(plan_of(perturbations=Perturbations(sampled_ahead=True)))
    assert {i.stream for i in program.step if isinstance(i.op, Sample)} == {Stream.SAMPLE}


def test_frozen_weights_are_uploaded_and_not_offloaded() -> None:
    program = lower(zo2("adapters"))
    sizes = {i.id: i.work.copy_bytes for i in program.step}
    assert sizes["block.0/offload"] < sizes["block.0/upload"] / 20


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        (
            {"residency": Residency(blocks="offloaded"), "schedule": Schedule(traversal="full")},
            "traversal=full",
        ),
        ({"schedule": Schedule(traversal="full", update="delayed")}, "update=delayed"),
        ({"residency": Residency(blocks="offloaded", embedding_and_head="offloaded")}, "shares one table"),
        ({"residency": Residency(embedding_and_head="offloaded")}, "needs residency.blocks=offloaded"),
        ({"weights": Weights(dtype="float16"), "residency": Residency(transfer_dtype="float32")}, "wider"),
        (
            {"estimator": Estimator(num_perturbations=4096)},
            "114688 segment forwards per step and rank, more than",
        ),
        ({"weights": Weights(dtype="float16"), "forward": ForwardPass(compute_dtype="tf32")}, "tf32"),
        (
            {"weights": Weights(dtype="float16"), "forward": ForwardPass(compute_dtype="bfloat16")},
            "compute_dtype=bfloat16 and weights.dtype=float16 are two different",
        ),
    ],
)
def test_axes_that_contradict_each_other_are_refused(axes: dict[str, object], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        plan_of(**axes)


def test_draws_say_who_makes_how_many_numbers():
    def works(**axes):
        return {i.id: i.work for i in lower(plan_of(**axes)).step if isinstance(i.op, Sample)}

    sequential, counted = works(), works(perturbations=Perturbations(rng="counter"))
    first, norm = sequential["block.0/sample[q0]"], sequential["head/sample[q0]"]
    again = next(
        work for name, work in sequential.items() if name.startswith("block.0/") and name.endswith(":update")
    )
    assert norm.num_shared_normals == 0 < norm.num_normals
    assert first.num_shared_normals == first.num_normals > 1 << 20
    assert again.num_shared_normals == again.num_normals == first.num_normals
    assert counted["block.0/sample[q0]"].num_shared_normals == first.num_normals
    name, rows = next((name, work) for name, work in sequential.items() if work.num_kept_rows)
    assert 0 < rows.num_kept_rows <= 64
    table = rows.num_normals + rows.num_skipped
    assert rows.num_normals == pytest.approx(rows.num_kept_rows * 768, rel=0.02)
    assert table > 100 * rows.num_normals
    counted_rows = counted[name]
    assert counted_rows.num_normals + counted_rows.num_skipped < table
    assert rows.num_normals <= counted_rows.num_normals
    assert counted_rows.num_seeds <= counted_rows.num_kernels == rows.num_kept_rows
    assert counted["block.0/sample[q0]"].num_seeds >= first.num_normals / COUNTER_BLOCK_ELEMENTS
    assert first.num_split_sequences == 1 > again.num_split_sequences == first.num_seeds
    signs = works(perturbations=Perturbations(distribution="rademacher", rng="counter"))
    assert all(work.num_shared_normals == 0 for work in signs.values())


def test_a_skip_of_many_numbers_is_one_jump_and_past_few_or_signs_none():
    axes = Perturbations(), Perturbations(distribution="rademacher"), Perturbations(rng="counter")
    far, signs, counted = (passing_work(JUMP_RAW, perturbations, "float32") for perturbations in axes)
    assert (far.num_jumps, far.num_jumped, far.num_skipped) == (1, JUMP_RAW, JUMP_RAW)
    assert (signs.num_jumps, signs.num_skipped) == (0, JUMP_RAW)
    assert counted == Work()
    near = passing_work(JUMP_RAW - 1, Perturbations(), "float32")
    assert (near.num_jumps, near.num_jumped, near.num_skipped) == (0, 0, JUMP_RAW - 1)


def test_updates_in_narrow_formats_are_watched_at_the_cost_of_a_few_kernels():
    def updates(**axes):
        return [i.work for i in lower(plan_of(**axes)).step if i.label == "update"]

    wide = updates()
    narrow = updates(weights=Weights(dtype="bfloat16"))
    assert {n.num_kernels - w.num_kernels for n, w in zip(narrow, wide, strict=True)} == {8}


def test_packed_batches_count_what_they_compute() -> None:
    """Of 8 sequences of 20 tokens on average, the first 12 the same, of which two have labels: rows of products, at two points."""

    def work(segment: str, **forward: int) -> Work:
        plan = Plan.model_validate(
            {
                "model": read_model_spec("opt-125m", trainable="linears"),
                "placement": {"topology": "test", "devices": ["cpu0"]},
                "batch": 8,
                "seq": 32,
                "weights": {"perturbation": "adapters"},
                "perturbations": {"distribution": "lozo"},
                "forward": forward,
            }
        )
        return next(i.work for i in lower(plan).step if isinstance(i.op, Forward) and i.op.segment == segment)

    def rows(segment: str, **forward: int) -> int:
        return max(one.m for one in work(segment, **forward).matmuls)

    reported = {"num_tokens": 20, "num_shared": 12, "num_labels": 2}
    assert rows("block.0") == rows("head") == 2 * 8 * 32
    assert rows("block.0", num_tokens=20) == 2 * 8 * 20
    assert rows("block.0", **reported) == 2 * (12 + 8 * (20 - 12))
    assert rows("head", **reported) == 2 * 8 * 2
    assert rows("block.0", **reported, num_answers=3) == 2 * (12 + 3 * (20 - 12))
    assert rows("head", **reported, num_answers=3) == 2 * 8 * 2
    # Behind the last attention there are those that predict a label, where few do.
    by_width = {one.n: one.m for one in work("block.11", **reported).matmuls if min(one.n, one.k) > 2}
    assert by_width == {768: 2 * 8 * 2, 3072: 2 * 8 * 2}
    assert [one.m for one in work("block.11", **reported).matmuls[:4]] == [2 * (12 + 8 * 8)] * 3 + [2 * 8 * 2]
    assert (
        rows("block.11", **reported | {"num_labels": 8})
        == work("block.11", **reported | {"num_labels": 8}).matmuls[4].m
    )
    pairs = sum(one.num * one.query * one.key for one in work("block.0", **reported).attention)
    # What is shared sees itself, the rest itself and what is shared: at 2 points, 12 heads.
    assert pairs == 2 * 12 * (12 * 12 + 8 * (8 * 8 + 8 * 12))
    longer = sum(
        one.num * one.query * one.key for one in work("block.0", **reported, num_attended=26).attention
    )
    assert longer == 2 * 12 * (12 * 14 + 8 * (8 * 14 + 8 * 12)) - 2 * 12 * 12 * (
        14 - 12
    )  # what is shared sees itself
    for forward, complaint in (
        ({"num_shared": 20, "num_tokens": 20}, "20 shared tokens are too many"),
        ({"num_tokens": 33}, "at most 32"),
    ):
        with pytest.raises(PlanError, match=complaint):
            work("head", **forward)
