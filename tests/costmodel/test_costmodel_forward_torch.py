"""The forward's work against what transformers' own modelling code does, segment by segment."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from costmodel import ModelSpec, spec_of_config
from costmodel.models.forward import forward_work

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIGS = {
    "opt": {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500,
            "max_position_embeddings": 512, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 512},
    "llama": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512},
    "qwen3": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "max_position_embeddings": 512},
    "roberta": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500,
                "max_position_embeddings": 512},
}  # fmt: skip


class LiveStorages(TorchDispatchMode):
    """Follows storages from allocation to death and counts the kernels that are not views."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.live = 0
        self.peak = 0
        self.kernels: list[str] = []
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(self._allocate(tensor) for tensor in fresh):
            self.kernels.append(str(func))
        return result

    def _allocate(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in self._alive:
            return False
        self._alive[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        self.live -= self._alive.pop(key)


@dataclass
class Bench:
    """A small real model and a way to run one of its segments alone."""

    family: str
    attention: str
    dtype: str
    is_padded: bool = False
    model: torch.nn.Module = field(init=False)
    spec: ModelSpec = field(init=False)

    def __post_init__(self) -> None:
        config = AutoConfig.for_model(self.family, **CONFIGS[self.family])
        config._attn_implementation = self.attention
        torch.manual_seed(0)
        auto = AutoModelForMaskedLM if self.family == "roberta" else AutoModelForCausalLM
        self.model = auto.from_config(config).to(DTYPES[self.dtype]).eval()
        self.spec = spec_of_config({"model_type": self.family, **CONFIGS[self.family]}, name=self.family)

    def runner(
        self, segment: str, batch: int, seq: int
    ) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        hidden = torch.randn(batch, seq, self.spec.hidden_size).to(DTYPES[self.dtype])
        tokens = torch.randint(0, self.spec.vocab_size, (batch, seq))
        given = [hidden, tokens, *self.model.parameters()]
        if segment == "head":
            return lambda: self._head(hidden, tokens), given
        if segment == "embed":
            return lambda: self._embed(tokens), given
        base = self.model.base_model
        paths = {"opt": "decoder.layers", "gpt2": "h", "roberta": "encoder.layer"}
        layers = base.get_submodule(paths.get(self.family, "layers"))
        kwargs: dict[str, Any] = {"attention_mask": None}
        if self.attention == "eager":
            mask = torch.zeros(batch, 1, seq, seq, dtype=DTYPES[self.dtype])
            kwargs["attention_mask"] = mask
            given.append(mask)
        elif self.is_padded:
            kwargs["attention_mask"] = torch.ones(batch, 1, seq, seq, dtype=torch.bool).tril()
            given.append(kwargs["attention_mask"])
        if self.spec.positions == "rotary":
            tables = base.rotary_emb(hidden, position_ids=torch.arange(seq)[None])
            kwargs["position_embeddings"] = tables
            given += tables
        return lambda: layers[1](hidden, **kwargs), given

    def _head(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        base = self.model.base_model
        if self.family == "roberta":
            logits = self.model.lm_head(hidden)
            return torch.nn.functional.cross_entropy(logits.view(-1, self.spec.vocab_size), tokens.view(-1))
        norm = (
            base.decoder.final_layer_norm
            if self.family == "opt"
            else getattr(base, "ln_f", None) or base.norm
        )
        hidden = norm(hidden)
        logits = self.model.lm_head(hidden)
        return self.model.loss_function(logits=logits, labels=tokens, vocab_size=self.spec.vocab_size)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        base = self.model.base_model
        if self.family == "opt":
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
            embedded = base.decoder.embed_tokens(tokens)
            return embedded + base.decoder.embed_positions(None, 0, position_ids=positions)
        if self.family == "roberta":
            return base.embeddings(tokens)
        if self.family == "gpt2":
            embedded = base.wte(tokens)
            return embedded + base.wpe(torch.arange(tokens.shape[1])[None])
        return base.embed_tokens(tokens)


def _track(bench: Bench, segment: str, batch: int, seq: int) -> tuple[LiveStorages, int]:
    run, given = bench.runner(segment, batch, seq)
    mode = LiveStorages(given)
    with torch.no_grad(), mode:
        output = run()
    return mode, output.untyped_storage().nbytes()


CASES = [
    ("opt", "sdpa", "float32"),
    ("opt", "eager", "float32"),
    ("opt", "sdpa", "bfloat16"),
    ("opt", "eager", "bfloat16"),
    ("llama", "sdpa", "float32"),
    ("llama", "eager", "float32"),
    ("llama", "sdpa", "bfloat16"),
    ("llama", "eager", "bfloat16"),
    ("gpt2", "sdpa", "float32"),
    ("gpt2", "eager", "bfloat16"),
    ("qwen3", "sdpa", "bfloat16"),
    ("qwen3", "eager", "float32"),
    ("roberta", "sdpa", "bfloat16"),
    ("roberta", "eager", "float32"),
]


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize(("family", "attention", "dtype"), CASES)
@pytest.mark.parametrize("segment", ["embed", "block.1", "head"])
@pytest.mark.parametrize(("batch", "seq"), [(3, 48), (1, 160)])
def test_workspace_is_the_peak_of_live_storages(family, attention, dtype, segment, batch, seq):
    bench = Bench(family, attention, dtype, is_padded=True)
    mode, output_bytes = _track(bench, segment, batch, seq)
    work = forward_work(bench.spec, segment, batch=batch, seq=seq, dtype=dtype, attention=attention)
    measured = max(mode.peak - output_bytes, 0)
    # 10 %: what is left out are a few numbers per row (norm statistics, labels, position indices).
    assert work.workspace_bytes == pytest.approx(measured, rel=0.10, abs=8 * (batch + 1) * seq)


@pytest.mark.parametrize(("family", "attention", "dtype"), CASES)
@pytest.mark.parametrize("segment", ["block.1", "head"])
def test_kernels_are_those_that_are_dispatched(family, attention, dtype, segment):
    bench = Bench(family, attention, dtype)
    mode, _ = _track(bench, segment, 3, 48)
    work = forward_work(bench.spec, segment, batch=3, seq=48, dtype=dtype, attention=attention)
    assert abs(work.num_kernels - len(mode.kernels)) <= 2, mode.kernels


def _fused_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)


@pytest.mark.parametrize(("family", "attention", "dtype"), CASES)
def test_flops_equal_an_independent_count(family, attention, dtype):
    bench = Bench(family, attention, dtype)
    tokens = torch.randint(0, bench.spec.vocab_size, (2, 40))
    # The counter knows CUDA's fused attention and, for want of an entry, counts none on a CPU.
    cpu_attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=cpu_attention) as counter:
        bench.model(tokens, labels=tokens, use_cache=False)
    works = [
        forward_work(bench.spec, segment, batch=2, seq=40, dtype=dtype, attention=attention, padded=True)
        for segment in bench.spec.segments
    ]
    # The counter, too, counts the masked half of fused attention, hence `padded`.
    assert sum(work.flops for work in works) == counter.get_total_flops()
