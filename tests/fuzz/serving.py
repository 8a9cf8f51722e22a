"""What a server and its clients read: requests, answers, adapters, versions and logs of tunings, and the commands around them."""

from __future__ import annotations

import functools
import http.client
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from executors.json_server import read_answer
from executors.serving.client import RemoteServer
from executors.serving.peft import linear_shapes, read_adapter
from executors.serving.runner import Request
from executors.serving.runtime import Runtime
from executors.serving.server import ScoringServer
from tests.fuzz import seeds
from tests.fuzz.cases import Case, Target
from tests.fuzz.commands import command
from tests.fuzz.model_targets import _mutated_weights
from tests.fuzz.mutations import mutated
from topology.errors import ZosimError


@functools.cache
def _runtime() -> Runtime:
    from executors.models.loading import load_model

    seeds.run()
    return Runtime(load_model(seeds.folder() / "model"))


@functools.cache
def adapter() -> dict[str, bytes]:
    """The files of an adapter as PEFT writes them."""
    seeds.run_of_low_rank()
    run = next(path.parent for path in seeds.folder().glob("run*/run.json") if "lozo" in path.parent.name)
    out = seeds.folder() / "adapter"
    seeds.zosim("adapter", run, "--model", seeds.folder() / "model", "-o", out, "--max-rank", 8)
    return {f"adapter/{path.name}": path.read_bytes() for path in out.iterdir()}


# -- requests ------------------------------------------------------------------------------------------------------

_REQUESTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("/v1/completions", {"model": "base", "prompt": [[5, 4, 7]], "max_tokens": 0, "echo": True, "logprobs": 0}),
    ("/v1/completions", {"model": "base", "prompt": [[5, 4], [9]], "max_tokens": 2, "priority": 1}),
    ("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "adapter"}),
    ("/v1/unload_lora_adapter", {"lora_name": "one"}),
)  # fmt: skip


@functools.cache
def _server() -> ScoringServer:
    """A server of this worker; its threads end with the process."""
    server = ScoringServer(_runtime(), "base")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _asked(case: Case, folder: Path) -> None:
    server = _server()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
    try:
        body = (folder / "body.json").read_bytes()
        connection.request("POST", case.argv[0], body, {"Content-Type": "application/json"})
        response = connection.getresponse()  # a handler that fails says nothing, which is no ZosimError
        json.loads(response.read())
        if response.status >= 500:
            raise AssertionError(f"the server answered {response.status}")
        if response.status >= 400:
            raise ZosimError("refused")
    finally:
        connection.close()


def _requests() -> list[Case]:
    _runtime()
    return [
        Case({"body.json": json.dumps(body).encode()}, (path,), kept=adapter()) for path, body in _REQUESTS
    ]


# -- answers -------------------------------------------------------------------------------------------------------

_ANSWERS: tuple[Mapping[str, Any], ...] = (
    {"data": [{"id": "base"}, {"id": "one"}]},
    {"choices": [{"index": 1, "logprobs": {"token_logprobs": [None, -1.5, -2.0]}}, {"index": 0, "logprobs": {"token_logprobs": [None, -1.0, -3.0]}}]},
    {"choices": [{"index": 0, "token_ids": [5, 3]}, {"index": 1, "token_ids": []}]},
    {"error": {"message": "no", "code": 400}},
)  # fmt: skip


class _Server:
    """In place of a server: it says which model it has, and then one answer to all that it is asked."""

    status, raw = 200, b'{"data": [{"id": "base"}]}'

    def ask(self, *_: Any) -> tuple[int, Any]:
        return self.status, read_answer(self.raw)


def _answered(case: Case, folder: Path) -> None:
    server = _Server()
    with patch("executors.serving.client.replace", lambda *_, **__: server):
        runner = RemoteServer("http://127.0.0.1:1")
    server.status, server.raw = int(case.argv[0]), (folder / "answer.json").read_bytes()
    for ask in (
        runner.adapters,
        lambda: runner.score([Request((5, 4, 7), 1, None), Request((9, 4, 7), 1, None)]),
        lambda: runner.generate([[5], [4]], None, max_new_tokens=2),
        lambda: runner.load("one", folder),
    ):
        try:
            ask()
        except ZosimError as error:
            refusal = error
    raise refusal


def _mutated_answer(generator: Random, case: Case) -> Case:
    return replace(mutated(generator, case), argv=(generator.choice(("200", "200", "400", "404", "500")),))


# -- files ---------------------------------------------------------------------------------------------------------


def _read(_case: Case, folder: Path) -> None:
    read_adapter(folder / "adapter", linear_shapes(_runtime()._model))


def _adapters() -> list[Case]:
    _runtime()
    return [Case(adapter())]


# -- commands ------------------------------------------------------------------------------------------------------


def _runner_of_this_process() -> None:
    """In place of a server at an address: its runtime. A few steps are enough, and nothing is served for ever."""
    import executors.serving.client
    import executors.serving.server
    from executors.serving.tuning import Tuning

    runtime = _runtime()
    executors.serving.client.RemoteServer = lambda *_, **__: runtime  # type: ignore[assignment, misc]
    executors.serving.server.ScoringServer = _ends_at_once  # type: ignore[assignment, misc]
    step = Tuning.step

    def one_of_a_few(tuning: Tuning, *arguments: Any, **more: Any) -> Any:
        if tuning.num_steps >= MOST_STEPS:
            raise ZosimError("more steps are left out here")
        return step(tuning, *arguments, **more)

    if Tuning.step.__name__ != one_of_a_few.__name__:
        Tuning.step = one_of_a_few  # type: ignore[method-assign]


MOST_STEPS = 4


def _ends_at_once(*_: object, **__: object) -> Any:
    raise ZosimError("serving is left out here")


@functools.cache
def _tuning() -> dict[str, bytes]:
    """The files of a tuning of two steps."""
    _runner_of_this_process()
    out = seeds.folder() / "tuning"
    model, data = seeds.folder() / "model", seeds.folder() / "data.jsonl"
    seeds.zosim("adapt", "--model", model, "--data", data, "--steps", 2, "--batch", 2, "-o", out)
    return {f"tuning/{name}": (out / name).read_bytes() for name in ("tuning.json", "steps.jsonl")}


def _versions() -> dict[str, bytes]:
    state = json.dumps({"name": "served", "history": ["one", "two"]}).encode()
    files = {
        f"versions/{version}/{Path(name).name}": content
        for version in ("one", "two")
        for name, content in adapter().items()
    }
    return {"versions/served.json": state, **files}


def _model_and_data() -> dict[str, bytes]:
    return {**seeds.model(), "data.jsonl": seeds.data()}


SERVING: tuple[Target, ...] = (
    Target("request to a server", _requests, _asked, mutated, 12),
    Target("answer of a server", lambda: [Case({"answer.json": json.dumps(answer).encode()}, ("200",)) for answer in _ANSWERS], _answered, _mutated_answer, 20),
    Target("adapter", _adapters, _read, _mutated_weights, 15),
    command("serve", "--model model --adapter one=adapter --port 0", adapter, kept=seeds.model, stop=_runner_of_this_process, quick=6),
    command("adapt", "--model model --data data.jsonl --steps 3 --batch 2 -o tuning", _tuning, kept=_model_and_data, stop=_runner_of_this_process, quick=8),
    command(
        "canary",
        ["versions one --data data.jsonl --model model --examples 2 --promote", "versions --roll-back", "versions new --adapter adapter --data data.jsonl"],
        lambda: {"versions/served.json": _versions()["versions/served.json"]},
        kept=lambda: _model_and_data() | _versions() | adapter(),
        stop=_runner_of_this_process,
        quick=8,
    ),
)  # fmt: skip
