"""The settings of ``zosim run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, model_validator

from costmodel.formats.stored_quantization import refuse_unwritable
from costmodel.models.configs import LoRA, Prefix, Subset, Trainable
from executors.ranks.launch import DEFAULT_TIMEOUT_S
from executors.runs.learning_rate import LearningRate
from topology.errors import DataError, PlanError, RunError
from topology.limits import Seed, Threads
from zosim.adapters import AdapterSettings, adapters_of, tuned_by
from zosim.config import PlanConfig, merge
from zosim.plans import AXES, Plan, Section, Setting, fields_of, is_decisive
from zosim.plans.setting import SettingField
from zosim.program import Program
from zosim.program.program_set import ProgramSet

if TYPE_CHECKING:
    from executors.datasets.prompts import PromptTemplate

LossName = Literal["model", "fp64"]

SaveAs = Literal["numbers", "compressed-tensors", "zosim"]
"""How quantized weights are saved: dequantized, in the layout of compressed-tensors, or in zosim's own."""
TaskName = Literal["auto", "choice", "perplexity", "generation"]


_STRICT = ConfigDict(strict=True)
"""What a record holds is used as it stands: "8" is no number."""


def _label_words(text: str) -> dict[str, str]:
    from executors.datasets.prompts import parse_label_words

    return parse_label_words(text)


class DataSettings(Section):
    """The training data, and how its lines become tokens."""

    heading = "Model and data"

    model_config = _STRICT

    path: Annotated[
        str,
        Setting(
            "--data",
            "Training data as JSON lines, with input_ids and labels, or with fields of text for --template. Required unless --resume.",
        ),
    ] = ""
    template: Annotated[
        str | None,
        Setting(
            "--template", 'Prompt template for lines of text, such as "{text} It was {label}."', "numbers"
        ),
    ] = None
    label_words: Annotated[
        dict[str, str] | None,
        Setting(
            "--label-words",
            "Word for each label, such as 0=terrible,1=great.",
            "numbers",
            typed=str,
            parse=_label_words,
        ),
    ] = None
    truncate: Annotated[
        bool,
        Setting("--truncate", "Truncate lines longer than --seq, which are an error otherwise.", "numbers"),
    ] = False
    shuffle: Annotated[
        bool,
        Setting(
            "--shuffle",
            "Shuffle the data in every epoch; off takes the lines in their order.",
            "numbers",
            typed=Literal["on", "off"],
            parse={"on": True, "off": False}.get,
            heading="Randomness",
        ),
    ] = True

    @property
    def prompt(self) -> PromptTemplate | None:
        """The template with its label words; None where none is named.

        Raises DataError if it is not well formed, or label words have no place to go.
        """
        from executors.datasets.prompts import PromptTemplate

        if self.template is not None:
            return PromptTemplate(self.template, self.label_words or {})
        if self.label_words:
            raise DataError(
                "label words are given, but no template places them",
                hint='add --template, such as "{text} It was {label}."',
            )
        return None


class EvaluationSettings(Section):
    """Evaluations on other data while training."""

    model_config = _STRICT

    path: Annotated[
        str, Setting("--eval-data", "Evaluation data as JSON lines, in the format of --data.")
    ] = ""
    every: Annotated[
        int,
        Setting(
            "--eval-every",
            "Number of steps between evaluations.",
            "numbers where transfers round",
            usual="before the first step and after the last",
        ),
    ] = 0
    num_examples: Annotated[
        int | None,
        Setting("--eval-examples", "Number of examples to evaluate, from the first.", usual="all examples"),
    ] = None
    keep_best: Annotated[
        bool, Setting("--keep-best", "Keep the weights with the best evaluation, in OUT/best.")
    ] = False
    task: Annotated[
        TaskName,
        Setting(
            "--eval-task",
            "Task of the evaluation: pick one of several answers (choice), all labelled tokens "
            "(perplexity), free text (generation), or as the lines show (auto).",
        ),
    ] = "auto"
    max_new_tokens: Annotated[
        int,
        Setting("--eval-max-new-tokens", "Maximum number of tokens in a generated answer.", expert=True),
    ] = 32

    @model_validator(mode="after")
    def _counts(self) -> EvaluationSettings:
        if self.max_new_tokens < 1:
            raise RunError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.every < 0:
            raise RunError(
                f"--eval-every {self.every} must be at least 1",
                hint="leave it out to evaluate before the first step and after the last",
            )
        if self.num_examples is not None and self.num_examples < 1:
            raise RunError(
                f"--eval-examples {self.num_examples} must be at least 1",
                hint="leave it out to evaluate all examples",
            )
        return self


def evaluation_in(settings: EvaluationSettings) -> EvaluationSettings | None:
    """Return the settings of evaluations; None without ``--eval-data``.

    Raises RunError if it is said when, but not on what.
    """
    if settings.path:
        return settings.complete()
    if settings.every or settings.keep_best:
        raise RunError("--eval-every and --keep-best need --eval-data", hint="add --eval-data FILE")
    return None


def check_data(data: DataSettings, evaluation: EvaluationSettings | None) -> None:
    """Raise DataError for lines that no model can be fed, early, since torch is not needed."""
    from executors.datasets.data import check_lines

    prompt = data.prompt
    check_lines(data.path, prompt)
    if evaluation is not None:
        check_lines(evaluation.path, prompt)


class RunOptions(Section):
    """Options of a run beside its plan, data, learning rate, evaluation and what is tuned."""

    model: Annotated[
        str,
        Setting(
            "--model",
            "Base weights: a model directory, or the name of a cached model. Required unless --resume.",
            "numbers",
            heading="Model and data",
        ),
    ] = ""
    out: Annotated[
        str, Setting("--out", "Directory for the run's log and weights. Required.", heading="Output")
    ] = ""
    seed: Annotated[
        Seed,
        Setting(
            "--seed",
            "Seed of the perturbations, the shuffle and the initial adapters.",
            "numbers",
            heading="Randomness",
        ),
    ] = 0
    weight_decay: Annotated[
        float,
        Setting(
            "--weight-decay",
            "Weight decay of all parameters but biases and layer norms.",
            "numbers",
            heading="Estimator and optimizer",
        ),
    ] = 0.0
    loss_dtype: Annotated[
        LossName,
        Setting(
            "--loss-dtype",
            "Format in which the loss is computed: the model's own, or fp64.",
            "numbers",
            expert=True,
            heading="Precision",
        ),
    ] = "model"
    objective: Annotated[
        str,
        Setting(
            "--objective",
            "Objective to optimise: loss, accuracy, f1, or your function of logits and batch, such as "
            "module:function. The module is imported and runs: name only code that you trust.",
            "numbers",
            heading="Estimator and optimizer",
        ),
    ] = "loss"
    reward: Annotated[
        str | None,
        Setting(
            "--reward",
            "Reward of generated text to maximise: your function of prompts and texts, such as "
            "module:function, which is imported and runs; or an endpoint, such as "
            "http://127.0.0.1:PORT/PATH.",
            "numbers",
            heading="Estimator and optimizer",
        ),
    ] = None
    reward_timeout_s: Annotated[
        float,
        Setting(
            "--reward-timeout",
            "Maximum time for a reward to answer, in seconds.",
            expert=True,
            heading="Estimator and optimizer",
        ),
    ] = 60.0
    accumulate: Annotated[
        PositiveInt,
        Setting(
            "--accumulate",
            "Number of micro-batches into which a step's batch is divided.",
            "numbers",
            heading="Placement",
        ),
    ] = 1
    device: Annotated[
        str,
        Setting(
            "--device",
            "Device to run on, such as cpu, cuda or cuda:0.",
            usual="the plan's device, or cpu without a plan",
            heading="Hardware",
        ),
    ] = "cpu"
    num_threads: Annotated[
        Threads,
        Setting(
            "--threads",
            "Number of CPU threads per rank.",
            usual="$OMP_NUM_THREADS, or the rank's share of the cores",
            heading="Hardware",
        ),
    ] = 1
    digest_every: Annotated[
        NonNegativeInt,
        Setting(
            "--digest-every",
            "Number of steps between digests of the parameters; 0 for none.",
            "numbers where transfers round",
            expert=True,
        ),
    ] = 100
    checkpoint_every: Annotated[
        NonNegativeInt,
        Setting(
            "--checkpoint-every",
            "Number of steps between checkpoints; 0 for none, since the log rebuilds any step.",
            "numbers where transfers round",
        ),
    ] = 0
    checksums: Annotated[
        bool,
        Setting(
            "--checksums",
            "Detect silent corruption of the weights.",
            usual="on for runs on a CPU",
            expert=True,
        ),
    ] = False
    graphs: Annotated[
        bool,
        Setting(
            "--graphs",
            "Launch sampling and blocks as CUDA graphs, which pays for small batches.",
            expert=True,
        ),
    ] = False
    disk_directory: Annotated[
        str | None,
        Setting(
            "--disk-dir",
            "Directory on the drive for blocks with --residency nvme.",
            usual="--out",
            expert=True,
            heading="Placement",
        ),
    ] = None
    resume: Annotated[bool, Setting("--resume", "Resume the run in --out.")] = False
    early_stop: Annotated[bool, Setting("--early-stop", "Stop when the loss diverges.", expert=True)] = True
    random_weights: Annotated[
        bool,
        Setting(
            "--random-weights",
            "Use random weights of the model's architecture.",
            "numbers",
            expert=True,
            heading="Model and data",
        ),
    ] = False
    save_as: Annotated[
        SaveAs,
        Setting(
            "--save-as",
            "Format of saved quantized weights: numbers (dequantized), compressed-tensors (which "
            "transformers loads), or zosim (any format, for zosim only).",
            expert=True,
            heading="Output",
        ),
    ] = "numbers"
    allow_download: Annotated[
        bool,
        Setting(
            "--allow-download", "Download a model that is named and not cached.", heading="Model and data"
        ),
    ] = False
    tensorboard: Annotated[
        bool,
        Setting(
            "--tensorboard",
            "Write TensorBoard logs, if TensorBoard is installed.",
            heading="Output",
            expert=True,
        ),
    ] = True
    num_timed_steps: int = 100  # steps whose spans are kept
    log_every: int = 1  # steps between the lines that are printed; the files have every step
    timeout_s: Annotated[
        float, Setting("--timeout", "Maximum time that a rank waits for another, in seconds.", expert=True)
    ] = DEFAULT_TIMEOUT_S


_RECORDED = (
    "model",
    "objective",
    "reward",
    "accumulate",
    "digest_every",
    "checkpoint_every",
    "random_weights",
    "save_as",
)


def recorded_options() -> dict[str, SettingField]:
    """Return the options that ``run.json`` keeps in the section of the run; seed, decay and device are in its header, for any loop."""
    return {name: fields_of(RunOptions)[name] for name in _RECORDED}


class RunConfig(Section):
    """The config tree of a run: what options, Python, a plan's file and a resumed run's header state."""

    run: RunOptions = RunOptions()
    data: DataSettings = DataSettings()
    learning_rate: LearningRate = LearningRate.model_construct()
    plan: PlanConfig = PlanConfig()
    evaluation: EvaluationSettings = EvaluationSettings()
    adapters: AdapterSettings = AdapterSettings()


def recorded_config(header: Mapping[str, Any]) -> RunConfig:
    """Return what a resumed run takes over from its header beside plan, adapters and micro-batches: what changes its numbers, and its data."""
    recorded = header.get("run")
    if not recorded:
        return RunConfig()
    own = {**header, **recorded}
    # How weights are written is no number of the run, but whoever goes on with it wants it still.
    names = [
        field.name
        for field in fields_of(RunOptions).values()
        if field.setting.changes != "speed" or field.name == "save_as"
    ]
    return RunConfig(
        run=RunOptions.model_construct(
            **{name: own[name] for name in names if name in own and name != "accumulate"}
        ),
        data=DataSettings.model_construct(**recorded.get("data") or {}),
        learning_rate=LearningRate.model_construct(**recorded.get("learning_rate") or {}),
        evaluation=EvaluationSettings.model_construct(**recorded.get("evaluation") or {}),
        adapters=AdapterSettings.model_construct(tuned=recorded.get("tuned", "all")),
    )


@dataclass(frozen=True)
class RunSettings:
    """All settings of one run: a rank needs nothing else. Raises ZosimError if the settings contradict each other."""

    plan: Plan
    run: RunOptions
    data: DataSettings
    learning_rate: LearningRate
    program: Program | ProgramSet | None = None  # what to run in place of what the plan is lowered to
    tuned: Trainable = "all"
    evaluation: EvaluationSettings | None = None

    def __post_init__(self) -> None:
        self._refuse_uneven()
        is_parted = self.run.accumulate * self.plan.num_batch_shards > 1
        if is_parted and self.run.objective not in ("loss", "accuracy"):
            raise PlanError(
                f"objective={self.run.objective} cannot be computed from shards of a batch",
                hint="leave --accumulate out, and use data=1 in the mesh",
            )
        self._refuse_other_objectives()
        if self.run.save_as != "numbers":
            self._refuse_unquantized()
        if self.run.weight_decay < 0:
            raise RunError(f"weight_decay={self.run.weight_decay} must be at least 0")
        if self.run.objective != "loss" and (
            self.run.loss_dtype != "model" or self.plan.forward.loss_chunk_tokens
        ):
            raise PlanError(
                f"objective={self.run.objective} needs all logits at once, in the model's own format",
                hint="leave --loss-dtype and --loss-chunk-tokens out",
            )

    def _refuse_other_objectives(self) -> None:
        """Refuse a reward with another objective, or without generated text, and generated text without a reward."""
        num_new_tokens = self.plan.forward.num_new_tokens
        if self.run.reward is None:
            if num_new_tokens is not None:
                raise PlanError(
                    f"the plan generates {num_new_tokens} tokens per prompt, but no reward is given",
                    hint="add --reward, or leave --max-new-tokens out",
                )
            return
        if num_new_tokens is None:
            raise PlanError(
                "--reward needs generated text, but the plan generates none", hint="add --max-new-tokens"
            )
        if self.run.objective != "loss" or self.run.loss_dtype != "model":
            raise PlanError(
                "--reward excludes --objective and --loss-dtype",
                hint="leave --objective and --loss-dtype out",
            )
        if not self.run.reward_timeout_s > 0:
            raise RunError(f"reward_timeout={self.run.reward_timeout_s} must be above 0")

    def _refuse_unquantized(self) -> None:
        quant_config = self.plan.storage.quant_config
        if quant_config is None or not isinstance(self.tuned, str):
            what = (
                "a plan without them has none"
                if quant_config is None
                else "what is tuned here lies beside them"
            )
            raise PlanError(
                f"--save-as {self.run.save_as} needs quantized weights that are tuned, but {what}",
                hint="leave it out" if quant_config is not None else "add --weight-format",
            )
        if self.run.save_as == "zosim":
            return
        if self.plan.model.fused_qkv:
            raise PlanError(
                f"--save-as compressed-tensors: {self.plan.model.name} stores its linear layers transposed, which "
                "compressed-tensors does not support",
                hint="use --save-as zosim, or --save-as numbers",
            )
        refuse_unwritable(quant_config)

    def _refuse_uneven(self) -> None:
        """Refuse micro-batches that do not divide every rank's part of a batch."""
        plan = self.plan
        parts = {len(plan.rows_of(rank)) for rank in range(plan.placement.world_size)}
        if any(part % self.run.accumulate for part in parts):
            of = f" over data={plan.num_batch_shards}" if plan.num_batch_shards > 1 else ""
            raise PlanError(
                f"batch={plan.batch}{of} cannot be divided into {self.run.accumulate} equal micro-batches",
                hint="choose --accumulate so that it divides --batch"
                + (", and each rank's share of it" if of else ""),
            )

    @property
    def adapters(self) -> LoRA | Prefix | Subset | None:
        """The adapters or the prefix, or the tuned part of the base; None where all of it is tuned."""
        return None if self.tuned == "all" else self.tuned

    @property
    def _recorded_tuned(self) -> dict[str, Any]:
        """What is tuned, by the names of a header."""
        tuned = self.tuned
        return {
            "tuned": tuned if isinstance(tuned, str) else "all",
            "lora": tuned.model_dump(mode="json") if isinstance(tuned, LoRA) else None,
            "prefix": tuned.model_dump(mode="json") if isinstance(tuned, Prefix) else None,
        }

    @property
    def stops_early(self) -> bool:
        """Whether divergence ends the run; with a reward, whose scale is unknown, it never does."""
        return self.run.early_stop and self.run.reward is None

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.learning_rate.num_steps

    def identity(self, data_sha256: str, earlier: Plan | None = None) -> dict[str, Any]:
        """Return what decides the run's numbers beside its base weights, by the option's name.

        Two commands whose identities agree compute the same losses and weights, wherever blocks reside.

        `earlier`: plan of the run that is gone on with, on whose mesh as many micro-batches are named as cut a batch into the
        same parts.
        """
        plan, rate, accumulate = self.plan, self.learning_rate, self.run.accumulate
        num_parts, num_shards = accumulate * plan.num_batch_shards, (earlier or plan).num_batch_shards
        if num_parts % num_shards == 0:
            accumulate = num_parts // num_shards
        is_rounded = plan.is_transfer_lossy
        same = plan.identity()
        parts: tuple[Section, ...] = (self.run, self.data, rate, self.evaluation or EvaluationSettings())
        for settings in parts:
            section_type: type = type(settings)
            same |= {
                field.identity: getattr(settings, field.name)
                for field in fields_of(section_type).values()
                if field.name not in _BY_DIGEST and is_decisive(field, transfers_round=is_rounded)
            }
        same |= {
            "accumulate": accumulate,
            "data_sha256": data_sha256,
            "truncate": plan.seq if self.data.truncate else None,
            # Under a constant rate a run may be prolonged, where nothing is rounded at its end.
            "steps": None if rate.schedule == "constant" and not is_rounded else rate.num_steps,
            **self._recorded_tuned,
        }
        if isinstance(self.tuned, Prefix):
            same["prefix"] = self.tuned.num_tokens
        elif isinstance(self.tuned, LoRA):
            same["lora"] = self.tuned.model_dump(mode="json", exclude_defaults=True)
        if plan.model.split_blocks and plan.perturbations.samples_by_halves:
            same["split_blocks"] = list(plan.model.split_blocks)  # their halves are drawn one after the other
        return same

    @classmethod
    def of_header(cls, header: Mapping[str, Any]) -> RunSettings:
        """Return the settings that the header of a run by ``zosim run`` records, as far as numbers depend on them."""
        config, recorded = recorded_config(header), header["run"]
        return cls(
            Plan.model_validate(header["plan"]),
            merge(config.run, RunOptions(accumulate=recorded.get("accumulate", 1))),
            config.data,
            config.learning_rate,
            tuned=tuned_by(config.adapters.tuned, *adapters_of(AdapterSettings(), recorded)),
            evaluation=config.evaluation if recorded.get("evaluation") else None,
        )

    def to_header(self, data_sha256: str) -> dict[str, Any]:
        """Return the settings as ``run.json`` keeps them."""
        return {
            "data_sha256": data_sha256,
            "data": self.data.model_dump(),
            "learning_rate": self.learning_rate.model_dump(),
            **self._recorded_tuned,
            "evaluation": None if self.evaluation is None else self.evaluation.model_dump(),
            "edited_program": self.program is not None,
            **{name: getattr(self.run, name) for name in recorded_options()},
        }


def refuse_other_identity(recorded: dict[str, Any], declared: dict[str, Any], where: str) -> None:
    """Raise for the first setting in which a command differs from the run that it resumes.

    Raises RunError naming the setting and both values.
    """
    for name in {**recorded, **declared}:
        was, is_now = (values.get(name, _USUAL.get(name)) for values in (recorded, declared))
        if was != is_now:
            raise RunError(
                f"{where} was run with {name}={was!r}, but this command says {is_now!r}",
                hint="a resumed run must compute the same numbers: leave the option out, or give another --out",
            )


_BY_DIGEST = ("model", "random_weights")
"""Fields that the digest of the base weights answers for."""

_USUAL = {
    field.identity: field.default
    for section_type in AXES.values()
    for field in fields_of(section_type).values()
}
"""What a field is that decides numbers in one of two runs alone, such as a codec where the other has none."""
