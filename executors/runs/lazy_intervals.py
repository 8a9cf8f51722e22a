"""Lazy intervals of an adapter: while ``A`` stays, updates add up in ``B``; an interval is closed before ``A`` is sampled anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import LoRA
from executors.models.increments import Increments
from executors.models.lora import joined_factors
from executors.randomness.rng import mixed

_INTERVALS = "_zosim_lazy_intervals"


def attach_intervals(model: nn.Module, lora: LoRA) -> None:
    """Sample the first interval's ``A`` of a model with adapters, and attach the intervals to the model."""
    intervals = LazyIntervals(model, lora)
    setattr(model, _INTERVALS, intervals)
    intervals.draw(0)


def lazy_intervals_of(model: nn.Module) -> LazyIntervals | None:
    """Return the intervals of a model whose adapters' ``A`` is sampled anew; None for any other."""
    return getattr(model, _INTERVALS, None)


class LazyIntervals:
    """Intervals of steps in which ``A`` stays, and ``B`` adds up what is learnt along it.

    What an interval has learnt is closed before ``A`` is drawn anew: ``B·A`` becomes one more increment beside the frozen base, and increments
    are compacted where their rank would pass the bound.

    `lora`: whose ``lazy_steps`` is not None.

    ``A`` of interval ``k`` is a function of the seed, ``k`` and the number of the linear. With ``B`` along normals ``U``, and the scale
    ``1/√r``, an interval goes along ``U·Aᵀ/√r``, which is ``--distribution factorised`` [1]_, Eq. 7-8 and 13-18.

    .. [1] Li and Ding, "LLM Zeroth-Order Fine-Tuning is an Inference Workload", 2026.
    """

    def __init__(self, model: nn.Module, lora: LoRA) -> None:
        assert lora.lazy_steps is not None
        self.lazy_steps = lora.lazy_steps
        self._rank = lora.rank
        self._closed_rank = lora.closed_rank
        self._seed = lora.seed
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "lora_used")]

    def opens(self, step: int) -> bool:
        """Whether an interval before `step` is to be closed when it begins."""
        return step > 0 and step % self.lazy_steps == 0

    def stand_at(self, step: int) -> None:
        """Let as much of the closed increments' memory be read as is in use after `step` steps."""
        # An interval that ends with `step` is closed only when the next step begins.
        num_closed = max(step - 1, 0) // self.lazy_steps
        used = min(num_closed * self._rank, self._closed_rank)
        for module in self._modules:
            module.lora_used = used

    def open(self, step: int, *, is_here: Callable[[nn.Parameter], bool] = lambda _: True) -> None:
        """Close the interval before `step`, and sample ``A`` anew.

        `is_here`: whether this rank holds a parameter: of other stages it has none to change.
        """
        interval = step // self.lazy_steps
        used = min(interval * self._rank, self._closed_rank)
        for module in self._modules:
            if is_here(module.lora_B.weight):
                close_increment(module, self._closed_rank)
            module.lora_used = used
        self.draw(interval, is_here=is_here)

    def draw(self, interval: int, *, is_here: Callable[[nn.Parameter], bool] = lambda _: True) -> None:
        """Write the ``A`` of an interval."""
        for number, module in enumerate(self._modules):
            weight = module.lora_A.weight
            if is_here(weight):
                generator = torch.Generator().manual_seed(mixed(self._seed, interval, number))
                weight.data.copy_(torch.randn(weight.shape, generator=generator))

    @property
    def rank(self) -> int:
        """Rank of all increments together."""
        return self._rank + int(self._modules[0].lora_used)

    @property
    def relative_error(self) -> float:
        """What compacting has left out at most, as a share of the norm of what is there, of the worst matrix."""
        worst = 0.0
        for module in self._modules:
            inner, outer = (factor.detach() for factor in joined_factors(module))
            if norm := Increments([outer], [inner.T]).norm():
                worst = max(worst, float(module.lora_lost) / norm)
        return worst


def close_increment(module: Any, closed_rank: int) -> None:
    """Make the open increment a closed one, compacted with the others where its rank would exceed the bound."""
    with torch.no_grad():
        inner, outer = joined_factors(module)
        increments = Increments([outer.float() if outer.dtype.itemsize < 4 else outer.clone()], [inner.T])
        increments.compact(closed_rank)
        left, right = increments.joined()
        rank = left.shape[1]
        module.lora_closed_A.data.zero_()[:rank] = right.T
        module.lora_closed_B.data.zero_()[:, :rank] = left
        module.lora_lost.data.copy_(
            rounded_up(module.lora_lost.double() + increments.lost, module.lora_lost.dtype)
        )
        module.lora_B.weight.data.zero_()


def rounded_up(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound that is not negative in a format, not below what it was."""
    held = bound.to(dtype)
    if bool(held.to(bound.dtype) < bound):
        # One place of the format further is past the next number that it has, from where rounding does not lead back below.
        info = torch.finfo(dtype)
        held = (bound + info.eps * bound.clamp(min=info.tiny)).clamp(max=info.max).to(dtype)
    return held
