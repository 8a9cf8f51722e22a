"""The built-in serving runner: requests of any adapters in one packed forward over one read of the base.

:class:`Batcher` lets forwards wait for their turn: those of one kind and of the lowest priority run together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from costmodel.models.model_spec import HEAD
from executors.datasets.batches import pad
from executors.datasets.generation import Generation, continued_by
from executors.datasets.prompts import Example
from executors.formats import format_of
from executors.labels import IGNORED_LABEL
from executors.models.batched import BatchedModel, LowRankPath
from executors.models.packing import Packing, joined
from executors.models.quantized import encode
from executors.models.recording_blocks import StepCache
from executors.models.weight_files import weights_digest
from executors.runs.adapters import attach
from executors.serving.peft import BASE_DIGEST, Adapter, linear_shapes, read_adapter
from executors.serving.runner import Request
from topology.errors import DataError, ModelError
from zosim.plans import LowBits


class Runtime:
    """A frozen base with adapters.

    - `model`: a causal language model, which the runtime has for itself from now on.
    - `low_bits`: format that the linears of blocks are quantized to.
    - `stop_tokens`: tokens that end a generated text.

    Requests of one adapter lie side by side in the row, apart from those of others: a linear adds an adapter's part to its own tokens, attention
    sees the tokens of one sequence, and what sequences begin with is computed once for those of one adapter alone.

    Raises ModelError if the model cannot be run on packed sequences.
    """

    def __init__(
        self, model: nn.Module, *, low_bits: LowBits | None = None, stop_tokens: tuple[int, ...] = ()
    ) -> None:
        self.stop_tokens = stop_tokens
        self.max_positions: int = getattr(
            model.config.get_text_config(),  # type: ignore[operator, union-attr]
            "max_position_embeddings",
            1 << 30,
        )
        self._model = model
        self.shapes = linear_shapes(model)
        self.base_dtype = format_of(next(model.parameters()).dtype)
        attach(model, "linears")
        if low_bits is not None and low_bits.quantizes_weights:
            self.base_digest  # noqa: B018 - of the numbers, before they are quantized
            encode(model, low_bits, self.base_dtype)
        self._batched = BatchedModel(model)
        self._weights: dict[str, Any] = {path: model.get_submodule(path).weight for path in self.shapes}
        self._adapters: dict[str, Adapter] = {}

    @cached_property
    def base_digest(self) -> str:
        """Hash of the base's weights."""
        return weights_digest(self._model)

    # -- adapters ----------------------------------------------------------------------------------------------

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter, as :meth:`executors.serving.runner.ServingRunner.load`."""
        self.add(name, self.read(directory))

    def read(self, directory: Path) -> Adapter:
        """Read an adapter of this base without adding it: files may be read while forwards run.

        Raises ModelError if it does not belong beside this base.
        """
        adapter = read_adapter(directory, self.shapes)
        wanted = adapter.facts.get(BASE_DIGEST)
        if wanted is not None and wanted != self.base_digest:
            raise ModelError(
                f"{directory} is an adapter of another base: its base has digest {wanted}, these weights "
                f"have {self.base_digest}",
                hint="serve the base of the run, in the format of the run",
            )
        return adapter

    def add(self, name: str, adapter: Adapter) -> None:
        """Add an adapter to the base, replacing one of the same name."""
        self._adapters[name] = adapter

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises ModelError if there is none of that name."""
        if self._adapters.pop(name, None) is None:
            raise ModelError(
                f"no adapter is called {name!r}", hint="adapters are " + (", ".join(self._adapters) or "none")
            )

    def adapters(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return tuple(self._adapters)

    # -- forwards ----------------------------------------------------------------------------------------------

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return log-probabilities of tokens, as :meth:`executors.serving.runner.ServingRunner.score`."""
        scores: list[list[float]] = [[] for _ in requests]
        for request in requests:
            if not 1 <= request.first <= len(request.tokens):
                raise DataError(
                    f"a request of {len(request.tokens)} tokens has none to score from token {request.first} on",
                    hint="the first token has no token before it to predict it",
                )
        requested = [number for number, request in enumerate(requests) if request.first < len(request.tokens)]
        if not requested:
            return scores
        order, outputs, packing = self._predicting([requests[number] for number in requested])
        values: list[float] = []
        begin = 0
        for logits in self._logits(outputs):
            targets = packing.targets[len(values) : len(values) + len(logits), None]
            values += nn.functional.log_softmax(logits.float(), -1).gather(1, targets)[:, 0].tolist()
        for number in (requested[index] for index in order):
            end = begin + len(requests[number].tokens) - requests[number].first
            scores[number] = values[begin:end]
            begin = end
        return scores

    def generate(
        self, prompts: Sequence[Sequence[int]], adapter: str | None, *, max_new_tokens: int
    ) -> list[list[int]]:
        """Return continuations, as :meth:`executors.serving.runner.ServingRunner.generate`; a forward for every token."""
        return continued_by(
            lambda sequences: self.next_tokens([Request(tokens, 1, adapter) for tokens in sequences]),
            list(map(tuple, prompts)),
            self.generation(max_new_tokens),
        )

    def generation(self, max_new_tokens: int) -> Generation:
        """Return the rules of generation: what ends a text, and its maximum length."""
        return Generation(list, self.stop_tokens, max_new_tokens, self.max_positions)

    def next_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Return the most probable next token of each request; :attr:`Request.first` is ignored."""
        longer = [replace(one, tokens=(*one.tokens, 0), first=len(one.tokens)) for one in requests]
        for request in longer:
            if request.first < 1:
                raise DataError("the prompt is empty, and the model has no token to start from")
        order, outputs, _ = self._predicting(longer)
        most_probable = [token for logits in self._logits(outputs) for token in logits.argmax(-1).tolist()]
        tokens = [0] * len(requests)
        for index, token in zip(order, most_probable, strict=True):
            tokens[index] = token
        return tokens

    @torch.no_grad()
    def _logits(self, outputs: Tensor) -> Iterator[Tensor]:
        """Yield logits of the last block's outputs, of as many tokens at a time as their memory allows."""
        num_rows = max(1, _MAX_LOGITS // self._batched.embedding.num_embeddings)
        for rows in outputs.split(num_rows, dim=1):
            yield self._batched.logits(rows)[0]

    @torch.no_grad()
    def _predicting(self, requests: Sequence[Request]) -> tuple[list[int], Tensor, Packing]:
        """Return the order of requests in the packed row, and the last block's outputs before each token to score."""
        by_adapter: dict[str | None, list[int]] = {}
        for number, request in enumerate(requests):
            by_adapter.setdefault(request.adapter, []).append(number)
            self._check(request)
        packings = [
            self._batched.pack(_batch([requests[number] for number in part])) for part in by_adapter.values()
        ]
        row, spans = joined(packings)
        adapters = [None if name is None else self._adapters[name] for name in by_adapter]
        paths: dict[nn.Parameter, list[LowRankPath]] = {}
        for adapter, where in zip(adapters, spans, strict=True):
            for path, (inner, outer) in adapter.factors.items() if adapter else ():
                side = LowRankPath(inner.T, outer.T.unsqueeze(0), where)
                paths.setdefault(self._weights[path], []).append(side)
        cache, hidden = StepCache(packing=row), None
        for segment in self._batched.segments:
            if segment == HEAD:
                break
            hidden = self._batched.run_batched(segment, {}, cache, hidden, paths, 1)
        assert hidden is not None
        outputs = self._batched.predicting(hidden, row)
        return [number for part in by_adapter.values() for number in part], outputs, row

    def _check(self, request: Request) -> None:
        if request.adapter is not None and request.adapter not in self._adapters:
            raise ModelError(
                f"no adapter is called {request.adapter!r}",
                hint="adapters are " + (", ".join(self._adapters) or "none"),
            )
        vocabulary = self._batched.embedding.num_embeddings
        if not all(0 <= token < vocabulary for token in request.tokens):
            raise DataError(f"a request has a token outside the vocabulary of {vocabulary}")
        if len(request.tokens) > self.max_positions + 1:
            raise DataError(
                f"a request has {len(request.tokens)} tokens, more than the {self.max_positions} positions "
                "of the model"
            )


def _batch(requests: Sequence[Request]) -> dict[str, Tensor]:
    examples = [
        Example(request.tokens, (IGNORED_LABEL,) * request.first + request.tokens[request.first :])
        for request in requests
    ]
    batch = pad(examples)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


# -- forwards in turn ----------------------------------------------------------------------------------------------


_MAX_TOKENS = 16_384
"""Tokens of one forward: requests behind them wait for the next."""
_MAX_PADDED = 2**20
"""Tokens of one forward where each request is as long as the longest: they are laid out so before they are packed."""
_MAX_LOGITS = 2**26
"""Logits at a time; in float32 with their softmax half a GiB."""

OutputType = Literal["scores", "next tokens"]


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    output_type: OutputType = field(compare=False)
    requests: Sequence[Request] = field(compare=False)
    answers: Future[list[Any]] = field(compare=False)


class Batcher:
    """Runs forwards on one thread, in order of priority (`runtime`: called by no other thread but through :meth:`exclusively`)."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._at_work = threading.Lock()
        self._is_over = False
        self._number = 0
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    def submit(
        self, output_type: OutputType, requests: Sequence[Request], priority: int
    ) -> Future[list[Any]]:
        """Queue requests, and return the future of their answers; one that is cancelled before its turn costs nothing."""
        with self._changed:
            self._number += 1
            entry = _Waiting(priority, self._number, output_type, requests, Future())
            if self._is_over:
                entry.answers.cancel()
            else:
                self._waiting.append(entry)
                self._changed.notify()
        return entry.answers

    def exclusively(self, action: Callable[[], Any]) -> Any:
        """Run an action on the runtime between two forwards."""
        with self._at_work:
            return action()

    def close(self) -> None:
        """End the thread after the current forward, and cancel what waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        for entry in self._waiting:
            entry.answers.cancel()

    def _work(self) -> None:
        while (chosen := self._next()) is not None:
            with self._at_work:
                self._answer(chosen)

    def _next(self) -> list[_Waiting] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over:
                return None
            # By priority, then by arrival: entries like the first one, as many as fit a forward.
            self._waiting = sorted(entry for entry in self._waiting if not entry.answers.cancelled())
            chosen: list[_Waiting] = []
            num_tokens = 0
            for entry in self._waiting:
                first = self._waiting[0]
                if (entry.priority, entry.output_type) != (first.priority, first.output_type):
                    continue
                num_tokens += sum(len(request.tokens) for request in entry.requests)
                if not chosen or num_tokens <= _MAX_TOKENS:
                    chosen.append(entry)
            taken = {entry.number for entry in chosen}
            self._waiting = [entry for entry in self._waiting if entry.number not in taken]
        return [entry for entry in chosen if entry.answers.set_running_or_notify_cancel()]

    def _answer(self, chosen: Sequence[_Waiting]) -> None:
        if not chosen:
            return
        make = self.runtime.score if chosen[0].output_type == "scores" else self.runtime.next_tokens
        requests = [request for entry in chosen for request in entry.requests]
        try:
            answers = [answer for part in in_parts(requests) for answer in make(part)]
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


def in_parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yield requests in parts that fit the memory of one forward."""
    part: list[Request] = []
    num_tokens = longest = 0
    for request in requests:
        num_tokens += len(request.tokens)
        longest = max(longest, len(request.tokens))
        if part and (num_tokens > _MAX_TOKENS or longest * (len(part) + 1) > _MAX_PADDED):
            yield part
            part, num_tokens = [], len(request.tokens)
            longest = num_tokens
        part.append(request)
    yield part
