"""A language model split into segments that run one at a time, by the model's own code.

The list of blocks is replaced by stand-ins while the model's forward runs. For ``embed`` they record what each
block is called with and stop the forward after the last; for ``head`` they hand on the hidden state that the
blocks left. Masks, positions, projections, logits and the loss are therefore the model's own, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from costmodel.models.groups import ParameterEntry, group_parameters, split_blocks_inside
from costmodel.models.model_spec import (
    BACK,
    EMBED,
    FRONT,
    HEAD,
    ParameterGroup,
    block_index,
    block_segment,
    segments_of,
)
from executors.labels import IGNORED_LABEL
from executors.low_bits.stored import DenseTensor
from executors.models.blocks import block_list, fills_masks, linears_of, refuse_unsupported
from executors.models.halves import Halfway, HalvedBlock, Handed, as_tensor, normalises_last
from executors.models.host_twins import host_twins
from executors.models.parameters import NamedTensor, absent, named_tensors
from executors.models.recording_blocks import Calls, StandIn, StandInState, StepCache, Stop
from executors.models.transformers_interface import states_of
from topology.errors import ModelError

Batch = Mapping[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``labels``, each of shape (sequences, tokens)."""

Objective = Callable[[Tensor, Batch], Tensor]
"""Takes logits (sequences, tokens, vocabulary) and the batch, and returns the scalar to minimise."""


@dataclass(frozen=True)
class TextObjective:
    """An objective of generated text, which takes further forwards at the same weights.

    Attributes
    ----------
    cost : callable
        Takes the model, and logits and batch as an objective does; returns a finite number.
    """

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

    Parameters
    ----------
    model : torch.nn.Module
        A transformers language model, causal or masked, that is one ordered list of blocks.
    loss_dtype : str
        ``"model"`` for the model's own loss, ``"fp64"`` for the same loss over logits widened to float64.
    loss_chunk_tokens : int, optional
        Tokens whose logits are alive at once. The loss is then summed over chunks, which rounds differently.
    autocast_dtype : torch.dtype, optional
        Format of matrix products, where it differs from that of the weights.
    objective : callable or TextObjective, optional
        Takes the place of the loss; it need not be differentiable.
    split_blocks : tuple of int
        Blocks that are two segments, split at the input of the MLP's second linear.

    Raises
    ------
    ModelError
        If the model cannot be split; the message says why.

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
        self._owner, self._list_name, blocks_path = block_list(model)
        self._whole = self._owner.get_submodule(self._list_name)
        self.blocks = list(self._whole.children())
        self._role = StandInState()
        self._head_needs_shape = False
        self.split_blocks = tuple(sorted(set(split_blocks)))
        self.segments = segments_of(len(self.blocks), self.split_blocks)
        self._halves = {i: HalvedBlock(self.blocks[i]) for i in self.split_blocks}
        self.hidden_size = self.inner_size = 0  # until that forward
        last = len(self.blocks) - 1
        self._stand_ins = nn.ModuleList(
            StandIn(block, self._role, is_last=i == last) for i, block in enumerate(self.blocks)
        )
        self.tensors = named_tensors(model)
        self.device = self.tensors[0].values.device
        # Nothing is absent yet: one forward is watched to learn what the front reads.
        self._front: list[NamedTensor] = []
        self._segments_of = self._read_segments(blocks_path)
        self._front = [tensor for tensor in self.tensors if self._segments_of[tensor.name] == (EMBED,)]
        self.embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        if not isinstance(self.embedding, nn.Embedding):
            raise ModelError(f"the model's token embedding is a {type(self.embedding).__name__}, not a table")
        self.groups = self._group()

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, segment: str, batch: Batch, cache: StepCache, handed: Handed | None) -> Handed:
        """Return the output of `segment`, given a batch and the output of the segment before; of the head, the loss."""
        if segment == EMBED:
            return self.embed(batch, cache)
        if segment == HEAD:
            return self.head(as_tensor(handed), batch)
        if not cache.calls:  # another stage embeds
            self.embed(batch, cache)
        assert handed is not None
        return self.between(segment, handed, cache)

    def embed(self, batch: Batch, cache: StepCache) -> Tensor:
        """Return the first block's input, and fill `cache` with what the blocks are called with.

        Parameters
        ----------
        cache : StepCache
            Filled at the first call of a step; both signs share it, since masks and positions do not depend
            on the weights.

        Returns
        -------
        torch.Tensor
            Hidden state of shape (sequences, tokens, hidden).
        """
        calls: Calls = []
        self._role.calls = calls
        try:
            with self._without_blocks(), self.format(), host_twins(self.device, batch, cache.host):
                self.model(
                    input_ids=batch["input_ids"],
                    attention_mask=batch.get("attention_mask"),
                    use_cache=False,
                    **({"position_ids": batch["position_ids"]} if "position_ids" in batch else {}),
                )
        except Stop as stop:
            if not cache.calls:
                cache.calls = calls
            return stop.hidden
        finally:
            self._role.calls = None
        raise ModelError("the model's forward left out its last block", hint="switch layer dropping off")

    def block(self, index: int, hidden: Tensor, cache: StepCache) -> Tensor:
        """Return the output of block `index`."""
        args, kwargs = cache.calls[index]
        with self.format():
            return states_of(self.blocks[index](hidden, *args, **kwargs))

    def between(self, segment: str, handed: Handed, cache: StepCache) -> Handed:
        """Return the output of `segment`, a block or half of one, given the output of the segment before."""
        index = block_index(segment)
        if segment.endswith(BACK):
            assert isinstance(handed, Halfway)
            with self.format():
                return self._halves[index].back(handed)
        hidden = as_tensor(handed)
        if not segment.endswith(FRONT):
            return self.block(index, hidden, cache)
        args, kwargs = cache.calls[index]
        with self.format():
            return self._halves[index].front(hidden, *args, **kwargs)

    def head(self, hidden: Tensor, batch: Batch) -> Tensor:
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
            return torch.tensor(cost, dtype=torch.float64, device=hidden.device)
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
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        with torch.no_grad():
            return self.head(self.embed(batch, StepCache()), batch).dtype

    def calls_on_probe(self) -> list[Any]:
        """Return what all blocks are called with on two tokens beside the hidden state, one after the other."""
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        cache = StepCache()
        with torch.no_grad():
            self.embed({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, cache)
        return tree_leaves(cache.calls)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of every position for the label of the next, given what the last block left.

        What a masked model says of a position itself stands one position earlier, so that objectives and evaluations
        read labels behind logits for all models; no position predicts the first label.
        """
        logits = self._logits(hidden)
        return logits if self.is_causal else logits.roll(-1, dims=1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits at each position, not shifted."""
        if not self._head_needs_shape:
            return self._run_head(hidden).logits  # type: ignore[no-any-return]
        # A row of many sequences may be longer than any that the model has positions for.
        alone = hidden.reshape(-1, 1, hidden.shape[-1])
        logits: Tensor = self._run_head(alone).logits
        return logits.view(*hidden.shape[:-1], -1)

    def _run_head(self, hidden: Tensor, **inputs: Any) -> Any:
        # Nothing of what the front of the forward makes is used: the stand-ins replace it. One token will do,
        # except for models that shape their output after their input. No program says that a head reads the front's weights,
        # which another stream may be changing, so it does not.
        shape = hidden.shape[:-1] if self._head_needs_shape else (1, 1)
        self._role.hidden = hidden
        try:
            with (
                self._without_blocks(),
                self.format(),
                host_twins(self.device),
                absent(self._front, hidden.device),
            ):
                tokens = torch.zeros((1, 1), dtype=torch.long, device=hidden.device).expand(shape)
                return self.model(input_ids=tokens, use_cache=False, **inputs)
        finally:
            self._role.hidden = None
            self._role.entered_head = False

    def _summed_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        dtype = torch.float64 if self.loss_dtype == "fp64" else torch.float32
        if self.is_causal:
            # Each label moves to the token that predicts it.
            labels = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
        targets = labels.reshape(-1)
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        chunk = self.loss_chunk_tokens or flat.shape[1]
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for begin in range(0, flat.shape[1], chunk):
            logits = self._logits(flat[:, begin : begin + chunk])[0].to(dtype)
            total += nn.functional.cross_entropy(
                logits, targets[begin : begin + chunk], ignore_index=IGNORED_LABEL, reduction="sum"
            )
            del logits  # before the next ones are made
        return total / (targets != IGNORED_LABEL).sum()

    @contextmanager
    def gathered_rows(self, tensor: NamedTensor, rows: Tensor, positions: Tensor) -> Iterator[None]:
        """Let the token embedding read `rows` at `positions` in place of its table at the token numbers.

        Parameters
        ----------
        rows : torch.Tensor
            Shape (distinct tokens, embedding width).
        positions : torch.Tensor
            Row of each token of the batch, in the batch's shape.
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

    @contextmanager
    def _without_blocks(self) -> Iterator[None]:
        modules = self._owner._modules
        modules[self._list_name] = self._stand_ins
        try:
            yield
        finally:
            modules[self._list_name] = self._whole

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

        Raises
        ------
        ModelError
            If the model has no such group.
        """
        try:
            return self._tensors_of[group]
        except KeyError:
            raise ModelError(
                f"the model has no parameter group {group!r}",
                hint="groups are " + ", ".join(self._tensors_of),
            ) from None

    def _group(self) -> tuple[ParameterGroup, ...]:
        # Groups keep the order of registration, so that each takes the next tensors.
        groups = group_parameters(self.entries())
        remaining = iter(self.tensors)
        self._tensors_of = {
            group.name: tuple(next(remaining) for _ in range(group.num_tensors)) for group in groups
        }
        return groups

    def _read_segments(self, blocks_path: str) -> dict[str, tuple[str, ...]]:
        """Return the segments that read each parameter: blocks by place, the others by watching one run."""
        embed_reads, head_reads = self._watch_edges()
        segments_of: dict[str, tuple[str, ...]] = {}
        for tensor in self.tensors:
            if tensor.name.startswith(f"{blocks_path}."):
                number = tensor.name.removeprefix(f"{blocks_path}.").partition(".")[0]
                segments: tuple[str, ...] = (block_segment(int(number)),)
            else:
                edges = ((EMBED, embed_reads), (HEAD, head_reads))
                segments = tuple(name for name, reads in edges if id(tensor.parameter) in reads)
            if not segments:
                raise ModelError(
                    f"parameter {tensor.name} is read neither by a block nor by the modules around them",
                    hint="zosim runs models in which every parameter belongs to a module that is called",
                )
            segments_of[tensor.name] = segments
        return segments_of

    def _watch_edges(self) -> tuple[set[int], set[int]]:
        """Return the parameters that modules before the blocks read, and those that modules behind them read."""
        before: set[int] = set()
        after: set[int] = set()

        def note(module: nn.Module, _args: object) -> None:
            reads = {id(parameter) for parameter in module.parameters(recurse=False)}
            (after if self._role.entered_head else before).update(reads)

        inside = {module for block in self.blocks for module in block.modules()}
        outside = [module for module in self.model.modules() if module not in inside]
        hooks = [module.register_forward_pre_hook(note) for module in outside]
        try:
            with torch.no_grad():
                self._probe()
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, ArithmeticError) as error:
            raise ModelError(
                f"{type(self.model).__name__} cannot be run on two tokens: {str(error)[:300] or type(error).__name__}",
                hint="a field of its configuration, or the shape of one of its weights, does not fit the others",
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        return before, after

    def _probe(self) -> None:
        batch = {"input_ids": torch.zeros((1, 2), dtype=torch.long, device=self.device)}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        cache = StepCache()
        hidden = self.embed(batch, cache)
        self.hidden_size = hidden.shape[-1]
        args, kwargs = cache.calls[0]
        with self.format():
            self._role.returns_tuple = isinstance(self.blocks[0](hidden, *args, **kwargs), tuple)
            for i, halves in self._halves.items():
                args, kwargs = cache.calls[i]
                self.inner_size = halves.check(hidden, *args, **kwargs).activation.shape[-1]
        self._head_needs_shape = self.logits(hidden).shape[:-1] != hidden.shape[:-1]
