"""The built-in runtime behind the OpenAI-compatible protocol, on loopback.

Of the protocol there is what steps need: ``/v1/completions`` with prompts of tokens, ``echo`` and ``logprobs``, or greedy text; ``/v1/models``; ``/health``;
and, as vLLM has them, ``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter``, and a ``priority``, lower ones first.

Scorings that wait together run in one forward, whichever adapters they are for; so do texts, token by token. Those of another priority wait
until none of a lower one does.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from executors.datasets.generation import continued_by
from executors.serving.engine import Request
from executors.serving.runtime import Runtime
from topology.errors import DataError, RunError, ZosimError
from topology.reading import parse_json
from topology.validation import readable

LOOPBACK = "127.0.0.1"
_MOST_BYTES = 64 << 20
_MOST_TOKENS = 16_384
"""Tokens of one forward: requests behind them wait for the next."""


class Completion(BaseModel):
    """Body of a request to ``/v1/completions``."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    prompt: list[list[int]] = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=0, le=4096)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=0)
    temperature: float = Field(default=0.0, ge=0.0, le=0.0)
    priority: int = 0


class _Load(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: str = Field(min_length=1)
    lora_path: str = ""


_Kind = Literal["scores", "next tokens"]


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    kind: _Kind = field(compare=False)
    requests: list[Request] = field(compare=False)
    answers: Future[list[Any]] = field(compare=False)


class Batcher:
    """Runs the forwards that wait, those of one kind and of the lowest priority together, on a thread of its own.

    Parameters
    ----------
    runtime : Runtime
        Called by no other thread but through :meth:`alone`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._at_work = threading.Lock()
        self._is_over = False
        self._number = 0
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    def score(self, requests: list[Request], priority: int) -> list[list[float]]:
        """Return scores once their turn has come."""
        return self._wait("scores", requests, priority)

    def generate(
        self, prompts: list[list[int]], adapter: str | None, priority: int, *, max_new_tokens: int
    ) -> list[list[int]]:
        """Return continuations, each token of which waits for its turn."""
        return continued_by(
            lambda sequences: self._wait(
                "next tokens", [Request(tokens, 1, adapter) for tokens in sequences], priority
            ),
            list(map(tuple, prompts)),
            self.runtime.generation(max_new_tokens),
        )

    def _wait(self, kind: _Kind, requests: list[Request], priority: int) -> list[Any]:
        with self._changed:
            if self._is_over:
                raise ConnectionAbortedError("the server has ended")
            self._number += 1
            entry = _Waiting(priority, self._number, kind, requests, Future())
            self._waiting.append(entry)
            self._changed.notify()
        return entry.answers.result()

    def alone(self, action: Callable[[], Any]) -> Any:
        """Do something with the runtime between two forwards."""
        with self._at_work:
            return action()

    def close(self) -> None:
        """End the thread; what waits is refused."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        for entry in self._waiting:
            entry.answers.set_exception(ConnectionAbortedError("the server has ended"))

    def _work(self) -> None:
        while (chosen := self._next()) is not None:
            with self._at_work:
                self._answer(chosen)

    def _next(self) -> list[_Waiting] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over:
                return None
            first = min(self._waiting)
            chosen: list[_Waiting] = []
            num_tokens = 0
            for entry in sorted(self._waiting):
                if (entry.priority, entry.kind) != (first.priority, first.kind):
                    continue
                num_tokens += sum(len(request.tokens) for request in entry.requests)
                if not chosen or num_tokens <= _MOST_TOKENS:
                    chosen.append(entry)
            self._waiting = [entry for entry in self._waiting if entry not in chosen]
            return chosen

    def _answer(self, chosen: list[_Waiting]) -> None:
        make = self.runtime.score if chosen[0].kind == "scores" else self.runtime.next_tokens
        requests = [request for entry in chosen for request in entry.requests]
        try:
            answers = [answer for part in _in_parts(requests) for answer in make(part)]
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            if len(chosen) == 1:
                chosen[0].answers.set_exception(error)
                return
            for entry in chosen:  # whose mistake it was
                self._answer([entry])
            return
        begin = 0
        for entry in chosen:
            end = begin + len(entry.requests)
            entry.answers.set_result(answers[begin:end])
            begin = end


def _in_parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yield requests in parts of which a forward has memory: one of very many is several forwards."""
    part: list[Request] = []
    num_tokens = 0
    for request in requests:
        num_tokens += len(request.tokens)
        if part and num_tokens > _MOST_TOKENS:
            yield part
            part, num_tokens = [], len(request.tokens)
        part.append(request)
    yield part


def _or_none(score: float) -> float | None:
    """Return a score, or nothing where it is no number that JSON has."""
    return score if math.isfinite(score) else None


class ScoringServer(ThreadingHTTPServer):
    """Serves a runtime on loopback.

    Parameters
    ----------
    runtime : Runtime
    model : str
        What the base is called.
    port : int
        0: any that is free.

    Raises
    ------
    RunError
        If something listens there already.
    """

    daemon_threads = True

    def __init__(self, runtime: Runtime, model: str, port: int = 0) -> None:
        self.model = model
        self.runtime = runtime
        self.batcher = Batcher(runtime)  # a server that cannot listen closes it
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise RunError(
                f"nothing can be served at {LOOPBACK}:{port}: {error.strerror or error}",
                hint="give another --port, or 0 for any that is free",
            ) from error

    @property
    def url(self) -> str:
        """Where the server is."""
        return f"http://{LOOPBACK}:{self.server_address[1]}"

    def server_close(self) -> None:
        """End the server and the thread that scores."""
        super().server_close()
        self.batcher.close()


class _Handler(BaseHTTPRequestHandler):
    server: ScoringServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer({})
        elif self.path == "/v1/models":
            base = {
                "id": self.server.model,
                "object": "model",
                "base_digest": self.server.runtime.base_digest,
                "base_dtype": self.server.runtime.base_dtype,
            }
            adapters = [{"id": name, "object": "model"} for name in self.server.runtime.adapters()]
            self._answer({"object": "list", "data": [base, *adapters]})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path}")

    def do_POST(self) -> None:
        actions = {
            "/v1/completions": self._complete,
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of {length or 'unknown'} bytes")
            return
        body = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json" or not self._is_for_this_machine():
            # A page in a browser may send anything else to any address, also to this one, and by a name of its own.
            self._refuse(HTTPStatus.FORBIDDEN, "requests are application/json, for this machine by its name")
            return
        action = actions.get(self.path)
        if action is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path}")
            return
        try:
            self._answer(action(parse_json(body.decode(), "the request is no JSON", DataError)))
        except (ZosimError, ValueError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except LookupError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error.args[0]))
        except Exception as error:  # noqa: BLE001 - a failure here is no reason to hang up on whoever asked
            words = f"the server failed: {type(error).__name__}: {error}"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, words[:300])

    def _is_for_this_machine(self) -> bool:
        with suppress(ValueError):  # no host at all
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in ("localhost", LOOPBACK)
        return False

    # -- actions -----------------------------------------------------------------------------------------------

    def _complete(self, body: Any) -> Mapping[str, Any]:
        with readable("the request", DataError, model=Completion):
            asked = Completion.model_validate(body)
        adapter = self._adapter(asked.model)
        if asked.echo and asked.max_tokens == 0 and asked.logprobs is not None:
            requests = [Request(tuple(tokens), 1, adapter) for tokens in asked.prompt]
            scores = self.server.batcher.score(requests, asked.priority)
            choices = [
                {
                    "index": index,
                    "text": "",
                    "finish_reason": "length",
                    "logprobs": {
                        "token_logprobs": [None, *map(_or_none, score)],
                        "tokens": [str(t) for t in tokens],
                    },
                }
                for index, (tokens, score) in enumerate(zip(asked.prompt, scores, strict=True))
            ]
        elif not asked.echo and asked.logprobs is None:
            texts = self.server.batcher.generate(
                asked.prompt, adapter, asked.priority, max_new_tokens=asked.max_tokens
            )
            choices = [
                {"index": index, "text": "", "token_ids": text, "finish_reason": "stop"}
                for index, text in enumerate(texts)
            ]
        else:
            raise DataError(
                "prompts are scored with echo=true, logprobs=0 and max_tokens=0, or continued without echo and logprobs"
            )
        return {
            "id": f"cmpl-{time.monotonic_ns()}",
            "object": "text_completion",
            "model": asked.model,
            "choices": choices,
        }

    def _adapter(self, model: str) -> str | None:
        if model == self.server.model:
            return None
        if model not in self.server.runtime.adapters():
            raise LookupError(f"the model {model!r} does not exist")
        return model

    def _load(self, body: Any) -> Mapping[str, Any]:
        with readable("the request", DataError, model=_Load):
            asked = _Load.model_validate(body)
        if asked.lora_name == self.server.model:
            raise DataError(f"{asked.lora_name!r} is what the base is called")
        self.server.batcher.alone(lambda: self.server.runtime.load(asked.lora_name, Path(asked.lora_path)))
        return {"message": f"adapter {asked.lora_name!r} loaded"}

    def _unload(self, body: Any) -> Mapping[str, Any]:
        with readable("the request", DataError, model=_Load):
            asked = _Load.model_validate(body)
        if asked.lora_name not in self.server.runtime.adapters():
            raise LookupError(f"the adapter {asked.lora_name!r} does not exist")
        self.server.batcher.alone(lambda: self.server.runtime.unload(asked.lora_name))
        return {"message": f"adapter {asked.lora_name!r} unloaded"}

    # -- answers -----------------------------------------------------------------------------------------------

    def _answer(self, body: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._answer({"error": {"message": message, "type": status.phrase, "code": status.value}}, status)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Write nothing."""
