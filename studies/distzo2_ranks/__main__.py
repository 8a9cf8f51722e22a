"""``python -m studies.distzo2_ranks``: what several ranks share, and what they do not."""

from __future__ import annotations

from studies.distzo2_ranks.cases import TRANSFERS, apart, behind_one_root, offloaded, perturbed, squares
from topology import load_preset
from zosim.planning.predict import PlannedRun


def contention() -> None:
    """Show two GPUs with lanes of their own, and behind one root."""
    alone = offloaded(apart(), 1).step_time_s
    print(f"one GPU: {alone:.2f} s a step of one sequence")
    for name, topology in (("lanes of their own", apart()), ("one root", behind_one_root())):
        seconds = {
            transfers: offloaded(topology, 2, transfers=transfers).step_time_s for transfers in TRANSFERS
        }
        listed = ", ".join(f"{transfers} {seconds[transfers] / alone:.2f}" for transfers in TRANSFERS)
        print(f"  two GPUs, {name}, two sequences: times as long {listed}")


def slices() -> None:
    """Show machines on which slicing wins and loses."""
    machines = (("rtx4090-2x", 2, "opt-13b"), ("h20-4x-milan", 4, "opt-13b"), ("dgx-h100", 8, "opt-13b"))
    for name, num_gpus, model in machines:
        seconds = {
            transfers: offloaded(load_preset(name), num_gpus, transfers=transfers, model=model).step_time_s
            for transfers in TRANSFERS
        }
        listed = ", ".join(f"{transfers} {seconds[transfers]:.2f} s" for transfers in TRANSFERS)
        best = min(seconds, key=seconds.__getitem__)
        print(f"{name}, {num_gpus} GPUs: {listed}; {best} is best")


def perturbations() -> None:
    """Show what each rank draws and forwards when perturbations and ranks grow together."""
    for num_perturbations, num_ranks in ((1, 1), (1, 2), (2, 2), (2, 4)):
        planned = perturbed(num_perturbations, num_ranks)
        step_s = planned.step_time_s
        print(
            f"P = {num_perturbations}, hosts: {num_ranks}: draws {_busy(planned, 'sample'):.2f} s a rank, forwards "
            f"{_busy(planned, 'forward'):.2f} s, step {step_s:.2f} s"
        )


def _busy(planned: PlannedRun, label: str) -> float:
    return dict(planned.prediction.seconds_by_label).get(label, 0.0)


def pairs() -> None:
    """Show what a pair of signs on two shards does to the estimate."""
    one, two = squares()
    print(
        f"mean square of g·z over that of the gradient: {one:.1f} if both signs see one shard, {two:.1e} if not"
    )


def main() -> None:
    """Print all four."""
    for title, part in (
        ("contention", contention),
        ("slices", slices),
        ("perturbations", perturbations),
        ("pairs", pairs),
    ):
        print(f"-- {title}")
        part()


if __name__ == "__main__":
    main()
