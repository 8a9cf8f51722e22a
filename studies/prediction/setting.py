"""Models, plans and sessions of cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from executors.buffers import TORCH_DTYPES
from executors.model import Batch
from executors.session import Session
from executors.spec import spec_of_model
from studies.prediction.cases import Case, Shape
from zosim.plan import Estimator, Mesh, Placement, Plan, Precision, Residency, Runtime

if TYPE_CHECKING:
    from torch import nn

_NARROWER = {"float32": "bfloat16", "bfloat16": "float8_e4m3"}


def plan_of(case: Case, model: nn.Module, *, topology: str, device: str) -> Plan:
    """Return the plan of a case for its model."""
    axes = {axis: dict(fields) for axis, fields in case.axes.items()}
    precision: dict[str, Any] = {"storage": case.dtype, "compute": case.dtype, "transfer": case.dtype}
    if axes.get("precision", {}).get("transfer") == "narrower":
        precision["transfer"] = _NARROWER[case.dtype]
    return Plan(
        model=spec_of_model(model, name=case.shape.name),
        placement=Placement(topology=topology, devices=(device,) * case.num_ranks),
        mesh=Mesh(**axes.get("mesh", {})),
        batch=case.batch,
        seq=case.seq,
        estimator=Estimator(**axes.get("estimator", {})),
        residency=Residency(**axes.get("residency", {})),
        precision=Precision(**precision),
        runtime=Runtime(**axes.get("runtime", {})),
    )


def session_of(case: Case, *, topology: str, device: str) -> Session:
    """Return a session of a case; torch's number of threads must be the case's already."""
    model = model_of(case.shape).to(TORCH_DTYPES[case.dtype])
    plan = plan_of(case, model, topology=topology, device=device)
    return Session(plan, model, learning_rate=1e-7, num_draw_threads=case.num_threads)


def batch_of(case: Case, seed: int = 0) -> Batch:
    """Return a batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(case.shape.vocab, (case.batch, case.seq), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def model_of(shape: Shape) -> nn.Module:
    """Return a model with random weights, always the same for one shape."""
    makers = {"opt": _opt, "gpt2": _gpt2, "llama": _llama}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return makers[shape.family](shape)


def _opt(shape: Shape) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    model: nn.Module = OPTForCausalLM(
        OPTConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            word_embed_proj_dim=shape.hidden,
            ffn_dim=4 * shape.hidden,
            num_hidden_layers=shape.num_blocks,
            num_attention_heads=shape.num_heads,
            max_position_embeddings=256,
            tie_word_embeddings=shape.tied,
            **_TOKENS,
        )
    )
    return model


def _gpt2(shape: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab,
            n_embd=shape.hidden,
            n_layer=shape.num_blocks,
            n_head=shape.num_heads,
            n_positions=256,
            tie_word_embeddings=shape.tied,
            **_TOKENS,
        )
    )
    return model


def _llama(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=(8 * shape.hidden // 3 + 31) // 32 * 32,
            num_hidden_layers=shape.num_blocks,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=max(1, shape.num_heads // 2),
            max_position_embeddings=256,
            tie_word_embeddings=shape.tied,
            **_TOKENS,
        )
    )
    return model


_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
