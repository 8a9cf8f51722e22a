"""`zosim serve`, `zosim adapt` and `zosim canary`: serve a model, tune adapters on the server, and promote versions of them."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executors.runs.learning_rate import LearningRate
from executors.runs.settings import RunConfig
from topology.errors import DataError, RunError
from zosim.config import PlanConfig, merge
from zosim.console import emit, stderr
from zosim.options import config_of, with_settings
from zosim.plans import ForwardPass
from zosim.plans.forward import USUAL_NEW_TOKENS

if TYPE_CHECKING:
    from executors.serving.client import RemoteServer

_Server = Annotated[str, typer.Option("--server", help="URL of the server, such as http://127.0.0.1:8000.")]
_Model = Annotated[
    str, typer.Option(help="Directory of the base model that the server serves.", show_default=False)
]
_Served = Annotated[
    str | None,
    typer.Option(
        "--served-model", help="Name of the base model on the server.", show_default="the first that it lists"
    ),
]
_Data = Annotated[
    Path, typer.Option(help="Training data as JSON lines, as of `zosim run`.", show_default=False)
]
_Template = Annotated[
    str | None,
    typer.Option(
        help='Prompt template for lines of text, such as "{text} It was {label}."', show_default=False
    ),
]
_LabelWords = Annotated[
    str | None, typer.Option(help="Word for each label, such as 0=terrible,1=great.", show_default=False)
]
_Timeout = Annotated[float, typer.Option(min=0.01, help="Maximum time to wait for an answer, in seconds.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def serve(
    model: Annotated[str, typer.Option(help="Directory of the base model.", show_default=False)],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter to serve, such as first=adapters/first; repeat for more.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the base model in requests.", show_default="its directory")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Format of the weights.")] = "float32",
    weight_format: Annotated[
        str, typer.Option(help="Format to quantize the linear layers of blocks to, such as int8 or int4.")
    ] = "none",
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of CPU threads.", show_default="as torch chooses"),
    ] = None,
    max_requests: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="Maximum number of requests that wait or run; others are answered 503."
        ),
    ] = 256,
    max_adapters: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of loaded adapters; others are refused.")
    ] = 256,
    request_timeout: Annotated[
        float, typer.Option(min=0.01, help="Time after which a request is answered 503, in seconds.")
    ] = 600.0,
    access_log: Annotated[
        bool, typer.Option(help="Write a line per request to stderr, without its content.")
    ] = True,
) -> None:
    """Serve scores and greedy text of a frozen model and its adapters over HTTP, until interrupted."""
    from executors.models.loading import load_model
    from executors.serving.runtime import Runtime
    from executors.serving.server import ClientLimits, ScoringServer
    from executors.threads import use_threads
    from topology.validation import readable
    from zosim.plans import LowBits

    if threads is not None:
        use_threads(threads)
    base = load_model(model, dtype=dtype)
    with readable(f"--weight-format {weight_format}", RunError, model=LowBits):
        low_bits = LowBits.model_validate({"weights": weight_format})
    ends: Any = getattr(base.config, "eos_token_id", None)
    stop_tokens = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    runtime = Runtime(base, low_bits=low_bits, stop_tokens=stop_tokens)
    for declared in adapter or ():
        called, separator, directory = declared.partition("=")
        if not (separator and called) or called == (name or model):
            raise RunError(
                f"--adapter {declared!r} must be NAME=DIRECTORY, with another name than the base",
                hint="such as first=adapters/first",
            )
        runtime.load(called, Path(directory))
    log = partial(stderr.print, soft_wrap=True) if access_log else None
    limits = ClientLimits(requests=max_requests, adapters=max_adapters, answer_s=request_timeout)
    with ScoringServer(runtime, name or model, port, limits=limits, log=log) as server:
        # A supervisor ends a server by SIGTERM, which is no failure either.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        stderr.print(f"serving {server.model} at {server.url}", soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            stderr.print("ended")


_ADAPTED = ("steps", "batch", "eps", "epsilon", "lr", "seed", "reward", "reward_timeout", "max_new_tokens")
_USUAL = RunConfig(
    plan=PlanConfig(batch=16, forward=ForwardPass(num_new_tokens=USUAL_NEW_TOKENS)),
    learning_rate=LearningRate(learning_rate=1e-4, num_steps=100),
)


@with_settings(RunConfig, only=_ADAPTED, usual=_USUAL)
def adapt(
    model: _Model,
    data: _Data,
    output: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Directory for the log and the adapter; a log there is resumed.",
            show_default=False,
        ),
    ],
    server_url: _Server = "http://127.0.0.1:8000",
    served_model: _Served = None,
    targets: Annotated[
        str, typer.Option(help="Linear layers to tune, such as q_proj,v_proj.")
    ] = "q_proj,v_proj",
    rank: Annotated[int, typer.Option(min=1, max=4096, help="Rank of each perturbation.")] = 2,
    lazy_steps: Annotated[
        int, typer.Option(min=1, help="Number of steps after which the right factor V is sampled anew.")
    ] = 50,
    max_rank: Annotated[
        int, typer.Option(min=3, max=65536, help="Maximum rank of an adapter that the server accepts.")
    ] = 16,
    template: _Template = None,
    label_words: _LabelWords = None,
    timeout: _Timeout = 60.0,
    priority: Annotated[
        int | None,
        typer.Option(
            help="Priority of the requests, as a whole number; lower ones run first.",
            show_default="the server's",
        ),
    ] = None,
    as_json: _Json = False,
    **options: Any,
) -> None:
    """Tune a model behind a serving endpoint without loading its weights."""
    from executors.datasets.batches import Batches
    from executors.datasets.rewards import reward_named
    from executors.serving.client import RemoteServer
    from executors.serving.tuning import SERVED_NAME, Tuning, TuningSettings

    config = merge(_USUAL, config_of(RunConfig, options, only=_ADAPTED))
    run, plan, rate = config.run, config.plan, config.learning_rate.complete()
    steps = rate.num_steps
    dataset, tokenizer = _examples(model, data, template, label_words)
    # The usual batch may repeat lines of a small file.
    if plan.batch > max(len(dataset), _USUAL.plan.batch):
        message = f"--batch {plan.batch} exceeds the {len(dataset)} lines of {data}: each step would score some of them again and again"
        raise DataError(message, hint=f"use --batch {len(dataset)}, or less")
    wanted = None if run.reward is None else reward_named(run.reward, run.reward_timeout_s)
    served = RemoteServer(server_url, served_model, timeout_s=timeout, priority=priority)
    names = tuple(name.strip() for name in targets.split(",") if name.strip())
    settings = TuningSettings(
        names, rank, lazy_steps, max_rank, plan.estimator.epsilon, rate.learning_rate, run.seed
    )
    batches = Batches(dataset, plan.batch, shuffle=True, seed=run.seed)
    decode = None if tokenizer is None else tokenizer.decode
    row: dict[str, Any] = {}
    with Tuning(served, model, output, settings) as tuning:
        while tuning.num_steps < steps:
            examples = dataset.examples(batches.indices(tuning.num_steps))
            num_new = plan.forward.num_new_tokens or USUAL_NEW_TOKENS
            row = tuning.step(examples, reward=wanted, decode=decode, max_new_tokens=num_new)
            loss = (row["loss_plus"] + row["loss_minus"]) / 2
            stderr.print(
                f"step {tuning.num_steps}/{steps}  {'loss' if wanted is None else '-reward'} {loss:9.5f}  "
                f"g {row['projected_grad']:+.4e}",
                markup=False,
                soft_wrap=True,
            )
        tuning.save(output / SERVED_NAME)
        result = {
            "num_steps": tuning.num_steps,
            "rank": tuning.state.rank,
            "adapter": str(output / SERVED_NAME),
        }
    emit(result, json=as_json, text=f"{result['adapter']} holds {result['num_steps']} steps, of rank {result['rank']}")  # fmt: skip


def canary(
    directory: Annotated[
        Path, typer.Argument(help="Directory of the adapter's versions.", show_default=False)
    ],
    version: Annotated[
        str | None, typer.Argument(help="Version to compare with the served one.", show_default=False)
    ] = None,
    server_url: _Server = "http://127.0.0.1:8000",
    served_model: _Served = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            help="Directory of an adapter to add as VERSION, unless the canary refuses it.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the current version on the server.")] = "served",
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory of the base model, whose tokenizer reads lines of text.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Canary data as JSON lines, as of `zosim run`.", show_default=False)
    ] = None,
    template: _Template = None,
    label_words: _LabelWords = None,
    examples: Annotated[int, typer.Option(min=1, help="Number of lines to score.")] = 64,
    promote: Annotated[bool, typer.Option("--promote", help="Serve the version if it passes.")] = False,
    tolerance: Annotated[
        float, typer.Option(help="Largest accepted increase in loss over the served version.")
    ] = 0.0,
    roll_back: Annotated[
        bool, typer.Option("--roll-back", help="Serve the previous version again instead.")
    ] = False,
    timeout: _Timeout = 60.0,
    as_json: _Json = False,
) -> None:
    """Compare an adapter version with the served one on canary data, promote it, or roll back."""
    from executors.serving.client import RemoteServer
    from executors.serving.versions import Versions

    served: RemoteServer = RemoteServer(server_url, served_model, timeout_s=timeout)
    versions = Versions(directory, served, name)
    if roll_back:
        before = versions.roll_back()
        emit({"served": before}, json=as_json, text=f"{name} is {before or 'the base'} again")
        return
    if version is None or data is None:
        raise RunError(
            "a canary needs a version and data",
            hint="name the version and add --data FILE; or use --roll-back",
        )
    dataset, _ = _examples(model or "", data, template, label_words)
    lines = dataset.examples(list(range(min(examples, len(dataset)))))
    with nullcontext() if adapter is None else versions.trying(version, adapter):
        if promote:
            outcome = versions.promote(version, lines, tolerance=tolerance)
        else:
            outcome = versions.compare(version, lines)
    result = {
        "version": version,
        "loss_served": outcome.served,
        "loss_candidate": outcome.candidate,
        "num_tokens": outcome.num_tokens,
        "served": versions.served,
    }
    text = (
        f"{version} loses {outcome.candidate:.6g} on {outcome.num_tokens} tokens, the served one {outcome.served:.6g}; "
        f"{name} is {versions.served or 'the base'}"
    )
    emit(result, json=as_json, text=text)


def _examples(model: str, data: Path, template: str | None, label_words: str | None) -> tuple[Any, Any]:
    """Return a dataset, and the model's tokenizer where the lines are text."""
    from executors.datasets.data import open_dataset
    from executors.datasets.prompts import PromptTemplate, parse_label_words
    from executors.runs.inputs import tokenizer_for

    tokenizer = tokenizer_for(model, str(data))
    words = parse_label_words(label_words) if label_words else {}
    declared = PromptTemplate(template, words) if template else None
    return open_dataset(data, template=declared, tokenizer=tokenizer), tokenizer
