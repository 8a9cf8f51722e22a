"""A run from its settings to a model directory: the host loop of one rank.

Order decides what a crash can lose. A step's rows reach the disk before anything that depends on them; a digest or
a checkpoint of ``n`` steps is written when the log has them. Whatever is due after ``n`` steps and not on disk is
done again on resuming, so that no instant is special.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executors.adapters import keep_beginning, save_alone, save_tuned
from executors.batches import Batches
from executors.checkpoint import CHECKPOINTS_NAME, newest_checkpoint, save_checkpoint
from executors.history import DIGESTS_NAME, History, read_history
from executors.inputs import copy_tokenizer, evaluation_data, generation_of, open_data, pad_token
from executors.jsonlines import JsonLines, read_lines
from executors.launch import RankInfo, process_group
from executors.measure import Evaluator, is_better
from executors.objectives import objective_named
from executors.records import LossNotFinite, StepRecord
from executors.replay import (
    PROGRAM_NAME,
    advance,
    check_base,
    load_base,
    machine_differences,
    session_at,
)
from executors.reporter import Reporter
from executors.runlog import HEADER_NAME, STEPS_NAME, RunLog, weights_digest, write_header
from executors.session import Session
from executors.settings import RunSettings, refuse_other_identity
from executors.watch import DivergenceWatch
from topology.errors import RunError
from zosim.console import stderr

PLAN_NAME = "plan.json"
METRICS_NAME = "metrics.jsonl"
TIMELINE_NAME = "timeline.json"
BEST_NAME = "best"


def run_in_rank(settings: RunSettings) -> dict[str, Any]:
    """Run as one of the ranks that a launcher started, or alone.

    Returns
    -------
    dict
        What the run came to; see :class:`Run`.
    """
    torch.set_num_threads(settings.num_threads)
    launched = "MASTER_ADDR" in os.environ
    with process_group(settings.device.partition(":")[0]) if launched else nullcontext():
        return Run(settings).run()


class Run:
    """One rank's run.

    Parameters
    ----------
    settings : RunSettings

    Raises
    ------
    ZosimError
        If the model, the data or the directory cannot be used.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.out = Path(settings.out)
        self.history = self._history()
        self.data = open_data(settings, settings.data)
        self.batches = Batches(
            self.data,
            settings.plan.batch,
            shuffle=settings.data.shuffle,
            seed=settings.seed,
            pad_token=pad_token(settings),
        )
        self.evaluation = evaluation_data(settings)
        self.records: list[StepRecord] = []
        self._best: dict[str, Any] | None = None
        self._latest: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Train, and return a summary.

        Returns
        -------
        dict
            ``num_steps``, ``first_loss``, ``last_loss``, ``step_time_s``, ``device_bytes`` and the like.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        model = self._base()
        with self._session(model) as session:
            del model
            stopped = self._train(session)
            if stopped is None:
                return self._finish(session)
        keep, why = stopped
        return self._keep_last_good(keep, why)

    # -- beginning ---------------------------------------------------------------------------------------------

    def _history(self) -> History | None:
        """Return what an earlier process left, if this one is to go on with it."""
        if not (self.out / HEADER_NAME).exists():
            if (self.out / STEPS_NAME).exists():
                raise RunError(
                    f"{self.out} has a log but no {HEADER_NAME}, so it is not known what run it is of"
                )
            return None
        if not self.settings.resume:
            raise RunError(
                f"{self.out} holds a run already",
                hint="go on with it (--resume), give another --out, or remove that directory",
            )
        if not (self.out / STEPS_NAME).exists():
            return None  # killed before the first step: nothing is lost by beginning again
        return read_history(self.out)

    def _base(self) -> nn.Module:
        settings = self.settings
        model = load_base(
            settings.model,
            settings.plan,
            adapters=settings.adapters,
            run=None if self.history is None else self.out,
            random_weights=settings.random_weights,
            allow_download=settings.allow_download,
        )
        if self.history is not None:
            recorded = self.history.settings.get("identity")
            if recorded is None:
                raise RunError(
                    f"{self.out} was not written by `zosim run`", hint="go on with the loop that wrote it"
                )
            refuse_other_identity(recorded, settings.identity(self.data.lines.sha256), str(self.out))
            check_base(self.history, model, settings.model)
        return model

    def _session(self, model: nn.Module) -> Session:
        """Return a session on the weights that the log leads to, its files open behind them."""
        settings = self.settings
        options = {
            "learning_rate": settings.schedule.at,
            "device": settings.device,
            "rank": RankInfo.here().rank,
            "num_timed_steps": settings.num_timed_steps,
            "num_draw_threads": settings.num_threads,
            "num_micro_batches": settings.accumulate,
            "objective": objective_named(settings.objective),
        }
        if self.history is None:
            return self._first_session(model, options)
        history = self.history
        for difference in machine_differences(history.header, settings.device):
            _warn(difference)
        checkpoint = newest_checkpoint(history, model, _warn)
        program = settings.program
        plan = None if settings.plan == history.plan and program is None else settings.plan
        session = session_at(checkpoint, history, model, plan=plan, program=program, **options)
        self._clean()
        header = dict(history.header) | {
            "plan": settings.plan.model_dump(mode="json"),
            "run": settings.to_header(self.data.lines.sha256),
            "resumed": [*history.header.get("resumed", []), {"num_steps": history.num_steps}],
        }
        header.pop("finished", None)
        if plan is not None:
            self._save_plan(session)
        self.log = RunLog.resumed(self.out, history.num_bytes)
        self.header = header
        write_header(self.out, header)
        stderr.print(
            f"going on after {history.num_steps} steps, from "
            + (f"the checkpoint of {checkpoint.num_steps}" if checkpoint else "the base weights"),
            markup=False,
        )
        advance(session, history, history.num_steps)
        self.records = list(history.records)
        return session

    def _first_session(self, model: nn.Module, options: dict[str, Any]) -> Session:
        settings = self.settings
        session = Session(
            settings.plan,
            model,
            program=settings.program,
            weight_decay=settings.weight_decay,
            seed=settings.seed,
            loss_dtype=settings.loss_dtype,
            base_digest=weights_digest(model, settings.plan.precision.storage),
            **options,
        )
        self._clean()
        keep_beginning(model, self.out, settings.adapters, settings.plan.precision.storage)
        self._save_plan(session)
        self.header = session.header | {"run": settings.to_header(self.data.lines.sha256)}
        self.log = RunLog(self.out, self.header)
        return session

    def _save_plan(self, session: Session) -> None:
        self.settings.plan.save(self.out / PLAN_NAME)
        session.program.save(self.out / PROGRAM_NAME)

    def _clean(self) -> None:
        """Remove what a process that was killed had begun to write."""
        for folder in (self.out, self.out / CHECKPOINTS_NAME, self.out / BEST_NAME):
            for partial in folder.glob(".*.partial"):
                partial.unlink()

    # -- training ----------------------------------------------------------------------------------------------

    def _train(self, session: Session) -> tuple[int, str] | None:
        """Train to the last step; where that cannot be, return the last good number of steps and what happened."""
        settings = self.settings
        begin = session.num_steps
        with self.log, self._metrics(begin) as metrics, self._digests() as digests:
            self._files = metrics, digests
            with Reporter(
                settings.num_steps,
                begin=begin,
                tokens_per_step=settings.plan.tokens_per_step,
                out=self.out,
                tensorboard=settings.tensorboard,
                every=settings.log_every,
            ) as self._reporter:
                self._evaluator = self._make_evaluator(session)
                return self._steps(session)

    def _steps(self, session: Session) -> tuple[int, str] | None:
        watch = DivergenceWatch()
        for record in self.records:
            watch.diverges(record.step + 1, record.loss)
        self._due(session)
        while (number := session.num_steps) < self.settings.num_steps:
            try:
                record = session.step(asdict(self.batches.batch(number)))
            except LossNotFinite as error:
                return watch.last_good(number), error.message
            self.log.append(record.rows())
            self.records.append(record)
            self._files[0].append([_metrics_row(record, self.settings.plan.tokens_per_step)])
            self._reporter.step(record)
            if watch.diverges(record.step + 1, record.loss) and self.settings.early_stop:
                return watch.best_step, f"step {record.step}: the loss, {record.loss:.4g}, has left for good"
            self._due(session)
        return None

    def _due(self, session: Session) -> None:
        """Do what is due after the steps so far and has not been done."""
        settings, done = self.settings, session.num_steps
        if settings.digest_every and done and done % settings.digest_every == 0:
            self._record_digest(session, done)
        if settings.checkpoint_every and done and done % settings.checkpoint_every == 0:
            session.flush()
            self._save_checkpoint(session, done)
        evaluation = settings.evaluation
        if evaluation is not None and (
            done in (0, settings.num_steps) or (evaluation.every and done % evaluation.every == 0)
        ):
            self._evaluate(session, done)

    def _record_digest(self, session: Session, done: int) -> None:
        session.compare_replicas()
        digest = session.digest()
        if done not in self._digested:
            self._files[1].append([{"num_steps": done, "digest": digest}])
            self._digested.add(done)

    def _save_checkpoint(self, session: Session, done: int) -> None:
        history = History(self.out, self.header, tuple(self.records), 0, {})
        save_checkpoint(
            session.model,
            self.out,
            dtype=self.settings.plan.precision.storage,
            num_steps=done,
            base_digest=self.header["base_digest"],
            history_digest=history.digest(done),
        )

    # -- evaluation --------------------------------------------------------------------------------------------

    def _make_evaluator(self, session: Session) -> Evaluator | None:
        wanted = self.settings.evaluation
        if wanted is None or self.evaluation is None:
            return None
        return Evaluator(
            session,
            self.evaluation,
            batch_size=self.settings.plan.batch,
            num_examples=wanted.num_examples,
            task=wanted.task,
            generation=generation_of(self.settings, wanted),
        )

    def _evaluate(self, session: Session, done: int) -> None:
        evaluator = self._evaluator
        assert evaluator is not None
        if self._latest is not None and self._latest["num_steps"] == done:
            return  # an earlier process did it
        metrics = {"num_steps": done, "split": "eval", **evaluator()}
        if is_better(metrics, self._best):
            self._best = metrics
            if self.settings.evaluation is not None and self.settings.evaluation.keep_best:
                self._keep_best(session)
        self._latest = metrics
        self._files[0].append([metrics])
        self._reporter.evaluation(done, {k: v for k, v in metrics.items() if k not in ("num_steps", "split")})

    def _keep_best(self, session: Session) -> None:
        folder = self.out / BEST_NAME
        if self.settings.adapters is None:
            session.save_pretrained(folder)
            copy_tokenizer(self.settings.model, folder)
        else:
            save_alone(session.model, folder, self.settings.adapters, self.settings.plan.precision.storage)

    # -- files -------------------------------------------------------------------------------------------------

    @contextmanager
    def _metrics(self, num_steps: int) -> Iterator[JsonLines]:
        """Open the metrics behind the steps that the log has, and complete them."""
        path = self.out / METRICS_NAME
        behind = itertools.takewhile(lambda line: line.row["num_steps"] <= num_steps, read_lines(path))
        lines = list(behind) if self.history is not None else []
        kept = {line.row["num_steps"] for line in lines if line.row["split"] == "train"}
        with JsonLines(path, keep_bytes=lines[-1].end if lines else 0, durable=False) as file:
            tokens = self.settings.plan.tokens_per_step
            file.append(_metrics_row(r, tokens) for r in self.records if r.step + 1 not in kept)
            self._recall_evaluations([line.row for line in lines if line.row.get("split") == "eval"])
            yield file

    def _recall_evaluations(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if is_better(row, self._best):
                self._best = row
            self._latest = row

    @contextmanager
    def _digests(self) -> Iterator[JsonLines]:
        path = self.out / DIGESTS_NAME
        lines = read_lines(path) if self.history is not None else []
        self._digested = {line.row["num_steps"] for line in lines}
        with JsonLines(path, keep_bytes=lines[-1].end if lines else 0) as file:
            yield file

    # -- end ---------------------------------------------------------------------------------------------------

    def _finish(self, session: Session) -> dict[str, Any]:
        settings = self.settings
        summary = self._summary(session)
        if session.num_steps > session.first_timed_step:
            session.timeline().save(self.out / TIMELINE_NAME)
        digest = session.digest()
        save_tuned(self.out, session, settings.adapters)
        copy_tokenizer(settings.model, self.out)
        summary["digest"] = digest
        write_header(self.out, self.header | {"finished": summary})
        return summary

    def _summary(self, session: Session) -> dict[str, Any]:
        session.flush()
        memory, last = session.memory(), self.records[-10:]
        lost = session.lost_updates()
        recent = [record.seconds for record in self.records[session.first_timed_step + 2 :]]
        step_time_s = statistics.median(recent or [record.seconds for record in self.records])
        return {
            "out": str(self.out),
            "num_steps": session.num_steps,
            "first_loss": self.records[0].loss,
            "last_loss": statistics.fmean(record.loss for record in last),
            "step_time_s": step_time_s,
            "tokens_per_s": self.settings.plan.tokens_per_step / step_time_s,
            "device_bytes": memory.device_bytes,
            "host_bytes": memory.host_bytes,
            "arena_bytes": {f"{space}/{role}": size for (space, role), size in memory.arena_bytes.items()},
            "live_bytes": memory.live_bytes,
            "peak_rss_bytes": memory.peak_rss_bytes,
            "lost_updates": None if lost is None else asdict(lost),
            "evaluation": self._latest,
            "best_evaluation": self._best,
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _keep_last_good(self, num_steps: int, why: str) -> dict[str, Any]:
        """Rebuild the weights after `num_steps` steps, write them, and end with advice.

        Raises
        ------
        RunError
            Always.
        """
        history = read_history(self.out)
        model = load_base(
            self.settings.model,
            self.settings.plan,
            adapters=self.settings.adapters,
            run=self.out,
            random_weights=self.settings.random_weights,
        )
        with session_at(None, history, model, device=self.settings.device) as session:
            advance(session, history, num_steps)
            save_tuned(self.out, session, self.settings.adapters)
        copy_tokenizer(self.settings.model, self.out)
        raise RunError(
            f"{why}; the run was stopped, and {self.out} holds the weights after {num_steps} steps",
            hint="lower --lr (by 3 to 10), or raise --queries; where the first step fails already, look for a batch "
            "without labels, or use --dtype float32 or bfloat16 in place of float16",
        )


def _metrics_row(record: StepRecord, tokens: int) -> dict[str, Any]:
    return {
        "num_steps": record.step + 1,
        "split": "train",
        "loss": record.loss,
        "projected_grad": record.projected_gradients[0],
        "learning_rate": record.learning_rate,
        "seconds": record.seconds,
        "tokens_per_s": tokens / record.seconds,
    }


def _warn(text: str) -> None:
    stderr.print(f"warning: {text}", markup=False, soft_wrap=True)
