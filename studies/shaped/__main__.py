"""``python -m studies.shaped --rate 100mbit --hosts 2 -- CMD...``: a command on hosts with slow links."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from studies.shaped.network import ShapedNetwork, rate_bits_per_s
from studies.shaped.ranks import run_ranks
from topology.errors import ZosimError


def main(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, behind `--`.")],
    rate: Annotated[str, typer.Option(help="Of every host's link, such as 100mbit or 1gbit.")] = "1gbit",
    hosts: Annotated[int, typer.Option(min=1, help="Number of hosts.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks of each host.")] = 1,
) -> None:
    """Run a command in every rank of hosts that are joined by links of this rate, as torchrun would start it."""
    # A plain SIGTERM would leave the network behind until the next run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ShapedNetwork(hosts, rate_bits_per_s(rate)) as network:
            status = run_ranks(network, command, ranks_per_host=ranks_per_host)
    except ZosimError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    typer.run(main)
