"""What an instruction asks of shared resources while it runs, and the paths between ranks that it may take."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.collectives import all_gather_s, all_reduce_s, point_to_point_s
from costmodel.nccl import Communicator
from costmodel.profile import Bound


@dataclass(frozen=True, slots=True)
class Activity:
    """An operation as the simulator sees it.

    Attributes
    ----------
    seconds : float
        Duration with nothing else running.
    bound : float
        Its rate then, in a unit of its own: bytes/s for a flow, 1 for everything else.
    weight : float
        Rate that counts as much as full speed does for an activity of bound 1.
    uses : tuple of (str, float)
        Resources, with what a unit of rate takes of each.
    limiter : str
        What the duration consists of mostly.
    """

    seconds: float
    bound: float = 1.0
    weight: float = 1.0
    uses: tuple[tuple[str, float], ...] = ()
    limiter: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """The path from a rank to another.

    Attributes
    ----------
    latency_s : float
        Of one message.
    bandwidth_bytes_per_s : float
        Of the narrowest link on the path.
    uses : tuple of (str, float)
        What lies on the way, with what a byte sent takes of each; nothing within one host's memory.
    wire : str
        Kind of the narrowest link; ``memory`` within one host's memory.
    core_s_per_byte : float
        Seconds of a host's core for a byte that is sent and one that comes, where cores carry them; 0 within one host's memory
        says that it is a core all the time.
    busy_latency_s : float
        Seconds that a large exchange, beside which ranks compute, takes beyond that: its threads wait for their turns on a core.
    nccl : Communicator, optional
        Of GPUs: what chooses an algorithm and says what it takes. Without it, the better of ring and recursive doubling.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    uses: tuple[tuple[str, float], ...] = ()
    wire: str = "memory"
    core_s_per_byte: float = 0.0
    busy_latency_s: float = 0.0
    nccl: Communicator | None = None

    def message_s(self, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds of a message of so many bytes.

        Examples
        --------
        A mebibyte over 1 GiB/s takes a 1,024th of a second, after 10 us of latency:

        >>> round(1e3 * Hop(1e-5, 2**30).message_s(2**20), 4)
        0.9866
        """
        if self.nccl is not None:
            return self.nccl.message_s(size_bytes, bound)
        return point_to_point_s(
            size_bytes, latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class Ring(Hop):
    """A rank's place in the ring of a group: the path to the next rank, which keeps pace with the slowest hop of the ring.

    Attributes
    ----------
    num_ranks : int
        Of the group.
    """

    num_ranks: int = field(kw_only=True)

    def all_reduce_s(self, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds of a sum over buffers of so many bytes."""
        if self.nccl is not None:
            return self.nccl.seconds("all_reduce", size_bytes, bound)
        return all_reduce_s(
            size_bytes,
            self.num_ranks,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
        )

    def all_gather_s(self, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds until every rank has all shares, so many bytes together."""
        if self.nccl is not None:
            return self.nccl.seconds("all_gather", size_bytes, bound)
        return all_gather_s(
            size_bytes,
            self.num_ranks,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
        )
