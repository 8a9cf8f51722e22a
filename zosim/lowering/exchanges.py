"""What a step takes of other ranks: hidden states that cross a cut, and losses of which each rank knows some."""

from __future__ import annotations

from costmodel.model_spec import HEAD
from costmodel.work import Work
from zosim.instructions import Access, Stream
from zosim.lowering.listing import Listing
from zosim.lowering.messages import coding_work, expected_message_bytes
from zosim.operations import Collective, Decode, Encode, Recv, Scalar, Send


class Exchanges:
    """Writes messages between stages, the exchange of losses, and the gradient that comes of them.

    Parameters
    ----------
    listing : Listing
    """

    def __init__(self, listing: Listing) -> None:
        self.plan = listing.plan
        self.layout = listing.layout
        self._listing = listing

    def receive_all(self) -> None:
        """Write the receipt of every message of the stage before, in the order in which it sends them."""
        if self.layout.is_first_stage:
            return
        for point in self.layout.own_points:
            wire = self.layout.wire(point, self.layout.stage - 1, "in")
            self._listing.emit(
                f"recv[{point or 'base'}]",
                Recv("pipeline", -1),
                Stream.RECV,
                "recv",
                self.layout.segments[0],
                (),
                (wire,),
                Work(
                    link_bytes=expected_message_bytes(
                        self.plan, self.layout.stage - 1, self.layout.num_sequences
                    )
                ),
            )

    def encode(self, segment: str, before: str, point: str, wire: Access, cut: int) -> None:
        """Write how what `before` leaves becomes the message that crosses cut number `cut`."""
        op = Encode(self.plan.split.codec, self.plan.split.residual_codec)
        work = coding_work(self.plan, cut, self.layout.num_sequences, "encode")
        name, reads = f"encode[{point or 'base'}]", (self.layout.hidden(point, before),)
        self._listing.emit(name, op, Stream.COMPUTE, "encode", segment, reads, (wire,), work)

    def decode(self, segment: str, before: str, point: str, wire: Access, cut: int) -> None:
        """Write how a message becomes what `before` left; the batch tells its shape."""
        work = coding_work(self.plan, cut, self.layout.num_sequences, "decode")
        name, left = f"decode[{point or 'base'}]", (self.layout.hidden(point, before),)
        reads = (wire, self.layout.batch())
        self._listing.emit(name, Decode(), Stream.COMPUTE, "decode", segment, reads, left, work)

    def hand_on(self, segment: str, point: str) -> None:
        """Write how the hidden state that this stage leaves goes to the next."""
        cut, name = self.layout.stage, point or "base"
        wire = self.layout.wire(point, cut, "out")
        self.encode(segment, segment, point, wire, cut)
        link = Work(link_bytes=expected_message_bytes(self.plan, cut, self.layout.num_sequences))
        self._listing.emit(
            f"send[{name}]", Send("pipeline", 1), Stream.LINK, "send", segment, (wire,), (), link
        )

    def loss(self, point: str) -> Access:
        """Return where the head leaves its loss: at once in its place, or among those to be exchanged."""
        alone = self.plan.placement.world_size == 1
        return self.layout.loss(point) if alone else self.layout.own_loss(point)

    def exchange_losses(self) -> None:
        """Write how losses of a part of the batch, at some of the points, become those of all."""
        layout = self.layout
        packed, gathered = layout.packed_losses(), layout.gathered_losses()
        scalar, link = Work(num_kernels=1), Work(link_bytes=gathered.size_bytes - packed.size_bytes)
        own = tuple(layout.own_loss(point) for point in layout.own_points if layout.is_last_stage)
        losses = tuple(layout.loss(point) for point in self.plan.points)
        self._listing.emit(
            "losses/pack", Scalar("pack_losses"), Stream.COMPUTE, "scalar", HEAD, own, (packed,), scalar
        )
        self._listing.emit(
            "losses/all_gather",
            Collective("all_gather", "world"),
            Stream.LINK,
            "exchange",
            HEAD,
            (packed,),
            (gathered,),
            link,
        )
        self._listing.emit(
            "losses/mean", Scalar("mean_loss"), Stream.COMPUTE, "scalar", HEAD, (gathered,), losses, scalar
        )

    def projected_gradient(self, query: int) -> None:
        """Write how two losses become the projected gradient of `query`."""
        central = self.plan.estimator.difference == "central"
        losses = (f"q{query}+", f"q{query}-") if central else (f"q{query}+", "")
        self._listing.emit(
            f"projected_gradient[q{query}]",
            Scalar("projected_gradient", query),
            Stream.COMPUTE,
            "scalar",
            HEAD,
            tuple(self.layout.loss(point) for point in losses),
            (self.layout.gradient(query, 0),),
            Work(num_kernels=3),
        )
