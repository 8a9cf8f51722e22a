"""Examples as padded batches, each a function of its number alone, so that a resumed run needs no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from executors.datasets.data import Dataset
from executors.datasets.prompts import Example
from executors.labels import IGNORED_LABEL
from topology.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples."""

    # input_ids, attention_mask, labels: LongTensor (batch, length): padded on the right; labels are -100 and the mask 0
    # where padded.
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens, without the padding."""
        return int(self.attention_mask.sum())


def check_batch(batch: Mapping[str, object], max_positions: int) -> None:
    """Raise for a batch, given to a session, that no model can be fed.

    - `batch`: ``input_ids`` and ``labels``, tensors of shape (sequences, tokens), and perhaps an ``attention_mask``.
    - `max_positions`: most tokens that the model takes.

    Raises DataError if a tensor is missing, is no tensor, has another shape than ``input_ids``, or is too long.
    """
    shape: torch.Size | None = None
    for name in ("input_ids", "labels", "attention_mask"):
        tensor = batch.get(name)
        if tensor is None and name == "attention_mask":
            continue
        if not isinstance(tensor, torch.Tensor):
            fault = "is missing" if tensor is None else f"is a {type(tensor).__name__}, not a tensor"
            raise DataError(f"the batch's {name} {fault}", hint=_BATCH_HINT)
        shape = tensor.shape if shape is None else shape
        if tensor.shape != shape or len(shape) != 2:
            raise DataError(
                f"{name} of shape {tuple(tensor.shape)} does not match input_ids of shape {tuple(shape)}",
                hint="both must be (sequences, tokens)",
            )
    if shape is not None and shape[1] > max_positions:
        raise DataError(
            f"the batch has {shape[1]} tokens per sequence, more than the {max_positions} positions of "
            "the model",
            hint="truncate the sequences",
        )


_BATCH_HINT = (
    "input_ids and labels are tensors; labels equal input_ids where asked for, and are -100 elsewhere"
)


def pad(examples: Sequence[Example], *, length: int | None = None, pad_token: int = 0) -> Batch:
    """Return examples as one batch, padded on the right.

    - `length`: columns; by default those of the longest example.
    - `pad_token`: token that padded positions hold. A causal model's other positions do not see it.

    Raises DataError if an example is longer than `length`.
    """
    longest = max(len(example) for example in examples)
    if length is not None and longest > length:
        raise DataError(f"an example of {longest} tokens does not fit into a batch of length {length}")
    shape = (len(examples), length or longest)
    input_ids = torch.full(shape, pad_token, dtype=torch.long)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, example in enumerate(examples):
        num = len(example)
        input_ids[row, :num] = torch.tensor(example.input_ids)
        labels[row, :num] = torch.tensor(example.labels)
        mask[row, :num] = 1
    return Batch(input_ids, mask, labels)


@dataclass(frozen=True)
class Batches:
    """Batches by number: batch ``k`` is a function of ``k`` alone.

    Raises DataError if `batch_size` or `seed` is out of range.
    """

    dataset: Dataset
    batch_size: int
    # Off: batch ``k`` is lines ``k·B`` to ``k·B + B - 1``, wrapping. On: the same over a fresh seeded permutation of the
    # lines in each epoch.
    shuffle: bool = False
    seed: int = 0  # of the permutations; torch's generators are neither used nor moved
    length: int | None = None  # pad every batch to this many tokens; None: to its longest example
    pad_token: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size} must be at least 1")
        if self.seed < 0:
            raise DataError(f"seed={self.seed} must be at least 0")

    def indices(self, k: int) -> tuple[int, ...]:
        """Return the lines of batch `k`, counted from 0."""
        positions = range(k * self.batch_size, (k + 1) * self.batch_size)
        return tuple(self._line(*divmod(position, len(self.dataset))) for position in positions)

    def batch(self, k: int) -> Batch:
        """Return batch `k`. Raises DataError if one of its lines cannot be used."""
        examples = self.dataset.examples(self.indices(k))
        return pad(examples, length=self.length, pad_token=self.pad_token)

    def num_tokens(self, k: int) -> int:
        """Return the tokens of batch `k`, without its padding."""
        return sum(map(len, self.dataset.examples(self.indices(k))))

    def _line(self, epoch: int, position: int) -> int:
        return int(_permutation(self.seed, epoch, len(self.dataset))[position]) if self.shuffle else position


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num)
