"""Packs sequences side by side without padding, and their common prefixes once, so that forwards compute nothing twice.

A decoder's token sees only what comes before it. Of a sequence nothing is computed behind the last token that predicts a
label, and what several sequences begin with is computed for all of them at once. What is left is a forest of *runs* of
tokens. All of them lie in one row, where products, norms and activations need not know of them; attention alone does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from executors.devices import staged_on
from topology.errors import DataError

_IGNORED = -100
LEAST_SAVED = 64
"""Product of a common beginning's tokens and of those that it saves, from which on it is a run of its own.

Attention takes one more group of runs for it, which long beginnings, of which every prompt has one, share.
"""

_BUCKET = 8
"""Runs whose lengths differ by less share a call of attention, padded there alone."""


@dataclass(frozen=True)
class AttentionGroup:
    """Runs of similar length, whose attention is one call."""

    # queries, keys: places in the row, those of shorter runs filled up.
    queries: Tensor
    keys: Tensor
    num_runs: int
    # What sees what; None where every run begins a sequence: then a token sees those before it, and filling lies behind all.
    mask: Tensor | None
    kept: Tensor | None  # of the queries, those that are no filling; None for all


@dataclass(frozen=True)
class Packing:
    """A batch as one row of tokens.

    Attributes
    ----------
    tokens, positions : LongTensor (1, places)
    """

    tokens: Tensor
    positions: Tensor
    groups: tuple[AttentionGroup, ...]
    predictors: Tensor  # place of the token that predicts each label
    targets: Tensor
    num_padded: int  # tokens of the batch as it came, padding among them
    on_host: Mapping[str, Tensor]  # `input_ids`, `position_ids` and `predictors` on the host

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed at each point."""
        return self.tokens.shape[1]

    @property
    def is_sparse(self) -> bool:
        """Whether so few tokens predict a label that they are picked out as soon as nothing else is asked for."""
        return 2 * len(self.predictors) <= self.num_tokens


def joined(packings: Sequence[Packing]) -> tuple[Packing, list[slice]]:
    """Join packings in one row, in which none attends to another; also return where each lies."""
    offsets, begin = [], 0
    groups: list[AttentionGroup] = []
    predictors, predictors_on_host = [], []
    for packing in packings:
        end = begin + packing.num_tokens
        offsets.append(slice(begin, end))
        groups += [
            replace(group, queries=group.queries + begin, keys=group.keys + begin) for group in packing.groups
        ]
        predictors.append(packing.predictors + begin)
        predictors_on_host.append(packing.on_host["predictors"] + begin)
        begin = end
    on_host = {
        name: torch.cat([packing.on_host[name] for packing in packings], 1)
        for name in ("input_ids", "position_ids")
    }
    row = Packing(
        torch.cat([packing.tokens for packing in packings], 1),
        torch.cat([packing.positions for packing in packings], 1),
        tuple(groups),
        torch.cat(predictors),
        torch.cat([packing.targets for packing in packings]),
        sum(packing.num_padded for packing in packings),
        on_host | {"predictors": torch.cat(predictors_on_host)},
    )
    return row, offsets


@dataclass
class _PackedRun:
    begin: int
    tokens: list[int]
    above: list[int]
    """Places of the tokens before it."""
    first: int
    """Place of its own first token."""

    @property
    def offsets(self) -> list[int]:
        return list(range(self.first, self.first + len(self.tokens)))


@dataclass
class _Forest:
    rows: list[list[int]]
    least_saved: float
    runs: list[_PackedRun] = field(default_factory=list)
    offsets: list[list[int]] = field(default_factory=list)
    num_positions: int = 0

    def grow(self) -> None:
        """Cut the rows into runs, and note the position of every row's tokens."""
        self.offsets = [[] for _ in self.rows]
        self._grow(sorted(range(len(self.rows)), key=lambda row: self.rows[row]), 0)

    def _grow(self, rows: Sequence[int], begin: int) -> None:
        """Cut sorted rows behind their first `begin` tokens, which are the same and have places already."""
        rows = [row for row in rows if len(self.rows[row]) > begin]
        if len(rows) < 2:
            for row in rows:
                self._add([row], begin, len(self.rows[row]))
            return
        # Of sorted rows the outermost have least in common.
        first, last = self.rows[rows[0]], self.rows[rows[-1]]
        end = begin
        while end < min(len(first), len(last)) and first[end] == last[end]:
            end += 1
        if (len(rows) - 1) * (end - begin) ** 2 >= self.least_saved:
            self._add(rows, begin, end)
            self._grow(rows, end)
            return
        if whole := [row for row in rows if len(self.rows[row]) == end]:
            self._add(whole, begin, end)  # what is whole here is the same in all, and no run begins behind it
        longer = [row for row in rows if len(self.rows[row]) > end]
        for _, same in groupby(longer, key=lambda row: self.rows[row][end]):
            self._grow(list(same), begin)

    def _add(self, rows: Sequence[int], begin: int, end: int) -> None:
        run = _PackedRun(
            begin, self.rows[rows[0]][begin:end], list(self.offsets[rows[0]]), self.num_positions
        )
        self.num_positions += end - begin
        self.runs.append(run)
        for row in rows:
            self.offsets[row] = [*self.offsets[row], *run.offsets]


def pack(
    batch: Mapping[str, Tensor],
    *,
    least_saved: float = LEAST_SAVED,
    bucket: int = _BUCKET,
    device: torch.device | None = None,
) -> Packing:
    """Pack a batch.

    - `batch`: ``input_ids`` and ``labels`` of shape (sequences, tokens), and perhaps an ``attention_mask`` of ones, then zeros.
      Of tensors on an accelerator the numbers are waited for.
    - `least_saved`: what a common beginning must save to be computed once, as in :data:`LEAST_SAVED`.
    - `bucket`: runs whose lengths differ by less share a call of attention.
    - `device`: where the packing is to be; by default where the batch is.

    Raises DataError if a sequence is padded on the left, or nothing is asked for.
    """
    device = device or batch["input_ids"].device
    tokens, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    mask = batch.get("attention_mask")
    lengths = _lengths(mask) if mask is not None else [len(row) for row in tokens]
    label_positions = [[at for at in range(1, len(row)) if row[at] != _IGNORED] for row in labels]
    if not any(label_positions):
        raise DataError("the batch has no label after the first token of a sequence")
    for row, (positions, length) in enumerate(zip(label_positions, lengths, strict=True)):
        if positions and positions[-1] > length:
            raise DataError(f"sequence {row} of the batch has labels after its {length} tokens")
    # The token before a label predicts it: nothing is computed from a sequence's last label on.
    forest = _Forest(
        [
            row[: positions[-1]] if positions else []
            for row, positions in zip(tokens, label_positions, strict=True)
        ],
        least_saved,
    )
    forest.grow()
    flat = [(0, 0)] * forest.num_positions
    for run in forest.runs:
        for offset, token in enumerate(run.tokens):
            flat[run.first + offset] = (token, run.begin + offset)
    pairs = [
        (forest.offsets[row][at - 1], labels[row][at])
        for row, positions in enumerate(label_positions)
        for at in positions
    ]
    tokens_and_positions = torch.tensor(flat, dtype=torch.long).T.contiguous()
    ends = torch.tensor(pairs, dtype=torch.long).T.contiguous()
    by_length: dict[tuple[int, int], list[_PackedRun]] = defaultdict(list)
    for run in forest.runs:
        by_length[-(-len(run.tokens) // bucket), -(-len(run.above) // bucket)].append(run)
    groups = [_group(alike) for alike in by_length.values()]
    tensors = [tokens_and_positions, ends]
    for group in groups:
        tensors += [group.queries, group.keys, *(t for t in (group.mask, group.kept) if t is not None)]
    there = iter(staged_on(device, tensors))
    tokens_there, (predictors, targets) = next(there), next(there)
    moved = [
        AttentionGroup(
            next(there),
            next(there),
            group.num_runs,
            None if group.mask is None else next(there),
            None if group.kept is None else next(there),
        )
        for group in groups
    ]
    on_host = {
        "input_ids": tokens_and_positions[:1],
        "position_ids": tokens_and_positions[1:],
        "predictors": ends[0],
    }
    return Packing(
        tokens_there[:1],
        tokens_there[1:],
        tuple(moved),
        predictors,
        targets,
        batch["input_ids"].numel(),
        on_host,
    )


def facts_of(batches: Iterable[Mapping[str, Tensor]]) -> dict[str, int]:
    """Return what batches hold for a packed forward, as the fields of :class:`zosim.plans.forward.ForwardPass`: means, rounded."""
    num_batches = num_sequences = num_labels = num_rows = num_tokens = num_computed = num_pairs = 0
    for batch in batches:
        labels, tokens = batch["labels"].tolist(), batch["input_ids"].tolist()
        label_positions = [[at for at in range(1, len(row)) if row[at] != _IGNORED] for row in labels]
        rows = {tuple(row[: at[-1]]) for row, at in zip(tokens, label_positions, strict=True) if at}
        num_batches += 1
        num_sequences += len(tokens)
        num_labels += sum(map(len, label_positions))
        num_rows += len(rows)
        num_tokens += sum(map(len, rows))
        packing = pack(batch)
        num_computed += packing.num_tokens
        num_pairs += sum(len(one.queries) * len(one.keys) // one.num_runs for one in packing.groups)
    saved = num_tokens - num_computed
    length = max(1, round(num_tokens / num_rows))
    return {
        "num_labels": max(1, round(num_labels / num_sequences)),
        "num_tokens": length,
        "num_answers": max(1, round(num_sequences / num_rows)),
        "num_attended": round(num_pairs / num_computed),
    } | (
        {"num_shared": min(length - 1, round(saved / (num_rows - num_batches)))}
        if saved and length > 1
        else {}
    )


def _lengths(mask: Tensor) -> list[int]:
    mask = mask.cpu()
    lengths = mask.sum(1)
    ones_first = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    if not torch.equal(ones_first, mask.bool()):
        raise DataError(
            "a sequence of the batch is not padded on the right",
            hint="pad on the right",
        )
    return [int(length) for length in lengths.tolist()]


def _group(runs: Sequence[_PackedRun]) -> AttentionGroup:
    most = max(len(run.tokens) for run in runs)
    most_keys = max(len(run.above) + len(run.tokens) for run in runs)
    queries = torch.zeros(len(runs), most, dtype=torch.long)
    keys = torch.zeros(len(runs), most_keys, dtype=torch.long)
    begins = not any(run.above for run in runs)
    mask = None if begins else torch.zeros(len(runs), 1, most, most_keys, dtype=torch.bool)
    is_own = torch.zeros(len(runs), most, dtype=torch.bool)
    for i, run in enumerate(runs):
        num, above = len(run.tokens), len(run.above)
        queries[i, :num] = torch.tensor(run.offsets)
        keys[i, : above + num] = torch.tensor([*run.above, *run.offsets])
        if mask is not None:
            mask[i, 0, :num, : above + num] = torch.ones(num, above + num, dtype=torch.bool).tril(above)
            mask[i, 0, num:, 0] = True  # a filling sees something, so that no softmax is over nothing
        is_own[i, :num] = True
    return AttentionGroup(
        queries.view(-1),
        keys.view(-1),
        len(runs),
        mask,
        None if bool(is_own.all()) else is_own.view(-1).nonzero().view(-1),
    )


def packed_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    on_attended: Callable[[], None] = lambda: None,
    **_: object,
) -> tuple[Tensor, None]:
    """Return the attention of packed sequences, as transformers calls it.

    - `query`, `key`, `value`: shape (points, heads, places, width).
    - `attention_mask`: the packing says what sees what.

    Returns
    -------
    torch.Tensor
        Shape (points, places, heads, width).
    """
    del attention_mask
    # A window longer than every sequence hides nothing.
    if sliding_window is not None and int(packing.on_host["position_ids"].max()) < sliding_window:
        sliding_window = None
    attend = _attended if softcap is None and s_aux is None else partial(_attended_plainly, softcap, s_aux)
    (num_eval_points, num_heads, num_positions), width = query.shape[:3], value.shape[-1]
    out = query.new_empty((num_eval_points, num_positions, num_heads, width))
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    # cuDNN plans each new shape for tens of milliseconds of the host, and nearly every batch has runs of other lengths:
    # these kernels take any shape at once.
    at_once = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(at_once) if query.device.type == "cuda" else nullcontext():
        for group in packing.groups:
            mask = group.mask if sliding_window is None else _windowed(group, packing, sliding_window)
            queries = _of_runs(q, group.queries, group.num_runs)
            keys, values = (_of_runs(states, group.keys, group.num_runs) for states in (k, v))
            if mask is not None and num_eval_points > 1:
                mask = mask.repeat(num_eval_points, 1, 1, 1)
            seen = attend(queries, keys, values, mask, scaling)
            rows = seen.transpose(1, 2).reshape(num_eval_points, -1, num_heads, width)
            if group.kept is None:
                out.index_copy_(1, group.queries, rows)
            else:
                out.index_copy_(1, group.queries[group.kept], rows.index_select(1, group.kept))
    on_attended()
    return out, None


def _windowed(group: AttentionGroup, packing: Packing, window: int) -> Tensor:
    """Return what sees what where a token sees the last tokens alone, itself among them."""
    queries, keys = (
        packing.positions[0].index_select(0, offsets).view(group.num_runs, -1)
        for offsets in (group.queries, group.keys)
    )
    mask = group.mask
    if mask is None:  # every run begins a sequence, and filling lies behind all
        ones = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool, device=keys.device)
        queries = keys = torch.arange(keys.shape[1], device=keys.device).expand_as(keys)
        mask = ones.tril()
    return mask & (queries[:, None, :, None] - keys[:, None, None, :] < window)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Return the attention of some runs, (points * runs, heads, tokens, width)."""
    num_each = q.shape[1] // k.shape[1]
    if mask is not None and num_each > 1 and q.device.type == "cuda":
        # Of its fused kernels cuDNN's alone takes both a mask and fewer heads of keys than of queries.
        k, v = (states.repeat_interleave(num_each, 1) for states in (k, v))
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )


def _attended_plainly(
    softcap: float | None,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Return the attention of some runs whose scores are capped, or that may attend to nothing: sinks, a logit for each head."""
    k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], 1) for states in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf).float()
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    shares = scores.softmax(-1)[..., : k.shape[2]]
    return torch.matmul(shares.to(v.dtype), v)


def _of_runs(states: Tensor, offsets: Tensor, num_runs: int) -> Tensor:
    """Return (points * runs, heads, tokens, width) of states (points, places, heads, width)."""
    num_eval_points, _, num_heads, width = states.shape
    picked = states.index_select(1, offsets).view(num_eval_points * num_runs, -1, num_heads, width)
    return picked.transpose(1, 2)
