"""``python -m studies.sparq.training``: the embedded task, trained with what crosses one boundary through a codec.

One process does what several stages do, bit for bit, so curves need no stages. Each run is a row of ``training.csv``; rows
that are there are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.formats.codecs import codec_spec
from executors.codecs.fidelity import received
from executors.datasets.batches import Batches
from executors.datasets.data import Limits, open_dataset
from executors.models.loading import load_model
from executors.models.model import Batch, SegmentedModel
from executors.models.pretrain import Pretrained, TaskSettings, pretrained_model
from executors.models.spec import spec_of_model
from executors.models.split_points import BoundaryTensor, Change, SplitPoint, loss_through
from executors.randomness.rng import generator_on
from executors.runs.evaluate import ChoiceResult, evaluate_choices
from executors.runs.session import Session
from studies.records import append_records, records_in
from zosim.console import stderr, stdout
from zosim.plans import Plan, Split
from zosim.report import Table

RESULTS = Path(__file__).with_name("training.csv")
CURVES = Path(__file__).with_name("training_curves.csv")
INSIDE, BETWEEN = "block.1.mlp", "block.1"
NUM_STEPS, CURVE_STEPS, NUM_EVALUATED, NUM_COUNTED = 200, 25, 500, 2
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class CodecCase:
    """Where the model is split, and the codecs that what crosses the boundary goes through."""

    name: str
    split_point: str
    codec: str = "none"  # of the MLP's activation
    residual_codec: str = "none"  # of the residual stream, which is what crosses between blocks

    def split(self, encoding: str = "dense") -> Split:
        """Return the split as a plan has it; encodings lose nothing, so training takes the fastest."""
        return Split(
            split_points=(self.split_point,),
            codec=_with(self.codec, encoding),
            residual_codec=_with(self.residual_codec, encoding),
        )


def _with(codec: str, encoding: str) -> str:
    return codec if codec_spec(codec).is_lossless else f"{codec}:{encoding}"


def _cases() -> Iterator[CodecCase]:
    """Yield the cases, those first that matter most."""
    yield CodecCase("none", INSIDE)
    for bits in (4, 1, 2, 8):
        yield CodecCase(f"inside {bits}", INSIDE, f"q{bits}:affine-zero")
    for bits in (4, 2, 8):
        yield CodecCase(f"between {bits}", BETWEEN, "none", f"q{bits}")
    for bits in (4, 2, 8):
        yield CodecCase(f"inside {bits}, residual {bits}", INSIDE, f"q{bits}:affine-zero", f"q{bits}")
    for bits in (2, 4):
        yield CodecCase(f"inside {bits}, stochastic", INSIDE, f"q{bits}:affine-zero:stochastic")
    yield CodecCase("between 2, stochastic", BETWEEN, "none", "q2:stochastic")
    yield CodecCase("between 2, per token", BETWEEN, "none", "q2:token")


CASES = tuple(_cases())


@dataclass(frozen=True)
class TrainedCase:
    """What one run came to."""

    case: str
    seed: int  # of the perturbations and of the order of the data
    num_steps: int
    epsilon: float
    # loss_first, loss_last: of the training batches, mean over the first and the last steps of a curve, as the run sees
    # them: through the codec.
    loss_first: float
    loss_last: float
    g_rms: float  # root mean square of the projected gradients
    # accuracy, loss: On held-out questions, without the codec.
    accuracy: float
    loss: float
    # accuracy_through, loss_through: the same with the codec.
    accuracy_through: float
    loss_through: float
    # bytes_before, bytes_after: sent per step, headers and lengths included, each tensor in its smallest encoding; at
    # both ends of the run.
    bytes_before: float
    bytes_after: float

    @property
    def key(self) -> tuple[str, int, int, float]:
        """What decides a run."""
        return self.case, self.seed, self.num_steps, self.epsilon


class Through(nn.Module):
    """A model that is split at one place, what crosses there through a codec, called as transformers models are."""

    def __init__(self, model: nn.Module, case: CodecCase) -> None:
        super().__init__()
        self.model = model
        self._logits: Tensor | None = None
        self._segmented = SegmentedModel(model, objective=self._keep)
        self._codecs = {"activation": codec_spec(case.codec)}
        block, inside = int(case.split_point.split(".")[1]), case.split_point.endswith(".mlp")
        self._residual = codec_spec(case.residual_codec)
        self._changes: Mapping[SplitPoint, Change] = {SplitPoint(block, inside): self._received}

    def _keep(self, logits: Tensor, _batch: Batch) -> Tensor:
        self._logits = logits
        return logits.new_zeros(())

    def _received(self, name: BoundaryTensor, tensor: Tensor) -> Tensor:
        spec = self._codecs.get(name, self._residual)
        return received(tensor, spec, generator_on(tensor.device, 0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return an object with ``logits``."""
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": input_ids}
        loss_through(self._segmented, batch, self._changes)
        return SimpleNamespace(logits=self._logits)


def plan_of(model: nn.Module, *, num_stages: int = 1, split: Split | None = None, **axes: Any) -> Plan:
    """Return a plan of the task for a model in one process, or on stages, with the task's ``ε`` unless `axes` have another."""
    config: Any = model.config
    split, task = split or Split(), TaskSettings()
    return Plan.model_validate(
        {
            "model": spec_of_model(model, "embedded", split_blocks=split.split_blocks),
            "placement": {"topology": "host", "devices": ("cpu0",) * num_stages},
            "batch": task.batch,
            "seq": config.max_position_embeddings,
            "mesh": {"stage": num_stages},
            "split": split,
            "estimator": {"epsilon": task.epsilon},
            **axes,
        }
    )


def batches_of(pretrained: Pretrained, model: nn.Module, seed: int) -> Batches:
    """Return the task's batches, shuffled."""
    return Batches(data_of(pretrained.train, model), TaskSettings().batch, shuffle=True, seed=seed)


def data_of(path: Path, model: nn.Module) -> Any:
    """Return lines of the task as examples for a model."""
    config: Any = model.config
    return open_dataset(str(path), limits=Limits(config.vocab_size, config.max_position_embeddings))


def tensors_of(batches: Batches, number: int) -> Batch:
    """Return a batch as a session takes it."""
    made = batches.batch(number)
    return {name: getattr(made, name) for name in ("input_ids", "attention_mask", "labels")}


def run(
    pretrained: Pretrained, case: CodecCase, seed: int, num_steps: int, epsilon: float
) -> tuple[TrainedCase, list[float]]:
    """Train once; return what came of it, and the losses of all steps."""
    model = load_model(str(pretrained.model))
    batches = batches_of(pretrained, model, seed)
    bytes_before = _sent_bytes(pretrained, model, case, batches, epsilon)
    plan = plan_of(model, split=case.split(), estimator={"epsilon": epsilon})
    settings: dict[str, Any] = {
        "learning_rate": TaskSettings().learning_rate,
        "seed": seed,
        "num_timed_steps": 0,
    }
    with Session(plan, model, **settings) as session:
        records = [session.step(tensors_of(batches, number)) for number in range(num_steps)]
        state = session.state_dict()
    tuned = load_model(str(pretrained.model))
    tuned.load_state_dict(state, strict=False)
    losses = [record.loss for record in records]
    squares = [g * g for record in records for g in record.projected_gradients]
    plain, encoded = (_accuracy(pretrained, m) for m in (tuned, Through(tuned, case)))
    row = TrainedCase(
        case.name,
        seed,
        num_steps,
        epsilon,
        fmean(losses[:CURVE_STEPS]),
        fmean(losses[-CURVE_STEPS:]),
        fmean(squares) ** 0.5,
        plain.accuracy,
        plain.loss,
        encoded.accuracy,
        encoded.loss,
        bytes_before,
        _sent_bytes(pretrained, tuned, case, batches, epsilon),
    )
    return row, losses


def _accuracy(pretrained: Pretrained, model: nn.Module) -> ChoiceResult:
    inner = model.model if isinstance(model, Through) else model
    return evaluate_choices(model, data_of(pretrained.validation, inner), num_examples=NUM_EVALUATED)


def _sent_bytes(
    pretrained: Pretrained, model: nn.Module, case: CodecCase, batches: Batches, epsilon: float
) -> float:
    """Return the bytes that stages would send per step, from steps that leave the weights where they are."""
    copy = load_model(str(pretrained.model))
    copy.load_state_dict(model.state_dict())
    plan = plan_of(copy, split=case.split("smallest"), estimator={"epsilon": epsilon})
    with Session(plan, copy, learning_rate=0.0, num_timed_steps=0) as session:
        for number in range(NUM_COUNTED):
            session.step(tensors_of(batches, number))
        messages = session.messages_per_step()
    assert messages is not None
    return messages["bytes_per_step"]


def summary(rows: list[TrainedCase]) -> Table:
    """Return a row per case: seeds, means over them, and how far its loss is from that without a codec, seed by seed."""
    plain = {row.seed: row.loss for row in rows if row.case == "none"}
    by_case = {case.name: [row for row in rows if row.case == case.name] for case in CASES}
    columns: dict[str, Callable[[list[TrainedCase]], str]] = {
        "case": lambda of: of[0].case,
        "seeds": lambda of: f"{len(of)}",
        "accuracy, %": lambda of: f"{100 * fmean(row.accuracy for row in of):.1f}",
        "... through the codec": lambda of: f"{100 * fmean(row.accuracy_through for row in of):.1f}",
        "loss": lambda of: f"{fmean(row.loss for row in of):.2f}",
        "less that without": lambda of: ", ".join(
            f"{row.loss - plain[row.seed]:+.2f}" for row in of if row.seed in plain
        ),
        "rms g": lambda of: f"{fmean(row.g_rms for row in of):.0f}",
        "kB a step": lambda of: f"{fmean(row.bytes_after for row in of) / 1e3:.0f}",
    }
    return Table.of([of for of in by_case.values() if of], columns)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--eps", type=float, default=TaskSettings().epsilon)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    given = parser.parse_args()
    if given.table:
        wanted = [
            row
            for row in records_in(given.out, TrainedCase)
            if (row.num_steps, row.epsilon) == (given.steps, given.eps)
        ]
        stdout.print(summary(wanted).to_markdown(), markup=False, soft_wrap=True)
        return
    torch.set_num_threads(1)
    pretrained = pretrained_model()
    known = {row.key for row in records_in(given.out, TrainedCase)}
    named = {case.name: case for case in CASES}
    for seed in given.seeds:
        for name in given.cases:
            if (name, seed, given.steps, given.eps) in known:
                continue
            row, losses = run(pretrained, named[name], seed, given.steps, given.eps)
            append_records(given.out, [row])
            points = [
                {
                    "case": name,
                    "seed": seed,
                    "epsilon": given.eps,
                    "num_steps": k + CURVE_STEPS,
                    "loss": round(fmean(losses[k : k + CURVE_STEPS]), 5),
                }
                for k in range(0, given.steps, CURVE_STEPS)
            ]
            curves = given.out.with_name(f"{given.out.stem}_curves.csv")
            append_records(curves, points)
            stderr.print(
                f"{name}, seed {seed}: accuracy {row.accuracy:.3f}, loss {row.loss:.3f}", markup=False
            )


if __name__ == "__main__":
    main()
