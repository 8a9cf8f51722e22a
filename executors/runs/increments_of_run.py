"""A run's updates as an adapter, made from its log. No forward runs, and of weights only shapes are read.

A step along ``U·Vᵀ`` adds ``-η·g·U·Vᵀ`` to a matrix. While ``V`` stays, the left factors add up; before it is drawn anew, its increment is closed. Increments hold
sums in float32 or wider that the run rounded to its weights step by step: they are nearer to what the steps said than the run's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

from costmodel.models.configs import LoRA
from executors.formats import TORCH_DTYPES
from executors.models.increments import AdapterState
from executors.models.model import in_segments
from executors.models.weight_files import weights_digest
from executors.randomness.counter import CounterKey
from executors.randomness.low_rank import Factors, FactorSampler, LazyInterval, divisor_of
from executors.runs.adapters import recorded_adapters, save_adapters_only
from executors.runs.history import History, read_history
from executors.runs.lazy_intervals import lazy_intervals_of
from executors.runs.records import StepRecord
from executors.runs.replay import OnStep, advance, check_base, load_base, plan_for_one_rank, session_at
from executors.steps.preparing import prepare
from topology.errors import RunError
from zosim.lowering.perturbations import sampling_order
from zosim.plans import Plan


def write_adapter(
    directory: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    num_steps: int | None = None,
    max_rank: int | None = None,
    on_step: OnStep = lambda _done, _all: None,
) -> dict[str, Any]:
    """Write what a run's first steps did to its base as an adapter that PEFT reads.

    - `out`: a directory of its own for each number of steps is a version that can be gone back to.
    - `num_steps`: by default all that were logged.
    - `max_rank`: increments are compacted where their rank would pass it.

    Raises RunError if the run's updates are no products of factors beside linears, or `base` is not what it began from.

    Returns
    -------
    dict
        ``num_steps``, ``num_matrices``, ``rank``, and ``relative_error``, the most that compacting may have left out.
    """
    history = read_history(directory)
    wanted = history.num_steps if num_steps is None else num_steps
    if not 0 < wanted <= history.num_steps:
        raise RunError(f"{directory} has {history.num_steps} steps, so {wanted} cannot be exported")
    if isinstance(tuned := recorded_adapters(history.settings), LoRA):
        return _replayed(history, tuned, base, Path(out), wanted, max_rank, on_step)
    _refuse_other(history)
    model = load_base(str(base), history.plan, adapters=recorded_adapters(history.settings))
    check_base(history, model, base)
    state = AdapterState(max_rank=max_rank)
    updates = _Updates(history.plan, model)
    for record in history.records[:wanted]:
        updates.add_to(state, record, history.records)
        on_step(record.step + 1, wanted)
    error = state.relative_error
    facts = {
        "num_steps": str(wanted),
        "base_digest": str(history.header["base_digest"]),
        "history_digest": history.digest(wanted),
        "relative_error": repr(error),
    }
    state.save(model, out, facts)
    return {
        "num_steps": wanted,
        "num_matrices": len(state.increments),
        "rank": state.rank,
        "relative_error": error,
    }


def _replayed(
    history: History,
    lora: LoRA,
    base: str | Path,
    out: Path,
    num_steps: int,
    max_rank: int | None,
    on_step: OnStep,
) -> dict[str, Any]:
    """Write the adapters that a run tuned, as its first steps left them."""
    if max_rank is not None:
        message = f"{history.directory} tuned adapters, whose rank the run itself limited"
        raise RunError(message, hint="leave --max-rank out; --lora-max-rank limits it in a run")
    model = load_base(str(base), history.plan, adapters=lora, run=history.directory)
    check_base(history, model, base)
    storage = history.plan.storage_dtype
    facts = {
        "num_steps": str(num_steps),
        "base_digest": weights_digest(model, storage, base_only=True),
        "history_digest": history.digest(num_steps),
    }
    with session_at(None, history, model, plan=plan_for_one_rank(history)) as session:
        advance(session, history, num_steps, on_step=on_step)
        session.flush()
        save_adapters_only(model, out, lora, storage, facts)
    intervals = lazy_intervals_of(model)
    return {
        "num_steps": num_steps,
        "num_matrices": sum(path.endswith("lora_B.weight") for path, _ in model.named_parameters()),
        "rank": lora.rank if intervals is None else intervals.rank,
        "relative_error": 0.0 if intervals is None else intervals.relative_error,
    }


def _refuse_other(history: History) -> None:
    """Raise RunError unless all that a run did is a sum of products of factors."""
    plan, where = history.plan, history.directory
    if plan.perturbations.rank is None:
        message = f"{where} used {plan.perturbations.family.name} perturbations, which cannot be exported as adapters"
        raise RunError(message, hint="use a run with --distribution lozo or factorised")
    if recorded_adapters(history.settings) != "linears":
        raise RunError(
            f"{where} tuned more than the linear layers of its blocks, so it cannot be exported as an "
            "adapter",
            hint="use a run with --tune linears",
        )
    if history.header["weight_decay"]:
        raise RunError(
            f"{where} used a weight decay of {history.header['weight_decay']}, whose updates do not have "
            "low rank",
            hint="use a run without --weight-decay",
        )


class _Updates:
    """Samples a run's factors again, as its program did."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        prepare(model, plan, torch.device("cpu"))
        split_point = in_segments(model)
        self._plan = plan
        self._distribution = plan.perturbations.family
        tuned = [tensor for tensor in split_point.tensors if tensor.trainable]
        self._names = [tensor.name for tensor in tuned]
        self._groups = {
            group.name: [tensor.index for tensor in split_point.tensors_of(group.name) if tensor.trainable]
            for group in split_point.param_groups
            if group.num_trainable
        }
        self._order = [group.name for group in sampling_order(plan)]
        assert plan.perturbations.rank is not None
        self._rank = plan.perturbations.rank
        self._factor_sampler = FactorSampler(
            [tensor.shape for tensor in tuned],
            self._groups,
            lambda _perturbation: self._order,
            self._rank,
            torch.device("cpu"),
            TORCH_DTYPES[plan.storage_dtype],
        )

    def add_to(self, state: AdapterState, record: StepRecord, records: tuple[StepRecord, ...]) -> None:
        """Add the updates of one step."""
        lazy_steps, num_perturbations = (
            self._plan.perturbations.lazy_steps or 1,
            self._plan.estimator.num_perturbations,
        )
        first = record.step - record.step % lazy_steps
        interval = LazyInterval(first, tuple(records[first].seeds))
        # The interval before has ended: leave rank for what this one adds.
        if record.step == first:
            state.close(self._rank * num_perturbations)
        divisor = divisor_of(self._rank, self._distribution.rank_power + self._distribution.update_rank_power)
        for perturbation, gradient in enumerate(record.projected_gradients):
            factor = -record.learning_rate * gradient / num_perturbations / divisor
            for group, factors in self._factors(record, perturbation, interval).items():
                for index, left, right in zip(
                    self._groups[group], factors.lefts, factors.rights, strict=True
                ):
                    assert right is not None
                    state.add(self._names[index], left, right, factor)

    def _factors(
        self, record: StepRecord, perturbation: int, interval: LazyInterval
    ) -> Mapping[str, Factors]:
        factor_sampler, seed, step = self._factor_sampler, record.seeds[perturbation], record.step
        if self._plan.perturbations.is_keyed:
            key = CounterKey.of(seed, step, perturbation)
            return {
                group: factor_sampler.counted(group, perturbation, key, interval) for group in self._order
            }
        generator = Generator()
        generator.manual_seed(seed)
        factors = {
            g: factor_sampler.sequential(g, perturbation, step, interval, generator) for g in self._order
        }
        if self._distribution.is_resampled and step == interval.first:
            return {
                group: factor_sampler.resampled(group, perturbation, seed, interval) for group in self._order
            }
        return factors
