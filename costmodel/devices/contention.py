"""What a copy takes from the kernels that run beside it on a CPU, from measurements of the two together."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.rates.measurement import Measurement
from costmodel.rates.profile import Profile

BESIDE = " beside a "
_NOTICED = 0.05
_LEAST, _MOST = 0.1, 2.0


def with_copy_cores(profile: Profile, measurements: Sequence[Measurement]) -> tuple[Profile, str]:
    """Return a CPU's profile with the cores that a copy takes, and why it is not known, or nothing if it is.

    Notes
    -----
    While a copy runs, a product that wants all ``n`` cores loses a part ``L = 1 - alone / beside`` of its speed, for
    ``r`` times as long as the copy takes alone. Where threads share cores evenly, a copy that takes ``c`` of them makes
    both slower by ``(n + c) / n``, and the product loses ``c / n`` of the copy's time: ``c = n L r``.
    """
    alone = {m.name: m.seconds for m in measurements if not m.contended}
    slowed = {m.work.copy_bytes > 0: m for m in measurements if m.contended}
    if profile.device_kind != "cpu" or set(slowed) != {False, True}:
        return profile, "no copy was measured beside a product"
    if profile.num_threads < profile.num_cores:
        return profile, "with a core to spare, a copy takes nothing from kernels"
    product, copy = (
        slowed[is_copy].seconds / alone[_apart(slowed[is_copy].name)] for is_copy in (False, True)
    )
    lost = 1 - 1 / product
    if lost < _NOTICED:
        return profile, "the product did not lose speed to the copy"
    cores = min(_MOST, max(_LEAST, profile.num_cores * lost * copy))
    constant = profile.constant("copy_cores").model_copy(
        update={
            "value": cores,
            "low": cores / 1.5,
            "high": cores * 1.5,
            "source": "a product and a copy, each beside the other",
        }
    )
    return profile.with_constants(constant, origin=profile.origin), ""


def _apart(name: str) -> str:
    return name.partition(BESIDE)[0]
