"""Low-rank adapters beside the linears of the blocks: the only parameters that are then tuned."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.formats.low_bits import QuantConfig
from costmodel.models.configs import LoRA
from executors.files import write_atomically
from executors.low_bits.linear import (
    Deferred,
    become_plain,
    become_quantizable,
    deferred_numbers,
    is_transposed,
)
from executors.low_bits.quantized import QuantizedTensor
from executors.models.blocks import fills_masks, find_blocks, linears_of
from executors.models.weight_files import write_tensors
from topology.errors import ModelError

_HOOK = "_zosim_lora_hook"
_TENSOR_NAMES = (
    "lora_A",
    "lora_B",
    "lora_scale",
    "lora_closed_A",
    "lora_closed_B",
    "lora_lost",
    "lora_used",
    "lora_lazy_steps",
    "has_lora_side_path",
)

_QUANTIZED_SPAN = 2.0
"""Largest number of A and B that has a code, over the largest that A begins with."""

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the path of a linear."""


def attach_lora(
    model: nn.Module, lora: LoRA, *, dtype: torch.dtype | None = None, quant_config: QuantConfig | None = None
) -> None:
    """Freeze a model, and add ``α/r · B A x`` beside each linear of its blocks that `lora` names.

    - `model`: changed in place. Adapters are called ``lora_A`` and ``lora_B`` under the linear that they stand beside.
    - `lora`: rank, names of the linears, ``α``, and the seed of ``A``, which is uniform as torch's linear layers are; ``B``
      starts at zero.
    - `dtype`: of the adapters; by default that of the linear that each stands beside.
    - `quant_config`: how linear layers are kept, and with them perhaps the adapters.

    Raises ModelError if the model has no linear of a name that is asked for.

    .. [1] E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685, equation 3.
    """
    linears = list(block_linears(model))
    missing = [name for name in lora.target_modules if not any(name == path for path, _, _, _ in linears)]
    if missing:
        raise ModelError(
            f"no linear of {type(model).__name__} is called {', '.join(missing)}",
            hint="linears are " + ", ".join(dict.fromkeys(path for path, _, _, _ in linears)),
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(lora.seed)
    for name, module, inputs, outputs in linears:
        if name in lora.target_modules:
            _attach(module, inputs, outputs, lora, generator, dtype)
            if quant_config is not None and quant_config.of_adapters is not None:
                for layer in (module.lora_A, module.lora_B):
                    _hold_quantized(layer, quant_config, _bound(inputs))


def merge_lora(model: nn.Module) -> None:
    """Add every adapter to the linear that it stands beside, and remove it."""
    with torch.no_grad():
        for _, module, _, _ in block_linears(model):
            if not hasattr(module, _HOOK):
                continue
            # Quantized values become numbers, to which something can be added.
            for layer in (module, module.lora_A, module.lora_B):
                become_plain(layer)
            inner, outer = joined_factors(module)
            product = outer @ inner
            module.weight += product if isinstance(module, nn.Linear) else product.T
            getattr(module, _HOOK).remove()
            for name in [name for name in (*_TENSOR_NAMES, _HOOK) if hasattr(module, name)]:
                delattr(module, name)


def save_adapters(
    model: nn.Module,
    directory: str | Path,
    dtype: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the adapters as PEFT reads them: ``adapter_model.safetensors`` and ``adapter_config.json``."""
    carrying = [(name, module) for name, module, _, _ in block_linears(model) if hasattr(module, _HOOK)]
    first = carrying[0][1]
    is_joined = hasattr(first, "lora_used")
    rank = first.lora_A.weight.shape[0] + (first.lora_used if is_joined else 0)
    named: dict[str, Tensor | Deferred] = {}
    if not is_joined:
        named |= {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}
        named |= {name: of for name, of in deferred_numbers(model, dtype).items() if ".lora_" in name}
    else:
        for path, module in model.named_modules():
            if hasattr(module, _HOOK):
                inner, outer = (factor.detach() for factor in joined_factors(module))
                named |= {f"{path}.lora_A.weight": inner, f"{path}.lora_B.weight": outer}
    write_peft(
        model,
        directory,
        named,
        rank=rank,
        alpha=float(rank) if is_joined else first.lora_scale * rank,
        targets=sorted({name for name, _ in carrying}),
        is_transposed=is_transposed(first),
        dtype=dtype,
        facts=facts,
    )


def write_peft(
    model: nn.Module,
    directory: str | Path,
    factors: Mapping[str, Tensor | Deferred],
    *,
    rank: int,
    alpha: float,
    targets: list[str],
    is_transposed: bool,
    dtype: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write adapters beside linears of the blocks that end in these names as PEFT reads them: ``PATH.lora_A.weight`` and so on."""
    inside = {id(module) for _, module, _, _ in block_linears(model)}
    called = [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] in targets]
    if any(id(module) not in inside for _, module in called):
        # PEFT matches ends of names, and would put adapters beside layers of the head that are called so, too.
        targets = [path for path, module in called if id(module) in inside]
    config = {
        "peft_type": "LORA",
        "task_type": None if fills_masks(model) else "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "base_model_name_or_path": getattr(model.config, "_name_or_path", None),
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / PEFT_CONFIG, json.dumps(config, indent=2) + "\n")
    prefixed = {PEFT_PREFIX + name: tensor for name, tensor in factors.items()}
    write_tensors(prefixed, directory / PEFT_WEIGHTS, dtype, facts)


def _attach(
    module: Any,
    inputs: int,
    outputs: int,
    lora: LoRA,
    generator: torch.Generator,
    dtype: torch.dtype | None,
) -> None:
    like = {"dtype": dtype or module.weight.dtype, "device": module.weight.device}
    module.lora_A = nn.Linear(inputs, lora.rank, bias=False, **like)
    module.lora_B = nn.Linear(lora.rank, outputs, bias=False, **like)
    module.lora_scale = lora.scale
    bound = _bound(inputs)
    with torch.no_grad():
        module.lora_A.weight.copy_(
            torch.empty(lora.rank, inputs).uniform_(-bound, bound, generator=generator)
        )
        module.lora_B.weight.zero_()
    add = _add_adapter
    if closed := lora.closed_rank:
        # A is drawn anew once an interval, and not tuned.
        module.lora_A.weight.requires_grad_(requires_grad=False)
        for name, shape in (("closed_A", (closed, inputs)), ("closed_B", (outputs, closed)), ("lost", (1,))):
            zeros = nn.Parameter(torch.zeros(shape, **like), requires_grad=False)
            module.register_parameter(f"lora_{name}", zeros)
        module.lora_used, module.lora_lazy_steps = closed, lora.lazy_steps
        module.has_lora_side_path = False
        add = _add_increments
    setattr(module, _HOOK, module.register_forward_hook(add))


def _bound(inputs: int) -> float:
    """Return the largest number that A begins with."""
    return 1 / math.sqrt(inputs)


def _hold_quantized(linear: nn.Linear, quant_config: QuantConfig, bound: float) -> None:
    """Let an adapter's factor be quantized values, on a grid that spans more than A does: B, all zeros, says nothing of what it will hold."""
    how = quant_config.of_adapters
    assert how is not None
    layer = become_quantizable(linear, how)
    qvalues = QuantizedTensor.empty(how, layer.weight.shape, layer.weight.device)
    qvalues.scales.fill_(_QUANTIZED_SPAN * bound / qvalues.grid.high)
    qvalues.write(layer.weight.data)
    layer.quantized = qvalues
    layer.weight.data = layer.weight.data.new_zeros(()).expand(layer.weight.shape)


def _add_adapter(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    # The base may still be in its file's format, until it moves.
    inputs = arguments[0].to(module.lora_A.weight.dtype)
    adapted: Tensor = output + (module.lora_B(module.lora_A(inputs)) * module.lora_scale).to(output.dtype)
    return adapted


def _add_increments(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    if module.has_lora_side_path:  # whoever runs the forward adds them together with probes
        return output
    inner, outer = joined_factors(module)
    narrow = nn.functional.linear(arguments[0].to(inner.dtype), inner)
    added: Tensor = output + nn.functional.linear(narrow, outer).to(output.dtype)
    return added


def joined_factors(module: Any) -> tuple[Tensor, Tensor]:
    """Return what an adapter adds as one pair (rank, inputs) and (outputs, rank), the open increment before the closed ones."""
    inner, outer = computable(module.lora_A.weight), computable(module.lora_B.weight) * module.lora_scale
    if (used := getattr(module, "lora_used", 0)) == 0:
        return inner, outer
    return (
        torch.cat((inner, computable(module.lora_closed_A[:used]))),
        torch.cat((outer, computable(module.lora_closed_B[:, :used])), 1),
    )


def computable(factor: Tensor) -> Tensor:
    """Return a factor that lies on the host in 8 bits as numbers that torch multiplies."""
    return factor.float() if factor.dtype.itemsize == 1 else factor


def block_linears(model: nn.Module) -> Iterator[tuple[str, Any, int, int]]:
    """Yield (name, module, inputs, outputs) of every linear of the blocks."""
    for block in find_blocks(model):
        for path, module, inputs, outputs in linears_of(block):
            yield path.rpartition(".")[2], module, inputs, outputs
