"""Single kernels on a device, without what launches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from costmodel.estimate import device_s, estimate
from costmodel.param_passes import sampling_work
from costmodel.work import Attention, AttentionKernel, Matmul, Work
from zosim.applications.validation.codes import KERNEL_NAMES
from zosim.applications.validation.measured_machines import MeasuredMachine, bounded
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable


def kernel(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a kernel, on the first device of a machine.

    Parameters
    ----------
    row : MeasuredRow
        Of a kind that ``WORKS`` has.

    Raises
    ------
    RowsError
        If a cell that its kind needs is empty, or no number.
    Unpredictable
        If its format is none that computes, or heads are not shared evenly.
    """
    work, profile = WORKS[row["kind"]](row), measured_machine.burst_profile
    return bounded(lambda bound: device_s(estimate(work, profile, bound=bound), profile.device_type))


def _matmul(row: MeasuredRow) -> Work:
    m, n, k = (row.count(name) for name in "mnk")
    if row["dtype"].lower() == "int8":
        # Integers are a format of products alone: what they make is read as numbers that a device computes in.
        return Work(dtype="float16", matmuls=(Matmul(m=m, n=n, k=k, format="int8"),), num_kernels=1)
    return Work(dtype=row.dtype, matmuls=(Matmul(m=m, n=n, k=k),), num_kernels=1)


def _elementwise(row: MeasuredRow) -> Work:
    # Only bytes matter, so the format may be left out.
    dtype = row.dtype if row["dtype"] else "float32"
    return Work(dtype=dtype, elementwise_bytes=row.count("bytes"), num_kernels=1, num_shared_kernels=1)


def _attention(row: MeasuredRow) -> Work:
    heads = row.count("heads")
    shared = row.count_or("kv_heads", heads)
    if heads % shared:
        raise Unpredictable(f"kv_heads={shared} does not divide heads={heads}")
    code = row["code"].lower()
    reported = row.choice("attention_kernel", KERNEL_NAMES)
    is_stored = reported == "eager" or (reported is None and code == "math")
    op = Attention(
        num=row.count("batch") * heads,
        query=row.count("seq"),
        key=row.count("seq"),
        head_dim=row.count("head_dim"),
        materialised=is_stored,
        causal_skip=row.flag("causal") and not is_stored,
        kernel=next((kernel for kernel in get_args(AttentionKernel) if kernel == code), None),
        sharing=heads // shared,
    )
    return Work(dtype=row.dtype, attention=(op,), num_kernels=1)


def _attention_backward(row: MeasuredRow) -> Work:
    forward = _attention(row)
    if forward.attention[0].materialised:
        return forward.model_copy(update={"attention": forward.attention * 2})
    ops = tuple(op.model_copy(update={"backward": True}) for op in forward.attention)
    return forward.model_copy(update={"attention": ops})


def _draw(row: MeasuredRow) -> Work:
    return sampling_work(row.count("elements"), dtype=row.dtype)


WORKS: dict[str, Callable[[MeasuredRow], Work]] = {
    "matmul": _matmul,
    "elementwise": _elementwise,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "draw": _draw,
}
"""Work of a kernel by the kind of its row."""
