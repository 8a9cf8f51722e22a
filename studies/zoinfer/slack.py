"""Hold `zosim slack` against a server under load: latencies and steps that it predicts, and those of a server with probes in its slack.

``python -m studies.zoinfer.slack`` starts ``zosim serve`` on a random model, times requests and probes alone, and then sends requests at random
times while probes of a lower priority go on without a pause: none, whole, and in parts. Predicted are the very arrivals that were sent, with the
times that were taken alone. Machines that do other things meanwhile answer later than that says.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from costmodel.models.configs import LoRA
from costmodel.scoring import Row
from executors.models.lora import save_adapters
from executors.runs.adapters import attach
from executors.serving.client import RemoteServer
from executors.serving.runner import Request
from executors.turns import in_turns
from topology.errors import RunError
from zosim.analysis.scoreboard import rows_table
from zosim.applications.slack.serving import Policy, Server, poisson, serve
from zosim.console import emit, stderr
from zosim.report import Report

_VOCABULARY = 512
_PROBE_PRIORITY = 9
_PROBES = ("plus", "minus")


@dataclass
class _Measured:
    latencies_s: NDArray[np.float64]
    num_steps: float
    duration_s: float


def main() -> None:
    """Measure and predict each policy, and print both."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), options)
        reported = Path(folder) / "output"
        with reported.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "zosim", "serve", "--model", f"{folder}/model", "--port", "0", "--threads", "1",
                 *(f"--adapter={name}={folder}/{name}" for name in _PROBES)],
                stderr=file,
            )  # fmt: skip
        try:
            _measure_all(_address(process, reported), options)
        finally:
            process.terminate()
            process.wait()


def _measure_all(url: str, options: argparse.Namespace) -> None:
    live = RemoteServer(url, timeout_s=600)
    probing = RemoteServer(url, timeout_s=600, priority=_PROBE_PRIORITY)
    one = _median_s(lambda: live.score(_requests(1)), options.repeats)
    eight = _median_s(lambda: live.score(_requests(8)), options.repeats)
    request_s = max(1e-5, (eight - one) / 7)
    rows = [_requests(options.batch, name) for name in _PROBES]
    per_part = options.batch // options.parts
    parts = [
        [*rows[0][begin : begin + per_part], *rows[1][begin : begin + per_part]]
        for begin in range(0, options.batch, per_part)
    ]
    seconds = [_median_s(partial(probing.score, part), options.repeats) for part in parts]
    whole = _median_s(lambda: probing.score([request for part in parts for request in part]), options.repeats)
    print(
        f"alone: a request {one * 1e3:.1f} ms, each further {request_s * 1e3:.1f} ms; a probe {whole * 1e3:.0f} ms, or "
        f"{sum(seconds) * 1e3:.0f} ms in {len(parts)} parts"
    )
    rate = options.load / one
    arrivals = poisson(rate, options.seconds, seed=1)
    print(f"{len(arrivals)} requests in {options.seconds:g} s, a load of {options.load:g}\n")
    latencies, steps = [], []
    for policy in ("none", "whole", "segments"):
        step_s, num_parts = (whole, 1) if policy != "segments" else (sum(seconds), len(parts))
        server = Server(max(0.0, one - request_s), request_s, 64, step_s, num_parts)
        policies: dict[str, Policy] = {"none": "none", "whole": "whole", "segments": "segments"}
        reported = serve(server, arrivals, policies[policy])
        sent = list(parts) if policy == "segments" else [[r for part in parts for r in part]]
        seen = _under_load(live, probing, arrivals, sent if policy != "none" else [])
        latencies += [
            Row(
                f"{policy}, p{100 * q:.0f}",
                "latency_s",
                float(np.quantile(seen.latencies_s, q)),
                reported.quantile_s(q),
            )
            for q in (0.5, 0.99)
        ]
        latencies.append(Row(f"{policy}, mean", "latency_s", float(seen.latencies_s.mean()), reported.mean_s))
        per_hour = 3600 * seen.num_steps / seen.duration_s
        steps.append(Row(policy, "steps_per_hour", per_hour, reported.steps_per_hour))
        stderr.print(policy)
    emit(None, json=False, text=Report("", rows_table(latencies), rows_table(steps)))


def _under_load(
    live: RemoteServer,
    probing: RemoteServer,
    arrivals: NDArray[np.float64],
    parts: Sequence[Sequence[Request]],
) -> _Measured:
    """Send requests when they are due, and parts of probes one after the other meanwhile."""
    is_over = threading.Event()
    num_parts = 0
    failures: list[Exception] = []

    def probe() -> None:
        nonlocal num_parts
        while parts and not is_over.is_set():
            try:
                probing.score(parts[num_parts % len(parts)])
            except RunError as error:
                failures.append(error)
                return
            num_parts += 1

    begin = time.perf_counter() + 0.5

    def ask(due_s: float) -> float:
        time.sleep(max(0.0, begin + due_s - time.perf_counter()))
        live.score(_requests(1))
        return time.perf_counter() - begin - due_s

    prober = threading.Thread(target=probe)
    prober.start()
    with ThreadPoolExecutor(256) as pool:
        latencies = list(pool.map(ask, arrivals))
    duration = time.perf_counter() - begin
    is_over.set()
    prober.join()
    if failures:
        raise failures[0]
    return _Measured(np.array(latencies), num_parts / max(1, len(parts)), duration)


def _median_s(action: Callable[[], object], repeats: int) -> float:
    return in_turns({"alone": lambda _: action()}, repeats)["alone"].median_s


def _requests(count: int, adapter: str | None = None) -> list[Request]:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(4, _VOCABULARY, (count, 26), generator=generator).tolist()
    return [Request(tuple(row), 25, adapter) for row in tokens]


def _address(process: subprocess.Popen[bytes], reported: Path) -> str:
    """Return where the server is, once it says so."""
    while process.poll() is None:
        if match := re.search(r"http://\S+", reported.read_text()):
            return match[0]
        time.sleep(0.05)
    raise RunError(
        f"the server did not start: {reported.read_text()[-300:]}",
        hint="start `zosim serve` alone to see why",
    )


def _write_model(folder: Path, options: argparse.Namespace) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    width = options.width
    config = OPTConfig(
        hidden_size=width, ffn_dim=4 * width, word_embed_proj_dim=width, num_hidden_layers=options.blocks,
        num_attention_heads=width // 64, vocab_size=_VOCABULARY, max_position_embeddings=128,
    )  # fmt: skip
    model: Any = OPTForCausalLM(config)
    model.save_pretrained(folder / "model")
    attach(model, LoRA(rank=4, target_modules=("q_proj", "v_proj", "fc1", "fc2")))
    for name in _PROBES:
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith("lora_B.weight"):
                    nn.init.normal_(parameter, std=1e-3)
        save_adapters(model, folder / name)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.slack", description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a probe, at each sign")
    parser.add_argument("--parts", type=int, default=8, help="that a probe is sent in")
    parser.add_argument(
        "--load", type=float, default=0.4, help="share of time that requests alone would take"
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
