"""Memory of first-order training by recipe: one account, three peaks.

A step's peak is the largest of three:

- *loss*: weights, what blocks saved, and the logits with their gradients;
- *backward*: weights, what is still saved, one block computed again, and gradients so far;
- *update*: weights, all gradients, and the optimizer's temporaries.

Three counters tell different numbers of the same run. *Allocated* is what torch handed out. *Reserved* adds what its allocator
keeps for later. The *driver* adds the context and the libraries' workspaces. All are of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from costmodel.formats import FORMATS, DType
from costmodel.models.backward import kept_bytes
from costmodel.models.components import AttentionImpl
from costmodel.models.model_spec import BACK, EMBED, FRONT, HEAD, ModelSpec, ParamGroup
from costmodel.models.recipes import TrainingRecipe

Sharding = Literal["none", "fsdp", "zero-1", "zero-2", "zero-3"]
Checkpointing = Literal["none", "full", "full-offloaded"]
Peak = Literal["loss", "backward", "update"]

_WIDE, _NARROW = 4, 2
_DROPPED_BYTES = 3
"""Of an adapter's input behind dropout: 16 bits, and a mask of 8."""
_LIVE_PARAMETERS = 10**9
"""Gathered parameters that ZeRO's third stage keeps at a time by default (``stage3_max_live_parameters``)."""
_SUB_GROUP = 10**9
"""Parameters that it updates at a time (``sub_group_size``), with gradients in float32."""

CACHED, CACHED_UNLIKE, CACHED_SHARDED = 0.3, 1.0, 0.5
"""Share of the transients that torch's allocator keeps besides: of sequences as long as each other, of unlike lengths, and of
gathered weights. Fitted to published pairs of allocated and reserved memory."""
LIBRARY_BYTES = 10**9
"""What the driver tells beyond context and reserved memory: workspaces of libraries, code that is loaded late. Fitted likewise."""
_ZERO3_FRAGMENTED = 0.1
"""Share of a ZeRO-3 run's memory that is lost to fragments. Fitted to published runs."""


@dataclass(frozen=True)
class CodeQuirks:
    """What a training framework keeps beside the recipe."""

    # Float32 copies of the logits at the loss: log-probabilities, their gradient and the loss's own by autograd alone.
    num_loss_tensors: int = 3
    narrow_loss: bool = False  # whether the loss is computed in 16 bits
    # Whether an update first makes float32 copies of the gradients, behind a flat copy in 16 bits (DeepSpeed).
    widens_gradients: bool = False
    # Whether shards keep unsharded gradients while they accumulate, frozen weights' among them (FSDP's `no_sync`).
    whole_gradients: bool = False
    # Whether adapters of queries, keys and values are one, which drops out parts of its input (litgpt).
    fuses_adapters: bool = False
    fuses_norms: bool = False  # whether norms keep their input alone (compiled, or a kernel of their own)


@dataclass(frozen=True)
class TrainingRun:
    """One first-order step of a recipe, as one device does it."""

    model: ModelSpec  # the base, without adapters
    recipe: TrainingRecipe
    # batch, seq, accumulation: sequences of a micro-batch, tokens of each, and micro-batches before an update.
    batch: int
    seq: int
    accumulation: int = 1
    dtype: DType = "bfloat16"
    num_devices: int = 1
    sharding: Sharding = "none"
    num_adapter_parameters: int = 0
    # adapter_inputs, adapter_outputs: sums of the widths that a block's adapters read and write.
    adapter_inputs: int = 0
    adapter_outputs: int = 0
    adapter_dtype: DType = "float32"
    wide_norms: bool = False  # whether norms, embedding and head are float32, and so is what blocks hand on
    checkpointing: Checkpointing = "full"
    chunks_loss: bool = False  # whether logits of few tokens exist in float32 at a time
    unlike_lengths: bool = False  # whether sequences differ in length
    attention: AttentionImpl = "sdpa"
    quirks: CodeQuirks = CodeQuirks()

    # -- parameters --------------------------------------------------------------------------------------------

    @cached_property
    def _block_groups(self) -> tuple[ParamGroup, ...]:
        return tuple(
            group
            for group in self.model.param_groups
            if EMBED not in group.segments and HEAD not in group.segments
        )

    @cached_property
    def num_block_parameters(self) -> int:
        """Parameters of all blocks."""
        return sum(group.num_parameters for group in self._block_groups)

    @property
    def num_outer_parameters(self) -> int:
        """Parameters of embedding, final norm and head."""
        return self.model.num_parameters - self.num_block_parameters

    @property
    def num_largest_block(self) -> int:
        """Parameters of the largest block."""
        return max(group.num_parameters for group in self._block_groups)

    @property
    def num_trained(self) -> int:
        """Parameters whose weights change in a step, adapters left out."""
        counts = {
            "all": self.model.num_parameters,
            "block": self.num_largest_block,
            "adapters": 0,
            "adapters and embeddings": self.num_outer_parameters,
            "nothing": 0,
        }
        return counts[self.recipe.trained]

    @property
    def weight_shards(self) -> int:
        """Devices that share the weights out."""
        return self.num_devices if self.sharding in ("fsdp", "zero-3") else 1

    @property
    def _gradient_shards(self) -> int:
        return self.num_devices if self.sharding in ("fsdp", "zero-2", "zero-3") else 1

    @property
    def _state_shards(self) -> int:
        return self.num_devices if self.sharding != "none" else 1

    # -- what stays --------------------------------------------------------------------------------------------

    @property
    def _outer_bytes(self) -> int:
        return _WIDE if self.wide_norms and self.recipe.has_adapters else _NARROW

    @property
    def stored_weight_bytes(self) -> float:
        """Bytes of all weights, wherever they lie."""
        own = (
            self.num_block_parameters * self.recipe.weight_bits / 8
            + self.num_outer_parameters * self._outer_bytes
        )
        copies = self.num_trained * _NARROW if self.recipe.trained == "adapters and embeddings" else 0
        return own + copies + self.num_adapter_parameters * self._adapter_width

    @property
    def _adapter_width(self) -> int:
        return FORMATS[self.adapter_dtype].element_bytes

    @property
    def _gathered_bytes(self) -> float:
        """Bytes of weights that are whole for a while, on a device that keeps a share."""
        is_streamed = "weights" in self.recipe.on_host
        if self.weight_shards == 1 and not is_streamed:
            return 0
        block = self.num_largest_block * self.recipe.weight_bits / 8
        if self.sharding == "zero-3":
            return min(_NARROW * _LIVE_PARAMETERS, self.num_block_parameters * _NARROW) + block
        return 2 * block + self.num_outer_parameters * self._outer_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients of one device."""
        adapters = self.num_adapter_parameters * self._adapter_width
        if self.quirks.whole_gradients and self.sharding == "fsdp" and self.accumulation > 1:
            return self.model.num_parameters * _NARROW + adapters
        return (self.num_trained * self.recipe.gradient_bytes + adapters) / self._gradient_shards

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of master weights and optimizer state of one device."""
        state, adapters = self.recipe.state_bytes, 2 * self.num_adapter_parameters * self._adapter_width
        own = self.num_trained * (state + self.recipe.master_bytes)
        if rank := self.recipe.subspace_rank:
            matrices = [
                (rows, columns)
                for group in self._block_groups
                for rows, columns in (*group.linears, *group.frozen_linears)
            ]
            projected = sum(rank * max(shape) for shape in matrices)
            own = state * projected + _NARROW * sum(rank * min(shape) for shape in matrices)
            own += state * self.num_outer_parameters
        return (own + adapters) / self._state_shards

    @property
    def update_bytes(self) -> float:
        """Bytes of an update's temporaries on one device."""
        own = self.num_trained / self._state_shards
        if self.quirks.widens_gradients and self.recipe.master_bytes:
            whole = _WIDE if self.sharding == "zero-3" else _WIDE + _NARROW
            return min(own, _SUB_GROUP) * whole if self.sharding == "zero-3" else own * whole
        adapters = self.num_adapter_parameters * self._adapter_width / self._state_shards
        return own * self.recipe.update_bytes + adapters

    # -- what comes and goes -----------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.seq

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that the largest block's forward saves for its backward."""
        model, width = self.model, FORMATS[self.dtype].element_bytes
        block = next(
            group for group in self._block_groups if group.num_parameters == self.num_largest_block
        ).segments[0]
        names = {block.removesuffix(FRONT).removesuffix(BACK)} & set(model.segments) or {block}
        saved = sum(
            kept_bytes(
                model,
                name,
                batch=self.batch,
                seq=self.seq,
                dtype=self.dtype,
                attention=self.attention,
                dropout=False,
            )
            for name in names
        )
        inner, num_experts = self._inner_size
        if model.experts is not None:
            # Each expert of a token has a row of its own, of what goes in and of what comes out.
            saved += (
                self.tokens
                * width
                * (4 * (inner - model.intermediate_size) + 2 * num_experts * model.hidden_size)
            )
        if self.recipe.has_adapters:
            saved += self._frozen_bytes
        if model.norm == "rmsnorm" and not self.quirks.fuses_norms:
            # Python's keeps its input in float32, and what it makes of it where its own weights are trained.
            made = 0 if self.recipe.has_adapters else width
            saved += 2 * self.tokens * model.hidden_size * (_WIDE + made - width)
        elif self.wide_norms:
            saved += 2 * self.tokens * model.hidden_size * (_WIDE - width)
        return saved

    @property
    def _inner_size(self) -> tuple[int, int]:
        """The width within a token's MLP, and how many experts see it."""
        model = self.model
        if model.experts is None:
            return model.intermediate_size, 1
        num_experts = model.experts.num_per_token
        return num_experts * model.experts.intermediate_size + model.experts.shared_size, num_experts

    @property
    def _frozen_bytes(self) -> int:
        """Bytes that a block keeps more where its weights are frozen and adapters are trained; less below 0."""
        model, width = self.model, FORMATS[self.dtype].element_bytes
        hidden, (inner, _) = model.hidden_size, self._inner_size
        # What linears read; attention's output stays either way.
        inputs = (2 * hidden + inner) * width
        more = 0
        if not self.recipe.keeps_inputs:
            # A gradient of the input alone does not need it, but an adapter reads it, too.
            read = min(self.adapter_inputs * width, inputs)
            more -= inputs - (0 if self.quirks.fuses_adapters else read)
        elif self.wide_norms:
            # Each linear narrows its own copy, and widens what comes out.
            num_inner = 3 if model.mlp == "gated" else 1
            more += (2 + num_inner // 3) * hidden * width + num_inner * inner * (_WIDE - width)
        if self.quirks.fuses_adapters:
            # Queries, keys and values share one input behind one dropout, and stay whole as long as one of them.
            own = model.num_heads * model.head_dim + model.num_key_value_heads * model.head_dim
            dropped = min(self.adapter_inputs, hidden) + max(0, self.adapter_inputs - 3 * hidden)
            more += dropped * _DROPPED_BYTES + (own + self.adapter_outputs) * width
        return self.tokens * more

    @property
    def _stream_bytes(self) -> int:
        """Bytes of what a block hands to the next."""
        width = _WIDE if self.wide_norms else FORMATS[self.dtype].element_bytes
        return self.tokens * self.model.hidden_size * width

    @property
    def saved_bytes(self) -> int:
        """Bytes that all blocks save."""
        if self.checkpointing == "none":
            return self.model.num_blocks * self.block_bytes
        if self.checkpointing == "full-offloaded":
            return 2 * self._stream_bytes
        return self.model.num_blocks * self._stream_bytes

    @property
    def loss_bytes(self) -> int:
        """Bytes of logits, their gradients, and what the final norm saves."""
        normed = self.tokens * self.model.hidden_size * (_WIDE + _NARROW)
        logits = self.tokens * self.model.vocab_size
        if self.chunks_loss:
            return (
                normed + 2 * _NARROW * logits
            )  # the chunks' logits and log-probabilities stay for the backward
        copies = self.quirks.num_loss_tensors + (self.sharding == "fsdp")
        # Mixed precision narrows a frozen head in float32 for its product, and keeps that for the backward.
        head = (
            _NARROW * self.model.vocab_size * self.model.hidden_size
            if self.wide_norms and self.recipe.has_adapters
            else 0
        )
        return normed + copies * (_NARROW if self.quirks.narrow_loss else _WIDE) * logits + head

    @property
    def _backward_temporaries(self) -> int:
        inner, _ = self._inner_size
        return self.tokens * FORMATS[self.dtype].element_bytes * (2 * inner + 2 * self.model.hidden_size)

    # -- the account -------------------------------------------------------------------------------------------

    @cached_property
    def resting_bytes(self) -> float:
        """Bytes of one device that stay for the whole step: weights, master weights and state."""
        on_host, recipe = self.recipe.on_host, self.recipe
        weights = 0.0 if "weights" in on_host else self.stored_weight_bytes / self.weight_shards
        state = 0.0 if "state" in on_host or recipe.is_paged else self.state_bytes
        return weights + state

    @cached_property
    def peaks(self) -> dict[Peak, float]:
        """Allocated bytes of one device at each of the three."""
        is_on_host = "gradients" in self.recipe.on_host
        all_gradients = 0.0 if is_on_host or self.recipe.in_backward else self.gradient_bytes
        held = all_gradients if self.accumulation > 1 else 0.0
        one_gradient = 0.0
        if self.num_trained:
            largest = max(self.model.vocab_size * self.model.hidden_size, self.num_largest_block)
            one_gradient = _NARROW * min(largest, self.num_trained)
        base = self.resting_bytes + self._gathered_bytes
        if not self.recipe.has_backward:
            forward = base + self._stream_bytes
            sampled = _NARROW * max(group.largest_trainable_tensor for group in self.model.param_groups)
            return {
                "loss": forward + self.loss_bytes,
                "backward": forward + self._backward_temporaries,
                "update": base + sampled,
            }
        recomputed = 0 if self.checkpointing == "none" else self.block_bytes
        block = recomputed + self._backward_temporaries
        return {
            "loss": base + held + self.saved_bytes + self.loss_bytes,
            "backward": base + max(held + self.saved_bytes + one_gradient, all_gradients) + block,
            "update": base + all_gradients + (0.0 if is_on_host else self.update_bytes)
            if not self.recipe.in_backward
            else base + one_gradient,
        }

    @property
    def limiting_peak(self) -> Peak:
        """The largest of the three."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def allocated_bytes(self) -> float:
        """Most bytes of one device that torch's allocator hands out."""
        return max(self.peaks.values())

    @property
    def transient_bytes(self) -> float:
        """Most bytes of activations, logits and their gradients."""
        if not self.recipe.has_backward:
            return self.loss_bytes
        return max(self.loss_bytes + self.saved_bytes, self.saved_bytes + self.block_bytes)

    @property
    def reserved_bytes(self) -> float:
        """Most bytes of one device that torch's allocator takes from the driver, if there are enough."""
        share = CACHED_UNLIKE if self.unlike_lengths else CACHED_SHARDED if self.weight_shards > 1 else CACHED
        fragments = _ZERO3_FRAGMENTED * self.allocated_bytes if self.sharding == "zero-3" else 0.0
        return self.allocated_bytes + share * self.transient_bytes + fragments

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory that all devices' offloaded states take."""
        sizes = {
            "weights": self.stored_weight_bytes,
            "gradients": self.num_trained * self.recipe.gradient_bytes,
            "state": self.state_bytes * self._state_shards,
        }
        inputs = self.num_devices * self.model.num_blocks * self._stream_bytes
        return sum(sizes[name] for name in self.recipe.on_host) + (
            inputs if self.checkpointing == "full-offloaded" else 0
        )
