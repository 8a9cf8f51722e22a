"""Time the scoring of prompts of several adapters: the built-in runtime, PEFT's mixed batches, vLLM, and the base alone, in turns.

``python -m studies.zoinfer.mixed`` scores two options' tokens behind prompts of lognormal lengths, of three adapters and of none, on one random model. All
are given the same tokens and adapters, in float32 and with as many threads; the largest difference of any log-probability is printed, too. ``--vllm PYTHON`` names
an interpreter that has vLLM, such as that of an environment of its own with a build for CPUs; its time is taken inside that process,
from tokens to log-probabilities.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import LoRA
from executors.datasets.batches import pad
from executors.datasets.prompts import Example
from executors.models.lora import save_adapters
from executors.runs.adapters import attach
from executors.serving.runner import Request
from executors.serving.runtime import Runtime
from executors.turns import Took, Way, in_turns, turn_table
from studies.zoinfer.__main__ import SHAPES
from topology.errors import RunError
from zosim.console import emit
from zosim.report import Report

_NAMES = ("one", "two", "three")
_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Of OPT PEFT mixes these alone: into the other two go tokens of all sequences as rows, which it refuses."""


_RUNTIME, _PEFT, _VLLM = "runtime, mixed", "PEFT, mixed", "vLLM, mixed"
_SETTLING_S = 0.3
"""Threads of OpenMP go on spinning for a while after their work, those of another process too."""
Score = Callable[[list[Request]], "list[float] | tuple[list[float], Took]"]
"""From requests to log-probabilities; from another process with what it took there."""


def main() -> None:
    """Time the contenders at each batch, and print their medians."""
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.mixed", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", type=Path, default=None, help="Python that has vLLM")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.vllm and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(options.threads))  # as vLLM's worker pins itself
    with tempfile.TemporaryDirectory() as folder, contextmanager(_vllm)(options, Path(folder)) as vllm:
        model = _model(options.shape)
        contenders: dict[str, Score] = {
            _RUNTIME: _runtime(model, Path(folder)),
            _PEFT: _peft(model, Path(folder)),
            "transformers, base": _base(model),
        } | vllm
        print(f"OPT-{options.shape} shape, adapters of rank {options.rank}, {options.threads} thread(s)")
        for size in options.batch or [16, 64]:
            _report(size, contenders, options.rounds)


def _report(size: int, contenders: dict[str, Score], rounds: int) -> None:
    batches = [_requests(size, turn) for turn in range(rounds + 1)]
    scores: dict[str, list[list[float]]] = {name: [] for name in contenders}

    def way(name: str) -> Way:
        def score(turn: int) -> Took:
            time.sleep(_SETTLING_S)
            begin = time.perf_counter()
            reported = contenders[name](batches[turn])
            took_s = time.perf_counter() - begin
            found, took = reported if isinstance(reported, tuple) else (reported, Took(took_s))
            scores[name].append(found)
            return took

        return score

    times = in_turns({name: way(name) for name in contenders}, rounds)
    reported = ", ".join(
        f"those of {name.split(',')[0]} by at most {_apart(name, scores, batches):.1e}"
        for name in contenders
        if name in (_PEFT, _VLLM)
    )
    runtime = times[_RUNTIME].median_s
    text = f"batch {size}: log-probabilities differ from the runtime's, {reported}"
    shown = turn_table(times, {"of the runtime's": lambda own: own.median_s / runtime})
    emit(None, json=False, text=Report("", text, shown))


def _apart(name: str, scores: dict[str, list[list[float]]], batches: list[list[Request]]) -> float:
    """Return the largest difference of a log-probability from the runtime's."""
    return max(
        abs(a - b)
        for own, other, requests in zip(scores[_RUNTIME], scores[name], batches, strict=True)
        for a, b, request in zip(own, other, requests, strict=True)
        # vLLM's build for CPUs lets adapters of a batch into the base's requests.
        if name != _VLLM or request.adapter
    )


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


def _vllm(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Score]]:
    """Write model and adapters, and yield vLLM as a contender, where one was named."""
    model: Any = _model(options.shape)
    _write_adapters(model, folder, options.rank)
    if options.vllm is None:
        yield {}
        return
    model.save_pretrained(folder / "base")
    worker = subprocess.Popen(
        [
            options.vllm,
            Path(__file__).with_name("vllm_worker.py"),
            folder / "base",
            folder,
            ",".join(_NAMES),
            str(options.rank),
            str(options.threads),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    into, out = worker.stdin, worker.stdout

    def score(requests: list[Request]) -> tuple[list[float], Took]:
        batch = {
            "prompts": [request.tokens[:-1] for request in requests],
            "options": [request.tokens[-1] for request in requests],
            "adapters": [request.adapter for request in requests],
        }
        print(json.dumps(batch), file=into, flush=True)
        if not (line := out.readline()):
            raise RunError(f"{options.vllm} exited; its output is above")
        answer = json.loads(line)
        return answer["scores"], Took(answer["seconds"])

    try:
        score(_requests(16, 0))  # a compiler's minutes are no race's
        yield {_VLLM: score}
    finally:
        worker.terminate()
        worker.wait()


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
