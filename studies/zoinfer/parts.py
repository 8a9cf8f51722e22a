"""What each part of scoring is worth: forwards of both signs with one part left out at a time, in turns.

``python -m studies.zoinfer.parts`` times the packed forward of two points, as it is and without: tokens that predict no label left behind at the last attention, logits of labels alone, common beginnings computed once,
attention by buckets of length, rows without padding, and both signs side by side. All score the same answers behind the same prompts,
which begin with the same ``--instruction`` tokens, and all have the same loss, to rounding. ``--compiled`` adds the same forward whose blocks went through torch.compile,
but for attention, whose groups are other ones in every batch; the minute of a compiler is not timed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from costmodel.models.model_spec import EMBED, HEAD
from executors.models.batched import BatchedModel
from executors.models.halves import as_tensor
from executors.models.model import SegmentedModel
from executors.models.packing import pack, packed_attention
from executors.models.recording_blocks import StepCache
from executors.turns import Way, in_turns, turn_table
from studies.zoinfer.__main__ import SHAPES, Data, batch_of, model_of
from topology.errors import RunError
from zosim.console import emit
from zosim.report import Report

_ALL, _NONE = "all of it", "none of it"
Score = Callable[[Data], float]


@torch.no_grad()
def _packed(
    segmented: BatchedModel,
    batch: Data,
    *,
    num_eval_points: int = 2,
    least_saved: float | None = None,
    bucket: int | None = None,
    scores_all: bool = False,
    narrows: bool = True,
) -> float:
    segmented.narrows = narrows and not scores_all
    how = {"least_saved": least_saved, "bucket": bucket}
    cache = StepCache(packing=pack(batch, **{k: v for k, v in how.items() if v is not None}))  # type: ignore[arg-type]
    hidden: Tensor | None = None
    for segment in segmented.segments[:-1]:
        hidden = segmented.run_batched(segment, batch, cache, hidden, {}, num_eval_points)
    assert hidden is not None
    if not scores_all:
        return float(segmented.run_batched(HEAD, batch, cache, hidden, {}, num_eval_points)[-1])
    assert cache.packing is not None
    logits = segmented.logits(hidden)[-1].float().log_softmax(-1)[cache.packing.predictors]
    return -float(logits.gather(1, cache.packing.targets[:, None]).mean())


@torch.no_grad()
def _padded(segmented: SegmentedModel, batch: Data) -> float:
    """Score rows of one length, logits of labels alone."""
    batch = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    cache = StepCache()
    hidden = segmented.embed(batch, cache)
    for segment in segmented.segments:
        if segment not in (EMBED, HEAD):
            hidden = segmented.run(segment, batch, cache, hidden)
    rows, places = (batch["labels"] != -100).nonzero(as_tuple=True)
    logits = segmented.logits(as_tensor(hidden)[rows, places - 1][None])[0].float().log_softmax(-1)
    return -float(logits.gather(1, batch["labels"][rows, places][:, None]).mean())


@torch.no_grad()
def _plain(segmented: SegmentedModel, batch: Data) -> float:
    loss: Tensor = segmented.model(
        **{name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    ).loss
    return float(loss)


def _one_by_one(segmented: BatchedModel, batch: Data) -> float:
    _packed(segmented, batch, num_eval_points=1)
    return _packed(segmented, batch, num_eval_points=1)


def forwards_of(segmented: BatchedModel, plain: SegmentedModel) -> dict[str, Score]:
    """Return forwards of both signs, each of which returns the loss."""
    return {
        _ALL: partial(_packed, segmented),
        "signs one after the other": partial(_one_by_one, segmented),
        "all tokens to the last block's end": partial(_packed, segmented, narrows=False),
        "logits of all tokens": partial(_packed, segmented, scores_all=True),
        "beginnings for each row": partial(_packed, segmented, least_saved=float("inf")),
        "attention padded to the longest": partial(_packed, segmented, bucket=1 << 20),
        "attention for each length": partial(_packed, segmented, bucket=1),
        "rows padded": partial(_padded, plain),
        _NONE: partial(_plain, plain),
    }


def _report(forwards: dict[str, Score], batches: list[Data]) -> None:
    losses: dict[str, list[float]] = {name: [] for name in forwards}

    def way(name: str) -> Way:
        return lambda number: losses[name].append(forwards[name](batches[number // 2]))

    # In its turn a forward is run twice on a batch: caches hold what the one before left.
    times = in_turns({name: way(name) for name in forwards}, len(batches) - 1, num_untimed=1)
    whole = times[_ALL].median_s
    apart = max(abs(a - b) for own in losses.values() for a, b in zip(own, losses[_NONE], strict=True))
    shown = turn_table(times, {"of all of it": lambda own: own.median_s / whole})
    emit(None, json=False, text=Report("", shown, f"losses differ by at most {apart:.1e}"))


def main() -> None:
    """Time the forwards at each batch."""
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.parts", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--options", type=int, default=2, help="answers behind each prompt")
    parser.add_argument("--instruction", type=int, default=12, help="tokens that all prompts begin with")
    parser.add_argument("--tokens", type=float, default=26, help="median length of a prompt")
    parser.add_argument("--spread", type=float, default=0.4, help="deviation of the logarithm of lengths")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--compiled", action="store_true", help="time compiled blocks, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.device = "cpu"
    if options.instruction >= options.tokens:
        raise RunError(
            f"--instruction {options.instruction} must be below --tokens {options.tokens:g}, the median length of a prompt"
        )
    torch.set_num_threads(options.threads)
    model = model_of(options.shape, torch.float32, "cpu")
    forwards = forwards_of(BatchedModel(copy.deepcopy(model)), SegmentedModel(copy.deepcopy(model)))
    if options.compiled:
        segmented = BatchedModel(model)
        torch._dynamo.config.recompile_limit = 64  # blocks share their code
        ALL_ATTENTION_FUNCTIONS.register("zosim_packed", torch.compiler.disable(packed_attention))
        *blocks, last = segmented.blocks
        segmented.blocks = [*(torch.compile(block, dynamic=True) for block in blocks), last]  # type: ignore[list-item]
        forwards["all of it, blocks compiled"] = partial(_packed, segmented)
    print(f"OPT-{options.shape} shape, float32, {options.threads} thread(s), {options.options} answers")
    for size in options.batch or [16, 64]:
        batches = [batch_of(model, size, number, options) for number in range(options.rounds + 1)]
        for batch in batches:
            batch["input_ids"][:, 1 : options.instruction] = (
                7 * batch["attention_mask"][:, 1 : options.instruction]
            )
        print(f"\nbatch {size}")
        _report(forwards, batches)


if __name__ == "__main__":
    main()
