"""How weights come back from a query's last point: by one more perturbation, or from a copy that was kept."""

from __future__ import annotations

from collections.abc import Iterable

from costmodel.model_spec import ParameterGroup
from costmodel.sweeps import cast_work
from zosim.instructions import Access, Stream
from zosim.lowering.listing import Listing
from zosim.operations import Cast


class CleanCopies:
    """Writes the copies that weights are restored from, if the plan restores them so.

    Parameters
    ----------
    listing : Listing
    """

    def __init__(self, listing: Listing) -> None:
        self.layout = listing.layout
        self._listing = listing
        self._dtype = listing.plan.precision.storage
        self.restore = listing.plan.runtime.restore == "copy"

    def keep(self, groups: Iterable[ParameterGroup], segment: str) -> None:
        """Write copies of `groups` as `segment` finds them."""
        for group in groups if self.restore else ():
            self._copy(
                group,
                segment,
                "keep",
                f"{group.name}/keep",
                self._place(group, segment),
                self._kept(group, segment),
            )

    def bring_back(self, groups: Iterable[ParameterGroup], segment: str, query: int) -> None:
        """Write the return of `groups` to what they were before `query`."""
        for group in groups:
            name = f"{group.name}/restore[q{query}]"
            self._copy(
                group, segment, "restore", name, self._kept(group, segment), self._place(group, segment)
            )

    def leaves_changed(self, group: ParameterGroup) -> bool:
        """Whether a visit of a step leaves `group` in other bits than it came in."""
        return self.layout.is_delayed(group) or not self.restore

    def _place(self, group: ParameterGroup, segment: str) -> Access:
        return self.layout.trainable(group, self.layout.place(group, segment), 0)

    def _kept(self, group: ParameterGroup, segment: str) -> Access:
        return self.layout.clean(group, segment)

    def _copy(
        self, group: ParameterGroup, segment: str, label: str, name: str, read: Access, left: Access
    ) -> None:
        work = cast_work(
            group.num_trainable,
            source=self._dtype,
            target=self._dtype,
            num_tensors=group.num_trainable_tensors,
        )
        self._listing.emit(name, Cast(), Stream.COMPUTE, label, segment, (read,), (left,), work)
