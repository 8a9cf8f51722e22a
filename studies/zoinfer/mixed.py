"""Time the scoring of prompts of several adapters: the built-in runtime, PEFT's mixed batches, and the base alone, in turns.

``python -m studies.zoinfer.mixed`` scores two options' tokens behind prompts of lognormal lengths, of three adapters and of none, on one random model. All
are given the same tokens and adapters; the largest difference of any log-probability is printed, too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.configs import LoRA
from executors.datasets.batches import pad
from executors.datasets.prompts import Example
from executors.models.lora import save_adapters
from executors.runs.adapters import attach
from executors.serving.engine import Request
from executors.serving.runtime import Runtime
from studies.zoinfer.__main__ import SHAPES
from topology.errors import RunError

_NAMES = ("one", "two", "three")
_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Of OPT PEFT mixes these alone: into the other two go tokens of all sequences as rows, which it refuses."""


def main() -> None:
    """Time the contenders at each batch, and print their medians."""
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.mixed", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = _model(options.shape)
        _write_adapters(model, Path(folder), options.rank)
        contenders = {
            "runtime, mixed": _runtime(model, Path(folder)),
            "PEFT, mixed": _peft(model, Path(folder)),
            "transformers, base": _base(model),
        }
        print(f"OPT-{options.shape} shape, adapters of rank {options.rank}, {options.threads} thread(s)")
        for size in options.batch or [16, 64]:
            _report(size, contenders, options.rounds)


def _report(size: int, contenders: dict[str, Callable[[list[Request]], list[float]]], rounds: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    worst = 0.0
    for turn in range(rounds + 1):
        requests = _requests(size, turn)
        scores = {}
        for name, score in contenders.items():
            begin = time.process_time()
            scores[name] = score(requests)
            if turn:
                seconds[name].append(time.process_time() - begin)
        ours, theirs = scores["runtime, mixed"], scores["PEFT, mixed"]
        worst = max(worst, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\nbatch {size}: log-probabilities of runtime and PEFT differ by at most {worst:.1e}")
    for name, median in medians.items():
        print(f"{name:20s}{median * 1e3:9.1f}ms{median / medians['runtime, mixed']:8.2f} of the runtime's")


def _requests(size: int, seed: int) -> list[Request]:
    """Return prompts, each behind an option of one token, an adapter's in turn."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for number in range(size):
        length = int(26 * torch.exp(0.4 * torch.randn((), generator=generator)))
        length = min(128, max(4, length))
        tokens = tuple(torch.randint(4, 50000, (length,), generator=generator).tolist())
        requests.append(Request(tokens, length - 1, (None, *_NAMES)[number % 4]))
    return requests


def _runtime(model: nn.Module, folder: Path) -> Callable[[list[Request]], list[float]]:
    runtime = Runtime(copy.deepcopy(model))
    for name in _NAMES:
        runtime.load(name, folder / name)
    return lambda requests: [score for (score,) in runtime.score(requests)]


def _base(model: nn.Module) -> Callable[[list[Request]], list[float]]:
    @torch.no_grad()
    def score(requests: list[Request]) -> list[float]:
        return _last(model(**_padded(requests)).logits, requests)

    return score


def _peft(model: nn.Module, folder: Path) -> Callable[[list[Request]], list[float]]:
    try:
        import peft
    except ImportError as error:
        raise RunError("PEFT is not installed", hint="python -m pip install peft") from error
    tuned: Any = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder / _NAMES[0], _NAMES[0])
    for name in _NAMES[1:]:
        tuned.load_adapter(folder / name, name)
    tuned.eval()

    @torch.no_grad()
    def score(requests: list[Request]) -> list[float]:
        names = [request.adapter or "__base__" for request in requests]
        return _last(tuned(**_padded(requests), adapter_names=names).logits, requests)

    return score


def _padded(requests: list[Request]) -> dict[str, Tensor]:
    batch = pad([Example(request.tokens, request.tokens) for request in requests])
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _last(logits: Tensor, requests: list[Request]) -> list[float]:
    at = torch.tensor([len(request.tokens) - 2 for request in requests])
    tokens = torch.tensor([request.tokens[-1] for request in requests])
    rows = logits[torch.arange(len(at)), at].float().log_softmax(-1)
    scores: list[float] = rows.gather(1, tokens[:, None])[:, 0].tolist()
    return scores


def _model(shape: str) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = dict(SHAPES[shape]) | {"vocab_size": 50272}
    width = sizes["hidden_size"]
    config = OPTConfig(**sizes, ffn_dim=4 * width, word_embed_proj_dim=width, max_position_embeddings=2048)
    torch.manual_seed(0)
    model: Any = OPTForCausalLM(config)
    whole: nn.Module = model.eval()
    return whole


def _write_adapters(model: nn.Module, folder: Path, rank: int) -> None:
    for number, name in enumerate(_NAMES):
        tuned = copy.deepcopy(model)
        attach(tuned, LoRA(rank=rank, target_modules=_LINEARS, seed=number))
        with torch.no_grad():
            for path, parameter in tuned.named_parameters():
                if path.endswith("lora_B.weight"):
                    nn.init.normal_(parameter, std=1e-2)
        save_adapters(tuned, folder / name)


if __name__ == "__main__":
    main()
