"""Faults that tests plant in one rank of a run: bits of weights, and inputs of a step that only this rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from executors.runs.agreement import Disagreement
from executors.runs.session import Session
from tests.support.reference_mezo import bits

FAULTY_STEP, EVERY, STEPS = 3, 2, 6
"""Steps are verified after every second; of the steps from 0, the fourth has the fault."""

BITS = ("bit in a forward", "bit at rest", "words at rest")
INPUTS = ("batch", "seeds", "learning rate", "epsilon", "weight decay")


def flip(weights: Tensor) -> None:
    """Change one bit of a tensor where it lies; not the last, which the next perturbation may round away."""
    patterns = weights if weights.dtype == torch.uint8 else bits(weights)
    patterns.view(-1)[7].bitwise_xor_(1 << 5)


def disturbed(session: Session, batches: Sequence[dict[str, Tensor]], fault: str | None, victim: int) -> str:
    """Train with a fault on rank `victim`, and return what the verification says that refuses it; empty if none does."""
    is_victim = session.rank == victim
    if fault == "bit in a forward" and is_victim:
        _flip_in_forward(session)
    for step, batch in enumerate(batches):
        if step == FAULTY_STEP and fault is not None:
            given, changed = _planted(session, batch, fault, is_victim=is_victim)
            session.step(given, **changed)
        else:
            session.step(batch)
        if (step + 1) % EVERY == 0:
            try:
                session.verify()
            except Disagreement as error:
                return error.message
    return ""


def _flip_in_forward(session: Session) -> None:
    flipped = []

    def hook(block: Any, _inputs: Any) -> None:
        if session.num_steps == FAULTY_STEP and not flipped:
            quantized = getattr(block.fc1, "quantized", None)
            flipped.append(flip(quantized.qvalues if quantized is not None else block.fc1.weight.data))

    session.forward_runner.blocks[1].register_forward_pre_hook(hook)


def _planted(
    session: Session, batch: dict[str, Tensor], fault: str, *, is_victim: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the batch and the arguments of the faulty step."""
    used = session.interpreter.hyperparameters
    if fault == "bit at rest":
        flip_at_rest(session, is_victim=is_victim)
    elif fault == "words at rest":
        flip_at_rest(session, is_victim=is_victim, change=swap_words)
    elif not is_victim:
        pass
    elif fault == "batch":
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        batch["input_ids"][0, 0] += 1
    elif fault == "seeds":
        return batch, {"seeds": tuple(seed + 1 for seed in session.seeds_of(FAULTY_STEP))}
    elif fault == "learning rate":
        return batch, {"learning_rate": 1e-3}
    elif fault in ("epsilon", "weight decay"):
        name = fault.replace(" ", "_")
        object.__setattr__(used, name, 2 * getattr(used, name))
    return batch, {}


def swap_words(weights: Tensor) -> None:
    """Let two words of 64 bits change places, which leaves every sum of words as it was."""
    words = weights.view(torch.uint8).view(torch.int64)
    words[3:5] = words[3:5].flip(0)


def flip_at_rest(session: Session, *, is_victim: bool, change: Callable[[Tensor], None] = flip) -> None:
    """Change bits where a block lies between two steps, while no rank works."""
    session.interpreter.backend.drain()
    if session.communicator is not None:
        session.communicator.barrier("planting")
    if is_victim:
        home = next(access for access in session.program.final if str(access.what) == "block.1")
        change(session.interpreter.store.placed(home).flat)
    if session.communicator is not None:
        session.communicator.barrier("planted")
