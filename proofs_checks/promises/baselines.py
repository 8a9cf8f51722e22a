"""First-order baselines: what they send, keep and wait for is what closed forms and published formulas count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from costmodel.devices.datasheet import datasheet_profile
from costmodel.models.configs import spec_of_config
from costmodel.work import Work
from proofs_checks.claims import Checks, printed
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import Fault, altered, called_with, planted
from topology import load_preset
from zosim.analysis.counts import step_counts
from zosim.applications.first_order.programs import FirstOrder, lower_first_order
from zosim.hardware.machines import machines_for
from zosim.plans import ForwardPass, Mesh, Placement, Plan, Split, Weights
from zosim.program import Program
from zosim.program.instructions import Stream
from zosim.program.operations import Backward, Forward, Recv, Send
from zosim.program.program_set import ProgramSet
from zosim.simulators.closed_form import step_time_bound_of
from zosim.simulators.world import World

_PRESET = "dgx-h100"
_NUM_BLOCKS, _WIDTH, _HEADS, _SEQ, _BATCH = 4, 64, 4, 16, 8
_CONFIG = {
    "model_type": "gpt2", "vocab_size": 500, "n_embd": _WIDTH, "n_layer": _NUM_BLOCKS, "n_head": _HEADS, "n_positions": 128,
}  # fmt: skip
_SPLIT_POINTS = ((), ("block.1",), ("block.0", "block.1", "block.2"))
_ROUNDING = 1e-9
_NO_TIME_S = 1e-12
_MESSAGES = 2e-3
"""Part by which messages may lengthen a step whose forwards take seconds."""


def _plan(split_points: tuple[str, ...], data: int = 1) -> Plan:
    mesh = Mesh(data=data, stage=len(split_points) + 1)
    return Plan(
        model=spec_of_config(_CONFIG, name="tiny"),
        placement=Placement(topology=_PRESET, devices=tuple(f"gpu{rank}" for rank in range(mesh.world_size))),
        batch=_BATCH,
        seq=_SEQ,
        mesh=mesh,
        split=Split(split_points=split_points),
        weights=Weights(dtype="float16"),
        forward=ForwardPass(attention="eager"),
    )


def _settings(**fields: object) -> FirstOrder:
    return FirstOrder.model_validate(fields)


def _world(plan: Plan, programs: ProgramSet) -> World:
    topology = load_preset(_PRESET)
    devices = plan.placement.devices
    machines = machines_for(
        topology, devices, datasheet_profile(topology, devices[0]), programs.process_groups
    )
    return World.of(programs, machines)


def check_bounds(_context: Context) -> Outcome:
    """Measure by what part a step is shorter than its busiest stream, or longer than all that is done in it."""
    worst, details = 0.0, []
    for plan, settings in _cases():
        world = _world(plan, lower_first_order(plan, settings))
        busiest_s, total_s = 0.0, 0.0
        for template in (world.templates[number] for number in world.template_of):
            busy: dict[str, float] = defaultdict(float)
            for item in template.program.step:
                busy[item.stream] += template.activities["step", item.id].seconds
            busiest_s = max(busiest_s, *busy.values())
            total_s += sum(busy.values()) + template.step_s
        step_s = step_time_bound_of(world)
        worst = max(worst, busiest_s / max(step_s, _NO_TIME_S) - 1, step_s / total_s - 1)
        details.append(f"{settings.describe()}: {busiest_s:.3g} s <= {step_s:.3g} s <= {total_s:.3g} s")
    return Outcome(worst, _ROUNDING, "part by which a step is outside its bounds", tuple(details))


def _cases() -> Iterator[tuple[Plan, FirstOrder]]:
    for split_points in _SPLIT_POINTS:
        for data in (1, 2):
            for schedule in ("gpipe", "1f1b"):
                yield _plan(split_points, data), _settings(schedule=schedule, num_microbatches=3)


def check_bubble(_context: Context) -> Outcome:
    """Compare steps of even stages with ``(m + p - 1)(f + b)``."""
    worst, details = 0.0, []
    for split_points in _SPLIT_POINTS:
        for schedule in ("gpipe", "1f1b"):
            for num_microbatches in (1, 2, 4):
                plan = _plan(split_points)
                settings = _settings(schedule=schedule, num_microbatches=num_microbatches)
                world = _world(plan, _even(lower_first_order(plan, settings)))
                template = world.templates[0]
                pair_s = sum(
                    next(
                        template.activities["step", item.id].seconds
                        for item in template.program.step
                        if isinstance(item.op, kind) and item.work.param_pass_bytes
                    )
                    for kind in (Forward, Backward)
                )
                expected_s = (num_microbatches + len(split_points)) * pair_s
                step_s = step_time_bound_of(world)
                worst = max(worst, abs(step_s / expected_s - 1))
                details.append(
                    f"{schedule}, m={num_microbatches}, p={len(split_points) + 1}: {step_s / pair_s:.4f} pairs"
                )
    return Outcome(worst, _MESSAGES, "part by which a step differs from (m + p - 1)(f + b)", tuple(details))


def _even(programs: ProgramSet) -> ProgramSet:
    """Return the programs with one forward and one backward of a microbatch that take time, and nothing else that does."""
    return ProgramSet(
        tuple(_timed(program) for program in programs.programs), programs.roles, programs.process_groups
    )


def _timed(program: Program) -> Program:
    seen, step = set(), []
    for item in program.step:
        op, work = item.op, Work()
        if isinstance(op, Send | Recv):
            work = Work(link_bytes=item.work.link_bytes)
        elif isinstance(op, Forward | Backward):
            key = op.type, op.microbatch
            param_pass_bytes = 10**13 if isinstance(op, Forward) else 2 * 10**13
            work = Work() if key in seen else Work(param_pass_bytes=param_pass_bytes)
            seen.add(key)
        step.append(replace(item, work=work))
    return replace(program, step=tuple(step))


def check_counts(_context: Context) -> Outcome:
    """Count what differs from closed forms: messages, their bytes, activations kept, and bytes of a parameter."""
    wrong, details = 0, []
    for split_points in _SPLIT_POINTS:
        for data in (1, 2):
            for num in (1, 4):
                sent = step_counts(
                    lower_first_order(_plan(split_points, data), _settings(num_microbatches=num))
                )
                numbers = _BATCH * _SEQ * _WIDTH * len(split_points)
                messages = num * data * len(split_points)
                for count, size in (
                    (sent.num_activations, sent.activation_bytes),
                    (sent.num_gradients, sent.gradient_bytes),
                ):
                    wrong += count != messages or not 2 * numbers <= size <= 2 * numbers + 200 * messages
                details.append(
                    f"p={len(split_points) + 1}, m={num}, {data} pipelines: {2 * messages} messages"
                )
    for schedule, at_once in (("gpipe", 4), ("1f1b", 1)):
        program = lower_first_order(_plan(()), _settings(schedule=schedule, num_microbatches=4)).program_of(0)
        kept = sum(buffer.size_bytes for buffer in program.buffers if buffer.name.startswith("kept.block"))
        b, s, h, a = _BATCH // 4, _SEQ, _WIDTH, _HEADS
        expected = at_once * _NUM_BLOCKS * (34 * s * b * h + 5 * a * s * s * b)
        wrong += kept != expected
        details.append(f"{schedule}: {kept} bytes kept, {expected} by the formula")
    wrong += _wrong_parameters(details)
    return Outcome(wrong, 0, "counts that are not those of the closed forms", tuple(details))


def _wrong_parameters(details: list[str]) -> int:
    """Return for how many formats Adam does not take 16 bytes a parameter."""
    wrong, plan = 0, _plan(())
    for dtype in ("float32", "float16"):
        weights = Weights.model_validate({"dtype": dtype})
        program = lower_first_order(
            plan.model_copy(update={"weights": weights}), _settings(optimizer="adam")
        ).program_of(0)
        roles = ("weights", "gradients", "optimizer state")
        size = sum(buffer.size_bytes for buffer in program.buffers if buffer.role in roles)
        per_parameter = size / plan.model.num_parameters
        # Every tensor is aligned to 64 bytes.
        wrong += not 16 <= per_parameter < 16.5
        details.append(f"Adam in {dtype}: {per_parameter:.2f} bytes a parameter")
    return wrong


@planted(
    "zosim.applications.first_order.programs:FirstOrderWriter._leave", "gradients that stay where they are"
)
def gradients_that_stay(shipped, self, phase, *rest):
    if phase != "backward":
        shipped(self, phase, *rest)


arrivals_not_awaited = called_with(
    "zosim.lowering.hazards:_edges",
    "stages that do not wait for what arrives",
    conflicts=lambda conflicts: [event for event in conflicts if event.instruction.stream != Stream.RECV],
)


CHECKS: Checks = {
    "first-order-is-counted": printed(
        check_counts,
        gradients_that_stay,
        Fault(
            "masks of dropout that take no memory", "costmodel.models.backward:_MASK_BYTES", lambda _bytes: 0
        ),
        Fault(
            "half weights without a copy in float32",
            "costmodel.models.backward:optimizer_bytes",
            lambda shipped, num_parameters, optimizer, *_dtype: shipped(num_parameters, optimizer),
        ),
    ),
    "first-order-bubble": printed(
        check_bubble,
        arrivals_not_awaited,
    ),
    "first-order-step-within-bounds": printed(
        check_bounds,
        called_with(
            "zosim.simulators.maxplus:MaxPlus.advance",
            "instructions that do not wait for their stream",
            self=lambda it: altered(it, _latest=min),
        ),
    ),
}
