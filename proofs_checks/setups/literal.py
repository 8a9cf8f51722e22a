"""The reference that checks hold the executor against: seeds, perturbations and training, written from their description.

Nothing here comes from the packages that are checked. Constants of the streams (block lengths, multipliers) are written
out: a change of one would give every user other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_SEEDS = 10**9
_BLOCK_ELEMENTS = {"gaussian": 1 << 14, "rademacher": 1 << 19}
"""Elements of a block of the ``counter`` discipline on a CPU."""


ANALYTIC_SHAPES: Sequence[Sequence[int]] = ((1, 2), (2,), (2,), (2,))
"""Of the parameters of :class:`proofs_checks.setups.analytic.AnalyticModel`."""


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def chained(*numbers: int) -> int:
    """Return splitmix64 chained over `numbers`."""
    state = 0
    for number in numbers:
        state = _splitmix(state ^ (number & _MASK64))
    return state


def seed_of(seed: int, step: int, perturbation: int) -> int:
    """Return the seed of one step and perturbation of a run."""
    return chained(seed, step, perturbation) % _SEEDS


def block_seed(seed: int, step: int, perturbation: int, block: int) -> int:
    """Return the seed of a block of the ``counter`` discipline: a permutation of its number, keyed by the perturbation."""
    state = chained(seed, step, perturbation)
    tweak = chained(state) & _MASK32
    x = (block * ((state & _MASK32) | 1) + (state >> 32)) & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x ^= tweak
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def sampled(
    shape: Sequence[int], distribution: str, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Return a tensor of `shape`: normals, or signs made of the bits of random 64-bit words (see :func:`_signs`)."""
    if distribution == "gaussian":
        return torch.normal(0.0, 1.0, size=tuple(shape), generator=generator, dtype=dtype)
    numel = int(np.prod(shape))
    words = torch.empty(-(-numel // 64), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    return _signs(words.numpy(), dtype)[:numel].view(*shape)


def _signs(words: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a sign for each bit of some words, -1 where it is set, the highest bit of each part of a word first.

    A part has as many bits as an element of `dtype`: a whole word for elements of 8 bytes, a half for 4, a quarter for 2.
    """
    width = 8 * dtype.itemsize
    parts = words.view({64: np.uint64, 32: np.uint32, 16: np.uint16}[width])
    places = np.arange(width - 1, -1, -1, dtype=parts.dtype)
    bits = (parts[:, None] >> places[None]) & parts.dtype.type(1)
    return torch.from_numpy(np.where(bits, -1.0, 1.0).reshape(-1)).to(dtype)


def perturbations(
    shapes: Sequence[Sequence[int]],
    *,
    seed: int,
    step: int,
    perturbation: int,
    rng: str,
    distribution: str,
    dtype: torch.dtype,
    order: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return the perturbation of one index and step, a tensor for each parameter.

    - `shapes`: of the parameters, in registration order.
    - `seed`: of the step and perturbation.
    - `order`: positions of the parameters in the order in which ``mezo`` draws for them; by default registration order.
    """
    z: list[Tensor] = [torch.empty(0)] * len(shapes)
    if rng == "mezo":
        generator = torch.Generator().manual_seed(seed)
        for number in order if order is not None else range(len(shapes)):
            z[number] = sampled(shapes[number], distribution, generator, dtype)
        return z
    length, block = _BLOCK_ELEMENTS[distribution], 0
    for number, shape in enumerate(shapes):
        numel, pieces = int(np.prod(shape)), [torch.empty(0, dtype=dtype)]
        for begin in range(0, numel, length):
            generator = torch.Generator().manual_seed(block_seed(seed, step, perturbation, block))
            pieces.append(sampled((min(length, numel - begin),), distribution, generator, dtype))
            block += 1
        z[number] = torch.cat(pieces).view(*shape)
    return z


def perturbations_of_steps(num_steps: int, seed: int) -> list[Tensor]:
    """Return the flat first normal perturbation of each step, in float64, under ``counter``."""
    flat = []
    for step in range(num_steps):
        options: dict[str, Any] = {"rng": "counter", "distribution": "gaussian", "dtype": torch.float64}
        parts = perturbations(
            ANALYTIC_SHAPES, seed=seed_of(seed, step, 0), step=step, perturbation=0, **options
        )
        flat.append(torch.cat([part.flatten() for part in parts]))
    return flat


_OF_THE_HEAD = ("final_layer_norm.weight", "final_layer_norm.bias", "norm.weight", "lm_head.weight")
_OF_BACK_HALVES = (".fc2.", ".mlp.down_proj.")
"""Parts of names: the parameters of a block that lie behind a split inside the block."""

Batch = Mapping[str, Tensor]


@dataclass
class LiteralRun:
    """MeZO as published, on a whole model: perturb all, forward, three times over, update."""

    # From the model and rows of a batch to a loss and the number of labels that it is the mean over.
    loss: Callable[[nn.Module, Batch], tuple[Tensor, int]]
    model: nn.Module  # changed by :meth:`step`
    seed: int
    epsilon: float = 1e-3
    weight_decay: float = 0.0
    # num_perturbations, num_shards: shards are neighbouring sequences, the first longer by one where they cannot be
    # alike; their losses are averaged over labels, in float64.
    num_perturbations: int = 1
    num_shards: int = 1
    # central, copies: without `copies`, weights are moved from point to point in place and keep the drift.
    central: bool = True
    copies: bool = False
    # Whether differences are from the loss of the step before, which in the first step is its own.
    residual: bool = False
    rng: str = "mezo"
    distribution: str = "gaussian"
    # Whether ``mezo`` draws the final norm last, and of blocks that are split inside what lies behind the split point
    # last.
    execution_order: bool = False
    split_blocks: tuple[int, ...] = ()  # blocks that are split inside
    # rank, lazy_steps: of ``factorised``, ``lozo`` and ``lozo-released`` perturbations: matrices are ``U·Vᵀ/√r``
    # (``U·Vᵀ``, with updates along ``U·Vᵀ/r``, or along ``U·Vᵀ``), and ``V`` stays for so many steps. In an interval's
    # first step ``lozo-released`` updates along what its generator draws without passing ``V`` again: other numbers
    # throughout.
    rank: int = 2
    lazy_steps: int = 1
    # sampled, resampled: by step, perturbation and parameter name: ``z``; and what an update goes along, where that is
    # another.
    sampled: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    resampled: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    gradients: list[tuple[float, ...]] = field(default_factory=list)  # projected gradients of each step
    # Losses at ``+ε`` of each step, of differences from the step before.
    losses_plus: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def tuned(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def step(self, batch: Batch, learning_rate: float) -> None:
        """Run one step."""
        number = len(self.gradients)
        z = [self._perturbation(number, perturbation) for perturbation in range(self.num_perturbations)]
        base = None if self.central or self.residual else self._loss(batch)
        gradients, losses = [], []
        for perturbation in range(self.num_perturbations):
            if self.residual:
                losses.append(self._loss_beside(batch, z[perturbation]))
                before = self.losses_plus[-1][perturbation] if self.losses_plus else losses[-1]
                gradients.append((losses[-1] - before) / self.epsilon)
                continue
            plus, other = self._losses(batch, z[perturbation], base)
            gradients.append(((plus - other) / (2 * self.epsilon if self.central else self.epsilon)).item())
        for perturbation, g in enumerate(gradients):
            along = self._update_perturbation(number, perturbation) or z[perturbation]
            self._update(along, g / self.num_perturbations, learning_rate, decays=perturbation == 0)
        self.gradients.append(tuple(gradients))
        self.losses_plus.append(tuple(losses))

    def _perturbation(self, number: int, perturbation: int) -> dict[str, Tensor]:
        named = self.tuned
        names = list(named)
        if self.distribution in ("factorised", "lozo", "lozo-released"):
            z = self._of_factors(named, number, perturbation)
            self.sampled |= {(number, perturbation, name): tensor.flatten() for name, tensor in z.items()}
            return z
        places = {name: place for place, name in enumerate(names)}
        tensors = perturbations(
            [parameter.shape for parameter in named.values()],
            seed=seed_of(self.seed, number, perturbation),
            step=number,
            perturbation=perturbation,
            rng=self.rng,
            distribution=self.distribution,
            dtype=next(iter(named.values())).dtype,
            order=[places[name] for name in self._in_order(names)],
        )
        z = dict(zip(names, tensors, strict=True))
        self.sampled |= {(number, perturbation, name): tensor.flatten() for name, tensor in z.items()}
        return z

    def _in_order(self, names: Sequence[str]) -> list[str]:
        """Return names in the order in which ``mezo`` draws them."""
        if not self.execution_order:
            return list(names)

        def place(name: str) -> tuple[bool, int, bool]:
            behind, _, rest = name.partition("layers.")
            block = int(rest.partition(".")[0]) if behind != name else -1
            is_back = block in self.split_blocks and any(part in name for part in _OF_BACK_HALVES)
            return block < 0 and name.endswith(_OF_THE_HEAD), block, is_back

        return sorted(names, key=place)

    def _update_perturbation(self, number: int, perturbation: int) -> dict[str, Tensor]:
        """Return what an update goes along where that is not what was perturbed by; else nothing."""
        if self.distribution != "lozo-released" or number % self.lazy_steps:
            return {}
        named = self.tuned
        lefts = self._factors(named, number, perturbation, passes_rights=False)
        rights = self._factors(named, number, perturbation)
        z = {}
        for name, parameter in named.items():
            left, right = lefts[name][0], rights[name][1]
            z[name] = (left if right is None else left @ right.T).view(parameter.shape)
        self.resampled |= {(number, perturbation, name): tensor.flatten() for name, tensor in z.items()}
        return z

    def _of_factors(self, named: Mapping[str, Tensor], number: int, perturbation: int) -> dict[str, Tensor]:
        """Return ``U·Vᵀ`` of matrices, with the ``V`` of the interval's first step; normals of other tensors."""
        first = number - number % self.lazy_steps
        lefts, rights = self._factors(named, number, perturbation), self._factors(named, first, perturbation)
        divisor = self.rank**0.5 if self.distribution == "factorised" else 1.0
        z = {}
        for name, parameter in named.items():
            left, right = lefts[name][0], rights[name][1]
            z[name] = left if right is None else left @ right.T
            if right is not None and divisor != 1:
                z[name] = z[name] / divisor
            z[name] = z[name].view(parameter.shape)
        return z

    def _factors(
        self, named: Mapping[str, Tensor], number: int, perturbation: int, *, passes_rights: bool = True
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return ``U``, and in an interval's first step ``V``, of every matrix; and other tensors' normals."""
        seed = seed_of(self.seed, number, perturbation)
        opens = passes_rights and number % self.lazy_steps == 0
        rank, dtype = self.rank, next(iter(named.values())).dtype
        shapes = [tuple(parameter.shape) for parameter in named.values()]
        of_left = [(shape[0], rank) if len(shape) == 2 else shape for shape in shapes]
        of_right = [(shape[1] * rank,) if len(shape) == 2 else (0,) for shape in shapes]
        rights: list[Tensor | None] = [None] * len(shapes)
        if self.rng == "counter":
            options = {
                "step": number,
                "perturbation": perturbation,
                "rng": "counter",
                "distribution": "gaussian",
                "dtype": dtype,
            }
            lefts = perturbations(of_left, seed=seed, **options)  # type: ignore[arg-type]
            if opens:
                flat = perturbations(of_right, seed=chained(seed, 0x56), **options)  # type: ignore[arg-type]
                rights = [
                    part.view(-1, rank) if len(shape) == 2 else None
                    for part, shape in zip(flat, shapes, strict=True)
                ]
        else:
            generator = torch.Generator().manual_seed(seed)
            lefts = [torch.empty(0)] * len(shapes)
            places = {name: place for place, name in enumerate(named)}
            for place in (places[name] for name in self._in_order(list(named))):
                shape = shapes[place]
                if opens and len(shape) == 2:
                    rights[place] = sampled((shape[1], rank), "gaussian", generator, dtype)
                lefts[place] = sampled(of_left[place], "gaussian", generator, dtype)
        return dict(zip(named, zip(lefts, rights, strict=True), strict=True))

    def _losses(self, batch: Batch, z: Mapping[str, Tensor], base: Tensor | None) -> tuple[Tensor, Tensor]:
        start = self.weights
        self._perturb(z, 1)
        plus = self._loss(batch)
        if self.copies:
            self._set(start)
        if base is not None:
            if not self.copies:
                self._perturb(z, -1)
            return plus, base
        self._perturb(z, -1 if self.copies else -2)
        minus = self._loss(batch)
        if self.copies:
            self._set(start)
        else:
            self._perturb(z, 1)
        return plus, minus

    def _loss_beside(self, batch: Batch, z: Mapping[str, Tensor]) -> float:
        """Return the loss at ``θ + εz``."""
        start = self.weights
        self._perturb(z, 1)
        loss = self._loss(batch).double().item()
        if self.copies:
            self._set(start)
        else:
            self._perturb(z, -1)
        return loss

    def _perturb(self, z: Mapping[str, Tensor], scale: int) -> None:
        self._set({name: self.weights[name] + (scale * z[name]) * self.epsilon for name in z})

    def _update(self, z: Mapping[str, Tensor], g: float, learning_rate: float, *, decays: bool) -> None:
        for name, parameter in self.tuned.items():
            is_shrunk = self.distribution == "lozo" and parameter.dim() == 2
            change = (g / self.rank if is_shrunk else g) * z[name]
            if (
                decays
                and self.weight_decay
                and not any(part in name for part in ("bias", "layer_norm", "layernorm"))
            ):
                change = change + self.weight_decay * parameter
            parameter.data = parameter.data - learning_rate * change

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in values:
                parameter.data = values[name]

    def _loss(self, batch: Batch) -> Tensor:
        if self.num_shards == 1:
            return self.loss(self.model, batch)[0]
        total, labels = torch.zeros((), dtype=torch.float64), 0
        for shard in shards(batch, self.num_shards):
            loss, count = self.loss(self.model, shard)
            if count:
                total += loss.double() * count
            labels += count
        return total / labels


def shards(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield neighbouring sequences of a batch, the first parts longer by one where they cannot be alike."""
    num_rows, begin = len(next(iter(batch.values()))), 0
    for part in range(count):
        end = begin + num_rows // count + (part < num_rows % count)
        yield {name: rows[begin:end] for name, rows in batch.items()}
        begin = end


def language_model_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return a causal language model's own loss and the labels that are predicted: all but each sequence's first."""
    labels = int((batch["labels"][:, 1:] != -100).sum())
    return model(**batch).loss, labels
