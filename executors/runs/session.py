"""One rank's training session: a plan and a model in, steps out.

A loop of one's own takes a few lines::

    session = Session(plan, model, learning_rate=1e-6)
    for batch in batches:
        print(session.step(batch).loss)
    session.save_pretrained("tuned")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from torch import Tensor, nn

import zosim
from executors.datasets.batches import check_batch
from executors.device_scalars import DeviceScalar
from executors.formats import TORCH_DTYPES
from executors.low_bits.stored import UpdateCounts
from executors.models.forward_runner import forward_runner_for
from executors.models.model import Batch, LossDType, Objective, TextObjective
from executors.models.weight_files import save_pretrained, weights_digest
from executors.ranks.communicator import PIPELINE, Communicator, default_communicator
from executors.ranks.mesh import stage_of
from executors.ranks.rank_info import progress_of_this_rank
from executors.ranks.unsharded_model import UnshardedModel
from executors.runs.agreement import RankReport, StepInputs, refuse_disagreement
from executors.runs.base import BASE
from executors.runs.lazy_intervals import lazy_intervals_of
from executors.runs.measured import measured_timeline, messages_per_step
from executors.runs.records import StepRecord, record_of, refuse_nonfinite, seed_of
from executors.runs.runlog import header_of
from executors.steps.graphs import refuse_graphs
from executors.steps.interpreter import Hyperparameters, Interpreter, StepFrame
from executors.steps.memory import MemoryReport, ObservedSteps, report
from executors.steps.preparing import autocast_dtype, move_module_buffers, own_device, prepare
from executors.steps.present import PresentWeights
from executors.steps.streams import backend_for
from executors.steps.update_watch import UpdateLoss
from topology.errors import PlanError, RunError
from zosim.lowering import lower
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.operations import Allocate
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline

_OBSERVED_STEPS = 2
"""Steps whose memory is observed: the first, and the first with something pending. They are not timed."""

_SAME_ON_ALL_RANKS = (
    "torch",
    "instruction_set",
    "num_threads",
    "base_digest",
    "plan",
    "epsilon",
    "weight_decay",
    "seed",
    "loss_dtype",
    "trainable",
)
"""Fields of the header that ranks compare before the first step."""


@dataclass(frozen=True)
class BegunStep:
    """A step that has been issued (:meth:`Session.begin_step`)."""

    # Whether its losses are numbers of the host already, so that reading them waits for nothing.
    is_known: bool
    # Returns its losses and projected gradients, waiting for them; raises a RunError if one of them is not a number.
    record: Callable[[], StepRecord]


class Session:
    """Zeroth-order training of one model under one plan, on this rank.

    Parameters
    ----------
    plan : Plan
        Plan to run.
    model : torch.nn.Module
        A transformers causal language model. Its parameters move into the plan's buffers; use it through the
        session until :meth:`close`.
    program : Program or ProgramSet, optional
        What to run; by default what the plan is lowered to.
    learning_rate : float or callable
        A rate, or a function from the step's number to its rate.
    weight_decay : float
        Factor of the decay per step, times the learning rate.
    seed : int
        Determines the seed of every step and perturbation.
    device : str
        ``"cpu"``, or a CUDA device; of several ranks, ``"cuda"`` gives each its own.
    loss_dtype : str
        ``"model"``, or ``"fp64"`` to compute the loss in float64 from the model's logits.
    rank : int
        Index of this rank, under which spans are reported.
    num_timed_steps : int
        Number of steps whose spans are kept.
    num_sampling_threads : int
        Number of threads for one ``counter`` sampling on a CPU.
    num_micro_batches : int
        Number of parts that each batch is forwarded in; their losses are accumulated over labels.
    base_digest : str, optional
        Hash of the base weights for the header, where `model` holds later ones; by default `model`'s own.
    objective : callable or TextObjective, optional
        What is minimised in place of the model's loss: a function of logits and batch, or of text that the plan generates.
    communicator : Communicator, optional
        The other ranks of a plan that has several; by default those of torch's process group. All ranks then make the
        session, and call its methods in the same order; each is given the whole batch.
    checksums : bool
        Whether a checksum follows every change of weights, so that :meth:`verify` notices bits that nothing wrote.
    graphs : bool
        Whether draws and blocks are launched as CUDA graphs: fewer launches, the same numbers.
    disk_directory : path, optional
        Where blocks lie that the plan keeps on a drive; by default that of temporary files.

    Raises
    ------
    ZosimError
        If the plan, the program and the model do not fit each other.

    Attributes
    ----------
    first_timed_step : int
        First step that was run here rather than replayed.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        program: Program | ProgramSet | None = None,
        learning_rate: float | Callable[[int], float] = 1e-6,
        weight_decay: float = 0.0,
        seed: int = 0,
        device: str = "cpu",
        loss_dtype: LossDType = "model",
        rank: int = 0,
        num_timed_steps: int = 100,
        num_sampling_threads: int = 1,
        num_micro_batches: int = 1,
        base_digest: str | None = None,
        objective: Objective | TextObjective | None = None,
        communicator: Communicator | None = None,
        checksums: bool = False,
        graphs: bool = False,
        disk_directory: str | Path | None = None,
    ) -> None:
        self.plan = plan
        self.model = model
        self.communicator = communicator or default_communicator(plan.process_groups, own_device(device))
        self.rank = self._rank_among_others(rank)
        self.seed = seed
        self.weight_decay = weight_decay
        self._rate = learning_rate if callable(learning_rate) else lambda _step: learning_rate
        self._num_timed_steps = num_timed_steps
        if isinstance(program, ProgramSet):
            program = program.program_of(self.rank)
        self.program = program or lower(plan, self.rank)
        backend = backend_for(own_device(device))
        self.device = backend.device
        if graphs:
            is_allocated = any(isinstance(item.op, Allocate) for _, item in self.program.instructions())
            refuse_graphs(self.device, keeps_buffers=not is_allocated)
        if (progress := progress_of_this_rank()) is not None:
            progress.stage(stage_of(plan, self.rank))
            backend.note = progress.note
        prepare(model, plan, self.device)
        self.header = header_of(
            model,
            plan=plan.model_dump(mode="json"),
            epsilon=plan.estimator.epsilon,
            weight_decay=weight_decay,
            device=str(self.device),
            attention=plan.forward.attention,
            loss_dtype=loss_dtype,
            seed=seed,
            base_digest=base_digest or weights_digest(model, plan.storage_dtype),
        )
        if self.communicator is not None:
            facts = {"zosim_version": zosim.__version__, "configuration": self.header[BASE]} | {
                name: self.header[name] for name in _SAME_ON_ALL_RANKS
            }
            # Ranks that differ here would exchange losses of different models, and nothing would fail.
            self.communicator.refuse_unlike({name.replace("_", " "): value for name, value in facts.items()})
        self.forward_runner = forward_runner_for(
            plan,
            model,
            self.device,
            loss_dtype=loss_dtype,
            autocast_dtype=autocast_dtype(plan),
            objective=objective,
        )
        self._intervals = lazy_intervals_of(model)
        self.interpreter = Interpreter(
            self.program,
            self.forward_runner,
            Hyperparameters(plan.estimator.epsilon, weight_decay),
            backend,
            num_sampling_threads=num_sampling_threads,
            num_micro_batches=num_micro_batches,
            watch_updates=plan.loses_updates,
            checksums=checksums,
            communicator=self.communicator,
            graphs=graphs,
            disk_directory=disk_directory,
            adapter_rank_in_use=lambda: 0 if self._intervals is None else self._intervals.rank,
        )
        move_module_buffers(model, self.device)
        self.forward_runner.device = self.device
        storage = TORCH_DTYPES[plan.storage_dtype]
        self._whole = UnshardedModel(plan, self.forward_runner, self.communicator, storage, self.device)
        self._present = PresentWeights(self.forward_runner, storage, self.device, self._whole)
        if self._intervals is not None:
            if any(buffer.shared for buffer in self.program.buffers):
                raise PlanError(
                    "adapters whose A is sampled anew do not support a host copy that several ranks share",
                    hint="use --transfers private, or keep blocks on the devices",
                )
            self._intervals.stand_at(0)
        self._observed = ObservedSteps(self.device)
        self.first_timed_step = 0
        self._verified_steps = 0
        self._inputs = StepInputs()
        self._read_at_s = 0.0

    def _rank_among_others(self, rank: int) -> int:
        """Return this rank's number; raise unless as many ranks run as the plan has."""
        if self.communicator is None:
            return rank
        there, wanted = self.communicator.world_size, self.plan.placement.world_size
        if there != wanted:
            raise RunError(
                f"the plan has {wanted} ranks, but {there} were started",
                hint=f"start {wanted}, or make a plan for {there} (--mesh)",
            )
        return self.communicator.rank

    # -- training ----------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps run so far."""
        return self.interpreter.num_steps

    def step(
        self, batch: Batch, *, seeds: tuple[int, ...] | None = None, learning_rate: float | None = None
    ) -> StepRecord:
        """Run one step.

        Parameters
        ----------
        batch : mapping
            ``input_ids``, ``attention_mask`` and ``labels`` of shape (sequences, tokens), on the CPU: the sequences of all
            ranks, of which each takes its own.
        seeds : tuple of int, optional
            Number that starts the generator, one per perturbation; by default those that the session's seed determines.
        learning_rate : float, optional
            Learning rate of this step; by default the session's.

        Raises
        ------
        RunError
            If an instruction fails, or a loss is not a number.
        DataError
            If the batch lacks a tensor, or is too long.
        """
        return self.begin_step(batch, seeds=seeds, learning_rate=learning_rate).record()

    def begin_step(
        self, batch: Batch, *, seeds: tuple[int, ...] | None = None, learning_rate: float | None = None
    ) -> BegunStep:
        """Issue one step; its record can be read once the next has been begun, so that a device need not wait for the host.

        Records have to be read in the order of their steps.

        Parameters
        ----------
        batch, seeds, learning_rate
            As for :meth:`step`.
        """
        check_batch(batch, self.plan.model.max_positions)
        number = self.num_steps
        # Before the step: it flushes, and the step reads the new factors.
        self._open_interval(number)
        rate = self._rate(number) if learning_rate is None else learning_rate
        seeds = seeds or self.seeds_of(number)
        num_timed = number - self.first_timed_step
        # Events and spans of a long run would fill the memory.
        self.interpreter.backend.recording = num_timed < self._num_timed_steps
        begin = time.perf_counter()
        own_rows = self._own_rows(batch)
        with self._observed.step() if num_timed < _OBSERVED_STEPS else nullcontext():
            frame = self.interpreter.step(own_rows, seeds, rate)
        is_known = not any(isinstance(number, DeviceScalar) for number in frame.gradients.values())
        return BegunStep(is_known, partial(self._read, frame, batch, begin))

    def _read(self, frame: StepFrame, batch: Batch, begin_s: float) -> StepRecord:
        """Return the record of a step; raise if a projected gradient is not finite."""
        # A step is issued while the one before still runs: its time begins with that one's losses.
        record = record_of(frame, max(begin_s, self._read_at_s))
        self._read_at_s = time.perf_counter()
        if self.communicator is not None:
            # Noted before it is refused, so that a comparison of ranks sees what one of them alone was given.
            used = self.interpreter.hyperparameters
            self._inputs.note(
                record.step,
                batch,
                seeds=record.seeds,
                learning_rate=record.learning_rate,
                epsilon=used.epsilon,
                weight_decay=used.weight_decay,
                projected_gradients=record.projected_gradients,
            )
        refuse_nonfinite(record)
        return record

    def _open_interval(self, step: int) -> None:
        """If `step` begins an interval, close the adapters' open increment and sample their ``A`` anew."""
        if self._intervals is None or not self._intervals.opens(step):
            return
        self.flush()
        # Of other stages this rank has stand-ins alone.
        held = self.interpreter.store.held
        here = {
            id(tensor.parameter)
            for what, section in self.interpreter.store.sections.items()
            if what in held
            for tensor in section.tensors
        }
        self._intervals.open(step, is_here=lambda parameter: id(parameter) in here)
        self.interpreter.checksums.begin()

    def _own_rows(self, batch: Batch) -> Batch:
        if self.communicator is None:
            return batch
        num_rows, rows = batch["input_ids"].shape[0], self.plan.rows_of(self.rank)
        if num_rows != self.plan.batch:
            raise RunError(
                f"the plan has a batch of {self.plan.batch} sequences, but this one has {num_rows}"
            )
        return {name: tensor[rows.start : rows.stop] for name, tensor in batch.items()}

    def seeds_of(self, step: int) -> tuple[int, ...]:
        """Return the seeds of one step, a pure function of the session's seed."""
        return tuple(
            seed_of(self.seed, step, perturbation)
            for perturbation in range(self.interpreter.num_perturbations)
        )

    def start_at(
        self,
        step: int,
        seeds_of: Callable[[int], tuple[int, ...]] | None = None,
        losses: tuple[float, ...] = (),
    ) -> None:
        """Set the number of the next step: the model holds the weights after `step` steps. Only before the first step.

        Parameters
        ----------
        step : int
            Number of steps that the weights have behind them.
        seeds_of : callable, optional
            From the number of an earlier step to the seeds that it had; by default those that the session's seed determines.
        losses : tuple of float
            Of the step before at ``+ε``, one per perturbation, for a difference from these.
        """
        self.interpreter.start_at(step, seeds_of or self.seeds_of, losses)
        self.first_timed_step = self._verified_steps = step
        if self._intervals is not None:
            self._intervals.stand_at(step)

    def replay(self, record: StepRecord) -> None:
        """Apply a logged step to the weights, bit for bit, without its forwards.

        Raises
        ------
        RunError
            If the record is not the next step's.
        """
        # Each step's update depends on the weights before it.
        if record.step != self.num_steps:
            raise RunError(f"step {record.step} cannot be replayed as step {self.num_steps}")
        self.interpreter.backend.recording = False
        self._open_interval(record.step)
        self.interpreter.replay(
            record.seeds, record.projected_gradients, record.learning_rate, record.losses_plus
        )
        self.first_timed_step = self._verified_steps = self.num_steps

    def digest(self) -> str:
        """Flush, and return a hash over names, formats, shapes and bits of all parameters."""
        self.flush()
        with self._whole.here():
            # In the storage format, whose bits do not depend on where blocks lie.
            return weights_digest(self.model, self.plan.storage_dtype)

    def verify(self) -> None:
        """Flush, and raise unless weights hold what instructions wrote and all ranks did the same steps.

        Raises
        ------
        Disagreement
            On all ranks, if not; the message names the ranks, what differs, and since when.
        """
        self.flush()
        checksums, inputs = self.interpreter.checksums, self._inputs
        disturbances = checksums.disturbances(self.num_steps)
        reports = [RankReport(checksums.sums(), disturbances, inputs.history, inputs.latest)]
        if (others := self.communicator) is not None:
            reports = others.all_gather_json(reports[0], "comparing replicas", RankReport)
        members = others.members if others is not None else None
        refuse_disagreement(reports, self._verified_steps, self.num_steps, members)
        self._verified_steps, self._inputs = self.num_steps, StepInputs()

    def flush(self) -> None:
        """Apply pending updates; all ranks have to call it. Evaluations and checkpoints flush by themselves."""
        self.interpreter.flush()

    def on_rank_0(self, action: Callable[[], None], what: str) -> None:
        """Flush, and run an action on rank 0, which holds the whole model, while the others wait.

        Parameters
        ----------
        action : callable
            What rank 0 runs.
        what : str
            Name of the action in messages.
        """
        self.flush()
        if self.communicator is None:
            action()
            return
        with self._whole.here(only_on_first=True):
            self.communicator.on_rank_0(action, what)

    # -- the model as it stands --------------------------------------------------------------------------------

    @property
    def present(self) -> PresentWeights:
        """The current weights, after a flush: their losses and logits, and copies of them."""
        self.flush()
        return self._present

    def loss(self, batch: Batch) -> float:
        """Return the loss of a batch at the current weights."""
        return self.present.loss(batch)

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch at the current weights, on the session's device."""
        return self.present.logits(batch)

    def unsharded_model(self) -> AbstractContextManager[nn.Module]:
        """Flush, and yield the model with all its weights on the device in their storage format.

        For generation and other uses that need the whole model at once; an offloaded one has to fit for as long.
        """
        return self.present.unsharded_model(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the current parameters by name on the CPU, a tied one once."""
        return self.present.state_dict()

    def save_pretrained(self, directory: str | Path) -> None:
        """Flush, and write a directory that transformers loads, in the run's format."""
        storage = self.plan.storage_dtype
        self.on_rank_0(lambda: save_pretrained(self.model, directory, storage), "writing the weights")

    # -- measurements ------------------------------------------------------------------------------------------

    def lost_updates(self) -> UpdateLoss | None:
        """Return the share of updates so far that rounding undid; None where weights are kept in 32 bits or more."""
        watch = self.interpreter.update_watch
        return None if watch is None else watch.result()

    def quantized_updates(self) -> UpdateCounts | None:
        """Return what became of quantized updates so far, on all stages; None where no weights are quantized.

        All ranks have to ask. A tied table of quantized values counts on each of the two stages that hold it.
        """
        if not self.plan.storage.bits:
            return None
        own = self.interpreter.quantized_updates.read()
        if self.communicator is None or self.plan.num_stages == 1:
            return own
        counts = own.num, own.unchanged, own.saturated
        of_ranks = self.communicator.all_gather_json(
            counts, "adding up quantized values that moved", tuple[int, int, int]
        )
        stages = [of_ranks[rank] for rank in self.communicator.members(PIPELINE)]
        return UpdateCounts(*map(sum, zip(*stages, strict=True)))

    def messages_per_step(self) -> dict[str, float] | None:
        """Return how many messages go between all stages in a step, and the bytes that they had on the wire; flushes.

        With one stage and split points: those that stages would send. None without split points, or before a step was run.
        """
        self.flush()
        num_steps = self.num_steps - self.first_timed_step
        if not self.plan.split_points or not num_steps:
            return None
        between_stages = self.plan.num_stages > 1
        return messages_per_step(
            self.interpreter.boundaries, self.communicator, num_steps, between_stages=between_stages
        )

    def memory(self) -> MemoryReport:
        """Return the measured peaks of memory."""
        return report(self.device, self.interpreter.store.peak_bytes, self._observed.peak_bytes)

    def timeline(self) -> Timeline:
        """Return the measured spans of the steps that were timed, on all ranks, and their memory.

        Flushes. The first steps, whose memory was observed, do not count as periodic. Steps are counted from the
        first that was not replayed.
        """
        self.flush()
        return measured_timeline(
            self.interpreter,
            self.communicator,
            rank=self.rank,
            first_step=self.first_timed_step,
            num_steps=min(self.num_steps - self.first_timed_step, self._num_timed_steps),
            first_periodic_step=_OBSERVED_STEPS,
            memory=self.memory(),
        )

    # -- end ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session's streams. The model keeps its weights, in the plan's buffers."""
        self.interpreter.close()
