"""``python -m tests.support.simulated_cuda``: kernels and synchronisations of a step, by model and placement."""

from __future__ import annotations

from executors.runs.session import Session
from tests.support.distributed import OFFLOADED
from tests.support.simulated_cuda import simulated
from tests.support.tiny import batches, model_of, plan_of

NUM_BLOCKS = 3


def main() -> None:
    """Print a line for each."""
    for shape in ("opt", "llama", "gpt2"):
        for name, axes in (("resident", {}), ("offloaded", OFFLOADED)):
            with simulated() as device:
                model = model_of(shape, num_hidden_layers=NUM_BLOCKS)
                with Session(plan_of(model, **axes), model, learning_rate=1e-3, device="cuda:0") as session:
                    first, second = batches(2)
                    session.step(first)
                    before = device.launches.total(), device.synchronisations.total()
                    session.step(second)
                    launches, waits = (
                        device.launches.total() - before[0],
                        device.synchronisations.total() - before[1],
                    )
            print(
                f"{shape}, {NUM_BLOCKS} blocks, {name}: {launches} kernels and copies, {waits} synchronisations"
            )


if __name__ == "__main__":
    main()
