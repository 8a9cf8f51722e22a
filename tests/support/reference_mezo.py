"""A literal MeZO loop, written from its description and from nothing in this repository."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import DynamicCache, OPTForCausalLM

CACHE = "cache" if "cache" in inspect.signature(OPTForCausalLM.forward).parameters else "past_key_values"
"""What the installed transformers calls a cache."""


class LiteralMezo:
    """The loop: perturb all parameters, run the whole model, three times over, then update.

    ``sampling_order`` gives the order in which perturbations are drawn; registration order by default. With ``weights="copies"`` every
    point is made of the unperturbed parameters, in tensors of its own, which are thrown away. ``sample`` makes other perturbations
    than normals: given seed, step and perturbation, it returns a function of a parameter and its number.
    """

    def __init__(
        self,
        model,
        *,
        epsilon,
        weight_decay=0.0,
        sampling_order=None,
        loss=None,
        central=True,
        weights="serial",
        sample=None,
    ):
        self.model = model.eval()
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.central = central
        self.copies = weights == "copies"
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.named = sampling_order(trainable) if sampling_order else trainable
        self.numbers = {name: number for number, (name, _) in enumerate(trainable)}
        self.sample = sample or _normals
        self.num_steps = 0
        self.loss = loss or (lambda batch: model(**batch).loss)

    def _sampled(self, seed, perturbation):
        sample = self.sample(seed, self.num_steps, perturbation)
        for name, p in self.named:
            yield name, p, sample(p.data, self.numbers[name])

    def _perturb(self, seed, perturbation, scale):
        for _, p, z in self._sampled(seed, perturbation):
            p.data = p.data + (scale * z) * self.epsilon

    @torch.no_grad()
    def step(self, batch, seeds, learning_rate):
        """Return [(loss_plus, loss_other, g)] of each perturbation, after updating."""
        rows = []
        base = None if self.central else self.loss(batch)
        for perturbation, seed in enumerate(seeds):
            if self.copies:
                plus = self._loss_at(batch, seed, perturbation, 1)
                other = self._loss_at(batch, seed, perturbation, -1) if self.central else base
            else:
                self._perturb(seed, perturbation, 1)
                plus, other, way_back = self.loss(batch), base, -1
                if self.central:
                    self._perturb(seed, perturbation, -2)
                    other, way_back = self.loss(batch), 1
                self._perturb(seed, perturbation, way_back)
            g = ((plus - other) / (2 * self.epsilon if self.central else self.epsilon)).item()
            rows.append((plus.item(), other.item(), g))
        for perturbation, seed in enumerate(seeds):
            self._update(seed, perturbation, rows[perturbation][2] / len(seeds), learning_rate)
        self.num_steps += 1
        return rows

    def _loss_at(self, batch, seed, perturbation, sign):
        theta = [p.data for _, p in self.named]
        self._perturb(seed, perturbation, sign)
        loss = self.loss(batch)
        for (_, p), kept in zip(self.named, theta, strict=True):
            p.data = kept
        return loss

    def _update(self, seed, perturbation, g, learning_rate):
        for name, p, z in self._sampled(seed, perturbation):
            if (
                perturbation == 0
                and "bias" not in name
                and "layer_norm" not in name
                and "layernorm" not in name
            ):
                p.data = p.data - learning_rate * (g * z + self.weight_decay * p.data)
            else:
                p.data = p.data - learning_rate * (g * z)


def _normals(seed, _step, _perturbation):
    torch.manual_seed(seed)
    return lambda p, _: torch.normal(mean=0, std=1, size=p.size(), device=p.device, dtype=p.dtype)


def execution_order(named):
    """Sample what the head alone reads after the blocks, wherever it is registered."""
    late = [pair for pair in named if "final_layer_norm" in pair[0] and "layers" not in pair[0]]
    late += [pair for pair in named if "project_out" in pair[0]]
    late += [pair for pair in named if "lm_head" in pair[0]]
    names = {name for name, _ in late}
    return [pair for pair in named if pair[0] not in names] + late


def prefix_parts(model):
    """Keys and values of a prefix, block by block."""
    return [p for name, p in model.named_parameters() if name.endswith(("prefix_keys", "prefix_values"))]


class CachedPrefix(nn.Module):
    """A frozen model behind a prefix, through transformers' own cache: real tokens keep their positions.

    ``parts`` are the keys and values of each block in turn, of shape (virtual tokens, heads * width).
    """

    def __init__(self, model, parts):
        super().__init__()
        self.parts = nn.ParameterList(part.detach().clone() for part in parts)
        self.model = model.requires_grad_(False)
        self.config = model.config

    def forward(self, input_ids, attention_mask, labels=None):
        rows, length = input_ids.shape
        num_heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        cache = DynamicCache()
        for i in range(len(self.parts) // 2):
            keys, values = (
                part.view(part.shape[0], num_heads, -1).permute(1, 0, 2).expand(rows, -1, -1, -1)
                for part in self.parts[2 * i : 2 * i + 2]
            )
            cache.update(keys, values, i)
        positions = torch.arange(length).expand(rows, -1)
        if self.config.model_type == "opt":
            positions = attention_mask.cumsum(1) * attention_mask - 1
        seen = torch.cat([torch.ones(rows, self.parts[0].shape[0], dtype=torch.long), attention_mask], 1)
        return self.model(
            input_ids=input_ids,
            attention_mask=seen,
            labels=labels,
            position_ids=positions,
            **{CACHE: cache},
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns, so that -0.0 differs from 0.0 and NaN equals itself."""
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().contiguous().view(width)


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    """Names of parameters that differ in a bit."""
    theirs = dict(other.named_parameters())
    return [name for name, p in model.named_parameters() if not torch.equal(bits(p), bits(theirs[name]))]
