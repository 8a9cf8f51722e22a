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

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from costmodel.formats import StorageFormat
from costmodel.formats.stored_quantization import StoredQuantization
from costmodel.models.experts import Experts
from topology.errors import ModelError
from topology.limits import Blocks, Elements, ElementsOrNone, Extent
from topology.renamed import with_present_names

EMBED = "embed"
HEAD = "head"


FRONT = ".front"
BACK = ".back"

Quirk = Literal[
    "holds attention", "holds norm", "holds projections", "holds scores", "late biases", "late head norms", "narrow softmax",
    "shifted norm", "slopes in mask", "wide norm", "wide products", "wide rotation", "wide scores",
]  # fmt: skip
"""What models' code does with temporaries.

Names hold attention's output or input to the end of the block, queries and keys or scores before the mask while they are attended to.
Heads are normalised when all three projections are made; one is added to a norm's weight. In half precision, norms without
weights, rotations, or products of them, or scores are computed in float32; or the softmax is not. Biases are added by kernels of
their own; a mask holds ALiBi's slopes, so each head has its own.
"""

TrainableSubset = Literal["all", "matrices", "linears"]
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

    Raises ModelError if a block to be split does not exist.
    """
    unknown = [i for i in split_blocks if not 0 <= i < num_blocks]
    if unknown:
        message = f"block {unknown[0]} does not exist: blocks are numbered 0 to {num_blocks - 1}"
        raise ModelError(message)
    segments = [EMBED]
    for i in range(num_blocks):
        name = block_segment(i)
        segments += [name + FRONT, name + BACK] if i in split_blocks else [name]
    return (*segments, HEAD)


RENAMED: Mapping[str, str] = {
    "cut_blocks": "split_blocks",
    "groups": "param_groups",
    "habits": "quirks",
}
"""Fields and values of a model specification that were renamed (:mod:`topology.renamed`)."""


ElementsPerSequence = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
"""Numbers for a sequence, for each token of it, and for each pair of its tokens."""


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
        Numbers of outputs and inputs of each of its linear layers: of the tuned and of the frozen ones.
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


class Latents(BaseModel):
    """Multi-head latent attention: queries, keys and values go through narrow latents (DeepSeek-V2 and V3)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # query_rank, key_value_rank: widths of the latents; 0 where queries have none.
    query_rank: ElementsOrNone
    key_value_rank: Extent
    value_dim: Extent  # width of a head's values; those of queries and keys are the model's `head_dim`


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
        ``"learned"`` (a table added by the embed segment), ``"rotary"`` (applied to q and k in each block) or ``"alibi"`` (added to
        the scores).
    rotary_dim : int
        Numbers of a head that rotary positions turn; 0 for all of them.
    qk_norm : bool
        Whether each head of q and k is normalised (Qwen3).
    fused_qkv, fused_gate : bool
        Whether q, k and v come out of one matrix product (GPT-2), and both halves of a gated MLP (Phi-3).
    norm_placement : str
        Where a block's norms are: ``"before"`` attention and MLP, ``"after"`` them (OLMo 2) or ``"around"`` (Gemma 2).
    residual : str
        ``"serial"``, or ``"parallel"`` where attention and MLP read the same hidden state, each behind a norm of its own or behind
        one (``"parallel-one-norm"``, Phi).
    scaled_residual : bool
        Whether what is added to the hidden state is scaled first (Granite).
    attention_softcap : bool
        Whether scores go through a hyperbolic tangent (Gemma 2).
    logit_passes : int
        Element-wise kernels that logits go through before the loss: 1 scales them, 3 cap them.
    embedding_passes : int
        Element-wise kernels that embedded tokens go through before the first block: a norm (BLOOM), a scaling (Gemma).
    stores_scores : str
        Where ``sdpa`` stores scores, too, because torch's fused attention does not fit its heads: ``"never"``, on a ``"cpu"`` or
        ``"always"``.
    has_sinks : bool
        Whether each head has a score of its own that takes attention from all tokens (gpt-oss).
    quirks : tuple of str
        What its code does besides that takes memory; :data:`Quirk` lists them.
    buffer_bytes : int
        Bytes that its modules keep besides parameters.
    windows : tuple of int
        Number of tokens that each block's attention sees, 0 for all of them; empty where all blocks see all.
    latent : Latents or None
        Where attention goes through latents.
    experts : Experts or None
        Where blocks are mixtures of experts; ``intermediate_size`` is then that of the blocks that are none.
    final_norm : bool
        Whether the head segment begins with a norm (OPT-350M has none).
    is_causal : bool
        Whether tokens see those before them alone and predict the next. Else they see all, labels are words at masks, and
        the head transforms before it projects (RoBERTa).
    adapter_rank : int
        Rank of the LoRA adapters, closed increments among them, 0 where there are none.
    adapter_shapes : tuple of (int, int)
        Numbers of inputs and outputs of each linear of one block that carries an adapter.
    adapter_lazy_steps : int
        Number of steps after which what adapters have learnt is closed as an increment, and compacted with the others; 0 where it never is.
    num_prefix_tokens : int
        Virtual tokens that each block's attention sees before the real ones, 0 where there are none.
    split_blocks : tuple of int
        Index of each block that is two segments, in ascending order.
    param_groups : tuple of ParamGroup
        In registration order.
    stored : StoredQuantization or None
        How its files keep the weights of linear layers, where another tool has quantized them.
    splits_inside : bool
        Whether its blocks can be split inside: an MLP of two linears, the second of which is added to the residual stream as it is.
    text_of : str
        ``model_type`` of the multimodal model that it is the text model of; empty where it is a model of its own.
    checkpoint_dtype : str or None
        Format of the weights in its files, where its configuration states one.
    boundary_elements : tuple of (int, int, int)
        What each segment but the head hands on, where that is more than one hidden state: numbers for each sequence, for each
        token, and for each pair of tokens. Empty where it is the hidden state alone.
    live_elements : tuple of tuple of (int, int, int)
        For each segment, numbers that are alive at each of the moments that can be its peak; for a segment without any, and where
        it is empty, they are counted kernel by kernel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=255)  # as that of a file
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
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    rotary_dim: ElementsOrNone = 0
    qk_norm: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    norm_placement: Literal["before", "after", "around"] = "before"
    residual: Literal["serial", "parallel", "parallel-one-norm"] = "serial"
    scaled_residual: bool = False
    attention_softcap: bool = False
    logit_passes: NonNegativeInt = 0
    embedding_passes: NonNegativeInt = 0
    stores_scores: Literal["never", "cpu", "always"] = "never"
    has_sinks: bool = False
    quirks: tuple[Quirk, ...] = ()
    buffer_bytes: ElementsOrNone = 0
    windows: tuple[ElementsOrNone, ...] = ()
    latent: Latents | None = None
    experts: Experts | None = None
    final_norm: bool = True
    is_causal: bool = True
    adapter_rank: ElementsOrNone = 0
    adapter_shapes: tuple[tuple[Extent, Extent], ...] = ()
    adapter_lazy_steps: ElementsOrNone = 0
    num_prefix_tokens: ElementsOrNone = 0
    split_blocks: tuple[NonNegativeInt, ...] = ()
    param_groups: tuple[ParamGroup, ...]
    stored: StoredQuantization | None = None
    splits_inside: bool = True
    text_of: str = ""
    checkpoint_dtype: StorageFormat | None = None
    boundary_elements: tuple[ElementsPerSequence, ...] = ()
    live_elements: tuple[tuple[ElementsPerSequence, ...], ...] = ()

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
        if len(self.windows) not in (0, self.num_blocks):
            message = (
                f"model {self.name}: it has {self.num_blocks} blocks, but windows for {len(self.windows)}"
            )
            raise ModelError(message)
        if self.experts is not None and len(self.experts.shares) not in (0, 1, self.num_blocks):
            message = f"model {self.name}: shares of experts are given for {len(self.experts.shares)} blocks, and it has {self.num_blocks}"
            raise ModelError(message, hint="give a row for each block, or one for all")
        if len(self.boundary_elements) not in (0, len(self.segments) - 1):
            message = f"model {self.name}: boundary_elements has {len(self.boundary_elements)} entries for {len(self.segments)} segments"
            raise ModelError(message, hint="give one for each segment but the head, or none")
        if len(self.live_elements) not in (0, len(self.segments)):
            message = f"model {self.name}: live_elements has {len(self.live_elements)} entries for {len(self.segments)} segments"
            raise ModelError(message, hint="give one for each segment, or none")
        return self

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    def has_experts(self, block: int) -> bool:
        """Whether a block is a mixture of experts.

        Parameters
        ----------
        block : int
            Index of the block, from 0.
        """
        return self.experts is not None and block not in self.experts.dense_blocks

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
        name = f"{self.name} (its text model)" if self.text_of else self.name
        if self.adapter_rank:
            return f"{name} with adapters of rank {self.adapter_rank}"
        if self.num_prefix_tokens:
            return f"{name} with a prefix of {self.num_prefix_tokens} tokens"
        share = self.num_trainable / self.num_parameters
        return name if share == 1 else f"{name}, {share:.3g} of whose parameters are tuned"

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

    def param_group(self, name: str) -> ParamGroup:
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
