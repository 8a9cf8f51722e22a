"""All evaluation points of a step in one forward over one read of the weights, with perturbations as adapters of the linears.

At the point ``θ + s·ε·U·Vᵀ`` a linear layer returns ``x·Wᵀ + s·ε·(x·V)·Uᵀ``. The first product is the same for all points, whose inputs
lie side by side; the second takes ``r·(m + n)`` multiplications a token. Weights are neither changed nor copied.

The batch is packed (:mod:`executors.models.packing`), and logits are made of those tokens alone that predict a label. Behind the last
attention nobody looks at the others: where few are left, the rest of the last block is run on these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.model_spec import EMBED, HEAD, block_index
from executors.labels import IGNORED_LABEL
from executors.models.halves import as_tensor
from executors.models.lora import block_linears, joined_factors
from executors.models.model import FAILURES, Batch, SegmentedModel
from executors.models.packing import LEAST_SAVED, Packing, pack, packed_attention
from executors.models.recording_blocks import StepCache
from executors.models.transformers_interface import attention_by, register_attention
from topology.errors import ModelError

_ATTENTION = "zosim_packed"
register_attention(_ATTENTION, packed_attention)


@dataclass(frozen=True)
class LowRankPath:
    """The low-rank path that a linear layer has along with its weight, at each evaluation point."""

    inner: Tensor  # shape (inputs, rank), the same at all points, or (points, inputs, rank)
    outer: Tensor  # shape (points, rank, outputs)
    positions: slice | None = None  # of the packed row, the tokens that it is for; None for all


@dataclass
class _Narrowing:
    """Selects the tokens of the last block that are needed after its attention."""

    stream: Tensor  # what the block is given and will add to: the residual stream, narrowed in place
    rows: Tensor
    rows_on_host: Tensor
    # is_due, is_done: whether attention is through, and whether the first linear behind it has narrowed its input, and the stream.
    is_due: bool = False
    is_done: bool = False

    def attended(self) -> None:
        self.is_due = True

    def narrowed(self, inputs: Tensor) -> Tensor:
        """Narrow the residual stream in place, and return a linear's `inputs` narrowed."""
        self.is_due, self.is_done = False, True
        self.stream.data = self.stream.index_select(1, self.rows)
        return inputs.index_select(1, self.rows)

    def positions(self, whole: slice) -> slice:
        """Return where the narrowed rows of a part of the packed row lie."""
        begin, end = (int((self.rows_on_host < edge).sum()) for edge in (whole.start, whole.stop))
        return slice(begin, end)


_COARSE = 0.02
"""By what share losses may differ whose inputs are rounded to 8 bits or less, or whose numbers have 16."""


class BatchedModel(SegmentedModel):
    """A segmented model that also runs its segments at several points at once.

    - `model`: whose tuned parameters are weights of linears of its blocks, or the ``B`` of adapters beside them whose ``A``
      stays.
    - `**options`: as of :class:`SegmentedModel`.

    Raises ModelError if another parameter is tuned, or the model's losses are others where its batches are packed.
    """

    narrows = True
    """Whether a last block's tokens that predict nothing are left behind at its attention."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._narrowing: _Narrowing | None = None
        self._paths: dict[int, Sequence[LowRankPath]] = {}
        self._is_transposed: dict[int, bool] = {}
        self._carriers: dict[int, Any] = {}
        tuned = {id(tensor.parameter): tensor.name for tensor in self.tensors if tensor.trainable}
        for _, module, _, _ in block_linears(model):
            key = id(module.weight)
            if tuned.pop(key, None) is not None:
                self._is_transposed[key] = not isinstance(module, nn.Linear)
                self._carriers[key] = module
            elif hasattr(module, "lora_B") and not module.lora_A.weight.requires_grad:
                key = id(module.lora_B.weight)
                tuned.pop(key, None)
                self._carriers[key] = module
            else:
                continue
            module.register_forward_hook(self._side_path)
        if tuned:
            raise ModelError(
                f"{next(iter(tuned.values()))} is tuned, but is not the weight of a linear layer of a block",
                hint="add --tune linears, or tune only the B of adapters with --lora-lazy-steps",
            )
        own = set(map(id, self.blocks[-1].modules()))
        for _, module, _, _ in block_linears(model):
            if id(module) in own:
                module.register_forward_pre_hook(self._narrowed)
        sizes = [inputs * outputs for _, _, inputs, outputs in block_linears(model)]
        self._block_elements = sum(sizes) / len(self.blocks)
        self._check_packing()
        self.narrows = self._can_narrow()

    def pack(self, batch: Batch) -> Packing:
        """Pack a batch. On a CPU, a token of a large block takes longer than a call of attention."""
        weight = min(1.0, 2e5 / self._block_elements) if self.device.type == "cpu" else 1.0
        return pack(batch, least_saved=max(8, LEAST_SAVED * weight), device=self.device)

    def path(
        self, parameter: nn.Parameter, factors: Sequence[tuple[Tensor, Tensor]], scales: Sequence[float]
    ) -> LowRankPath:
        """Return the side path of a linear's weight, which :meth:`run_batched` is given under `parameter`.

        - `factors`: ``U`` and ``V`` of each point.
        - `scales`: what their product is multiplied by.
        """
        # Linear multiplies by its weight transposed, Conv1D by its weight: U and V change sides.
        ends = [pair if self._is_transposed[id(parameter)] else pair[::-1] for pair in factors]
        is_one = all(inner is ends[0][0] for inner, _ in ends)
        return LowRankPath(
            ends[0][0] if is_one else torch.stack([inner for inner, _ in ends]),
            torch.stack([outer.T * scale for (_, outer), scale in zip(ends, scales, strict=True)]),
        )

    def path_of_left(
        self, parameter: nn.Parameter, perturbations: Sequence[Tensor], scales: Sequence[float]
    ) -> LowRankPath:
        """Return the side path of an adapter whose ``B`` is moved along perturbations, while its ``A`` stays: all that it adds.

        - `parameter`: ``B``.
        - `perturbations`: shape (outputs, rank), one for each point.
        - `scales`: what they are multiplied by.
        """
        module = self._carriers[id(parameter)]
        inner, outer = joined_factors(module)
        left, rank = module.lora_B.weight, module.lora_A.weight.shape[0]
        moved = torch.stack([outer.T] * len(perturbations))
        for at, (z, scale) in enumerate(zip(perturbations, scales, strict=True)):
            moved[at, :rank] = torch.add(left, z.to(left.dtype), alpha=scale).T * module.lora_scale
        return LowRankPath(inner.T, moved)

    def run_batched(
        self,
        segment: str,
        batch: Batch,
        cache: StepCache,
        hidden: Tensor | None,
        paths: Mapping[nn.Parameter, LowRankPath | Sequence[LowRankPath]],
        num_eval_points: int,
    ) -> Tensor:
        """Return the output of `segment` at all points, of shape (points, tokens, width); of the head, each point's loss.

        - `cache`: keeps the packing of a step's batch, which may be there already, and what blocks are called with.
        - `paths`: of the weights that points, or parts of the row, differ in.
        """
        if segment == EMBED:
            cache.packing = self.pack(cache.host or batch) if cache.packing is None else cache.packing
            row = {"input_ids": cache.packing.tokens, "position_ids": cache.packing.positions}
            packed = StepCache(host=cache.packing.on_host)
            with attention_by(self.model, _ATTENTION):
                embedded = as_tensor(self.embed(row, packed))
            cache.calls = cache.calls or packed.calls
            return embedded.expand(num_eval_points, -1, -1)
        packing = cache.packing
        assert packing is not None
        assert hidden is not None
        if segment == HEAD:
            return self._losses(hidden, packing)
        index = block_index(segment)
        self._paths = {
            id(self._carriers[id(parameter)]): (path,) if isinstance(path, LowRankPath) else path
            for parameter, path in paths.items()
        }
        more: dict[str, Any] = {"packing": packing}
        if self.narrows and packing.is_sparse and index == len(self.blocks) - 1:
            hidden = hidden.view_as(hidden)  # the caller's stays as it is
            self._narrowing = _Narrowing(hidden, packing.predictors, packing.on_host["predictors"])
            more["on_attended"] = self._narrowing.attended
        # Increments that are part of a side path must not be added by their adapter a second time.
        carriers = [self._carriers[id(parameter)] for parameter in paths]
        joined = [module for module in carriers if hasattr(module, "has_lora_side_path")]
        for module in joined:
            module.has_lora_side_path = True
        try:
            with attention_by(self.model, _ATTENTION):
                return as_tensor(self.block(index, hidden, cache, **more))
        finally:
            self._paths, self._narrowing = {}, None
            for module in joined:
                module.has_lora_side_path = False

    @staticmethod
    def predicting(hidden: Tensor, packing: Packing) -> Tensor:
        """Return the last block's output at tokens that predict a label, narrowed already or not."""
        return hidden if hidden.shape[1] != packing.num_tokens else hidden.index_select(1, packing.predictors)

    def _losses(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Return each point's mean cross-entropy over labels."""
        logits = self.logits(self.predicting(hidden, packing))
        wide = torch.float64 if self.loss_dtype == "fp64" else torch.float32
        num_eval_points, num_labels, _ = logits.shape
        targets = packing.targets.repeat(num_eval_points)
        each = nn.functional.cross_entropy(logits.flatten(0, 1).to(wide), targets, reduction="none")
        return each.view(num_eval_points, num_labels).mean(1)

    def _side_path(self, module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for path in self._paths.get(id(module), ()):
            num_eval_points = path.outer.shape[0]
            inputs = arguments[0].reshape(num_eval_points, -1, arguments[0].shape[-1])
            outputs = output.view(num_eval_points, -1, output.shape[-1])
            if (positions := path.positions) is not None:
                if self._narrowing is not None and self._narrowing.is_done:
                    positions = self._narrowing.positions(positions)
                inputs, outputs = inputs[:, positions], outputs[:, positions]
            outputs.baddbmm_(_times(inputs, path.inner).to(output.dtype), path.outer.to(output.dtype))
        return output

    def _narrowed(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        narrowing = self._narrowing
        if narrowing is None or not narrowing.is_due:
            return None
        return narrowing.narrowed(arguments[0]), *arguments[1:]

    def _check_packing(self) -> None:
        """Raise ModelError for a model that computes different losses on packed and on padded sequences."""
        tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]], device=self.device)
        tokens = tokens % self.embedding.num_embeddings
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=self.device)
        labels = tokens.masked_fill(mask == 0, IGNORED_LABEL)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        packed, padded, kind = StepCache(), StepCache(), type(self.model).__name__
        hidden: Tensor | None = None
        whole: Any = None
        # At two further points one of the sequences is another: nothing of it may reach the other one.
        reaches, dtype = False, torch.float32
        try:
            with torch.no_grad():
                for segment in self.segments:
                    hidden = self.run_batched(segment, batch, packed, hidden, {}, 3)
                    whole = self.run(segment, batch, padded, whole)
                    assert packed.packing is not None
                    first, second = packed.packing.predictors.split([4, 2])
                    if segment == EMBED:
                        hidden = hidden.clone()
                        hidden[1, first] *= -1
                        hidden[2, second] *= -1
                    if segment == self.segments[-2]:
                        dtype = hidden.dtype
                        reaches = self._differ(hidden[1, second], hidden[0, second])
                        reaches |= self._differ(hidden[2, first], hidden[0, first])
        except FAILURES as error:
            raise ModelError(
                f"packed sequences do not work with {kind}: {str(error)[:300]}",
                hint="use --weights serial or copies",
            ) from error
        roundings = {getattr(module, "input_scales", "") for module in self.model.modules()} - {""}
        if reaches and "tensor" not in roundings:
            message = f"sequences of {kind} see one another where they are packed"
            raise ModelError(message, hint="use --weights serial or copies")
        assert hidden is not None
        tolerance = _COARSE if roundings else min(_COARSE, self._tolerance(dtype))
        if not torch.allclose(hidden[:1].double(), whole.double().reshape(1), rtol=tolerance, atol=0):
            message = (
                f"the loss of {kind} is {hidden[0].item():.6g} on packed sequences, but {whole.item():.6g} on "
                "padded ones"
            )
            raise ModelError(message, hint="use --weights serial or copies")

    def _differ(self, states: Tensor, others: Tensor) -> bool:
        """Whether states differ by more than roundings: products of experts have other shapes where tokens choose others."""
        tolerance = self._tolerance(others.dtype)
        return bool((states - others).double().norm() > tolerance * others.double().norm())

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Return by what share results of one computation may differ; much of a model in float64 is in float32."""
        eps = torch.finfo(self.autocast_dtype or dtype).eps
        return float(max(eps, torch.finfo(torch.float32).eps) ** 0.5)

    def _can_narrow(self) -> bool:
        """Whether the part of a block behind its attention works token by token on the residual stream."""
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]], device=self.device)
        tokens = tokens % self.embedding.num_embeddings
        labels = tokens.clone()
        labels[:, :-1] = IGNORED_LABEL
        batch = {"input_ids": tokens, "labels": labels}
        packing = self.pack(batch)
        left: list[Tensor] = []
        try:
            for self.narrows in (False, True):
                cache, hidden = StepCache(packing=packing), None
                with torch.no_grad():
                    for segment in self.segments[:-1]:
                        hidden = self.run_batched(segment, batch, cache, hidden, {}, 1)
                assert hidden is not None
                left.append(hidden)
        except FAILURES:
            return False
        whole, narrowed = self.predicting(left[0], packing), left[1]
        is_alike = whole.shape == narrowed.shape
        return is_alike and torch.allclose(whole, narrowed, rtol=2e-2, atol=1e-3, equal_nan=True)


def _times(inputs: Tensor, inner: Tensor) -> Tensor:
    """Return inputs (points, tokens, inputs) times `inner`, shared by all points or one each: (points, tokens, rank)."""
    inner = inner.to(inputs.dtype)
    if inner.dim() == 3:
        return torch.matmul(inputs, inner)
    # CPUs multiply a few long rows two to four times as fast as a few long columns.
    lying = torch.mm(inner.T.contiguous(), inputs.reshape(-1, inputs.shape[-1]).T)
    return lying.view(-1, *inputs.shape[:2]).permute(1, 2, 0)
