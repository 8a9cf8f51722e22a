"""The matrix: every setting of a plan and a run that can change how a step is done, crossed, and what each case has to find.

The values are read from the settings themselves. What a field `changes` says what a case has to find: two cases that differ in
no field that changes numbers leave the same bits. So each is held against the plain one of its mathematics (one rank, everything
resident, nothing ahead of its time), and that against the literal loop, wherever one is written.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from costmodel.models.configs import LoRA, Prefix, Subset, spec_of_config
from executors.models.quantized import make_layers_quantizable
from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.samplers import sampler_named
from executors.ranks.communicator import Communicator
from executors.runs.adapters import Tuned, attach
from executors.runs.checkpoint import newest_checkpoint, save_checkpoint
from executors.runs.history import DIGESTS_NAME, History, read_history
from executors.runs.learning_rate import LearningRate
from executors.runs.records import StepRecord, seed_of
from executors.runs.replay import advance, session_at
from executors.runs.runlog import RunLog
from executors.runs.session import Session
from executors.runs.settings import RunOptions
from executors.steps.preparing import prepare
from proofs_checks.setups.ranks import on_all_ranks
from tests.support.reference_lozo import LiteralLozo
from tests.support.reference_mezo import CachedPrefix, LiteralMezo, bits, execution_order, prefix_parts
from tests.support.tiny import CONFIGS, batches, model_of
from topology.errors import PlanError, ZosimError
from zosim.plans import AXES, Axis, Perturbations, Plan, fields_of, is_decisive

NUM_STEPS, INTERRUPTED_AFTER = 3, 2
"""Steps of a run; those after which it flushes and has a checkpoint, and the log of one that was interrupted ends."""

BATCH, SEQ, SEED = 4, 8, 11
RATE = 1e-2

WAYS = ("fresh", "checkpoint", "log", "replayed")
"""Run from the first step; gone on with from a checkpoint, or from the base by the log; the log done again, without forwards."""

EXAMPLES: dict[str, tuple[Any, ...]] = {
    "mesh.data": (2,),
    "mesh.perturb": (2,),
    "mesh.stage": ("split_points",),  # as many stages as the split points make
    "split.split_points": (("block.0",), ("block.1.mlp",), ("block.0", "block.1.mlp")),
    "split.codec": ("q4", "q2:stochastic"),
    "split.residual_codec": ("q8",),
    "estimator.num_perturbations": (2,),
    "estimator.epsilon": (1e-2,),
    "residency.num_staging_buffers": (1, 2),
    "residency.num_disk_blocks": (1,),
    "residency.num_resident_blocks": (1,),
    "low_bits.weights": ("int8", "int4", "int3", "float8_e4m3", "float4_e2m1"),
    "low_bits.group_elements": (16,),
    "low_bits.adapters": ("int8", "int4", "float8_e4m3"),
    "low_bits.perturbation_bits": (3,),
    "low_bits.sparsity": (0.5,),
    "perturbations.rank": (1, 3),
    "perturbations.lazy_steps": (1, 3),
    "forward.loss_chunk_tokens": (5,),
    "forward.compute_dtype": ("bfloat16",),
    "run.accumulate": (2,),
    "run.weight_decay": (0.1,),
    "learning_rate.warmup_steps": (2,),
    "run.num_threads": (2,),
}
"""Values of fields whose type does not list them, or lists more than matter here."""

LEFT_OUT = {
    "placement.topology": "a name",
    "placement.devices": "one for each rank",
    "placement.hosts": "the ranks of a case are threads of one process",
    "mesh.num_sequences": "the parts of its sums are those of no other plan: test_executors_sharing_out",
    "split.densities": "for predictions",
    "forward.num_new_tokens": "text that is generated has no loss to compare: test_executors_rewards",
    "forward.num_labels": "for predictions",
    "forward.num_tokens": "for predictions",
    "forward.num_shared": "for predictions",
    "forward.num_answers": "for predictions",
    "forward.num_attended": "for predictions",
    "run.model": "the shapes",
    "run.seed": "one will do",
    "run.objective": "test_executors_run",
    "run.reward": "test_executors_rewards",
    "run.random_weights": "where the base comes from",
    "learning_rate.learning_rate": "one will do",
    "learning_rate.num_steps": "one will do",
}

LORA = {"opt": ("q_proj", "fc2"), "llam": ("q_proj", "down_proj"), "qwen": ("q_proj", "down_proj"), "gpt2": ("c_attn",), "robe": ("query",)}  # fmt: skip
"""Layers with adapters, by the first letters of a shape."""

TUNED = ("all", *get_args(Subset), "lora", "windows", "prefix")

_OFFLOADED = {"residency.blocks": "offloaded"}
_CODES = {"low_bits.weights": "int8"}
NEEDS: dict[str, dict[str, Any]] = {
    "mesh.stage": {"split.split_points": ("block.0", "block.1.mlp")},
    "mesh.inner": {"mesh.data": 2, "mesh.perturb": 2},
    "split.split_points": {"mesh.stage": "split_points"},
    "split.codec": {"split.split_points": ("block.1.mlp",)},
    "split.residual_codec": {"split.split_points": ("block.0",)},
    "residency.num_disk_blocks": {"residency.blocks": "nvme"},
    "residency.num_resident_blocks": _OFFLOADED,
    "residency.transfers": _OFFLOADED | {"mesh.data": 2},
    "residency.embedding_and_head": _OFFLOADED | {"shape": "opt-untied"},
    "weights.perturbation=adapters": {"perturbations.distribution": "lozo", "tuned": "linears"},
    "perturbations.rank": {"perturbations.distribution": "lozo"},
    "perturbations.lazy_steps": {"perturbations.distribution": "lozo"},
    "low_bits.scales=group": _CODES | {"low_bits.group_elements": 16, "shape": "opt-untied"},
    "low_bits.group_elements": _CODES | {"low_bits.scales": "group", "shape": "opt-untied"},
    "low_bits.adapters": _CODES | {"tuned": "lora"},
    "low_bits.update_rounding": _CODES | {"estimator.num_perturbations": 2},
    "low_bits.kernel=int_mm": _CODES | {"low_bits.activations": "int8-token"},
    "low_bits.activations=float8-token": {"low_bits.weights": "float8_e4m3", "low_bits.kernel": "dequantize"},
    "low_bits.activations=float8-tensor": {"low_bits.weights": "float8_e4m3", "low_bits.kernel": "dequantize"},
}  # fmt: skip
"""What a value needs beside it to mean something, by its field, or by field and value."""

REMEDIES: tuple[dict[str, Any], ...] = (
    {},
    {"estimator.num_perturbations": 2},
    {"perturbations.kept": True},
    {"shape": "opt-untied"},
    {"tuned": "windows"},
)
"""What two values may need beside them to stand together."""


@cache
def values() -> Mapping[str, tuple[Any, ...]]:
    """Return the values of every setting that is varied, the usual one first."""
    found: dict[str, tuple[Any, ...]] = {"shape": tuple(CONFIGS), "tuned": TUNED}
    sections = {**AXES, "run": RunOptions, "learning_rate": LearningRate}
    for section, kind in sections.items():
        for field in fields_of(kind).values():
            name = f"{section}.{field.name}"
            is_plans = section in AXES
            if name in LEFT_OUT or not (is_plans or field.setting.changes == "numbers" or name in EXAMPLES):
                continue
            found[name] = tuple(dict.fromkeys((field.default, *_listed(name, field.annotation))))
    found["run.checksums"] = (False, True)
    return found | {"way": WAYS}


def _listed(name: str, annotation: Any) -> tuple[Any, ...]:
    if name in EXAMPLES:
        return EXAMPLES[name]
    if annotation is bool:
        return (False, True)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    # Within an Annotated or a union with None.
    inner = [one for part in get_args(annotation) for one in (part, *get_args(part))]
    (literal,) = [one for one in inner if get_origin(one) is Literal]
    return get_args(literal)


@dataclass(frozen=True)
class Case:
    """Settings that are not as usual, by name."""

    declared: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Case:
        """Return the case of some settings; those that are as usual are left out."""
        usual = {name: first for name, (first, *_) in values().items()}
        return cls(tuple(sorted((name, value) for name, value in settings.items() if value != usual[name])))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: first for name, (first, *_) in values().items()} | dict(self.declared)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def __str__(self) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in self.declared)

    @property
    def tuned(self) -> Tuned | None:
        """What is tuned; None for all."""
        targets = LORA[self["shape"][:4]] if self["shape"][:3] != "opt" else LORA["opt"]
        found: dict[str, Tuned | None] = {
            "all": None,
            "lora": LoRA(rank=2, target_modules=targets, seed=3),
            "windows": LoRA(rank=2, target_modules=targets, seed=3, lazy_steps=1, max_rank=4),
            "prefix": Prefix(num_tokens=3, seed=3),
        }
        return found.get(self["tuned"], self["tuned"])

    def plan(self) -> Plan:
        """Return the plan.

        Raises PlanError if the settings contradict each other, or cannot be run in a test's process.
        """
        axes: dict[str, dict[str, Any]] = {name: {} for name in AXES}
        for name, value in self.declared:
            section, _, field = name.partition(".")
            if section in axes:
                axes[section][field] = value
        split_points = self["split.split_points"]
        if "stage" in axes["mesh"]:
            axes["mesh"]["stage"] = len(split_points) + 1
        ranks = axes["mesh"].get("data", 1) * axes["mesh"].get("perturb", 1) * axes["mesh"].get("stage", 1)
        axes["placement"] = {"topology": "test", "devices": ("cpu0",) * ranks}
        made = {name: _axis(name, tuple(fields.items())) for name, fields in axes.items() if fields}
        plan = Plan(model=_spec(self["shape"], self.tuned, split_points), batch=BATCH, seq=SEQ, **made)
        self._refuse_elsewhere(plan)
        return plan

    def _refuse_elsewhere(self, plan: Plan) -> None:
        """Refuse what needs a GPU, and what a session says no to rather than a plan."""
        low_bits = plan.low_bits
        refusals = (
            low_bits.product == "scaled_mm" and low_bits.quantizes_weights,
            self["tuned"] == "windows" and plan.is_shared_out,
            self["run.loss_dtype"] != "model" and plan.forward.loss_chunk_tokens is not None,
            self["mesh.data"] * self["run.accumulate"] > BATCH,
            # How a forward of all points rounds depends on how many of them a rank has.
            plan.perturbs_by_adapters and self["mesh.perturb"] > 1,
            # Refused when it is lowered, with a hazard: halves of a block on one device, whose updates draw from one generator.
            plan.num_stages == 1 and bool(plan.model.split_blocks) and self["schedule.update"] == "delayed",
            # Rounded by the same random numbers on every shard, but by others in every micro-batch.
            self["mesh.data"] > 1 and "stochastic" in self["split.codec"],
        )
        if any(refusals):
            raise PlanError("not in a test's process")

    @property
    def plain(self) -> Case:
        """The case of the same numbers in which nothing is done otherwise than it has to be."""
        plan, settings = self.plan(), dict(self.declared)
        rounds = {"transfers_round": plan.is_transfer_lossy, "codecs_round": plan.split.is_lossy}
        kept = (
            {"split.split_points"}
            if plan.perturbations.samples_by_halves and plan.model.split_blocks
            else set()
        )
        for axis, kind in AXES.items():
            for field in fields_of(kind).values():
                name = f"{axis}.{field.name}"
                if name not in kept and not is_decisive(field, **rounds):
                    settings.pop(name, None)
        # Ranks that share a batch add their losses up as micro-batches of one rank are.
        settings["run.accumulate"] = self["run.accumulate"] * self["mesh.data"]
        for name in ("way", "run.checksums", "run.num_threads"):
            settings.pop(name, None)
        return Case.of(settings)

    def model(self, plan: Plan) -> torch.nn.Module:
        """Return the model, always with the same weights, as a run has it that begins or goes on."""
        model = _base(self["shape"], plan.storage_dtype, plan.forward.attention)
        make_layers_quantizable(model, plan)
        if self.tuned is not None:
            attach(model, self.tuned, plan=plan)
        return model

    def made(self) -> tuple[Plan, torch.nn.Module]:
        """Return the plan and its model."""
        plan = self.plan()
        return plan, self.model(plan)

    @property
    def rate(self) -> LearningRate:
        """Learning rates."""
        return LearningRate(
            schedule=self["learning_rate.schedule"],
            learning_rate=RATE,
            num_steps=NUM_STEPS,
            warmup_steps=self["learning_rate.warmup_steps"],
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of a session, without its communicator."""
        return {
            "learning_rate": self.rate.at,
            "num_micro_batches": self["run.accumulate"],
            "num_sampling_threads": self["run.num_threads"],
            "checksums": self["run.checksums"],
            "num_timed_steps": 0,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """Options that a record of the run has, too."""
        return {
            "weight_decay": self["run.weight_decay"],
            "loss_dtype": self["run.loss_dtype"],
            "seed": SEED,
        }


def _base(shape: str, dtype: str, attention: str) -> torch.nn.Module:
    return copy.deepcopy(_made(shape, dtype, attention))


@cache
def _made(shape: str, dtype: str, attention: str) -> torch.nn.Module:
    return model_of(shape, getattr(torch, dtype), attention)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@cache
def _axis(name: str, fields: tuple[tuple[str, Any], ...]) -> Axis:
    return AXES[name].model_validate(dict(fields))


@cache
def _spec(shape: str, tuned: Tuned | None, split_points: tuple[str, ...]) -> Any:
    inside = tuple(
        sorted(
            {int(split_point.split(".")[1]) for split_point in split_points if split_point.endswith(".mlp")}
        )
    )
    return spec_of_config(
        CONFIGS[shape].to_dict(), name="tiny", trainable=tuned or "all", split_blocks=inside
    )


def assert_as_wanted(case: Case, folder: Path, expected: Found | None = None) -> None:
    """Compare what every rank of a case finds with what its plain case does, bit for bit."""
    expected = expected or wanted(case.plain, folder)
    for rank, own in enumerate(found(case, folder)):
        assert own.differing(expected) == [], f"rank {rank}; again: python -m tests.support.matrix '{case}'"


def case_named(words: str) -> Case:
    """Return the case that prints as `words`."""
    declared = {}
    for word in words.split():
        name, _, value = word.partition("=")
        declared[name] = next(one for one in values()[name] if _word(one) == value)
    return Case.of(declared)


# -- which cases there are --------------------------------------------------------------------------------------------


def is_possible(settings: Mapping[str, Any], most_ranks: int) -> bool:
    """Whether settings make a plan, of so many ranks."""
    try:
        plan = Case.of(settings).plan()
    except (ZosimError, ValueError):
        return False
    splits_nothing = bool(plan.split_points) and plan.num_stages == 1 and not plan.split.is_lossy
    return plan.placement.world_size <= most_ranks and not splits_nothing


def _with(settings: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return settings with a value, and with what it needs where that is as usual."""
    changed = {**settings, name: value}
    if value == values()[name][0]:
        return changed
    needed = NEEDS.get(f"{name}={value}", NEEDS.get(name, {}))
    if not needed and name.startswith("low_bits.") and name != "low_bits.weights":
        needed = _CODES
    if not needed and name.startswith("residency.") and name != "residency.blocks":
        needed = _OFFLOADED
    for other, wanted in needed.items():
        if changed.get(other, values()[other][0]) == values()[other][0]:
            changed[other] = wanted
    return changed


@cache
def placements() -> frozenset[str]:
    """Return the names of settings that say how a step is done, and change no number as a rule."""
    fields = {
        f"{axis}.{name}": field for axis, kind in AXES.items() for name, field in fields_of(kind).items()
    }
    of_plans = {name for name, field in fields.items() if field.setting.changes != "numbers"}
    return frozenset(of_plans & values().keys() | {"run.checksums", "run.num_threads", "way"})


APART = (
    ("mesh.", ("shape", "forward.attention", "learning_rate.", "estimator.epsilon", "run.weight_decay")),
    (
        "shape",
        (
            "perturbations.distribution",
            "perturbations.rank",
            "perturbations.lazy_steps",
            "perturbations.rng",
            "run.",
        ),
    ),
    ("shape", ("estimator.", "weights.", "learning_rate.", "forward.")),
)
"""Settings, by how their names begin, of which no pair of values is worth a quick case of its own."""


def _are_apart(one: str, other: str) -> bool:
    return any(
        first.startswith(name) and second.startswith(others)
        for name, others in APART
        for first, second in ((one, other), (other, one))
    )


def _is_of_literal(name: str, value: Any) -> bool:
    return value in LITERAL[name] if name in LITERAL else not name.startswith("low_bits.")


@cache
def literal_cases() -> tuple[Case, ...]:
    """Return cases that hold pairs of values that a literal loop is written for."""
    usual = {name: first for name, (first, *_) in values().items()}
    varied = {
        name: tuple(value for value in known if _is_of_literal(name, value)) or (usual[name],)
        for name, known in values().items()
    }
    return tuple(covering_cases(varied, lambda one, other: not _are_apart(one[0], other[0])))


@cache
def other_cases() -> tuple[Case, ...]:
    """Return cases that hold every other value together with every value of a placement."""

    def is_wanted(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
        return (not _is_of_literal(*one) and other[0] in placements()) or (
            not _is_of_literal(*other) and one[0] in placements()
        )

    return tuple(covering_cases(values(), is_wanted))


def all_cases() -> Iterator[Case]:
    """Yield cases that hold every pair of values of whatever settings."""
    return covering_cases(values(), lambda *_: True, most_ranks=4)


def of_one_rank(cases: Iterable[Case]) -> list[Case]:
    """Return the cases without other ranks, run from the first step."""
    left_out = ("mesh.", "split.", "residency.transfers", "way")
    kept = (Case(tuple(pair for pair in case.declared if not pair[0].startswith(left_out))) for case in cases)
    return list(dict.fromkeys(case for case in kept if is_possible(case.settings, most_ranks=1)))


def random_case_of_one_rank(number: int) -> Case:
    """Return case `number` of those at random without other ranks, run from the first step."""
    return of_one_rank(random_cases(1, number, most_ranks=1))[0]


def random_cases(num_cases: int, seed: int = 0, most_ranks: int = 4) -> Iterator[Case]:
    """Yield cases at random: the product of all values has more than anyone can run."""
    rng = random.Random(seed)
    usual = {name: first for name, (first, *_) in values().items()}
    while num_cases:
        settings = dict(usual)
        for name in rng.sample(list(usual), rng.randrange(3, 20)):
            changed = _with(settings, name, rng.choice(values()[name]))
            settings = changed if is_possible(changed, most_ranks) else settings
        num_cases -= 1
        yield Case.of(settings)


def covering_cases(
    varied: Mapping[str, tuple[Any, ...]], is_wanted: Callable[..., bool], most_ranks: int = 2
) -> Iterator[Case]:
    """Yield cases that hold every pair of values that is wanted and possible; most of them of one rank."""
    rng = random.Random(0)
    values_by_number = [(name, value) for name in varied for value in varied[name]]
    numbers = {value: number for number, value in enumerate(values_by_number)}
    missing = {
        (one, other): None
        for one, other in itertools.combinations(range(len(numbers)), 2)
        if values_by_number[one][0] != values_by_number[other][0]
        and is_wanted(values_by_number[one], values_by_number[other])
    }
    usual = {name: first for name, (first, *_) in values().items()}

    def numbered(settings: Mapping[str, Any]) -> list[int]:
        return [numbers[name, settings[name]] for name in varied if (name, settings[name]) in numbers]

    for number in itertools.count():
        if not missing:
            return
        wanted = [values_by_number[number] for number in next(iter(missing))]
        settings = _first_possible(usual, wanted, most_ranks)
        if settings is None or any((name, value) not in numbers for name, value in settings.items()):
            del missing[next(iter(missing))]
            continue
        if "way" not in dict(wanted):
            settings["way"] = WAYS[number % len(WAYS)]
        for name in rng.sample(list(varied), len(varied)):
            if name.startswith("mesh.") and rng.random() < 0.7:
                continue
            present = [number for number in numbered(settings) if values_by_number[number][0] != name]
            gains = {
                value: sum((min(own, other), max(own, other)) in missing for other in present)
                for value in varied[name]
                for own in (numbers[name, value],)
            }
            for value in sorted(gains, key=lambda value: -gains[value])[:2]:
                if gains[value] == 0 or value == settings[name]:
                    break
                changed = _with(settings, name, value)
                keeps = all(changed[name] == value for name, value in wanted)
                if (
                    keeps
                    and all(pair in numbers for pair in changed.items())
                    and is_possible(changed, most_ranks)
                ):
                    settings = changed
                    break
        for pair in itertools.combinations(sorted(numbered(settings)), 2):
            missing.pop(pair, None)
        yield Case.of(settings)


def _first_possible(
    usual: dict[str, Any], wanted: list[tuple[str, Any]], most_ranks: int
) -> dict[str, Any] | None:
    for remedy in REMEDIES:
        settings = {**usual}
        for name, value in (*remedy.items(), *wanted, *wanted):
            settings = _with(settings, name, value)
        if all(settings[name] == value for name, value in wanted) and is_possible(settings, most_ranks):
            return settings
    return None


# -- what a case finds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a run found: the record of each step that it ran, the weights that it ended with, and their digest."""

    records: tuple[StepRecord, ...]
    weights: dict[str, torch.Tensor]
    digest: str = ""

    def differing(self, other: Found) -> list[str]:
        """Return what is not the same in every bit, of the steps that both ran."""
        steps = {record.step: record for record in other.records}
        found = [
            f"step {record.step}: {record} is not {steps[record.step]}"
            for record in self.records
            if record.step in steps and record != steps[record.step]
        ]
        names = self.weights.keys() | other.weights.keys()
        found += [
            name for name in sorted(names) if not _equal(self.weights.get(name), other.weights.get(name))
        ]
        return found + ["the digest"] * bool(self.digest and other.digest and self.digest != other.digest)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(bits(one), bits(other))


def lines() -> list[dict[str, torch.Tensor]]:
    """Return the batches of all steps."""
    return batches(NUM_STEPS, size=BATCH, seq=SEQ)


def _timeless(record: StepRecord) -> StepRecord:
    return replace(record, seconds=1.0)


def _end(session: Session, records: list[StepRecord]) -> Found:
    session.verify()
    return Found(tuple(map(_timeless, records)), session.state_dict(), session.digest())


@contextmanager
def _unobserved() -> Iterator[None]:
    """Leave out that sessions look at the memory of their first steps, which takes longer than the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executors.runs.session._OBSERVED_STEPS", 0)
        yield


def found(case: Case, folder: Path) -> list[Found]:
    """Return what each rank of a case finds; one that goes on does so with the run that `folder` holds."""
    plan = case.plan()
    models = [case.model(plan) for _ in range(plan.placement.world_size)]
    work = _fresh if case["way"] == "fresh" else partial(_going_on, folder=folder)
    with _unobserved():
        if plan.placement.world_size == 1:
            return [work(case, plan, models[0], None)]
        return list(on_all_ranks(plan, lambda rank, others: work(case, plan, models[rank], others)))


def _fresh(case: Case, plan: Plan, model: torch.nn.Module, communicator: Communicator | None) -> Found:
    with Session(plan, model, communicator=communicator, **case.options, **case.identity) as session:
        records = []
        for batch in lines():
            records.append(session.step(batch))
            if len(records) == INTERRUPTED_AFTER:
                session.verify()
        return _end(session, records)


def _going_on(
    case: Case, plan: Plan, model: torch.nn.Module, communicator: Communicator | None, *, folder: Path
) -> Found:
    """Replay a run, or go on where its log ends, from a checkpoint."""
    history = read_history(folder)
    checkpoint = None
    if plan.is_transfer_lossy:  # such a run goes on as it was
        history = replace(history, header={**history.header, "plan": plan.model_dump(mode="json")})
    if case["way"] != "replayed":
        # Without its digest, for which a replay would flush.
        history = replace(history, records=history.records[:INTERRUPTED_AFTER], digests={})
    if case["way"] == "checkpoint":
        prepare(model, plan, torch.device("cpu"))
        checkpoint = newest_checkpoint(history, model, pytest.fail)
    with session_at(
        checkpoint, history, model, plan=plan, communicator=communicator, **case.options
    ) as session:
        advance(session, history, history.num_steps)
        return _end(session, [session.step(batch) for batch in lines()[history.num_steps :]])


def wanted(plain: Case, folder: Path) -> Found:
    """Return what a plain case finds, and leave its log, its digests and a checkpoint in a folder.

    Raises AssertionError if it is not what the literal loop finds.
    """
    plan, records, digests = plain.plan(), [], {}
    model = plain.model(plan)
    with _unobserved(), Session(plan, model, **plain.options, **plain.identity) as session:
        run = {
            "learning_rate": plain.rate.model_dump(),
            "digest_every": INTERRUPTED_AFTER,
            "checkpoint_every": INTERRUPTED_AFTER,
        }
        header = session.header | {"run": run}
        with RunLog(folder, header) as log:
            for batch in lines():
                records.append(session.step(batch))
                log.append(records[-1].rows())
                if (done := len(records)) == INTERRUPTED_AFTER:
                    digests[done] = session.digest()
                    save_checkpoint(
                        model,
                        folder,
                        dtype=plan.storage_dtype,
                        num_steps=done,
                        base_digest=header["base_digest"],
                        history_digest=History(folder, header, tuple(records), 0, {}).digest(done),
                    )
        found = _end(session, records)
    digests[NUM_STEPS] = found.digest
    rows = ({"num_steps": done, "digest": digest} for done, digest in digests.items())
    (folder / DIGESTS_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (loop := literal(plain)) is not None:
        assert found.differing(loop) == [], "the literal loop"
    return found


# -- the literal loops ------------------------------------------------------------------------------------------------

LITERAL = {
    "perturbations.distribution": ("gaussian", "rademacher"),
    "perturbations.rank": (None,),
    "perturbations.lazy_steps": (None,),
    "forward.compute_dtype": (None,),
    "forward.loss_chunk_tokens": (None,),
    "run.loss_dtype": ("model",),
    "estimator.difference": ("central", "forward"),
    "weights.perturbation": ("serial", "copies"),
    "residency.transfer_dtype": (None,),
    "low_bits.weights": ("none",),
    "split.codec": ("none",),
    "split.residual_codec": ("none",),
    "tuned": ("all", "matrices", "linears", "lora", "prefix"),
}
"""Values of settings that a literal loop is written for; of others all are."""

FACTORS = {
    "perturbations.distribution": ("lozo", "factorised", "lozo-released"),
    "perturbations.rank": (None, *EXAMPLES["perturbations.rank"]),
    "perturbations.lazy_steps": (None, *EXAMPLES["perturbations.lazy_steps"]),
    "perturbations.rng": ("mezo",),
    "perturbations.order": ("registration",),
    "estimator.num_perturbations": (1,),
    "estimator.difference": ("central",),
    "weights.perturbation": ("serial",),
}
"""Of these, those that it is written for where perturbations are products of factors."""


def is_literal(case: Case) -> bool:
    """Whether a literal loop does what a plain case does."""
    factored = case["perturbations.distribution"] in FACTORS["perturbations.distribution"]
    wanted = LITERAL | (FACTORS if factored else {})
    return all(case[name] in known for name, known in wanted.items()) and not (
        case.plan().perturbations.samples_by_halves and case.plan().model.split_blocks
    )


def literal(case: Case) -> Found | None:
    """Return what the literal loop finds; None where none is written."""
    if not is_literal(case):
        return None
    plan = case.plan()
    model = case.model(plan)
    reference = model
    if case["tuned"] == "prefix":
        reference = CachedPrefix(
            _base(case["shape"], plan.storage_dtype, plan.forward.attention),
            prefix_parts(model),
        )
    loop = _loop(case, plan, reference)
    records = []
    for step, batch in enumerate(lines()):
        seeds = tuple(
            seed_of(SEED, step, perturbation) for perturbation in range(plan.estimator.num_perturbations)
        )
        rate = case.rate.at(step)
        if isinstance(loop, LiteralLozo):
            rows = [loop.step(batch, seeds[0], rate)]
        else:
            rows = loop.step(batch, seeds, rate)
        plus, other, gradients = zip(*rows, strict=True)
        is_central = plan.estimator.difference == "central"
        minus, base = (other, None) if is_central else (None, other[0])
        records.append(StepRecord(step, seeds, plus, minus, base, gradients, rate, 1.0))
    if case["tuned"] == "prefix":
        for parameter, part in zip(prefix_parts(model), reference.parts, strict=True):
            parameter.data = part.data
    return Found(tuple(records), {name: p.detach() for name, p in model.named_parameters()})


def _loop(case: Case, plan: Plan, reference: torch.nn.Module) -> LiteralMezo | LiteralLozo:
    perturbations, decay = plan.perturbations, case["run.weight_decay"]
    loss = partial(_loss_of_parts, reference, case["run.accumulate"])
    if perturbations.family.is_factored:
        return LiteralLozo(
            reference,
            epsilon=plan.estimator.epsilon,
            weight_decay=decay,
            rank=perturbations.rank,
            lazy_steps=perturbations.lazy_steps,
            scaling=perturbations.distribution.removeprefix("lozo-"),
            loss=loss,
        )
    return LiteralMezo(
        reference,
        epsilon=plan.estimator.epsilon,
        weight_decay=decay,
        sampling_order=execution_order if perturbations.order == "execution" else None,
        loss=loss,
        central=plan.estimator.difference == "central",
        weights=plan.weights.perturbation,
        sample=_other_sampler(perturbations, reference),
    )


def _loss_of_parts(model: torch.nn.Module, num_parts: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch, or the mean of its parts' over all labels, in float64."""
    if not isinstance(model, CachedPrefix):  # products of a cache's keys and values are rounded otherwise
        batch = {**batch, "use_cache": False}
    if num_parts == 1:
        return model(**batch).loss
    chunks = {
        name: whole.chunk(num_parts) if name != "use_cache" else [whole] * num_parts
        for name, whole in batch.items()
    }
    parts = [{name: pieces[part] for name, pieces in chunks.items()} for part in range(num_parts)]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    losses = [model(**part).loss.double() * count for part, count in zip(parts, counts, strict=True)]
    return sum(losses) / sum(counts)


def _other_sampler(perturbations: Perturbations, model: torch.nn.Module) -> Any:
    """Return how perturbations are drawn that are not torch's normals; the numbers are the executor's, which has tests of its own."""
    if perturbations.distribution == "gaussian" and not perturbations.is_keyed:
        return None
    kind = sampler_named(perturbations.distribution)
    keyed = CounterSampler([p.numel() for p in model.parameters() if p.requires_grad], torch.device("cpu"))

    def sample(seed: int, step: int, perturbation: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        key = CounterKey.of(seed, step, perturbation)

        def of(parameter: torch.Tensor, number: int) -> torch.Tensor:
            z = torch.empty(parameter.numel(), dtype=parameter.dtype)
            if perturbations.is_keyed:
                keyed.fill(z, number, 0, key, kind)
            else:
                kind.fill(z, generator)
            return z.view(parameter.shape)

        return of

    return sample


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as made:
        assert_as_wanted(case_named(" ".join(sys.argv[1:])), Path(made))
