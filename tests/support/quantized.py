"""Directories that compressed-tensors writes, and such as GPTQ and AWQ write, of tiny models."""

from __future__ import annotations

import copy
import json

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.tiny import model_of


def compressed(name, folder, layout, *, dtype=torch.float16, inputs=None, changed=None, **weights):
    """Let compressed-tensors quantize a tiny model and write it; return the model with the numbers that its quantized values stand for."""
    model = model_of(name, dtype, **(changed or {}))
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=arguments, input_activations=inputs, format=layout
    )
    heads = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and "layers." not in path
    ]
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=heads, format=layout)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            weight = module.weight.data
            shape = {"tensor": (1, -1), "channel": (len(weight), 1, -1)}.get(
                arguments.strategy, (len(weight), -1, arguments.group_size or 1)
            )
            least, most = (getattr(weight.view(shape), reduce)(-1) for reduce in ("amin", "amax"))
            scales, zeros = calculate_qparams(least, most, arguments)
            module.weight_scale.data = scales.to(dtype).view(module.weight_scale.shape)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zeros.view(module.weight_zero_point.shape)
    compressor = ModelCompressor.from_pretrained_model(model, layout)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    numbers = copy.deepcopy(model)
    compressor.decompress_model(numbers)
    return numbers


def packed_words(qvalues, order=range(8)):
    """Put 4-bit quantized values of the last dimension eight in a 32-bit word, the one at ``order[i]`` in its bits 4i to 4i+3."""
    eights = qvalues.astype(np.uint32).reshape(*qvalues.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], dtype=np.uint32)
    for place, column in enumerate(order):
        words |= eights[..., column] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def transposed_layout(name, folder, tool, *, group=16, symmetric=False):
    """Write a tiny model as GPTQ or AWQ lays quantized values of 4 bits out, of random quantized values; return weights by layer, in float64."""
    model_of(name, torch.float16).save_pretrained(folder)
    tensors, rng, weights = load_file(folder / "model.safetensors"), np.random.default_rng(5), {}
    for key in [
        key for key in tensors if key.endswith("_proj.weight") or (".fc" in key and key.endswith(".weight"))
    ]:
        layer = key.removesuffix(".weight")
        outputs, inputs = tensors.pop(key).shape
        size = inputs if group == -1 else group
        groups = inputs // size
        qvalues = rng.integers(0, 16, (inputs, outputs))
        zeros = np.full((groups, outputs), 8) if symmetric else rng.integers(1, 16, (groups, outputs))
        scales = torch.from_numpy(rng.uniform(0.001, 0.01, (groups, outputs))).half()
        weights[layer] = ((qvalues - zeros.repeat(size, 0)) * scales.double().numpy().repeat(size, 0)).T
        if tool == "gptq":
            tensors[f"{layer}.qweight"] = packed_words(qvalues.T).T.contiguous()
            tensors[f"{layer}.qzeros"] = packed_words(zeros - 1)
            tensors[f"{layer}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // size
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            tensors[f"{layer}.qweight"], tensors[f"{layer}.qzeros"] = (
                packed_words(part, order) for part in (qvalues, zeros)
            )
        tensors[f"{layer}.scales"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    output = {"quant_method": tool, "bits": 4, "group_size": group}
    output |= (
        {"desc_act": False, "sym": symmetric} if tool == "gptq" else {"zero_point": True, "version": "gemm"}
    )
    amend(folder, quantization_config=output)
    return weights


def amend(folder, **fields):
    """Change fields of a config.json; those of ``quantization_config`` with dots between their names."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        *path_to, last = name.split("__")
        place = config
        for step in path_to:
            place = place[step]
        place[last] = value
    path.write_text(json.dumps(config))
