"""``python -m studies.sparq.training_epsilon``: how much of a projected gradient is left behind a quantized boundary, by ε.

Along the same perturbations, on the same batches of the embedded task: ``g`` without a codec against ``g`` with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from costmodel.formats.codecs import codec_spec
from executors.codecs.fidelity import received
from executors.models.loading import load_model
from executors.models.model import Batch, SegmentedModel
from executors.models.pretrain import pretrained_model
from executors.models.split_points import BoundaryTensor, Change, SplitPoint, loss_through
from executors.randomness.rng import generator_on, mixed
from executors.randomness.samplers import Gaussian
from studies.records import records_in, write_records
from studies.sparq.training import batches_of, tensors_of

RESULTS = Path(__file__).with_name("training_epsilon.csv")
EPSILONS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
NUM_PERTURBATIONS = 16
_INSIDE, _BETWEEN = SplitPoint(1, inside=True), SplitPoint(1)


@dataclass(frozen=True)
class Seen:
    """How a projected gradient through a codec compares with the one without."""

    split_point: str  # ``"inside"`` (the activation is encoded, the residual stream is not) or ``"between"``
    codec: str
    noise: str  # ``"nearest"``, or random numbers that both signs ``"share"`` or draw ``"apart"``
    epsilon: float
    relative_error: float  # ``rms(g' - g) / rms(g)`` over perturbations
    correlation: float  # of ``g'`` and ``g`` over perturbations, about 0: what the update keeps


Encoding = tuple[str, str, str]
"""Boundary, codec and noise of a case."""


def _encodings() -> Iterator[Encoding]:
    for bits in (1, 2, 4, 8):
        yield "inside", f"q{bits}:affine-zero", "nearest"
    for bits in (1, 2, 3, 4, 6, 8):
        yield "between", f"q{bits}", "nearest"
    for split_point, grid in (("inside", ":affine-zero"), ("between", "")):
        for bits in (2, 4, 8):
            for noise in ("share", "apart"):
                yield split_point, f"q{bits}{grid}:stochastic", noise


ENCODINGS = tuple(_encodings())


def _change(encoding: Encoding, seed: int) -> dict[SplitPoint, Change]:
    split_point, name, _ = encoding
    spec = codec_spec(name)

    def change(sent: BoundaryTensor, tensor: torch.Tensor) -> torch.Tensor:
        if sent == "residual":
            return tensor
        return received(tensor, spec, generator_on(tensor.device, seed))

    return {_INSIDE if split_point == "inside" else _BETWEEN: change}


def gradients(
    model: SegmentedModel, batch: Batch, epsilon: float, seed: int, encodings: Sequence[Encoding]
) -> tuple[float, dict[Encoding, float]]:
    """Return one perturbation's projected gradient, without a codec and with each (`seed`: of the perturbation, and of what is rounded at random)."""
    kept = {t.name: t.parameter.data.clone() for t in model.tensors if t.trainable}
    plain: list[float] = []
    encoded: dict[Encoding, list[float]] = {encoding: [] for encoding in encodings}
    for number, sign in enumerate((1, -1)):
        generator = generator_on(model.device, seed)
        for tensor in model.tensors:
            if tensor.trainable:
                z = torch.empty_like(kept[tensor.name])
                Gaussian().fill(z, generator)
                tensor.parameter.data.copy_(kept[tensor.name] + sign * epsilon * z)
        plain.append(float(loss_through(model, batch, {})))
        for encoding in encodings:
            noise_seed = mixed(seed, number if encoding[2] == "apart" else 0) >> 1
            encoded[encoding].append(float(loss_through(model, batch, _change(encoding, noise_seed))))
    for tensor in model.tensors:
        if tensor.trainable:
            tensor.parameter.data.copy_(kept[tensor.name])
    slope = lambda pair: (pair[0] - pair[1]) / (2 * epsilon)
    return slope(plain), {encoding: slope(pair) for encoding, pair in encoded.items()}


def measure(known: Sequence[Seen] = (), num_perturbations: int = NUM_PERTURBATIONS) -> list[Seen]:
    """Return what every codec leaves at every ε, of which some may be known."""
    pretrained = pretrained_model()
    loaded = load_model(str(pretrained.model))
    model, batches = SegmentedModel(loaded), batches_of(pretrained, loaded, 0)
    there = {((row.split_point, row.codec, row.noise), row.epsilon) for row in known}
    rows = list(known)
    for epsilon in EPSILONS:
        encodings = [encoding for encoding in ENCODINGS if (encoding, epsilon) not in there]
        if not encodings:
            continue
        with torch.no_grad():
            pairs = [
                gradients(model, tensors_of(batches, number), epsilon, 100 + number, encodings)
                for number in range(num_perturbations)
            ]
        plain = np.array([pair[0] for pair in pairs])
        for encoding in encodings:
            encoded = np.array([pair[1][encoding] for pair in pairs])
            error = float(np.sqrt(np.mean((encoded - plain) ** 2) / np.mean(plain**2)))
            both = float(encoded @ plain / np.sqrt((encoded @ encoded) * (plain @ plain)))
            rows.append(Seen(*encoding, epsilon, round(error, 4), round(both, 4)))
    return sorted(
        rows, key=lambda row: (ENCODINGS.index((row.split_point, row.codec, row.noise)), row.epsilon)
    )


def read_seen() -> list[Seen]:
    """Return what was measured; nothing if there is no file."""
    return records_in(RESULTS, Seen)


def main() -> None:
    """Measure, and write the file."""
    torch.set_num_threads(1)
    write_records(RESULTS, measure(read_seen()))


if __name__ == "__main__":
    main()
