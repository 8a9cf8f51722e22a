"""Copy this file, write the function, and try it: ``zosim study check distzo2_ranks mine.py``."""

from __future__ import annotations

from studies.distzo2_ranks.cases import Board


def seconds_per_block(board: Board, transfers: str) -> float:
    """Return the seconds that one more block adds to a step, once the pipeline is filled.

    - `board`: ``num_gpus``, ``block_bytes``, ``compute_s`` (a block's forwards on one GPU), ``host_bytes_per_s`` (from the host
      to a GPU and as much back, shared by all GPUs where ``one_root``), ``peer_bytes_per_s`` (to the next GPU).
    - `transfers`: ``"private"``: every GPU uploads whole blocks and offloads whole blocks. ``"shared"``: it uploads whole blocks
      and offloads its n-th. ``"sliced"``: it uploads its n-th, gets the others from its peers, offloads its n-th.

    Upload, exchange, compute and offload of different blocks overlap; staging buffers are plenty; sampling and passes over parameters take no time.
    """
    raise NotImplementedError("write it")
