"""Small programs and machines whose times can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from costmodel.work import Work
from zosim.hardware.machine import Machine, Ring
from zosim.program import Program
from zosim.program.instructions import Dependency, Instruction, Stream
from zosim.program.operations import Collective, Copy, Scalar
from zosim.program.program_set import ProgramSet
from zosim.program.step_graph import RunNode
from zosim.simulators.closed_form import Recurrence
from zosim.simulators.simulate import simulate_world
from zosim.simulators.world import World

RATE = 1e9
_FORMATS = {"matmul_rate": ".float32", "attention_rate": ".float32", "sampling_rate": ".normal.float32"}


def make_profile(kind="cpu", *, num_threads=1, num_cores=2, origin="calibrated", **values):
    """A profile in which every byte takes a nanosecond and nothing else takes any time."""
    constants = []
    for name, unit in CONSTANT_UNITS.items():
        default = RATE if unit.endswith("/s") else 1.0 if name == "copy_cores" else 0.0
        value = values.get(name, default)
        low, high = (value / 2, value * 2) if unit.endswith("/s") else (value, value)
        constants.append(
            Constant(
                name=name + _FORMATS.get(name, ""),
                value=value,
                low=low,
                high=high,
                unit=unit,
                source="a test",
            )
        )
    return Profile(
        device_name="test",
        device_type=kind,
        num_threads=num_threads,
        num_cores=num_cores,
        origin=origin,
        constants=tuple(constants),
    )


def unshared(**values):
    """A machine on which nothing is shared."""
    return Machine(make_profile(**values))


def shared(num_cores=2.0, num_threads=1, memory=float("inf"), **values):
    """A CPU whose operations share cores and memory bandwidth."""
    profile = make_profile(num_threads=num_threads, num_cores=max(1, round(num_cores)), **values)
    return Machine(profile, {"cores": num_cores, "dram": memory}, cores="cores", memory="dram")


def instruction(name, stream, seconds, after=(), **fields):
    """An instruction of a given length; `after` names ids, or (id, distance)."""
    stream = Stream(stream)
    is_copy = stream in (Stream.H2D, Stream.D2H)
    size = round(seconds * RATE)
    work = Work(copy_bytes=size) if is_copy else Work(param_pass_bytes=size)
    edges = tuple(Dependency(*((edge,) if isinstance(edge, str) else edge)) for edge in after)
    op = Copy() if is_copy else Scalar("projected_gradient")
    fields = {"op": op, "label": name.rstrip("0123456789"), "segment": name, "work": work} | fields
    return Instruction(id=name, stream=stream, after=edges, **fields)


def program(step, prologue=(), flush=(), buffers=(), initial=(), name="test"):
    """A program without contents, for clocks."""
    return Program(
        name=name,
        buffers=tuple(buffers),
        initial=tuple(initial),
        final=(),
        step=tuple(step),
        prologue=tuple(prologue),
        flush=tuple(flush),
    )


def pipeline(num_blocks, upload_s, compute_s, offload_s, num_staging_buffers):
    """Blocks that pass through staging buffers: upload, compute, offload, each on a stream of its own."""
    step = []
    for block in range(num_blocks):
        # A staging buffer is free when what it held `num_staging_buffers` blocks ago is offloaded, perhaps in the step before.
        steps, holder = divmod(block - num_staging_buffers, num_blocks)
        step.append(instruction(f"upload{block}", "h2d", upload_s, [(f"offload{holder}", -steps)]))
        step.append(instruction(f"compute{block}", "compute", compute_s, [f"upload{block}"]))
        step.append(instruction(f"offload{block}", "d2h", offload_s, [f"compute{block}"]))
    return program(step)


@st.composite
def programs(draw, max_instructions=8, max_ticks=6):
    """Programs whose dependencies point to earlier instructions, or to the step before.

    Durations are whole milliseconds, some of them nothing.
    """

    def part(prefix, minimum, reach_back):
        count = draw(st.integers(minimum, max_instructions))
        listed = []
        for number in range(count):
            before = [(item.id, 0) for item in listed] + reach_back(count)
            edges = draw(st.lists(st.sampled_from(before), max_size=3, unique=True)) if before else []
            listed.append(
                instruction(
                    f"{prefix}{number}",
                    draw(st.sampled_from(list(Stream))),
                    draw(st.integers(0, max_ticks)) * 1e-3,
                    edges,
                )
            )
        return listed

    prologue = part("p", 0, lambda count: [])
    step = part("s", 1, lambda count: [(f"s{number}", 1) for number in range(count)])
    flush = part("f", 0, lambda count: [(item.id, 1) for item in step])
    return program(step, prologue, flush)


def host_machine(rank, host, groups, *, kind="gpu", sharing="maxmin", step_s=0.0):
    """A device whose copies cross a link of its own and one of its host; collectives cross the host's, too.

    Groups are (name, members, latency_s of a message).
    """
    own, common = f"link{rank}", f"{host}:root"
    rings = {
        name: Ring(latency_s, RATE, ((own, 1.0), (common, 0.5)), "pcie", num_ranks=size)
        for name, size, latency_s in groups
        if size > 1
    }
    routes = {"h2d": (own, common), "d2h": (common,)}
    return Machine(
        make_profile(kind, step_s=step_s),
        {own: RATE, common: 1.5 * RATE, f"{host}:cores": 4.0},
        fifo=frozenset({common}) if sharing == "fifo" else frozenset(),
        routes=routes,
        cores=f"{host}:cores",
        rings=rings,
    )


@st.composite
def rank_sets(draw, max_hosts=3, max_ranks_per_host=3, max_instructions=7, sharings=("maxmin", "fifo")):
    """Programs of several ranks with collectives and peers to wait for, and their machines.

    All ranks list the same instructions; those of another role take other times.
    """
    num_hosts = draw(st.integers(1, max_hosts))
    per_host = draw(st.integers(1, max_ranks_per_host))
    world_size = num_hosts * per_host
    sizes = {"world": world_size, "host": per_host}
    num_roles = draw(st.integers(1, min(2, world_size)))
    ticks = st.lists(st.integers(0, 4), min_size=num_roles, max_size=num_roles)

    def part(prefix, minimum, reach_back):
        roles = [[] for _ in range(num_roles)]
        count = draw(st.integers(minimum, max_instructions))
        for number in range(count):
            before = [(item.id, 0) for item in roles[0]] + reach_back(count)
            edges = draw(st.lists(st.sampled_from(before), max_size=2, unique=True)) if before else []
            groups = [draw(st.sampled_from(["", "", "host", "world"])) for _ in edges]
            seconds, stream = draw(ticks), draw(st.sampled_from(list(Stream)))
            group = draw(st.sampled_from(sorted(sizes)))
            for role in range(num_roles):
                fields = {}
                if stream == Stream.LINK:
                    size = round(seconds[0] * 1e-3 * RATE)
                    fields = {"op": Collective("all_gather", group), "work": Work(link_bytes=size)}
                item = instruction(f"{prefix}{number}", stream, seconds[role] * 1e-3, edges, **fields)
                after = tuple(
                    replace(edge, process_group=name) for edge, name in zip(item.after, groups, strict=True)
                )
                roles[role].append(replace(item, after=after))
        return roles

    prologues = part("p", 0, lambda count: [])
    steps = part("s", 1, lambda count: [(f"s{number}", 1) for number in range(count)])
    flushes = part("f", 0, lambda count: [(item.id, 1) for item in steps[0]])
    listed = tuple(
        replace(program(*parts), process_groups=sizes)
        for parts in zip(steps, prologues, flushes, strict=True)
    )
    roles = tuple(draw(st.integers(0, num_roles - 1)) for _ in range(world_size))
    hosts = tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(num_hosts))
    sharing, step_s = draw(st.sampled_from(sharings)), draw(st.sampled_from([0.0, 0.5e-3]))
    machines = [
        host_machine(
            rank,
            f"host{rank // per_host}",
            [("world", world_size, 1e-3), ("host", per_host, 0.0)],
            sharing=sharing,
            step_s=step_s,
        )
        for rank in range(world_size)
    ]
    return ProgramSet(listed, roles, {"world": (tuple(range(world_size)),), "host": hosts}), machines


def simulate_ranks(programs, machines, *, num_steps=None):
    """Simulate several ranks: of a set of programs, or of one program each, all in one group of each name that they know."""
    if not isinstance(programs, ProgramSet):
        everybody = (tuple(range(len(programs))),)
        names = sorted({name for program in programs for name in program.process_groups})
        programs = ProgramSet(tuple(programs), everybody[0], dict.fromkeys(names, everybody))
    return simulate_world(World.of(programs, machines), num_steps=num_steps)


def run_times_of(world, num_steps):
    """Start and end of every instruction of a run, by rank and place, as if nothing were shared."""
    recurrence = Recurrence(world, num_steps)
    return {
        (rank, RunNode(position, name)): times
        for position in range(num_steps + 2)
        for (rank, name), times in recurrence.advance().items()
    }


def run_times(whole, machine, num_steps):
    """The same of a run of one rank, by place."""
    times = run_times_of(World.of_one(whole, machine), num_steps)
    return {place: both for (_, place), both in times.items()}
