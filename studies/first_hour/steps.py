"""Steps of OPT shapes with random weights: what they take, beside what was predicted and the least that any could."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

from executors.calibration.probing import token_batch
from executors.devices import device_module
from executors.models.spec import plan_of_model
from executors.runs.session import Session
from executors.turns import in_turns
from studies.first_hour.setting import Content, Setting
from studies.speed.reference import two_forwards
from zosim.analysis.compare import compare
from zosim.applications.trace import save_trace
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.plans import Placement, Plan
from zosim.program.instructions import Space, Stream
from zosim.simulators.simulate import simulate
from zosim.timeline import Timeline

SHAPES: Mapping[str, tuple[int, int, int]] = {
    "1.3b": (2048, 24, 32),
    "6.7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "tiny": (64, 3, 2),
}
"""Hidden size, blocks and heads of OPT by name, from its paper, Table 1."""

_VOCAB = {"tiny": 128}
_REAL_VOCAB = 50272
_NUM_WARM, _NUM_TIMED = 3, 7
_COPIES = (Stream.H2D, Stream.D2H)
_RESIDENCIES: Mapping[str, Mapping[str, Any]] = {
    "resident": {},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
}


@dataclass(frozen=True)
class Case:
    """One model, where its blocks are, its format, a batch, and whether kernels are launched by graphs."""

    shape: str
    residency: str
    dtype: str
    batch: int = 1
    seq: int = 2048
    graphs: bool = False

    @property
    def name(self) -> str:
        """A file's name."""
        graphs = "-graphs" if self.graphs else ""
        return f"{self.shape}-{self.residency}-{self.dtype}-{self.batch}x{self.seq}{graphs}"


def cases(setting: Setting) -> tuple[list[Case], list[Case], list[Case]]:
    """Return what to time at first, once the device is calibrated, and at last; small before large."""
    if setting.is_rehearsal:
        tiny = [Case("tiny", residency, "bfloat16", 2, 16) for residency in _RESIDENCIES]
        return [*tiny, *(replace(case, graphs=True) for case in tiny)], [], []
    smallest = [Case("1.3b", kind, "float16") for kind in _RESIDENCIES]
    large = [Case(shape, kind, "float16") for shape in ("6.7b", "13b") for kind in _RESIDENCIES]
    others = [Case("1.3b", kind, "bfloat16") for kind in _RESIDENCIES]
    short = [Case("1.3b", kind, "float16", 1, 32) for kind in _RESIDENCIES]
    return (
        [*smallest, *(replace(case, graphs=True) for case in smallest)],
        [*large, *others, *short, Case("13b", "offloaded", "bfloat16")],
        [Case("30b", "offloaded", "float16")],
    )


def opt_model(shape: str, dtype: str, max_positions: int = 2048, make: Callable[..., nn.Module] | None = None) -> nn.Module:  # fmt: skip
    """Return a model of OPT's shape with random weights on the host, made as fast as memory is written.

    - `shape`: a key of :data:`SHAPES`.
    - `make`: makes a model of a configuration; by default transformers' OPT.
    """
    from transformers import OPTConfig, OPTForCausalLM

    hidden, blocks, heads = SHAPES[shape]
    config = OPTConfig(
        vocab_size=_VOCAB.get(shape, _REAL_VOCAB), hidden_size=hidden, word_embed_proj_dim=hidden, ffn_dim=4 * hidden,
        num_hidden_layers=blocks, num_attention_heads=heads, max_position_embeddings=max_positions,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = (make or OPTForCausalLM)(config).to(getattr(torch, dtype))
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    tile = torch.empty(1 << 20).normal_(0, 0.02, generator=generator).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            if "norm" in name and name.endswith("weight"):
                flat.fill_(1.0)
                continue
            for piece in flat.split(len(tile)):
                piece.copy_(tile[: len(piece)])
    whole: nn.Module = model.eval()
    return whole


def plan_of(setting: Setting, case: Case, model: nn.Module) -> Plan:
    """Return the plan of a case."""
    placement = Placement(topology=setting.topology.name, devices=(setting.node,))
    axes = _RESIDENCIES[case.residency]
    return plan_of_model(model, batch=case.batch, seq=case.seq, placement=placement, **axes)


def timed_case(setting: Setting, case: Case) -> Content:
    """Return what a case takes and what was predicted, or that it does not fit."""
    vocab = _VOCAB.get(case.shape, _REAL_VOCAB)
    model = opt_model(case.shape, case.dtype, max(case.seq, 32))
    plan = plan_of(setting, case, model)
    program = lower(plan)
    profiles = setting.profiles()
    predicted = {
        name: simulate(program, Machine.from_topology(setting.topology, setting.node, profile))
        for name, profile in profiles.items()
    }
    reason = _does_not_fit(setting, next(iter(predicted.values())))
    if reason:
        return {"left_out": reason}
    batch = token_batch(case.batch, case.seq, vocab)
    options: dict[str, Any] = {"device": setting.device, "base_digest": "random", "graphs": case.graphs}
    with Session(plan, model, learning_rate=1e-7, **options) as session:
        for _ in range(_NUM_WARM):
            session.step(batch)
        ends, begun = [time.perf_counter()], session.begin_step(batch)
        for _ in range(_NUM_TIMED):
            # As `zosim run` does: what a step found is read once the next has been issued.
            record, begun = begun, session.begin_step(batch)
            gradient = record.record().projected_gradients[0]
            ends.append(time.perf_counter())
        begun.record()
        session.flush()
        timeline, memory = session.timeline(), session.memory()
        two_forwards_s = _two_forwards_s(session, batch) if case.residency == "resident" else None
    save_trace(timeline, setting.folder / f"{case.name}-trace.json", program)
    return {
        "step_s": median(b - a for a, b in pairwise(ends)),
        "predicted_s": {name: made.step_time_s for name, made in predicted.items()},
        "two_forwards_s": two_forwards_s,
        "projected_gradient": gradient,
        "device_bytes": memory.device_bytes,
        "allocator_bytes": memory.allocator_bytes,
        "predicted_device_bytes": _peak(next(iter(predicted.values())), Space.DEVICE),
        "host_bytes": memory.host_bytes,
        "predicted_host_bytes": _peak(next(iter(predicted.values())), Space.HOST),
        "lines": compare(list(predicted.values())[-1], timeline, program).summary_table().to_data(),
        **_overlap(timeline),
    }


def _peak(timeline: Timeline, space: Space) -> int:
    return timeline.peak_memory(space).size_bytes


def _does_not_fit(setting: Setting, predicted: Timeline) -> str:
    """Return why a case is not tried; empty if it is."""
    there = device_module(torch.device(setting.device)).get_device_properties(setting.device).total_memory
    needs = {
        "device": (_peak(predicted, Space.DEVICE), there),
        # The blocks are copied into pinned memory one after the other, while the model is still there.
        "host": (_peak(predicted, Space.HOST), psutil.virtual_memory().available),
    }
    for space, (wanted, available) in needs.items():
        if wanted > 0.97 * available:
            return f"{wanted / 2**30:.1f} GiB of {space} memory, of which there are {available / 2**30:.1f}"
    return ""


def _overlap(timeline: Timeline) -> Content:
    """Return how long streams were busy in a step, and which part of the copies computation hid."""
    step_s = timeline.step_time_s
    computing = timeline.busy([Stream.COMPUTE])
    copying = timeline.busy(_COPIES)
    both = timeline.busy([Stream.COMPUTE, *_COPIES])
    return {
        "computing_s": computing * step_s,
        "copying_s": copying * step_s,
        "one_way_s": max(timeline.busy([stream]) for stream in _COPIES) * step_s,
        "hidden": (computing + copying - both) / copying if copying else None,
    }


def _two_forwards_s(session: Session, batch: Mapping[str, torch.Tensor]) -> float:
    """Return what two forwards of the same model on the device take, each read."""
    data = {name: tensor.to(session.device) for name, tensor in batch.items()}
    with session.unsharded_model() as model:
        ways = {"forwards": lambda _: two_forwards(model, data)}
        return in_turns(ways, _NUM_TIMED, num_warm_rounds=_NUM_WARM)["forwards"].median_s


def zo2_case(setting: Setting, case: Case) -> Content:
    """Return what zo2's own package takes for a step of a case, or why it was not asked."""
    try:
        from zo2 import ZOConfig, zo_hf_init
    except ImportError as error:
        return {"left_out": f"zo2 is not installed: {error}"}
    options = ZOConfig(
        method="mezo-sgd", zo2=case.residency == "offloaded", offloading_device="cpu", working_device=setting.device,
        lr=1e-7, zo_eps=1e-3,
    )  # fmt: skip
    with zo_hf_init(options):
        import transformers
        from transformers import OPTForCausalLM
        from transformers.models.opt import modeling_opt

        # zo2 has put its own in one of these places; which one `from` finds depends on transformers' release.
        known = (OPTForCausalLM, transformers.OPTForCausalLM, modeling_opt.OPTForCausalLM)
        own = next((kind for kind in known if hasattr(kind, "zo_init")), None)
        if own is None:
            return {
                "left_out": f"zo2 has put no model of its own into transformers {transformers.__version__}"
            }
        model: Any = opt_model(case.shape, case.dtype, make=own)
        model.zo_init(options)
    batch = token_batch(case.batch, case.seq, _VOCAB.get(case.shape, _REAL_VOCAB))
    data = {name: batch[name].to(setting.device) for name in ("input_ids", "labels")}
    model.zo_train()
    ends = []
    for _ in range(_NUM_WARM + _NUM_TIMED + 1):
        float(model(**data))
        torch.accelerator.synchronize(setting.device)
        ends.append(time.perf_counter())
    seconds = [b - a for a, b in pairwise(ends[_NUM_WARM:])]
    peak = device_module(torch.device(setting.device)).max_memory_allocated(setting.device)
    del model
    gc.collect()
    return {"step_s": median(seconds), "device_bytes": peak}
