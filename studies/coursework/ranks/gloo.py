"""A solution on two processes that exchange over gloo: ``python -m studies.coursework.ranks.gloo solution.py``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from studies.coursework.ranks.exercise import FUNCTION, Vector, examples_of, loss
from studies.exercises import function_in

_SIZES = (30, 10)


def _rank(rank: int, store: str, solution: str) -> None:
    """Take ten steps as one of two ranks, and print what came out."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=2)
    num_bytes = 0

    def all_reduce(vector: Vector) -> Vector:
        nonlocal num_bytes
        total = torch.from_numpy(np.atleast_1d(np.asarray(vector, dtype=np.float64)).copy())
        num_bytes += total.nbytes
        dist.all_reduce(total)
        summed: Vector = total.numpy()
        return summed

    step, whole, theta = function_in(Path(solution), FUNCTION), examples_of(sum(_SIZES)), np.zeros(6)
    shard = (whole[: _SIZES[0]], whole[_SIZES[0] :])[rank]
    for number in range(10):
        theta = step(theta, shard, loss, (number,), 1e-3, 0.01, "data", rank, 2, all_reduce)
    print(
        f"rank {rank}: loss {loss(np.zeros(6), whole):.2f} -> {loss(theta, whole):.2f}, {num_bytes // 10} bytes a step"
    )
    dist.destroy_process_group()


def main(solution: str) -> int:
    """Run both ranks and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        command = [sys.executable, "-m", "studies.coursework.ranks.gloo", solution]
        ranks = [subprocess.Popen([*command, str(rank), store]) for rank in range(2)]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _rank(int(sys.argv[2]), sys.argv[3], sys.argv[1])
    else:
        sys.exit(main(sys.argv[1]))
