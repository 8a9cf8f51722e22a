"""Zeroth or first order: a plan beside recipes of first-order fine-tuning on the same devices, and a sentence that decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from costmodel.devices.prices import PriceTable, Range, job_costs, shipped_prices
from costmodel.models.recipes import RECIPES, TrainingRecipe
from costmodel.models.training import LIBRARY_BYTES, Peak, TrainingRun
from topology.errors import ZosimError
from topology.units import format_bytes, format_seconds
from zosim.applications.first_order.recipes import adapter_shapes, step_seconds
from zosim.planning.predict import PlannedRun
from zosim.report import Bullets, Report, Table

if TYPE_CHECKING:
    from zosim.planning.planner import Decision

_COMPARED = (
    "adamw-fp32-master",
    "adamw-bf16",
    "adamw-8bit-in-backward",
    "zero-offload",
    "lora",
    "qlora-nf4-dq",
)
_RANK, _LINEARS = 16, "q,k,v,o,mlp"
_USABLE = 0.98
"""Part of a device's memory beside its context that a run can have."""
FEWEST_TIMES, MOST_TIMES = 10, 100
"""How many times as many steps zeroth order takes in published runs."""


@dataclass(frozen=True)
class TuningOption:
    """One way to tune the model."""

    name: str
    description: str
    # device_bytes, host_bytes: of the fullest device, as the driver reports it, and of all hosts together.
    device_bytes: float
    host_bytes: float
    peak: str  # what sets the device's memory; empty for zeroth order
    fits: bool
    step_s: float
    tokens_per_s: float
    num_steps: int | None = None  # steps to the target, where somebody says how many
    usd: Range | None = None  # price of these steps, or else of 1,000
    # What torch's allocator hands out at each peak, and what it takes from the driver at most; of first order alone.
    peaks: Mapping[Peak, float] = field(default_factory=dict)
    reserved_bytes: float = 0.0

    @property
    def total_s(self) -> float | None:
        """Seconds to the target."""
        return None if self.num_steps is None else self.num_steps * self.step_s


@dataclass(frozen=True)
class OrderChoice:
    """A zeroth-order plan beside first-order recipes."""

    planned: PlannedRun
    prices: PriceTable | None = None
    # zeroth_order_steps, first_order_steps: steps to the same target.
    zeroth_order_steps: int | None = None
    first_order_steps: int | None = None

    @cached_property
    def zeroth(self) -> TuningOption:
        """The plan."""
        prediction = self.planned.prediction
        return self._option(
            "zeroth order",
            self.planned.plan.describe(),
            prediction.footprints.largest.device_bytes,
            prediction.footprints.fullest.size_bytes,
            "",
            True,
            prediction.step_time_s,
            self.zeroth_order_steps,
        )

    @cached_property
    def recipes(self) -> tuple[TuningOption, ...]:
        """First-order recipes, each with the largest micro-batch that fits."""
        return tuple(self._of_recipe(RECIPES[name]) for name in _COMPARED)

    @property
    def best(self) -> TuningOption | None:
        """The fastest recipe that fits."""
        return min((one for one in self.recipes if one.fits), key=lambda one: one.step_s, default=None)

    @property
    def _least(self) -> TuningOption:
        """The recipe that takes least of a device."""
        return min(self.recipes, key=lambda one: one.device_bytes)

    def _of_recipe(self, recipe: TrainingRecipe) -> TuningOption:
        plan, topology = self.planned.plan, self.planned.topology
        devices = tuple(dict.fromkeys(plan.placement.devices))
        profile = self.planned.profile
        spec = topology.device_spec(devices[0])
        context = profile.values("central").get("context_bytes", 0.0)
        usable = _USABLE * (spec.memory_bytes - context)
        each = -(-plan.batch // len(devices))
        shapes = adapter_shapes(plan.model, _LINEARS) if recipe.has_adapters else []
        run = TrainingRun(
            plan.model,
            recipe,
            each,
            plan.seq,
            dtype=plan.compute_dtype if plan.compute_dtype == "float16" else "bfloat16",
            num_devices=len(devices),
            sharding="none" if len(devices) == 1 else "zero-2" if recipe.name == "zero-offload" else "fsdp",
            num_adapter_parameters=plan.model.num_blocks * _RANK * sum(map(sum, shapes)),
            adapter_inputs=sum(inputs for inputs, _ in shapes),
            adapter_outputs=sum(outputs for _, outputs in shapes),
            wide_norms=recipe.name.startswith("qlora-nf4"),
            attention=plan.forward.attention,
        )
        while run.allocated_bytes > usable and run.batch > 1:
            run = replace(run, batch=-(-run.batch // 2), accumulation=2 * run.accumulation)
        hosts = {topology.host_of(device).id for device in devices}
        there = sum(memory.memory_bytes for memory in topology.of_type("memory") if memory.host in hosts)
        fits = run.allocated_bytes <= usable and run.host_bytes <= there
        reserved = max(min(run.reserved_bytes, usable), run.allocated_bytes)
        option = self._option(
            recipe.name,
            recipe.description,
            reserved + context + LIBRARY_BYTES * (spec.type == "gpu"),
            run.host_bytes,
            run.limiting_peak,
            fits,
            step_seconds(run, topology, devices, profile),
            self.first_order_steps,
        )
        return replace(option, peaks=run.peaks, reserved_bytes=reserved)

    def _option(
        self, name: str, description: str, device_bytes: float, host_bytes: float, peak: str, fits: bool,
        step_s: float, num_steps: int | None,
    ) -> TuningOption:  # fmt: skip
        plan = self.planned.plan
        hours = Range.exactly((num_steps or 1000) * step_s / 3600)
        usd = None
        if self.prices is not None:
            num = len(set(plan.placement.devices))
            try:
                costs = job_costs(self.prices, plan.placement.topology, self.planned.topology, num, hours)
                usd = min((cost.spent for cost in costs), key=lambda spent: spent.value)
            except ZosimError:  # nobody knows a price of this machine
                pass
        return TuningOption(
            name, description, device_bytes, host_bytes, peak, fits, step_s, plan.tokens_per_step / step_s,
            num_steps, usd,
        )  # fmt: skip

    @property
    def verdict(self) -> str:
        """Whether zeroth order is the right choice, and why."""
        best = self.best
        if best is None:
            least = self._least
            return (
                f"Zeroth order is the choice on this hardware: no first-order recipe fits. The smallest, {least.name}, "
                f"needs {format_bytes(least.device_bytes)} of a device."
            )
        even = best.step_s / self.zeroth.step_s
        mine, other = self.zeroth.total_s, best.total_s
        if mine is not None and other is not None:
            if mine > other:
                return (
                    f"Zeroth order is the wrong choice here: {best.name} fits, and reaches the target in "
                    f"{format_seconds(other)} instead of {format_seconds(mine)}."
                )
            return (
                f"Zeroth order is the choice here: it reaches the target in {format_seconds(mine)}, "
                f"and {best.name} takes {format_seconds(other)}."
            )
        if even < FEWEST_TIMES:
            return (
                f"Zeroth order is the wrong choice here: {best.name} fits, and zeroth order takes "
                f"{FEWEST_TIMES} to {MOST_TIMES} times as many steps in published runs. It pays below {even:.2g} times."
            )
        return (
            f"Zeroth order may be the choice here: it pays below {even:.2g} times as many steps as {best.name}, "
            f"and takes {FEWEST_TIMES} to {MOST_TIMES} times as many in published runs."
        )

    def view(self) -> Report:
        """Return the table, the sentence that decides, and what the figures are."""
        return Report("", self._table(), Bullets(self._remarks()))

    def _table(self) -> Table:
        has_target = self.zeroth_order_steps is not None or self.first_order_steps is not None
        has_money = self.zeroth.usd is not None
        columns: dict[str, Callable[[TuningOption], str]] = {
            "recipe": lambda one: one.name,
            "device": lambda one: format_bytes(one.device_bytes),
            "peak": lambda one: one.peak,
            "fits": lambda one: "yes" if one.fits else "no",
            "host": lambda one: format_bytes(one.host_bytes) if one.host_bytes else "",
            "step": lambda one: format_seconds(one.step_s),
            "tokens/s": lambda one: f"{one.tokens_per_s:,.0f}",
        }
        if has_target:
            columns["to target"] = lambda one: "" if one.total_s is None else format_seconds(one.total_s)
        if has_money:
            money = "USD" if has_target else "USD/1k steps"
            columns[money] = lambda one: "" if one.usd is None else f"{one.usd.value:,.2f}"
        numeric = [name for name in columns if name not in ("recipe", "peak", "fits")]
        return Table.of((self.zeroth, *self.recipes), columns, numeric=numeric, keeps_words=True)

    def _remarks(self) -> Iterator[str]:
        yield self.verdict
        yield "device: memory of the fullest device, as the driver reports it; peak: the phase that sets it (loss, backward or update)"
        shown = self.best or self._least
        peaks = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown.peaks.items())
        yield (
            f"{shown.name}: {peaks} allocated by torch, {format_bytes(shown.reserved_bytes)} reserved by it, "
            f"{format_bytes(shown.device_bytes)} as the driver reports it"
        )
        yield f"first order assumes recomputed blocks, 16-bit weights, adapters of rank {_RANK} on all linear layers, and sharding over several devices"

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        options = [
            {
                "recipe": one.name,
                "device_bytes": round(one.device_bytes),
                "host_bytes": round(one.host_bytes),
                "peak": one.peak or None,
                "allocated_bytes": {name: round(size) for name, size in one.peaks.items()},
                "reserved_bytes": round(one.reserved_bytes),
                "fits": one.fits,
                "step_time_s": one.step_s,
                "tokens_per_s": one.tokens_per_s,
                "num_steps": one.num_steps,
                "total_s": one.total_s,
                "usd": None if one.usd is None else one.usd.value,
            }
            for one in (self.zeroth, *self.recipes)
        ]
        return {"verdict": self.verdict, "options": options}


def choose_order(
    decision: Decision, *, zeroth_order_steps: int | None = None, first_order_steps: int | None = None
) -> OrderChoice:
    """Hold a zeroth-order plan against recipes of first-order fine-tuning on the same devices.

    Parameters
    ----------
    decision : Decision
        From :func:`zosim.api.plan`.
    zeroth_order_steps, first_order_steps : int, optional
        Numbers of steps to the same target, with which both are compared by time and money.
    """
    return OrderChoice(decision.chosen.planned, shipped_prices(), zeroth_order_steps, first_order_steps)


def compare_first_order(
    decision: Decision, *, zeroth_order_steps: int | None = None, first_order_steps: int | None = None
) -> Decision:
    """Return a decision with the comparison of :func:`choose_order`, which notebooks, JSON and reports then show.

    Parameters
    ----------
    decision : Decision
        From :func:`zosim.api.plan`.
    zeroth_order_steps, first_order_steps : int, optional
        Numbers of steps to the same target, with which both are compared by time and money.
    """
    choice = choose_order(
        decision, zeroth_order_steps=zeroth_order_steps, first_order_steps=first_order_steps
    )
    return replace(decision, compared=choice)
