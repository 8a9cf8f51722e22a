"""Runs a program: every instruction is done as its operation and its operands say, and by nothing else.

What the program does not say, the caller does: batches, seeds and learning rates are numbers of a step. Each
instruction is resolved once into an action; a step then only calls actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from costmodel.models.model_spec import HEAD
from executors.device_scalars import DeviceScalar
from executors.low_bits.stored import UpdateCounts
from executors.models.model import Batch, SegmentedModel
from executors.models.parameters import stand_in
from executors.randomness.low_rank import LazyInterval
from executors.ranks.communicator import Communicator
from executors.ranks.host_memory import HOST, HostMemory
from executors.steps.buffers import BufferStore
from executors.steps.checksums import WeightChecksums
from executors.steps.disk import DiskFile
from executors.steps.frames import Hyperparameters, StepFrame
from executors.steps.graphs import Graphs
from executors.steps.ops import Action, Actions, Context
from executors.steps.ops.codec import BoundaryActions
from executors.steps.streams import Backend, PeersTicket, Task, Ticket
from executors.steps.update_watch import UpdateWatch
from executors.threads import SamplingThreads
from topology.errors import ProgramError, RunError
from zosim.eval_points import EvalPoint
from zosim.program import Program
from zosim.program.instructions import PHASES, Buffer, Dependency, Instruction, Phase, Space
from zosim.program.operations import Backward, Collective, Forward, Optimize, Sample
from zosim.program.validate import validate

__all__ = ["Hyperparameters", "Interpreter", "StepFrame"]


class Interpreter:
    """One rank's program at work on a model.

    - `forward_runner`: its parameters move into the program's buffers.
    - `num_sampling_threads`: threads that share draws on a CPU.
    - `num_micro_batches`: micro-batches of a batch, whose losses are accumulated.
    - `watch_updates`: whether to count updates that rounding undoes.
    - `checksums`: whether a checksum follows every change of weights (:class:`executors.steps.checksums.WeightChecksums`).
    - `communicator`: the other ranks, where the program takes any.
    - `graphs`: whether draws and blocks are launched as CUDA graphs.
    - `disk_directory`: on the drive that the program has buffers on.
    - `adapter_rank_in_use`: returns how much forwards read of adapters whose rank grows.

    Raises ProgramError if the program is invalid, is not one for this model, or goes backward, which only the simulator does.
    """

    def __init__(
        self,
        program: Program,
        forward_runner: SegmentedModel,
        hyperparameters: Hyperparameters,
        backend: Backend,
        *,
        num_sampling_threads: int = 1,
        num_micro_batches: int = 1,
        watch_updates: bool = False,
        checksums: bool = False,
        communicator: Communicator | None = None,
        graphs: bool = False,
        disk_directory: str | Path | None = None,
        adapter_rank_in_use: Callable[[], int] = int,
    ) -> None:
        _refuse_first_order(program)
        # A program may come from an edited file, and actions trust what the validator has seen.
        validate(program)
        self.program = program
        self.backend = backend
        self._forward_runner = forward_runner
        self._communicator = communicator
        self._host_memory = _host_memory(program, communicator, backend)
        positions = (
            {name: communicator.position(name) for name in program.process_groups} if communicator else {}
        )
        on_disk = [buffer for buffer in program.buffers if buffer.space == Space.DISK]
        self._disk = DiskFile(on_disk, disk_directory) if on_disk else None
        # Pinned together before any is allocated: one by one, each would take up to twice its size.
        roles = ("weights", "disk buffers")
        at_rest = [b for b in program.buffers if b.space == Space.HOST and b.role in roles and not b.shared]
        backend.reserve([buffer.size_bytes for buffer in at_rest])
        self.store = BufferStore(program, forward_runner, self._allocated, positions)
        self.checksums = WeightChecksums(program, self.store, backend, every_change=checksums)
        self.hyperparameters = hyperparameters
        self.update_watch = UpdateWatch(program, self.store, backend.device) if watch_updates else None
        self._context = Context(
            program,
            forward_runner,
            self.store,
            hyperparameters,
            backend,
            threads=SamplingThreads(num_sampling_threads),
            num_micro_batches=num_micro_batches,
            ranks=communicator,
            remote_loss_dtype=_remote_loss_dtype(program, forward_runner, num_micro_batches),
            graphs=Graphs(backend.device, backend.capture_stream) if graphs else None,
            disk=self._disk,
            adapter_rank_in_use=adapter_rank_in_use,
        )
        self._actions = Actions(self._context)
        self._resolved = {phase: self._resolve(phase) for phase in PHASES}
        self._frame: StepFrame | None = None
        self._tickets: Mapping[str, Ticket] = {}
        self._next_step = 0
        self._lazy_steps = _lazy_steps(program)
        self._interval: LazyInterval | None = None
        self._losses_before: dict[EvalPoint, float | DeviceScalar] = {}
        self._turn = 0
        self._load_weights()

    @property
    def num_perturbations(self) -> int:
        """Perturbations per step."""
        return self._actions.num_perturbations

    @property
    def quantized_updates(self) -> UpdateCounts:
        """What became of the updates of quantized weights."""
        return self._actions.param_passes.counts

    @property
    def boundaries(self) -> BoundaryActions:
        """What this rank sends to the next stage."""
        return self._actions.boundaries

    @property
    def num_steps(self) -> int:
        """Number of the next step."""
        return self._next_step

    @property
    def is_pending(self) -> bool:
        """Whether a step has run since the last flush."""
        return self._frame is not None

    # -- host loop ---------------------------------------------------------------------------------------------

    def step(self, batch: Batch, seeds: Sequence[int], learning_rate: float) -> StepFrame:
        """Run one step, and the prologue before the first or the first after a flush.

        - `batch`: ``input_ids``, ``labels`` and ``attention_mask``, each of shape (sequences, tokens), on the host.
        - `seeds`: one per perturbation.
        - `learning_rate`: the one that this step's projected gradient is applied with, whenever that happens.

        Raises RunError if the number of seeds is not that of perturbations, or an instruction fails.

        Returns
        -------
        StepFrame
            With its losses and projected gradients, numbers of a device perhaps still on their way.
        """
        self._check_perturbations(seeds)
        return self._advance(self._frame_of(seeds, learning_rate, batch))

    def replay(
        self,
        seeds: Sequence[int],
        gradients: Sequence[float],
        learning_rate: float,
        losses: Sequence[float] = (),
    ) -> StepFrame:
        """Do to the weights what a step with these projected gradients did, without its forwards.

        - `seeds`, `gradients`: one per perturbation, as they were logged.
        - `losses`: at ``+ε``, one per perturbation, where the next step asks for them.

        Every instruction but batches, forwards and losses runs as it did: the perturbations too, since
        ``+ε, -2ε, +ε`` does not restore every bit.
        """
        self._check_perturbations(seeds)
        frame = self._frame_of(seeds, learning_rate, None)
        # Forwards, losses and exchanges see this, and do nothing.
        frame.replayed = True
        frame.gradients.update(enumerate(gradients))
        frame.losses_read.update(
            {EvalPoint(perturbation, 1): loss for perturbation, loss in enumerate(losses)}
        )
        return self._advance(frame)

    def _frame_of(self, seeds: Sequence[int], learning_rate: float, batch: Batch | None) -> StepFrame:
        number, seeds = self._next_step, tuple(seeds)
        # Perturbations of one interval share factors, which are drawn of the seeds of its first step.
        if number == self.first_of_interval:
            self._interval = LazyInterval(number, seeds)
        assert self._interval is not None
        frame = StepFrame(number, seeds, learning_rate, batch, self._interval, self._frame)
        frame.losses_before = self._losses_before
        return frame

    def _check_perturbations(self, seeds: Sequence[int]) -> None:
        if len(seeds) != self.num_perturbations:
            raise RunError(f"the program needs {self.num_perturbations} seeds per step, but got {len(seeds)}")

    def _advance(self, frame: StepFrame) -> StepFrame:
        if self._frame is None:
            # After a load or a flush the model is bound to where the weights rest, which the step may free.
            held = [*self.program.initial, *self.program.final]
            self._context.let_go([access for access in held if self.store.is_weights(access)])
            self._run("prologue", StepFrame(self._next_step))
        else:
            # A step is asked for its predecessor alone: a chain of frames would keep the whole run alive.
            self._frame.previous = None
        self._run("step", frame)
        frame.batch = None  # a pending update needs the numbers alone
        self._frame, self._losses_before = frame, frame.losses_read
        self._next_step += 1
        return frame

    def flush(self) -> None:
        """Apply what is pending, wait for everything, and leave the weights in their final places.

        A step that follows begins as the first one did. Without a step since the last flush, nothing happens; with one, all
        ranks have to flush.
        """
        was_pending = self.is_pending
        if was_pending:
            self._run("flush", StepFrame(self._next_step, previous=self._frame))
            self._frame = None
        # Drained first: afterwards no ticket is waited for, and their events can go.
        self.backend.drain()
        self._tickets = {}
        if was_pending and self._communicator is not None and self._host_memory is not None:
            self._communicator.barrier("flush")  # the host's copy holds what all of its ranks wrote
        self.bind_final()

    def bind_final(self) -> None:
        """Let the model's parameters be what lies in the program's final places."""
        self._context.bind([access for access in self.program.final if self.store.is_weights(access)])

    def start_at(
        self, step: int, seeds_of: Callable[[int], Sequence[int]], losses: Sequence[float] = ()
    ) -> None:
        """Number the next step; only before the first, or after a flush.

        - `seeds_of`: from the number of an earlier step to its seeds: factors of perturbations may be older than `step`.
        - `losses`: of the step before at ``+ε``, one per perturbation.
        """
        # A pending update would take the number of another step.
        assert self._frame is None
        self._next_step = step
        self._losses_before = {EvalPoint(perturbation, 1): loss for perturbation, loss in enumerate(losses)}
        first = self.first_of_interval
        # Factors that the next step uses were sampled earlier, from that step's seeds.
        if first < step:
            self._interval = LazyInterval(first, tuple(seeds_of(first)))

    @property
    def first_of_interval(self) -> int:
        """The step whose seeds decide the factors that the next step's perturbations share with others: itself where none do."""
        return self._next_step - self._next_step % self._lazy_steps

    def close(self) -> None:
        """End the streams."""
        self.backend.close()
        if self._context.graphs is not None:
            self._context.graphs.close()
        self._context.threads.close()
        if self._host_memory is not None:
            self._host_memory.close()
        if self._disk is not None:
            self._disk.close()

    def _run(self, phase: Phase, frame: StepFrame) -> None:
        before = self._tickets
        if not self._resolved[phase]:
            return
        # Ranks of one host run the same phases, so a count of them names the same one on each.
        self._turn += 1
        makers = [
            partial(self._task, item, phase, frame, before, self._turn) for item in self._resolved[phase]
        ]
        with torch.no_grad():
            # Without autograd: leaves are changed in place, and no graph may hold activations.
            self._tickets = self.backend.run(makers)

    def _task(
        self,
        item: _Resolved,
        phase: Phase,
        frame: StepFrame,
        before: Mapping[str, Ticket],
        turn: int,
        now: dict[str, Ticket],
    ) -> Task:
        after = [now[name] for name in item.waits]
        # The first step, and the first after a flush, have no step before them.
        after += [before[name] for name in item.waits_before if name in before]
        task = Task(item.instruction, phase, frame.step, partial(item.action, frame), after)
        memory = self._host_memory
        if memory is not None:
            after += [
                PeersTicket(memory, edge.instruction, turn - edge.distance, self.backend.has_failed)
                for edge in item.peers
                if edge.distance == 0 or edge.instruction in before
            ]
            if memory.is_awaited(item.instruction.id):
                task.done = partial(memory.note, item.instruction.id, turn)
        return task

    # -- weights -----------------------------------------------------------------------------------------------

    def _load_weights(self) -> None:
        """Move the model's parameters into the program's initial places, one group after the other."""
        self._let_go()
        with torch.no_grad():
            held = [access for access in self.program.initial if self.store.is_weights(access)]
            for number, access in enumerate(held):
                placed = self.store.placed(access)
                if self._writes(number, self.program.buffer(access.buffer)):
                    for tensor, stored in zip(placed.section.tensors, placed.held, strict=True):
                        stored.load(tensor.held, tensor.name)
                self._context.bind([access])
        if self._host_memory is not None and self._communicator is not None:
            # Each rank has loaded some groups of the shared copy; the first upload needs all of them.
            self._communicator.barrier("loading the weights")
        self.checksums.begin()

    def _let_go(self) -> None:
        """Let parameters that other stages hold be zeros that take no memory: masks are made with them as with any."""
        absent = [
            tensor
            for what, section in self.store.sections.items()
            if what not in self.store.held
            for tensor in section.tensors
        ]
        for tensor in absent:
            tensor.hold(stand_in(tensor, self.backend.device))

    def _writes(self, number: int, buffer: Buffer) -> bool:
        """Whether this rank puts the weights into a buffer: those that a host has once, by turns."""
        if not buffer.shared or self._communicator is None:
            return True
        return number % len(self._communicator.members(HOST)) == self._communicator.position(HOST)

    def _allocated(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        if buffer.space == Space.DISK and self._disk is not None:
            return self._disk.tensor(buffer, num_elements, dtype)
        if buffer.shared and self._host_memory is not None:
            return self._host_memory.tensor(buffer, num_elements, dtype)
        return self.backend.allocate(buffer, num_elements, dtype)

    def _resolve(self, phase: Phase) -> list[_Resolved]:
        instructions: tuple[Instruction, ...] = getattr(self.program, phase)
        streams = {instruction.id: instruction.stream for instruction in instructions}
        resolved = []
        for instruction in instructions:
            # A stream runs its own instructions in order: only those of other streams are waited for.
            waits = tuple(
                d.instruction
                for d in instruction.after
                if not d.process_group and d.distance == 0 and streams[d.instruction] != instruction.stream
            )
            before = tuple(
                d.instruction for d in instruction.after if not d.process_group and d.distance == 1
            )
            peers = tuple(d for d in instruction.after if d.process_group)
            action = self._actions.of(phase, instruction)
            if self.update_watch is not None:
                action = self.update_watch.watched(instruction, action)
            # Checksums go around all else: verified before anything reads the weights, taken after the last change.
            action = self.checksums.watched(phase, instruction, action)
            resolved.append(_Resolved(instruction, action, waits, before, peers))
        return resolved


@dataclass(frozen=True, slots=True)
class _Resolved:
    """An instruction with its action, and those of other streams, phases or ranks that it waits for."""

    instruction: Instruction
    action: Action
    waits: tuple[str, ...]
    waits_before: tuple[str, ...]
    peers: tuple[Dependency, ...]


def _lazy_steps(program: Program) -> int:
    """Return the steps that factors of perturbations are kept for. Raises ProgramError if draws disagree about it."""
    lazy = {i.op.lazy_steps for _, i in program.instructions() if isinstance(i.op, Sample)}
    if len(lazy) > 1:
        raise ProgramError(
            f"program {program.name} keeps factors of perturbations for {sorted(lazy)} steps at once",
            hint="lower the plan again",
        )
    return lazy.pop() if lazy else 1


def _refuse_first_order(program: Program) -> None:
    """Raise if `program` is a first-order step.

    Raises ProgramError naming the first instruction that nothing executes.
    """
    for phase, instruction in program.instructions():
        op = instruction.op
        is_not_run = isinstance(op, Collective) and not hasattr(Communicator, op.function)
        if is_not_run or isinstance(op, Backward | Optimize):
            message = (
                f"program {program.name}: {phase}/{instruction.id} belongs to a first-order step, which can "
                "only be simulated"
            )
            raise ProgramError(
                message, hint="run a zeroth-order plan; `zosim simulate --first-order` compares the two"
            )


def _remote_loss_dtype(
    program: Program, forward_runner: SegmentedModel, num_micro_batches: int
) -> torch.dtype | None:
    """Return the format that other stages compute losses in; None where this one does."""
    if any(isinstance(i.op, Forward) and i.op.segment == HEAD for i in program.step):
        return None
    # Losses of several micro-batches are accumulated in float64.
    return forward_runner.loss_format() if num_micro_batches == 1 else torch.float64


def _host_memory(program: Program, communicator: Communicator | None, backend: Backend) -> HostMemory | None:
    """Return the memory that a program shares with other ranks of its host, if it shares any."""
    if communicator is None or not any(buffer.shared for buffer in program.buffers):
        return None
    memory = HostMemory(program, communicator)
    # torch pins memory that the host has already through CUDA's runtime alone, which ROCm's answers for; without, copies
    # take a detour over memory of the driver's.
    if backend.device.type == "cuda":
        memory.pin()
    return memory
