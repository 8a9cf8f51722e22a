"""What a step takes, and what it moves."""

from __future__ import annotations

from typing import Literal

from proofs_checks.oracles.registry import Count, NonNegative, Positive, oracle


@oracle(
    "ZO2 Sec. 5.2, Alg. 2 and Fig. 5: like blocks, copies both ways at one rate, staging buffers never waited for"
)
def zo2_step_seconds(
    num_blocks: Count,
    block: NonNegative,
    transfer: NonNegative,
    embed: NonNegative = 0.0,
    head: NonNegative = 0.0,
) -> dict[str, float]:
    """Return the seconds of a periodic offloaded step, overlapped and one after the other.

    - `block`: seconds of all forwards of a block in a step.
    - `transfer`: seconds of a block's copy, one way.

    ``h + max(max(e, t) + N·c, N·t + c)``; ``e + N·(2t + c) + h``.

    >>> zo2_step_seconds(3, 1.0, 2.0)
    {'overlapped': 7.0, 'serial': 15.0}
    """
    filled = max(embed, transfer) + num_blocks * block
    return {
        "overlapped": head + max(filled, num_blocks * transfer + block),
        "serial": embed + num_blocks * (2 * transfer + block) + head,
    }


@oracle("ZO2 Sec. 4.1 and App. D.3")
def zo2_traffic_bytes(
    num_blocks: Count, block_bytes: NonNegative, update: Literal["delayed", "immediate"] = "delayed"
) -> dict[str, float]:
    """Return the bytes that an offloaded step copies up and down; perturbations do not change them.

    >>> zo2_traffic_bytes(3, 10.0, "immediate")
    {'uploads': 60.0, 'offloads': 60.0}
    """
    trips = 1 if update == "delayed" else 2
    return {"uploads": trips * num_blocks * block_bytes, "offloads": trips * num_blocks * block_bytes}


@oracle("DistZO2 Eq. 3 and 4, as printed and as corrected")
def distzo2_step_seconds(
    num_blocks: Count,
    num_ranks: Count,
    block_bytes: NonNegative,
    lane_bytes_per_s: Positive,
    link_bytes_per_s: Positive,
    block_compute: NonNegative,
    head: NonNegative = 0.0,
) -> dict[str, float]:
    """Return the seconds of a step with sliced uploads, as printed, as a filled pipeline, and as a whole.

    - `lane_bytes_per_s`, `link_bytes_per_s`: of a device's way to the host, and to the next device; nobody else uses them.
    - `block_compute`: seconds of a block's forwards.

    As printed ``T_block = M/nB + (n-1)M/nL``, ``T_step = max(N·T_block, N·c)``. Uploads, exchanges, forwards and offloads of different
    blocks overlap: ``u + g + c + (N - 1)·max(u, g, c, o) + h`` with ``u = o = M/nB`` and ``g = (n-1)M/nL``.

    >>> distzo2_step_seconds(4, 2, 2.0, 1.0, 1.0, 0.5)
    {'block_printed': 2.0, 'printed': 8.0, 'filled': 4.0, 'corrected': 5.5}
    """
    share = block_bytes / num_ranks
    upload, exchange = share / lane_bytes_per_s, (num_ranks - 1) * share / link_bytes_per_s
    slowest = max(upload, exchange, block_compute)
    return {
        "block_printed": upload + exchange,
        "printed": num_blocks * max(upload + exchange, block_compute),
        "filled": num_blocks * slowest,
        "corrected": upload + exchange + block_compute + (num_blocks - 1) * slowest + head,
    }


@oracle("DistZO2 App. C: `no worse than standard unoptimized transmission`")
def slicing_break_even(num_ranks: Count) -> float:
    """Return the bandwidth of links over that of lanes below which slicing loses, where transfers limit a step.

    >>> slicing_break_even(4)
    0.75
    """
    return (num_ranks - 1) / num_ranks


@oracle(
    "Huang et al. (2019), section 2.3; Korthikanti et al. (2022), equation 1; Rajbhandari et al. (2020), section 3.1"
)
def first_order_step(
    num_microbatches: Count,
    num_stages: Count,
    forward: NonNegative = 0.0,
    backward: NonNegative = 0.0,
    batch: Count = 1,
    seq: Count = 1,
    hidden: Count = 1,
    heads: Count = 1,
) -> dict[str, float]:
    """Return seconds of even stages with free messages, messages a step, and bytes of a block's activations in half precision.

    ``(m + p - 1)(f + b)``; an activation and a gradient across each boundary for every microbatch; ``s·b·h·(34 + 5·a·s/h)``.

    >>> first_order_step(4, 2, 1.0, 2.0)["seconds"]
    15.0
    """
    return {
        "seconds": (num_microbatches + num_stages - 1) * (forward + backward),
        "messages": 2.0 * num_microbatches * (num_stages - 1),
        "activation_bytes": float(seq * batch * hidden * 34 + 5 * heads * seq * seq * batch),
        "bytes_per_parameter_adam": 16.0,
    }
