"""``python -m tests.support.simulated_cuda``: kernels and synchronisations of a step, by model and placement, as a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from costmodel.models.configs import LoRA
from executors.runs.adapters import attach
from executors.runs.session import Session
from proofs_checks.setups.ranks import on_all_ranks
from tests.support import staged
from tests.support.distributed import OFFLOADED
from tests.support.simulated_cuda import Device, seen_by, simulated
from tests.support.tiny import batches, model_of, plan_of
from zosim.plans import Plan

NUM_BLOCKS = 3
_LORA = {"lora": LoRA(rank=2, target_modules=("q_proj", "fc2"))}
_INT8 = {"low_bits": {"weights": "int8"}, "perturbations": {"rng": "counter"}}
_PERTURBATIONS = {"estimator": {"num_perturbations": 2}}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "OPT, resident": ("opt", {}),
    "OPT, offloaded": ("opt", OFFLOADED),
    "Llama, resident": ("llama", {}),
    "Llama, offloaded": ("llama", OFFLOADED),
    "GPT-2, resident": ("gpt2", {}),
    "GPT-2, offloaded": ("gpt2", OFFLOADED),
    "OPT, resident, graphs": ("opt", {"graphs": True}),
    "OPT, offloaded, graphs": ("opt", {"graphs": True, **OFFLOADED}),
    "Llama, offloaded, graphs": ("llama", {"graphs": True, **OFFLOADED}),
    "two perturbations": ("opt", _PERTURBATIONS),
    "two perturbations, offloaded": ("opt", _PERTURBATIONS | OFFLOADED),
    "counter draws": ("opt", {"perturbations": {"rng": "counter"}}),
    "perturbations kept": ("opt", {"perturbations": {"kept": True}}),
    "weight decay": ("opt", {"weight_decay": 0.1}),
    "weight decay, offloaded": ("opt", {"weight_decay": 0.1, **OFFLOADED}),
    "accumulated over 3": ("opt", {"accumulate": 3}),
    "bfloat16": ("opt", {"dtype": "bfloat16"}),
    "LoRA": ("opt", _LORA),
    "LoRA, offloaded": ("opt", _LORA | OFFLOADED),
    "rank 2": ("opt", {"perturbations": {"distribution": "lozo", "rank": 2}}),
    "int8": ("opt-untied", _INT8),
    "int8, offloaded": ("opt-untied", _INT8 | OFFLOADED),
    "int4, sparse": (
        "opt",
        {
            "low_bits": {"weights": "int4", "perturbation_bits": 4, "sparsity": 0.5},
            "perturbations": {"rng": "counter"},
        },
    ),
    "LoRA over int8": ("opt-untied", _LORA | {"low_bits": {"weights": "int8"}}),
    "data 2": ("opt", {"mesh": {"data": 2}}),
    "perturb 2": ("opt", {"mesh": {"perturb": 2}}),
    "perturb 2, offloaded": ("opt", {"mesh": {"perturb": 2}, **OFFLOADED}),
    "stage 2": ("opt", {"split_points": ("block.0",)}),
    "stage 2, inputs of 8 bits": ("opt", {"split_points": ("block.0.mlp",), "codec": "q8:affine-zero:token"}),
}
"""A model, and what is unlike the default: axes, LoRA, micro-batches, decay."""


def _sessions(shape: str, case: Mapping[str, Any]) -> tuple[Plan, list[Any], dict[str, Any]]:
    """Return the plan of a case, a model for each rank, and a session's options."""
    if "split_points" in case:
        staged_case = staged.Case(**case)
        plan = staged_case.plan()
        return plan, [staged_case.made() for _ in range(2)], {"learning_rate": 1e-3, "device": "cuda:0"}
    axes = dict(case)
    lora, decay, parts = axes.pop("lora", None), axes.pop("weight_decay", 0.0), axes.pop("accumulate", 1)
    dtype, mesh = axes.pop("dtype", "float32"), axes.pop("mesh", {})

    def made() -> Any:
        model = model_of(shape, num_hidden_layers=NUM_BLOCKS)
        if lora is not None:
            attach(model, lora)
        return model

    graphs = {"graphs": True} if axes.pop("graphs", False) else {}
    plan = plan_of(made(), size=6, dtype=dtype, **axes)
    num_ranks = 1
    for size in mesh.values():
        num_ranks *= size
    if num_ranks > 1:
        data = plan.model_dump(mode="json")
        data["mesh"] = mesh
        data["placement"] |= {"devices": ["cpu0"] * num_ranks}
        plan = Plan.model_validate(data)
    options = {
        "learning_rate": 1e-3,
        "weight_decay": decay,
        "num_micro_batches": parts,
        "device": "cuda:0",
        **graphs,
    }
    return plan, [made() for _ in range(num_ranks)], options


def _counts(device: Device) -> list[Counter[Any]]:
    return [Counter(count) for count in (device.launches, device.synchronisations, device.standstills)]


def counted(shape: str, case: Mapping[str, Any]) -> tuple[list[Counter[Any]], int]:
    """Return launches, synchronisations and standstills of a step in the middle of a run, and how many ranks made them."""
    plan, models, options = _sessions(shape, case)
    lines = batches(4, size=plan.batch)
    with simulated() as device:

        def rank(number: int, communicator: Any) -> None:
            seen = nullcontext() if communicator is None else seen_by(device)
            with seen, Session(plan, models[number], communicator=communicator, **options) as session:
                unread = None
                for step, batch in enumerate(lines):
                    if communicator is not None:
                        communicator.barrier("counting")
                    if number == 0 and step in (2, 3):
                        taken.append(_counts(device))
                    if communicator is not None:
                        communicator.barrier("counting")
                    begin = getattr(session, "begin_step", None)
                    if begin is None:
                        session.step(batch)
                        continue
                    begun = begin(batch)
                    if unread is not None:
                        unread.record()
                    unread = begun

        taken: list[list[Counter[Any]]] = []
        if len(models) == 1:
            rank(0, None)
        else:
            on_all_ranks(plan, rank)
    before, after = taken
    return [late - early for early, late in zip(before, after, strict=True)], len(models)


def rows(names: Iterable[str] = CASES) -> Iterator[tuple[str, ...]]:
    """Yield name, launches, synchronisations and standstills of a step of one rank, on average, case by case."""
    for name in names:
        counts, num_ranks = counted(*CASES[name])
        yield name, *(f"{count.total() / num_ranks:g}" for count in counts)


def main() -> None:
    """Print the table."""
    print(f"| of {NUM_BLOCKS} blocks | kernels and copies | waits | of these, with nothing left to do |")
    print("| --- | ---: | ---: | ---: |")
    for row in rows(sys.argv[1:] or CASES):
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
