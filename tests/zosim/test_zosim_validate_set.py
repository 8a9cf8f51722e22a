"""What several ranks must keep together: whatever is cut, moved or resized is refused, and by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import read_model_spec
from topology.errors import Hazard, PlanError, ProgramError
from zosim.eval_points import EvalPoint
from zosim.lowering import lower_all
from zosim.plans import Estimator, Mesh, Perturbations, Placement, Plan, Residency, Schedule, Split
from zosim.program import Program
from zosim.program.instructions import Access, Dependency, Instruction
from zosim.program.operations import Collective, Recv, Scalar, Send
from zosim.program.program_set import ProgramSet
from zosim.program.validate_set import validate_set

MODEL = read_model_spec("opt-125m")

MESHES = (
    Mesh(data=2),
    Mesh(perturb=2),
    Mesh(data=2, perturb=2),
    Mesh(data=2, perturb=2, inner="data"),
    Mesh(data=3, perturb=2),
)


def plan(mesh: Mesh, transfers: str = "shared", *, ranks_per_host: int = 0, **axes: object) -> Plan:
    ranks = range(mesh.world_size)
    hosts = tuple(f"host{rank // ranks_per_host}" for rank in ranks) if ranks_per_host else ()
    residency = {"blocks": "offloaded", "transfers": transfers, **axes.pop("residency", {})}
    return Plan(
        model=MODEL,
        placement=Placement(topology="some", devices=tuple(f"gpu{rank}" for rank in ranks), hosts=hosts),
        batch=7,
        seq=8,
        mesh=mesh,
        residency=Residency.model_validate(residency),
        schedule=Schedule(update=axes.pop("update", "delayed")),
        **axes,
    )


def edited(
    programs: ProgramSet, role: int, change: Callable[[Instruction], Instruction | None]
) -> ProgramSet:
    """Return `programs` with every step instruction of one role changed, or left out."""
    program = programs.programs[role]
    step = tuple(new for item in program.step if (new := change(item)) is not None)
    return with_program(programs, role, replace(program, step=step))


def with_program(programs: ProgramSet, role: int, program: Program) -> ProgramSet:
    listed = list(programs.programs)
    listed[role] = program
    return replace(programs, programs=tuple(listed))


@pytest.mark.crossed(quick=8, slow=3)
@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
@pytest.mark.parametrize("transfers", ["private", "shared", "sliced"])
@pytest.mark.parametrize("update", ["delayed", "immediate"])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_lowered_is_valid(mesh: Mesh, transfers: str, update: str, *, overlap: bool) -> None:
    validate_set(lower_all(plan(mesh, transfers, update=update, residency={"overlap": overlap})))


@pytest.mark.parametrize("transfers", ["shared", "sliced"])
def test_hosts_share_out_by_themselves(transfers: str) -> None:
    programs = lower_all(plan(Mesh(data=3, perturb=2), transfers, ranks_per_host=2))
    assert programs.process_groups["host"] == ((0, 1), (2, 3), (4, 5))
    validate_set(programs)


def test_perturbations_are_points_of_the_mesh() -> None:
    four = plan(Mesh(perturb=4), "private", estimator=Estimator(num_perturbations=2))
    programs = lower_all(four)
    assert [four.eval_points_of(rank) for rank in range(4)] == [
        (EvalPoint(perturbation, sign),) for perturbation in (0, 1) for sign in (1, -1)
    ]
    assert programs.roles == (0, 1, 2, 3)
    validate_set(programs)


def peer_edges(program: Program) -> Iterator[tuple[str, Dependency]]:
    for item in program.step:
        yield from ((item.id, edge) for edge in item.after if edge.process_group)


def hazards(programs: ProgramSet) -> list[str]:
    try:
        validate_set(programs)
    except Hazard as hazard:
        return [hazard.message]
    return []


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("num_staging_buffers", [3, 12])
def test_no_block_is_overwritten_while_peers_upload_it_nor_read_while_they_offload_it(
    num_staging_buffers: int,
) -> None:
    """Removing a wait is refused, unless the exchange of losses and the reuse of staging buffers imply it."""
    programs = lower_all(plan(Mesh(perturb=2), residency={"num_staging_buffers": num_staging_buffers}))
    refused = set()
    for name, edge in peer_edges(programs.programs[0]):

        def removed(item: Instruction, name: str = name, edge: Dependency = edge) -> Instruction:
            kept = tuple(other for other in item.after if other != edge)
            return replace(item, after=kept) if item.id == name else item

        refused |= {name for found in hazards(edited(programs, 0, removed)) if name in found}
    assert refused >= {f"block.{i}/offload" for i in range(MODEL.num_blocks)}
    # With a staging buffer for each block, no staging buffer's reuse orders the last block's upload after the peers' offload.
    assert (f"block.{MODEL.num_blocks - 1}/upload" in refused) == (num_staging_buffers == MODEL.num_blocks)


def test_slices_need_no_wait_for_peers() -> None:
    """A slice has one writer and one reader, the same rank; peers get it by message."""
    programs = lower_all(plan(Mesh(data=2), "sliced"))
    assert not list(peer_edges(programs.programs[0]))


def test_reading_more_than_a_share_without_peers_is_refused() -> None:
    """A sliced program whose upload takes the whole block races with the others' offloads."""
    programs = lower_all(plan(Mesh(perturb=2), "sliced"))

    def whole(item: Instruction) -> Instruction | None:
        if item.id == "block.1/all_gather":
            return None
        if item.id != "block.1/upload":
            after = tuple(edge for edge in item.after if edge.instruction != "block.1/all_gather")
            moved = len(after) < len(item.after)
            return replace(item, after=(*after, Dependency("block.1/upload"))) if moved else item
        return replace(
            item,
            reads=tuple(replace(access, share="") for access in item.reads),
            writes=tuple(replace(access, share="") for access in item.writes),
        )

    both = edited(edited(programs, 0, whole), 1, whole)
    with pytest.raises(Hazard, match=r"block.1/upload .* not ordered"):
        validate_set(both)


def without(name: str) -> Callable[[Instruction], Instruction | None]:
    return lambda item: None if item.id == name else item


def waiting(name: str, other: str) -> Callable[[Instruction], Instruction]:
    """Let an instruction wait for one of the peers."""
    after = Dependency(other, 0, "host")
    return lambda item: replace(item, after=(*item.after, after)) if item.id == name else item


def resized(accesses: tuple[Access, ...], size: Callable[[int], int]) -> tuple[Access, ...]:
    return tuple(replace(access, size_bytes=size(access.size_bytes)) for access in accesses)


def half_of_a_collective(item: Instruction) -> Instruction:
    if isinstance(item.op, Scalar) and item.op.function == "pack_losses":
        return replace(item, writes=resized(item.writes, lambda size: size // 2))
    if isinstance(item.op, Collective):
        return replace(item, reads=resized(item.reads, lambda size: size // 2))
    return item


def odd_range(item: Instruction) -> Instruction:
    is_it = item.id == "block.0/offload"
    return replace(item, reads=resized(item.reads, lambda size: size - 1)) if is_it else item


def of_another_group(item: Instruction) -> Instruction:
    return replace(item, op=Collective("all_gather", "rack")) if isinstance(item.op, Collective) else item


@pytest.mark.parametrize(
    ("mesh", "transfers", "role", "change", "error", "says"),
    [
        (Mesh(data=2), "sliced", 1, without("losses/all_gather"), ProgramError, "does not exist"),
        (Mesh(data=2), "private", 1, half_of_a_collective, Hazard, "do not match: rank 0 runs"),
        (Mesh(perturb=2), "shared", 0, waiting("block.0/upload", "block.0/offload"), Hazard, "deadlock between ranks"),
        (
            Mesh(perturb=2), "shared", 0, waiting("head/forward[q0+]", "block.0/forward[q0+]"), ProgramError,
            "has no such instruction",
        ),
        (Mesh(perturb=2), "sliced", 0, odd_range, ProgramError, "into 2 shares"),
        (Mesh(perturb=2), "sliced", 0, of_another_group, ProgramError, "rack"),
    ],
    ids=("collective without partner", "unlike sizes", "waiting for each other", "waiting for what is not there", "range", "group"),
)  # fmt: skip
def test_what_one_role_does_otherwise_is_refused(mesh, transfers, role, change, error, says) -> None:
    with pytest.raises(error, match=says):
        validate_set(edited(lower_all(plan(mesh, transfers)), role, change))


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["data", "perturb"]), st.integers(6, 20))
def test_every_point_of_every_sequence_is_forwarded_once(
    data: int, perturb: int, inner: str, batch: int
) -> None:
    mesh = Mesh(data=data, perturb=perturb, inner=inner)
    ranks = range(mesh.world_size)
    found = Plan(
        model=MODEL,
        placement=Placement(topology="some", devices=tuple(map(str, ranks))),
        batch=batch,
        seq=8,
        mesh=mesh,
        estimator=Estimator(num_perturbations=2),
    )
    seen = [(p, row) for rank in ranks for p in found.eval_points_of(rank) for row in found.rows_of(rank)]
    assert Counter(seen) == Counter((p, row) for p in found.eval_points for row in range(batch))


@pytest.mark.parametrize(
    ("roles", "groups", "says"),
    [
        ((0, 1), {}, "there are 1 programs"),
        ((0, 0), {"world": ((0,),)}, "must list each of"),
        ((0, 0), {"world": ((0, 1),), "host": ((0,), (1,))}, "is for groups host of 2 ranks"),
    ],
)
def test_a_set_that_contradicts_itself_is_refused(
    roles: tuple[int, ...], groups: dict[str, tuple[tuple[int, ...], ...]], says: str
) -> None:
    program = lower_all(plan(Mesh(perturb=2))).programs[0]
    with pytest.raises(ProgramError, match=says):
        ProgramSet((program,), roles, groups)


def staged(*split_points: str, data: int = 1, traversal: str = "full", **axes: object) -> ProgramSet:
    inside = tuple(
        int(split_point.split(".")[1]) for split_point in split_points if split_point.endswith(".mlp")
    )
    mesh = Mesh(data=data, stage=len(split_points) + 1)
    return lower_all(
        Plan(
            model=read_model_spec("opt-125m", split_blocks=inside),
            placement=Placement(topology="some", devices=tuple(map(str, range(mesh.world_size)))),
            batch=4,
            seq=8,
            mesh=mesh,
            split=Split(split_points=split_points, **axes.pop("split", {})),
            schedule=Schedule(traversal=traversal),
            **axes,
        )
    )


@pytest.mark.crossed(quick=7, slow=3)
@pytest.mark.parametrize(
    "split_points", [("block.5",), ("block.5.mlp",), ("block.2", "block.5.mlp", "block.9")]
)
@pytest.mark.parametrize("traversal", ["full", "blockwise"])
@pytest.mark.parametrize("difference", ["central", "forward"])
@pytest.mark.parametrize("rng", ["mezo", "counter"])
def test_stages_are_valid_and_send_what_the_paper_counts(
    split_points: tuple[str, ...], traversal: str, difference: str, rng: str
) -> None:
    """``(P + 1)(M - 1)`` activations per step for a forward difference, ``2P(M - 1)`` for a central one."""
    samples = {
        "estimator": Estimator(difference=difference, num_perturbations=3),
        "perturbations": Perturbations(rng=rng),
    }
    programs = staged(*split_points, traversal=traversal, **samples)
    validate_set(programs)
    sent = sum(isinstance(item.op, Send) for program in programs.programs for item in program.step)
    assert sent == (4 if difference == "forward" else 6) * len(split_points)


def test_both_holders_of_a_tied_table_do_the_same_to_it() -> None:
    first, last = staged("block.5", data=1).programs
    done = [
        [
            (item.op, item.label)
            for item in program.step
            if getattr(item.op, "param_group", "") == "embed.tokens"
        ]
        for program in (first, last)
    ]
    passes = [[op for op, label in found if label != "sample"] for found in done]
    assert passes[0] == passes[1] != []


def of_no_member(item: Instruction) -> Instruction:
    return replace(item, op=Recv("pipeline", 1)) if item.id == "recv[q0-]" else item


def of_one_byte_less(item: Instruction) -> Instruction:
    is_it = item.id == "recv[q0+]"
    return replace(item, writes=resized(item.writes, lambda size: size - 1)) if is_it else item


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (1, of_no_member, "a member of pipeline that does not exist"),
        (1, of_one_byte_less, "receives it as|needs"),
        (0, without("send[q0-]"), "receives it as|sends 3 messages"),
    ],
)
def test_a_message_that_is_not_taken_as_sent_is_refused(stage, change, says) -> None:
    with pytest.raises((Hazard, ProgramError), match=says):
        validate_set(edited(staged("block.5"), stage, change))


def test_messages_out_of_order_are_refused() -> None:
    programs = staged("block.5")
    program = programs.programs[0]
    late = next(item for item in program.step if item.id == "send[q0+]")
    others = [item for item in program.step if item is not late]
    place = 1 + next(i for i, item in enumerate(others) if item.id == "send[q0-]")
    step = (*others[:place], late, *others[place:])
    with pytest.raises(Hazard, match="receives it as"):
        validate_set(with_program(programs, 0, replace(program, step=step)))


@pytest.mark.parametrize(
    ("split_points", "split", "says"),
    [
        (("block.12",), {}, "no split point 'block.12'"),
        (("block.11.mlp", "block.3"), {}, "must be in the model's order"),
        (("block.3",), {"densities": (0.5, 0.5)}, "2 densities are given for 1 split points"),
        (("block.3",), {"densities": (1.5,)}, "from 0 to 1"),
        (("block.3",), {"codec": "q9"}, "from 1 to 8"),
    ],
)
def test_split_points_that_make_no_sense_are_refused(
    split_points: tuple[str, ...], split: dict[str, object], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        staged(*split_points, split=split)


def test_a_set_comes_back_from_its_file(tmp_path: Path) -> None:
    programs = lower_all(plan(Mesh(data=2, perturb=2), "sliced", ranks_per_host=2))
    path = tmp_path / "programs.json"
    programs.save(path)
    assert ProgramSet.load(path) == programs
