"""Rebuilds weights from base weights and a log: every logged step is applied again, without its forwards.

A step changes each parameter by ``+ε·z``, ``-2ε·z``, ``+ε·z`` and the update, in these operations and this order.
The first three do not cancel to the last bit, so a replay runs them too. It runs the very program of the run (or
another residency's, which computes the same), so draws, copies and conversions are the run's own; what it leaves out
are batches, forwards and losses, whose outcome the log holds.

.. [1] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333, on
   storage efficiency: seeds and projected gradients are enough to store a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costmodel.models.configs import Prefix
from executors.models.mapped import load_weights
from executors.models.weight_files import weights_digest
from executors.ranks.mesh import on_one_rank
from executors.runs.adapters import Tuned, attach, recorded_adapters, save_tuned
from executors.runs.base import base_facts, refuse_other_base, unknown_base
from executors.runs.checkpoint import Checkpoint, newest_checkpoint
from executors.runs.history import History, read_history
from executors.runs.programs import recorded_programs
from executors.runs.runlog import HEADER_NAME, machine_facts
from executors.runs.session import Session
from executors.steps.preparing import prepare
from topology.errors import RunError
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.program_set import ProgramSet

_MACHINE_FIELDS = (
    "torch",
    "instruction_set",
    "num_threads",
    "device",
    "device_name",
    "float32_matmul_precision",
    "attention_kernels",
    "cudnn",
)

OnStep = Callable[[int, int], None]
"""Called with the number of steps done, and how many there are to do."""


def replay(
    directory: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    num_steps: int | None = None,
    plan: Plan | None = None,
    device: str = "cpu",
    use_checkpoints: bool = False,
    warn: Callable[[str], None] = lambda _: None,
    on_step: OnStep = lambda _done, _all: None,
) -> dict[str, Any]:
    """Rebuild a run's weights and write them as a model directory.

    - `directory`: of the run.
    - `base`: the weights that it began from.
    - `num_steps`: steps to replay; by default all that were logged.
    - `plan`: another placement of the same mathematics; by default the run's own.
    - `use_checkpoints`: whether to start from a checkpoint rather than from the base weights.
    - `warn`: called with what may make bits differ from the run's.

    Raises RunError if a file of the run is damaged, the base is not the one it began from, or a digest differs.

    Returns
    -------
    dict
        ``num_steps``, ``digest`` of the parameters, ``digests_checked`` on the way.
    """
    history = read_history(directory)
    wanted = history.num_steps if num_steps is None else num_steps
    if not 0 <= wanted <= history.num_steps:
        raise RunError(f"{directory} has {history.num_steps} steps, so {wanted} cannot be replayed")
    settings = history.settings
    adapters = recorded_adapters(settings)
    model = load_base(
        str(base),
        plan or history.plan,
        adapters=adapters,
        run=history.directory,
        random_weights=settings.get("random_weights", False),
    )
    # Before any step: replayed on other weights, a log gives a model that nobody trained.
    check_base(history, model, base)
    for difference in machine_differences(history.header, device):
        warn(difference)
    checkpoint = newest_checkpoint(history, model, warn) if use_checkpoints else None
    placed = plan or plan_for_one_rank(history)
    with session_at(checkpoint, history, model, plan=placed, device=device) as session:
        checked = advance(session, history, wanted, on_step=on_step)
        save_tuned(out, session, adapters, save_as=settings.get("save_as", "numbers"))
        return {"num_steps": wanted, "digest": session.digest(), "digests_checked": checked}


def load_base(
    source: str,
    plan: Plan,
    *,
    adapters: Tuned | None = None,
    run: Path | None = None,
    random_weights: bool = False,
    allow_download: bool = False,
) -> nn.Module:
    """Return the base weights as a run begins with them, adapters attached: in its format, or mapped in their own."""
    # What a prefix begins as is computed with weights in the plan's format.
    model = load_weights(
        source,
        plan,
        is_mapped=not isinstance(adapters, Prefix),
        random_weights=random_weights,
        allow_download=allow_download,
    )
    if adapters is not None:
        attach(model, adapters, run=run, plan=plan)
    prepare(model, plan, torch.device("cpu"))
    return model


def check_base(history: History, model: nn.Module, source: str | Path) -> None:
    """Raise unless `model` holds the weights that a run began from.

    Raises RunError if a name, a bit or a field of the configuration differs.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    recorded = history.header["trainable"]
    if names != recorded:
        first = next((n for n in [*recorded, *names] if n not in names or n not in recorded), "their order")
        raise RunError(f"{source} is not the model that {history.directory} tuned: {first} differs")
    if weights_digest(model, history.plan.storage_dtype) != history.header["base_digest"]:
        raise RunError(
            f"{source} is not the base of {history.directory}: their hashes differ",
            hint=f"{HEADER_NAME} names {history.settings.get('model', 'the base')}; give the base weights, "
            "not the tuned ones",
        )
    refuse_other_base(history.header, base_facts(model), str(source), str(history.directory))


def machine_differences(header: Mapping[str, Any], device: str) -> list[str]:
    """Describe what differs from where the run began, or is unknown, and may change bits."""
    here = machine_facts(device)
    return unknown_base(header) + [
        f"{name} was {header[name]} where the run began and is {here[name]} here: bits may differ"
        for name in _MACHINE_FIELDS
        if name in header and name in here and header[name] != here[name]
    ]


def session_at(
    checkpoint: Checkpoint | None,
    history: History,
    model: nn.Module,
    *,
    plan: Plan | None = None,
    program: Program | ProgramSet | None = None,
    **options: Any,
) -> Session:
    """Return a session on the run's weights after a checkpoint, or on its base weights.

    - `model`: with the base's weights, which have been checked.
    - `plan`, `program`: another placement; by default the run's own.

    Raises RunError if `plan` would round weights where the run did not, or the other way round.
    """
    if plan is None:
        program = program or recorded_programs(history.directory, history.header)
    elif on_one_rank(plan) != on_one_rank(history.plan) and (
        plan.is_transfer_lossy or history.plan.is_transfer_lossy
    ):
        raise RunError(
            f"{history.directory} and the requested placement differ, and one of them rounds weights in "
            "transfers",
            hint="replay it with the placement of the run",
        )
    elif (named := plan.identity()["weights"]) != (recorded := history.plan.identity()["weights"]):
        raise RunError(
            f"{history.directory} used weights={recorded}, but the requested placement uses {named}: "
            "their bits differ",
            hint="replay it with the placement of the run",
        )
    if checkpoint is not None:
        checkpoint.load(model)
    header = history.header
    session = Session(
        plan or history.plan,
        model,
        program=program,
        **{
            "weight_decay": header["weight_decay"],
            "seed": header["seed"],
            "loss_dtype": header["loss_dtype"],
            "base_digest": header["base_digest"],
            "disk_directory": history.directory,
            **options,
        },
    )
    done = checkpoint.num_steps if checkpoint else 0
    # A residual difference needs the losses of the step before.
    losses = history.records[done - 1].losses_plus if done else ()
    session.start_at(done, lambda step: history.records[step].seeds, losses)
    return session


def plan_for_one_rank(history: History) -> Plan | None:
    """Return the plan by which one rank replays a run of several ranks; None for a run of one."""
    return on_one_rank(history.plan) if history.plan.placement.world_size > 1 else None


def advance(
    session: Session, history: History, num_steps: int, *, on_step: OnStep = lambda _done, _all: None
) -> int:
    """Replay a run's steps up to `num_steps`, and return how many digests agreed.

    It flushes where the run did, and nowhere else: where flushing rounds weights, a run that goes on from here would
    otherwise not be the one that was interrupted.

    Raises RunError if the parameters do not have a digest that the run recorded.
    """
    # Only where flushing rounds weights does it matter when the run did.
    periods = history.periods if history.plan.is_transfer_lossy else ()
    checked = 0
    for record in history.records[session.num_steps : num_steps]:
        session.replay(record)
        done = record.step + 1
        if any(done % period == 0 for period in periods):
            session.flush()
        if done in history.digests:
            if (digest := session.digest()) != history.digests[done]:
                raise RunError(
                    f"{history.directory}: after {done} steps the parameters have digest {digest}, but the run "
                    f"recorded {history.digests[done]}",
                    hint="bits are reproducible for one torch build, instruction set, device type and thread count; "
                    f"{HEADER_NAME} has the run's",
                )
            checked += 1
        on_step(done, num_steps)
    return checked
