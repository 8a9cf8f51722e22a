"""Time a LoZO step as a training loop and as one batch of scoring, in turns, and print ratios of medians.

``python -m studies.zoinfer --shape 125m --batch 16 --batch 64`` prints the tables that the documentation quotes: the loop as its authors write
it, zosim's plans with weights in place, as adapters, and with what is learnt as slots beside a frozen base, and single forwards. All tune the same matrices of equal models on the same batches,
whose sequences have one label each, their last token, as a prompt with an option has. Then come the differences
between projected gradients of the loop and of adapters, from equal weights along the same directions.

Contenders take turns of two steps, so that a machine that slows down slows all of them; the second is timed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from costmodel.configs import LoRA
from costmodel.model_spec import EMBED, HEAD
from executors.models.batched import BatchedModel
from executors.models.recording_blocks import StepCache
from executors.models.spec import spec_of_model
from executors.runs.adapters import attach
from executors.runs.session import Session
from studies.zoinfer.reference import LozoLoop
from topology.errors import RunError
from zosim.plans import Directions, Estimator, Placement, Plan, Weights

SHAPES: dict[str, dict[str, int]] = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272},
    "350m": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50272},
    "1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50272},
}
_RANK, _LAZY_STEPS, _RATE, _EPSILON = 2, 50, 1e-6, 1e-3
_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_LOOP, _ADAPTERS, _SLOTS, _PLAIN_FORWARD, _PACKED_FORWARD = (
    "LoZO loop",
    "zosim, adapters",
    "zosim, slots beside the base",
    "one padded forward, 2x rows",
    "one packed forward, 2x rows",
)

Data = dict[str, torch.Tensor]
Step = Callable[[int, Data], object]


def main() -> None:
    """Time the contenders at each batch, and print the tables."""
    options = _options()
    torch.set_num_threads(options.threads)
    model = _model(options.shape, getattr(torch, options.dtype), options.device)
    print(f"OPT-{options.shape} shape, {options.dtype}, {options.device}, {options.threads} thread(s)")
    for size in options.batch:
        batches = [_batch(model, size, number, options) for number in range(2 * options.rounds + 2)]
        seconds = _timed(model, batches, options.dtype, options.device)
        _report(size, batches, seconds)
    _report_gradients(model, [_batch(model, 16, n, options) for n in range(options.compared)], options)


def _timed(model: nn.Module, batches: Sequence[Data], dtype: str, device: str) -> dict[str, list[float]]:
    contenders = _contenders(model, batches[0], dtype, device)
    # On a CPU the time of its cores, which a busy machine changes less.
    clock = time.perf_counter if device == "cuda" else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(len(batches) // 2):  # a session observes its memory in the first two steps
        for name, step in contenders.items():
            step(2 * turn, batches[2 * turn])
            _wait(device)
            begin = clock()
            step(2 * turn + 1, batches[2 * turn + 1])
            _wait(device)
            if turn:
                seconds[name].append(clock() - begin)
    return seconds


def _contenders(model: nn.Module, data: Data, dtype: str, device: str) -> dict[str, Step]:
    loop = LozoLoop(copy.deepcopy(model), _RANK, _LAZY_STEPS, _RATE, _EPSILON)
    plain, packed = copy.deepcopy(model), BatchedModel(copy.deepcopy(model))

    @torch.no_grad()
    def forward_padded(_number: int, batch: Data) -> None:
        plain(**{name: torch.cat([tensor, tensor]) for name, tensor in batch.items()})

    @torch.no_grad()
    def forward_packed(_number: int, batch: Data) -> None:
        cache, hidden = StepCache(), None
        for segment in (EMBED, *packed.segments[1:-1], HEAD):
            hidden = packed.run_together(segment, batch, cache, hidden, {}, 2)

    steps: dict[str, Step] = {_LOOP: lambda number, batch: loop.step(number, batch, number)}
    for name, way in (("zosim, in place", "serial"), (_ADAPTERS, "adapters")):
        session = _session(copy.deepcopy(model), data, dtype, device, way)
        steps[name] = lambda _number, batch, session=session: session.step(_on_cpu(batch))  # type: ignore[misc]
    slots = copy.deepcopy(model)
    attach(slots, LoRA(rank=_RANK, target_modules=_LINEARS, lazy_steps=_LAZY_STEPS))
    beside = _session(slots, data, dtype, device, "adapters", directions=Directions())
    steps[_SLOTS] = lambda _number, batch: beside.step(_on_cpu(batch))
    return steps | {_PLAIN_FORWARD: forward_padded, _PACKED_FORWARD: forward_packed}


def _report(size: int, batches: Sequence[Data], seconds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    computed = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["input_ids"].numel() for batch in batches)
    print(f"\nbatch {size}: {padded / len(batches):.0f} tokens padded, {computed / len(batches):.0f} without")
    print(
        f"{'':30s}{'median':>10s}{'fastest':>10s}{'loop / it':>11s}{'it / padded':>13s}{'it / packed':>13s}"
    )
    for name, median in medians.items():
        print(
            f"{name:30s}{median * 1e3:8.1f}ms{min(seconds[name]) * 1e3:8.1f}ms{medians[_LOOP] / median:11.2f}"
            f"{median / medians[_PLAIN_FORWARD]:13.2f}{median / medians[_PACKED_FORWARD]:13.2f}"
        )


def _report_gradients(model: nn.Module, batches: Sequence[Data], options: argparse.Namespace) -> None:
    """Print how projected gradients differ that are taken in different roundings from the same weights and seeds."""
    rows = []
    for number, batch in enumerate(batches):
        values = []
        for way in ("copies", "adapters"):
            # Each from the same weights again: a step at the rate 0 leaves them.
            with _session(
                copy.deepcopy(model), batch, options.dtype, options.device, way, rate=0.0
            ) as session:
                record = session.step(_on_cpu(batch), seeds=(number,))
                assert record.losses_minus is not None
                values.append((record.losses_plus[0], record.losses_minus[0], record.projected_gradients[0]))
        rows.append(values)
    if not rows:
        return
    losses = max(abs(a - b) for one, other in rows for a, b in zip(one[:2], other[:2], strict=True))
    gradients = [(one[2], other[2]) for one, other in rows]
    worst = max(abs(a - b) for a, b in gradients)
    size = statistics.median(abs(a) for a, _ in gradients)
    signs = sum(a * b > 0 for a, b in gradients)
    print(
        f"\n{len(rows)} steps from the same weights, copies against adapters: losses differ by at most {losses:.2e}, "
        f"g by at most {worst:.2e} (median |g| {size:.2e}); {signs} of {len(rows)} signs agree"
    )
    above = [(a, b) for a, b in gradients if abs(a) * 2 * _EPSILON > 2 * losses]
    print(
        f"where the losses of a step differ by more than twice that, {sum(a * b > 0 for a, b in above)} of {len(above)}"
    )


_LOZO = Directions(distribution="lozo", rank=_RANK, lazy_steps=_LAZY_STEPS)


def _session(
    model: nn.Module,
    data: Data,
    dtype: str,
    device: str,
    way: str,
    rate: float = _RATE,
    directions: Directions = _LOZO,
) -> Session:
    size, length = data["input_ids"].shape
    plan = Plan(
        model=spec_of_model(model),
        placement=Placement(topology="host", devices=("gpu0" if device == "cuda" else "cpu0",)),
        batch=size,
        seq=length,
        estimator=Estimator(epsilon=_EPSILON),
        directions=directions,
        weights=Weights.model_validate({"dtype": dtype, "perturbation": way}),
    )
    return Session(plan, model, learning_rate=rate, device=device, num_draw_threads=torch.get_num_threads())


def _on_cpu(batch: Data) -> Data:
    return {name: tensor.cpu() for name, tensor in batch.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _batch(model: Any, size: int, number: int, options: argparse.Namespace) -> Data:
    """Return sequences of lognormal lengths, whose last token is one of two options and has the only label."""
    generator = torch.Generator().manual_seed(number)
    spread = torch.randn(size, generator=generator) * options.spread
    lengths = (options.tokens * spread.exp()).round().long().clamp(4, options.longest)
    columns = int(lengths.max())
    tokens = torch.randint(4, model.config.vocab_size, (size, columns), generator=generator)
    tokens[:, 0] = 2  # what OPT begins every sequence with
    last = torch.arange(columns) == lengths[:, None] - 1
    tokens[last] = torch.randint(4, 6, (size,), generator=generator)
    mask = (torch.arange(columns) < lengths[:, None]).long()
    labels = tokens.masked_fill(~last, -100)
    batch = {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(options.device) for name, tensor in batch.items()}


def _model(shape: str, dtype: torch.dtype, device: str) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = dict(SHAPES[shape])
    hidden = sizes["hidden_size"]
    config = OPTConfig(**sizes, ffn_dim=4 * hidden, word_embed_proj_dim=hidden, max_position_embeddings=2048)
    torch.manual_seed(0)
    model: Any = OPTForCausalLM(config)
    attach(model, "linears")
    whole: nn.Module = model.to(dtype).to(device).eval()
    return whole


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--tokens", type=float, default=26, help="median length of a sequence")
    parser.add_argument("--spread", type=float, default=0.4, help="deviation of the logarithm of lengths")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compared", type=int, default=20, help="steps whose projected gradients are compared"
    )
    options = parser.parse_args()
    options.batch = options.batch or [16, 64]
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch sees no GPU here")
    return options


if __name__ == "__main__":
    main()
