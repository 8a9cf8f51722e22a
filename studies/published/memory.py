"""Device memory as the papers' code takes it: what a program keeps, and temporaries that an allocator keeps for it.

``memory = context + weights and staging buffers + cache of keys and values + ‖table, logits, block‖_p + communicators``

The first parts are counted. The three temporaries are those of three phases (perturbing the largest table, the loss,
one block), each a counted size times how many such copies the code has alive. Phases follow each other, so memory that
one has cached serves the next as far as sizes fit: the norm's exponent says how far, between a sum (1) and the largest
(infinity).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.formats import FORMATS
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import block_segment
from studies.published.cells import Cell
from studies.published.constants import Values
from studies.published.conventions import MEBIBYTE, PublishedCase
from zosim.lowering.schedule import StepWriter
from zosim.program.instructions import Space

KEPT_ROLES = ("weights", "staging buffers", "transfer buffers")


@dataclass(frozen=True)
class Parts:
    """Counted sizes of one rank, in bytes unless it says otherwise."""

    kept: int  # weights, staging and transfer buffers on the device
    cache: int  # keys and values that a forward leaves behind where its code keeps them
    # table, logits, block: one copy each of the temporaries of the three phases.
    table: int
    logits: int
    block: int
    # Whether both signs pass block by block, so that the first sign's logits wait for the second's.
    passes_both: bool
    keeps_probabilities: bool  # whether outputs hold on to attention probabilities
    num_communicators: int

    def device_bytes(self, values: Values) -> float:
        """Return the memory of one rank with these constants."""
        phases = [bytes_ for bytes_ in self._phases(values).values() if bytes_ > 0]
        power = values.get("phase_norm", 1.0)
        largest = max(phases)
        temporaries = largest * float(sum((phase / largest) ** power for phase in phases)) ** (1 / power)
        communicators = values.get("communicator_bytes", 0.0) * self.num_communicators
        return float(values["context_bytes"] + self.kept + self.cache + temporaries + communicators)

    def largest(self, values: Values) -> str:
        """Return the name of the largest part."""
        parts = {
            "weights and staging buffers": float(self.kept),
            "keys and values": float(self.cache),
            "context": values["context_bytes"],
            **self._phases(values),
        }
        return max(parts, key=parts.__getitem__)

    def _phases(self, values: Values) -> dict[str, float]:
        copies = values["logit_copies"] + (values["second_logit_copies"] if self.passes_both else 0.0)
        block = values.get("block_temporaries", 1.0)
        block += values.get("kept_probabilities", 0.0) if self.keeps_probabilities else 0.0
        return {
            "temporaries of the largest table": values["table_temporaries"] * self.table,
            "logits": copies * self.logits,
            "temporaries of a block": block * self.block,
        }


def parts_of(case: PublishedCase) -> Parts:
    """Return the counted sizes of rank 0.

    OPT's code in ZO2's time took the loss of half-precision logits as they were; later code, which Qwen3 and DistZO2
    need, makes float32 of them first. Keys and values stay cached where nothing switches that off: in the MeZO
    loop around an unchanged OPT of that time. A plan of two axes has a communicator per axis, one for all ranks and
    one more for what they share.
    """
    plan, model = case.plan, case.plan.model
    width = FORMATS[plan.storage_dtype].element_bytes
    tokens = len(plan.rows_of(0)) * plan.seq
    is_early = case.paper == "ZO2" and model.family == "opt"
    kept = sum(
        b.size_bytes for b in StepWriter(plan).buffers() if b.space is Space.DEVICE and b.role in KEPT_ROLES
    )
    block = forward_work(
        model,
        block_segment(0),
        batch=len(plan.rows_of(0)),
        seq=plan.seq,
        dtype=plan.compute_dtype,
        storage_dtype=plan.storage_dtype,
        attention=plan.forward.attention,
    ).workspace_bytes
    is_offloaded = case.method.is_offloaded
    cache = 2 * model.num_blocks * tokens * model.num_key_value_heads * model.head_dim * width
    return Parts(
        kept=kept,
        cache=cache if case.paper == "ZO2" and not is_offloaded else 0,
        table=max(group.largest_trainable_tensor for group in model.param_groups) * width,
        logits=tokens * model.vocab_size * (width if is_early else 4),
        block=block if case.paper == "ZO2" else 0,
        passes_both=is_offloaded and model.family == "opt",
        keeps_probabilities=not is_offloaded,
        num_communicators={1: 0, 2: 1}.get(plan.placement.world_size, 4),
    )


def predicted_mib(cell: Cell, sets: list[Values]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return what each set of constants predicts, in the tables' megabytes of 2^20 bytes."""
    parts = parts_of(cell.case)
    return np.array([parts.device_bytes(values) for values in sets]) / MEBIBYTE
