"""Solutions of the exercise of the page on several ranks: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations


def right(made, transfers):
    sharing = made.num_gpus if made.one_root else 1
    whole = sharing * made.block_bytes / made.host_bytes_per_s
    up = whole / made.num_gpus if transfers == "sliced" else whole
    down = whole if transfers == "private" else whole / made.num_gpus
    share = made.block_bytes / made.num_gpus
    exchange = (made.num_gpus - 1) * share / made.peer_bytes_per_s if transfers == "sliced" else 0.0
    return max(up, down, exchange, made.compute_s)


def as_equation_3(made, transfers):
    if transfers != "sliced":
        return right(made, transfers)
    share = made.block_bytes / made.num_gpus
    sum_s = share / made.host_bytes_per_s + (made.num_gpus - 1) * share / made.peer_bytes_per_s
    return max(sum_s, made.compute_s)


def blind_to_the_root(made, transfers):
    share = 1 / made.num_gpus if transfers == "sliced" else 1.0
    if not made.one_root:
        return right(made, transfers)
    return max(share * made.block_bytes / made.host_bytes_per_s, made.compute_s)


WRONG = [
    (as_equation_3, "equation 3"),
    (blind_to_the_root, "use the root at once"),
    (lambda made, transfers: made.compute_s, "busy for longer"),
    (lambda made, transfers: 10 * right(made, transfers), "busiest sets the pace"),
    (lambda made, transfers: "3 s", "a number"),
]
