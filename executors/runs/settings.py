"""What ``zosim run`` was asked for, complete: a rank needs nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from costmodel.configs import LoRA, Prefix
from executors.ranks.launch import DEFAULT_TIMEOUT_S
from executors.ranks.mesh import draws_by_halves
from executors.runs.schedule import Schedule
from topology.errors import PlanError, RunError
from zosim.plans import Plan
from zosim.program import Program
from zosim.program_set import ProgramSet

LossName = Literal["model", "fp64"]
TaskName = Literal["auto", "choice", "perplexity", "generation"]


@dataclass(frozen=True)
class DataSettings:
    """Which lines are trained on, and how they become tokens.

    Attributes
    ----------
    path : str
    template : str or None
        Prompt template for lines of text.
    label_words : mapping of str to str
    truncate : bool
        Whether longer examples are cut to the plan's sequence length.
    shuffle : bool
    """

    path: str
    template: str | None = None
    label_words: dict[str, str] | None = None
    truncate: bool = False
    shuffle: bool = False


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured on other lines while training.

    Attributes
    ----------
    path : str
    every : int
        Steps between evaluations; 0 for one before the first step and one after the last.
    num_examples : int or None
        Only the first so many.
    keep_best : bool
        Whether the weights with the best result are kept.
    task : str
        What is asked: the right one of several answers, the labelled tokens, or an answer in the model's own words.
        ``"auto"`` goes by the lines.
    max_new_tokens : int
        Tokens of a generated answer at most.
    """

    path: str
    every: int = 0
    num_examples: int | None = None
    keep_best: bool = False
    task: TaskName = "auto"
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RunError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.every < 0 or (self.num_examples or 1) < 1:
            raise RunError("evaluations are every 1 or more steps, of 1 or more examples")


@dataclass(frozen=True)
class RunSettings:
    """One run.

    Attributes
    ----------
    model : str
        Directory or name of the base weights.
    plan : Plan
    data : DataSettings
    schedule : Schedule
        Learning rates, and with them the number of steps.
    out : str
        Directory of the run.
    program : Program, ProgramSet or None
        What to run in place of what the plan is lowered to.
    seed : int
    weight_decay : float
    loss_dtype : str
    objective : str
        ``"loss"``, or the name of what is minimised in its place.
    accumulate : int
        Micro-batches that a step's batch is forwarded in.
    device : str
    num_threads : int
    lora : LoRA or None
    prefix : Prefix or None
    evaluation : EvaluationSettings or None
    digest_every, checkpoint_every : int
        Steps between digests of the parameters and between checkpoints; 0 for never.
    checksums : bool
        Whether a checksum follows every change of weights.
    resume : bool
        Whether to go on with what `out` holds.
    early_stop : bool
        Whether a diverging loss ends the run.
    random_weights, allow_download : bool
        As :func:`executors.models.loading.load_model`.
    tensorboard : bool
        Whether logs for TensorBoard are written where it is installed.
    num_timed_steps : int
        Steps whose spans are kept.
    log_every : int
        Steps between the lines that are printed; the files have every step.
    timeout_s : float
        After which a rank that waits for another gives up.

    Raises
    ------
    ZosimError
        If the settings contradict each other.
    """

    model: str
    plan: Plan
    data: DataSettings
    schedule: Schedule
    out: str
    program: Program | ProgramSet | None = None
    seed: int = 0
    weight_decay: float = 0.0
    loss_dtype: LossName = "model"
    objective: str = "loss"
    accumulate: int = 1
    device: str = "cpu"
    num_threads: int = 1
    lora: LoRA | None = None
    prefix: Prefix | None = None
    evaluation: EvaluationSettings | None = None
    digest_every: int = 0
    checkpoint_every: int = 0
    checksums: bool = False
    resume: bool = False
    early_stop: bool = True
    random_weights: bool = False
    allow_download: bool = False
    tensorboard: bool = False
    num_timed_steps: int = 100
    log_every: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise RunError(f"threads={self.num_threads} must be at least 1")
        if min(self.digest_every, self.checkpoint_every) < 0:
            raise RunError("digests and checkpoints are every 1 or more steps, or 0 for never")
        self._refuse_uneven()
        if self.accumulate * self.plan.mesh.data > 1 and self.objective not in ("loss", "accuracy"):
            raise PlanError(
                f"objective={self.objective} of parts of a batch does not make up that of the batch",
                hint="leave --accumulate and the mesh's data axis out",
            )
        if self.lora is not None and self.prefix is not None:
            raise PlanError(
                "a run tunes adapters or a prefix, not both", hint="leave --lora-rank or --prefix out"
            )
        if self.seed < 0:
            raise RunError(f"seed={self.seed} must be at least 0")
        if self.weight_decay < 0:
            raise RunError(f"weight_decay={self.weight_decay} must be at least 0")
        if self.objective != "loss" and (self.loss_dtype != "model" or self.plan.forward.loss_chunk_tokens):
            raise PlanError(
                f"objective={self.objective} is made of all logits at once, in a format of its own",
                hint="leave --loss-dtype and a chunked loss out",
            )

    def _refuse_uneven(self) -> None:
        """Refuse micro-batches that do not share out every rank's part of a batch."""
        plan = self.plan
        parts = {len(plan.rows_of(rank)) for rank in range(plan.placement.world_size)}
        if self.accumulate < 1 or any(part % self.accumulate for part in parts):
            of = f" over data={plan.mesh.data}" if plan.mesh.data > 1 else ""
            raise PlanError(
                f"batch={plan.batch}{of} cannot be forwarded in {self.accumulate} equal micro-batches",
                hint="let --accumulate divide --batch" + (", and every rank's part of it" if of else ""),
            )

    @property
    def adapters(self) -> LoRA | Prefix | None:
        """What is tuned beside a frozen base; None where the base itself is."""
        return self.lora or self.prefix

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.schedule.num_steps

    def identity(self, data_sha256: str, earlier: Plan | None = None) -> dict[str, Any]:
        """Return what decides the run's numbers beside its base weights, by the option's name.

        Two commands whose identities agree compute the same losses and weights, wherever blocks reside.

        Parameters
        ----------
        data_sha256 : str
        earlier : Plan, optional
            Plan of the run that is gone on with, on whose mesh as many micro-batches are named as cut a batch into the
            same parts.
        """
        plan, schedule = self.plan, self.schedule
        same = {
            **plan.estimator.model_dump(mode="json"),
            "direction": plan.directions.distribution,
            "rng": plan.directions.rng,
            "order": plan.directions.order,
            "dtype": plan.weights.dtype,
            "compute_dtype": plan.compute_dtype,
            "batch": plan.batch,
            "attention": plan.forward.attention,
            "loss_chunk_tokens": plan.forward.loss_chunk_tokens,
            "loss_dtype": self.loss_dtype,
            "objective": self.objective,
            "accumulate": self._accumulate_beside(earlier or plan),
            "weight_decay": self.weight_decay,
            "seed": self.seed,
            "shuffle": self.data.shuffle,
            "data_sha256": data_sha256,
            "template": self.data.template,
            "label_words": self.data.label_words,
            "truncate": plan.seq if self.data.truncate else None,
            "lr": schedule.learning_rate,
            "lr_schedule": schedule.kind,
            "warmup": schedule.warmup_steps,
            # Under a constant rate a run may be prolonged.
            "steps": None if schedule.kind == "constant" else schedule.num_steps,
            "lora": None if self.lora is None else self.lora.model_dump(mode="json", exclude_defaults=True),
        }
        if self.prefix is not None:
            same["prefix"] = self.prefix.num_tokens
        if plan.weights.perturbation != "serial":
            same["weights"] = plan.weights.perturbation
        if plan.model.cut_blocks and draws_by_halves(plan.directions):
            same["cut_blocks"] = list(plan.model.cut_blocks)  # their halves are drawn one after the other
        if plan.split.is_lossy:
            same["split"] = plan.split.model_dump(mode="json", exclude={"densities"})
        return same | (self._lossy_identity() if plan.is_transfer_lossy else {})

    def _accumulate_beside(self, earlier: Plan) -> int:
        num_parts = self.accumulate * self.plan.mesh.data
        return num_parts // earlier.mesh.data if num_parts % earlier.mesh.data == 0 else self.accumulate

    def _lossy_identity(self) -> dict[str, Any]:
        """Return what decides the numbers where offloading rounds weights: when and where it happens."""
        every = self.evaluation.every if self.evaluation else 0
        return {
            "transfer_dtype": self.plan.transfer_dtype,
            # How ranks share a copy does not matter.
            "residency": self.plan.residency.model_dump(
                mode="json", exclude={"transfers", "share_group", "transfer_dtype"}
            ),
            "update": self.plan.schedule.update,
            "traversal": self.plan.schedule.traversal,
            "digest_every": self.digest_every,
            "checkpoint_every": self.checkpoint_every,
            "eval_every": every,
            "steps": self.num_steps,
        }

    def to_header(self, data_sha256: str) -> dict[str, Any]:
        """Return the settings as ``run.json`` keeps them."""
        return {
            "identity": self.identity(data_sha256),
            "model": self.model,
            "data": asdict(self.data),
            "schedule": asdict(self.schedule),
            "lora": None if self.lora is None else self.lora.model_dump(mode="json"),
            "prefix": None if self.prefix is None else self.prefix.model_dump(mode="json"),
            "objective": self.objective,
            "accumulate": self.accumulate,
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "digest_every": self.digest_every,
            "checkpoint_every": self.checkpoint_every,
            "random_weights": self.random_weights,
            "edited_program": self.program is not None,
        }


def refuse_other_identity(recorded: dict[str, Any], asked: dict[str, Any], where: str) -> None:
    """Raise for the first setting in which a command differs from the run that it would go on with.

    Raises
    ------
    RunError
        Naming the setting and both values.
    """
    for name in {**recorded, **asked}:
        if recorded.get(name) != asked.get(name):
            raise RunError(
                f"{where} was run with {name}={recorded.get(name)!r}, this command says {asked.get(name)!r}",
                hint="a resumed run must compute the same numbers: leave the option out, or give another --out",
            )
