"""The built-in runtime behind the OpenAI-compatible protocol, on loopback.

Of the protocol there is what steps need: ``/v1/completions`` with prompts of tokens, ``echo`` and ``logprobs``, or greedy text; ``/v1/models``; ``/health``;
and, as vLLM has them, ``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter``, and a ``priority``, lower ones first.

Scorings that wait together run in one forward, whichever adapters they are for; so do texts, token by token. Those of another priority wait
until none of a lower one does.

Nothing that a client does or leaves undone may hold up the others: bodies, requests, connections and every wait for a client are bounded
(:class:`ClientLimits`), and a refusal for lack of capacity says when to come back.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar, cast

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from executors.datasets.generation import continuing
from executors.serving.runner import Request
from executors.serving.runtime import Batcher, OutputType, Runtime, in_parts
from topology.errors import DataError, RunError, ZosimError
from topology.reading import parse_json
from topology.validation import readable

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_RETRY_AFTER_S = 1
_GONE = 499
"""Status in the log of a request whose client did not wait for the answer."""


def _max_connections() -> int:
    """Return how many connections this process may hold, given its limit of open files."""
    try:
        import resource
    except ImportError:  # Windows
        return 500
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1000 if soft == resource.RLIM_INFINITY else max(8, min(1000, soft - 100))


@dataclass(frozen=True)
class ClientLimits:
    """What clients may take of a server."""

    requests: int = 256  # requests that are waiting or running; one more is answered 503
    # Adapters beside the base. One more is refused until another is unloaded; one of a name that is there takes that
    # one's place.
    adapters: int = 256
    # Open connections. One more takes the place of the one that has been idle for longest; where none is idle, it is
    # closed.
    connections: int = field(default_factory=_max_connections)
    # body_bytes, held_bytes: size of one body, and of all bodies of requests that are not answered yet.
    body_bytes: int = 64 << 20
    held_bytes: int = 256 << 20
    # Seconds until a connection has sent the head of a request, the first one or one that it has begun.
    head_s: float = 10.0
    idle_s: float = 30.0  # seconds that a connection may stay open after an answer
    # body_s, write_s: seconds to send a body, and to go on reading an answer.
    body_s: float = 30.0
    write_s: float = 30.0
    answer_s: float = 600.0  # seconds until a request is answered; one that takes longer is answered 503
    grace_s: float = 10.0  # seconds that requests have to be answered once the server is to end


_USUALLY_ONE = {"n", "best_of", "repetition_penalty"}
_NOT_SERVED = {
    "stream", "stop", "stop_token_ids", "suffix", "logit_bias", "presence_penalty", "frequency_penalty", "min_tokens",
    "ignore_eos", "use_beam_search", "response_format", "guided_json", "guided_regex", "guided_choice",
}  # fmt: skip
"""Fields that change an answer elsewhere; others that are not known change nothing of a greedy text or a score."""


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

    @model_validator(mode="before")
    @classmethod
    def _asks_for_no_more(cls, body: object) -> object:
        for name, value in body.items() if isinstance(body, dict) else ():
            one = name in _USUALLY_ONE and type(value) is not bool and value == 1
            if name in _NOT_SERVED | _USUALLY_ONE and value not in (None, 0, "", [], {}) and not one:
                shown = json.dumps(value, ensure_ascii=False)
                raise ValueError(f"{name}={shown:.60} is not served: leave {name} out")
        return body

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_of_tokens(cls, prompt: object) -> object:
        if not isinstance(prompt, list) or not all(isinstance(tokens, list) for tokens in prompt):
            message = (
                "must be a list of lists of token ids, such as [[2, 31, 41]]; the server tokenizes no text"
            )
            raise ValueError(message)
        return prompt


class _Adapter(BaseModel):
    """Body of a request to load an adapter or to unload it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: str = Field(min_length=1)
    lora_path: str = ""


class ScoringServer:
    """Serves a runtime on loopback.

    - `model`: what the base is called.
    - `port`: 0: any that is free.
    - `log`: called with a line for each request: method, path, status and milliseconds; nothing of what was sent.

    Raises RunError if something listens there already.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: str,
        port: int = 0,
        *,
        limits: ClientLimits | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.limits = limits or ClientLimits()
        try:
            # Connections that come before the loop accepts them wait in the queue of the socket.
            self._listening = socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
        except OSError as error:
            raise RunError(
                f"cannot listen at {LOOPBACK}:{port}: {os.strerror(error.errno) if error.errno else error}",
                hint="give another --port, or 0 for a free one",
            ) from error
        self.port: int = self._listening.getsockname()[1]
        self.batcher = Batcher(runtime)
        self._is_stopped = threading.Event()
        self._is_stopped.set()
        self._application = _Application(runtime, self.batcher, model, self.limits)
        routed = self._application.routed()
        self._loop = _Loop(
            uvicorn.Config(
                _logged(routed, log) if log else routed,
                # Given by name: what else is installed must not change what serves.
                loop="asyncio",
                http=cast("type[asyncio.Protocol]", partial(_Connection, limits=self.limits)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=cast("int", self.limits.idle_s),
                timeout_graceful_shutdown=cast("int", self.limits.grace_s + 5),
            ),
            self._application.is_ending,
            self.limits.grace_s,
        )

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{LOOPBACK}:{self.port}"

    def serve_forever(self) -> None:
        """Answer until :meth:`shutdown`, or a signal that ends the process; then the requests at hand are still answered.

        On the main thread a signal is raised again at the end: KeyboardInterrupt for SIGINT.
        """
        self._is_stopped.clear()
        try:
            self._loop.run(sockets=[self._listening])
        finally:
            self._is_stopped.set()

    def shutdown(self) -> None:
        """Let :meth:`serve_forever`, on another thread, answer what it has and return."""
        self._loop.should_exit = True
        self._is_stopped.wait()

    def close(self) -> None:
        """Free the port, and end the thread that scores."""
        self._listening.close()
        self.batcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Loop(uvicorn.Server):
    """A uvicorn server that answers requests that outlast the grace period."""

    def __init__(self, config: uvicorn.Config, is_ending: asyncio.Event, grace_s: float) -> None:
        super().__init__(config)
        self._is_ending = is_ending
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._is_ending.set)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # a second signal: the grace is over
            self._is_ending.set()
        else:
            super().handle_exit(sig, frame)


class _Connection(H11Protocol):
    """A connection that does not wait for its client for ever; uvicorn's waits for a head, and for a reader, without end."""

    def __init__(self, *arguments: Any, limits: ClientLimits, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._limits = limits
        self._for_head: asyncio.TimerHandle | None = None
        self._for_reader: asyncio.TimerHandle | None = None
        self.idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            others = cast("set[_Connection]", self.connections) - {self}
            idle = [other for other in others if other.is_idle and not other.transport.is_closing()]
            surplus = min(idle, key=lambda other: other.idle_since, default=self)
            surplus.transport.abort()
        self.idle_since = self.loop.time()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._for_head, self._for_reader):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._for_reader = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._for_reader is not None:
            self._for_reader.cancel()

    def _watch_head(self) -> None:
        """Limit the time of a request's head, from the moment that the connection is idle until the head is there."""
        if not self.is_idle:
            if self._for_head is not None:
                self._for_head.cancel()
            self._for_head = None
        elif self._for_head is None:
            self._for_head = self.loop.call_later(self._limits.head_s, self.transport.abort)


class _Application:
    """The application: reads requests, queues them, and answers.

    Attributes
    ----------
    is_ending : asyncio.Event
        Set once those that are still waiting are to be refused.
    num_held_bytes : int
        Size of the bodies of requests that are not answered yet.
    """

    def __init__(self, runtime: Runtime, batcher: Batcher, model: str, limits: ClientLimits) -> None:
        self.is_ending = asyncio.Event()
        self._runtime = runtime
        self._batcher = batcher
        self._model = model
        self._limits = limits
        self._num_requests = 0
        self.num_held_bytes = 0
        self._hashing = asyncio.Lock()
        # Of its own, and one: a file system that hangs holds up adapters alone.
        self._loading = ThreadPoolExecutor(1, "loading adapters")

    def routed(self) -> ASGIApp:
        """Return the routed application; host names other than localhost are refused (DNS rebinding)."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", partial(self._post, self._complete), methods=["POST"]),
                Route("/v1/load_lora_adapter", partial(self._post, self._load), methods=["POST"]),
                Route("/v1/unload_lora_adapter", partial(self._post, self._unload), methods=["POST"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", LOOPBACK])],
            exception_handlers={
                HTTPException: _refused_by_status,
                ZosimError: _refused,
                MemoryError: _failed,
                Exception: _failed,  # and its traceback is written to stderr
            },
        )
        app.router.redirect_slashes = False
        return app

    # -- requests ----------------------------------------------------------------------------------------------

    async def _health(self, _request: HttpRequest) -> Response:
        return _json({})

    async def _models(self, _request: HttpRequest) -> Response:
        async with self._hashing:  # by one thread, however many ask
            digest = await run_in_threadpool(lambda: self._runtime.base_digest)
        base = {
            "id": self._model,
            "object": "model",
            "base_digest": digest,
            "base_dtype": self._runtime.base_dtype,
        }
        adapters = [{"id": name, "object": "model"} for name in self._runtime.adapters()]
        return _json({"object": "list", "data": [base, *adapters]})

    async def _post(
        self, action: Callable[[bytes], Coroutine[Any, Any, Mapping[str, Any]]], request: HttpRequest
    ) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # which a page of another origin may not send unasked
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "requests are application/json")
        body = bytearray()
        try:
            await self._receive(request, body)
            if self._num_requests >= self._limits.requests:
                raise _busy(f"{self._num_requests} requests are waiting or running")
            self._num_requests += 1
            try:
                answer = await self._unless_over(request, action(bytes(body)))
            finally:
                self._num_requests -= 1
            return await run_in_threadpool(_json, answer)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        finally:
            self.num_held_bytes -= len(body)

    async def _receive(self, request: HttpRequest, body: bytearray) -> None:
        """Read a body, and count its bytes as held."""
        limits = self._limits
        if int(request.headers.get("content-length", "0")) > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        try:
            async with asyncio.timeout(limits.body_s):
                async for chunk in request.stream():
                    body += chunk
                    self.num_held_bytes += len(chunk)
                    if len(body) > limits.body_bytes:
                        raise _too_large(limits.body_bytes)
                    if self.num_held_bytes > limits.held_bytes:
                        raise _busy(f"the requests at hand have more than {limits.held_bytes >> 20} MiB")
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_s:g} s"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, message) from None

    async def _unless_over(
        self, request: HttpRequest, work: Coroutine[Any, Any, Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return an answer; raise if the client disconnects, time is up, or the server ends."""
        answer = asyncio.ensure_future(work)
        gone, ending = (asyncio.ensure_future(wait) for wait in (_gone(request), self.is_ending.wait()))
        try:
            await asyncio.wait(
                {answer, gone, ending}, timeout=self._limits.answer_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                return answer.result()
            if gone.done():
                raise ClientDisconnect
            if ending.done():
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the server has ended")
            message = f"no answer within {self._limits.answer_s:g} s"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, message)
        finally:
            for task in (answer, gone, ending):
                task.cancel()

    # -- actions -----------------------------------------------------------------------------------------------

    async def _complete(self, body: bytes) -> Mapping[str, Any]:
        requested = await run_in_threadpool(_read, body, Completion)
        adapter = None if requested.model == self._model else requested.model
        if adapter is not None and adapter not in self._runtime.adapters():
            raise HTTPException(HTTPStatus.NOT_FOUND, f"the model {adapter!r} does not exist")
        choices: list[dict[str, Any]]
        if requested.echo and requested.max_tokens == 0 and requested.logprobs is not None:
            requests = [Request(tuple(tokens), 1, adapter) for tokens in requested.prompt]
            scores = await self._turn("scores", requests, requested.priority)
            choices = [
                {
                    "index": index,
                    "text": "",
                    "finish_reason": "length",
                    "logprobs": {
                        # JSON has no infinity: a token that is impossible has no number.
                        "token_logprobs": [None, *(x if math.isfinite(x) else None for x in score)],
                        "tokens": [str(t) for t in tokens],
                    },
                }
                for index, (tokens, score) in enumerate(zip(requested.prompt, scores, strict=True))
            ]
        elif not requested.echo and requested.logprobs is None:
            positions = self._runtime.max_positions
            if (longest := max(map(len, requested.prompt))) > positions:
                raise DataError(
                    f"a prompt has {longest} tokens, more than the {positions} positions of the model"
                )
            texts = await self._generate(requested.prompt, adapter, requested.priority, requested.max_tokens)
            # A token that ends a text is left out of it.
            most = [min(requested.max_tokens, positions - len(tokens)) for tokens in requested.prompt]
            choices = [
                {
                    "index": index,
                    "text": "",
                    "token_ids": text,
                    "finish_reason": "length" if len(text) >= most[index] else "stop",
                }
                for index, text in enumerate(texts)
            ]
        else:
            raise DataError(
                "unsupported request: to score, use echo=true, logprobs=0 and max_tokens=0; to continue, "
                "leave echo and logprobs out"
            )
        return {
            "id": f"cmpl-{time.monotonic_ns()}",
            "object": "text_completion",
            "model": requested.model,
            "choices": choices,
        }

    async def _generate(
        self, prompts: Sequence[Sequence[int]], adapter: str | None, priority: int, max_new_tokens: int
    ) -> list[list[int]]:
        """Return continuations, each token of which waits for its turn."""
        texts = continuing(list(map(tuple, prompts)), self._runtime.generation(max_new_tokens))
        try:
            sequences = next(texts)
            while True:
                requests = [Request(tokens, 1, adapter) for tokens in sequences]
                sequences = texts.send(await self._turn("next tokens", requests, priority))
        except StopIteration as end:
            answers: list[list[int]] = end.value
            return answers

    async def _turn(self, output_type: OutputType, requests: Sequence[Request], priority: int) -> list[Any]:
        """Return the answers to requests; those that fill more than a forward wait again for each, behind what others sent."""
        answers: list[Any] = []
        for part in in_parts(requests):
            next_answers: list[Any] = await asyncio.wrap_future(
                self._batcher.submit(output_type, part, priority)
            )
            answers += next_answers
        return answers

    async def _load(self, body: bytes) -> Mapping[str, Any]:
        requested = await run_in_threadpool(_read, body, _Adapter)
        if requested.lora_name == self._model:
            raise DataError(f"{requested.lora_name!r} is the name of the base")

        def load() -> None:
            there = self._runtime.adapters()
            if requested.lora_name not in there and len(there) >= self._limits.adapters:
                raise DataError(
                    f"{requested.lora_name!r} would be adapter {len(there) + 1}, but this server holds at most "
                    f"{self._limits.adapters}",
                    hint="unload one (/v1/unload_lora_adapter), or start the server with a larger --max-adapters",
                )
            adapter = self._runtime.read(Path(requested.lora_path))
            self._batcher.exclusively(lambda: self._runtime.add(requested.lora_name, adapter))

        await self._in_turn(load)
        return {"message": f"adapter {requested.lora_name!r} loaded"}

    async def _unload(self, body: bytes) -> Mapping[str, Any]:
        requested = await run_in_threadpool(_read, body, _Adapter)

        def unload() -> None:
            if requested.lora_name not in self._runtime.adapters():
                raise HTTPException(
                    HTTPStatus.NOT_FOUND, f"the adapter {requested.lora_name!r} does not exist"
                )
            self._batcher.exclusively(lambda: self._runtime.unload(requested.lora_name))

        await self._in_turn(unload)
        return {"message": f"adapter {requested.lora_name!r} unloaded"}

    async def _in_turn(self, action: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._loading, action)


async def _gone(request: HttpRequest) -> None:
    """Return once the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


_Body = TypeVar("_Body", bound=BaseModel)


def _read(body: bytes, model: type[_Body]) -> _Body:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the request is not UTF-8: {error.reason} at byte {error.start}") from None
    with readable("the request", DataError, model=model):
        return model.model_validate(parse_json(text, "the request is no JSON", DataError))


# -- answers -------------------------------------------------------------------------------------------------------


def _json(
    body: Mapping[str, Any], status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    error = {"message": message, "type": HTTPStatus(status).phrase, "code": int(status)}
    return _json({"error": error}, status, headers)


def _busy(message: str) -> HTTPException:
    return HTTPException(
        HTTPStatus.SERVICE_UNAVAILABLE, message, headers={"Retry-After": str(_RETRY_AFTER_S)}
    )


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {most_bytes >> 20} MiB")


async def _refused_by_status(_request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, error.detail, error.headers)


async def _refused(_request: HttpRequest, error: Exception) -> Response:
    return _refusal(HTTPStatus.BAD_REQUEST, str(error))


async def _failed(_request: HttpRequest, error: Exception) -> Response:
    """Answer with status 500 after a failure here, and keep the connection."""
    text = f"the server failed: {type(error).__name__}: {error}"
    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text[:300])


def _logged(app: ASGIApp, log: Callable[[str], None]) -> ASGIApp:
    """Wrap an application to log a line for each request, without query strings and bodies."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.perf_counter(), _GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            path = scope["raw_path"].decode("ascii", "replace")[:100]
            log(f"{scope['method']} {path} {status} {1e3 * (time.perf_counter() - begin):.1f} ms")

    return logged
