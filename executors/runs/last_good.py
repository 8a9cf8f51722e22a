"""The weights of a run that went wrong, as they were when it still went well."""

from __future__ import annotations

from pathlib import Path

from executors.runs.adapters import save_tuned
from executors.runs.history import read_history
from executors.runs.inputs import copy_tokenizer
from executors.runs.replay import advance, load_base, plan_alone, session_at
from executors.runs.settings import RunSettings


def rebuild(settings: RunSettings, num_steps: int) -> None:
    """Write the weights after `num_steps` steps of a run to its directory, from its base and its log."""
    out = Path(settings.out)
    history = read_history(out)
    model = load_base(
        settings.model,
        settings.plan,
        adapters=settings.adapters,
        run=out,
        random_weights=settings.random_weights,
    )
    with session_at(None, history, model, plan=plan_alone(history), device=settings.device) as session:
        advance(session, history, num_steps)
        save_tuned(out, session, settings.adapters)
    copy_tokenizer(settings.model, out)
