"""Small programs and machines whose times can be worked out by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from costmodel.profile import CONSTANT_UNITS, Constant, Profile
from costmodel.work import Work
from zosim.machine import Machine
from zosim.program import Copy, Dependency, Instruction, Program, Scalar, Stream

RATE = 1e9
_FORMATS = {"matmul_rate": ".float32", "attention_rate": ".float32", "draw_rate": ".normal.float32"}


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
        device_kind=kind,
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
    work = Work(copy_bytes=size) if is_copy else Work(sweep_bytes=size)
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


def pipeline(num_blocks, upload_s, compute_s, offload_s, num_slots):
    """Blocks that pass through slots: upload, compute, offload, each on a stream of its own."""
    step = []
    for block in range(num_blocks):
        # A slot is free when what it held `num_slots` blocks ago is offloaded, perhaps in the step before.
        steps, holder = divmod(block - num_slots, num_blocks)
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
