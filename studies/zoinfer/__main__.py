"""Time a LoZO step as a training loop and as one batch of scoring, in turns, and print ratios of medians.

``python -m studies.zoinfer --shape 125m --batch 16 --batch 64`` prints the tables that the documentation quotes: the loop as its authors write
it, zosim's plans with weights in place, as adapters, and with what is learnt as increments beside a frozen base, and single forwards. All tune the same matrices of equal models on the same batches:
prompts, behind each of which stand ``--options`` answers of one token, the only ones that have labels. The loop and the first two plans
go along the same perturbations, the generator's of the released loop; increments draw their own. Then come the differences
between losses and projected gradients of the loop and of adapters, from equal weights along the same perturbations.

Contenders take turns of two steps, so that a machine that slows down slows all of them; the second is timed. With ``--out`` the medians go
into a file of rows, those of other runs beside them, and speed-ups are drawn over batches.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costmodel.models.configs import LoRA
from costmodel.models.model_spec import EMBED, HEAD
from executors.models.batched import BatchedModel
from executors.models.recording_blocks import StepCache
from executors.models.spec import plan_of_model
from executors.runs.adapters import attach
from executors.runs.session import Session
from executors.turns import TurnTimes, Way, in_turns, turn_table
from studies.plots import picture
from studies.zoinfer.reference import PlainLoop
from topology.errors import RunError
from zosim.console import emit
from zosim.plans import Perturbations
from zosim.report import Report

SHAPES: dict[str, dict[str, int]] = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272},
    "350m": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50272},
    "1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50272},
}
_RANK, _LAZY_STEPS, _RATE, _EPSILON = 2, 50, 1e-6, 1e-3
ROWS = "race.csv"
"""File of medians."""
_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_LOOP, _ADAPTERS, _INCREMENTS, _PLAIN_FORWARD, _PACKED_FORWARD = (
    "LoZO loop",
    "zosim, adapters",
    "zosim, increments beside the base",
    "one padded forward, 2x rows",
    "one packed forward, 2x rows",
)

Data = dict[str, torch.Tensor]
Step = Callable[[int, Data], object]


def main() -> None:
    """Time the contenders at each batch, and print the tables."""
    options = _options()
    torch.set_num_threads(options.threads)
    model = model_of(options.shape, getattr(torch, options.dtype), options.device)
    print(
        f"OPT-{options.shape} shape, {options.dtype}, {options.device}, {options.threads} thread(s), "
        f"{options.options} answer(s) behind each prompt"
    )
    for size in options.batch:
        batches = [batch_of(model, size, number, options) for number in range(2 * options.rounds + 2)]
        times = _timed(model, batches, options.dtype, options.device)
        _report(size, batches, times)
        if options.out:
            _write(options, size, times)
    if options.out:
        plot_speedups(options.out / ROWS, options.out / "speedups.svg")
    if options.compared:
        _report_gradients(model, [batch_of(model, 16, n, options) for n in range(options.compared)], options)


def _timed(model: nn.Module, batches: Sequence[Data], dtype: str, device: str) -> dict[str, TurnTimes]:
    def way(step: Step) -> Way:
        return lambda number: step(number, batches[number])

    contenders = {name: way(step) for name, step in _contenders(model, batches[0], dtype, device).items()}
    # A session observes its memory in the first two steps, which are those of the round that does not count.
    return in_turns(contenders, len(batches) // 2 - 1, num_untimed=1, finish=lambda: _wait(device))


def _contenders(model: nn.Module, data: Data, dtype: str, device: str) -> dict[str, Step]:
    loop = PlainLoop(copy.deepcopy(model), _RANK, _LAZY_STEPS, _RATE, _EPSILON)
    plain, packed = loop.model, BatchedModel(copy.deepcopy(model))

    @torch.no_grad()
    def forward_padded(_number: int, batch: Data) -> None:
        plain(**{name: torch.cat([tensor, tensor]) for name, tensor in batch.items()})

    @torch.no_grad()
    def forward_packed(_number: int, batch: Data) -> None:
        cache, hidden = StepCache(), None
        for segment in (EMBED, *packed.segments[1:-1], HEAD):
            hidden = packed.run_batched(segment, batch, cache, hidden, {}, 2)

    steps: dict[str, Step] = {_LOOP: lambda number, batch: loop.step(number, batch, number)}
    for name, perturbation in (("zosim, in place", "serial"), (_ADAPTERS, "adapters")):
        session = _session(copy.deepcopy(model), data, dtype, device, perturbation)
        steps[name] = lambda number, batch, session=session: session.step(_on_cpu(batch), seeds=(number,))  # type: ignore[misc]
    increments = copy.deepcopy(model)
    attach(increments, LoRA(rank=_RANK, target_modules=_LINEARS, lazy_steps=_LAZY_STEPS))
    beside = _session(increments, data, dtype, device, "adapters", perturbations=Perturbations())
    steps[_INCREMENTS] = lambda _number, batch: beside.step(_on_cpu(batch))
    return steps | {_PLAIN_FORWARD: forward_padded, _PACKED_FORWARD: forward_packed}


def _report(size: int, batches: Sequence[Data], times: dict[str, TurnTimes]) -> None:
    computed = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["input_ids"].numel() for batch in batches)
    loop, plain, packed = (times[name].median_s for name in (_LOOP, _PLAIN_FORWARD, _PACKED_FORWARD))
    ratios: dict[str, Callable[[TurnTimes], float]] = {
        "loop / it": lambda own: loop / own.median_s,
        "it / padded": lambda own: own.median_s / plain,
        "it / packed": lambda own: own.median_s / packed,
    }
    text = f"batch {size}: {padded / len(batches):.0f} tokens padded, {computed / len(batches):.0f} without"
    emit(None, json=False, text=Report("", text, turn_table(times, ratios)))


def _write(options: argparse.Namespace, size: int, times: dict[str, TurnTimes]) -> None:
    """Put the medians in the place of those of an earlier run of the same case."""
    path = options.out / ROWS
    case = {"shape": options.shape, "threads": options.threads, "answers": options.options, "batch": size}
    rows: list[dict[str, Any]] = []
    if path.is_file():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if any(row[name] != str(case[name]) for name in case)]
    rows += [
        case | {"contender": name, "milliseconds": f"{1e3 * own.median_s:.1f}"} for name, own in times.items()
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*case, "contender", "milliseconds"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_speedups(rows: Path, path: Path) -> None:
    """Draw how many times as long as each plan's the loop's step takes, over batches, a line for each shape."""
    with rows.open(newline="") as file:
        lines = list(csv.DictReader(file))
    took: dict[tuple[str, ...], float] = {
        (row["shape"], row["threads"], row["answers"], row["batch"], row["contender"]): float(
            row["milliseconds"]
        )
        for row in lines
    }
    with picture(path, figsize=(7, 4.5)) as (_, axes):
        for shape, threads, answers in sorted({key[:3] for key in took}):
            batches = sorted(int(key[3]) for key in took if key[:3] == (shape, threads, answers))
            sizes = [str(size) for size in dict.fromkeys(batches)]
            for contender, style in ((_ADAPTERS, "o-"), (_INCREMENTS, "s--")):
                ratios = [
                    took[shape, threads, answers, size, _LOOP]
                    / took[shape, threads, answers, size, contender]
                    for size in sizes
                ]
                label = (
                    f"{shape}, {threads} thread(s), {answers} answer(s): {contender.removeprefix('zosim, ')}"
                )
                axes.plot([int(size) for size in sizes], ratios, style, label=label)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("prompts in a batch")
        axes.set_ylabel("time of the LoZO loop / of the plan")
        axes.legend(fontsize=7)


def _report_gradients(model: nn.Module, batches: Sequence[Data], options: argparse.Namespace) -> None:
    """Print how losses and projected gradients of loop and adapters differ, from the same weights along the same perturbations."""
    weights = copy.deepcopy(model.state_dict())
    loop = PlainLoop(copy.deepcopy(model), _RANK, _LAZY_STEPS, 0.0, _EPSILON)
    rows = []
    with _session(
        copy.deepcopy(model), batches[0], options.dtype, options.device, "adapters", rate=0.0
    ) as session:
        for number, batch in enumerate(batches):
            g = loop.step(number, batch, number)
            loop.model.load_state_dict(weights)  # the loop's restore leaves last bits behind
            record = session.step(_on_cpu(batch), seeds=(number,))
            assert record.losses_minus is not None
            ours = (record.losses_plus[0], record.losses_minus[0], record.projected_gradients[0])
            rows.append(((*loop.losses, g), ours))
    losses = max(abs(a - b) for one, other in rows for a, b in zip(one[:2], other[:2], strict=True))
    gradients = [(one[2], other[2]) for one, other in rows]
    worst = max(abs(a - b) for a, b in gradients)
    size = statistics.median(abs(a) for a, _ in gradients)
    signs = sum(a * b > 0 for a, b in gradients)
    print(
        f"\n{len(rows)} steps from the same weights, loop against adapters: losses differ by at most {losses:.2e}, "
        f"g by at most {worst:.2e} (median |g| {size:.2e}); {signs} of {len(rows)} signs agree"
    )
    above = [(a, b) for a, b in gradients if abs(a) * 2 * _EPSILON > 2 * losses]
    print(
        f"where the losses of a step differ by more than twice that, {sum(a * b > 0 for a, b in above)} of {len(above)}"
    )


_LOZO = Perturbations(distribution="lozo", rank=_RANK, lazy_steps=_LAZY_STEPS)


def _session(
    model: nn.Module,
    data: Data,
    dtype: str,
    device: str,
    perturbation: str,
    rate: float = _RATE,
    perturbations: Perturbations = _LOZO,
) -> Session:
    size, length = data["input_ids"].shape
    axes: dict[str, Any] = {
        "placement": {"topology": "host", "devices": ("gpu0" if device == "cuda" else "cpu0",)},
        "estimator": {"epsilon": _EPSILON},
        "weights": {"dtype": dtype, "perturbation": perturbation},
    }
    plan = plan_of_model(model, batch=size, seq=length, perturbations=perturbations, **axes)
    return Session(
        plan, model, learning_rate=rate, device=device, num_sampling_threads=torch.get_num_threads()
    )


def _on_cpu(batch: Data) -> Data:
    return {name: tensor.cpu() for name, tensor in batch.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def batch_of(model: Any, size: int, number: int, options: argparse.Namespace) -> Data:
    """Return prompts of lognormal lengths, each as often as there are answers, which have the only labels.

    Of one answer, it is one of two.
    """
    generator = torch.Generator().manual_seed(number)
    spread = torch.randn(size, generator=generator) * options.spread
    lengths = (options.tokens * spread.exp()).round().long().clamp(4, options.longest)
    columns = int(lengths.max())
    tokens = torch.randint(4, model.config.vocab_size, (size, columns), generator=generator)
    tokens[:, 0] = 2  # what OPT begins every sequence with
    answers = torch.randint(4, 6, (size, 1), generator=generator)
    if options.options > 1:
        answers = torch.arange(4, 4 + options.options).expand(size, -1)
    tokens, lengths = (of.repeat_interleave(options.options, 0) for of in (tokens, lengths))
    last = torch.arange(columns) == lengths[:, None] - 1
    tokens[last] = answers.flatten()
    mask = (torch.arange(columns) < lengths[:, None]).long()
    labels = tokens.masked_fill(~last, -100)
    batch = {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(options.device) for name, tensor in batch.items()}


def model_of(shape: str, dtype: torch.dtype, device: str) -> nn.Module:
    """Return a random model of a shape, the linears of whose blocks are tuned."""
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
    parser.add_argument("--options", type=int, default=1, help="answers that are scored behind each prompt")
    parser.add_argument("--out", type=Path, default=None, help="folder of the file of rows and the plot")
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
        raise RunError("--device cuda: torch finds no GPU on this machine", hint="use --device cpu")
    return options


if __name__ == "__main__":
    main()
