"""What a step of the offloaded schedule takes, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.models.configs import spec_of_config
from costmodel.models.model_spec import ModelSpec
from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from proofs_checks.claims import Checks, printed
from proofs_checks.faults import on_stream, updates_that_do_not_wait
from proofs_checks.oracles.steps import zo2_step_seconds
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import planted, returning
from zosim.eval_points import BASE
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.plans import Estimator, Placement, Plan, Residency, Schedule
from zosim.program import Program
from zosim.program.instructions import Stream
from zosim.simulators.simulate import simulate

NUM_BLOCKS = 9
"""A multiple of the three staging buffers: else the next first upload may wait for the last offload, whose staging buffer it takes."""
_FLOP_PER_S = 1e12
_FORMATS = {"matmul_rate": ".float32", "attention_rate": ".float32", "sampling_rate": ".normal.float32"}
_INSTANT = 1e24
"""A rate at which nothing takes time."""

_RATIOS = (0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0)
"""A block's transfer over its two forwards."""

TOLERANCE = 5e-4
"""Buckets are aligned: sixteen tensors of up to 255 bytes more are 3.2e-4 of a block; a batch crosses as well."""


def model() -> ModelSpec:
    """Return a model of like blocks."""
    config = {
        "model_type": "opt",
        "hidden_size": 512,
        "ffn_dim": 2048,
        "word_embed_proj_dim": 512,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return spec_of_config(config, name="like blocks")


def machine(copy_bytes_per_s: float) -> Machine:
    """Return a GPU on which matrix products and copies take time, and nothing else does."""
    rates = {
        "matmul_rate": _FLOP_PER_S,
        "copy_h2d_bandwidth": copy_bytes_per_s,
        "copy_d2h_bandwidth": copy_bytes_per_s,
    }
    constants = []
    for name, unit in CONSTANT_UNITS.items():
        value = rates.get(name, _INSTANT) if unit.endswith("/s") else 0.0
        constants.append(
            Constant(
                name=name + _FORMATS.get(name, ""),
                value=value,
                low=value,
                high=value,
                unit=unit,
                source="made up",
            )
        )
    profile = Profile(
        device_name="synthetic",
        device_type="gpu",
        num_threads=1,
        num_cores=1,
        origin="calibrated",
        constants=tuple(constants),
    )
    return Machine(profile)


def program(*, num_perturbations: int = 1, update: str = "delayed", overlap: bool = True) -> Program:
    """Return the offloaded program."""
    return lower(
        Plan(
            model=model(),
            placement=Placement(topology="none", devices=("gpu0",)),
            batch=1,
            seq=64,
            estimator=Estimator(num_perturbations=num_perturbations),
            residency=Residency(blocks="offloaded", overlap=overlap),
            schedule=Schedule.model_validate({"update": update}),
        )
    )


@dataclass(frozen=True)
class Seconds:
    """What a step consists of, by hand."""

    # embed, block, head: forwards at all evaluation points.
    embed: float
    block: float
    head: float
    transfer: float  # one block, one way

    @property
    def overlapped(self) -> float:
        """Closed form of a step in which uploads, compute and offloads run beside each other."""
        return self._steps["overlapped"]

    @property
    def serial(self) -> float:
        """Closed form of a step in which every instruction waits for the one before it."""
        return self._steps["serial"]

    @property
    def _steps(self) -> dict[str, float]:
        return zo2_step_seconds(NUM_BLOCKS, self.block, self.transfer, self.embed, self.head)


def seconds(num_eval_points: int, transfer: float) -> Seconds:
    """Return a step's parts with `num_eval_points` forwards of every segment, from the matrix products of one forward."""
    hidden, tokens, vocabulary = 512, 64, 1000
    linears = 2 * tokens * (4 * hidden**2 + 2 * hidden * 2048)
    head = 2 * tokens * hidden * vocabulary
    return Seconds(
        0.0, num_eval_points * linears / _FLOP_PER_S, num_eval_points * head / _FLOP_PER_S, transfer
    )


def block_bytes() -> int:
    """Return the bytes of one block's parameters in float32."""
    hidden, inner = 512, 2048
    weights = 4 * hidden**2 + 2 * hidden * inner
    biases_and_norms = 4 * hidden + inner + hidden + 4 * hidden
    return 4 * (weights + biases_and_norms)


def check_step_time(context: Context) -> Outcome:
    """Compare simulated periodic steps with the closed form, over machines from compute- to transfer-bound."""
    details, largest = [], 0.0
    for num_perturbations in (1, 2):
        for overlap in (True, False):
            shape = program(num_perturbations=num_perturbations, overlap=overlap)
            errors = []
            for ratio in _RATIOS[:: context.samples(1, 2)]:
                transfer = ratio * seconds(2, 0.0).block
                expected = seconds(2 * num_perturbations, transfer)
                wanted = expected.overlapped if overlap else expected.serial
                step_s = simulate(shape, machine(block_bytes() / transfer)).step_time_s
                errors.append(abs(step_s / wanted - 1))
            largest = max(largest, *errors)
            kind = "overlapped" if overlap else "serial"
            details.append(
                f"{2 * num_perturbations} forwards, {kind}: off by {max(errors):.1e} over {len(errors)} machines"
            )
    return Outcome(largest, TOLERANCE, "relative error of the closed form", tuple(details))


def check_traffic(_context: Context) -> Outcome:
    """Compare bytes moved and operations done in a step with what the estimator needs."""
    details, largest = [], 0.0
    weights = NUM_BLOCKS * block_bytes()
    once = _flops(program()) / 2
    for name, num_perturbations, update, trips in (
        ("central", 1, "delayed", 1),
        ("central, 3 perturbations", 3, "delayed", 1),
        ("no efficient update", 1, "immediate", 2),
    ):
        shape = program(num_perturbations=num_perturbations, update=update)
        up, down = _copied(shape, "upload"), _copied(shape, "offload")
        # An update in place needs no way back of the first visit's unchanged weights, but a drifted restore does.
        forwards = _flops(shape) / once
        details.append(
            f"{name}: {up / weights:.4f} uploads, {down / weights:.4f} offloads, {forwards:g} forwards"
        )
        errors = (
            up / (trips * weights) - 1,
            down / (trips * weights) - 1,
            forwards / (2 * num_perturbations) - 1,
        )
        largest = max(largest, *map(abs, errors))
    single = abs(once / _matmul_flops_of_one_forward() - 1)
    details.append(
        f"one forward: {once:.4g} FLOP, off by {single:.1e} from the matrix products counted by hand"
    )
    return Outcome(max(largest, single), TOLERANCE, "relative error of bytes and FLOPs", tuple(details))


def _copied(shape: Program, label: str) -> int:
    return sum(item.work.copy_bytes for item in shape.step if item.label == label)


def _flops(shape: Program) -> float:
    return float(sum(m.flops for item in shape.step for m in item.work.matmuls))


def _matmul_flops_of_one_forward() -> float:
    parts = seconds(1, 0.0)
    return (NUM_BLOCKS * parts.block + parts.head) * _FLOP_PER_S


@planted("zosim.lowering.weights:EvalPoints.path", "one forward per perturbation")
def one_forward(shipped, self, perturbation):
    there, (across,), _back = shipped(self, perturbation)
    return there, (across._replace(eval_point=BASE, scale=-1),)


CHECKS: Checks = {
    "step-is-transfer-or-two-forwards": printed(
        check_step_time,
        returning(
            "zosim.lowering.residency:Homes._buffer_name",
            "one staging buffer for all blocks",
            lambda it: "edge" if it == "edge" else "0",
        ),
        on_stream("offload", Stream.H2D, "offloads on the uploads' engine"),
    ),
    "forwards-double-transfers-do-not": printed(
        check_traffic,
        updates_that_do_not_wait,
        one_forward,
    ),
}
