"""What zosim does with one tiny model, tried: each way against a literal MeZO loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import LoRA, spec_of_config
from executors.models.lora import block_linears
from executors.models.spec import plan_of_model, spec_of_model
from executors.runs.adapters import attach
from executors.runs.session import Session
from proofs_checks.setups.ranks import on_all_ranks
from studies.families.tiny import tiny_model
from studies.speed.reference import literal_step
from topology.errors import UnknownFamily, ZosimError
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.instructions import Space

NUM_STEPS, RATE, EPSILON, BATCH, TOKENS = 3, 1e-3, 1e-3, 2, 12
Verdict = dict[str, str]
"""A word (``yes``, ``refused``, ``differs``, ``fails``), and why."""


def tried(family: str, ways: Sequence[str]) -> dict[str, Verdict]:
    """Return what came of each of these ways to run a family's tiny model."""
    made: list[nn.Module] = []

    def make() -> str:
        made.append(tiny_model(family))
        with torch.no_grad():
            loss = made[0](**batches(_vocab(made[0]))[0], use_cache=False).loss
        if not torch.isfinite(loss):
            raise _Differs(f"its loss is {loss}")
        return f"{sum(p.numel() for p in made[0].parameters())} parameters"

    found = {"model": _verdict(make)}
    if found["model"]["word"] == "yes":
        for way in ways:
            # Not of a copy's copy: what was tried before must leave no trace.
            found[way] = _verdict(partial(WAYS[way], copy.deepcopy(made[0])))
    return found


def batches(vocab_size: int) -> list[dict[str, Tensor]]:
    """Return a batch for each step, one of whose sequences is padded on the right."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(3, min(vocab_size, 90), (BATCH, TOKENS), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, TOKENS - 4 :] = 0
        tokens[mask == 0] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


class _Differs(Exception):  # noqa: N818 - an outcome
    pass


def _verdict(way: Callable[[], str]) -> Verdict:
    try:
        return {"word": "yes", "why": way()}
    except ZosimError as error:
        return {"word": "refused", "why": _line(f"{error}")}
    except _Differs as error:
        return {"word": "differs", "why": _line(str(error))}
    except Exception as error:  # noqa: BLE001 - whatever a family raises is an outcome
        return {"word": "fails", "why": _line(f"{type(error).__name__}: {error}")}


def _line(text: str) -> str:
    return " ".join(text.split())[:400]


def _vocab(model: nn.Module) -> int:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


# -- the ways ---------------------------------------------------------------------------------------------------------


def _planned(model: nn.Module) -> str:
    config: Any = model.config
    text, parts = config.get_text_config(decoder=True), [model]
    tied = {"tie_word_embeddings": getattr(config, "tie_word_embeddings", text.tie_word_embeddings)}
    try:
        spec, how = spec_of_config(text.to_dict() | tied, name="tiny"), "from its configuration"
        if text is not config:  # a model of texts and images, of which the text model is run
            parts, how = [model.get_decoder(), model.get_output_embeddings()], "its text model, " + how  # type: ignore[operator]
    except UnknownFamily:
        spec, how = spec_of_model(model, "tiny"), "from the model"
    own = sum(p.numel() for p in {p for part in parts for p in part.parameters()})
    if spec.num_parameters != own:
        raise _Differs(f"{how}, {spec.num_parameters} parameters are counted of {own}")
    return how


def _plan(model: nn.Module, **axes: Any) -> Plan:
    return plan_of_model(model, batch=BATCH, seq=TOKENS, estimator={"epsilon": EPSILON}, **axes)


def _compared(model: nn.Module, plan: Plan) -> str:
    """Run a plan and the literal loop on copies of a model; raise unless every bit is the same."""
    literal, lines = copy.deepcopy(model), batches(_vocab(model))
    wanted = [
        literal_step(literal, {**batch, "use_cache": False}, step, RATE, EPSILON)
        for step, batch in enumerate(lines)
    ]

    def run(own: nn.Module, communicator: Any = None) -> tuple[list[float], dict[str, Tensor], float]:
        with Session(plan, own, learning_rate=RATE, communicator=communicator) as session:
            records = [session.step(batch, seeds=(step,)) for step, batch in enumerate(lines)]
            ratio = _predicted_peak(session.program) / session.memory().device_bytes
            return [record.projected_gradients[0] for record in records], session.state_dict(), ratio

    if plan.placement.world_size == 1:
        found = [run(model)]
    else:
        models = [copy.deepcopy(model) for _ in range(plan.placement.world_size)]
        found = list(on_all_ranks(plan, lambda rank, others: run(models[rank], others)))
    for gradients, weights, _ in found:
        if gradients != wanted:
            raise _Differs(f"projected gradients {gradients}, and {wanted} of the literal loop")
        own = dict(literal.named_parameters())
        if other := [name for name, tensor in weights.items() if not torch.equal(tensor, own[name].detach())]:
            raise _Differs(f"{len(other)} parameters, {other[0]} the first")
    return f"{PEAK}{min(ratio for *_, ratio in found):.2f}"


PEAK = "predicted peak over measured: "


def _predicted_peak(program: Program) -> int:
    buffers = sum(buffer.size_bytes for buffer in program.buffers if buffer.space is Space.DEVICE)
    return buffers + max(instruction.work.workspace_bytes for _, instruction in program.instructions())


def _staged(model: nn.Module) -> str:
    plan = _plan(model).model_dump(mode="json")
    middle = plan["model"]["num_blocks"] // 2 - 1
    plan["placement"]["devices"] *= 2
    plan |= {"mesh": {"stage": 2}, "split": {"cuts": [f"block.{middle}"]}}
    return _compared(model, Plan.model_validate(plan))


def _packed(model: nn.Module) -> str:
    attach(model, "linears")
    perturbations = {"distribution": "lozo", "rank": 2, "lazy_steps": 2}
    plan = _plan(model, perturbations=perturbations, weights={"perturbation": "adapters", "dtype": "float32"})
    with Session(plan, model, learning_rate=RATE) as session:
        for batch in batches(_vocab(model)):
            session.step(batch)
    return ""


def _quantized(model: nn.Module) -> str:
    with Session(
        _plan(model, low_bits={"weights": "int8", "scales": "channel"}), model, learning_rate=RATE
    ) as session:
        for batch in batches(_vocab(model)):
            session.step(batch)
    return ""


def _adapted(model: nn.Module) -> str:
    names = tuple(dict.fromkeys(name for name, *_ in block_linears(model)))
    if not names:
        raise ZosimError("the blocks of the model have no linear layer")
    attach(model, LoRA(rank=2, target_modules=names))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return _compared(model, _plan(model))


WAYS: dict[str, Callable[[nn.Module], str]] = {
    "plan": _planned,
    "resident": lambda model: _compared(model, _plan(model)),
    "offload": lambda model: _compared(model, _plan(model, residency={"blocks": "offloaded"})),
    "stages": _staged,
    "packed": _packed,
    "quantized": _quantized,
    "adapters": _adapted,
}
