"""A low-rank adapter that grows: increments of a frozen base, joined, compacted, and written for PEFT.

An increment is a product ``A·Bᵀ`` beside a matrix. Increments add up in any order; joined, their factors stand side by side in one
pair, ``[A₁ A₂ …]·[B₁ B₂ …]ᵀ``. A probe is one more increment. Updates with one right factor are one increment, whose left factor is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from executors.models.lora import block_linears, write_peft
from topology.errors import ModelError


@dataclass
class Increments:
    """Low-rank increments of one matrix."""

    # lefts, rights: factors `A` (rows, rank) and `B` (columns, rank) of each increment.
    lefts: list[Tensor] = field(default_factory=list)
    rights: list[Tensor] = field(default_factory=list)
    # Frobenius norm of all that compacting left out, at most: a sum over the times that it did.
    lost: float = 0.0

    @property
    def rank(self) -> int:
        """Columns of the joined factors."""
        return sum(left.shape[1] for left in self.lefts)

    def add(self, left: Tensor, right: Tensor, factor: float) -> None:
        """Add ``factor·A·Bᵀ``, to the increment whose right factor is this very tensor, or as a new one.

        Sums of left factors are in float32 or wider.
        """
        left = left.to(torch.promote_types(left.dtype, torch.float32))
        for increment, known in enumerate(self.rights):
            if known is right:
                self.lefts[increment].add_(left, alpha=factor)
                return
        self.lefts.append(left * factor)
        self.rights.append(right)

    def joined(self, perturbed: tuple[Tensor, Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
        """Return the factors of the sum of all increments, side by side.

        `perturbed`: ``U``, ``V`` and what their product is multiplied by: the last increment, for as long as this is asked.
        """
        lefts, rights = list(self.lefts), list(self.rights)
        if perturbed is not None:
            left, right, scale = perturbed
            lefts.append(left.to(lefts[0].dtype if lefts else left.dtype) * scale)
            rights.append(right)
        joined = torch.cat(lefts, 1)
        return joined, torch.cat([right.to(joined.dtype) for right in rights], 1)

    def compact(self, rank: int) -> None:
        """Replace all increments by one of at most `rank`: the nearest matrix of that rank, by singular values.

        ``A = Qₐ·Rₐ`` and ``B = Q_b·R_b``, so that ``A·Bᵀ = Qₐ·(Rₐ·R_bᵀ)·Q_bᵀ``, and only the small matrix in the middle is taken
        apart. What is left out has the norm of the singular values left out.

        .. [1] C. Eckart, G. Young, "The Approximation of One Matrix by Another of Lower Rank", Psychometrika 1(3),
           1936.
        """
        if self.rank <= rank:
            return
        left, right = self.joined()
        left_base, left_rest = torch.linalg.qr(left.double())
        right_base, right_rest = torch.linalg.qr(right.double())
        outer, values, inner = torch.linalg.svd(left_rest @ right_rest.T)
        root = values[:rank].sqrt()
        self.lost += float(values[rank:].norm())
        self.lefts = [(left_base @ outer[:, :rank] * root).to(left.dtype)]
        self.rights = [(right_base @ inner[:rank].T * root).to(left.dtype)]

    def norm(self) -> float:
        """Return the Frobenius norm of the sum of all increments."""
        # ‖A·Bᵀ‖² = Σ (AᵀA ∘ BᵀB), so that no matrix of the weight's size is made.
        left, right = (factor.double() for factor in self.joined())
        return float(((left.T @ left) * (right.T @ right)).sum().clamp(min=0).sqrt())


@dataclass
class AdapterState:
    """Low-rank increments of the linears of a base."""

    increments: dict[str, Increments] = field(default_factory=dict)  # by the name of the weight
    max_rank: int | None = None  # increments are compacted where new ones would let their rank pass it

    def add(self, name: str, left: Tensor, right: Tensor, factor: float) -> None:
        """Add ``factor·A·Bᵀ`` beside the weight called `name`."""
        self.increments.setdefault(name, Increments()).add(left, right, factor)

    def close(self, next_rank: int) -> None:
        """Compact finished increments so that others of `next_rank` together fit within the bound of the rank.

        Raises ModelError if these alone pass it.
        """
        if self.max_rank is None:
            return
        if next_rank >= self.max_rank:
            raise ModelError(
                f"--max-rank {self.max_rank} leaves no rank for earlier increments: updates between two "
                f"samples of V have rank {next_rank}",
                hint=f"use --max-rank {2 * next_rank} or more",
            )
        for increments in self.increments.values():
            increments.compact(self.max_rank - next_rank)

    @property
    def rank(self) -> int:
        """The largest rank of any."""
        return max((increments.rank for increments in self.increments.values()), default=0)

    @property
    def relative_error(self) -> float:
        """Upper bound of what compacting has left out, relative to the norm of the sum, of the worst matrix."""
        return max((s.lost / norm for s in self.increments.values() if (norm := s.norm())), default=0.0)

    def merge_into(self, model: nn.Module) -> None:
        """Add the sums of increments to a model's weights."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, increments in self.increments.items():
                left, right = increments.joined()
                named[name].add_((left @ right.T).to(named[name].dtype))

    def save(self, model: nn.Module, directory: str | Path, facts: Mapping[str, str]) -> None:
        """Write the increments, joined, as PEFT reads an adapter.

        `facts`: what the file of weights says about itself, such as the number of steps and the base.

        Raises ModelError if a weight that has increments is no linear's.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        is_linear = {
            names[id(module.weight)]: isinstance(module, nn.Linear)
            for _, module, _, _ in block_linears(model)
        }
        strange = [name for name in self.increments if name not in is_linear]
        if strange or not self.increments:
            raise ModelError(
                f"{strange[0]} is not a weight of a linear layer of a block, so it cannot have an adapter"
                if strange
                else "there are no updates yet, so the adapter would have rank 0"
            )
        tensors: dict[str, Tensor] = {}
        for name, increments in self.increments.items():
            left, right = increments.joined()
            missing = self.rank - left.shape[1]  # PEFT gives all of them one rank
            left, right = (nn.functional.pad(factor, (0, missing)) for factor in (left, right))
            # A weight of inputs by outputs (Conv1D) has its factors the other way round.
            inner, outer = (right, left) if is_linear[name] else (left, right)
            path = name.removesuffix(".weight")
            tensors[f"{path}.lora_A.weight"] = inner.T.contiguous()
            tensors[f"{path}.lora_B.weight"] = outer.contiguous()
        write_peft(
            model,
            directory,
            tensors,
            rank=self.rank,
            alpha=float(self.rank),
            targets=sorted({name.split(".")[-2] for name in self.increments}),
            is_transposed=not any(is_linear[name] for name in self.increments),
            facts=facts,
        )
