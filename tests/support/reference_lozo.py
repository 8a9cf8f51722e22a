"""A literal LoZO loop, written from the paper's equations and the published description of its code, and from nothing in this repository."""

from __future__ import annotations

import torch


class LiteralLozo:
    """Perturb every matrix by ``ε·U·Vᵀ`` and all else by ``ε·z``; ``V`` is drawn every `lazy_steps` steps and kept.

    ``scaling``: ``"lozo"`` divides the update of a matrix by the rank, ``"factorised"`` both perturbation and update by its root.
    ``"released"`` divides nothing, and draws for the update without drawing ``V``, whatever the perturbation drew.
    """

    def __init__(self, model, *, epsilon, rank, lazy_steps, scaling="lozo", weight_decay=0.0, loss=None):
        self.model = model.eval()
        self.epsilon, self.rank, self.lazy_steps, self.scaling = epsilon, rank, lazy_steps, scaling
        self.weight_decay = weight_decay
        self.loss = loss or (lambda batch: model(**batch).loss)
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.rights = {}
        self.num_steps = 0

    def _perturbations(self, seed, *, for_update=False):
        torch.manual_seed(seed)
        opens = self.num_steps % self.lazy_steps == 0
        for name, p in self.named:
            if p.dim() != 2:
                yield name, p, torch.normal(mean=0, std=1, size=p.size(), dtype=p.dtype), 1.0
                continue
            if opens and not (for_update and self.scaling == "released"):
                self.rights[name] = torch.randn(p.size(1), self.rank, dtype=p.dtype)
            z = torch.randn(p.size(0), self.rank, dtype=p.dtype) @ self.rights[name].t()
            yield (
                name,
                p,
                z / self.rank**0.5 if self.scaling == "factorised" else z,
                self.rank if self.scaling == "lozo" else 1.0,
            )

    def _perturb(self, seed, scale):
        for _, p, z, _ in self._perturbations(seed):
            p.data = p.data + (scale * z) * self.epsilon

    @torch.no_grad()
    def step(self, batch, seed, learning_rate):
        """Return (loss_plus, loss_minus, g), after updating."""
        self._perturb(seed, 1)
        plus = self.loss(batch)
        self._perturb(seed, -2)
        minus = self.loss(batch)
        self._perturb(seed, 1)
        g = ((plus - minus) / (2 * self.epsilon)).item()
        for name, p, z, divisor in self._perturbations(seed, for_update=True):
            step = (g / divisor) * z
            if "bias" not in name and "layer_norm" not in name and "layernorm" not in name:
                step = step + self.weight_decay * p.data
            p.data = p.data - learning_rate * step
        self.num_steps += 1
        return plus.item(), minus.item(), g
