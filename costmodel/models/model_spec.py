"""What is tuned: a language model as counts, without a weight in sight.

A model is split into *segments* that run one after the other: ``embed``, ``block.0`` ... ``block.{n-1}``,
``head`` (final norm, output projection, loss). A block that is split inside, at the input of the MLP's second linear,
is two segments, ``block.i.front`` and ``block.i.back``; what passes between them is that input and the residual
stream. Parameters form *groups*, listed in the order in which the
model registers them, because that is the order in which the reference MeZO loop draws their perturbations. Most
groups belong to one segment; a tied token table belongs to two.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from costmodel.formats import StorageFormat
from costmodel.formats.stored_quantization import StoredQuantization
from topology.errors import ModelError
from topology.limits import Blocks, Elements, ElementsOrNone, Extent
from topology.renamed import with_present_names

EMBED = "embed"
HEAD = "head"


FRONT = ".front"
BACK = ".back"

Part = Literal["all", "matrices", "linears"]
"""What is tuned of a model's own parameters."""


def block_segment(index: int) -> str:
    """Name of the segment that is block `index` (from 0)."""
    return f"block.{index}"


def block_index(segment: str) -> int:
    """Number of the block that `segment` is, or is a part of."""
    return int(segment.split(".")[1])


@cache
def segments_of(num_blocks: int, split_blocks: tuple[int, ...] = ()) -> tuple[str, ...]:
    """Return the segments of a model in execution order.

    Raises
    ------
    ModelError
        If a block to be split does not exist.
    """
    unknown = [i for i in split_blocks if not 0 <= i < num_blocks]
    if unknown:
        message = f"there is no block {unknown[0]} to split: blocks run from 0 to {num_blocks - 1}"
        raise ModelError(message)
    segments = [EMBED]
    for i in range(num_blocks):
        name = block_segment(i)
        segments += [name + FRONT, name + BACK] if i in split_blocks else [name]
    return (*segments, HEAD)


RENAMED: Mapping[str, str] = {
    "cut_blocks": "split_blocks",
    "groups": "param_groups",
}
"""Fields and values of a model specification that were renamed (:mod:`topology.renamed`)."""


class ParamGroup(BaseModel):
    """Parameters that are neighbours in registration order and are used by the same segments.

    Attributes
    ----------
    name : str
        Unique in the model; a block's group is named like its segment.
    segments : tuple of str
        Segments that read it, in execution order. Two for a tied token table.
    num_parameters : int
        Elements stored, a tied tensor once.
    num_trainable : int
        Elements that are perturbed and updated.
    num_tensors, num_trainable_tensors : int
    largest_trainable_tensor : int
        Elements of the largest trainable tensor.
    linears, frozen_linears : tuple of (int, int)
        Outputs and inputs of every linear layer of a block whose weight is in it, by whether that is tuned.
    trainable_matrices : tuple of (int, int)
        Rows and columns of those trainable tensors that have two dimensions. Empty in files of earlier versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    segments: tuple[str, ...]
    num_parameters: Elements
    num_trainable: ElementsOrNone
    num_tensors: Extent
    num_trainable_tensors: ElementsOrNone
    largest_trainable_tensor: ElementsOrNone
    linears: tuple[tuple[Extent, Extent], ...] = ()
    frozen_linears: tuple[tuple[Extent, Extent], ...] = ()
    trainable_matrices: tuple[tuple[Extent, Extent], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        # They listed the matrices outside the blocks, too, which could be quantized.
        removed = ("outer_matrices", "frozen_outer_matrices")
        if not isinstance(data, dict) or not any(name in data for name in removed):
            return data
        return {name: value for name, value in data.items() if name not in removed}

    @property
    def num_outside_matrices(self) -> int:
        """Trainable elements of tensors that are no matrices."""
        return self.num_trainable - sum(rows * columns for rows, columns in self.trainable_matrices)

    @property
    def is_tied(self) -> bool:
        """Whether two segments read it."""
        return len(self.segments) > 1


class ModelSpec(BaseModel):
    """A language model that is one ordered list of blocks, a causal decoder or a masked encoder.

    Attributes
    ----------
    name, family : str
        ``family`` is the transformers ``model_type``.
    num_blocks, hidden_size, intermediate_size, num_heads, num_key_value_heads, head_dim, vocab_size : int
    max_positions : int
        Longest sequence that the model accepts.
    mlp : str
        ``"plain"`` (two linears) or ``"gated"`` (three).
    norm : str
        ``"layernorm"`` or ``"rmsnorm"``.
    embed_dim : int
        Width of the token table; differs from `hidden_size` where the model projects in and out (OPT-350M).
    tied_head : bool
        Whether the output projection is the token table.
    activation : str
        Name of the MLP's activation as transformers spells it; some are one kernel, ``gelu_new`` is eight.
    positions : str
        ``"learned"`` (a table added by the embed segment) or ``"rotary"`` (applied to q and k in each block).
    qk_norm : bool
        Whether each head of q and k is normalised (Qwen3).
    fused_qkv : bool
        Whether q, k and v come out of one matrix product (GPT-2).
    final_norm : bool
        Whether the head segment begins with a norm (OPT-350M has none).
    is_causal : bool
        Whether tokens see those before them alone and predict the next. Else they see all, labels are words at masks, and
        the head transforms before it projects (RoBERTa).
    adapter_rank : int
        Rank of the LoRA adapters, closed increments among them, 0 where there are none.
    adapter_shapes : tuple of (int, int)
        Inputs and outputs of each linear of one block that carries an adapter.
    adapter_lazy_steps : int
        Steps after which what adapters have learnt is closed as an increment, and compacted with the others; 0 where it never is.
    num_prefix_tokens : int
        Virtual tokens that each block's attention sees before the real ones, 0 where there are none.
    split_blocks : tuple of int
        Blocks that are two segments, in ascending order.
    param_groups : tuple of ParamGroup
        In registration order.
    stored : StoredQuantization or None
        How its files keep the weights of linear layers, where another tool has quantised them.
    checkpoint_dtype : str or None
        Format of the weights in its files, where its configuration states one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str
    num_blocks: Blocks
    hidden_size: Extent
    intermediate_size: Extent
    num_heads: Extent
    num_key_value_heads: Extent
    head_dim: Extent
    vocab_size: Extent
    max_positions: Extent
    mlp: Literal["plain", "gated"]
    norm: Literal["layernorm", "rmsnorm"]
    embed_dim: Extent
    tied_head: bool
    activation: str = "relu"
    positions: Literal["learned", "rotary"] = "learned"
    qk_norm: bool = False
    fused_qkv: bool = False
    final_norm: bool = True
    is_causal: bool = True
    adapter_rank: ElementsOrNone = 0
    adapter_shapes: tuple[tuple[Extent, Extent], ...] = ()
    adapter_lazy_steps: ElementsOrNone = 0
    num_prefix_tokens: ElementsOrNone = 0
    split_blocks: tuple[NonNegativeInt, ...] = ()
    param_groups: tuple[ParamGroup, ...]
    stored: StoredQuantization | None = None
    checkpoint_dtype: StorageFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        return with_present_names(data, RENAMED)

    @model_validator(mode="after")
    def _groups_cover_segments(self) -> ModelSpec:
        names = [group.name for group in self.param_groups]
        if len(set(names)) != len(names):
            message = f"model {self.name}: parameter groups must have distinct names, got {names}"
            raise ModelError(message)
        used = {segment for group in self.param_groups for segment in group.segments}
        unknown = used - set(self.segments)
        if unknown:
            message = f"model {self.name}: groups name segments that do not exist: {sorted(unknown)}"
            raise ModelError(message)
        return self

    @property
    def segments(self) -> tuple[str, ...]:
        """Segment names in execution order."""
        return segments_of(self.num_blocks, self.split_blocks)

    @property
    def num_parameters(self) -> int:
        """Stored elements, a tied tensor counted once."""
        return sum(group.num_parameters for group in self.param_groups)

    @property
    def num_trainable(self) -> int:
        """Elements that are perturbed and updated."""
        return sum(group.num_trainable for group in self.param_groups)

    def describe(self) -> str:
        """Return the model's name, and what is tuned of it where that is not all."""
        if self.adapter_rank:
            return f"{self.name} beside adapters of rank {self.adapter_rank}"
        if self.num_prefix_tokens:
            return f"{self.name} behind a prefix of {self.num_prefix_tokens} tokens"
        share = self.num_trainable / self.num_parameters
        return self.name if share == 1 else f"{self.name}, {share:.3g} of whose parameters are tuned"

    @property
    def tunes_left_factors(self) -> bool:
        """Whether all that is tuned are the left factors B of adapters, whose right factors stay as they are in a step."""
        tuned = [rows for group in self.param_groups for rows, _ in group.trainable_matrices]
        matrices_alone = sum(group.num_trainable_tensors for group in self.param_groups) == len(tuned)
        return matrices_alone and tuned == self.num_blocks * [outputs for _, outputs in self.adapter_shapes]

    @cached_property
    def _by_name(self) -> dict[str, ParamGroup]:
        return {group.name: group for group in self.param_groups}

    @cached_property
    def _by_segment(self) -> dict[str, tuple[ParamGroup, ...]]:
        by_segment: dict[str, list[ParamGroup]] = {}
        for group in self.param_groups:
            for segment in group.segments:
                by_segment.setdefault(segment, []).append(group)
        return {segment: tuple(param_groups) for segment, param_groups in by_segment.items()}

    def group(self, name: str) -> ParamGroup:
        """Return the group called `name`.

        Raises
        ------
        ModelError
            If there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            message = f"model {self.name} has no parameter group {name!r}"
            raise ModelError(
                message,
                hint="groups are " + ", ".join(self._by_name),
            ) from None

    def param_groups_of(self, segment: str) -> tuple[ParamGroup, ...]:
        """Return the groups that `segment` reads, in registration order."""
        return self._by_segment.get(segment, ())
