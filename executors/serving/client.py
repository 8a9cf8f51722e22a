"""A server behind the OpenAI-compatible protocol: zosim's own server, or vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from executors.json_server import JsonServer
from executors.models.mapped import digest_of_files
from executors.serving.runner import Request
from topology.errors import ModelError, RunError

_NUM_CONNECTIONS = 8


class RemoteServer:
    """A server at an address.

    - `url`: such as ``http://127.0.0.1:8000``. vLLM is started with ``--enable-lora``, a ``--max-lora-rank`` as large as the
      increments', and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`` in its environment; both read adapters from a directory, so that
      they share a file system.
    - `model`: what the server calls the base; by default the first that it names.
    - `priority`: of scorings, lower ones first; vLLM takes one under ``--scheduling-policy priority`` alone.

    Raises RunError if nothing answers there, or it does not serve `model`.
    """

    def __init__(
        self, url: str, model: str | None = None, *, timeout_s: float = 60.0, priority: int | None = None
    ) -> None:
        server = JsonServer.at(url, "server", timeout_s)
        # Addresses are given with /v1 and without.
        self._server = replace(server, path=server.path.rstrip("/").removesuffix("/v1"))
        self.url = url
        self.priority = priority
        self.base_dtype: str | None = None
        self._declared_digest: str | None = None
        self._root: str | None = None
        served = self._models()
        if model is not None and model not in served:
            raise RunError(
                f"the server at {url} does not serve {model!r}", hint="it serves " + ", ".join(served)
            )
        self.model = model or served[0]

    def _models(self) -> tuple[str, ...]:
        answer = self._call("GET", "/v1/models")
        try:
            names = tuple(str(entry["id"]) for entry in answer["data"])
            declared: Mapping[str, Any] = next(
                (entry for entry in answer["data"] if isinstance(entry.get("base_digest"), str)), {}
            )
            roots = [entry.get("root") for entry in answer["data"] if entry.get("parent") is None]
        except (KeyError, TypeError, AttributeError) as error:
            raise self._strange("/v1/models", answer) from error
        if not names:
            raise RunError(f"the server at {self.url} serves no model")
        digest, root = declared.get("base_digest"), roots[0] if roots else None
        known = self._declared_digest or self._root
        if known not in (None, digest or root):
            raise RunError(
                f"the server at {self.url} has changed its base: {digest or root} instead of {known}",
                hint="restart it with the base of the tuning; the log has all steps until here",
            )
        self._declared_digest, self.base_dtype = digest, declared.get("base_dtype")
        self._root = root if isinstance(root, str) else None
        return names

    @cached_property
    def base_digest(self) -> str | None:
        """Hash of the base's weights: as zosim's server reports it, or of the directory that vLLM says it serves."""
        return self._declared_digest or (digest_of_files(self._root) if self._root else None)

    # -- what a server does -----------------------------------------------------------------------------------

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter, as :meth:`executors.serving.runner.ServingRunner.load`."""
        if name in self.adapters():
            self.unload(name)
        body = {"lora_name": name, "lora_path": str(directory.resolve())}
        self._call("POST", "/v1/load_lora_adapter", body)

    def unload(self, name: str) -> None:
        """Unload an adapter."""
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def adapters(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return tuple(name for name in self._models() if name != self.model)

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return log-probabilities of tokens; requests of different adapters are sent at the same time.

        What is for the base alone goes before: vLLM 0.32 on a CPU adds an adapter to it where one forward has both.
        """
        by_adapter: dict[str | None, list[int]] = {}
        for number, request in enumerate(requests):
            by_adapter.setdefault(request.adapter, []).append(number)
        scores: list[list[float]] = [[] for _ in requests]
        with ThreadPoolExecutor(min(_NUM_CONNECTIONS, max(1, len(by_adapter)))) as pool:
            bodies = [
                self._body(adapter, [requests[number].tokens for number in numbers])
                | {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
                for adapter, numbers in by_adapter.items()
            ]
            is_base = [adapter is None for adapter in by_adapter]
            first = [self._complete(body) for body, alone in zip(bodies, is_base, strict=True) if alone]
            others = [body for body, alone in zip(bodies, is_base, strict=True) if not alone]
            rest = list(pool.map(self._complete, others))
        numbers_in_order = sorted(by_adapter.items(), key=lambda entry: entry[0] is not None)
        for (_, numbers), answer in zip(numbers_in_order, [*first, *rest], strict=True):
            for number, choice in zip(numbers, self._choices(answer, len(numbers)), strict=True):
                scores[number] = self._logprobs(choice, requests[number])
        return scores

    def generate(
        self, prompts: Sequence[Sequence[int]], adapter: str | None, *, max_new_tokens: int
    ) -> list[list[int]]:
        """Return continuations in tokens, as :meth:`executors.serving.runner.ServingRunner.generate`."""
        body = self._body(adapter, prompts) | {"max_tokens": max_new_tokens, "return_token_ids": True}
        choices = self._choices(self._complete(body), len(prompts))
        try:
            return [[int(token) for token in choice["token_ids"]] for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise self._strange("/v1/completions", choices[0]) from error

    # -- answers -----------------------------------------------------------------------------------------------

    def _complete(self, body: Mapping[str, Any]) -> Any:
        answer = self._call("POST", "/v1/completions", body)
        named = answer.get("model") if isinstance(answer, dict) else None
        if named not in (None, body["model"]):
            raise RunError(
                f"the server at {self.url} was asked for {body['model']!r} and answered for {str(named)[:120]!r}",
                hint="a proxy in between may route requests elsewhere",
            )
        return answer

    def _body(self, adapter: str | None, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": adapter or self.model,
            "prompt": [list(prompt) for prompt in prompts],
            "temperature": 0.0,
        }
        return body if self.priority is None else body | {"priority": self.priority}

    def _choices(self, answer: Any, num: int) -> list[Mapping[str, Any]]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._strange("/v1/completions", answer) from error
        if len(choices) != num:
            raise self._strange("/v1/completions", f"{len(choices)} choices for {num} prompts")
        return choices

    def _logprobs(self, choice: Mapping[str, Any], request: Request) -> list[float]:
        try:
            values = choice["logprobs"]["token_logprobs"][: len(request.tokens)][request.first :]
        except (KeyError, TypeError) as error:
            raise self._strange("/v1/completions", choice) from error
        if len(values) != len(request.tokens) - request.first:
            raise RunError(
                f"the server at {self.url} scored {len(values) + request.first} tokens of {len(request.tokens)}: it has another "
                "tokenizer, or cuts prompts",
            )
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise RunError(
                f"the server at {self.url} returned log-probabilities that are not finite",
                hint="a token may be impossible, the weights or the adapter damaged, or --lr or --eps too large",
            )
        return [float(value) for value in values]

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        status, answer = self._server.ask(method, path, body)
        if status < 400:
            return answer
        message = answer
        if isinstance(answer, dict):
            refusal = answer.get("error", answer)
            message = refusal.get("message", refusal) if isinstance(refusal, dict) else refusal
        kind = ModelError if path.endswith("lora_adapter") else RunError
        hint = None
        if status == 404 and path.endswith("lora_adapter"):
            hint = (
                "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, so that adapters "
                "can be loaded"
            )
        raise kind(f"the server at {self.url} refused {path} ({status}): {str(message)[:300]}", hint=hint)

    def _strange(self, path: str, answer: object) -> RunError:
        return RunError(
            f"what answers at {self.url} is no server of this protocol: {path} gave {str(answer)[:120]}"
        )
