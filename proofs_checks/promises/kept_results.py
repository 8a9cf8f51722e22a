"""What a run keeps from one step to the next, and what is read of it at its end: losses of the step before, and the last update."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import LoRA
from executors.models.lora import joined_factors
from executors.runs.adapters import attach, save_tuned
from executors.runs.session import Session
from executors.serving.peft import linear_shapes, read_adapter
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import equal, is_true
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, called_with, planted
from proofs_checks.setups.executed import Case, against_literal, learning_rate
from proofs_checks.setups.literal import LiteralRun, language_model_loss
from proofs_checks.setups.placements import (
    BLOCKWISE,
    OFFLOADED,
    same_bits,
    tiny_batches,
    tiny_model,
    tiny_plan,
)

# -- differences from the step before -----------------------------------------------------------------------------------

_RESIDUAL = (
    Case(difference="residual", num_steps=3),
    Case(
        difference="residual",
        num_steps=3,
        num_perturbations=2,
        blocks="offloaded",
        update="delayed",
        rng="counter",
    ),
    Case(difference="residual", num_steps=4, resumed_at=2, num_perturbations=2, perturbation="copies"),
    Case(difference="residual", num_steps=3, resumed_at=1, data=2, batch=3, update="delayed"),
)
"""On one device, offloaded with two perturbations, gone on from a log, and in shards on two ranks, gone on as well."""


def check_residual(context: Context) -> Outcome:
    """Count what differs in a bit from a literal loop whose differences are from the loss of the step before."""
    return against_literal(_RESIDUAL, context.seed)


# -- the last update ----------------------------------------------------------------------------------------------------

_STEPS = 3


def _delayed(seed: int, model: nn.Module) -> Session:
    """Return a session after some steps, whose last update is still due."""
    session = Session(
        tiny_plan(model, **OFFLOADED), model, learning_rate=learning_rate, seed=seed, num_timed_steps=0
    )
    for batch in tiny_batches(_STEPS):
        session.step(batch)
    return session


def _unlike(read: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return how many of the wanted tensors are not there, bit for bit."""
    return float(sum(name not in read or not same_bits(read[name], value) for name, value in wanted.items()))


def _saved(session: Session) -> dict[str, Tensor]:
    import safetensors.torch

    with tempfile.TemporaryDirectory() as folder:
        session.save_pretrained(folder)
        return safetensors.torch.load_file(Path(folder) / "model.safetensors")


def _intervals(seed: int, axes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what adapters whose A is drawn anew every other step add, after intervals were closed."""
    model = tiny_model("tied", torch.float64)
    attach(model, LoRA(rank=2, target_modules=("q_proj", "fc2"), seed=seed, lazy_steps=2, max_rank=16))
    options: dict[str, Any] = {"num_timed_steps": 0, "loss_dtype": "fp64", "seed": seed}
    with Session(tiny_plan(model, dtype="float64", **axes), model, learning_rate=0.3, **options) as session:
        for batch in tiny_batches(5):
            session.step(batch)
        session.flush()
        carrying = {path: module for path, module in model.named_modules() if hasattr(module, "lora_used")}
        factors = {path: joined_factors(module) for path, module in carrying.items()}
        return {path: (outer @ inner).detach().clone() for path, (inner, outer) in factors.items()}


def _adapter(seed: int, axes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what an adapter adds by path, as it is read from the file that a run leaves."""
    model, lora = tiny_model("tied"), LoRA(rank=2, target_modules=("q_proj", "fc2"), seed=seed, alpha=3.0)
    shapes = linear_shapes(model)
    attach(model, lora)
    with (
        Session(tiny_plan(model, **axes), model, learning_rate=0.3, seed=seed, num_timed_steps=0) as session,
        tempfile.TemporaryDirectory() as folder,
    ):
        for batch in tiny_batches(_STEPS):
            session.step(batch)
        save_tuned(folder, session, lora)
        read = read_adapter(Path(folder) / "adapter", shapes)
        return {path: outer @ inner for path, (inner, outer) in read.factors.items()}


def check_last_update(context: Context) -> Outcome:
    """Compare what is read of a run whose last update is due with a literal loop, or with a run that updates at once, bit for bit."""
    literal = LiteralRun(language_model_loss, tiny_model("tied"), context.seed)
    for step, batch in enumerate(tiny_batches(_STEPS)):
        literal.step(batch, learning_rate(step))
    parts = {}
    reads: dict[str, Callable[[Session], Mapping[str, Tensor]]] = {
        "the state": Session.state_dict,
        "the saved model": _saved,
    }
    for name, read in reads.items():
        session = _delayed(context.seed, tiny_model("tied"))
        with session:
            parts[name] = equal(_unlike(read(session), literal.weights), 0.0, what="tensors that differ")
    with _delayed(context.seed, tiny_model("tied")) as session:
        late = session.digest()
    own = tiny_model("tied")
    with Session(tiny_plan(own, **BLOCKWISE), own, learning_rate=learning_rate, seed=context.seed) as session:
        for batch in tiny_batches(_STEPS):
            session.step(batch)
        parts["the digest"] = is_true(late == session.digest(), what="that of a run that updates at once")
    for name, of in (("closed intervals", _intervals), ("an adapter's file", _adapter)):
        at_once, later = of(context.seed, BLOCKWISE), of(context.seed, OFFLOADED)
        parts[name] = equal(_unlike(later, at_once), 0.0, what="matrices that differ")
    return everything_holds(parts)


_SESSION = "executors.runs.session:Session"
_SCALAR = "executors.steps.ops.exchange:Exchanges._residual"


@planted("executors.steps.interpreter:Interpreter._advance", "the loss of the first step for all")
def losses_of_the_first_step(shipped, self, frame):
    before = self._losses_before
    done = shipped(self, frame)
    self._losses_before = before or self._losses_before
    return done


@planted(_SCALAR, "a first step from 0")
def first_step_from_0(shipped, self, perturbation, eval_point, epsilon):
    action = shipped(self, perturbation, eval_point, epsilon)

    def scalar(frame):
        frame.losses_before.setdefault(eval_point, 0.0)
        action(frame)

    return scalar


def without_flush(target: str, name: str) -> Fault:
    """Return a fault of what takes a session, or is a method of it: nothing is flushed meanwhile."""

    @planted(target, name)
    def fault(shipped, *given, **named):
        session = next(each for each in given if isinstance(each, Session))
        session.flush = int  # type: ignore[assignment,method-assign]
        try:
            return shipped(*given, **named)
        finally:
            del session.flush

    return fault


CHECKS: Checks = {
    "residual-difference-is-a-literal-loop": printed(
        check_residual,
        losses_of_the_first_step,
        called_with(_SCALAR, "a difference over 2ε", epsilon=lambda epsilon: 2 * epsilon),
        Fault(
            "a log whose losses are not gone on from",
            "executors.steps.interpreter:Interpreter.replay",
            lambda shipped, self, seeds, gradients, learning_rate, _losses=(): shipped(
                self, seeds, gradients, learning_rate
            ),
        ),
        first_step_from_0,
    ),
    "the-last-update-is-in-what-is-read": printed(
        check_last_update,
        without_flush(f"{_SESSION}.present", "a state without it"),
        without_flush(f"{_SESSION}.on_rank_0", "a saved model without it"),
        without_flush(f"{_SESSION}.digest", "a digest without it"),
        without_flush(f"{_SESSION}._open_interval", "intervals closed without it"),
        without_flush("executors.runs.adapters:save_tuned", "an adapter's file without it"),
    ),
}
