"""A run from its settings to a model directory: the host loop of one rank.

Order decides what a crash can lose. A step's rows reach the disk before anything that depends on them; a digest or
a checkpoint of ``n`` steps is written when the log has them. Whatever is due after ``n`` steps and not on disk is
done again on resuming, so that no instant is special.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from costmodel.models.configs import Prefix
from executors.datasets.batches import Batches
from executors.datasets.objectives import objective_named
from executors.files import write_atomically
from executors.models.quantized import other_kernel
from executors.models.weight_files import weights_digest
from executors.ranks.communicator import Communicator, default_communicator
from executors.ranks.launch import process_group
from executors.ranks.rank_info import is_launched
from executors.reference_speed import reference_now_s
from executors.runs.adapters import keep_beginning, save_tuned
from executors.runs.agreement import Disagreement
from executors.runs.base import BASE, base_facts, refuse_other_base, tokenizer_facts
from executors.runs.checkpoint import save_checkpoint
from executors.runs.evaluations import Evaluations
from executors.runs.history import History
from executors.runs.inputs import copy_tokenizer, open_data, pad_token, text_objective
from executors.runs.programs import PROGRAM_DIGEST, PROGRAM_NAME, program_digest, recorded_programs
from executors.runs.records import DivergenceWatch, LossNotFinite, StepRecord
from executors.runs.replay import (
    advance,
    check_base,
    load_base,
    machine_differences,
    replay,
    session_at,
)
from executors.runs.reporter import Reporter
from executors.runs.run_files import (
    BEST_NAME,
    METRICS_NAME,
    NUM_VERIFIED,
    EarlierRun,
    RunFiles,
    is_begun,
    remove_partial,
)
from executors.runs.runlog import REFUSED_NAME, RunLog, write_header
from executors.runs.session import BegunStep, Session
from executors.runs.settings import RunSettings, refuse_other_identity
from executors.steps.preparing import own_device
from executors.threads import use_threads
from topology.errors import RunError
from zosim.console import stderr
from zosim.lowering import lower_all

__all__ = ["BEST_NAME", "METRICS_NAME", "PLAN_NAME", "TIMELINE_NAME", "Run", "run_in_rank"]

T = TypeVar("T")

PLAN_NAME = "plan.json"
TIMELINE_NAME = "timeline.json"

_PACED_STEPS = 20
"""Steps that are worth the seconds of looking at the pace before them."""

_REFERENCE_S = 0.5


def run_in_rank(settings: RunSettings) -> dict[str, Any]:
    """Run as one of the ranks that a launcher started, or alone.

    Returns
    -------
    dict
        What the run came to; see :class:`Run`.
    """
    use_threads(settings.run.num_threads)
    device_type = settings.run.device.partition(":")[0]
    with process_group(device_type, timeout_s=settings.run.timeout_s) if is_launched() else nullcontext():
        return Run(
            settings,
            default_communicator(
                settings.plan.process_groups, own_device(settings.run.device), settings.run.timeout_s
            ),
        ).run()


class Run:
    """One rank's run. Rank 0 writes the files; the others do the same steps.

    Raises ZosimError if the model, the data or the directory cannot be used.
    """

    def __init__(self, settings: RunSettings, communicator: Communicator | None = None) -> None:
        self.settings = settings
        self.out = Path(settings.run.out)
        self.communicator = communicator
        self.writes = communicator is None or communicator.is_first
        self.data = open_data(settings, settings.data)
        self._refuse_unlike()
        if settings.plan.batch > len(self.data):
            self._warn(
                f"a batch of {settings.plan.batch} exceeds the {len(self.data)} lines of "
                f"{settings.data.path}: every step repeats some of them"
            )
        self.batches = Batches(
            self.data,
            settings.plan.batch,
            shuffle=settings.data.shuffle,
            seed=settings.run.seed,
            pad_token=pad_token(settings),
        )
        self.records: list[StepRecord] = []
        self._tokens: dict[int, int] = {}
        # Steps that the log has and nobody verified: a rank may have gone astray in them before another died.
        self._unverified: deque[StepRecord] = deque()
        self.reference_s: float | None = None
        self.evaluations = Evaluations(settings)

    def _refuse_unlike(self) -> None:
        """Raise unless all ranks have the same settings and read the same data."""
        if self.communicator is None:
            return
        settings, program = self.settings, self.settings.program
        facts = settings.identity(self.data.lines.sha256) | {
            "number_of_steps": settings.num_steps,
            "digest_every": settings.run.digest_every,
            "checkpoint_every": settings.run.checkpoint_every,
            "evaluation": settings.evaluation,
            "tokenizer": None if self.data.template is None else tokenizer_facts(settings.run.model),
            "early_stop": settings.run.early_stop,
            "program": None if program is None else program_digest(program.to_json()),
        }
        # As texts, which JSON carries and everybody can read.
        self.communicator.refuse_unlike({name.replace("_", " "): str(v) for name, v in facts.items()})

    def run(self) -> dict[str, Any]:
        """Train, and return a summary.

        Returns
        -------
        dict
            ``num_steps``, ``first_loss``, ``last_loss``, ``step_time_s``, ``device_bytes`` and the like.
        """
        # The directory's lock before anything in it is read: what another process still writes is not known yet.
        with ExitStack() as self._held:

            def lock() -> None:
                is_begun(self.out, resume=self.settings.run.resume)  # what is refused is not touched
                self.log = self._held.enter_context(RunLog(self.out))

            self._on_rank_0(lock, "locking the directory of the run")
            self.earlier = EarlierRun(
                self.out, resume=self.settings.run.resume, communicator=self.communicator
            )
            self.history = self.earlier.history
            model = self._base()
            # A session ends with the run, wherever it fails.
            with ExitStack() as self._opened:
                session = self._session(model)
                del model
                if note := other_kernel(session.plan, session.device):
                    self._warn(note)
                if not self.settings.run.checksums:
                    self._report_no_checksums()
                stopped = self._train(session)
                if stopped is None:
                    return self._finish(session)
                self._verify(session)  # a bit that changed can ruin a loss, too
            keep, why = stopped
            return self._keep_last_good(keep, why)

    # -- beginning ---------------------------------------------------------------------------------------------

    def _base(self) -> nn.Module:
        settings = self.settings
        model = load_base(
            settings.run.model,
            settings.plan,
            adapters=settings.adapters,
            run=None if self.history is None else self.earlier.directory,
            random_weights=settings.run.random_weights,
            allow_download=settings.run.allow_download,
        )
        if self.history is not None:
            header = self.history.header
            data_sha256 = self.history.settings.get("data_sha256")
            if data_sha256 is None:
                raise RunError(
                    f"{self.out} was not written by `zosim run`", hint="resume it with the loop that wrote it"
                )
            requested = settings.identity(self.data.lines.sha256, self.history.plan)
            recorded = RunSettings.of_header(header).identity(data_sha256)
            refuse_other_identity(recorded, requested, str(self.out))
            check_base(self.history, model, settings.run.model)
            refuse_other_base(header, self._base_facts(model), settings.run.model, str(self.out))
        return model

    def _base_facts(self, model: nn.Module) -> dict[str, Any]:
        """Return what the header records of the base beside its weights: its configuration, and its tokenizer if lines are text."""
        is_text = self.data.template is not None
        return base_facts(model) | (
            {"tokenizer": tokenizer_facts(self.settings.run.model)} if is_text else {}
        )

    def _session(self, model: nn.Module) -> Session:
        """Return a session on the weights that the log leads to, and write the header, the plan and the programs."""
        settings = self.settings
        options = {
            "learning_rate": settings.learning_rate.at,
            "device": settings.run.device,
            "num_timed_steps": settings.run.num_timed_steps,
            "num_sampling_threads": settings.run.num_threads,
            "num_micro_batches": settings.run.accumulate,
            "objective": text_objective(settings)
            or objective_named(settings.run.objective, from_here=not settings.run.resume),
            "communicator": self.communicator,
            "checksums": settings.run.checksums,
            "graphs": settings.run.graphs,
            # Beside the log rather than among temporary files, which are often in memory.
            "disk_directory": settings.run.disk_directory or (self.out if self.out.is_dir() else None),
        }
        if self.history is None:
            return self._first_session(model, options)
        history = self.history
        for difference in machine_differences(history.header, settings.run.device):
            self._warn(difference)
        checkpoint = self.earlier.checkpoint(history, model, self._warn)
        verified = self.earlier.num_verified(history, checkpoint)
        program = settings.program
        plan = None if settings.plan == history.plan and program is None else settings.plan
        session = self._opened.enter_context(
            session_at(checkpoint, history, model, plan=plan, program=program, **options)
        )
        self.header = dict(history.header) | {
            "plan": settings.plan.model_dump(mode="json"),
            "run": settings.to_header(self.data.lines.sha256),
            "resumed": [
                *history.header.get("resumed", []),
                {"num_steps": history.num_steps, NUM_VERIFIED: verified},
            ],
        }
        self.header.pop("finished", None)  # what goes on has not
        self.header[BASE] = self.header.get(BASE) or self._base_facts(session.model)
        if self.writes:
            # The header before programs: those that it does not speak of are made again.
            self.log.resume(history.num_bytes)
            remove_partial(self.out)
            # While the plan stays, so do its programs: what lowering makes of it may have changed since.
            is_kept = plan is None and recorded_programs(self.out, history.header) is not None
            programs = None if is_kept else self._programs()
            write_header(self.out, self.header)
            self._save_plan(programs)
        self._report(
            f"resuming after {history.num_steps} steps, from "
            + (f"the checkpoint of {checkpoint.num_steps}" if checkpoint else "the base weights")
        )
        if verified < history.num_steps:
            self._report(
                f"{history.num_steps - verified} of these were not verified before the run ended, and run again"
            )
        advance(session, history, verified)
        self.records = list(history.records[:verified])
        self._unverified.extend(history.records[verified:])
        return session

    def _first_session(self, model: nn.Module, options: dict[str, Any]) -> Session:
        settings = self.settings
        storage = settings.plan.storage_dtype
        session = self._opened.enter_context(
            Session(
                settings.plan,
                model,
                program=settings.program,
                weight_decay=settings.run.weight_decay,
                seed=settings.run.seed,
                loss_dtype=settings.run.loss_dtype,
                base_digest=weights_digest(model, storage),
                **options,
            )
        )
        self.header = session.header | {
            BASE: self._base_facts(model),
            "run": settings.to_header(self.data.lines.sha256),
        }
        if isinstance(settings.tuned, Prefix):
            session.on_rank_0(lambda: keep_beginning(model, self.out, storage), "writing the prefix")
        if self.writes:
            remove_partial(self.out)
            self._save_plan(self._programs())
            self.log.begin(self.header)
        return session

    def _report_no_checksums(self) -> None:
        """Tell what detects changed bits in a run without checksums, which is the default on CUDA."""
        plan = self.settings.plan
        has_replicas = plan.placement.world_size > plan.num_stages
        by = "only where ranks hold the same weights, at verifications" if has_replicas else "by nothing"
        self._report(
            f"weights have no checksums: a bit that flips in memory is detected {by}; add --checksums to detect it"
        )

    def _programs(self) -> str:
        """Return the text of the run's programs, and note its digest in the header."""
        text = (self.settings.program or lower_all(self.settings.plan)).to_json()
        self.header[PROGRAM_DIGEST] = program_digest(text)
        return text

    def _save_plan(self, programs: str | None) -> None:
        write_atomically(self.out / PLAN_NAME, self.settings.plan.model_dump_json(indent=2) + "\n")
        if programs is not None:
            write_atomically(self.out / PROGRAM_NAME, programs)

    # -- training ----------------------------------------------------------------------------------------------

    def _train(self, session: Session) -> tuple[int, str] | None:
        """Train to the last step. If the run diverges, return the last good number of steps and the reason."""
        if self.history is not None:
            self.evaluations.recall(self.earlier.directory, session.num_steps)
        with self._opened_files(session.num_steps) if self.writes else nullcontext() as self._files:
            return self._steps(session)

    def _opened_files(self, begin: int) -> RunFiles:
        settings = self.settings
        reporter = Reporter(
            settings.num_steps,
            begin=begin,
            out=self.out,
            tensorboard=settings.run.tensorboard,
            every=settings.run.log_every,
        )
        goes_on = self.history is not None
        return RunFiles(self.log, reporter, self.records, num_tokens=self._num_tokens, goes_on=goes_on)

    def _num_tokens(self, step: int) -> int:
        """Return the number of tokens of a step's batch without padding, read again for steps of an earlier process."""
        if step not in self._tokens:
            self._tokens[step] = self.batches.num_tokens(step)
        return self._tokens[step]

    def _steps(self, session: Session) -> tuple[int, str] | None:
        watch = DivergenceWatch()
        for record in self.records:
            watch.diverges(record.step + 1, record.loss)
        # What was due after the steps behind us may have been lost with the process that ran them.
        self._due(session)
        if self.settings.run.device == "cpu" and self.settings.num_steps - session.num_steps >= _PACED_STEPS:
            # Rank 0 alone: ranks that measure at the same time would see each other.
            self.reference_s = self._on_rank_0(
                partial(reference_now_s, _REFERENCE_S), "measuring the slowdown"
            )
        begun: deque[BegunStep] = deque()
        # Steps that the log has are run again to the last one, also where fewer are asked for by now.
        last = max(self.settings.num_steps, len(self.records) + len(self._unverified))
        while (number := session.num_steps) < last:
            batch = self.batches.batch(number)
            self._tokens[number] = batch.num_tokens
            begun.append(session.begin_step(asdict(batch)))
            # The log may be one step behind a device that would have to wait for it, but not behind what is due.
            done = session.num_steps
            is_behind = not (begun[-1].is_known or any(self._is_due(done)) or done == last)
            while len(begun) > is_behind:
                try:
                    record = begun.popleft().record()
                except LossNotFinite as error:
                    self._replace_unverified()
                    return watch.last_good(len(self.records)), error.message
                self._write(record)
                if watch.diverges(record.step + 1, record.loss) and self.settings.stops_early:
                    return (
                        watch.best_step,
                        f"step {record.step}: training diverged: the loss is {record.loss:.4g}",
                    )
            self._due(session)
        return None

    def _write(self, record: StepRecord) -> None:
        """Write a step to the log, unless an earlier process did with the same numbers."""
        logged = self._unverified[0] if self._unverified else None
        if logged is not None and replace(record, seconds=logged.seconds) == logged:
            if self._files is not None:
                self._files.step_again(logged)
            self.records.append(self._unverified.popleft())
            return
        self._replace_unverified()
        if self._files is not None:
            self._files.step(record)
        self.records.append(record)

    def _replace_unverified(self) -> None:
        """Remove unverified steps from the log: run again, they have other numbers."""
        if self._unverified:
            self._warn(
                f"step {self._unverified[0].step} differs from its log: it and later steps run "
                f"again; {REFUSED_NAME} keeps the old rows"
            )
            self._unverified.clear()
            if self.writes:
                self.log.truncate(len(self.records))

    def _due(self, session: Session) -> None:
        """Take the digest, the checkpoint and the evaluation that are due after the steps so far."""
        done = session.num_steps
        digest, checkpoint, evaluation = self._is_due(done)
        if digest or checkpoint or evaluation:
            self._verify(session)
        if digest:

            def write() -> None:
                assert self._files is not None
                self._files.digest(done, session.digest())

            session.on_rank_0(write, "hashing the parameters")
        if checkpoint:
            self._save_checkpoint(session, done)
        if evaluation:
            metrics = self.evaluations.evaluate(session)
            if self._files is not None:
                self._files.evaluation(done, metrics)

    def _is_due(self, done: int) -> tuple[bool, bool, bool]:
        """Return whether a digest, a checkpoint and an evaluation are due after `done` steps."""
        settings = self.settings
        digest, checkpoint = (
            bool(every and done and done % every == 0)
            for every in (settings.run.digest_every, settings.run.checkpoint_every)
        )
        return digest, checkpoint, self.evaluations.is_due(done)

    def _verify(self, session: Session) -> None:
        """Verify the weights and the steps of all ranks; if they differ, truncate the log to the last agreement.

        Raises Disagreement: on all ranks.
        """
        try:
            session.verify()
        except Disagreement as error:
            agreed = error.num_agreed_steps
            # The launcher ends all ranks with the first that refuses: none may before the log is truncated.
            self._on_rank_0(lambda: self.log.truncate(agreed), "truncating the log")
            error.hint = f"{error.hint}; `--resume` continues after {agreed} steps, and {REFUSED_NAME} keeps the others"
            raise

    def _save_checkpoint(self, session: Session, done: int) -> None:
        history = History(self.out, self.header, tuple(self.records), 0, {})

        def save() -> None:
            save_checkpoint(
                session.model,
                self.out,
                dtype=self.settings.plan.storage_dtype,
                num_steps=done,
                base_digest=self.header["base_digest"],
                history_digest=history.digest(done),
            )

        session.on_rank_0(save, "writing a checkpoint")

    def _on_rank_0(self, action: Callable[[], T], what: str) -> T:
        """Run an action that needs no model on rank 0 while the others wait; if it fails, all ranks fail."""
        return action() if self.communicator is None else self.communicator.on_rank_0(action, what)

    # -- end ---------------------------------------------------------------------------------------------------

    def _finish(self, session: Session) -> dict[str, Any]:
        summary = self._summary(session)
        first = session.first_timed_step
        if session.num_steps > first:
            timeline = session.timeline()
            if self.writes:
                periodic = [self._num_tokens(first + step) for step in timeline.periodic_steps]
                timeline = replace(
                    timeline,
                    reference_s=self.reference_s,
                    tokens_per_step=statistics.fmean(periodic) if periodic else None,
                )
                write_atomically(self.out / TIMELINE_NAME, timeline.to_json())
        self._verify(session)

        def finish() -> None:
            self.log.refuse_moved()
            summary["digest"] = session.digest()
            save_tuned(self.out, session, self.settings.adapters, save_as=self.settings.run.save_as)
            copy_tokenizer(self.settings.run.model, self.out)
            # Last: where a run has finished, everything else is there.
            write_header(self.out, self.header | {"finished": summary})

        session.on_rank_0(finish, "writing the weights")
        return summary

    def _summary(self, session: Session) -> dict[str, Any]:
        session.flush()
        memory, last = session.memory(), self.records[-10:]
        lost, updated = session.lost_updates(), session.quantized_updates()
        # Not the two whose memory was observed.
        timed = self.records[session.first_timed_step + 2 :] or self.records
        step_time_s = statistics.median(record.seconds for record in timed)
        tokens_per_step = statistics.fmean(self._num_tokens(record.step) for record in timed)
        return {
            "out": str(self.out),
            "num_steps": session.num_steps,
            "first_loss": self.records[0].loss,
            "last_loss": statistics.fmean(record.loss for record in last),
            "step_time_s": step_time_s,
            "tokens_per_step": tokens_per_step,
            "tokens_per_s": tokens_per_step / step_time_s,
            "device_bytes": memory.device_bytes,
            "host_bytes": memory.host_bytes,
            "arena_bytes": {f"{space}/{role}": size for (space, role), size in memory.arena_bytes.items()},
            "live_bytes": memory.live_bytes,
            "peak_rss_bytes": memory.peak_rss_bytes,
            "messages": session.messages_per_step(),
            "lost_updates": None if lost is None else asdict(lost),
            "quantized_updates": None if updated is None else asdict(updated),
            "evaluation": self.evaluations.latest,
            "best_evaluation": self.evaluations.best,
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _keep_last_good(self, num_steps: int, why: str) -> dict[str, Any]:
        """Rebuild the weights after `num_steps` steps, write them, and raise a RunError with advice."""
        settings = self.settings

        def rebuild() -> None:
            replay(self.out, settings.run.model, self.out, num_steps=num_steps, device=settings.run.device)
            copy_tokenizer(settings.run.model, self.out)

        self._on_rank_0(rebuild, "rebuilding the last good weights")
        raise RunError(
            f"{why}; the run stopped, and {self.out} holds the weights after {num_steps} steps",
            hint="lower --lr (by 3 to 10 times), or raise --num-perturbations; if the first step fails, look for a "
            "batch without labels, or use --dtype float32 or bfloat16 instead of float16",
        )

    # -- words -------------------------------------------------------------------------------------------------

    def _report(self, text: str) -> None:
        if self.writes:
            stderr.print(text, markup=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._report(f"warning: {text}")
