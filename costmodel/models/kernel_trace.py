"""A trace of a segment's kernels: counts of them, and the memory that is live between them.

A segment is recorded as the sequence of kernels that the model's code launches, with every temporary it
keeps and drops. Bytes, kernels, matrix products and the peak of what is alive at once all fall out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from costmodel.formats import FORMATS, DType
from costmodel.work import SHARED_ELEMENTS, Attention, Matmul, Work

_COUNTS = ("num_kernels", "num_shared_kernels", "elementwise_bytes", "num_exponentials")


@dataclass(frozen=True, eq=False)
class TracedBuffer:
    """A tensor of a trace; two of equal size are still two."""

    num_elements: int
    dtype: DType

    @property
    def size_bytes(self) -> int:
        """Bytes it occupies."""
        return self.num_elements * FORMATS[self.dtype].element_bytes


@dataclass
class KernelTrace:
    """Kernels recorded so far."""

    dtype: DType  # compute format of the matrix products
    adds_biases: bool = False  # by a kernel of its own behind each product
    # live_bytes, peak_bytes: what is alive now and the most that ever was.
    live_bytes: int = 0
    peak_bytes: int = 0
    num_kernels: int = 0
    num_shared_kernels: int = 0
    elementwise_bytes: int = 0
    num_exponentials: int = 0
    matmuls: list[Matmul] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    _live: set[TracedBuffer] = field(default_factory=set)

    def new(self, num_elements: int, dtype: DType | None = None) -> TracedBuffer:
        """Return a freshly allocated tensor."""
        buffer = TracedBuffer(num_elements, dtype or self.dtype)
        self._live.add(buffer)
        self.live_bytes += buffer.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def free(self, *buffers: TracedBuffer) -> None:
        """Drop tensors; one that was never allocated here (the caller's) or was dropped already stays as it is."""
        for buffer in buffers:
            if buffer in self._live:
                self._live.remove(buffer)
                self.live_bytes -= buffer.size_bytes

    def map(
        self,
        *inputs: TracedBuffer,
        num_elements: int | None = None,
        dtype: DType | None = None,
        drop: tuple[TracedBuffer, ...] = (),
        exponentials: int = 0,
    ) -> TracedBuffer:
        """Return the output of one element-wise kernel over `inputs`, sized and typed like the first of them.

        `drop` names inputs that nothing refers to once the kernel is done; `exponentials` says how many the kernel
        computes per element of its output.
        """
        size = inputs[0].num_elements if num_elements is None else num_elements
        output = self.new(size, dtype or inputs[0].dtype)
        self.elementwise_bytes += sum(buffer.size_bytes for buffer in inputs) + output.size_bytes
        self.num_kernels += 1
        largest = max(size, *(buffer.num_elements for buffer in inputs))
        self.num_shared_kernels += largest >= SHARED_ELEMENTS
        self.num_exponentials += exponentials * size
        self.free(*drop)
        return output

    def cast(self, buffer: TracedBuffer, dtype: DType, *, drop: bool = False) -> TracedBuffer:
        """Return `buffer` in another format: itself where it has that format already."""
        if FORMATS[buffer.dtype].element_bytes == FORMATS[dtype].element_bytes:
            return buffer
        return self.map(buffer, dtype=dtype, drop=(buffer,) if drop else ())

    def linear(self, rows: int, inputs: int, outputs: int) -> TracedBuffer:
        """Return the output of a matrix product with a weight; a bias rides along for free in most code."""
        self.matmuls.append(Matmul(m=rows, n=outputs, k=inputs, alive_bytes=self.live_bytes))
        self.num_kernels += 1
        output = self.new(rows * outputs)
        return self.map(output, drop=(output,)) if self.adds_biases else output

    def grouped(self, rows: int, inputs: int, outputs: int, num_groups: int) -> TracedBuffer:
        """Return the output of products in one kernel, rows shared out as evenly as they can be among so many weights."""
        few, rest = divmod(rows, num_groups)
        for m, num in ((few + 1, rest), (few, num_groups - rest)):
            if m and num:
                self.matmuls.append(Matmul(m=m, n=outputs, k=inputs, num=num, alive_bytes=self.live_bytes))
        self.num_kernels += 1
        return self.new(rows * outputs)

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count what is recorded meanwhile `times` times; it has no attention in it and leaves nothing alive."""
        before = {name: getattr(self, name) for name in _COUNTS}
        first = len(self.matmuls)
        yield
        for name, count in before.items():
            setattr(self, name, count + times * (getattr(self, name) - count))
        once = self.matmuls[first:]
        self.matmuls[first:] = [op.model_copy(update={"num": times * op.num}) for op in once]

    def work(self, *, output_bytes: int = 0) -> Work:
        """Return the work recorded; `output_bytes` of the peak are the segment's output, which its caller holds."""
        return Work(
            dtype=self.dtype,
            matmuls=tuple(self.matmuls),
            attention=tuple(self.attention),
            elementwise_bytes=self.elementwise_bytes,
            num_exponentials=self.num_exponentials,
            num_kernels=self.num_kernels,
            num_shared_kernels=self.num_shared_kernels,
            workspace_bytes=max(0, self.peak_bytes - output_bytes),
        )
