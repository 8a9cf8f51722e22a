"""``zosim probe``: what crosses each boundary of a model on real batches, and what codecs make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from costmodel.formats.codecs import CodecSpec, codec_spec, overhead_bytes
from costmodel.models.model_spec import block_segment
from executors.codecs import codec_of, decode_quantized, encode_quantized, encoding_of, quantize
from executors.codecs.encodings import Symbols
from executors.codecs.fidelity import Visibility, received, relative_error, visibility
from executors.models.model import Batch, SegmentedModel
from executors.models.split_points import (
    BoundaryTensor,
    SplitPoint,
    boundary_tensors,
    loss_through,
    split_points_of,
)
from executors.randomness.rng import generator_on
from executors.randomness.samplers import Gaussian
from executors.runs.settings import RunConfig
from topology.errors import CodecError, PlanError
from zosim.config import PlanConfig, merge
from zosim.console import emit, stderr
from zosim.options import Json, config_of, with_settings
from zosim.report import Table


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor at one split point through one codec; means over batches."""

    split_point: str
    tensor: BoundaryTensor
    codec: str
    shape: tuple[int, ...]  # of the last batch's tensor
    nonzero: float  # part of the numbers that are not 0, before any codec
    kept: float  # part of the symbols that are not the most frequent one
    entropy_bits: float  # of a symbol
    relative_error: float  # ``κ = ‖x - C(x)‖/‖x‖``
    size_bytes: float  # of the message, header included
    to_entropy: float  # its payload over the entropy of all symbols
    encoding: str  # of the last batch's message
    # noise_to_signal, smallest_epsilon: of a difference along a random perturbation, see
    # :class:`executors.codecs.fidelity.Visibility`.
    noise_to_signal: float | None
    smallest_epsilon: float | None
    warning: str | None


@dataclass(frozen=True, slots=True)
class BoundaryLoss:
    """What a split there does to the loss, every tensor that crosses through the codec."""

    split_point: str
    codec: str
    change: float  # loss with the codec less the loss without, mean over batches


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was measured."""

    loss: float  # without a codec, mean over batches
    epsilon: float
    tensors: list[TensorReport]
    losses: list[BoundaryLoss]


def probe_boundaries(
    model: SegmentedModel,
    batches: Sequence[Batch],
    specs: Sequence[CodecSpec],
    *,
    epsilon: float,
    seed: int = 0,
) -> ProbeReport:
    """Return what crosses every boundary, through every codec.

    - `specs`: with bits.
    - `epsilon`: smoothing radius of the differences that are measured.
    - `seed`: of the perturbation and of stochastic rounding.

    Raises PlanError if a codec has no bits, or ε is not positive.

    Parameters are perturbed in place for two forwards of the first batch, and restored from a copy.
    """
    if not epsilon > 0:
        raise PlanError(f"epsilon={epsilon} must be above 0", hint="1e-3 is usual")
    for spec in specs:
        if spec.is_lossless:
            raise PlanError(
                "the codec none is lossless, so there is nothing to measure",
                hint="name a codec with bits, such as q4",
            )
    with torch.no_grad():
        batch_tensors = [boundary_tensors(model, batch) for batch in batches]
        signs = _both_signs(model, batches[0], epsilon, seed)
        tensors = [
            _report(
                split_point,
                name,
                spec,
                [kept[split_point][name] for kept in batch_tensors],
                _at(signs, split_point, name),
                epsilon,
                seed,
            )
            for split_point in split_points_of(model)
            for name in batch_tensors[0][split_point]
            for spec in specs
        ]
        plain = [float(loss_through(model, batch, {})) for batch in batches]
        losses = [
            BoundaryLoss(
                split_point.name, spec.name, _change_of_loss(model, batches, plain, split_point, spec, seed)
            )
            for split_point in split_points_of(model)
            for spec in specs
        ]
    return ProbeReport(fmean(plain), epsilon, tensors, losses)


BoundaryTensors = Mapping[SplitPoint, Mapping[BoundaryTensor, Tensor]]


def _both_signs(
    model: SegmentedModel, batch: Batch, epsilon: float, seed: int
) -> tuple[BoundaryTensors, BoundaryTensors]:
    """Return what crosses at ``θ + εz`` and at ``θ - εz``."""
    parameters = [tensor.parameter.data for tensor in model.tensors if tensor.trainable]
    kept = [parameter.clone() for parameter in parameters]
    by_sign = []
    for sign in (1, -1):
        generator = generator_on(model.device, seed)
        for parameter, original in zip(parameters, kept, strict=True):
            z = torch.empty_like(original)
            Gaussian().fill(z, generator)
            parameter.copy_(original + sign * epsilon * z)
        by_sign.append(boundary_tensors(model, batch))
    for parameter, original in zip(parameters, kept, strict=True):
        parameter.copy_(original)
    return by_sign[0], by_sign[1]


def _at(
    signs: tuple[BoundaryTensors, BoundaryTensors], split_point: SplitPoint, name: BoundaryTensor
) -> tuple[Tensor, Tensor]:
    return signs[0][split_point][name], signs[1][split_point][name]


def _report(
    split_point: SplitPoint,
    name: BoundaryTensor,
    spec: CodecSpec,
    tensors: Sequence[Tensor],
    signs: tuple[Tensor, Tensor],
    epsilon: float,
    seed: int,
) -> TensorReport:
    rows = [_measured(tensor, spec, seed) for tensor in tensors]
    kept, entropy_bits, error, size_bytes, to_entropy = (fmean(column) for column in zip(*rows, strict=True))
    seen = _seen(signs, spec, epsilon, seed)
    return TensorReport(
        split_point.name,
        name,
        spec.name,
        tuple(tensors[-1].shape),
        fmean(float((tensor != 0).double().mean()) for tensor in tensors),
        kept,
        entropy_bits,
        error,
        size_bytes,
        to_entropy,
        encoding=encoding_of(codec_of(spec).encode(tensors[-1], generator_on(tensors[-1].device, seed))),
        noise_to_signal=None if seen is None else seen.noise_to_signal,
        smallest_epsilon=None if seen is None else seen.smallest_epsilon,
        warning=None if seen is None else seen.warning,
    )


def _measured(tensor: Tensor, spec: CodecSpec, seed: int) -> tuple[float, ...]:
    """Return the part kept, the entropy, the relative error, the message's size and the payload's over the entropy."""
    message = encode_quantized(quantize(tensor, spec, generator_on(tensor.device, seed)))
    symbols = decode_quantized(message).symbols.numpy().reshape(-1)
    stats = Symbols(symbols, tensor.shape[-1], spec.bits or 8).statistics
    payload = len(message) - overhead_bytes(spec, tensor.shape, tensor.dtype.itemsize)
    least = stats.entropy_bits * stats.num_elements / 8
    error = relative_error(tensor, spec, generator_on(tensor.device, seed))
    return stats.density, stats.entropy_bits, error, len(message), payload / least if least else 1.0


def _seen(signs: tuple[Tensor, Tensor], spec: CodecSpec, epsilon: float, seed: int) -> Visibility | None:
    """Return how visible a perturbation is; None where nothing differs."""
    try:
        return visibility(*signs, spec, epsilon=epsilon, seed=seed)
    except CodecError:
        return None


def _change_of_loss(
    model: SegmentedModel,
    batches: Sequence[Batch],
    plain: Sequence[float],
    split_point: SplitPoint,
    spec: CodecSpec,
    seed: int,
) -> float:
    def through(_name: BoundaryTensor, tensor: Tensor) -> Tensor:
        return received(tensor, spec, generator_on(tensor.device, seed))

    losses = [float(loss_through(model, batch, {split_point: through})) for batch in batches]
    return fmean(after - before for after, before in zip(losses, plain, strict=True))


_SETTINGS = ("batch", "seq", "eps", "seed", "dtype", "template", "random_weights")
_USUAL = RunConfig(plan=PlanConfig(batch=8))
_CODECS = ["q4", "q8"]


@with_settings(RunConfig, only=_SETTINGS, usual=_USUAL)
def probe(
    model: Annotated[str, typer.Option(help="Model: a model directory, or the name of a cached model.")],
    data: Annotated[
        str,
        typer.Option(help="Training data as JSON lines, with input_ids and labels, or with fields of text."),
    ],
    codec: Annotated[
        list[str],
        typer.Option(
            help="Codec to measure, such as q4:affine-zero:token; repeat for more.", show_default="q4 and q8"
        ),
    ] = _CODECS,
    num_batches: Annotated[int, typer.Option(min=1, max=4096, help="Number of batches to measure.")] = 2,
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Measure which experts tokens visit instead, and write the model with their shares here, for "
            "`zosim plan --model`.",
        ),
    ] = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Measure density, entropy and quantization error of the activations at each split point."""
    from executors.models.loading import load_model

    specs = [codec_spec(name) for name in codec]
    config = merge(_USUAL, config_of(RunConfig, settings, only=_SETTINGS))
    plan, run = config.plan, config.run
    loaded = load_model(model, dtype=plan.weights.dtype, random_weights=run.random_weights, seed=run.seed)
    batches = _batches(loaded, model, data, plan.batch, num_batches, plan.seq, config.data.template)
    if experts is not None:
        _probe_experts(loaded.eval(), batches, Path(experts), as_json=as_json)
        return
    report = probe_boundaries(
        SegmentedModel(loaded), batches, specs, epsilon=plan.estimator.epsilon, seed=run.seed
    )
    for row in report.tensors:
        if row.warning:
            stderr.print(
                f"{row.split_point}, {row.tensor}, {row.codec}: {row.warning}", markup=False, soft_wrap=True
            )
    emit(report, json=as_json, text=_view(report))


def _probe_experts(model: nn.Module, batches: Sequence[Batch], target: Path, *, as_json: bool) -> None:
    from executors.models.routing import measure_routing

    spec, report = measure_routing(model, batches)
    target.write_text(spec.model_dump_json(indent=1), encoding="utf-8")
    rows = [
        (
            block_segment(own.block),
            f"{own.largest_share:.1%}",
            f"{own.smallest_share:.1%}",
            f"{own.fullest:.0f}",
            f"{own.visited:.1f}",
            f"{own.predicted:.1f} ± {1.96 * own.predicted_error:.1f}",
            f"{own.uploads:.1f}",
            f"{own.most_uploads}",
        )
        for own in report.blocks
    ]
    columns = (
        "block", "largest share", "smallest share", "tokens of the fullest", "visited", "predicted",
        f"uploads beside {report.num_resident}", "at most",
    )  # fmt: skip
    title = f"experts that {report.num_tokens} tokens visit, of {report.num_sequences} sequences"
    emit(report, json=as_json, text=Table(columns, rows, title=title, numeric=columns[1:]))


def _batches(
    model: Any, source: str, data: str, size: int, num: int, seq: int | None, template: str | None
) -> list[Batch]:
    from executors.datasets.batches import Batches
    from executors.datasets.data import Limits, open_dataset
    from executors.datasets.prompts import PromptTemplate
    from executors.runs.inputs import tokenizer_for

    config = model.config.get_text_config()
    limits = Limits(config.vocab_size, seq or getattr(config, "max_position_embeddings", None), truncate=True)
    wanted = PromptTemplate(template, {}) if template else None
    tokenizer = tokenizer_for(source, data) if Path(data).is_file() else None
    batches = Batches(open_dataset(data, limits=limits, template=wanted, tokenizer=tokenizer), size)
    made = (batches.batch(k) for k in range(num))
    return [{n: getattr(b, n) for n in ("input_ids", "attention_mask", "labels")} for b in made]


def _view(report: ProbeReport) -> Any:
    changes = {(row.split_point, row.codec): row.change for row in report.losses}
    rows = [
        (
            row.split_point,
            row.tensor,
            row.codec.removesuffix(":smallest"),
            f"{row.nonzero:.1%}",
            f"{row.kept:.1%}",
            f"{row.entropy_bits:.3f}",
            f"{row.relative_error:.3f}",
            f"{row.size_bytes:.0f}",
            f"{row.to_entropy:.3f}",
            row.encoding,
            "-" if row.smallest_epsilon is None else f"{row.smallest_epsilon:.1g}",
            f"{changes[row.split_point, row.codec]:+.4f}",
        )
        for row in report.tensors
    ]
    columns = (
        "split point", "tensor", "codec", "nonzero", "kept", "entropy, bits", "κ", "bytes", "to entropy", "encoding",
        "least ε", "loss",
    )  # fmt: skip
    title = f"loss {report.loss:.4f} without a codec; differences at ε = {report.epsilon:g}"
    return Table(columns, rows, title=title, numeric=[*columns[3:9], *columns[10:]])
