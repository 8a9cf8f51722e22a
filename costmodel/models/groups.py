"""Parameter groups: which neighbouring parameters travel and are drawn together.

One function makes them from a list of tensors. The configuration reader and the executor both call it, so a
plan made without weights and a run with them agree on every name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from math import prod
from typing import NamedTuple

from costmodel.models.model_spec import BACK, EMBED, FRONT, HEAD, ParamGroup, block_segment

TIED_TABLE = "embed.tokens"
"""Name of the group of a token table that the head reads as well."""


class ParameterEntry(NamedTuple):
    """One stored tensor.

    Attributes
    ----------
    name : str
        As ``named_parameters()`` spells it; a tied tensor under its first name.
    segments : tuple of str
        Segments that read it, in execution order.
    shape : tuple of int
        Number of elements in each dimension.
    trainable : bool
        Whether it is perturbed and updated.
    linear : tuple of (int, int), optional
        Numbers of outputs and inputs, where it is the weight of a linear layer.
    """

    name: str
    segments: tuple[str, ...]
    shape: tuple[int, ...]
    trainable: bool = True
    linear: tuple[int, int] | None = None

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


SECOND_LINEARS = ("fc2", "c_proj", "down_proj")
"""What families call the linear that the MLP's activation goes into; GPT-2 has another ``c_proj`` in its attention."""


def split_blocks_inside(
    entries: Iterable[ParameterEntry], split_blocks: Iterable[int], *, norm_after_mlp: bool
) -> Iterator[ParameterEntry]:
    """Yield `entries` with the parameters of some blocks shared out between their two halves.

    - `norm_after_mlp`: Whether the block's last norm comes after the MLP (OPT-350M) rather than before it.
    """
    split = {block_segment(i) for i in split_blocks}
    behind = {*SECOND_LINEARS, "final_layer_norm"} if norm_after_mlp else {*SECOND_LINEARS}
    for entry in entries:
        if entry.segments[0] not in split:
            yield entry
            continue
        parts = set(entry.name.split("."))
        half = BACK if parts & behind and not parts & {"attn", "self_attn"} else FRONT
        yield entry._replace(segments=(entry.segments[0] + half,))


def group_parameters(entries: Iterable[ParameterEntry]) -> tuple[ParamGroup, ...]:
    """Return the maximal runs of neighbours that the same segments read.

    Parameters
    ----------
    entries : iterable of ParameterEntry (or tuples like it)
        Every stored tensor once, in registration order.

    Returns
    -------
    tuple of ParamGroup
        In registration order. A run read by one segment bears the segment's name; a second such run bears
        ``.1``, a third ``.2``. A run read by embed and head is ``embed.tokens``.

    Examples
    --------
    >>> rows = [
    ...     ("wte", ("embed", "head"), (3, 2), True),
    ...     ("wpe", ("embed",), (2, 2), True),
    ...     ("ln_f", ("head",), (2,), True),
    ... ]
    >>> [group.name for group in group_parameters(rows)]
    ['embed.tokens', 'embed', 'head']
    """
    rows = (ParameterEntry(*entry) for entry in entries)
    seen: dict[str, int] = {}
    param_groups = []
    for segments, run in groupby(rows, key=lambda entry: entry.segments):
        base = TIED_TABLE if segments == (EMBED, HEAD) else "+".join(segments)
        count = seen.get(base, 0)
        seen[base] = count + 1
        param_groups.append(_group(base if count == 0 else f"{base}.{count}", segments, list(run)))
    return tuple(param_groups)


def joined_halves(param_groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
    """Return the groups of a model some of whose blocks were split inside, as they are in the unsplit model."""
    whole = [
        (tuple(segment.removesuffix(FRONT).removesuffix(BACK) for segment in group.segments), group)
        for group in param_groups
    ]
    whole_groups = []
    for segments, run in groupby(whole, key=lambda pair: pair[0]):
        parts = [group for _, group in run]
        if parts[0].segments == segments:
            whole_groups += parts
            continue
        counts = ("num_parameters", "num_trainable", "num_tensors", "num_trainable_tensors")
        whole_groups.append(
            ParamGroup(
                name=segments[0],
                segments=segments,
                largest_trainable_tensor=max(part.largest_trainable_tensor for part in parts),
                linears=sum((part.linears for part in parts), ()),
                frozen_linears=sum((part.frozen_linears for part in parts), ()),
                trainable_matrices=tuple(chain.from_iterable(part.trainable_matrices for part in parts)),
                **{count: sum(getattr(part, count) for part in parts) for count in counts},
            )
        )
    return tuple(whole_groups)


def _group(name: str, segments: tuple[str, ...], run: list[ParameterEntry]) -> ParamGroup:
    trainable = [entry.num_elements for entry in run if entry.trainable]
    return ParamGroup(
        name=name,
        segments=segments,
        num_parameters=sum(entry.num_elements for entry in run),
        num_trainable=sum(trainable),
        num_tensors=len(run),
        num_trainable_tensors=len(trainable),
        largest_trainable_tensor=max(trainable, default=0),
        linears=_linears(run, trainable=True),
        frozen_linears=_linears(run, trainable=False),
        trainable_matrices=tuple(
            (entry.shape[0], entry.shape[1]) for entry in run if entry.trainable and len(entry.shape) == 2
        ),
    )


def _linears(run: list[ParameterEntry], *, trainable: bool) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the linears of a block; embedding and head are no blocks."""
    is_block = run[0].segments[0] not in (EMBED, HEAD)
    return tuple(entry.linear for entry in run if is_block and entry.linear and entry.trainable == trainable)
