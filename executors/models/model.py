"""A language model split into segments that run one at a time, by the model's own code.

The list of blocks is replaced by stand-ins while the model's forward runs. For ``embed`` they record what each
block is called with and stop the forward after the last; for ``head`` they hand on the state that the
blocks left. Masks, positions, projections, logits and the loss are therefore the model's own, bit for bit.

A model is tried on a few tokens first. Of one that does more around its blocks, the forward is suspended at each of
them (:class:`SuspendedModel`); one that defies this, too, is a single segment (:class:`UnsplitModel`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from costmodel.models.groups import ParameterEntry, group_parameters, split_blocks_inside
from costmodel.models.model_spec import (
    BACK,
    EMBED,
    FRONT,
    HEAD,
    ElementsPerSequence,
    ParamGroup,
    block_index,
    block_segment,
    segments_of,
)
from executors.labels import IGNORED_LABEL
from executors.low_bits.stored import DenseTensor
from executors.models.blocks import UnsplitError, fills_masks, linears_of, refuse_unsupported
from executors.models.boundaries import ForwardCalls, PassedTensors, watched
from executors.models.halves import Halfway, HalvedBlock, as_tensor, normalises_last
from executors.models.host_mirrors import host_mirrors
from executors.models.parameters import NamedTensor, absent, are_same, named_tensors
from executors.models.recording_blocks import (
    BlockStandIns,
    Call,
    Calls,
    RecordedBlocks,
    StepCache,
    argument,
    arguments,
    with_arguments,
)
from executors.models.suspended import SuspendedForward
from executors.models.workspaces import LENGTHS, LONGER, elements_per_sequence, is_padded, peaks_of_segments
from topology.errors import CodecError, ModelError

Batch = Mapping[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``labels``, each of shape (sequences, tokens)."""

Handed = Tensor | Halfway | SuspendedForward | Batch
"""What one segment hands to the next: the hidden state, two tensors within a block, a forward to go on with, or the batch."""

Objective = Callable[[Tensor, Batch], Tensor]
"""Takes logits (sequences, tokens, vocabulary) and the batch, and returns the scalar to minimise."""


@dataclass(frozen=True)
class TextObjective:
    """An objective of generated text, which takes further forwards at the same weights."""

    # Takes the model, and logits and batch as an objective does; returns a finite number.
    cost: Callable[[nn.Module, Tensor, Batch], float]


LossDType = Literal["model", "fp64"]


def _concerns_a_user(record: logging.LogRecord) -> bool:
    """Whether a warning of transformers is about more than how segments run: one token for the head, and the default loss."""
    message = record.getMessage()
    return not message.startswith(
        ("We strongly recommend passing in an `attention_mask`", "`loss_type=None` was set")
    )


class SegmentedModel:
    """A model that runs segment by segment.

    - `model`: a transformers language model, causal or masked, that is one ordered list of blocks.
    - `loss_dtype`: ``"model"`` for the model's own loss, ``"fp64"`` for the same loss over logits widened to float64.
    - `loss_chunk_tokens`: tokens whose logits are alive at once. The loss is then summed over chunks, which rounds differently.
    - `autocast_dtype`: format of matrix products, where it differs from that of the weights.
    - `objective`: takes the place of the loss; it need not be differentiable.
    - `split_blocks`: blocks that are two segments, split at the input of the MLP's second linear.

    Raises ModelError if the model cannot be split; the message says why.

    Attributes
    ----------
    is_causal : bool
        Whether tokens predict the next; else masks are filled in.
    device : torch.device
        Where segments run; at first, where the model is.
    hidden_size, inner_size : int
        Widths of the hidden state, and of what goes into the second linear of a block that is split (0 without one).

    Notes
    -----
    The model is put in evaluation mode. It stays whole: between calls its own forward works as before.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_dtype: LossDType = "model",
        loss_chunk_tokens: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        objective: Objective | TextObjective | None = None,
        split_blocks: tuple[int, ...] = (),
    ) -> None:
        self.model = model.eval()
        logging.getLogger("transformers.modeling_utils").addFilter(_concerns_a_user)
        self.objective = objective
        self.loss_dtype = loss_dtype
        self.loss_chunk_tokens = loss_chunk_tokens
        self.autocast_dtype = autocast_dtype
        refuse_unsupported(model)
        self.is_causal = not fills_masks(model)
        self._head_needs_shape = False
        self.split_blocks = tuple(sorted(set(split_blocks)))
        self.hidden_size = self.inner_size = 0  # until it is tried
        self.tensors = named_tensors(model)
        self.device = self.tensors[0].values.device
        self.embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        if not isinstance(self.embedding, nn.Embedding):
            raise ModelError(f"the model's token embedding is a {type(self.embedding).__name__}, not a table")
        # Nothing is absent yet: a few forwards are watched to learn what the front reads.
        self._front: list[NamedTensor] = []
        self._segments_of = self._try()
        self.param_groups = self._group()

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, segment: str, batch: Batch, cache: StepCache, handed: Handed | None) -> Handed:
        """Return the output of `segment`, given a batch and the output of the segment before; of the head, the loss."""
        if segment == EMBED:
            return self.embed(batch, cache)
        if segment == HEAD:
            assert handed is not None
            return self.head(handed, batch)
        assert handed is not None
        if not cache.calls and isinstance(handed, Tensor | Halfway):  # another stage embeds
            self.embed(batch, cache)
        return self.between(segment, handed, cache)

    def embed(self, batch: Batch, cache: StepCache) -> Handed:
        """Return the first block's input, and fill `cache` with what the blocks are called with.

        `cache`: filled at the first call of a step; both signs share it, since masks and positions do not depend on the weights.

        Returns
        -------
        torch.Tensor
            Hidden state of shape (sequences, tokens, hidden).
        """
        calls: Calls = []
        with self._stand_ins.recording(calls):
            self._run_front(batch, cache)
        if not cache.calls:
            cache.calls = [with_arguments(call, [(self._stand_ins.key, None)]) for call in calls]
        return self._stand_ins.state(calls[0])

    def _run_front(self, batch: Batch, cache: StepCache) -> Any:
        with self.format(), host_mirrors(self.device, batch, cache.host):
            return self.model(
                input_ids=batch["input_ids"],
                attention_mask=batch.get("attention_mask"),
                use_cache=False,
                **({"position_ids": batch["position_ids"]} if "position_ids" in batch else {}),
            )

    def block(self, index: int, handed: Handed, cache: StepCache, **more: Any) -> Handed:
        """Return what block `index` hands on; further arguments reach the block."""
        args, kwargs = self.call(index, handed, cache)
        with self.format():
            return self._stand_ins.returned(self.blocks[index](*args, **kwargs, **more))

    def call(self, index: int, handed: Handed, cache: StepCache) -> Call:
        """Return what block `index` is called with."""
        return with_arguments(cache.calls[index], [(self._stand_ins.key, handed)])

    def between(self, segment: str, handed: Handed, cache: StepCache) -> Handed:
        """Return the output of `segment`, a block or half of one, given the output of the segment before."""
        index = block_index(segment)
        if segment.endswith(BACK):
            assert isinstance(handed, Halfway)
            with self.format():
                return self._halves[index].back(handed)
        if not segment.endswith(FRONT):
            return self.block(index, handed, cache)
        with self.format():
            return self._halves[index].front(as_tensor(handed).shape[:-1], self.call(index, handed, cache))

    def head(self, hidden: Handed, batch: Batch) -> Tensor:
        """Return the loss of the batch, given what the last block left.

        Returns
        -------
        torch.Tensor
            Scalar: the mean over labels that are not -100, or what the objective makes of the logits.
        """
        if isinstance(self.objective, TextObjective):
            logits = self.logits(hidden)
            with self.format():
                cost = self.objective.cost(self.model, logits, batch)
            return torch.tensor(cost, dtype=torch.float64, device=self.device)
        if self.objective is not None:
            return self.objective(self.logits(hidden), batch)
        labels = batch["labels"]
        if self.loss_chunk_tokens is None and self.loss_dtype == "model":
            return self._run_head(hidden, labels=labels).loss  # type: ignore[no-any-return]
        return self._summed_loss(hidden, labels)

    def loss_format(self) -> torch.dtype:
        """Return the format that :meth:`head` returns losses in; only while all weights are here."""
        if isinstance(self.objective, TextObjective):
            return torch.float64
        batch = self._few_tokens()
        with torch.no_grad():
            return self.head(self._behind_blocks(batch), batch).dtype

    def _behind_blocks(self, batch: Batch) -> Handed:
        """Return what the last block hands on, or what has its form."""
        return self.embed(batch, StepCache())

    def boundary_elements(self) -> tuple[ElementsPerSequence, ...]:
        """Return what each segment hands on, as :class:`~costmodel.models.model_spec.ModelSpec` has it."""
        return ()

    def live_elements(self) -> tuple[tuple[ElementsPerSequence, ...], ...]:
        """Return what is alive in each segment, as :class:`~costmodel.models.model_spec.ModelSpec` has it, by forwards of several lengths."""
        width = self.tensors[0].values.element_size()
        known = [*self.model.parameters(), *self.model.buffers()]
        is_suspended = isinstance(self, SuspendedModel)
        blocks = [] if isinstance(self, UnsplitModel) and not is_suspended else self.blocks

        def run(num_sequences: int, num_tokens: int) -> None:
            self.model(**batches[num_sequences, num_tokens], use_cache=False)

        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[operator, union-attr]
        for lengths in (LENGTHS, *(own for own in LONGER if own[-1] <= (most or own[-1]))):
            batches = {(size, num): self._few_tokens(size, num) for size in (1, 2) for num in lengths}
            known += [tensor for batch in batches.values() for tensor in batch.values()]
            with torch.no_grad(), self.format():
                peaks = peaks_of_segments(blocks, run, known, lengths, is_suspended=is_suspended)
            if not is_padded(peaks):
                break
        return tuple(
            tuple(
                (-(-once // width), -(-tokens // width), -(-pairs // width))
                for once, tokens, pairs in moments
            )
            for moments in peaks
        )

    def _few_tokens(self, num_sequences: int = 2, num_tokens: int = 3) -> dict[str, Tensor]:
        """Return a batch of a few sequences, the last of which is a token shorter."""
        shape, numbers = (
            (num_sequences, num_tokens),
            torch.arange(num_sequences * num_tokens, device=self.device),
        )
        tokens = (numbers % self.embedding.num_embeddings).view(shape)
        mask = (numbers < num_sequences * num_tokens - 1).long().view(shape)
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, IGNORED_LABEL),
        }

    def logits(self, hidden: Handed) -> Tensor:
        """Return the logits of every position for the label of the next, given what the last block left.

        What a masked model says of a position itself stands one position earlier, so that objectives and evaluations
        read labels behind logits for all models; no position predicts the first label.
        """
        logits = self._logits(hidden)
        return logits if self.is_causal else logits.roll(-1, dims=1)

    def _logits(self, hidden: Handed) -> Tensor:
        """Return the head's logits at each position, not shifted."""
        if not self._head_needs_shape:
            return self._run_head(hidden).logits  # type: ignore[no-any-return]
        # A row of many sequences may be longer than any that the model has positions for.
        state = as_tensor(hidden)
        logits: Tensor = self._run_head(state.reshape(-1, 1, state.shape[-1])).logits
        return logits.view(*state.shape[:2], -1)

    def _run_head(self, hidden: Handed, **inputs: Any) -> Any:
        # Nothing of what the front of the forward makes is used: the stand-ins replace it. One token will do,
        # except for models that shape their output after their input. No program says that a head reads the front's weights,
        # which another stream may be changing, so it does not.
        state = as_tensor(hidden)
        shape = state.shape[:2] if self._head_needs_shape else (1, 1)
        with (
            self._stand_ins.returning(state),
            self.format(),
            host_mirrors(self.device),
            absent(self._front, state.device),
        ):
            tokens = torch.zeros((1, 1), dtype=torch.long, device=state.device).expand(shape)
            return self.model(input_ids=tokens, use_cache=False, **inputs)

    def _summed_loss(self, hidden: Handed, labels: Tensor) -> Tensor:
        dtype = torch.float64 if self.loss_dtype == "fp64" else torch.float32
        if self.is_causal:
            # Each label moves to the token that predicts it.
            labels = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
        targets = labels.reshape(-1)
        total = torch.zeros((), dtype=dtype, device=labels.device)
        begin = 0
        for logits in self._logits_by_chunks(hidden):
            own = targets[begin : begin + len(logits)]
            total += nn.functional.cross_entropy(
                logits.to(dtype), own, ignore_index=IGNORED_LABEL, reduction="sum"
            )
            begin += len(logits)
            del logits  # before the next ones are made
        return total / (targets != IGNORED_LABEL).sum()

    def _logits_by_chunks(self, hidden: Handed) -> Iterator[Tensor]:
        """Yield logits (tokens, vocabulary) of one chunk of tokens after the other."""
        state = as_tensor(hidden)
        row = state.reshape(1, -1, state.shape[-1])
        for part in row.split(self.loss_chunk_tokens or row.shape[1], dim=1):
            yield self._logits(part)[0]

    @contextmanager
    def gathered_rows(self, tensor: NamedTensor, rows: Tensor, positions: Tensor) -> Iterator[None]:
        """Let the token embedding read `rows` at `positions` in place of its table at the token numbers.

        - `rows`: shape (distinct tokens, embedding width).
        - `positions`: row of each token of the batch, in the batch's shape.
        """
        module = self.embedding
        if module.weight is not tensor.parameter:
            raise ModelError("only the input token table can be read through gathered rows")
        # padding_idx matters to gradients alone, but torch checks it against the number of rows.
        table, padding = tensor.held, module.padding_idx
        tensor.hold(DenseTensor(rows))
        module.padding_idx = None
        hook = module.register_forward_pre_hook(lambda _module, _args: (positions,))
        try:
            yield
        finally:
            hook.remove()
            tensor.hold(table)
            module.padding_idx = padding

    def format(self) -> AbstractContextManager[Any]:
        """Compute matrix products in their format for the length of the block."""
        if self.autocast_dtype is None:
            return nullcontext()
        # The cache would keep a cast of weights that change between calls.
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, cache_enabled=False)

    # -- what is read where ------------------------------------------------------------------------------------

    def entries(self) -> list[ParameterEntry]:
        """Return every stored parameter in registration order, for grouping."""
        # Adapters are left out: the layer that carries one is counted as its base.
        linears = {
            id(module.weight): (outputs, inputs) for _, module, inputs, outputs in linears_of(self.model)
        }
        entries = [
            ParameterEntry(
                t.name,
                self._segments_of[t.name],
                tuple(t.shape),
                t.trainable,
                linears.get(id(t.parameter)),
            )
            for t in self.tensors
        ]
        return list(
            split_blocks_inside(
                entries, self.split_blocks, norm_after_mlp=any(map(normalises_last, self.blocks[:1]))
            )
        )

    def tensors_of(self, group: str) -> tuple[NamedTensor, ...]:
        """Return the parameters of a group in registration order.

        Raises ModelError if the model has no such group.
        """
        try:
            return self._tensors_of[group]
        except KeyError:
            raise ModelError(
                f"the model has no parameter group {group!r}",
                hint="groups are " + ", ".join(self._tensors_of),
            ) from None

    def _group(self) -> tuple[ParamGroup, ...]:
        # Groups keep the order of registration, so that each takes the next tensors.
        param_groups = group_parameters(self.entries())
        remaining = iter(self.tensors)
        self._tensors_of = {
            group.name: tuple(next(remaining) for _ in range(group.num_tensors)) for group in param_groups
        }
        return param_groups

    def _try(self) -> dict[str, tuple[str, ...]]:
        """Try the segments on a few tokens, and return which of them read each parameter.

        Raises UnsplitError if they are not what the model's forward computes.
        """
        batch = self._few_tokens()
        before: set[int] = set()
        after: set[int] = set()
        try:
            with torch.no_grad():
                self._stand_ins = RecordedBlocks(self.model, partial(self._run_front, batch, StepCache()))
                self.blocks = self._stand_ins.blocks
                self.segments = segments_of(len(self.blocks), self.split_blocks)
                self._halves = {i: HalvedBlock(self.blocks[i]) for i in self.split_blocks}
                cache, calls = StepCache(), Calls()
                with self._noted_reads(lambda: after if self._stand_ins.entered_head else before):
                    with self._stand_ins.recording(calls):
                        self._run_front(batch, cache)
                    state = self._stand_ins.state(calls[0])
                    if state.dim() != 3 or state.shape[:2] != batch["input_ids"].shape:
                        raise UnsplitError(self.model, "its state is not of shape (sequences, tokens, width)")
                    with self._stand_ins.returning(state), self.format():
                        whole = self.model(**batch, use_cache=False)
                segments = self._read_segments({EMBED: before, HEAD: after})
                self._refuse_dependent(calls, batch, before)
                self._find_head(state, batch["labels"], whole)
                self.hidden_size = state.shape[-1]
                handed = self.embed(batch, cache)
                for i, halves in self._halves.items():
                    with self.format():
                        halfway = halves.check(state.shape[:-1], self.call(i, handed, cache))
                    self.inner_size = halfway.activation.shape[-1]
                self._front = [tensor for tensor in self.tensors if segments[tensor.name] == (EMBED,)]
        except FAILURES as error:
            raise UnsplitError(self.model, str(error)[:300] or type(error).__name__) from error
        return segments

    def _read_segments(self, reads: Mapping[str, set[int]]) -> dict[str, tuple[str, ...]]:
        """Return the segments that read each parameter: those of blocks by place, the others as was noted."""
        owners: dict[int, set[str]] = {}
        for i, block in enumerate(self.blocks):
            for parameter in block.parameters():
                owners.setdefault(id(parameter), set()).add(block_segment(i))
        segments_of: dict[str, tuple[str, ...]] = {}
        for tensor in self.tensors:
            key = id(tensor.parameter)
            inside = owners.get(key, set())
            outside = [name for name, read in reads.items() if key in read]
            if len(inside) > 1 or (inside and outside):
                readers = ", ".join([*sorted(inside), *outside])
                raise UnsplitError(self.model, f"{tensor.name} is read by {readers}")
            # What nothing reads is perturbed and updated as in any loop over all parameters.
            segments_of[tensor.name] = tuple(inside) or tuple(outside) or (EMBED,)
        return segments_of

    @contextmanager
    def _noted_reads(self, noted: Callable[[], set[int]]) -> Iterator[None]:
        """Note the parameters that modules outside the blocks read, where `noted` says at the time."""

        def note(module: nn.Module, _args: object) -> None:
            noted().update(id(parameter) for parameter in module.parameters(recurse=False))

        inside = {module for block in self.blocks for module in block.modules()}
        outside = [module for module in self.model.modules() if module not in inside]
        hooks = [module.register_forward_pre_hook(note) for module in outside]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _refuse_dependent(self, calls: Calls, batch: Batch, before: set[int]) -> None:
        """Raise for an argument beside the state that depends on weights, or on what blocks return."""
        lost, others = Calls(), Calls()
        with self._stand_ins.recording(lost, losing=True):
            self._run_front(batch, StepCache())
        front = [tensor for tensor in self.tensors if id(tensor.parameter) in before]
        with absent(front, self.device), self._stand_ins.recording(others):
            self._run_front(batch, StepCache())
        for i, (call, other, late) in enumerate(zip(calls, others, lost, strict=True)):
            for key, value in arguments(call):
                if key == self._stand_ins.key:
                    continue
                if not are_same(value, argument(late, key)):
                    raise UnsplitError(
                        self.model, f"block {i} takes more from the blocks before than the last returned"
                    )
                if not are_same(value, argument(other, key)):
                    raise UnsplitError(
                        self.model, f"block {i} takes more than one tensor that depends on weights"
                    )

    def _find_head(self, state: Tensor, labels: Tensor, whole: Any) -> None:
        """Find out whether one token will do for all but the head's input; raise if the head reads more than that."""
        for self._head_needs_shape in (False, True):
            try:
                answers = self._logits(state), self._run_head(state, labels=labels).loss
            except FAILURES:
                continue
            if are_same(answers, (whole.logits, whole.loss)):
                return
        raise UnsplitError(self.model, "its head reads more than what the last block leaves")


FAILURES = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, ArithmeticError)
"""What a model's code may raise where it is called otherwise than its own forward calls it."""


class UnsplitModel(SegmentedModel):
    """A model whose blocks cannot be run by themselves: its head segment is all of it (`reason`: why not)."""

    def __init__(self, model: nn.Module, reason: UnsplitError, **options: Any) -> None:
        if options.get("split_blocks") or options.get("loss_chunk_tokens"):
            raise reason
        self.reason = reason
        super().__init__(model, **options)

    def embed(self, batch: Batch, cache: StepCache) -> Handed:
        """Return the tokens, and what goes with them."""
        del cache
        return batch

    def block(self, index: int, handed: Handed, cache: StepCache, **more: Any) -> Handed:
        """Return the tokens as they are."""
        del index, cache, more
        return handed

    def _run_head(self, hidden: Handed, **inputs: Any) -> Any:
        assert isinstance(hidden, Mapping)
        return self._run_model(hidden, **inputs)

    def _run_model(self, batch: Batch, **inputs: Any) -> Any:
        """Return what the model's own forward makes of a batch."""
        given = {name: batch[name] for name in _INPUTS if name in batch}
        with self.format():
            return self.model(**given, use_cache=False, **inputs)

    def _logits_by_chunks(self, hidden: Handed) -> Iterator[Tensor]:
        yield self._logits(hidden).flatten(0, 1)

    def _try(self) -> dict[str, tuple[str, ...]]:
        self.blocks, self.segments = [self.model], segments_of(1)
        try:
            with torch.no_grad():
                self.loss_format()
        except FAILURES as error:
            raise ModelError(
                f"{type(self.model).__name__} cannot be run on a few tokens: {' '.join(str(error).split())[:300] or type(error).__name__}",
                hint="the model's own forward fails; try it in transformers alone",
            ) from error
        return {tensor.name: (HEAD,) for tensor in self.tensors}


_INPUTS = ("input_ids", "attention_mask", "position_ids")


class SuspendedModel(UnsplitModel):
    """A model whose own forward is suspended at each of its blocks, which may be called in any way, once each and in order.

    `reason`: why its blocks cannot be run without it.
    """

    boundaries: ForwardCalls | None = None

    def embed(self, batch: Batch, cache: StepCache) -> Handed:
        """Return the model's forward, suspended at its first block."""
        return self._begin(batch, cache, None)

    def resumed(
        self, block: int, batches: Iterable[tuple[Batch, StepCache]], data: Tensor
    ) -> Iterator[Handed]:
        """Yield the forwards that another stage left behind `block`, suspended there, of each part of a message.

        Raises CodecError if the message has another length.
        """
        assert self.boundaries is not None
        for batch, cache in batches:
            passed, size = PassedTensors.received(self.boundaries, block, data)
            yield self._begin(batch, cache, passed)
            data = data[size:]
        if data.numel():
            raise CodecError(f"a message has {data.numel()} bytes more than its tensors")

    def _begin(self, batch: Batch, cache: StepCache, passed: PassedTensors | None) -> SuspendedForward:
        # The loss belongs to the forward, and its labels are given at the beginning.
        takes_labels = self.objective is None and self.loss_dtype == "model" and "labels" in batch
        more = {"labels": batch["labels"]} if takes_labels else {}

        def forward() -> Any:
            with host_mirrors(self.device, batch, cache.host):
                return self._run_model(batch, **more)

        if passed is None and self.boundaries is not None:
            passed = PassedTensors(self.boundaries, self.device)
        return SuspendedForward(self._block_stand_ins, forward, self.device, passed)

    def end_stages_at(self, blocks: Sequence[int]) -> None:
        """Let stages end behind these blocks, and try it.

        Raises UnsplitError if what a stage passes on is not all that the next needs.
        """
        batch = self._few_tokens()
        try:
            with torch.no_grad():
                self.boundaries, _ = self._watched(batch)
                self.boundaries.end_at(blocks)
                staged = self._tried(batch, self._segments_of, blocks)
                whole = self._run_model(batch, labels=batch["labels"])
        except FAILURES as error:
            raise UnsplitError(
                self.model, f"on stages, {str(error)[:300] or type(error).__name__}"
            ) from error
        if not are_same((staged.logits, staged.loss), (whole.logits, whole.loss)):
            raise UnsplitError(
                self.model, "a later stage needs a tensor that no block or module of an earlier one returns"
            )

    def boundary_elements(self) -> tuple[ElementsPerSequence, ...]:
        """Return what each segment hands on, by forwards of several lengths."""
        with torch.no_grad():
            counts = {num: self._elements_of(self._few_tokens(1, num)) for num in LENGTHS}
        return tuple(map(elements_per_sequence, *counts.values()))

    def _elements_of(self, batch: Batch) -> list[int]:
        """Return the numbers that go on behind each segment but the head, of a batch of one sequence."""
        boundaries, needed_behind = self._watched(batch)
        width = self.tensors[0].values.element_size()
        counts = []
        for block in (None, *range(len(self.blocks))):
            call = boundaries.last_call(block)
            tensors = needed_behind(call)
            # Whole numbers take as much as they do beside numbers of two bytes, and so does the rest of a message.
            sizes = [one.nbytes // (width if one.is_floating_point() else 2) for one in tensors]
            rest = boundaries.overhead_bytes(call, len(tensors)) // 2
            counts.append(sum(sizes) + rest)
        return counts

    def _watched(self, batch: Batch) -> tuple[ForwardCalls, Callable[[int], list[Tensor]]]:
        return watched(self.model, self.blocks, lambda: self._run_model(batch, labels=batch["labels"]))

    def block(self, index: int, handed: Handed, cache: StepCache, **more: Any) -> Handed:
        """Run block `index`, unless the forward leaves it out, and return the forward."""
        del cache, more
        assert isinstance(handed, SuspendedForward)
        if index in self._run_blocks:
            with self.format():
                handed.run_block(index)
        return handed

    def _behind_blocks(self, batch: Batch) -> Handed:
        handed = self.embed(batch, StepCache())
        for index in range(len(self.blocks)):
            handed = self.block(index, handed, StepCache())
        return handed

    def _run_head(self, hidden: Handed, **inputs: Any) -> Any:
        del inputs
        assert isinstance(hidden, SuspendedForward)
        return hidden.finish()

    def _try(self) -> dict[str, tuple[str, ...]]:
        batch = self._few_tokens()
        try:
            with torch.no_grad():
                self._block_stand_ins = BlockStandIns(self.model)
                self.blocks = self._block_stand_ins.blocks
                self.segments = segments_of(len(self.blocks), ())
                reads, whole = self._reads_of_forward(batch)
                segments = self._read_segments(reads)
                staged = self._tried(batch, segments)
        except FAILURES as error:
            raise UnsplitError(self.model, str(error)[:300] or type(error).__name__) from error
        if not are_same((staged.logits, staged.loss), (whole.logits, whole.loss)):
            raise UnsplitError(self.model, "its segments read more weights than their own")
        # Of a table that the head reads, too, the embedding reads the rows of the batch's tokens.
        is_tied = any(
            t.parameter is self.embedding.weight and len(segments[t.name]) > 1 for t in self.tensors
        )
        if is_tied and not self._embeds_batch:
            raise UnsplitError(self.model, "it embeds other tokens than the batch's, or in another shape")
        return segments

    def _tried(self, batch: Batch, segments: Mapping[str, tuple[str, ...]], ends: Sequence[int] = ()) -> Any:
        """Return what comes of a batch where each segment has its own weights alone, and stages end behind these blocks."""
        handed: Any = None
        for segment in self.segments:
            others = [tensor for tensor in self.tensors if segment not in segments[tensor.name]]
            with absent(others, self.device):
                if segment == HEAD:
                    return self._run_head(handed)
                handed = self.run(segment, batch, StepCache(), handed)
                if segment != EMBED and block_index(segment) in ends:
                    message = handed.message(block_index(segment))
                    (handed,) = self.resumed(block_index(segment), [(batch, StepCache())], message)
        raise AssertionError(self.segments)

    def _reads_of_forward(self, batch: Batch) -> tuple[dict[str, set[int]], Any]:
        """Return what is read outside the blocks before them and behind them, and what the model's forward returns."""
        reads: list[set[int]] = [set()]
        entered: list[int] = []
        embedded: list[Tensor] = []

        def enter(index: int, _block: nn.Module, _args: object) -> None:
            if entered and index <= entered[-1]:
                again = "blocks more than once" if index in entered else "blocks out of order"
                raise UnsplitError(self.model, f"its forward runs {again}")
            entered.append(index)
            reads.append(set())

        hooks = [
            block.register_forward_pre_hook(partial(enter, index)) for index, block in enumerate(self.blocks)
        ]
        hooks.append(self.embedding.register_forward_pre_hook(lambda _, given: embedded.extend(given[:1])))
        try:
            with self._noted_reads(lambda: reads[-1]):
                whole = self._run_model(batch, labels=batch["labels"])
        finally:
            for hook in hooks:
                hook.remove()
        self._run_blocks = frozenset(entered)
        self._embeds_batch = are_same(embedded, [batch["input_ids"]])
        before, *between, after = reads
        if any(between):
            raise UnsplitError(self.model, "its forward reads weights between blocks")
        return {EMBED: before, HEAD: after}, whole


def in_segments(model: nn.Module, **options: Any) -> SegmentedModel:
    """Return a model in segments; in one, where its blocks cannot be run by themselves (`**options`: as of :class:`SegmentedModel`)."""
    try:
        return SegmentedModel(model, **options)
    except UnsplitError as error:
        reason = error
    try:
        return SuspendedModel(model, reason, **options)
    except UnsplitError as error:
        return UnsplitModel(model, error, **options)
